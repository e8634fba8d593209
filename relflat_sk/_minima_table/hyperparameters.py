"""The hyper-parameters that a sweep varied: their columns, and their values as level numbers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from relflat_sk._minima_table.columns import PARAM_PREFIX

__all__ = [
    "find_axes",
    "find_axis",
    "number_levels",
    "parameter_columns",
    "plain_name",
    "shorten_parameters",
]

_SCALED = "scaled_"  # before the name of a learning rate that the search has scaled


def plain_name(column: str) -> str:
    """Return the name of the parameter in a column."""
    return column.removeprefix(PARAM_PREFIX)


def parameter_columns(table: pd.DataFrame) -> list[str]:
    """Return the columns that hold a hyper-parameter."""
    return [str(column) for column in table.columns if str(column).startswith(PARAM_PREFIX)]


def shorten_parameters(table: pd.DataFrame, prefix: str) -> pd.DataFrame:
    """Remove what stands before the names of a pipeline's last step from the columns of a table."""
    long = [name for name in parameter_columns(table) if prefix and prefix in name]
    short = {
        name: PARAM_PREFIX + _SCALED * (_SCALED in name) + name.split(prefix, 1)[1]
        for name in long
        if name.startswith((PARAM_PREFIX + prefix, PARAM_PREFIX + _SCALED + prefix))
    }
    taken = [short.get(name, name) for name in table.columns]
    return table.rename(columns={n: s for n, s in short.items() if taken.count(s) == 1})


def find_axis(table: pd.DataFrame, name: str, *, argument: str) -> str:
    """Return the column of one hyper-parameter."""
    for column in (name, f"{PARAM_PREFIX}{name}"):
        if column in table.columns:
            return column
    params = [plain_name(column) for column in parameter_columns(table)]
    nested = [one for one in params if one.endswith(f"__{name}") or name.endswith(f"__{one}")]
    if len(nested) == 1:
        return f"{PARAM_PREFIX}{nested[0]}"
    raise ValueError(
        f"{argument}: {name!r} is no parameter of these minima; there are {params}. Name one "
        "of them, or add a column of that name to the table."
    )


def find_axes(table: pd.DataFrame, axes: str | Sequence[str] | None) -> list[str]:
    """Return the columns of several hyper-parameters, by default of all that were varied."""
    if axes is None:
        return _varied_axes(table)
    names = [axes] if isinstance(axes, str) else list(axes)
    if not names:
        raise ValueError(
            "axes is empty: name at least one hyper-parameter, or pass None for all that were "
            "varied."
        )
    return list(dict.fromkeys(find_axis(table, name, argument="axes") for name in names))


def _varied_axes(table: pd.DataFrame) -> list[str]:
    """Return the varied parameters, one for each way in which they divide the minima."""
    partitions: dict[Any, str] = {}
    for column in parameter_columns(table):
        levels = number_levels(table, [column])[:, 0]
        if levels.any():
            # two parameters drawn at random never repeat a value: both divide the minima into
            # groups of one, but were not varied together
            all_differ = column if levels.max() + 1 == len(levels) else None
            partitions.setdefault((all_differ, *levels), column)
    if not partitions:
        raise ValueError(
            "No hyper-parameter was varied over these minima: no column "
            f"'{PARAM_PREFIX}...' has more than one value. Name the columns of the "
            "hyper-parameters as axes."
        )
    return list(partitions.values())


def number_levels(table: pd.DataFrame, columns: list[str]) -> NDArray[np.intp]:
    """Give the distinct values of each column numbers from 0, in the order of their first row.

    Shapes: returns (n_minima, n_columns).
    """
    return np.stack([_number(table[column]) for column in columns], axis=1)


def _number(values: "pd.Series[Any]") -> NDArray[np.intp]:
    """Return the level numbers of one column."""
    # lists cannot be hashed, but their text can
    plain = values.map(repr) if values.dtype == object else values
    return pd.factorize(plain, use_na_sentinel=False)[0]
