"""Print versions, devices and extras, for bug reports: ``python -m relflat_sk``."""

import platform
import re
from importlib.metadata import PackageNotFoundError, requires, version
from os import cpu_count

import torch


def _describe() -> str:
    """Return versions, devices, and for each extra whether its packages are installed."""
    rows = {
        "relflat_sk": version("relflat_sk"),
        "Python": f"{platform.python_version()}, {platform.platform()}",
        "cores": f"{cpu_count()}, {torch.get_num_threads()} threads of torch",
        "devices": ", ".join(_devices()),
    }
    for extra, names in _requirements().items():
        title = f"extra {extra!r}" if extra else "required"
        rows[title] = ", ".join(f"{name} {_installed(name)}" for name in names)
    return "\n".join(f"{title}: {text}" for title, text in rows.items())


def _devices() -> list[str]:
    """Return the devices that torch can use."""
    cuda = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ["cpu", *cuda, *(["mps"] if torch.backends.mps.is_available() else [])]


def _requirements() -> dict[str, list[str]]:
    """Return the names of the required packages (under "") and of those of each extra."""
    found: dict[str, list[str]] = {"": []}
    for line in requires("relflat_sk") or []:
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
