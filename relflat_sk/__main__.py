"""Print versions for bug reports: ``python -m relflat_sk``."""

import platform
from importlib.metadata import requires, version

import torch

from relflat_sk import __version__

if __name__ == "__main__":
    print(f"relflat_sk {__version__}, Python {platform.python_version()}, {platform.platform()}")
    for line in requires("relflat_sk") or []:
        if "extra ==" not in line:
            name = line.partition(">")[0].strip()
            print(name, version(name))
    print("CUDA", torch.version.cuda if torch.cuda.is_available() else "not available")
