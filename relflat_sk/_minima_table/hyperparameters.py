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
    """Return the name of the parameter in a column.

    Parameters
    ----------
    column : str
        A column of a table of minima, such as ``"param_batch_size"``.

    Returns
    -------
    str
        The column without the prefix of parameters.
    """
    return column.removeprefix(PARAM_PREFIX)


def parameter_columns(table: pd.DataFrame) -> list[str]:
    """Return the columns that hold a hyper-parameter.

    Parameters
    ----------
    table : pandas.DataFrame
        A table of minima.

    Returns
    -------
    list of str
        The columns, in the table's order.
    """
    return [str(column) for column in table.columns if str(column).startswith(PARAM_PREFIX)]


def shorten_parameters(table: pd.DataFrame, prefix: str) -> pd.DataFrame:
    """Remove what stands before the names of a pipeline's last step from the columns of a table.

    Parameters
    ----------
    table : pandas.DataFrame
        A table of minima.
    prefix : str
        Such as ``"net__"``.

    Returns
    -------
    pandas.DataFrame
        A table with shorter names, except for those that would then be equal to others.

    Examples
    --------
    >>> table = pd.DataFrame(columns=["param_net__lr", "param_scale__copy", "param_net__copy"])
    >>> shorten_parameters(table, "net__").columns.tolist()
    ['param_lr', 'param_scale__copy', 'param_copy']
    """
    long = [name for name in parameter_columns(table) if prefix and prefix in name]
    short = {
        name: PARAM_PREFIX + _SCALED * (_SCALED in name) + name.split(prefix, 1)[1]
        for name in long
        if name.startswith((PARAM_PREFIX + prefix, PARAM_PREFIX + _SCALED + prefix))
    }
    taken = [short.get(name, name) for name in table.columns]
    return table.rename(columns={n: s for n, s in short.items() if taken.count(s) == 1})


def find_axis(table: pd.DataFrame, name: str, *, argument: str) -> str:
    """Return the column of one hyper-parameter.

    Parameters
    ----------
    table : pandas.DataFrame
        A table of minima.
    name : str
        The parameter or its column, such as ``"batch_size"`` or ``"param_batch_size"``. For a
        parameter of a pipeline step, such as ``"param_net__batch_size"``, the last part of the
        name is enough if no other parameter ends in it; where the table has the last part only,
        the whole name works, too.
    argument : str
        Name of the caller's argument, for the error message.

    Returns
    -------
    str
        The column.

    Raises
    ------
    ValueError
        If there is no such column; the message lists the parameters of the table.
    """
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
    """Return the columns of several hyper-parameters, by default of all that were varied.

    Parameters
    ----------
    table : pandas.DataFrame
        A table of minima.
    axes : str, sequence of str or None
        Names of parameters, with or without the prefix of their columns. None takes every
        parameter with more than one value. Of parameters that were only varied together, such
        as a learning rate that scales with the batch size, it takes the first.

    Returns
    -------
    list of str
        Columns of the table, each once.

    Raises
    ------
    ValueError
        If `axes` is empty, there is no such parameter, or no parameter was varied.

    Examples
    --------
    >>> table = pd.DataFrame({"param_batch_size": [8, 8, 16], "param_lr": [0.1, 0.1, 0.2]})
    >>> find_axes(table, None)
    ['param_batch_size']
    >>> find_axes(table, ["lr"])
    ['param_lr']
    """
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

    Parameters
    ----------
    table : pandas.DataFrame
        A table of minima.
    columns : list of str
        Columns of the table. All missing values of a column count as one further value.

    Returns
    -------
    ndarray of int of shape (n_minima, n_columns)
        The level numbers.

    Examples
    --------
    >>> number_levels(pd.DataFrame({"param_width": [(8,), (8, 8), (8,)]}), ["param_width"]).T
    array([[0, 1, 0]])
    """
    return np.stack([_number(table[column]) for column in columns], axis=1)


def _number(values: "pd.Series[Any]") -> NDArray[np.intp]:
    """Return the level numbers of one column."""
    # lists cannot be hashed, but their text can
    plain = values.map(repr) if values.dtype == object else values
    return pd.factorize(plain, use_na_sentinel=False)[0]
