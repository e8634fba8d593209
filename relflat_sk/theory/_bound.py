"""The generalisation bound by relative flatness, as far as its parts can be computed."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from relflat_sk._models import DataOptions
from relflat_sk._network import Layer
from relflat_sk._random import RandomState, as_random_state
from relflat_sk.measures import Flatness, measure_feature_curvature, measure_flatness
from relflat_sk.theory._feature_moves import Site, check_delta, find_site
from relflat_sk.theory._kernels import check_kernel, second_moment
from relflat_sk.theory._representativeness import default_delta, representativeness
from relflat_sk.theory._smoothing import (
    DEFAULT_KERNEL,
    DEFAULT_SIGMA,
    Smoothing,
    check_alphas,
    check_bandwidth,
    find_bandwidth,
)

__all__ = ["GeneralizationBound", "generalization_bound"]


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
        Bandwidth of the kernel density estimate on all samples, if one was asked for.
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
    kernel: str = DEFAULT_KERNEL,
    sigma: float = DEFAULT_SIGMA,
    bandwidth: float | str | None = None,
    alphas: Any = None,
    label_noise: Callable[[Any, np.random.RandomState], Any] | None = None,
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
    X : array-like of n samples
        Inputs of the sample S that the model was trained on.
    y : array-like of shape (n, ...)
        Labels of S, as the model was trained with.
    layer : int, str or nn.Module, default=-1
        A layer that receives one vector of m features for each sample, see
        `relative_flatness`.
    delta : float, optional
        Radius of the smoothing, as a share of the features' norm; that of Theorem 6 if None.
    kernel : {"truncated_normal", "normal", "uniform", "sphere"}, default="truncated_normal"
        Distribution of the smoothing, see `representativeness`.
    sigma : float, default=1
        Width of the kernel.
    bandwidth : float, "scott" or "silverman", optional
        Smooth by a Gaussian kernel density estimate with one bandwidth for all samples, in place
        of `kernel`, `sigma` and `delta`, see `representativeness`.
    alphas : array of shape (n,), optional
        Weights of the samples in the smoothed distribution, see `representativeness`. Mean
        loss, flatness and robustness then have these weights, too.
    label_noise : callable, optional
        Moves the labels, too, see `representativeness`.
    n_splits : int, default=10
        Random splits for the representativeness, at least 2.
    test_size : float, default=0.25
        Share of the samples that each split holds out.
    refit : bool, default=False
        Fit a clone of the estimator to the rest of each split. Without it, the result is no
        estimate of the risk on new data; see `representativeness`.
    n_draws : int, default=8
        Draws of the smoothing, each a pair of opposite moves.
    criterion : torch loss, optional
        Needed for a bare module; an estimator knows its own.
    batch_size : int, default=1024
        Samples in one forward pass.
    device : str or torch.device, optional
        Where to compute; where the model is if None.
    random_state : int, RandomState or None, default=None
        Decides splits and draws, which differ from call to call if None, but not fits: the
        estimator has its own random state.

    Returns
    -------
    GeneralizationBound
        Frozen, with `empirical_risk`, `representativeness`, `flatness_term`, `label_term`, their
        sum `total`, `robustness`, `gap_bound`, `delta`, `bandwidth`, and `stderr` of the total;
        all but delta and bandwidth in the unit of the loss.

    Raises
    ------
    ValueError
        If an argument is out of its range, data, labels and model do not fit together, or the
        layer receives more than one vector for each sample.
    LayerNotFoundError
        If there is no such layer.
    TypeError
        If there is no network in the model, or `refit=True` and it cannot be cloned and fitted.

    Notes
    -----
    By Theorem 6 of [1]_, at a minimum, with ``delta = n^(-1 / (4 + m))``, the risk is at most

    .. math:: \mathcal{E}_{emp} + n^{-2/(4+m)} \left( \frac{\kappa}{2m} + C_1 +
        \frac{C_2}{\sqrt\Delta} \right)

    up to higher orders, with probability :math:`1 - \Delta`. The theorem assumes that labels are
    locally constant (see `label_constancy`), and that the features have a density with two
    derivatives. C1 and C2 depend on that density, which is unknown. They bound the
    representativeness, so an estimate of the representativeness takes their place here. So
    `total` is an estimate of a bound, not a guarantee.

    By Theorem 10 of [2]_, the gap is at most :math:`\epsilon + \epsilon'` for a model that is
    :math:`\epsilon`-feature robust on a sample that is :math:`\epsilon'`-representative.
    `gap_bound` has the measured robustness and the estimated representativeness in their place,
    and no expansion in delta. By Definition 9 of [2]_, the distributions around the samples may
    be of features and labels: with `label_noise`, representativeness and robustness have noisy
    labels, and the rise of the loss by the labels alone is a term of its own. The flatness term
    is always that of the labels as they are.

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
    options = DataOptions(criterion, batch_size, device)
    site = find_site(model, X, y, layer, options)
    check_kernel(kernel, sigma)
    check_bandwidth(bandwidth, delta, kernel, sigma)
    shares = check_alphas(alphas, site.n_samples)
    if alphas is not None:
        options = replace(options, sample_weight=shares)
        site = find_site(model, X, y, layer, options)
    if len(site.shape) != 1:
        raise ValueError(
            f"the bound needs a layer that receives one vector for each sample, but layer "
            f"{site.name!r} receives {tuple(site.shape)}. Choose a linear layer behind it."
        )
    rng = as_random_state(random_state)
    delta = default_delta(site) if delta is None else check_delta(delta)
    h = find_bandwidth(site, bandwidth)
    flatness, share = _second_order(site, delta, second_moment(kernel, site.size, sigma), h, rng)
    estimate, stderr = representativeness(
        model,
        X,
        y,
        layer=layer,
        delta=delta if h is None else None,
        n_splits=n_splits,
        test_size=test_size,
        refit=refit,
        kernel=kernel,
        sigma=sigma,
        bandwidth=bandwidth,
        alphas=alphas,
        label_noise=label_noise,
        n_draws=n_draws,
        criterion=criterion,
        batch_size=batch_size,
        device=device,
        random_state=rng,
    )
    smooth = Smoothing(kernel, sigma, n_draws, label_noise, rng, h)
    robustness, _ = _mean_rise(smooth, site, delta)
    # noise on the labels of features that stay where they are
    alone = replace(smooth, bandwidth=0.0)
    labels, error = (0.0, 0.0) if label_noise is None else _mean_rise(alone, site, delta)
    return GeneralizationBound(
        empirical_risk=flatness.risk,
        representativeness=estimate,
        flatness_term=share * flatness.value,
        label_term=labels,
        total=flatness.risk + estimate + share * flatness.value + labels,
        robustness=robustness,
        gap_bound=abs(robustness) + abs(estimate),
        delta=delta if h is None else math.nan,
        bandwidth=h,
        stderr=math.hypot(stderr, share * flatness.stderr, error),
    )


def _second_order(
    site: Site, delta: float, moment: float, h: float | None, rng: np.random.RandomState
) -> tuple[Flatness, float]:
    """Measure the flatness that the smoothing depends on, and return its factor in the bound."""
    if h is not None:
        return measure_feature_curvature(site.network, site.name, random_state=rng), h**2 / 2
    flatness = measure_flatness(site.network, site.name, random_state=rng)
    return flatness, delta**2 / (2 * site.size) * moment


def _mean_rise(smooth: Smoothing, site: Site, delta: float) -> tuple[float, float]:
    """Measure the rise of the mean loss by a smoothing, and its standard error."""
    smoothed = smooth(site, delta, np.ones(site.n_samples))
    everything = slice(None)
    rise = smoothed.mean_smooth_loss(everything) - smoothed.mean_loss(everything)
    return rise, smoothed.stderr
