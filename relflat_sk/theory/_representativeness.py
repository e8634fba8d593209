r"""From a sample to its distribution: the generalisation bound and what it rests on.

The gap between a model's risk and its mean loss on a sample S splits into two parts [1]_,

.. math:: \mathcal{E}(f) - \mathcal{E}_{emp}(f, S) = \mathcal{E}_{Rep} + \mathcal{E}_F ,

how well S, smoothed in the space of a layer's features, represents the distribution, and how
much the mean loss on S rises by that smoothing, which is what flatness bounds. Smoothing is by
the scheme "truncated_normal" of `relflat_sk.theory._feature_moves`.

References
----------
.. [1] H. Petzka et al., "Relative Flatness and Generalization", NeurIPS 2021, equations 3 and 5.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.model_selection import ShuffleSplit
from sklearn.utils import check_random_state
from skorch.utils import multi_indexing
from torch import nn

from relflat_sk._models import DataOptions, to_network
from relflat_sk._network import Layer, borrowed, mean_loss
from relflat_sk._random import make_generator
from relflat_sk.measures import measure_flatness
from relflat_sk.theory._feature_moves import Site, make_scheme, move_features
from relflat_sk.theory._robustness import check_delta, open_network

__all__ = [
    "GeneralizationBound",
    "generalization_bound",
    "representativeness",
]

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class GeneralizationBound:
    """The parts of the bound of Theorem 6 that can be computed, in the unit of the loss."""

    empirical_risk: float  # mean loss on S
    representativeness: float  # estimate of E_Rep
    flatness_term: float  # delta^2 kappa / (2 m)
    total: float  # the sum of these: the bound on the risk
    delta: float  # n^(-1 / (4 + m))
    stderr: float  # of the total, from random splits and draws


def _default_delta(site: Site) -> float:
    return float(site.n_samples ** (-1 / (4 + site.size)))


def _random_state(random_state: Any) -> np.random.RandomState:
    # scikit-learn's check_random_state would hand out numpy's global state for None
    if random_state is None:
        return np.random.RandomState()
    found: np.random.RandomState = check_random_state(random_state)
    return found


def _splits(
    n: int, n_splits: int, test_size: float, rng: np.random.RandomState
) -> list[tuple[Any, Any]]:
    if isinstance(n_splits, bool) or not isinstance(n_splits, int | np.integer) or n_splits < 2:
        raise ValueError(
            f"n_splits must be an integer >= 2, got {n_splits!r}: the standard error is that "
            "between splits."
        )
    if not (isinstance(test_size, float) and 0 < test_size < 1):
        raise ValueError(
            f"test_size must be a float between 0 and 1, got {test_size!r}: the share of the "
            "samples that is held out."
        )
    return list(ShuffleSplit(n_splits, test_size=test_size, random_state=rng).split(range(n)))


def representativeness(  # noqa: PLR0913
    model: Any,
    X: Any,
    y: Any,
    *,
    layer: Layer = -1,
    delta: float | None = None,
    n_splits: int = 10,
    test_size: float = 0.25,
    refit: bool = False,
    n_draws: int = 8,
    criterion: Any = None,
    batch_size: int = 1024,
    device: Any = None,
    random_state: int | np.random.RandomState | None = None,
) -> tuple[float, float]:
    r"""Estimate how well a sample stands for its distribution in a layer's feature space.

    That is the risk minus the mean loss on the smoothed sample: around every ``phi(x_i)`` a
    truncated normal distribution of radius ``delta |phi(x_i)|``, all of it labelled ``y_i``.
    The distribution is not known, so the sample plays both parts: on random splits, the mean
    loss on the held-out part minus the mean loss on the smoothed rest.

    Parameters
    ----------
    model, X, y, layer, criterion, batch_size, device
        See `relative_flatness`; y is needed.
    delta : float, optional
        Radius of the smoothing, as a share of the features' norm; ``n^(-1 / (4 + m))`` if
        None, the choice of Theorem 6, with n samples and m features.
    n_splits : int, default=10
        Random splits to average over, at least 2.
    test_size : float, default=0.25
        Share of the samples that is held out.
    refit : bool, default=False
        Fit a clone of the estimator to the rest of each split, so that what is held out is
        new to it. Needed for an estimate of the gap; see Notes.
    n_draws : int, default=8
        Draws of the smoothing, each a pair of opposite moves.
    random_state : int, RandomState or None, default=None
        For splits and draws; not for fits, which have the estimator's own.

    Returns
    -------
    representativeness : float
        In the unit of the loss.
    stderr : float
        Its standard error over random splits and draws, given the sample. That of the
        sample itself is larger, and cannot be had from one sample.

    Raises
    ------
    ValueError
        If an argument is out of its range, or data, labels and model do not fit together.
    TypeError
        If `refit` is asked for of something that cannot be cloned and fitted.
    LayerNotFoundError
        See `relative_flatness`.

    Notes
    -----
    Equations 3 and 5 of [1]_, :math:`\mathcal{E}_{Rep} = E_{(x, y)}[\ell(f(x), y)] - \frac1n
    \sum_i E_{\xi \sim \lambda_i}[\ell(\psi(\phi(x_i) + \xi), y_i)]`.

    Without `refit` the model has seen both parts of every split. They then differ by chance
    alone, and the result goes to minus the robustness of the features as `n_splits` grows: it
    says how much the smoothing costs, but nothing about new data. With it, representativeness
    plus robustness is an estimate of the generalisation gap by repeated splits. The authors
    fit the head anew, too. For a bare module with data of its own to test on, take the
    definition literally: the mean loss there, minus the mean loss on the training data, minus
    ``feature_robustness(..., matrices="truncated_normal")``. The refitted models have seen fewer
    samples, and may be less or more robust than the one handed in.

    References
    ----------
    .. [1] H. Petzka et al., "Relative Flatness and Generalization", NeurIPS 2021.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklearn.linear_model import LogisticRegression
    >>> X, y = load_iris(return_X_y=True)
    >>> model = LogisticRegression(max_iter=1000).fit(X, y)
    >>> value, stderr = representativeness(model, X, y, refit=True, delta=0.1, random_state=0)
    >>> abs(value) < 0.1, stderr < 0.05
    (True, True)
    """
    options = DataOptions(criterion, batch_size, device)
    site = open_network(model, X, y, layer, options)
    delta = _default_delta(site) if delta is None else check_delta(delta)
    rng = _random_state(random_state)
    splits = _splits(site.n_samples, n_splits, test_size, rng)
    if not refit:
        smoothed = _smooth(site, delta, n_draws, rng)
        values = [smoothed.losses(held) - smoothed.smoothed(rest) for rest, held in splits]
        return float(np.mean(values)), float(np.hypot(_stderr(values), smoothed.stderr))
    _check_fits(model)
    values = []
    for rest, held in splits:
        X_rest, y_rest = multi_indexing(X, rest), multi_indexing(y, rest)
        fitted = clone(model).fit(X_rest, y_rest)
        X_held, y_held = multi_indexing(X, held), multi_indexing(y, held)
        risk = mean_loss(to_network(fitted, X_held, y_held, options))
        site = open_network(fitted, X_rest, y_rest, layer, options)
        values.append(risk - _smooth(site, delta, n_draws, rng).smoothed(slice(None)))
    return float(np.mean(values)), _stderr(values)


def _stderr(values: list[float]) -> float:
    return float(np.std(values, ddof=1) / np.sqrt(len(values)))


def _check_fits(model: Any) -> None:
    if isinstance(model, nn.Module) or not (hasattr(model, "fit") and hasattr(model, "get_params")):
        raise TypeError(
            f"refit=True needs an estimator to clone and fit, got {type(model).__name__}. Wrap a "
            "module in a skorch net, or leave refit=False and see the notes for held-out data."
        )


@dataclass(frozen=True)
class _Smoothed:
    """Losses of n samples, as they are and smoothed, weighted; all of shape (n,)."""

    loss: Floats
    smooth_loss: Floats
    divisor: Floats
    stderr: float  # of the mean rise, from the draws

    def losses(self, rows: Any) -> float:
        return float(self.loss[rows].sum() / self.divisor[rows].sum())

    def smoothed(self, rows: Any) -> float:
        return float(self.smooth_loss[rows].sum() / self.divisor[rows].sum())


def _smooth(site: Site, delta: float, n_draws: int, rng: np.random.RandomState) -> _Smoothed:
    generator = make_generator(rng, site.network.device)
    scheme = make_scheme("truncated_normal", site.size, n_draws, generator)
    losses, rises, weights, divisors = [], [], [], []
    with borrowed(site.network.module):
        for moved in move_features(site, scheme, delta, each=True):
            losses.append(moved.losses)
            rises.append(moved.rises)
            weights.append(moved.weights)
            divisors.append(moved.divisors)
    weight, loss = torch.cat(weights), torch.cat(losses)
    rise, divisor = torch.cat(rises, dim=1), weight * torch.cat(divisors)
    return _Smoothed(
        (weight * loss).cpu().numpy(),
        (weight * (loss + rise.mean(dim=0))).cpu().numpy(),
        divisor.cpu().numpy(),
        scheme.stderr(rise @ weight / divisor.sum()),
    )


def generalization_bound(  # noqa: PLR0913
    model: Any,
    X: Any,
    y: Any,
    *,
    layer: Layer = -1,
    n_splits: int = 10,
    test_size: float = 0.25,
    refit: bool = False,
    n_draws: int = 8,
    criterion: Any = None,
    batch_size: int = 1024,
    device: Any = None,
    random_state: int | np.random.RandomState | None = None,
) -> GeneralizationBound:
    r"""Put together what can be computed of the bound on the risk by relative flatness.

    Parameters
    ----------
    model, X, y, layer, criterion, batch_size, device
        See `relative_flatness`; (X, y) is the sample S that the model was trained on.
    n_splits, test_size, refit, n_draws, random_state
        See `representativeness`. Without `refit` the result is no estimate of the risk on new
        data.

    Returns
    -------
    GeneralizationBound
        Frozen, with `empirical_risk`, `representativeness`, `flatness_term`, their sum
        `total`, `delta`, and `stderr` of the total; all but delta in the unit of the loss.

    Raises
    ------
    ValueError
        If an argument is out of its range, data, labels and model do not fit together, or the
        layer sees more than one vector of each sample.
    LayerNotFoundError, TypeError
        See `representativeness`.

    Notes
    -----
    Theorem 6 of [1]_: at a minimum, with ``delta = n^(-1 / (4 + m))``, the risk is at most

    .. math:: \mathcal{E}_{emp} + n^{-2/(4+m)} \left( \frac{\kappa}{2m} + C_1 +
        \frac{C_2}{\sqrt\Delta} \right)

    up to higher orders, with probability :math:`1 - \Delta`. It assumes that labels are
    locally constant (see `label_constancy`), and that features have a density with two
    derivatives. C1 and C2 depend on that density, which nobody knows: they bound the
    representativeness, and an estimate of it stands here in their place. So `total` is an
    estimate of a bound, not a guarantee. The flatness term is of second order in delta, and
    for more than a few features delta is close to 1 for any n one has: with 64 features,
    n = 1,000 gives 0.90. Look at `feature_robustness` at that delta to see whether second
    order says enough.

    References
    ----------
    .. [1] H. Petzka et al., "Relative Flatness and Generalization", NeurIPS 2021.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklearn.linear_model import LogisticRegression
    >>> X, y = load_iris(return_X_y=True)
    >>> model = LogisticRegression(max_iter=1000).fit(X, y)
    >>> bound = generalization_bound(model, X, y, refit=True, random_state=0)
    >>> round(bound.delta, 4) == round(150 ** (-1 / 8), 4)
    True
    >>> bound.empirical_risk < bound.total
    True
    """
    options = DataOptions(criterion, batch_size, device)
    site = open_network(model, X, y, layer, options)
    if len(site.shape) != 1:
        raise ValueError(
            f"the bound is one for a layer that receives one vector of each sample; layer "
            f"{site.name!r} receives {tuple(site.shape)}. Choose a linear layer behind it."
        )
    rng = _random_state(random_state)
    flatness = measure_flatness(site.network, site.name, random_state=rng)
    delta = _default_delta(site)
    share = delta**2 / (2 * site.size)
    found, stderr = representativeness(
        model,
        X,
        y,
        layer=layer,
        delta=delta,
        n_splits=n_splits,
        test_size=test_size,
        refit=refit,
        n_draws=n_draws,
        criterion=criterion,
        batch_size=batch_size,
        device=device,
        random_state=rng,
    )
    return GeneralizationBound(
        empirical_risk=flatness.risk,
        representativeness=found,
        flatness_term=share * flatness.value,
        total=flatness.risk + found + share * flatness.value,
        delta=delta,
        stderr=float(np.hypot(stderr, share * flatness.stderr)),
    )
