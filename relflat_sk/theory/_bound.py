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
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.stats import sem
from sklearn.base import clone
from sklearn.model_selection import ShuffleSplit
from skorch.utils import multi_indexing
from torch import nn

from relflat_sk._checks import check_integer
from relflat_sk._models import DataOptions, to_network
from relflat_sk._network import Layer, mean_loss
from relflat_sk._random import RandomState, as_random_state
from relflat_sk.measures._layer_measures import measure_feature_curvature, measure_flatness
from relflat_sk.theory._moves import KERNELS, find_site
from relflat_sk.theory._smoothing import (
    Smoothing,
    check_alphas,
    check_smoothing,
    find_bandwidth,
    find_delta,
    smooth,
)


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
        ``n^(-1 / (4 + m))``, the choice of Theorem 6, with n samples and m features.
    smoothing : Smoothing, optional
        Another kernel, a bandwidth for all samples, weights of the samples or noise on their
        labels. With ``bandwidth="scott"`` and `refit`, each new model has the bandwidth of the
        samples that it was fitted to.
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
        If `refit=True` and the model cannot be cloned and fitted, or the smoothing is none.
    LayerNotFoundError
        If there is no such layer.

    Notes
    -----
    By equations 3 and 5 of [1]_, :math:`\mathcal{E}_{Rep} = E_{(x, y)}[\ell(f(x), y)] - \sum_i
    \alpha_i E_{\xi \sim \lambda_i}[\ell(\psi(\phi(x_i) + \xi), y(\phi(x_i) + \xi))]`, with
    :math:`\alpha_i = 1/n` if the smoothing has no `alphas`. Here labels are locally constant,
    :math:`y(\phi(x_i) + \xi) = y_i`. With noise :math:`\nu_i` on the labels, it is Rep of
    Definition 9, equation 14 of [2]_.

    Without `refit`, the model was trained on both parts of every split. The parts then differ by
    chance only, and the result tends to minus the feature robustness as `n_splits` grows: it
    shows how much the smoothing raises the loss, but nothing about new data. With `refit`,
    representativeness plus robustness estimates the generalisation gap by repeated splits; the
    authors refit the head, too. The refitted models are trained on fewer samples, and may be less
    or more robust than the model passed in.

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
    options = DataOptions(criterion, batch_size, device, in_order=smoothing.alphas is not None)
    site = find_site(model, X, y, layer, options)
    delta = find_delta(site, delta)
    rng = as_random_state(random_state)
    splitter = ShuffleSplit(n_splits, test_size=test_size, random_state=rng)
    splits = list(splitter.split(range(site.n_samples)))
    shares = check_alphas(smoothing.alphas, site.n_samples)
    if not refit:
        smoothed = smooth(site, smoothing, delta, n_draws, rng, shares)
        values = [
            smoothed.mean_loss(held) - smoothed.mean_smooth_loss(rest) for rest, held in splits
        ]
        return float(np.mean(values)), math.hypot(sem(values), smoothed.stderr)
    if isinstance(model, nn.Module) or not (hasattr(model, "fit") and hasattr(model, "get_params")):
        raise TypeError(
            f"refit=True needs an estimator to clone and fit, got {type(model).__name__}. Wrap a "
            "module in a skorch net, or use refit=False and see the notes for test data."
        )
    values = []
    for rest, held in splits:
        X_rest, y_rest = multi_indexing(X, rest), multi_indexing(y, rest)
        fitted = clone(model).fit(X_rest, y_rest)
        X_held, y_held = multi_indexing(X, held), multi_indexing(y, held)
        risk = mean_loss(to_network(fitted, X_held, y_held, options))
        site = find_site(fitted, X_rest, y_rest, layer, options)
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
        labels. With weights, mean loss, flatness and robustness have them, too.
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
        If there is no network in the model, the smoothing is none, or `refit=True` and the model
        cannot be cloned and fitted.

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
    options = DataOptions(criterion, batch_size, device)
    site = find_site(model, X, y, layer, options)
    if smoothing.alphas is not None:
        shares = check_alphas(smoothing.alphas, site.n_samples)
        site = find_site(model, X, y, layer, replace(options, sample_weight=shares))
    if len(site.shape) != 1:
        raise ValueError(
            f"the bound needs a layer that receives one vector for each sample, but layer "
            f"{site.name!r} receives {tuple(site.shape)}. Choose a linear layer behind it."
        )
    rng = as_random_state(random_state)
    delta, h = find_delta(site, delta), None
    if smoothing.bandwidth is None:
        flatness = measure_flatness(site.network, site.name, random_state=rng)
        moment = KERNELS[smoothing.kernel].second_moment(site.size, smoothing.sigma)
        factor = delta**2 / (2 * site.size) * moment
    else:
        flatness = measure_feature_curvature(site.network, site.name, random_state=rng)
        delta, h = math.nan, find_bandwidth(site, smoothing.bandwidth)
        factor = h**2 / 2
    estimate, stderr = representativeness(
        model,
        X,
        y,
        layer=layer,
        delta=delta if h is None else None,
        smoothing=smoothing,
        n_splits=n_splits,
        test_size=test_size,
        refit=refit,
        n_draws=n_draws,
        criterion=criterion,
        batch_size=batch_size,
        device=device,
        random_state=rng,
    )
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
        empirical_risk=flatness.risk,
        representativeness=estimate,
        flatness_term=flatness_term,
        label_term=label_term,
        total=flatness.risk + estimate + flatness_term + label_term,
        robustness=robustness,
        gap_bound=abs(robustness) + abs(estimate),
        delta=delta,
        bandwidth=h,
        stderr=math.hypot(stderr, factor * flatness.stderr, label_error),
    )
