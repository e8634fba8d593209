"""Count the files and functions of the library that a call passes through."""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from sklearn.datasets import load_digits

import relflat_sk
from relflat_sk import FlatMinimaSearch, FlatnessScorer, RelativeFlatnessRegularizedClassifier

LIBRARY = str(Path(relflat_sk.__file__).parent)
MOST = {"a score": 25, "a fit of one step": 32, "a search of two candidates": 42}


def passed(call: Callable[[], Any]) -> tuple[set[str], set[tuple[str, int]]]:
    """Return the files and the functions of the library that a call enters."""
    files: set[str] = set()
    functions: set[tuple[str, int]] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(LIBRARY):
            files.add(name)
            functions.add((name, frame.f_code.co_firstlineno))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return files, functions


def calls() -> dict[str, Callable[[], Any]]:
    """Return the calls that are counted, each made once before, when modules are imported."""
    X, y = load_digits(return_X_y=True)
    X, y = X[:64] / 16, y[:64]
    net = RelativeFlatnessRegularizedClassifier(
        max_epochs=1, batch_size=64, random_state=0, verbose=0
    )
    space = {"lr": [0.003, 0.01]}
    fitted = net.fit(X, y)
    return {
        "a score": lambda: FlatnessScorer(non_minimum="accept")(fitted, X, y),
        "a fit of one step": lambda: net.fit(X, y),
        "a search of two candidates": lambda: FlatMinimaSearch(net, space, goal=None).fit(X, y),
    }


def main() -> int:
    warnings.simplefilter("ignore")  # one step reaches no minimum
    missed = 0
    for name, call in calls().items():
        files, functions = passed(call)
        verdict = "ok" if len(files) <= MOST[name] else "OVER"
        missed += verdict != "ok"
        print(f"{name}: {len(files)} files (at most {MOST[name]}: {verdict}), ", end="")
        print(f"{len(functions)} functions")
    return int(missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
