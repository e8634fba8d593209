"""A table of finished runs in a CSV file, from which the next call goes on."""

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pandas as pd
from joblib import Parallel, delayed


class Minima:
    """A table of finished minima in a CSV file, one row each, which a later run continues."""

    def __init__(self, arguments: Namespace) -> None:
        self.path, self.limit = arguments.results, arguments.limit
        self.jobs = arguments.jobs
        known = self.path is not None and self.path.exists()
        self.rows = pd.read_csv(self.path).to_dict("records") if known else []
        self._texts = pd.read_csv(self.path, dtype=str).to_dict("records") if known else []

    def todo(self, runs: Sequence[dict[str, Any]], size: int = 1) -> Iterator[list[dict[str, Any]]]:
        """Yield the runs that are not finished, some at a time."""
        done = {tuple(row[key] for key in runs[0]) for row in self._texts}
        left = [run for run in runs if tuple(map(_text, run.values())) not in done][: self.limit]
        for start in range(0, len(left), size):
            yield left[start : start + size]

    def complete(
        self,
        runs: Sequence[dict[str, Any]],
        train: Callable[..., Any],
        *args: Any,
        size: int | None = None,
    ) -> None:
        """Add the rows of the runs that are not finished.

        `train` takes the values of a run, and returns what is added to it; with a size, it takes so
        many runs, and returns their rows.
        """
        call = delayed(train if size else partial(_train_each, train))
        calls = (call(some, *args) for some in self.todo(runs, size or 1))
        for rows in Parallel(self.jobs, return_as="generator_unordered")(calls):
            for row in rows:
                self.add(row)

    def add(self, row: dict[str, Any]) -> None:
        """Append a minimum to the table and the file."""
        if self.rows and row.keys() != self.rows[0].keys():
            raise ValueError(
                f"the columns of a table must stay the same, but {sorted(row)} come after "
                f"{sorted(self.rows[0])}. Move {self.path} away, or give another one by --results."
            )
        self.rows.append(row)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            line = pd.DataFrame([row], columns=list(self.rows[0]))
            header = not self.path.exists()
            line.to_csv(self.path, mode="a", header=header, index=False, float_format="%.6g")

    def frame(self) -> pd.DataFrame:
        """Return the table."""
        return pd.DataFrame(self.rows)


def _train_each(
    train: Callable[..., dict[str, Any]], runs: Sequence[dict[str, Any]], *args: Any
) -> list[dict[str, Any]]:
    return [run | train(*run.values(), *args) for run in runs]


def _text(value: Any) -> str:
    """Write a value as the file has it."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
