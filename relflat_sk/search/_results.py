"""Show what a search found: the table of minima, `cv_results_`, and the mean of its networks."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import optuna
import pandas as pd
from numpy.typing import NDArray
from optuna.trial import FrozenTrial, TrialState
from scipy.stats import rankdata
from sklearn.base import is_classifier, is_regressor
from sklearn.ensemble import VotingClassifier, VotingRegressor
from sklearn.frozen import FrozenEstimator
from torch import Tensor, as_tensor

from relflat_sk._checks import warn
from relflat_sk._models.network_of import describe, final_estimator, last_prefix
from relflat_sk.minima._ranking import mark_depth_band
from relflat_sk.minima._table import (
    PARAM_PREFIX,
    STATES,
    Minimum,
    is_complete,
    list_reasons,
    shorten_parameters,
    table_of_trials,
)
from relflat_sk.search._measure import Measuring
from relflat_sk.search._recipe import Recipe
from relflat_sk.search._space import Space
from relflat_sk.search._sweep import without_superseded
from relflat_sk.search._task import PREFIX

# -- the table -----------------------------------------------------------------------------------


def candidate_table(
    study: optuna.Study, recipe: Recipe, further: Sequence[str] = ()
) -> pd.DataFrame:
    """Return the unranked table of candidates, in the order of the trials.

    It says which are `comparable`. Measures that no candidate has are columns of nan.
    """
    trials = without_superseded(study.get_trials(deepcopy=False))
    names = [*recipe.task.measuring.names, *further]
    table = table_of_trials(trials, study.user_attrs, names)
    if len(study.directions) > 1:
        table["pareto"] = table["trial"].isin([trial.number for trial in study.best_trials])
    table = shorten_parameters(table, last_prefix(recipe.task.estimator))
    return mark_depth_band(table, recipe.task.measuring.depth_band)


def check_table(table: pd.DataFrame, interrupted: bool, stored_as: Any) -> None:
    """Refuse a table in which no candidate was measured; warn of one without minima or of few."""
    if table.empty and not interrupted:
        raise ValueError("no candidate was trained: the search was ended before the first one.")
    # Optuna takes a network that is no better than a constant for failed, but it has a depth
    if not (is_complete(table) | table["depth"].notna()).any():
        if interrupted:
            raise KeyboardInterrupt("before any candidate was finished.")
        raise _failure(table)
    if interrupted:
        advice = "give it a storage and a study_name."
        if stored_as is not None:
            advice = f"fit again with the same storage and study_name={stored_as!r}."
        warn(
            f"interrupted: the search ends with the {len(table)} candidates that were finished. "
            f"To go on with a search another time, {advice}"
        )
    if not table["converged"].any():
        warn(
            f"no candidate converged: all are ranked by training loss ({_losses(table)}). Train "
            f"longer, or to a goal within reach. Reasons:\n{list_reasons(table)}"
        )
        return
    n, ranked = len(table), table[table["comparable"]]
    lacking = "are ranked, but have no value of a measure that does not rank"
    for rows, what in (
        (table[~table["converged"]], f"{n} candidates are no minima, and rank last"),
        (ranked[ranked["reason"] != ""], f"{len(ranked)} minima {lacking}"),
    ):
        rows = rows[rows["state"] != STATES[TrialState.PRUNED]]  # noqa: PLW2901
        if len(rows):
            warn(f"{len(rows)} of {what}. Reasons:\n{list_reasons(rows)}")
    _warn_if_criteria_vary(ranked)
    left_out = table[table["converged"] & ~table["comparable"]]
    if len(left_out):
        warn(
            f"{len(left_out)} of {table['converged'].sum()} minima are left out of the ranking, "
            f"because their training losses ({_losses(left_out)}) differ too much from "
            f"{_losses(ranked)}. Use 'comparable_flatness', or rank_minima(..., depth_band=None)."
        )


def _warn_if_criteria_vary(ranked: pd.DataFrame) -> None:
    """Warn of a ranking of minima whose losses are not the same function."""
    for name in ranked.filter(regex=rf"^{PARAM_PREFIX}(.*__)?criterion(__|$)"):
        if ranked[name].astype(str).nunique() > 1:
            warn(f"{name} varies: the flatness of different losses is compared. Search each alone.")


def _failure(table: pd.DataFrame) -> Exception:
    """Return the error for candidates that all failed: their own if they agree in it."""
    reasons = table["reason"].astype(str)
    kind = TypeError if reasons.str.startswith("TypeError:").all() else ValueError
    name, _, message = reasons.iloc[0].partition(": ")
    if name == kind.__name__ and reasons.nunique() == 1:
        return kind(message)
    message = f"none of {len(table)} candidates could be trained and measured:\n"
    return kind(message + list_reasons(table))


# With wrong labels, fewer of the networks that have learned (are so deep) reach the loss, and
# flatness orders those of different width and training worse than chance, see
# benchmarks.worth.selection; there the same happens with some data whose labels are right.
FEW_FIT, LEARNED = 0.4, 2.0


def warn_if_few_fit(table: pd.DataFrame, measuring: Measuring) -> None:
    """Warn if most networks do not reach the loss at which they are compared."""
    learned = table[is_complete(table) & (table["depth"] >= LEARNED)]
    n = int(learned[measuring.ranking[0]].notna().sum())
    # with a band, they are compared at the losses that they have
    if measuring.depth_band is None and 0 < n < FEW_FIT * len(learned):
        warn(
            f"only {n} of {len(learned)} networks reach the loss at which they are compared. If "
            "labels are wrong, flatness orders networks worse than chance: choose by held-out "
            "data, or average the predictions of all (docs/does_it_help.md)."
        )


def _losses(table: pd.DataFrame) -> str:
    """Return the range of the training losses."""
    low, high = f"{table['train_loss'].min():.3g}", f"{table['train_loss'].max():.3g}"
    return low if low == high else f"{low} to {high}"


def trial_at(minima: pd.DataFrame, index: int) -> int:
    """Return the trial of a row of `cv_results_`, which are in the order of trials."""
    return int(np.sort(minima["trial"])[index])


def cv_results(
    table: pd.DataFrame, ranked: pd.DataFrame, by: str, space: Space, trials: Sequence[FrozenTrial]
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


# -- the mean of networks ------------------------------------------------------------------------

NO_WEIGHTS = (
    "those of earlier sessions have no weights that can be read. Give the search an artifact_store "
    "before it trains."
)
# how many training inputs get noise, and how much of it, in standard deviations of each feature
N_NOISY, NOISE = 2000, 0.6


def is_averaged(minima: pd.DataFrame, records: Sequence[Minimum]) -> NDArray[np.bool_]:
    """Return which rows the mean is of: networks that have learned, on the best of the data.

    The best data have the fewest random labels and the most samples. Networks have learned if they
    lower a constant's loss at least half as far as the best of them, as shares of how far it can
    fall if that is known: the worst that benchmarks.worth.selection averages. A larger share keeps
    what fits wrong labels best. Where a constant has no loss, all that converged have. It is the
    first row if there are none. `records` are what the trials of the rows recorded.
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
    drop = 1 - 1 / recorded("depth")
    if np.isnan(drop[kept]).any():
        drop = recorded("constant_loss") - minima["train_loss"].to_numpy(dtype=float)
    far = drop >= np.fmax.reduce(drop[kept], initial=0.0) / 2
    kept &= np.where(np.isnan(drop), minima["converged"], far).astype(bool)
    return kept if kept.any() else np.arange(len(minima)) == 0


class _MeanRegressor(VotingRegressor):
    """Averages predictions of any shape; VotingRegressor takes those of one target."""

    def predict(self, X: Any) -> Any:
        return np.mean([member.predict(X) for member in self.estimators_], axis=0)


def has_mean(estimator: Any, y: Any = None) -> bool:
    """Return whether networks trained by an estimator predict what their mean predicts alone.

    A threshold of probabilities is no part of a mean, and several labels of a sample have none.
    """
    if is_regressor(estimator):
        return True
    if not (is_classifier(estimator) and hasattr(estimator, "predict_proba")):
        return False
    params = estimator.get_params()
    steps = last_prefix(estimator).split("__")
    prefixes = ["__".join([*steps[:i], ""]) for i in range(len(steps))]
    limits = {str(params.get(f"{prefix}threshold", "auto")) for prefix in prefixes}
    # of a TunedThresholdClassifierCV
    limits |= {"tuned" for prefix in prefixes if f"{prefix}thresholds" in params}
    shape = y.shape if hasattr(y, "shape") else np.asarray(y).shape
    return limits <= {"auto", "0.5"} and (len(shape) < 2 or shape[1] < 2)


def average(estimators: Mapping[str, Any], y: Any) -> Any:
    """Return fitted estimators, with their names, as one that averages their predictions."""
    if not estimators:
        raise ValueError(NO_WEIGHTS)
    members = [(name, FrozenEstimator(estimator)) for name, estimator in estimators.items()]
    for estimator in estimators.values():
        is_multilabel = getattr(final_estimator(estimator), "multilabel_", False)
        # a net that was fitted on a dataset or a loader has not seen which classes there are
        has_classes = is_regressor(estimator) or hasattr(estimator, "classes_")
        if is_multilabel or not (has_classes and has_mean(estimator, y)):
            raise ValueError(
                "an ensemble averages probabilities of single labels without a threshold, or "
                f"predictions of regressors, and {describe(estimator)} has none here."
            )
    first = next(iter(estimators.values()))
    if is_regressor(first):
        return _MeanRegressor(members).fit(None, [0.0])  # frozen members learn nothing
    ensemble = VotingClassifier(members, voting="soft").fit(None, first.classes_)
    if not all(np.array_equal(ensemble.classes_, x.classes_) for x in estimators.values()):
        raise ValueError(
            "an ensemble averages probabilities of the same sorted classes, and some candidates "
            "have others, or were trained on data that lack a class."
        )
    return ensemble


def check_mean(refit: str, estimator: Any, y: Any) -> None:
    """Refuse an estimator whose predictions have no mean."""
    if not has_mean(estimator, y):
        raise ValueError(
            f"refit={refit!r} needs probabilities of single labels without a threshold, or a "
            f"regressor, and got {describe(estimator)}. Set refit=True."
        )


def check_nearest(estimator: Any, X: Any, y: Any) -> None:
    """Refuse what has no network that is nearest to the mean on noisy inputs."""
    check_mean("nearest", estimator, y)
    if isinstance(X, Tensor):
        is_float = X.is_floating_point()
    elif isinstance(X, pd.DataFrame):
        is_float = all(map(pd.api.types.is_float_dtype, X.dtypes))
    else:
        is_float = isinstance(X, np.ndarray) and X.dtype.kind == "f"
    if not is_float:
        of_type = f" of {X.dtype}" if hasattr(X, "dtype") else ""
        raise ValueError(
            "refit='nearest' adds noise to X: it takes an array, a tensor or a data frame of "
            f"floats, got {type(X).__name__}{of_type}. Set refit='mean', or convert quantities."
        )


def nearest(mean: Any, X: Any, seed: int) -> int:
    """Return the trial in a mean that predicts most like it on noisy inputs; of equal the first.

    Rows of X are drawn with replacement, and get noise.
    """
    rng = np.random.default_rng(seed)
    rows = getattr(X, "iloc", X)[rng.integers(len(X), size=N_NOISY)]
    is_tensor = isinstance(rows, Tensor)
    values = rows.double().numpy(force=True) if is_tensor else np.asarray(rows, dtype=float)
    noise = NOISE * np.nanstd(values, axis=0) * rng.standard_normal(values.shape)
    if is_tensor:
        noisy = rows + as_tensor(noise).to(rows)
    else:
        noisy = (rows + noise).astype(rows.dtypes if hasattr(rows, "dtypes") else rows.dtype)
    expected = mean.predict(noisy)

    def distance(name: str) -> Any:
        predicted = mean.named_estimators_[name].predict(noisy)
        if is_regressor(mean):
            return np.mean((predicted - expected) ** 2)
        return np.mean(predicted != expected)

    return int(min(mean.named_estimators_, key=distance).removeprefix("trial"))
