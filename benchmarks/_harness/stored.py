"""A table of finished runs in a CSV file, from which the next call goes on."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import pandas as pd
from joblib import Parallel, delayed

Run = dict[str, Any]


def completed(
    arguments: Namespace, runs: Sequence[Run], train: Callable[..., Any], *args: Any, size: int = 0
) -> pd.DataFrame:
    """Return the table in the file `results`, after `limit` or all of the runs that it lacks.

    `train` takes the values of a run, and returns what is added to it; with a size, it takes so
    many runs, and returns their rows. Each row is stored as soon as it is there.
    """
    path = arguments.results
    is_there = path is not None and path.exists()
    rows = pd.read_csv(path).to_dict("records") if is_there else []
    texts = pd.read_csv(path, dtype=str) if is_there else pd.DataFrame(columns=[*runs[0]])
    done = set(texts[[*runs[0]]].itertuples(index=False, name=None))
    limit = 0 if getattr(arguments, "report", False) else arguments.limit
    left = [run for run in runs if tuple(map(_text, run.values())) not in done][:limit]
    groups = [left[start : start + (size or 1)] for start in range(0, len(left), size or 1)]
    call = delayed(train if size else partial(_train_each, train))
    parallel = Parallel(arguments.jobs, return_as="generator_unordered")
    for row in chain.from_iterable(parallel(call(group, *args) for group in groups)):
        if rows and row.keys() != rows[0].keys():
            raise ValueError(
                f"the columns of a table must stay the same, but {sorted(row)} come after "
                f"{sorted(rows[0])}. Move {path} away, or give another one by --results."
            )
        rows.append(row)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            line = pd.DataFrame([row], columns=[*rows[0]])
            header = not path.exists()
            line.to_csv(path, mode="a", header=header, index=False, float_format="%.6g")
    return pd.DataFrame(rows)


def _train_each(train: Callable[..., Run], runs: Sequence[Run], *args: Any) -> list[Run]:
    return [run | train(*run.values(), *args) for run in runs]


def _text(value: Any) -> str:
    """Write a value as the file has it."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
