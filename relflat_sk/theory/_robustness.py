"""Feature robustness: how much the loss rises when what a layer receives is moved."""

from typing import Any

import numpy as np
import torch

from relflat_sk._models import DataOptions, name_layer, to_network
from relflat_sk._network import Layer, borrowed
from relflat_sk._random import make_generator
from relflat_sk.theory._feature_moves import Site, find_site, make_scheme, move_features

__all__ = ["check_delta", "feature_robustness", "open_network"]


def open_network(model: Any, X: Any, y: Any, layer: Layer, options: DataOptions) -> Site:
    """Find the network and the layer in what the user handed in.

    Parameters
    ----------
    model, X, y
        See `relflat_sk.relative_flatness`.
    layer : int, str or nn.Module
    options : DataOptions

    Returns
    -------
    Site

    Raises
    ------
    ValueError
        If there are no labels.
    """
    network = to_network(model, X, y, options)
    with borrowed(network.module):
        return find_site(network, name_layer(model, layer))


def check_delta(delta: Any) -> float:
    """Return delta if it is a positive number.

    Raises
    ------
    ValueError
    """
    try:
        number = float(delta)
    except (TypeError, ValueError):
        number = np.nan
    if not 0 < number < np.inf:
        raise ValueError(
            f"delta must be a finite number > 0, got {delta!r}: how far features move, as a "
            "share of their norm."
        )
    return number


def feature_robustness(  # noqa: PLR0913
    model: Any,
    X: Any,
    y: Any,
    delta: float,
    *,
    layer: Layer = -1,
    matrices: Any = "orthogonal",
    n_draws: int = 32,
    criterion: Any = None,
    batch_size: int = 1024,
    device: Any = None,
    random_state: int | np.random.RandomState | None = None,
) -> tuple[float, float]:
    r"""Measure how much the mean loss rises when the features of a layer are moved.

    Moving what a layer receives by ``A phi`` does to the loss what changing its weight by
    ``W A`` does. That is why a flat minimum, in the relative sense, is one whose features
    may be a little off: on average over orthogonal matrices the rise is
    ``delta^2 / (2 m) kappa``, with kappa the `relative_flatness` of the layer.

    Parameters
    ----------
    model, X, y, criterion, batch_size, device
        See `relative_flatness`; y is needed.
    delta : float
        How far features are moved, as a share of their norm.
    layer : int, str or nn.Module, default=-1
        See `relative_flatness`; only what this layer receives is moved.
    matrices : {"orthogonal", "projection", "truncated_normal"} or array, default="orthogonal"
        Where ``phi_i`` is moved to, with m the number of features of a sample:

        - "orthogonal": ``phi_i + delta O phi_i``, O orthogonal with Haar's distribution, drawn
          for each sample by itself;
        - "projection": feature j becomes ``(1 + delta)`` times what it was, the others stay,
          for one j at a time (all of them if ``n_draws >= m``, and the result is then exact);
        - "truncated_normal": ``phi_i + delta |phi_i| e``, e standard normal in m dimensions
          given ``|e| <= 1``;
        - an array of shape (m, m) or (k, m, m): ``phi_i + delta M phi_i``, averaged over the k
          matrices M, the same for all samples.
    n_draws : int, default=32
        Random draws to average over, at least 2. Those of "orthogonal" and "truncated_normal"
        are pairs of opposite moves, two evaluations each.
    random_state : int, RandomState or None, default=None
        For the draws.

    Returns
    -------
    robustness : float
        In the unit of the loss; 1/n is in. Small is robust.
    stderr : float
        Its standard error, as far as it comes from random draws (0 where there are none),
        not from the choice of samples.

    Raises
    ------
    ValueError
        If an argument is out of its range, or does not fit the layer.
    LayerNotFoundError, TypeError
        See `relative_flatness`.

    Notes
    -----
    :math:`\mathcal{E}_F(f, S, A) = \frac1n \sum_i \ell(\psi((I + A) \phi(x_i)), y_i) -
    \ell(f(x_i), y_i)` [1]_; :math:`\|A\| \le \delta` is up to the caller where
    matrices are given. Theorem 5 has at a minimum

    .. math:: E_O[\mathcal{E}_F(f, S, \delta O)] = \frac{\delta^2}{2m} \kappa + O(\delta^3) .

    The mean over all O is even in delta, since -O is as likely as O: the remainder is of order
    :math:`\delta^4`, and neither gradient nor minimum is needed for the equation. They are
    needed for a single A, whose first-order term :math:`\delta\langle\nabla_W L, W A\rangle`
    vanishes only where the gradient in the layer's weight does. Networks that are linear in
    pieces have kinks: the equation holds for delta so small that next to no sample
    crosses one.

    At convolutions, and at layers that see one vector for each position, all features of a
    sample are moved together and m is their number. Then the rise is that of
    :math:`\frac{\delta^2}{2m} \frac1n \sum_i \|\phi_i\|^2 \mathrm{Tr}\,\partial^2 \ell_i /
    \partial\phi_i^2`, which is not the flatness in the shared weight.

    The loss is a small difference: at the last layer it is taken in float64, elsewhere in the
    network's own precision, in which a float32 network does not resolve deltas below about
    0.01. The standard error shows it.

    References
    ----------
    .. [1] H. Petzka et al., "Relative Flatness and Generalization", NeurIPS 2021.

    Examples
    --------
    The squared error is quadratic, so that Theorem 5 has no remainder; with one feature O is 1
    or -1, and there is no chance in it either:

    >>> from sklearn.linear_model import LinearRegression
    >>> from relflat_sk import relative_flatness
    >>> X, y = [[1.0], [2.0]], [2.0, 4.0]
    >>> regression = LinearRegression(fit_intercept=False).fit(X, y)
    >>> robustness, stderr = feature_robustness(regression, X, y, 0.1, random_state=0)
    >>> round(robustness, 12), 0.1**2 / 2 * relative_flatness(regression, X, y)
    (0.1, 0.10000000000000002)
    """
    delta = check_delta(delta)
    site = open_network(model, X, y, layer, DataOptions(criterion, batch_size, device))
    generator = make_generator(random_state, site.network.device)
    scheme = make_scheme(matrices, site.size, n_draws, generator)
    total, divisor = torch.zeros(()), 0.0
    with borrowed(site.network.module):
        for moved in move_features(site, scheme, delta):
            total = total + (moved.rises @ moved.weights).cpu()
            divisor += float(moved.divisors @ moved.weights)
    draws = total / divisor
    return float(draws.mean()), scheme.stderr(draws)
