"""Ways to choose among trained candidates, and what a choice is worth on test data.

Each way gives every candidate a score, small is good, and takes the candidate with the smallest,
or the five smallest together. Ties are broken at random: results are expected values.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import log_softmax, softmax
from scipy.stats import kendalltau, rankdata

from relflat_sk import rank_minima
from relflat_sk.minima._table import Minimum
from relflat_sk.search._results import is_averaged

Floats = NDArray[np.float64]
SHARES = (0.02, 0.05, 0.1, 0.2)
# forms of flatness at equal loss: the library's measure, and whether it is per feature already
FORMS = {
    "kappa/m": ("relative_flatness", False),
    "comparable_flatness": ("comparable_flatness", True),
    "normalized/m": ("normalized_relative_flatness", False),
}
# the constants that `--report` finds best on the data sets of `CHOSEN_ON`
FORM, SHARE = "comparable_flatness", 0.1
HALVES = ("davies_bouldin", "within_scatter", "label_wise_mixup")  # of which the mean is taken
N_ORDERS = 20  # of candidates that are tied where five are taken
FEW = 5


@dataclass
class Fits:
    """What is known of the k candidates of a unit of the study."""

    y: Floats  # training targets, classes or values
    y_test: Floats
    losses: Floats  # (k,), training losses of the fits to all training data
    constant: float  # training loss of the best constant
    outputs: list[Floats]  # on the training data
    test_outputs: list[Floats]
    noisy_outputs: list[Floats]  # on training inputs with noise
    widths: Floats  # (k,), number of features that the last layer receives
    converged: NDArray[np.bool_]  # (k,), which candidates may be chosen
    measures: pd.DataFrame  # of the library, by name
    # "5%", "20%", "5-fold" and "10-fold" -> held-out log loss (or squared error) and held-out error
    # of each candidate, and the test outputs of fits to the rest (None for folds)
    held_out: dict[str, tuple[Floats, Floats, list[Floats] | None]] = field(default_factory=dict)

    @property
    def is_regression(self) -> bool:
        """Whether targets are values."""
        return self.y.dtype.kind == "f"


@dataclass(frozen=True)
class Way:
    """A way to choose: scores of the candidates, small is good, and what is taken of them."""

    scores: Floats  # (k,), nan for candidates that it cannot judge: they rank last, at random
    size: int = 1  # number of fits whose predictions are averaged
    cost: float = 1.0  # training, in fits of all candidates to all training data
    outputs: list[Floats] | None = None  # on the test data, of fits to less than all training data


# -- what a choice is worth -----------------------------------------------------------------


def predictions(outputs: Floats, y: Floats) -> Floats:
    """Turn outputs (n, c) into probabilities, or into values (n, 1)."""
    return outputs if y.dtype.kind == "f" else softmax(outputs, axis=1)


def error(predicted: Floats, y: Floats) -> float:
    """Return 100 minus accuracy, or minus R2, in points."""
    if y.dtype.kind == "f":
        return float(100 * np.mean((predicted[:, 0] - y) ** 2) / np.var(y))
    return float(100 * np.mean(predicted.argmax(axis=1) != y))


def test_errors(outputs: list[Floats], y: Floats) -> Floats:
    return np.array([error(one, y) for one in outputs])


def _finite_first(scores: Floats) -> Floats:
    """Rank candidates that a way cannot judge behind all others, all alike."""
    return np.where(np.isfinite(scores), scores, np.inf)


def judge(way: Way, fits: Fits, best: float, rng: np.random.Generator) -> dict[str, float]:
    """Return error, regret, regret of the five best, tau with the test error, and cost."""
    usable = np.flatnonzero(fits.converged)
    outputs = fits.test_outputs if way.outputs is None else way.outputs
    errors = test_errors(outputs, fits.y_test)[usable]
    scores = _finite_first(way.scores[usable])
    if way.size == 1:
        found = errors[scores == scores.min()].mean()
    else:
        parts = np.array([predictions(outputs[i], fits.y) for i in usable])
        last = np.sort(scores)[min(way.size, len(scores)) - 1]
        orders = N_ORDERS if (scores <= last).sum() > way.size else 1
        found = np.mean([
            error(
                parts[np.lexsort((rng.random(len(scores)), scores))[: way.size]].mean(axis=0),
                fits.y_test,
            )
            for _ in range(orders)
        ])
    fifth = np.sort(scores)[FEW - 1]
    below, tied = errors[scores < fifth], errors[scores == fifth]
    few = (below.sum() + (FEW - len(below)) * tied.mean()) / FEW
    single = way.size == 1
    varies = single and len(np.unique(scores)) > 1 and len(np.unique(errors)) > 1
    return {
        "error": float(found),
        "regret": float(found) - best,
        "top5": float(few) - best if single else math.nan,
        "tau": float(kendalltau(rankdata(scores), errors).statistic) if varies else math.nan,
        "cost": way.cost,
    }


# -- scores -----------------------------------------------------------------------------------


def flatness_scores(fits: Fits) -> dict[str, Floats]:
    """Return the measures, and the forms of flatness that are per feature."""
    found = {name: fits.measures[name].to_numpy(float) for name in fits.measures}
    for form, (measure, is_per_feature) in FORMS.items():
        for suffix in ("", *(f" at {share:g}" for share in SHARES)):
            values = found.get(f"{measure}{suffix}")
            if values is not None and not is_per_feature:
                found[f"{form}{suffix}"] = values / fits.widths
                if suffix:
                    del found[f"{measure}{suffix}"]
    return found


def disagreement(fits: Fits) -> Floats:
    """Return how far each candidate is from the mean prediction of all, on noisy training inputs.

    The share of other classes than those of the mean prediction, or the squared difference.
    """
    each = np.array([predictions(one, fits.y) for one in fits.noisy_outputs])
    mean = each[fits.converged].mean(axis=0)
    if fits.is_regression:
        return np.array([np.mean((one - mean) ** 2) for one in each])
    classes = mean.argmax(axis=1)
    return np.array([np.mean(one.argmax(axis=1) != classes) for one in each])


def output_scores(fits: Fits) -> dict[str, Floats]:
    """Return the scores of predictions on the training data: loss, confidence, entropy, margin."""
    found: dict[str, Floats] = {"training loss": fits.losses}
    if fits.is_regression:
        return found
    confidence, entropy, margin = [], [], []
    for z in fits.outputs:
        p, log_p = softmax(z, axis=1), log_softmax(z, axis=1)
        confidence.append(-p.max(axis=1).mean())
        entropy.append(-(p * log_p).sum(axis=1).mean())
        rows = np.arange(len(z))
        others = z.copy()
        others[rows, fits.y] = -np.inf
        margin.append(-(z[rows, fits.y] - others.max(axis=1)).mean())
    return found | {
        "mean confidence": np.array(confidence),
        "predictive entropy": np.array(entropy),
        "mean margin": np.array(margin),
    }


def as_in_a_search(fits: Fits, scores: Floats) -> Floats:
    """Return places in the ranking of `FlatMinimaSearch` with its defaults.

    A twentieth of a constant's loss makes a minimum, and minima are compared that are about equally
    deep. The deepest candidate is first if there is no minimum.
    """
    depth = fits.constant / fits.losses
    table = pd.DataFrame({
        "trial": range(len(scores)), "converged": depth >= 20, "value": scores, "depth": depth,
    })  # fmt: skip
    order = rank_minima(table, by="value")["trial"].to_numpy()
    places = np.empty(len(scores))
    places[order] = np.arange(len(scores))
    return places


def averages(fits: Fits) -> dict[str, NDArray[np.bool_]]:
    """Return which candidates means are of: all, those that a search averages, those at its goal.

    A search's goal is a twentieth of a constant's loss.
    """
    depth = fits.constant / fits.losses
    state = np.where(np.isfinite(fits.losses), "complete", "failed")
    table = {"train_loss": fits.losses, "converged": fits.converged, "state": state}
    records = [Minimum(constant_loss=fits.constant)] * len(state)
    return {
        "average of all": fits.converged,
        "average, as in a search": fits.converged & is_averaged(pd.DataFrame(table), records),
        "average of those at a search's goal": fits.converged & (depth >= 20),
    }


def best_of_few(first: Floats, then: Floats, n: int) -> Floats:
    """Order by `first`, but the best n of it by `then`."""
    places = rankdata(_finite_first(first), method="ordinal")
    return np.where(places <= n, rankdata(_finite_first(then)) - len(then) - 1, places)


def all_scores(fits: Fits) -> dict[str, Floats]:
    """Return the scores of all ways to choose one candidate without held-out data, by name."""
    scores = flatness_scores(fits) | output_scores(fits)
    for name in ("relative_flatness", "normalized_relative_flatness"):
        if name in scores:
            scores[f"{name}, as in a search"] = as_in_a_search(fits, scores[name])
    if "kappa/m" in scores:
        rate = -2 / (4 + fits.widths)
        scores["bound"] = fits.losses + len(fits.y) ** rate * scores["kappa/m"] / 2
    scores["nearest to the mean of all"] = disagreement(fits)
    return {name: _masked(fits, values) for name, values in scores.items()}


def _masked(fits: Fits, scores: Floats) -> Floats:
    """Rank candidates that may not be chosen behind all others."""
    return np.where(fits.converged, _finite_first(scores), np.inf)


def ways(fits: Fits) -> dict[str, Way]:
    """Return all ways that the fits at hand allow, by name; see the parts of the study."""
    k, half = len(fits.losses), int(fits.converged.sum()) // 2
    scores = all_scores(fits)
    flat = scores.get(f"{FORM} at {SHARE:g}", np.full(k, np.inf))
    found = {name: Way(values) for name, values in scores.items()}
    found |= {
        "5 flattest": Way(flat, FEW),
        "5 lowest training loss": Way(scores["training loss"], FEW),
        "random": Way(np.zeros(k)),
        "5 random": Way(np.zeros(k), FEW),
        "flatter half": Way(flat, half),
    }
    found |= {
        f"half of lowest {name}": Way(scores[name], half) for name in HALVES if name in scores
    }
    found |= {
        name: Way(np.where(kept, 0.0, np.inf), int(kept.sum()))
        for name, kept in averages(fits).items()
        if kept.any()
    }
    # whose fits cost a share of those to all data
    for part, share in (("20%", 0.8), ("5%", 0.95), ("5-fold", 4.0), ("10-fold", 9.0)):
        if part not in fits.held_out:
            continue
        losses, misses, rest = fits.held_out[part]
        losses, misses = _masked(fits, losses), _masked(fits, misses)
        found |= {
            f"{part}, log loss, refit": Way(losses, 1, share + 1 / k),
            f"{part}, accuracy, refit": Way(misses, 1, share + 1 / k),
            f"5 best of {part}, refit": Way(losses, FEW, share + FEW / k),
            f"better half of {part}, refit": Way(losses, half, share + half / k),
        }
        if rest is not None:
            few, ranks = best_of_few(losses, flat, FEW), rankdata(losses) + rankdata(flat)
            found |= {
                f"{part}, log loss": Way(losses, 1, share, rest),
                f"{part}, accuracy": Way(misses, 1, share, rest),
                f"5 best of {part}": Way(losses, FEW, share, rest),
                f"flattest of 5 best of {part}": Way(few, 1, share + FEW / k),
                f"mean rank of flatness and {part}": Way(ranks, 1, share + 1.0),
            }
    return found


def judge_all(fits: Fits, seed: int) -> Mapping[str, dict[str, float]]:
    rng = np.random.default_rng(seed)
    best = test_errors(fits.test_outputs, fits.y_test)[fits.converged].min()
    return {name: judge(way, fits, best, rng) for name, way in ways(fits).items()}
