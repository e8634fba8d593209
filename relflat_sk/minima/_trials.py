"""Optuna's finished trials as a table of minima.

A trial stores the columns of its row as flat keys in ``trial.user_attrs``, and what users hardly
read as one dict, because each attribute is a transaction of the storage. Optuna does not let
a finished trial be changed, so measures computed afterwards are stored in ``study.user_attrs``,
under the key that `remeasured_key` returns.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import optuna
import pandas as pd
from optuna.trial import FrozenTrial, TrialState
from sklearn.exceptions import NotFittedError

from relflat_sk._checks import is_number
from relflat_sk.minima._columns import DEPTH, FIXED, LOSSES, PARAM_PREFIX, SCORES, STATUS

MADE_WITH = "provenance"  # user attribute of a study: how its minima are made, part by part
UNITS = "units"  # the part with attributes of the table
CURVES = "curves"  # user attribute of a trial: losses and flatness of its epochs, by column

# user attribute of a trial: a dict of the attributes that are stored together
DETAILS = "details"
# one of these: the names of the measures in the order of the search, which databases forget
MEASURES = "measures"

# the states of finished trials, and their names in the column `state`
STATES = {
    TrialState.COMPLETE: "complete",
    TrialState.FAIL: "failed",
    TrialState.PRUNED: "pruned",
}
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
    table = getattr(source, "minima_", None)
    if isinstance(table, pd.DataFrame):
        return table
    if hasattr(type(source), "remeasure"):
        raise NotFittedError(
            f"this {type(source).__name__} holds no minima yet: call fit first, with X and y."
        )
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
    found = {trial.number: attributes_of(trial).get(CURVES) for trial in trials}
    return {number: curves for number, curves in found.items() if curves is not None}


def attributes_of(trial: Any) -> dict[str, Any]:
    """Return the user attributes of a trial, with those that are stored together.

    The measures come first, in the order of the search.
    """
    found: dict[str, Any] = trial.user_attrs
    details = found.get(DETAILS, {})
    measures = {name: found[name] for name in details.get(MEASURES, ()) if name in found}
    return {**measures, **found, **details}


def table_of_trials(
    trials: Iterable[FrozenTrial], study_attrs: Mapping[str, Any], measures: Sequence[str] = ()
) -> pd.DataFrame:
    """Return the unranked table of finished trials, with columns for some measures at least.

    The first measure stands before the losses: the first of `measures`, or of the first trial.
    """
    rows = [_row(trial) | study_attrs.get(remeasured_key(trial), {}) for trial in trials]
    return table_of_rows(rows, study_attrs.get(MADE_WITH, {}).get(UNITS, {}), measures)


def table_of_rows(
    rows: list[dict[str, Any]], units: dict[Any, str], measures: Sequence[str] = ()
) -> pd.DataFrame:
    """Return the unranked table of rows whose other entries than its columns are measures."""
    names = dict.fromkeys([*map(str, measures), *(name for row in rows for name in row)])
    params = [name for name in names if name.startswith(PARAM_PREFIX)]
    measures = [name for name in names if name not in FIXED and name not in params]
    ranking, others = measures[:1], measures[1:]
    columns = ["trial", *params, *ranking, *LOSSES, DEPTH, *SCORES, *others, *STATUS]
    table = pd.DataFrame(rows, columns=columns)
    floats = [*measures, *LOSSES, DEPTH, *SCORES, "seconds"]
    types = {"trial": int, "converged": bool} | dict.fromkeys(floats, float)
    table = table.astype(types)
    table.attrs |= units
    return table


def _row(trial: FrozenTrial) -> dict[str, Any]:
    """Return one trial as a row, without unknown attributes that are not numbers."""
    row: dict[str, Any] = {"trial": trial.number}
    row |= {f"{PARAM_PREFIX}{name}": value for name, value in trial.params.items()}
    for name, value in attributes_of(trial).items():
        if name in FIXED or name.startswith(PARAM_PREFIX) or is_number(value):
            row[name] = value
    complete = trial.state == TrialState.COMPLETE
    row["converged"] = complete and row.get("converged", True)
    row["state"] = STATES[trial.state]
    row.setdefault("reason", NO_REASON[trial.state])
    row.setdefault("ended_by", "")
    return row
