"""The columns of a table of minima, which `relflat_sk.minima` documents for users."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

__all__ = [
    "DEPTH",
    "FIXED",
    "LOSSES",
    "PARAM_PREFIX",
    "SCORES",
    "STATUS",
    "column_of",
    "is_complete",
    "is_converged",
    "is_reserved",
    "is_score",
    "measure_columns",
    "numeric_column",
]

PARAM_PREFIX = "param_"
LOSSES = ("train_loss", "test_loss", "generalization_gap")
SCORES = ("train_score", "test_score")
DEPTH = "depth"
STATUS = ("converged", "ended_by", "seconds", "state", "reason")
FIXED = ("trial", *LOSSES, DEPTH, *SCORES, STATUS[0], "comparable", *STATUS[1:], "rank")

# what a trial records beside its columns, and columns that only some tables have
_OTHERS = ("artifact_id", "weights_checksum", "curves", "failed", "seed", "in_fleet", "pareto")


def is_reserved(name: str) -> bool:
    """Return whether a name has a meaning of its own in tables of minima and their trials."""
    return name in FIXED or name in _OTHERS or name.startswith(PARAM_PREFIX)


def column_of(measure: str | Callable[..., Any]) -> str:
    """Return the column of a measure: its name, or that of its function."""
    if not callable(measure):
        return measure
    name = str(getattr(measure, "__name__", "<lambda>"))
    if name == "<lambda>":
        raise ValueError(
            f"the measure {measure!r} has no name for its column: define it by def, or name it by "
            "register_measure(name, function), and pass that name."
        )
    return name


def measure_columns(table: pd.DataFrame) -> list[str]:
    """Return the names of the measures in a table of minima."""
    return [
        str(name)
        for name in table.columns
        if name not in FIXED and not str(name).startswith(PARAM_PREFIX) and _is_numeric(table[name])
    ]


def numeric_column(table: pd.DataFrame, name: str, *, argument: str) -> NDArray[np.float64]:
    """Return one column of a table of minima as floats. Shapes: returns (n_minima,)."""
    if name in table.columns and _is_numeric(table[name]):
        return table[name].to_numpy(dtype=np.float64, na_value=np.nan)
    problem = "is not numeric" if name in table.columns else "is not a column of these minima"
    known = (*LOSSES, DEPTH, *SCORES, "seconds")
    others = [column for column in table.columns if column in known]
    raise ValueError(
        f"{argument}={name!r} {problem}. Expected one of the measures {measure_columns(table)} "
        f"or of the other numeric columns {others}. To record another measure, add it to the "
        "measures of the search and run the search again."
    )


def is_complete(table: pd.DataFrame) -> NDArray[np.bool_]:
    """Return which rows come from a trial that ran to its end. Shapes: returns (n_minima,)."""
    if "state" not in table.columns:
        return np.ones(len(table), dtype=bool)
    return table["state"].eq("complete").to_numpy(dtype=bool)


def is_converged(table: pd.DataFrame) -> NDArray[np.bool_]:
    """Return which rows are minima that can be compared. Shapes: returns (n_minima,)."""
    good = np.ones(len(table), dtype=bool)
    for name in ("converged", "comparable"):
        if name in table.columns:
            good &= table[name].eq(True).fillna(False).to_numpy(dtype=bool)
    return good


def is_score(name: str) -> bool:
    """Return whether large values of a column are good."""
    return name in SCORES


def _is_numeric(column: Any) -> bool:
    """Return whether a column holds numbers; booleans are not numbers here."""
    return pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column)
