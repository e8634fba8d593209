"""Show what a search found: table of minima, `cv_results_` and reasons of failures."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import optuna
import pandas as pd
from optuna.trial import FrozenTrial, TrialState
from scipy.stats import rankdata

from relflat_sk._warnings import warn
from relflat_sk.minima import STATES, is_complete, is_converged, table_of_trials
from relflat_sk.search._claims import is_cut_short, is_superseded
from relflat_sk.search._goal import NO_MEASURE, SATURATED
from relflat_sk.search._space import Space
from relflat_sk.search._weights import last_prefix


def listed(measure: Any) -> list[Any]:
    """Return the measures of a search as a list."""
    return [measure] if isinstance(measure, str) or callable(measure) else list(measure)


def candidate_table(study: optuna.Study) -> pd.DataFrame:
    """Return the unranked table of a study's candidates, in the order of the trials."""
    trials = study.get_trials(deepcopy=False)
    ended = [trial for trial in trials if trial.state in STATES and not is_cut_short(trial)]
    ended = [trial for trial in ended if not is_superseded(trial, trials)]
    table = table_of_trials(ended, study.user_attrs)
    if len(study.directions) > 1:
        front = [trial.number for trial in study.best_trials]
        table["pareto"] = table["trial"].isin(front)
    return table


def check_table(
    table: pd.DataFrame, interrupted: bool, estimator: Any, stored_as: str | None = None
) -> None:
    """Refuse a table in which no candidate was measured, and warn of one without minima."""
    if table.empty and not interrupted:
        raise ValueError(
            "no candidate was trained: the search was ended before, by timeout or by a callback."
        )
    # Optuna takes a network that is no better than a constant for failed, but it has a depth
    if not (is_complete(table) | table["depth"].notna()).any():
        if interrupted:
            raise KeyboardInterrupt("before any candidate was finished.")
        message = f"none of {len(table)} candidates could be trained and measured:\n"
        message += _list_reasons(table)
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
    if not is_converged(table).any():
        if table["reason"].astype(str).str.startswith(NO_MEASURE).all():
            what = "no candidate has a finite measure: the ranking is by their training loss"
            advice = "Rank by another measure, or mend the function that returns such values."
        elif table["reason"].eq(SATURATED).all():
            what = "no candidate has a curvature to compare: the ranking is by their training loss"
            advice = (
                "Train to a larger loss (goal, StopAtLoss), with a criterion that has a curvature."
            )
        else:
            what = (
                "no candidate converged: the ranking is of networks that had not finished "
                "training, not of minima, by their training loss"
            )
            advice = _advise_longer_training(estimator)
        warn(f"{what} ({_losses(table)}). {advice} Reasons:\n" + _list_reasons(table))
        return
    _warn_of_others(table)
    if "comparable" in table.columns:
        _warn_of_other_depths(table)


def _advise_longer_training(estimator: Any) -> str:
    """Say which parameters of the estimator, if it has any, let a training end at a minimum."""
    prefix, params = last_prefix(estimator), estimator.get_params()
    if f"{prefix}max_epochs" in params:
        return f"Train longer ({prefix}max_epochs), or to a goal within reach (goal, StopAtLoss)."
    if f"{prefix}max_iter" in params:
        return (
            f"Train longer ({prefix}max_iter). If training ends by itself above the goal, set a "
            f"smaller {prefix}tol, or a larger goal."
        )
    return "Search with a goal within reach (goal)."


def _warn_of_others(table: pd.DataFrame) -> None:
    """Warn of candidates that are no minima, with the reasons, but not of pruned ones."""
    of_any_depth = table.drop(columns="comparable", errors="ignore")
    minima = is_converged(of_any_depth) & is_complete(table)
    others = table[~minima & (table["state"] != STATES[TrialState.PRUNED])]
    if len(others):
        warn(
            f"{len(others)} of {len(table)} candidates are no minima, and rank behind all others. "
            "Reasons:\n" + _list_reasons(others)
        )


def _warn_of_other_depths(table: pd.DataFrame) -> None:
    """Warn of minima that are deeper or shallower than those that are ranked together."""
    good = is_complete(table) & table["converged"].to_numpy(dtype=bool)
    left_out = table[good & ~table["comparable"]]
    if len(left_out):
        warn(
            f"{len(left_out)} of {good.sum()} minima are left out of the ranking, because their "
            f"training losses ({_losses(left_out)}) differ too much from those of the others "
            f"({_losses(table[table['comparable']])}), and flatness depends on the loss. Train "
            "all to the same loss (goal), or set depth_band=None to rank them together."
        )


def _losses(table: pd.DataFrame) -> str:
    """Return the range of the training losses."""
    low, high = f"{table['train_loss'].min():.3g}", f"{table['train_loss'].max():.3g}"
    return low if low == high else f"{low} to {high}"


def _list_reasons(table: pd.DataFrame) -> str:
    """List why candidates failed or did not converge, the five most frequent reasons first."""
    counts = table["reason"].value_counts().head(5)
    return "\n".join(f"  {count} x {str(reason)[:500]}" for reason, count in counts.items())


def cv_results(
    table: pd.DataFrame,
    ranked: pd.DataFrame,
    by: str,
    space: Space,
    trials: Sequence[FrozenTrial],
) -> dict[str, Any]:
    """Arrange the table of candidates as scikit-learn's searches do."""
    minima = is_converged(table) & is_complete(table)
    scores = np.where(minima, -table[by].to_numpy(dtype=float), np.nan)
    params = [space.values(trials[number]) for number in table["trial"].tolist()]
    results: dict[str, Any] = {
        "mean_fit_time": table["seconds"].to_numpy(dtype=float),
        "std_fit_time": np.zeros(len(table)),
    }
    for name in space.entries:
        values = np.ma.array(np.empty(len(table), dtype=object), mask=True)
        for index, drawn in enumerate(params):
            if name in drawn:
                values[index] = drawn[name]
        results[f"param_{name}"] = values
    results["params"] = params
    results["split0_test_score"] = scores
    results["mean_test_score"] = scores.copy()
    results["std_test_score"] = np.zeros(len(table))
    order = ranked.set_index("trial")["rank"].loc[table["trial"]].to_numpy()
    # minima come first in the ranking; those with equal scores share the smallest of their ranks
    ranks = np.where(minima, rankdata(-scores, method="min", nan_policy="omit"), order)
    results["rank_test_score"] = ranks.astype(np.int32)
    return results


def is_minimum(trial: FrozenTrial) -> bool:
    """Return whether a trial has found a minimum."""
    return trial.state == TrialState.COMPLETE and bool(trial.user_attrs.get("converged"))


class _Held(NamedTuple):
    """A candidate with its estimator; equally flat minima rank in the order of their trials."""

    value: float
    number: int
    depth: float
    estimator: Any


class FlattestSoFar:
    """The estimators of the candidates that may rank first.

    Only minima of about the same depth are compared, and which depth that is depends on all
    candidates. A minimum cannot rank first any more once flatter ones at least as deep and at
    least as shallow lie within one band: every band that contains it contains one of them. As
    long as there is no minimum, the first of the other candidates is held.
    """

    def __init__(self, enabled: bool, depth_band: float | None) -> None:
        self.enabled = enabled
        self.band = np.inf if depth_band is None else depth_band
        self.held: list[_Held] = []
        self.other: _Held | None = None

    def offer(self, trial: FrozenTrial, estimator: Any) -> None:
        """Hold the estimator of a trial if it may rank first."""
        if not self.enabled or trial.state != TrialState.COMPLETE:
            return
        depth = trial.user_attrs.get("depth", np.nan)
        offered = _Held(trial.values[0], trial.number, depth, estimator)
        if is_minimum(trial):
            self.held = [*self.held, offered]
            self.held = [one for one in self.held if not self._is_beaten(one)]
            self.other = None
        elif not self.held and (self.other is None or _order(offered) < _order(self.other)):
            self.other = offered

    def estimator(self, number: int) -> Any:
        """Return the estimator of a trial."""
        held = self.held if self.other is None else [self.other]
        return next((one.estimator for one in held if one.number == number), None)

    def _is_beaten(self, one: _Held) -> bool:
        """Return whether flatter minima share every band with a minimum."""
        flatter = [other for other in self.held if other[:2] < one[:2]]
        if np.isnan(one.depth):  # it is in every band
            return any(np.isnan(other.depth) for other in flatter)
        deeper = min((o.depth for o in flatter if o.depth >= one.depth), default=np.inf)
        shallower = max((o.depth for o in flatter if o.depth <= one.depth), default=0.0)
        beside = any(np.isnan(other.depth) for other in flatter)
        return beside or (bool(flatter) and np.isinf(self.band)) or deeper <= self.band * shallower


def _order(one: _Held) -> tuple[Any, ...]:
    """Return what ranks candidates that are no minima: the deepest first, as in `rank_minima`."""
    if np.isnan(one.depth):
        return not np.isfinite(one.value), np.inf, one.value, one.number
    return not np.isfinite(one.value), -one.depth, 0.0, one.number
