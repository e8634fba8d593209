"""Show what a search found: table of minima, `cv_results_` and reasons of failures."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import optuna
import pandas as pd
from numpy.typing import NDArray
from optuna.trial import FrozenTrial, TrialState
from scipy.stats import rankdata

from relflat_sk._warnings import warn
from relflat_sk.minima._minimum import PARAM_PREFIX, Minimum
from relflat_sk.minima._table import (
    STATES,
    is_complete,
    list_reasons,
    table_of_trials,
)
from relflat_sk.search._candidates import without_superseded
from relflat_sk.search._data import PREFIX
from relflat_sk.search._space import Space

# With wrong labels, fewer of the networks that have learned (are so deep) reach the loss, and
# flatness orders those of different width and training worse than chance, see
# benchmarks.worth.selection; there the same happens with some data whose labels are right.
FEW_FIT, LEARNED = 0.4, 2.0
WRONG_LABELS = (
    "that labels are wrong, and then flatness orders networks worse than chance. Choose by "
    "held-out data, or average the predictions of all (docs/does_it_help.md)."
)


def candidate_table(study: optuna.Study, measures: Sequence[str] = ()) -> pd.DataFrame:
    """Return the unranked table of a study's candidates, in the order of the trials."""
    trials = without_superseded(study.get_trials(deepcopy=False))
    table = table_of_trials(trials, study.user_attrs, measures)
    if len(study.directions) > 1:
        front = [trial.number for trial in study.best_trials]
        table["pareto"] = table["trial"].isin(front)
    return table


def check_table(table: pd.DataFrame, interrupted: bool, stored_as: Any) -> None:
    """Refuse a table in which no candidate was measured; warn of one without minima or of few."""
    if table.empty and not interrupted:
        raise ValueError(
            "no candidate was trained: the search was ended before, by timeout or by a callback."
        )
    # Optuna takes a network that is no better than a constant for failed, but it has a depth
    if not (is_complete(table) | table["depth"].notna()).any():
        if interrupted:
            raise KeyboardInterrupt("before any candidate was finished.")
        message = f"none of {len(table)} candidates could be trained and measured:\n"
        message += list_reasons(table)
        if table["reason"].astype(str).str.startswith("TypeError:").all():
            raise TypeError(message)
        raise ValueError(message)
    if interrupted:
        advice = (
            "To go on with a search another time, give it a storage and a study_name."
            if stored_as is None
            else f"To train the others, fit again with the same storage and "
            f"study_name={stored_as!r}."
        )
        warn(
            f"interrupted: the search ends with the {len(table)} candidates that were finished. "
            f"{advice}"
        )
    if not table["converged"].any():
        warn(
            "no candidate converged: networks that are no minima are ranked by training loss "
            f"({_losses(table)}). Train longer (max_epochs, max_iter), or to a goal within reach. "
            f"Reasons:\n{list_reasons(table)}"
        )
        return
    _warn_of_missing(table)


def _warn_of_missing(table: pd.DataFrame) -> None:
    """Warn of candidates that rank behind all others, and of measures without a value."""
    no_minima = table[~table["converged"] & (table["state"] != STATES[TrialState.PRUNED])]
    if len(no_minima):
        warn(
            f"{len(no_minima)} of {len(table)} candidates are no minima, and rank behind all "
            "others. Reasons:\n" + list_reasons(no_minima)
        )
    lacking = table[table["comparable"] & (table["reason"] != "")]
    if len(lacking):
        warn(
            f"{len(lacking)} of {table['comparable'].sum()} minima are ranked, but have no value "
            "of a measure that does not rank. Reasons:\n" + list_reasons(lacking)
        )
    left_out = table[table["converged"] & ~table["comparable"]]
    if len(left_out):
        warn(
            f"{len(left_out)} of {table['converged'].sum()} minima are left out of the ranking, "
            f"because their training losses ({_losses(left_out)}) differ too much from those of "
            f"the others ({_losses(table[table['comparable']])}). Rank at equal loss "
            "(measure='comparable_flatness'), or all by rank_minima(search, depth_band=None)."
        )


def warn_if_few_fit(table: pd.DataFrame, by: str, depth_band: float | None) -> None:
    """Warn if most networks do not reach the loss at which they are compared."""
    if depth_band is not None:  # they are compared at the losses that they have
        return
    learned = table[is_complete(table) & (table["depth"] >= LEARNED)]
    n = int(learned[by].notna().sum())
    if 0 < n < FEW_FIT * len(learned):
        warn(
            f"only {n} of {len(learned)} networks reach the loss at which they are compared. A "
            f"cause is {WRONG_LABELS}"
        )


def _losses(table: pd.DataFrame) -> str:
    """Return the range of the training losses."""
    low, high = f"{table['train_loss'].min():.3g}", f"{table['train_loss'].max():.3g}"
    return low if low == high else f"{low} to {high}"


def is_averaged(minima: pd.DataFrame, records: Sequence[Minimum]) -> NDArray[np.bool_]:
    """Return which rows the mean is of: networks that have learned, on the best of the data.

    The best data have the fewest random labels and the most samples. Networks have learned if they
    lower a constant's loss at least half as far as the best of them: the worst that
    benchmarks.worth.selection averages. A larger share keeps what fits wrong labels best. Where a
    constant has no loss, all that converged have. It is the first row if there are none. `records`
    are what the trials of the rows recorded.
    """

    def recorded(name: str) -> NDArray[np.float64]:
        return np.array([getattr(minimum, name) for minimum in records], dtype=float)

    def varied(name: str) -> NDArray[np.float64]:
        column = minima.get(f"{PARAM_PREFIX}{PREFIX}{name}", pd.Series(0.0, minima.index))
        return pd.to_numeric(column).fillna(0).to_numpy(dtype=float)

    kept = is_complete(minima).copy()
    # sizes may be numbers, shares and None; a net may hold samples out as well
    varies = f"{PARAM_PREFIX}{PREFIX}train_size" in minima
    size = recorded("n_samples") if varies else np.zeros(len(minima))
    for amount in (varied("random_labels"), varied("confusion_size"), -size):
        kept &= amount == amount[kept].min(initial=np.inf)
    drop = recorded("constant_loss") - minima["train_loss"].to_numpy(dtype=float)
    far = drop >= np.fmax.reduce(drop[kept], initial=0.0) / 2
    kept &= np.where(np.isnan(drop), minima["converged"], far).astype(bool)
    return kept if kept.any() else np.arange(len(minima)) == 0


def trial_at(minima: pd.DataFrame, index: int) -> int:
    """Return the trial of a row of `cv_results_`, which are in the order of trials."""
    return int(np.sort(minima["trial"])[index])


def cv_results(
    table: pd.DataFrame,
    ranked: pd.DataFrame,
    by: str,
    space: Space,
    trials: Sequence[FrozenTrial],
) -> dict[str, Any]:
    """Arrange the table of candidates as scikit-learn's searches do."""
    minima, n = table["comparable"].to_numpy(), len(table)
    scores = np.where(minima, -table[by].to_numpy(dtype=float), np.nan)
    params = [space.values(trials[number]) for number in table["trial"].tolist()]
    order = ranked.set_index("trial")["rank"].loc[table["trial"]].to_numpy()
    # minima come first in the ranking; those with equal scores share the smallest of their ranks
    ranks = np.where(minima, rankdata(-scores, method="min", nan_policy="omit"), order)
    columns = {
        f"param_{name}": np.ma.MaskedArray(
            np.fromiter((drawn.get(name) for drawn in params), dtype=object, count=n),
            mask=[name not in drawn for drawn in params],
        )
        for name in dict.fromkeys(name for drawn in params for name in drawn)
    }
    return {
        "mean_fit_time": table["seconds"].to_numpy(dtype=float),
        "std_fit_time": np.zeros(n),
        **columns,
        "params": params,
        "split0_test_score": scores,
        "mean_test_score": scores.copy(),
        "std_test_score": np.zeros(n),
        "rank_test_score": ranks.astype(np.int32),
    }
