"""Show what a search found: table of minima, `cv_results_` and reasons of failures."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import optuna
import pandas as pd
from numpy.typing import NDArray
from optuna.trial import FrozenTrial, TrialState
from scipy.stats import rankdata
from skorch import NeuralNet

from relflat_sk._models.network_of import final_estimator
from relflat_sk._warnings import warn
from relflat_sk.minima import rank_minima
from relflat_sk.minima._table import (
    PARAM_PREFIX,
    STATES,
    attributes_of,
    is_complete,
    list_reasons,
    table_of_trials,
)
from relflat_sk.search._claims import is_cut_short, is_superseded
from relflat_sk.search._data import PREFIX
from relflat_sk.search._goal import NO_MEASURE, SATURATED
from relflat_sk.search._space import Space
from relflat_sk.search._weights import last_prefix

# With wrong labels, fewer of the networks that have learned (are so deep) reach the loss, and
# flatness orders those of different width and training worse than chance, see
# benchmarks.worth.selection; there the same happens with some data whose labels are right.
FEW_FIT, LEARNED = 0.4, 2.0
WRONG_LABELS = (
    "that labels are wrong, and then flatness orders networks worse than chance. Choose by "
    "held-out data, or average the predictions of all (docs/does_it_help.md)."
)


def listed(measure: Any) -> list[Any]:
    """Return the measures of a search as a list."""
    if isinstance(measure, str) or callable(measure):
        return [measure]
    found = list(measure) if isinstance(measure, Iterable) else []
    if not found:
        kind = ValueError if isinstance(measure, Iterable) else TypeError
        raise kind(
            "measure must be a name, a function, a FlatnessScorer or a sequence of these, got "
            f"{measure!r}. See get_measure_names."
        )
    return found


def candidate_table(study: optuna.Study, measures: Sequence[str] = ()) -> pd.DataFrame:
    """Return the unranked table of a study's candidates, in the order of the trials."""
    trials = study.get_trials(deepcopy=False)
    ended = [trial for trial in trials if trial.state in STATES and not is_cut_short(trial)]
    ended = [trial for trial in ended if not is_superseded(trial, trials)]
    table = table_of_trials(ended, study.user_attrs, measures)
    if len(study.directions) > 1:
        front = [trial.number for trial in study.best_trials]
        table["pareto"] = table["trial"].isin(front)
    return table


def check_table(
    table: pd.DataFrame, n_elsewhere: int, interrupted: bool, estimator: Any, stored_as: Any
) -> None:
    """Refuse a table in which no candidate was measured; warn of one without minima or of few.

    `n_elsewhere` candidates are in training in other processes.
    """
    elsewhere = f"other processes still train {n_elsewhere} of the candidates of {stored_as!r}"
    if table.empty and not interrupted:
        raise ValueError(
            f"no candidate is trained yet: {elsewhere}. Fit again when they are finished."
            if n_elsewhere
            else "no candidate was trained: the search was ended before, by timeout or by a "
            "callback."
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
    if n_elsewhere and not interrupted:
        warn(
            f"{elsewhere}, and the ranking of {len(table)} lacks them. When they are finished, fit "
            "again with the same storage and study_name: what is finished is not trained again."
        )
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
        what, advice = _explain_no_minimum(table["reason"].astype(str), estimator)
        warn(
            f"{what} by their training loss ({_losses(table)}). {advice} Reasons:\n"
            + list_reasons(table)
        )
        return
    _warn_of_missing(table)


def _warn_of_missing(table: pd.DataFrame) -> None:
    """Warn of candidates that rank behind all others, and of measures without a value."""
    others = table[~table["converged"] & (table["state"] != STATES[TrialState.PRUNED])]
    if len(others):
        warn(
            f"{len(others)} of {len(table)} candidates are no minima, and rank behind all others. "
            "Reasons:\n" + list_reasons(others)
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
            f"the others ({_losses(table[table['comparable']])}), and flatness depends on the "
            "loss. Rank at equal loss (measure='comparable_flatness'), train all to the same loss "
            "(goal), or rank all together by rank_minima(search, depth_band=None)."
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


def _explain_no_minimum(reasons: "pd.Series[str]", estimator: Any) -> tuple[str, str]:
    """Say what the ranking is of, if no candidate is a minimum, and what to do about it."""
    if reasons.str.startswith(NO_MEASURE).all():
        what = "no candidate has a finite measure: they are ranked"
        return what, "Rank by another measure, or mend the function that returns such values."
    if reasons.str.startswith(SATURATED).all():
        what = "no candidate has a curvature to compare: they are ranked"
        advice = (
            "Measure at equal loss (measure='comparable_flatness'), or train to a larger loss "
            "(goal, StopAtLoss), with a criterion that has a curvature."
        )
        return what, advice
    what = (
        "no candidate converged: the ranking is of networks that had not finished training, not "
        "of minima,"
    )
    prefix, params = last_prefix(estimator), estimator.get_params()
    if f"{prefix}max_epochs" in params:
        advice = f"Train longer ({prefix}max_epochs), or to a goal within reach (goal, StopAtLoss)."
    elif f"{prefix}max_iter" in params:
        advice = (
            f"Train longer ({prefix}max_iter). If training ends by itself above the goal, set a "
            f"smaller {prefix}tol, or a larger goal."
        )
    else:
        advice = "Search with a goal within reach (goal)."
    return what, advice


def _losses(table: pd.DataFrame) -> str:
    """Return the range of the training losses."""
    low, high = f"{table['train_loss'].min():.3g}", f"{table['train_loss'].max():.3g}"
    return low if low == high else f"{low} to {high}"


def is_averaged(minima: pd.DataFrame, records: Sequence[Mapping[str, Any]]) -> NDArray[np.bool_]:
    """Return which rows the mean is of: networks that have learned, on the best of the data.

    The best data have the fewest random labels and the most samples. Networks have learned if they
    lower a constant's loss at least half as far as the best of them: the worst that
    benchmarks.worth.selection averages. Where a constant has no loss, all that converged have. It
    is the first row if there are none. `records` are what the trials of the rows recorded.
    """

    def recorded(name: str) -> NDArray[np.float64]:
        return np.array([one.get(name, np.nan) for one in records], dtype=float)

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
            np.fromiter((one.get(name) for one in params), dtype=object, count=n),
            mask=[name not in one for one in params],
        )
        for name in dict.fromkeys(name for one in params for name in one)
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


def is_minimum(trial: FrozenTrial) -> bool:
    """Return whether a trial has found a minimum."""
    return trial.state == TrialState.COMPLETE and bool(trial.user_attrs.get("converged"))


class _Held(NamedTuple):
    """A minimum with its estimator; equally flat minima rank in the order of their trials."""

    value: float
    number: int
    depth: float
    estimator: Any


@dataclass
class HeldEstimators:
    """The estimators of the candidates that may rank first, or of `every` one for a mean.

    Only minima of about the same depth are compared, and which depth that is depends on all
    candidates. A minimum cannot rank first any more once flatter ones at least as deep and at
    least as shallow lie within one band: every band that contains it contains one of them. As
    long as there is no minimum, the first of the other candidates is held.
    """

    by: str
    band: float | None
    every: bool = False
    held: list[_Held] = field(default_factory=list)
    other: tuple[FrozenTrial, Any] | None = None

    def offer(self, trial: FrozenTrial, estimator: Any) -> None:
        """Hold the estimator of a trial if it may be needed, as lean as it can be."""
        complete = trial.state == TrialState.COMPLETE
        if is_minimum(trial) or (self.every and complete):
            # minima without a depth are in every band, as if all had the depth 1
            depth = attributes_of(trial).get("depth", 1.0) if self.band is not None else 1.0
            self.held.append(_Held(trial.values[0], trial.number, depth, estimator))
            if self.every:
                _forget_training(estimator)
            else:
                self.held = [one for one in self.held if not self._is_beaten(one)]
            self.other = None
        elif complete and not self.held:
            both = [one for one in (self.other, (trial, estimator)) if one is not None]
            table = table_of_trials((one for one, _ in both), {})
            first = rank_minima(table, self.by)["trial"].iloc[0]
            self.other = next(one for one in both if one[0].number == first)

    def estimator(self, number: int) -> Any:
        """Return the estimator of a trial."""
        if self.other is not None and self.other[0].number == number:
            return self.other[1]
        return next((one.estimator for one in self.held if one.number == number), None)

    def _is_beaten(self, one: _Held) -> bool:
        """Return whether flatter minima share every band with a minimum."""
        flatter = [other.depth for other in self.held if other[:2] < one[:2]]
        deeper = min((depth for depth in flatter if depth >= one.depth), default=np.inf)
        shallower = max((depth for depth in flatter if depth <= one.depth), default=0.0)
        return deeper <= (self.band or 1.0) * shallower


def _forget_training(estimator: Any) -> None:
    """Free what a net needs to train only: together several times its weights."""
    net = None if estimator is None else final_estimator(estimator)
    if isinstance(net, NeuralNet):
        net.module_.zero_grad()
        for epoch in net.history_:
            epoch["batches"] = []
        if hasattr(net, "optimizer_"):
            net.optimizer_.state.clear()
