"""Ways to choose among trained candidates, and what a choice is worth on test data.

Each way gives every candidate a score, small is good, and takes the candidate with the smallest,
or the five smallest together. Ties are broken at random: results are expected values.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from scipy.special import log_softmax, softmax
from scipy.stats import kendalltau, rankdata
from torch import Tensor

from relflat_sk import rank_minima

__all__ = ["FORMS", "SHARES", "Fits", "Way", "judge", "test_errors", "ways"]

Floats = NDArray[np.float64]
SHARES = (0.02, 0.05, 0.1, 0.2)
FORMS = ("kappa/m", "decoupled/m", "product/m")
# the constants that `--report` finds best on the data sets of `CHOSEN_ON`
FORM, SHARE = "decoupled/m", 0.1
N_ORDERS = 20  # of candidates that are tied where five are taken
FEW = 5


@dataclass
class Fits:
    """What is known of the candidates of a unit of the study; arrays have a row per candidate.

    Parameters
    ----------
    y, y_test : ndarray
        Training and test targets, classes or values.
    losses : ndarray of shape (k,)
        Training losses of the fits to all training data.
    constant : float
        Training loss of the best constant.
    features, weights, outputs : lists of ndarray
        Inputs of the last layer on the training data, its weight (classes, m), and its outputs.
    test_outputs : list of ndarray
        Outputs on the test data.
    converged : ndarray of bool
        Which candidates may be chosen.
    measures : DataFrame
        Measures of the library, by name.
    held_out : dict of str to tuple
        "5%", "20%", "5-fold" and "10-fold" -> held-out log loss (or squared error) and held-out
        error of each candidate, and the test outputs of fits to the rest (None for folds).
    """

    y: Floats
    y_test: Floats
    losses: Floats
    constant: float
    features: list[Floats]
    weights: list[Floats]
    outputs: list[Floats]
    test_outputs: list[Floats]
    converged: NDArray[np.bool_]
    measures: pd.DataFrame
    held_out: dict[str, tuple[Floats, Floats, list[Floats] | None]] = field(default_factory=dict)

    @property
    def is_regression(self) -> bool:
        """Whether targets are values."""
        return self.y.dtype.kind == "f"


@dataclass(frozen=True)
class Way:
    """A way to choose: scores of the candidates, small is good, and what is taken of them.

    Parameters
    ----------
    scores : ndarray of shape (k,)
        nan for candidates that the way cannot judge: they rank last, at random.
    cost : float
        Training, in fits of all candidates to all training data.
    outputs, errors
        Test outputs and test errors of the fits that the way takes.
    size : int
        Number of fits whose predictions are averaged.
    """

    scores: Floats
    cost: float
    outputs: list[Floats]
    errors: Floats
    size: int = 1


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
    """Return the error of each candidate."""
    return np.array([error(one, y) for one in outputs])


def _finite_first(scores: Floats) -> Floats:
    """Rank candidates that a way cannot judge behind all others, all alike."""
    return np.where(np.isfinite(scores), scores, np.inf)


def judge(way: Way, fits: Fits, best: float, rng: np.random.Generator) -> dict[str, float]:
    """Return error, regret, regret of the five best, tau with the test error, and cost."""
    usable = np.flatnonzero(fits.converged)
    scores, errors = _finite_first(way.scores[usable]), way.errors[usable]
    if way.size == 1:
        found = errors[scores == scores.min()].mean()
    else:
        parts = np.array([predictions(way.outputs[i], fits.y) for i in usable])
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


def curvature(weight: Floats, outputs: Floats, temperature: float) -> Floats:
    """Return ``Tr(W^T B_i W) / T^2`` of each sample under ``softmax(z / T)``, (n,)."""
    p = softmax(outputs / temperature, axis=1)
    squares = p @ np.square(weight).sum(axis=1) - np.square(p @ weight).sum(axis=1)
    return squares / temperature**2


def temperatures(outputs: Floats, y: Floats, losses: Sequence[float]) -> Floats:
    """Return the largest T of each network at which the mean cross-entropy of ``z / T`` is a loss.

    Shapes: outputs (k, n, c); returns (len(losses), k), nan where no T has the loss.
    """
    z, labels = torch.as_tensor(outputs), torch.as_tensor(y)
    own = z.gather(2, labels.expand(len(z), -1)[..., None])[..., 0].mean(dim=1)

    def mean_loss(log_t: Tensor) -> Tensor:
        beta = torch.exp(-log_t)
        return (z * beta[:, None, None]).logsumexp(dim=2).mean(dim=1) - own * beta

    grid = torch.linspace(math.log(1e3), math.log(1e-3), 47, dtype=torch.float64)
    values = torch.stack([mean_loss(t.expand(len(z))) for t in grid])
    found = []
    for loss in losses:
        reached = values <= loss
        first = reached.int().argmax(dim=0).clamp(min=1)
        above, below = grid[first - 1], grid[first]
        for _ in range(30):
            middle = (above + below) / 2
            is_above = mean_loss(middle) > loss
            above, below = (
                torch.where(is_above, middle, above), torch.where(is_above, below, middle)
            )  # fmt: skip
        found.append(torch.where(reached.any(dim=0), below.exp(), torch.nan))
    return torch.stack(found).numpy()


def flatness_forms(phi: Floats, weight: Floats, each: Callable[[Floats], Floats]) -> Floats:
    """Return the values of `FORMS`; `each` takes a weight to its curvature per sample, (n,)."""
    spread = phi.std(axis=0)
    spread[spread <= 1e-7 * np.abs(phi).max(axis=0)] = 0  # of rounding: the feature is constant
    scaled = np.divide(phi, spread, out=np.zeros_like(phi), where=spread > 0)
    plain = each(weight)
    kappa = np.mean(np.square(phi).sum(axis=1) * plain)
    decoupled = np.square(spread).sum() * plain.mean()
    product = np.mean(np.square(scaled).sum(axis=1) * each(weight * spread))
    return np.array([kappa, decoupled, product]) / phi.shape[1]


def flatness_scores(fits: Fits) -> dict[str, Floats]:
    """Return the forms of flatness per feature, as trained and at equal losses.

    Squared errors have no temperature; their counterpart is the flatness over the training loss.
    """
    found: dict[str, list[Floats]] = {"": []}
    if not fits.is_regression:
        shares = [share * fits.constant for share in SHARES]
        at = temperatures(np.nan_to_num(fits.outputs), fits.y, shares)
    for k, (phi, weight, z) in enumerate(
        zip(fits.features, fits.weights, fits.outputs, strict=True)
    ):
        if fits.is_regression:
            values = flatness_forms(phi, weight, lambda w: 2 * np.square(w).sum(keepdims=True)[0])
            found[""].append(values)
            found.setdefault(" over loss", []).append(values / fits.losses[k])
            continue
        found[""].append(flatness_forms(phi, weight, partial(curvature, outputs=z, temperature=1)))
        for share, t in zip(SHARES, at[:, k], strict=True):
            each = partial(curvature, outputs=z, temperature=t)
            found.setdefault(f" at {share:g}", []).append(flatness_forms(phi, weight, each))
    return {
        f"{form}{suffix}": np.array(rows)[:, i]
        for suffix, rows in found.items()
        for i, form in enumerate(FORMS)
    }


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


def best_of_few(first: Floats, then: Floats, n: int) -> Floats:
    """Order by `first`, but the best n of it by `then`."""
    places = rankdata(_finite_first(first), method="ordinal")
    return np.where(places <= n, rankdata(_finite_first(then)) - len(then) - 1, places)


def ways(fits: Fits) -> dict[str, Way]:
    """Return all ways that the fits at hand allow, by name; see the parts of the study."""
    k, full = len(fits.losses), fits.test_outputs
    errors, half = test_errors(full, fits.y_test), int(fits.converged.sum()) // 2

    def of_full(scores: Floats, size: int = 1) -> Way:
        return Way(scores, 1.0, full, errors, size)

    def masked(scores: Floats) -> Floats:
        return np.where(fits.converged, _finite_first(scores), np.inf)

    scores = flatness_scores(fits) | output_scores(fits)
    scores |= {name: fits.measures[name].to_numpy(float) for name in fits.measures}
    for name in ("relative_flatness", "normalized_relative_flatness"):
        if name in scores:
            scores[f"{name}, as in a search"] = as_in_a_search(fits, scores[name])
    kappa, m = scores[FORMS[0]], np.array([phi.shape[1] for phi in fits.features])
    scores["bound"] = fits.losses + len(fits.y) ** (-2 / (4 + m)) * kappa / 2
    flat = scores[f"{FORM} over loss" if fits.is_regression else f"{FORM} at {SHARE:g}"]
    found = {name: of_full(masked(values)) for name, values in scores.items()}
    found |= {
        "5 flattest": of_full(masked(flat), FEW),
        "5 lowest training loss": of_full(masked(fits.losses), FEW),
        "random": of_full(np.zeros(k)),
        "5 random": of_full(np.zeros(k), FEW),
        "flatter half": of_full(masked(flat), half),
        "average of all": of_full(np.zeros(k), int(fits.converged.sum())),
    }
    for part, share in (("20%", 0.8), ("5%", 0.95), ("5-fold", 4.0), ("10-fold", 9.0)):
        if part not in fits.held_out:
            continue
        *both, rest = fits.held_out[part]
        losses, misses = map(masked, both)
        rest_errors = errors if rest is None else test_errors(rest, fits.y_test)
        for what, values in (("log loss", losses), ("accuracy", misses)):
            found[f"{part}, {what}, refit"] = Way(values, share + 1 / k, full, errors)
            if rest is not None:
                found[f"{part}, {what}"] = Way(values, share, rest, rest_errors)
        found[f"5 best of {part}, refit"] = Way(losses, share + FEW / k, full, errors, FEW)
        found[f"better half of {part}, refit"] = Way(losses, share + half / k, full, errors, half)
        if rest is None:
            continue
        found[f"5 best of {part}"] = Way(losses, share, rest, rest_errors, FEW)
        few = best_of_few(losses, masked(flat), FEW)
        found[f"flattest of 5 best of {part}"] = Way(few, share + FEW / k, full, errors)
        ranks = rankdata(losses) + rankdata(masked(flat))
        found[f"mean rank of flatness and {part}"] = Way(ranks, share + 1.0, full, errors)
    return found


def judge_all(fits: Fits, seed: int) -> Mapping[str, dict[str, float]]:
    """Judge all ways."""
    rng = np.random.default_rng(seed)
    best = test_errors(fits.test_outputs, fits.y_test)[fits.converged].min()
    return {name: judge(way, fits, best, rng) for name, way in ways(fits).items()}
