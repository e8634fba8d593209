r"""Representativeness: how well a sample stands for new data in a layer's feature space.

The gap between a model's risk and its mean loss on a sample S has two parts [1]_,

.. math:: \mathcal{E}(f) - \mathcal{E}_{emp}(f, S) = \mathcal{E}_{Rep} + \mathcal{E}_F .

The first part, representativeness, is the risk minus the mean loss on S after S is smoothed in the
space of a layer's features. The second part is the rise of the mean loss on S by that smoothing,
which flatness bounds. Features are smoothed by `relflat_sk.theory._smoothing`.

References
----------
.. [1] Petzka et al., "Relative Flatness and Generalization", NeurIPS 2021, equations 3 and 5.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from sklearn.base import clone
from sklearn.model_selection import ShuffleSplit
from skorch.utils import multi_indexing
from torch import nn

from relflat_sk._checks import check_integer, is_number
from relflat_sk._models import DataOptions, to_network
from relflat_sk._network import Layer, mean_loss
from relflat_sk._random import RandomState, as_random_state
from relflat_sk.theory._feature_moves import Site, check_delta, find_site
from relflat_sk.theory._smoothing import (
    DEFAULT_KERNEL,
    DEFAULT_SIGMA,
    Smoothing,
    check_alphas,
    check_bandwidth,
)

__all__ = ["default_delta", "representativeness"]


def default_delta(site: Site) -> float:
    """Compute the radius of the smoothing that Theorem 6 uses."""
    return float(site.n_samples ** (-1 / (4 + site.size)))


def _splits(
    n: int, n_splits: int, test_size: float, rng: np.random.RandomState
) -> list[tuple[Any, Any]]:
    """Draw random splits into two parts, the second of which is held out."""
    check_integer("n_splits", n_splits, minimum=2, reason="one split has no standard error")
    if not (is_number(test_size) and 0 < test_size < 1):
        raise ValueError(
            f"test_size must be a number between 0 and 1, got {test_size!r}: it is the share of "
            "the samples that is held out."
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
    kernel: str = DEFAULT_KERNEL,
    sigma: float = DEFAULT_SIGMA,
    bandwidth: float | str | None = None,
    alphas: Any = None,
    label_noise: Callable[[Any, np.random.RandomState], Any] | None = None,
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
    X : array-like of n samples
        Inputs as the model takes them.
    y : array-like of shape (n, ...)
        Labels as the model was trained with.
    layer : int, str or nn.Module, default=-1
        The layer whose features are smoothed, see `relative_flatness`.
    delta : float, optional
        Radius of the smoothing, as a share of the features' norm. If None it is
        ``n^(-1 / (4 + m))``, the choice of Theorem 6, with n samples and m features.
    n_splits : int, default=10
        Random splits to average over, at least 2.
    test_size : float, default=0.25
        Share of the samples that is held out.
    refit : bool, default=False
        Fit a clone of the estimator to the rest of each split, so that the held-out samples
        are new to it. Only then is the result about new data; see Notes.
    kernel : {"truncated_normal", "normal", "uniform", "sphere"}, default="truncated_normal"
        Distribution of the smoothing around a sample, with ``r_i = delta |phi(x_i)|``: normal
        with deviation ``sigma r_i`` in each direction, given a length of at most ``r_i``; the
        same without that limit, which makes the smoothed sample a Gaussian kernel density
        estimate with a bandwidth for each sample; uniform in the ball, or on the sphere, of
        radius ``sigma r_i``.
    sigma : float, default=1
        Width of the kernel.
    bandwidth : float, "scott" or "silverman", optional
        Smooth all samples by a Gaussian kernel density estimate with this bandwidth, in the unit
        of the features and the same for all samples, in place of a kernel whose radius is in
        proportion to the features, so that `kernel`, `sigma` and `delta` are left out. The rules
        of Scott and Silverman take the root mean variance of the features times
        ``n^(-1/(m+4))`` and ``(n (m+2)/4)^(-1/(m+4))``; with `refit`, of each new model on the
        samples that it was fitted to.
    alphas : array of shape (n,), optional
        Weights ``alpha_i`` of the samples in the smoothed distribution, divided by their sum;
        equal if None. Some may be zero, but not those of all samples in one part of a split. A
        DataLoader must not shuffle then.
    label_noise : callable, optional
        Moves the labels, too: from an array of labels, as the criterion takes them, and a
        RandomState to an array of noisy labels of the same shape. Each draw has its own noise.
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
    representativeness : float
        In the unit of the loss; 1/n is in.
    stderr : float
        Its standard error over random splits and draws, given the sample. The standard error
        over samples is larger, and cannot be estimated from one sample.

    Raises
    ------
    ValueError
        If an argument is out of its range, or data, labels and model do not fit together.
    TypeError
        If `refit=True` and the model cannot be cloned and fitted.
    LayerNotFoundError
        If there is no such layer.

    Notes
    -----
    By equations 3 and 5 of [1]_, :math:`\mathcal{E}_{Rep} = E_{(x, y)}[\ell(f(x), y)] - \sum_i
    \alpha_i E_{\xi \sim \lambda_i}[\ell(\psi(\phi(x_i) + \xi), y_i)]`, with :math:`\alpha_i =
    1/n` if no `alphas` are given. With noise :math:`\nu_i` on the labels, it is Rep of
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
    options = DataOptions(criterion, batch_size, device, in_order=alphas is not None)
    site = find_site(model, X, y, layer, options)
    check_bandwidth(bandwidth, delta, kernel, sigma)
    delta = default_delta(site) if delta is None else check_delta(delta)
    rng = as_random_state(random_state)
    splits = _splits(site.n_samples, n_splits, test_size, rng)
    smooth = Smoothing(kernel, sigma, n_draws, label_noise, rng, bandwidth)
    shares = check_alphas(alphas, site.n_samples)
    if not refit:
        smoothed = smooth(site, delta, shares)
        values = [
            smoothed.mean_loss(held) - smoothed.mean_smooth_loss(rest) for rest, held in splits
        ]
        return float(np.mean(values)), float(np.hypot(_stderr(values), smoothed.stderr))
    _check_fits(model)
    values = []
    for rest, held in splits:
        X_rest, y_rest = multi_indexing(X, rest), multi_indexing(y, rest)
        fitted = clone(model).fit(X_rest, y_rest)
        X_held, y_held = multi_indexing(X, held), multi_indexing(y, held)
        risk = mean_loss(to_network(fitted, X_held, y_held, options))
        site = find_site(fitted, X_rest, y_rest, layer, options)
        smoothed = smooth(site, delta, shares[rest])
        values.append(risk - smoothed.mean_smooth_loss(slice(None)))
    return float(np.mean(values)), _stderr(values)


def _stderr(values: list[float]) -> float:
    return float(np.std(values, ddof=1) / np.sqrt(len(values)))


def _check_fits(model: Any) -> None:
    """Refuse a model that cannot be cloned and fitted."""
    if isinstance(model, nn.Module) or not (hasattr(model, "fit") and hasattr(model, "get_params")):
        raise TypeError(
            f"refit=True needs an estimator to clone and fit, got {type(model).__name__}. Wrap a "
            "module in a skorch net, or use refit=False and see the notes for test data."
        )
