"""The table of minima: what a sweep found, one row per trained network.

Sweep, ranking, correlation and plots all speak of this table; its columns are fixed here.

======================  =======  ===========================================================
column                  type     meaning
======================  =======  ===========================================================
``trial``               int      number of the trial in its study
``param_<name>``        any      value of a varied parameter, as in ``cv_results_``
one per measure         float    its name, such as ``relative_flatness``; small is flat
``train_loss``          float    mean loss on the training data
``test_loss``           float    mean loss on the held-out data, nan without such data
``generalization_gap``  float    ``test_loss - train_loss``
``train_score``         float    the estimator's own ``score`` on the training data
``test_score``          float    the same on the held-out data
``converged``           bool     whether training ended in a minimum
``seconds``             float    time the training took
``state``               str      ``"complete"``, ``"failed"`` or ``"pruned"``
``reason``              str      why there is no (converged) minimum, empty if all is well
``rank``                int      1 is flattest; only in ranked tables
======================  =======  ===========================================================

A study keeps the same names as flat keys in ``trial.user_attrs``; what is measured later, when
Optuna lets no trial be changed any more, in ``study.user_attrs`` under `later`. Every other
numeric column is taken for a measure, so that a table can be extended by hand.
"""

from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import numpy as np
import optuna
import pandas as pd
from numpy.typing import NDArray
from optuna.trial import FrozenTrial, TrialState

__all__ = ["rank_minima"]

PARAM_PREFIX = "param_"
LOSSES = ("train_loss", "test_loss", "generalization_gap")
SCORES = ("train_score", "test_score")
STATUS = ("converged", "seconds", "state", "reason")
FIXED = ("trial", *LOSSES, *SCORES, *STATUS, "rank")

STATES = {
    TrialState.COMPLETE: "complete",
    TrialState.FAIL: "failed",
    TrialState.PRUNED: "pruned",
}
NO_REASON = {
    TrialState.COMPLETE: "",
    TrialState.FAIL: "failed without a recorded reason",
    TrialState.PRUNED: "stopped by the pruner",
}


def rank_minima(minima: Any, by: str = "relative_flatness") -> pd.DataFrame:
    """Rank minima, flattest first.

    Flatness means something at a minimum only: a network that never learned anything can be
    perfectly flat. So the minima come first, then the candidates that did not converge, then
    those that failed or whose value is not finite.

    Parameters
    ----------
    minima : pandas.DataFrame, optuna.Study or fitted FlatMinimaSearch
        The minima, as a table (see `relflat_sk.minima._table` for its columns) or the study that
        recorded them. Without a column ``converged`` every row is taken for a minimum. The
        input is left as it is.
    by : str, default="relative_flatness"
        The numeric column that decides, smallest first; of the two scores, ``"train_score"``
        and ``"test_score"``, the largest comes first.

    Returns
    -------
    pandas.DataFrame
        The same rows in rank order, with a fresh index and a last column ``rank`` from 1 to n.
        Ties keep their order.

    Raises
    ------
    TypeError
        If `minima` is neither a table nor a study.
    ValueError
        If there is no column `by`, or it is not numeric.

    See Also
    --------
    FlatMinimaSearch : Finds the minima.
    correlate : How well a measure predicts the generalization gap.

    Examples
    --------
    >>> import pandas as pd
    >>> minima = pd.DataFrame(
    ...     {
    ...         "trial": [0, 1, 2],
    ...         "relative_flatness": [3.0, 0.0, 2.0],
    ...         "converged": [True, False, True],
    ...     }
    ... )
    >>> rank_minima(minima)
       trial  relative_flatness  converged  rank
    0      2                2.0       True     1
    1      0                3.0       True     2
    2      1                0.0      False     3
    """
    table = minima_table(minima)
    values = numeric_column(table, by, argument="by")
    if by in SCORES:
        values = -values
    finite = np.isfinite(values) & is_complete(table)
    group = np.where(finite, np.where(is_converged(table), 0, 1), 2)
    # lexsort: the last key is the most significant, and ties keep their order
    order = np.lexsort((np.where(finite, values, 0.0), group))
    ranked = table.drop(columns="rank", errors="ignore").iloc[order].reset_index(drop=True)
    ranked["rank"] = np.arange(1, len(ranked) + 1)
    return ranked


def minima_table(source: Any) -> pd.DataFrame:
    """Return the table of minima behind a table, a study or a fitted search.

    Parameters
    ----------
    source : pandas.DataFrame, optuna.Study or fitted FlatMinimaSearch
        A table is handed back as it is, not copied.

    Returns
    -------
    pandas.DataFrame
        One row per finished trial, in the order of the trials, columns in the order of the
        table in `relflat_sk.minima._table`.

    Raises
    ------
    TypeError
        If `source` is none of these.

    Examples
    --------
    >>> import optuna
    >>> study = optuna.create_study()
    >>> study.add_trial(
    ...     optuna.trial.create_trial(
    ...         value=2.0, user_attrs={"relative_flatness": 2.0, "converged": True}
    ...     )
    ... )
    >>> minima_table(study)[["trial", "relative_flatness", "converged", "state"]]
       trial  relative_flatness  converged     state
    0      0                2.0       True  complete
    """
    if isinstance(source, pd.DataFrame):
        return source
    if isinstance(source, optuna.Study):
        trials = source.get_trials(deepcopy=False)
        return table_of_trials((t for t in trials if t.state in STATES), source.user_attrs)
    table = getattr(source, "minima_", None)
    if isinstance(table, pd.DataFrame):
        return table
    raise TypeError(
        f"minima must be a pandas.DataFrame, an optuna.Study or a fitted FlatMinimaSearch, "
        f"got {type(source).__name__}. Pass the `minima_` or the `study_` of a fitted search."
    )


def measure_columns(table: pd.DataFrame) -> list[str]:
    """Return the names of the measures in a table of minima, in its order.

    Parameters
    ----------
    table : pandas.DataFrame
        A table of minima.

    Returns
    -------
    list of str
        Every numeric column that is neither a parameter nor one of the fixed columns.

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
        How the caller's argument is called, for the error text.

    Returns
    -------
    ndarray of shape (n_minima,)
        The values in float64, missing ones as nan.

    Raises
    ------
    ValueError
        If there is no such column, or it is not numeric.
    """
    if name in table.columns and _is_numeric(table[name]):
        return table[name].to_numpy(dtype=np.float64, na_value=np.nan)
    problem = "is not numeric" if name in table.columns else "is not a column of these minima"
    others = [column for column in table.columns if column in (*LOSSES, *SCORES, "seconds")]
    raise ValueError(
        f"{argument}={name!r} {problem}. Measures there are: {measure_columns(table)}, other "
        f"columns that can stand here: {others}. To have another measure recorded, name it in "
        "the search and run it again."
    )


def is_complete(table: pd.DataFrame) -> NDArray[np.bool_]:
    """Return which rows come from a trial that ran to its end, as booleans per row."""
    if "state" not in table.columns:
        return np.ones(len(table), dtype=bool)
    return table["state"].eq("complete").to_numpy(dtype=bool)


def is_converged(table: pd.DataFrame) -> NDArray[np.bool_]:
    """Return which rows are minima, as booleans per row; a missing answer is a no."""
    if "converged" not in table.columns:
        return np.ones(len(table), dtype=bool)
    return table["converged"].eq(True).fillna(False).to_numpy(dtype=bool)


def _is_numeric(column: Any) -> bool:
    """Return whether a column holds numbers, booleans not counting as such."""
    return pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column)


def later(trial: FrozenTrial) -> str:
    """Say where a study keeps what was measured of a trial after it was finished."""
    return f"measures of trial {trial.number}"


def table_of_trials(trials: Iterable[FrozenTrial], study_attrs: Mapping[str, Any]) -> pd.DataFrame:
    """Return the unranked table of some finished trials.

    Parameters
    ----------
    trials : iterable of optuna.trial.FrozenTrial
    study_attrs : mapping
        User attributes of their study, among which is what was measured `later`.

    Returns
    -------
    pandas.DataFrame
    """
    rows = [_row(trial) | study_attrs.get(later(trial), {}) for trial in trials]
    names = dict.fromkeys(name for row in rows for name in row)
    params = [name for name in names if name.startswith(PARAM_PREFIX)]
    measures = [name for name in names if name not in FIXED and name not in params]
    columns = ["trial", *params, *measures, *LOSSES, *SCORES, *STATUS]
    table = pd.DataFrame(rows, columns=columns)
    floats = [*measures, *LOSSES, *SCORES, "seconds"]
    types = {"trial": int, "converged": bool} | dict.fromkeys(floats, float)
    return table.astype(types)


def _row(trial: FrozenTrial) -> dict[str, Any]:
    """Return one trial as a row; unknown attributes that are not numbers stay behind."""
    row: dict[str, Any] = {"trial": trial.number}
    row |= {f"{PARAM_PREFIX}{name}": value for name, value in trial.params.items()}
    for name, value in trial.user_attrs.items():
        if name in FIXED or name.startswith(PARAM_PREFIX) or _is_number(value):
            row[name] = value
    complete = trial.state == TrialState.COMPLETE
    row["converged"] = complete and row.get("converged", True)
    row["state"] = STATES[trial.state]
    row.setdefault("reason", NO_REASON[trial.state])
    return row


def _is_number(value: Any) -> bool:
    """Return whether a value is a real number, booleans not counting as such."""
    return isinstance(value, Real) and not isinstance(value, bool)
