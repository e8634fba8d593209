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
    """Return whether a name has a meaning of its own in tables of minima and their trials.

    Parameters
    ----------
    name : str
        The name of a column that a user chose.

    Returns
    -------
    bool
        True for fixed columns and parameters.

    Examples
    --------
    >>> is_reserved("train_loss"), is_reserved("param_lr"), is_reserved("l2_norm")
    (True, True, False)
    """
    return name in FIXED or name in _OTHERS or name.startswith(PARAM_PREFIX)


def column_of(measure: str | Callable[..., Any]) -> str:
    """Return the column of a measure: its name, or that of its function.

    Parameters
    ----------
    measure : str or callable
        As the user gave it.

    Returns
    -------
    str
        The ``__name__`` of a function; anything else as it is.

    Raises
    ------
    ValueError
        If a function has no name, such as a lambda or a `functools.partial`.

    Examples
    --------
    >>> column_of("l2_norm"), column_of(measure_columns)
    ('l2_norm', 'measure_columns')
    """
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
    """Return the names of the measures in a table of minima.

    Parameters
    ----------
    table : pandas.DataFrame
        A table of minima.

    Returns
    -------
    list of str
        The numeric columns that are neither a parameter nor a fixed column, in the table's
        order.

    Examples
    --------
    >>> import pandas as pd
    >>> measure_columns(pd.DataFrame({"trial": [0], "param_lr": [0.1], "l2_norm": [4.0]}))
    ['l2_norm']
    """
    return [
        str(name)
        for name in table.columns
        if name not in FIXED and not str(name).startswith(PARAM_PREFIX) and _is_numeric(table[name])
    ]


def numeric_column(table: pd.DataFrame, name: str, *, argument: str) -> NDArray[np.float64]:
    """Return one column of a table of minima as floats.

    Parameters
    ----------
    table : pandas.DataFrame
        A table of minima.
    name : str
        The column.
    argument : str
        Name of the caller's argument, for the error message.

    Returns
    -------
    ndarray of shape (n_minima,)
        The values in float64; missing values are nan.

    Raises
    ------
    ValueError
        If there is no such column, or it is not numeric.
    """
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
    """Return which rows come from a trial that ran to its end.

    Parameters
    ----------
    table : pandas.DataFrame
        A table of minima; without a column ``state`` every trial ran to its end.

    Returns
    -------
    ndarray of bool of shape (n_minima,)
        True for a complete trial.
    """
    if "state" not in table.columns:
        return np.ones(len(table), dtype=bool)
    return table["state"].eq("complete").to_numpy(dtype=bool)


def is_converged(table: pd.DataFrame) -> NDArray[np.bool_]:
    """Return which rows are minima that can be compared.

    Parameters
    ----------
    table : pandas.DataFrame
        A table of minima; without the columns ``converged`` and ``comparable`` every row is such
        a minimum.

    Returns
    -------
    ndarray of bool of shape (n_minima,)
        True for a minimum of comparable depth; a missing value counts as False.
    """
    good = np.ones(len(table), dtype=bool)
    for name in ("converged", "comparable"):
        if name in table.columns:
            good &= table[name].eq(True).fillna(False).to_numpy(dtype=bool)
    return good


def is_score(name: str) -> bool:
    """Return whether large values of a column are good.

    Parameters
    ----------
    name : str
        A column of a table of minima.

    Returns
    -------
    bool
        True for the two scores, False for losses, measures and all others.
    """
    return name in SCORES


def _is_numeric(column: Any) -> bool:
    """Return whether a column holds numbers; booleans are not numbers here."""
    return pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column)
