"""The table of minima, which `relflat_sk.minima` documents: what a trial records, and its columns.

`Minimum` is the only list of what a trial records, and the only place that writes and reads it.
Optuna does not let a finished trial be changed, so measures computed afterwards are stored in
``study.user_attrs``, under the key that `remeasured_key` returns.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import optuna
import pandas as pd
from numpy.typing import NDArray
from optuna.trial import FrozenTrial, TrialState
from sklearn.utils.validation import check_is_fitted

from relflat_sk._checks import is_number

# -- one minimum -----------------------------------------------------------------------------------

PARAM_PREFIX = "param_"
LOSSES = ("train_loss", "test_loss", "generalization_gap")
SCORES = ("train_score", "test_score")
DEPTH = "depth"
STATUS = ("converged", "ended_by", "seconds", "state", "reason")
FIXED = ("trial", *LOSSES, DEPTH, *SCORES, STATUS[0], "comparable", *STATUS[1:], "rank")

# the user attribute with what users hardly read: each attribute is a transaction of the storage
DETAILS = "details"
_SHOWN = {*LOSSES, "converged", "failed", "artifact_id"}  # user attributes, as are measures


@dataclass
class Minimum:
    """What a candidate has become; None is not known."""

    measures: dict[str, float] = field(default_factory=dict)  # in the order of the search
    # beside what Optuna drew: what functions computed, and scaled learning rates
    params: dict[str, Any] = field(default_factory=dict)
    train_loss: float | None = None
    test_loss: float | None = None
    generalization_gap: float | None = None
    depth: float | None = None
    train_score: float | None = None
    test_score: float | None = None
    converged: bool | None = None
    ended_by: str | None = None
    seconds: float | None = None
    reason: str | None = None
    failed: bool | None = None  # trials that were interrupted do not have it
    constant_loss: float | None = None
    n_samples: int | None = None
    n_iter: list[int] | None = None  # of a solver
    curves: dict[str, list[Any]] | None = None  # losses and flatness of the epochs, by column
    seed: int | None = None
    in_fleet: bool | None = None  # whether the net was trained with others
    weights_hash: str | None = None
    artifact_id: str | None = None  # of the file with the weights
    values: list[float] = field(default_factory=list)  # of the objectives, which Optuna stores
    error: Exception | None = None  # which failed it

    def fail(self, error: Exception) -> None:
        """Record that training or measuring failed."""
        self.failed, self.error = True, error
        self.reason = f"{type(error).__name__}: {error}"

    def row(self) -> dict[str, Any]:
        """Return what is known as columns."""
        known = {n: getattr(self, n) for n in _COLUMNS if getattr(self, n) is not None}
        params = {f"{PARAM_PREFIX}{name}": value for name, value in self.params.items()}
        return params | self.measures | known

    def attributes(self) -> dict[str, Any]:
        """Return the user attributes of a trial."""
        row = self.row()
        details = {n: x for n, x in row.items() if n in _COLUMNS and n not in _SHOWN}
        details["measures"] = list(self.measures)  # databases forget the order
        return {n: x for n, x in row.items() if n not in details} | {DETAILS: details}

    def write(self, trial: optuna.Trial) -> None:
        """Write the minimum as a trial's user attributes."""
        for name, value in self.attributes().items():
            trial.set_user_attr(name, value)
        # Optuna 5: samplers and best_trial respect it
        if self.ended_by is not None and hasattr(trial, "set_constraint"):
            trial.set_constraint("converged", float(not self.converged))

    @classmethod
    def from_trial(cls, trial: Any) -> "Minimum":
        """Read a minimum; numbers that another program recorded are measures."""
        details = trial.user_attrs.get(DETAILS, {})
        stored = trial.user_attrs | details
        names = dict.fromkeys([*details.get("measures", ()), *stored])
        params = {
            name.removeprefix(PARAM_PREFIX): value
            for name, value in stored.items()
            if name.startswith(PARAM_PREFIX)
        }
        minimum = cls(
            {n: stored[n] for n in names if not is_reserved(n) and is_number(stored.get(n))},
            params,
            **{name: stored[name] for name in _COLUMNS if name in stored},
        )
        minimum.seed = None if minimum.seed is None else int(minimum.seed)  # once a text
        return minimum


_COLUMNS = [
    column.name
    for column in fields(Minimum)
    if column.name not in {"measures", "params", "values", "error"}
]
# what trials record beside their minimum, and columns that only some tables have
_OTHERS = {DETAILS, "measures", "owner", "pareto", "candidate", "process", "sweep", "killed"}


def is_reserved(name: str) -> bool:
    """Return whether a name has a meaning of its own in tables of minima and their trials."""
    return name in FIXED or name in {*_COLUMNS, *_OTHERS} or name.startswith(PARAM_PREFIX)


# -- columns ---------------------------------------------------------------------------------------


def column_of(measure: str | Callable[..., Any]) -> str:
    """Return the column of a measure: its name, or that of its function."""
    if not callable(measure):
        return measure
    name = str(getattr(measure, "__name__", "<lambda>"))
    if name == "<lambda>":
        raise ValueError(f"the measure {measure!r} has no name for its column: define it by def.")
    return name


def measure_columns(table: pd.DataFrame) -> list[str]:
    """Return the names of the measures in a table of minima."""
    return [
        str(name)
        for name in table.columns
        if name not in FIXED and not str(name).startswith(PARAM_PREFIX) and is_numeric(table[name])
    ]


def measure_column(
    source: Any, table: pd.DataFrame, measure: str | Callable[..., Any] | None
) -> str:
    """Return the column of a measure; None is the first one of a study or search."""
    if measure is not None:
        return column_of(measure)
    measures = measure_columns(table)
    is_ambiguous = len(measures) > 1 and isinstance(source, pd.DataFrame)
    default = "relative_flatness"
    return default if is_ambiguous or not measures else measures[0]


def numeric_column(table: pd.DataFrame, name: str, *, argument: str) -> NDArray[np.float64]:
    """Return one column of a table of minima as floats."""
    if name in table.columns and is_numeric(table[name]):
        return table[name].to_numpy(dtype=np.float64, na_value=np.nan)
    problem = "is not numeric" if name in table.columns else "is not a column of these minima"
    numbers = (*LOSSES, DEPTH, *SCORES, "seconds")
    beside = [column for column in table.columns if column in numbers]
    raise ValueError(
        f"{argument}={name!r} {problem}. Expected one of the measures {measure_columns(table)} "
        f"or of the other numeric columns {beside}."
    )


def is_complete(table: pd.DataFrame) -> NDArray[np.bool_]:
    """Return which rows come from a trial that ran to its end."""
    return _has(table, "state", "complete")


def is_minimum(table: pd.DataFrame) -> NDArray[np.bool_]:
    """Return which rows are minima, of any depth."""
    return _has(table, "converged", True)


def is_comparable(table: pd.DataFrame) -> NDArray[np.bool_]:
    """Return which rows are minima of the depth that is compared."""
    return is_minimum(table) & _has(table, "comparable", True)


def _has(table: pd.DataFrame, name: str, value: Any) -> NDArray[np.bool_]:
    """Return which rows have a value in a column: all of them without such a column."""
    if name not in table.columns:
        return np.ones(len(table), dtype=bool)
    return table[name].eq(value).fillna(False).to_numpy(dtype=bool)


def list_reasons(table: pd.DataFrame) -> str:
    """List why candidates failed or did not converge, the five most frequent reasons first."""
    counts = table["reason"].value_counts().head(5)
    return "\n".join(f"  {count} x {str(reason)[:500]}" for reason, count in counts.items())


def is_numeric(column: Any) -> bool:
    """Return whether a column holds numbers; booleans are not numbers here."""
    return pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column)


# -- the hyper-parameters that a sweep varied --------------------------------------------

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
    nested = [p for p in params if p.endswith(f"__{name}") or name.endswith(f"__{p}")]
    if len(nested) == 1:
        return f"{PARAM_PREFIX}{nested[0]}"
    raise ValueError(f"{argument}: {name!r} is no parameter of these minima; there are {params}.")


def find_axes(
    table: pd.DataFrame, axes: str | Sequence[str] | None, argument: str = "axes"
) -> list[str]:
    """Return the columns of several hyper-parameters, by default of all varied but for seeds."""
    if axes is None:
        return _varied_axes(table)
    single = isinstance(axes, str) or not isinstance(axes, Iterable)
    names = [str(axes)] if single else list(map(str, axes))
    if not names:
        raise ValueError(f"{argument} is empty: name at least one hyper-parameter, or pass None.")
    return list(dict.fromkeys(find_axis(table, name, argument=argument) for name in names))


def _varied_axes(table: pd.DataFrame) -> list[str]:
    """Return the varied parameters, one for each way in which they divide the minima."""
    partitions: dict[Any, str] = {}
    for column in parameter_columns(table):
        levels = number_levels(table, [column])[:, 0]
        # the values of a random seed are repeats of an experiment
        is_seed = column.lower().endswith(("random_state", "_seed"))
        if levels.any() and not is_seed:
            # two parameters drawn at random never repeat a value: both divide the minima into
            # groups of one, but were not varied together
            all_differ = column if levels.max() + 1 == len(levels) else None
            partitions.setdefault((all_differ, *levels), column)
    if not partitions:
        raise ValueError("No hyper-parameter was varied over these minima, but for random seeds.")
    return list(partitions.values())


def number_levels(table: pd.DataFrame, columns: list[str]) -> NDArray[np.intp]:
    """Give the distinct values of each column numbers from 0, in the order of their first row."""
    # lists cannot be hashed, but their text can
    return np.stack([pd.factorize(table[name].map(repr))[0] for name in columns], axis=1)


# -- Optuna's finished trials ---------------------------------------------------------------------


UNITS = "units"  # user attribute of a study: attributes of its table

# the states of finished trials, and their names in the column `state`
STATES = {TrialState.COMPLETE: "complete", TrialState.FAIL: "failed", TrialState.PRUNED: "pruned"}
# the column `reason` of a trial that recorded none
NO_REASON = {
    TrialState.COMPLETE: "",
    TrialState.FAIL: "failed without a recorded reason",
    TrialState.PRUNED: "stopped by the pruner",
}


def minima_table(source: Any) -> pd.DataFrame:
    """Return the table of minima of a table, a study or a fitted search."""
    if isinstance(source, pd.DataFrame):
        return source
    if isinstance(source, optuna.Study):
        trials = source.get_trials(deepcopy=False)
        return table_of_trials((t for t in trials if t.state in STATES), source.user_attrs)
    if hasattr(type(source), "remeasure"):
        check_is_fitted(source, "minima_")
    table = getattr(source, "minima_", None)
    if isinstance(table, pd.DataFrame):
        return table
    raise TypeError(
        f"minima must be a pandas.DataFrame, an optuna.Study or a fitted FlatMinimaSearch, "
        f"got {type(source).__name__}. Pass the `minima_` or the `study_` of a fitted search."
    )


def remeasured_key(trial: FrozenTrial) -> str:
    """Return the study's user attribute for measures computed after a trial had finished."""
    return f"measures of trial {trial.number}"


def curves_of(source: Any) -> dict[int, dict[str, list[float | None]]]:
    """Return how loss and flatness went along the training of each trial."""
    study = source if isinstance(source, optuna.Study) else getattr(source, "study_", None)
    if not isinstance(study, optuna.Study):
        raise TypeError(
            "curves are in an optuna.Study or a fitted FlatMinimaSearch, got "
            f"{type(source).__name__}. A table has no curves: pass the search itself."
        )
    trials = study.get_trials(deepcopy=False)
    curves = {trial.number: Minimum.from_trial(trial).curves for trial in trials}
    return {number: columns for number, columns in curves.items() if columns is not None}


def table_of_trials(
    trials: Iterable[FrozenTrial], study_attrs: Mapping[str, Any], measures: Sequence[str] = ()
) -> pd.DataFrame:
    """Return the unranked table of finished trials, with columns for some measures at least.

    The first measure stands before the losses: the first of `measures`, or of the first trial.
    """
    rows = []
    for trial in trials:
        row = {"trial": trial.number, "state": STATES[trial.state], "ended_by": ""}
        row["reason"] = NO_REASON[trial.state]
        row |= {f"{PARAM_PREFIX}{name}": value for name, value in trial.params.items()}
        row |= Minimum.from_trial(trial).row()
        row["converged"] = trial.state == TrialState.COMPLETE and row.get("converged", True)
        rows.append(row | study_attrs.get(remeasured_key(trial), {}))
    return table_of_rows(rows, study_attrs.get(UNITS, {}), measures)


def table_of_rows(
    rows: list[dict[str, Any]], units: dict[Any, str], measures: Sequence[str] = ()
) -> pd.DataFrame:
    """Return the unranked table of rows whose other entries than its columns are measures."""
    names = dict.fromkeys([*map(str, measures), *(name for row in rows for name in row)])
    params = [name for name in names if name.startswith(PARAM_PREFIX)]
    measures = [name for name in names if not is_reserved(name)]
    first, further = measures[:1], measures[1:]
    columns = ["trial", *params, *first, *LOSSES, DEPTH, *SCORES, *further, *STATUS]
    table = pd.DataFrame(rows, columns=columns)
    floats = [*measures, *LOSSES, DEPTH, *SCORES, "seconds"]
    types = {"trial": int, "converged": bool} | dict.fromkeys(floats, float)
    table = table.astype(types)
    table.attrs |= units
    return table
