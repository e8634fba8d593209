"""Print versions, devices and extras, for bug reports: ``python -m relflat_sk``."""

import platform
import re
from importlib.metadata import PackageNotFoundError, requires, version
from os import cpu_count

import torch

from relflat_sk import __version__


def _describe() -> str:
    """Return versions, devices, and for each extra whether its packages are installed."""
    rows = {
        "relflat_sk": __version__,
        "Python": f"{platform.python_version()}, {platform.platform()}",
        "cores": f"{cpu_count()}, {torch.get_num_threads()} threads of torch",
        "devices": ", ".join(_devices()),
    }
    requirements = _requirements()
    if not requirements:
        rows["required"] = "unknown, because relflat_sk is imported but not installed"
    for extra, names in requirements.items():
        title = f"extra {extra!r}" if extra else "required"
        rows[title] = ", ".join(f"{name} {_installed(name)}" for name in names)
    return "\n".join(f"{title}: {text}" for title, text in rows.items())


def _devices() -> list[str]:
    """Return the devices that torch can use."""
    cuda = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ["cpu", *cuda, *(["mps"] if torch.backends.mps.is_available() else [])]


def _requirements() -> dict[str, list[str]]:
    """Return the names of the required packages (under "") and of those of each extra."""
    try:
        lines = requires("relflat_sk") or []
    except PackageNotFoundError:  # a folder of sources that nobody installed
        return {}
    found: dict[str, list[str]] = {"": []}
    for line in lines:
        name = re.match(r"[\w.-]+", line)
        extra = re.search(r"extra == ['\"](.+?)['\"]", line)
        if name:
            found.setdefault(extra[1] if extra else "", []).append(name[0])
    return found


def _installed(name: str) -> str:
    """Return the installed version of a package."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    print(_describe())
