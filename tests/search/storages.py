"""Storages of each kind for tests, and a PostgreSQL server of their own."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

FILES = {"sqlite": "minima.db", "journal": "minima.log"}

# -- PostgreSQL ----------------------------------------------------------------------------------

PLACES = ("/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin", "/opt/homebrew/opt/postgresql*/bin")
PATIENCE = 60  # seconds, on a machine however slow
SETTINGS = {
    "fsync": "off",  # the machine does not lose its power in a test
    "listen_addresses": "",  # a socket in a folder is always free, a port is not
    "max_connections": "200",
}


def find_postgresql() -> Path | None:
    """Return the folder with the programs of the newest PostgreSQL server, if one is installed."""
    found = shutil.which("initdb")
    folders = [Path(found).parent] if found else []
    for place in PLACES:
        folders += sorted(Path("/").glob(place[1:]))
    return next((one for one in reversed(folders) if (one / "postgres").exists()), None)


def ordinary_user() -> dict[str, Any]:
    """Return arguments of `subprocess` for a user that a server may run as: never as root."""
    if os.getuid():
        return {}
    names = {one.pw_name for one in pwd.getpwall()}
    user = pwd.getpwnam("postgres" if "postgres" in names else "nobody")
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


@dataclass(frozen=True)
class Database:
    """An empty database of a server."""

    server: "Server"
    name: str

    @property
    def url(self) -> str:
        return f"postgresql+psycopg2://tester@/{self.name}?host={self.server.folder}"

    @contextmanager
    def session(self) -> Iterator[Any]:
        """Connect without transactions; yields a function that executes SQL."""
        with self.server.session(self.name) as execute:
            yield execute


class Server:
    """A PostgreSQL server in a folder, which nobody else uses."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self.programs = programs
        self.folder = folder
        self.user = ordinary_user()
        self.numbers = count()
        self.process: subprocess.Popen[bytes] | None = None
        if self.user:
            os.chown(folder, self.user["user"], self.user["group"])
        subprocess.run(
            [programs / "initdb", "--username=tester", "--auth=trust", "--no-sync",
             "--encoding=UTF8", "--no-locale", f"--pgdata={folder / 'data'}"],
            check=True, cwd=folder, stdout=subprocess.DEVNULL, **self.user,
        )  # fmt: skip

    def start(self) -> None:
        """Start the server and wait until it answers; again if an earlier one has not ended yet."""
        from psycopg2 import OperationalError

        settings = [text for name, value in SETTINGS.items() for text in ("-c", f"{name}={value}")]
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if self.process is None or self.process.poll() is not None:
                with (self.folder / "log").open("ab") as log:
                    self.process = subprocess.Popen(
                        [self.programs / "postgres", "-D", self.folder / "data",
                         "-k", self.folder, *settings],
                        cwd=self.folder, stdout=log, stderr=log, **self.user,
                    )  # fmt: skip
            try:
                with self.session():
                    return
            except OperationalError:
                time.sleep(0.1)
        raise RuntimeError((self.folder / "log").read_text(encoding="utf-8")[-2000:])

    def kill(self) -> None:
        """Kill the server as a lack of memory would; its other processes follow."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """End the server, at once."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGQUIT)
            self.process.wait()

    @contextmanager
    def session(self, database: str = "postgres") -> Iterator[Any]:
        import psycopg2

        connection = psycopg2.connect(host=str(self.folder), user="tester", dbname=database)
        connection.autocommit = True
        try:
            yield connection.cursor().execute
        finally:
            connection.close()

    @contextmanager
    def database(self) -> Iterator[Database]:
        """Create a database, and drop it with all connections to it."""
        name = f"minima{next(self.numbers)}"
        with self.session() as execute:
            execute(f"CREATE DATABASE {name}")
        try:
            yield Database(self, name)
        finally:
            with self.session() as execute:
                execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


@contextmanager
def running_server(programs: Path) -> Iterator[Server]:
    # pytest's own folders are closed to the user that the server runs as
    with tempfile.TemporaryDirectory(prefix="postgresql", ignore_cleanup_errors=True) as folder:
        server = Server(programs, Path(folder))
        server.start()
        try:
            yield server
        finally:
            server.stop()
