"""The command lines of the benchmarks."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

# the .npz of CIFAR-10, which `--data PATH` or this variable names; random images without it
IMAGES: Any = os.environ.get("RELFLAT_SK_CIFAR10") or str


def read_options(
    doc: str | None, argv: Sequence[str] | None = None, **defaults: Any
) -> argparse.Namespace:
    """Read ``--quick``, and an option for each default.

    A pair has the usual value and that of a quick run. Of a mapping some keys are taken, by default
    all. A list takes several values, a type a value of this type or None, and False is a flag.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--quick", action="store_true", help="smoke run without verdict")
    for name, default in defaults.items():
        is_pair = isinstance(default, tuple)
        value = default[parser.parse_known_args(argv)[0].quick] if is_pair else default
        parser.add_argument(f"--{name.replace('_', '-')}", **_describe(value))
    return parser.parse_args(argv)


def _describe(default: Any) -> dict[str, Any]:
    """Turn a default into arguments of `add_argument`."""
    if default is False:
        return {"action": "store_true"}
    if isinstance(default, type):
        return {"type": default}
    if isinstance(default, Mapping):
        names = [name.replace("%", "%%") for name in default]
        choices = {"choices": list(default), "default": list(default), "metavar": "NAME"}
        return {"nargs": "+", **choices, "help": f"of {', '.join(names)} (default: all)"}
    values = list(default) if isinstance(default, list | range) else [default]
    several = {} if values == [default] else {"nargs": "+"}
    usual = {"default": default, "help": "(default: %(default)s)"}
    return {"type": type(values[0]), **usual, **several}
