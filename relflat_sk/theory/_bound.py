r"""The generalisation bound by relative flatness, as far as its parts can be computed.

The gap between a model's risk and its mean loss on a sample S has two parts [1]_,

.. math:: \mathcal{E}(f) - \mathcal{E}_{emp}(f, S) = \mathcal{E}_{Rep} + \mathcal{E}_F .

The first part, representativeness, is the risk minus the mean loss on S after S is smoothed in the
space of a layer's features. The second part is the rise of the mean loss on S by that smoothing,
which flatness bounds.

References
----------
.. [1] Petzka et al., "Relative Flatness and Generalization", NeurIPS 2021, equations 3 and 5.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import sem
from sklearn.base import clone
from sklearn.model_selection import ShuffleSplit

from relflat_sk._checks import check_integer, check_number
from relflat_sk._models.network_of import open_model
from relflat_sk._network.batches import take_rows
from relflat_sk._network.layers import Layer
from relflat_sk._network.network import mean_loss
from relflat_sk._random import RandomState, as_random_state, make_generator
from relflat_sk.measures._layer_measures import measure_layers
from relflat_sk.theory._moves import (
    KERNELS,
    Site,
    check_delta,
    find_site,
    kernel_moves,
    move_features,
    normal_moves,
)

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False, kw_only=True)
class Smoothing:
    r"""How a sample is smoothed in a layer's feature space.

    Every ``phi(x_i)`` is replaced by a distribution around it, with the weight ``alpha_i`` and the
    label ``y_i``. For `representativeness` and `generalization_bound`.

    Parameters
    ----------
    kernel : {"truncated_normal", "normal", "uniform", "sphere"}, default="truncated_normal"
        The distribution, with ``r_i = delta |phi(x_i)|``: normal with deviation ``sigma r_i`` in
        each direction, given a length of at most ``r_i``; the same without that limit, which makes
        the smoothed sample a Gaussian kernel density estimate with a bandwidth for each sample;
        uniform in the ball, or on the sphere, of radius ``sigma r_i``.
    sigma : float, default=1
        Width of the kernel.
    bandwidth : float, optional
        Smooth all samples by a Gaussian kernel density estimate with this bandwidth, in the unit
        of the features and the same for all samples, in place of a kernel whose radius is in
        proportion to the features, so that `kernel`, `sigma` and ``delta`` are left out.
    alphas : array of shape (n,), optional
        Weights ``alpha_i`` of the samples, divided by their sum; equal if None. Some may be zero;
        of all samples in one part of a split, they give nan. A DataLoader must not shuffle then.
    label_noise : callable, optional
        Moves the labels, too: from an array of labels, as the criterion takes them, and a
        RandomState to an array of noisy labels of the same shape. Each draw has its own noise.

    Raises
    ------
    ValueError
        If there is no such kernel, an argument is out of its range, or a bandwidth stands beside a
        kernel.

    Examples
    --------
    >>> from relflat_sk.theory import Smoothing, representativeness
    >>> from sklearn.datasets import load_iris
    >>> from sklearn.linear_model import LogisticRegression
    >>> X, y = load_iris(return_X_y=True)
    >>> model = LogisticRegression(max_iter=1000).fit(X, y)
    >>> narrow, wide = (
    ...     representativeness(model, X, y, smoothing=Smoothing(bandwidth=h), random_state=0)[0]
    ...     for h in (0.01, 1)
    ... )
    >>> narrow > wide  # the smoothed sample has the larger loss
    True
    """

    kernel: str = "truncated_normal"
    sigma: float = 1.0
    bandwidth: float | None = None
    alphas: Any = None
    label_noise: Callable[[Any, np.random.RandomState], Any] | None = None

    def __post_init__(self) -> None:
        """Refuse what is no distribution, before anything is computed."""
        if not isinstance(self.kernel, str) or self.kernel not in KERNELS:
            raise ValueError(f"kernel must be one of {sorted(KERNELS)}, got {self.kernel!r}.")
        check_number("sigma", self.sigma)
        check_number("bandwidth", self.bandwidth, optional=True)
        changed = (self.kernel, self.sigma) != ("truncated_normal", 1.0)
        if self.bandwidth is not None and changed:
            raise ValueError(
                f"bandwidth={self.bandwidth!r} is in place of a kernel, but kernel={self.kernel!r} "
                f"and sigma={self.sigma!r} are given. Leave out these, or the bandwidth."
            )


@dataclass(frozen=True)
class Smoothed:
    """Weighted losses of n samples before and after the smoothing."""

    loss: Floats  # (n,)
    smooth_loss: Floats  # (n,)
    divisor: Floats  # (n,)
    shares: Floats  # (n,)
    stderr: float

    def mean_loss(self, rows: Any = slice(None)) -> float:
        """Compute the mean loss of some samples before the smoothing."""
        return float(self.loss[rows].sum() / self.divisor[rows].sum())

    def mean_smooth_loss(self, rows: Any = slice(None)) -> float:
        """Compute the mean loss of some samples after the smoothing, with their shares."""
        shares = self.shares[rows]
        return float(shares @ self.smooth_loss[rows] / (shares @ self.divisor[rows]))


def smooth(
    site: Site,
    smoothing: Smoothing,
    delta: float,
    n_draws: int,
    rng: np.random.RandomState,
    shares: Floats | None = None,
) -> Smoothed:
    """Compute the losses of all samples before and after the smoothing, with shares (n,)."""
    check_integer("n_draws", n_draws, minimum=2, reason="one draw has no standard error")
    noise, generator = smoothing.label_noise, make_generator(rng, site.network.device)
    if smoothing.bandwidth is None:
        moves = kernel_moves(smoothing.kernel, smoothing.sigma, delta, n_draws, generator)
    else:
        moves = normal_moves(smoothing.bandwidth, n_draws, generator)
    relabel = None if noise is None else lambda _, labels: noise(labels, rng)
    batches = list(move_features(site, moves, each=True, relabel=relabel))
    weight = torch.cat([batch.weights for batch in batches])
    loss = weight * torch.cat([batch.losses for batch in batches])
    rises = weight * torch.cat([batch.rises for batch in batches], dim=1)
    divisor = weight * torch.cat([batch.divisors for batch in batches])
    shares = np.ones(len(weight)) if shares is None else shares
    share = torch.from_numpy(shares).to(weight)
    return Smoothed(
        loss.cpu().numpy(),
        (loss + rises.mean(dim=0)).cpu().numpy(),
        divisor.cpu().numpy(),
        shares,
        moves.stderr(rises @ share / (share @ divisor)),
    )


def check_smoothing(smoothing: Smoothing | None, delta: float | None) -> Smoothing:
    """Return the smoothing, the default one if None, after a check that it fits the radius."""
    if smoothing is None:
        return Smoothing()
    if smoothing.bandwidth is not None and delta is not None:
        raise ValueError(
            f"bandwidth={smoothing.bandwidth!r} is the same for all samples, and delta={delta!r} "
            "in proportion to their features: give one of them."
        )
    return smoothing


def find_delta(site: Site, delta: float | None) -> float:
    """Return the radius of the smoothing, by default that of Theorem 6."""
    if delta is not None:
        return check_delta(delta)
    return float(int(site.counts.sum()) ** (-1 / (4 + site.size)))


def check_alphas(alphas: Any, n: int) -> Floats:
    """Check the shares of samples in the smoothed distribution, and scale them to a mean of 1."""
    if alphas is None:
        return np.ones(n)
    shares = np.asarray(alphas, dtype=np.float64)
    if shares.shape != (n,) or not (np.isfinite(shares) & (shares >= 0)).all() or not shares.any():
        raise ValueError(
            f"alphas must be {n} numbers, one for each sample, that are not negative and not all "
            f"zero, got an array of shape {shares.shape}."
        )
    scaled: Floats = shares / shares.mean()
    return scaled


# -- the two parts, and the bound -----------------------------------------------------------------


def representativeness(  # noqa: PLR0913
    model: Any,
    X: Any,
    y: Any,
    *,
    layer: Layer = -1,
    delta: float | None = None,
    smoothing: Smoothing | None = None,
    n_splits: int = 10,
    test_size: float = 0.25,
    refit: bool = False,
    n_draws: int = 8,
    criterion: Any = None,
    batch_size: int = 1024,
    device: Any = None,
    random_state: RandomState = None,
) -> tuple[float, float]:
    r"""Estimate how well a sample stands for its distribution in a layer's feature space.

    Representativeness is the risk minus the mean loss on the smoothed sample. Smoothing replaces
    every ``phi(x_i)`` by a truncated normal distribution of radius ``delta |phi(x_i)|`` around it,
    with label ``y_i`` throughout. As the distribution of the data is unknown, the estimate uses
    random splits of the sample: the mean loss on the held-out part, minus the mean loss on the
    smoothed rest.

    Parameters
    ----------
    model : nn.Module or fitted estimator
        Any model that `relative_flatness` measures.
    X, y : array-like of n samples
        Inputs and labels as the model was trained with.
    layer : int, str or nn.Module, default=-1
        The layer whose features are smoothed, see `relative_flatness`.
    delta : float, optional
        Radius of the smoothing, as a share of the features' norm. If None it is
        ``n^(-1 / (4 + m))``, the choice of Theorem 6, with n samples whose labels are not ignored
        and m features.
    smoothing : Smoothing, optional
        Another kernel, a bandwidth for all samples, weights of the samples or noise on their
        labels.
    n_splits : int, default=10
        Random splits to average over, at least 2.
    test_size : float or int, default=0.25
        Share of the samples that is held out, or their number.
    refit : bool, default=False
        Fit a clone of the estimator to the rest of each split, so that the held-out samples
        are new to it. Only then is the result about new data; see Notes.
    n_draws : int, default=8
        Draws of the smoothing, each a pair of opposite moves.
    criterion, batch_size, device : optional
        The loss, the samples in one forward pass and where to compute, see `relative_flatness`.
    random_state : int, RandomState or None, default=None
        Decides splits and draws, which differ from call to call if None, but not fits: the
        estimator has its own random state.

    Returns
    -------
    representativeness : float
        In the unit of the loss, averaged over samples.
    stderr : float
        Its standard error over random splits and draws, given the sample. The standard error
        over samples is larger, and cannot be estimated from one sample.

    Raises
    ------
    ValueError
        If an argument is out of its range, or data, labels and model do not fit together.
    TypeError
        If `refit=True` and scikit-learn cannot clone the model.
    LayerNotFoundError
        If there is no such layer.

    See Also
    --------
    generalization_bound : The sum of which it is a part.
    feature_robustness : The other part, measured.

    Notes
    -----
    By equations 3 and 5 of [1]_, :math:`\mathcal{E}_{Rep} = E_{(x, y)}[\ell(f(x), y)] - \sum_i
    \alpha_i E_{\xi \sim \lambda_i}[\ell(\psi(\phi(x_i) + \xi), y(\phi(x_i) + \xi))]`, with
    :math:`\alpha_i = 1/n` if the smoothing has no `alphas`. Here labels are locally constant,
    :math:`y(\phi(x_i) + \xi) = y_i`. With noise :math:`\nu_i` on the labels, it is Rep of
    Definition 9, equation 14 of [2]_.

    Without `refit`, the model was trained on both parts of every split. The parts then differ by
    chance only, and the result tends to minus the feature robustness as `n_splits` grows: it shows
    how much the smoothing raises the loss, but nothing about new data. With `refit`,
    representativeness plus robustness estimates the generalisation gap by repeated splits; the
    authors refit the head. The refitted models are trained on fewer samples, and may be less or
    more robust than the model passed in.

    For a bare module with test data, apply the definition directly: the mean loss on the test
    data, minus the mean loss on the training data, minus
    ``feature_robustness(..., matrices="truncated_normal")``.

    References
    ----------
    .. [1] Petzka et al., "Relative Flatness and Generalization", NeurIPS 2021.
    .. [2] Petzka et al., "Feature-Robustness, Flatness and Generalization Error for Deep
       Neural Networks", 2020.

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
    smoothing = check_smoothing(smoothing, delta)
    check_integer("n_splits", n_splits, minimum=2, reason="one split has no standard error")
    in_order = smoothing.alphas is not None
    open_data = partial(
        open_model, criterion=criterion, batch_size=batch_size, device=device, in_order=in_order
    )
    site = find_site(open_data(model, X, y), layer)
    delta = find_delta(site, delta)
    rng = as_random_state(random_state)
    splitter = ShuffleSplit(n_splits, test_size=test_size, random_state=rng)
    splits = list(splitter.split(site.counts))
    shares = check_alphas(smoothing.alphas, len(site.counts))
    if not refit:
        smoothed = smooth(site, smoothing, delta, n_draws, rng, shares)
        values = [
            smoothed.mean_loss(held) - smoothed.mean_smooth_loss(rest) for rest, held in splits
        ]
        return float(np.mean(values)), math.hypot(sem(values), smoothed.stderr)
    values = []
    for rest, held in splits:
        X_rest, y_rest = take_rows(X, rest), take_rows(y, rest)
        fitted = clone(model).fit(X_rest, y_rest)
        X_held, y_held = take_rows(X, held), take_rows(y, held)
        risk = mean_loss(open_data(fitted, X_held, y_held))
        site = find_site(open_data(fitted, X_rest, y_rest), layer)
        smoothed = smooth(site, smoothing, delta, n_draws, rng, shares[rest])
        values.append(risk - smoothed.mean_smooth_loss())
    return float(np.mean(values)), float(sem(values))


@dataclass(frozen=True)
class GeneralizationBound:
    """The computable parts of the bounds; all but the radius in the unit of the loss.

    Parameters
    ----------
    empirical_risk : float
        Mean loss on the sample S.
    representativeness : float
        Estimate of the representativeness of S.
    flatness_term : float
        ``delta^2 kappa / (2 m)``, for kernels whose draws are longer than `delta` times their
        mean squared length; with a bandwidth h ``h^2 / 2 mean_i Tr(W^T B_i W)``.
    label_term : float
        Rise of the mean loss by the noise on the labels alone; 0 without it.
    total : float
        The sum of these four, an estimate of the bound on the risk.
    robustness : float
        The measured rise of the mean loss by the smoothing, whose second order the flatness
        term and the label term bound.
    gap_bound : float
        ``|robustness| + |representativeness|``, an estimate of the bound on the gap.
    delta : float
        Radius of the smoothing, ``n^(-1 / (4 + m))`` if it was not given; nan with a bandwidth.
    bandwidth : float or None
        Bandwidth of the kernel density estimate, if one was asked for.
    stderr : float
        Standard error of the total, from random splits and draws.
    """

    empirical_risk: float
    representativeness: float
    flatness_term: float
    label_term: float
    total: float
    robustness: float
    gap_bound: float
    delta: float
    bandwidth: float | None
    stderr: float


def generalization_bound(  # noqa: PLR0913
    model: Any,
    X: Any,
    y: Any,
    *,
    layer: Layer = -1,
    delta: float | None = None,
    smoothing: Smoothing | None = None,
    n_splits: int = 10,
    test_size: float = 0.25,
    refit: bool = False,
    n_draws: int = 8,
    criterion: Any = None,
    batch_size: int = 1024,
    device: Any = None,
    random_state: RandomState = None,
) -> GeneralizationBound:
    r"""Compute the parts of the bound on the risk by relative flatness, as far as they are known.

    The computable part of the bound is not itself a bound, see Notes.

    Parameters
    ----------
    model : nn.Module or fitted estimator
        Any model that `relative_flatness` measures.
    X, y : array-like of n samples
        Inputs and labels of the sample S that the model was trained on.
    layer : int, str or nn.Module, default=-1
        A layer that receives one vector of m features for each sample, see
        `relative_flatness`.
    delta : float, optional
        Radius of the smoothing, as a share of the features' norm; that of Theorem 6 if None.
    smoothing : Smoothing, optional
        Another kernel, a bandwidth for all samples, weights of the samples or noise on their
        labels. With weights, mean loss, flatness and robustness have them.
    n_splits, test_size, refit, n_draws : optional
        See `representativeness`. Without `refit`, the result is no estimate of the risk on new
        data.
    criterion, batch_size, device : optional
        The loss, the samples in one forward pass and where to compute, see `relative_flatness`.
    random_state : int, RandomState or None, default=None
        Decides splits and draws, see `representativeness`.

    Returns
    -------
    GeneralizationBound
        Frozen, with the mean loss on S `empirical_risk`, the `representativeness`, the
        `flatness_term`, a `label_term`, their sum `total` with its `stderr`, the measured
        `robustness`, the `gap_bound`, and `delta` or `bandwidth`.

    Raises
    ------
    ValueError
        If an argument is out of its range, data, labels and model do not fit together, or the
        layer receives more than one vector for each sample.
    LayerNotFoundError
        If there is no such layer.
    TypeError
        If there is no network in the model, or `refit=True` and scikit-learn cannot clone it.

    See Also
    --------
    representativeness : Its first part.
    relative_flatness : The flatness in its second part.
    pac_bayes_bound : A guarantee, for a network with noise on its weights.

    Notes
    -----
    By Theorem 6 of [1]_, at a minimum, with ``delta = n^(-1 / (4 + m))``, the risk is at most

    .. math:: \mathcal{E}_{emp} + n^{-2/(4+m)} \left( \frac{\kappa}{2m} + C_1 +
        \frac{C_2}{\sqrt\Delta} \right)

    up to higher orders, with probability :math:`1 - \Delta`, if labels are locally constant (see
    `label_constancy`) and the features have a density with two derivatives. C1 and C2 depend on
    that density, which is unknown, and bound the representativeness. An estimate of the latter
    takes their place here, so that `total` is an estimate of a bound, not a guarantee.

    By Theorem 10 of [2]_, the gap is at most :math:`\epsilon + \epsilon'` for a model that is
    :math:`\epsilon`-feature robust on a sample that is :math:`\epsilon'`-representative.
    `gap_bound` has the measured robustness and the estimated representativeness in their place,
    and no expansion in delta. With noise on the labels (Definition 9 of [2]_), representativeness
    and robustness have noisy labels, the flatness term has the labels as they are, and
    `label_term` is the rise of the loss by the labels alone.

    A Gaussian kernel density estimate moves all features by the same noise, of deviation h. Its
    flatness term is :math:`\tfrac{h^2}{2} \, \mathrm{mean}_i \mathrm{Tr}(W^\top B_i W)`,
    relative flatness without the factors :math:`|\phi_i|^2`.

    With other kernels, the flatness term is :math:`\delta^2 c \kappa / (2m)`, where c is the mean
    squared length of the kernel's draws in units of :math:`\delta |\phi_i|`; for truncated
    kernels, where c is below 1, the term is as in the theorem or smaller.

    The flatness term is of second order in delta, and for more than a few features delta is close
    to 1 for any realistic n: 64 features and n = 1,000 give 0.90. Compute `feature_robustness` at
    that delta to see whether the second order suffices.

    References
    ----------
    .. [1] Petzka et al., "Relative Flatness and Generalization", NeurIPS 2021.
    .. [2] Petzka et al., "Feature-Robustness, Flatness and Generalization Error for Deep
       Neural Networks", 2020.

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
    smoothing = check_smoothing(smoothing, delta)
    open_data = partial(
        open_model, model, X, y, criterion=criterion, batch_size=batch_size, device=device
    )
    site = find_site(open_data(), layer)
    if smoothing.alphas is not None:
        shares = check_alphas(smoothing.alphas, len(site.counts))
        site = find_site(open_data(sample_weight=shares), layer)
    if len(site.shape) != 1:
        raise ValueError(
            f"the bound needs a layer that receives one vector for each sample, but layer "
            f"{site.name!r} receives {tuple(site.shape)}. Choose a linear layer behind it."
        )
    rng = as_random_state(random_state)
    h = smoothing.bandwidth
    delta = find_delta(site, delta) if h is None else math.nan
    name = "relative_flatness" if h is None else "feature_curvature"
    measured = measure_layers(site.network, [name], [site.name], random_state=rng)
    flatness = measured[site.name, name]
    if h is None:
        moment = KERNELS[smoothing.kernel].second_moment(site.size, smoothing.sigma)
        factor = delta**2 / (2 * site.size) * moment
    else:
        factor = h**2 / 2
    estimate, stderr = representativeness(
        model, X, y,
        layer=layer, delta=delta if h is None else None, smoothing=smoothing, n_splits=n_splits,
        test_size=test_size, refit=refit, n_draws=n_draws, criterion=criterion,
        batch_size=batch_size, device=device, random_state=rng,
    )  # fmt: skip
    smoothed = smooth(site, smoothing, delta, n_draws, rng)
    robustness = smoothed.mean_smooth_loss() - smoothed.mean_loss()
    label_term, label_error = 0.0, 0.0
    if smoothing.label_noise is not None:  # of features that stay where they are
        still = replace(smoothing, bandwidth=None)
        relabelled = smooth(site, still, 0.0, n_draws, rng)
        label_term = relabelled.mean_smooth_loss() - relabelled.mean_loss()
        label_error = relabelled.stderr
    flatness_term = factor * flatness.value
    return GeneralizationBound(
        empirical_risk=flatness.passes.risk,
        representativeness=estimate,
        flatness_term=flatness_term,
        label_term=label_term,
        total=flatness.passes.risk + estimate + flatness_term + label_term,
        robustness=robustness,
        gap_bound=abs(robustness) + abs(estimate),
        delta=delta,
        bandwidth=h,
        stderr=math.hypot(stderr, factor * flatness.stderr, label_error),
    )
