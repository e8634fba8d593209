"""The hyper-parameters that a sweep varied: how they are called, and which minima share them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from relflat_sk.minima._table import PARAM_PREFIX

__all__ = ["find_axes", "find_axis", "number_levels", "plain_name"]


def plain_name(column: str) -> str:
    """Return the name of the parameter that a column holds."""
    return column.removeprefix(PARAM_PREFIX)


def find_axis(table: pd.DataFrame, name: str, *, argument: str) -> str:
    """Return the column of a hyper-parameter, by its own name or that of the column.

    Parameters
    ----------
    table : pandas.DataFrame
        A table of minima.
    name : str
        Such as ``"batch_size"`` or ``"param_batch_size"``; of a step or part, as in
        ``"param_net__batch_size"``, the last part is enough where it is the only one.
    argument : str
        How the caller's argument is called, for the error text.

    Returns
    -------
    str
        The column.

    Raises
    ------
    ValueError
        If there is no such column; lists the parameters there are.
    """
    for column in (name, f"{PARAM_PREFIX}{name}"):
        if column in table.columns:
            return column
    params = [plain_name(str(column)) for column in table.columns if _is_param(column)]
    nested = [param for param in params if param.endswith(f"__{name}")]
    if len(nested) == 1:
        return f"{PARAM_PREFIX}{nested[0]}"
    raise ValueError(
        f"{argument}: {name!r} is no parameter of these minima; there are {params}. Name one "
        "of them, or add a column of that name to the table."
    )


def find_axes(table: pd.DataFrame, axes: str | Sequence[str] | None) -> list[str]:
    """Return the columns of the hyper-parameters asked for, or of all that were varied.

    Parameters
    ----------
    table : pandas.DataFrame
        A table of minima.
    axes : str, sequence of str or None
        Names of parameters, with or without the prefix of their columns. None takes all
        parameters with more than one value, but one of those that were only varied together,
        such as a learning rate that is scaled with the batch size.

    Returns
    -------
    list of str
        Columns of the table, without repeats.

    Raises
    ------
    ValueError
        If there is no such parameter, or none at all.

    Examples
    --------
    >>> table = pd.DataFrame({"param_batch_size": [8, 8, 16], "param_lr": [0.1, 0.1, 0.2]})
    >>> find_axes(table, None)
    ['param_batch_size']
    >>> find_axes(table, ["lr"])
    ['param_lr']
    """
    if axes is not None:
        names = [axes] if isinstance(axes, str) else list(axes)
        if not names:
            raise ValueError(
                "axes is empty: name at least one hyper-parameter, or pass None for all that "
                "were varied."
            )
        return list(dict.fromkeys(find_axis(table, name, argument="axes") for name in names))
    partitions: dict[Any, str] = {}
    for column in filter(_is_param, table.columns):
        levels = number_levels(table, [column])[:, 0]
        if levels.any():
            # values that are all different, as random draws are, agree in that by chance
            chance = column if levels.max() + 1 == len(levels) else None
            partitions.setdefault((chance, *levels), column)
    if not partitions:
        raise ValueError(
            "No hyper-parameter was varied over these minima: there is no column "
            f"'{PARAM_PREFIX}...' with more than one value. Name the columns that hold them "
            "as axes."
        )
    return list(partitions.values())


def number_levels(table: pd.DataFrame, columns: list[str]) -> NDArray[np.intp]:
    """Give the values in each column numbers from 0, in the order they appear.

    Parameters
    ----------
    table : pandas.DataFrame
        A table of minima.
    columns : list of str
        Some of its columns; a missing value is a value of its own.

    Returns
    -------
    ndarray of shape (n_minima, n_columns)
        The numbers.

    Examples
    --------
    >>> number_levels(pd.DataFrame({"param_width": [(8,), (8, 8), (8,)]}), ["param_width"]).T
    array([[0, 1, 0]])
    """
    return np.stack([_number(table[column]) for column in columns], axis=1)


def _number(values: "pd.Series[Any]") -> NDArray[np.intp]:
    # lists have no hash, but a text that says what they are
    plain = values.map(repr) if values.dtype == object else values
    return pd.factorize(plain, use_na_sentinel=False)[0]


def _is_param(column: Any) -> bool:
    return str(column).startswith(PARAM_PREFIX)
