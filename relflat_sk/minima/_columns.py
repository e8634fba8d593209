"""The columns of a table of minima, which `relflat_sk.minima` documents for users."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

PARAM_PREFIX = "param_"
LOSSES = ("train_loss", "test_loss", "generalization_gap")
SCORES = ("train_score", "test_score")
DEPTH = "depth"
STATUS = ("converged", "ended_by", "seconds", "state", "reason")
FIXED = ("trial", *LOSSES, DEPTH, *SCORES, STATUS[0], "comparable", *STATUS[1:], "rank")

# what a trial records beside its columns, and columns that only some tables have
_OTHERS = (
    "artifact_id", "weights_checksum", "curves", "failed", "seed", "in_fleet", "measures", "pareto",
)  # fmt: skip


def is_reserved(name: str) -> bool:
    """Return whether a name has a meaning of its own in tables of minima and their trials."""
    return name in FIXED or name in _OTHERS or name.startswith(PARAM_PREFIX)


def column_of(measure: str | Callable[..., Any]) -> str:
    """Return the column of a measure: its name, or that of its function."""
    if not callable(measure):
        if not isinstance(measure, str):
            raise TypeError(
                "a measure is one name or one function, got "
                f"{measure!r} of type {type(measure).__name__}."
            )
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


def is_converged(table: pd.DataFrame, *, any_depth: bool = False) -> NDArray[np.bool_]:
    """Return which rows are minima that can be compared. Shapes: returns (n_minima,)."""
    good = np.ones(len(table), dtype=bool)
    for name in ("converged",) if any_depth else ("converged", "comparable"):
        if name in table.columns:
            good &= table[name].eq(True).fillna(False).to_numpy(dtype=bool)
    return good


def is_score(name: str) -> bool:
    """Return whether large values of a column are good."""
    return name in SCORES


def _is_numeric(column: Any) -> bool:
    """Return whether a column holds numbers; booleans are not numbers here."""
    return pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column)


# The hyper-parameters that a sweep varied: their columns, and their values as level numbers.

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
    """Return the columns of several hyper-parameters, by default of all varied but for seeds."""
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
        if levels.any() and not _is_seed(column):
            # two parameters drawn at random never repeat a value: both divide the minima into
            # groups of one, but were not varied together
            all_differ = column if levels.max() + 1 == len(levels) else None
            partitions.setdefault((all_differ, *levels), column)
    if not partitions:
        raise ValueError(
            "No hyper-parameter was varied over these minima, but for random seeds: no other "
            f"column '{PARAM_PREFIX}...' has more than one value. Name the columns of the "
            "hyper-parameters as axes."
        )
    return list(partitions.values())


def _is_seed(column: str) -> bool:
    """Return whether a parameter is a random seed, whose values are repeats of an experiment."""
    return plain_name(column).rpartition("__")[2] in {"random_state", "seed"}


def number_levels(table: pd.DataFrame, columns: list[str]) -> NDArray[np.intp]:
    """Give the distinct values of each column numbers from 0, in the order of their first row.

    Shapes: returns (n_minima, n_columns).
    """
    numbers = []
    for column in columns:
        values = table[column]
        # lists cannot be hashed, but their text can
        plain = values.map(repr) if values.dtype == object else values
        numbers.append(pd.factorize(plain, use_na_sentinel=False)[0])
    return np.stack(numbers, axis=1)
