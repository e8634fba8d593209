"""Feature robustness: how much the loss rises when the features of a layer are moved."""

import math
from collections.abc import Callable
from typing import Any

import pandas as pd
from torch import nn

from relflat_sk._models import DataOptions, name_layers, to_network
from relflat_sk._network import Layer, find_non_finite, layer_names
from relflat_sk._random import RandomState, as_random_state, make_generator
from relflat_sk._warnings import warn
from relflat_sk.measures import measure_layers
from relflat_sk.theory._directions import make_scheme, projections
from relflat_sk.theory._feature_moves import Site, check_delta, find_site, mean_rises


def feature_robustness(  # noqa: PLR0913
    model: Any,
    X: Any,
    y: Any,
    delta: float,
    *,
    layer: Layer = -1,
    matrices: Any = "orthogonal",
    n_draws: int = 32,
    absolute: bool = False,
    labelling: Callable[[Any], Any] | None = None,
    criterion: Any = None,
    batch_size: int = 1024,
    device: Any = None,
    random_state: RandomState = None,
) -> tuple[float, float]:
    r"""Measure how much the mean loss rises when the features of a layer are moved.

    To move the features ``phi`` that a layer receives by ``A phi`` changes the loss as much as to
    change the layer's weight ``W`` by ``W A``. Therefore the loss at a relatively flat minimum
    rises little when the features are slightly wrong: on average over orthogonal matrices, it
    rises by ``delta^2 / (2 m) kappa``, with kappa the `relative_flatness` of the layer.

    Parameters
    ----------
    model : nn.Module or fitted estimator
        Any model that `relative_flatness` measures.
    X, y : array-like of n samples
        Inputs and labels as the model was trained with.
    delta : float
        How far features are moved, as a share of their norm.
    layer : int, str or nn.Module, default=-1
        The layer whose features are moved, see `relative_flatness`.
    matrices : {"orthogonal", "projection", "truncated_normal"} or array, default="orthogonal"
        How ``phi_i`` is moved, with m the number of features of a sample:

        - "orthogonal": to ``phi_i + delta O phi_i``, with O orthogonal, of Haar's distribution,
          and independent for each sample;
        - "projection": feature j is multiplied by ``1 + delta`` and the others stay, for one j
          at a time (for all j if ``n_draws >= m``, which makes the result exact);
        - "truncated_normal": to ``phi_i + delta |phi_i| e``, with e standard normal in m
          dimensions given ``|e| <= 1``;
        - an array of shape (m, m) or (k, m, m): to ``phi_i + delta M phi_i``, averaged over the
          k matrices M, which are the same for all samples.
    n_draws : int, default=32
        Random draws to average over, at least 2. Each draw of "orthogonal" and of
        "truncated_normal" is a pair of opposite moves, and evaluates the loss twice.
    absolute : bool, default=False
        Average the magnitude of the rise over matrices, ``E|F(delta, S, A)|``, as in robustness
        on average (P19, Definition 1). A matrix is then the same for all samples: "orthogonal"
        draws m x m matrices, and "truncated_normal", which is none, is refused.
    labelling : callable, optional
        The true labels at moved features (P21, equation 4): from an array of shape (n, m) to
        labels of the shape of `y`, as the criterion takes them; classes by their number. If
        None, labels are constant around each sample.
    criterion, batch_size, device : optional
        The loss, the samples in one forward pass and where to compute, see `relative_flatness`.
    random_state : int, RandomState or None, default=None
        Decides the draws, which differ from call to call if None.

    Returns
    -------
    robustness : float
        The rise in the unit of the loss, averaged over n samples. Small is robust.
    stderr : float
        Its standard error from the random draws, 0 if there are none. The choice of samples
        does not count in it.

    Raises
    ------
    ValueError
        If an argument is out of its range, or does not fit the layer, or `labelling` gives labels
        of other class weights.
    LayerNotFoundError, TypeError
        If there is no such layer, or no network in the model.

    Warns
    -----
    FlatnessWarning
        If the robustness is not finite, or a matrix has an operator norm above 1.

    See Also
    --------
    worst_feature_robustness : The largest rise over all matrices of norm at most 1.
    neuron_robustness : The rise by each feature, beside its bound.

    Notes
    -----
    Feature robustness is :math:`\mathcal{E}_F(f, S, A) = \frac1n \sum_i \ell(\psi((I + A)
    \phi(x_i)), y_i) - \ell(f(x_i), y_i)` [1]_; P19 writes it as F in equation 2. With
    `labelling`, :math:`y_i` in the first loss is the true label at the moved features (P21,
    equation 4). By Theorem 5, at a minimum

    .. math:: E_O[\mathcal{E}_F(f, S, \delta O)] = \frac{\delta^2}{2m} \kappa + O(\delta^3) .

    The mean over all O is even in delta, since -O is as likely as O. So the remainder is of order
    :math:`\delta^4`, and the equation also holds away from minima. For a single A it does not: the
    first-order term :math:`\delta\langle\nabla_W L, W A\rangle` vanishes only where the gradient
    in the layer's weight does. Piecewise linear networks have kinks: the equation holds for delta
    so small that hardly any sample crosses one.

    At convolutions, and at layers that receive one vector for each position, all features of a
    sample are moved together, and m is their number. The rise is then
    :math:`\frac{\delta^2}{2m} \frac1n \sum_i \|\phi_i\|^2 \mathrm{Tr}\,\partial^2 \ell_i /
    \partial\phi_i^2` up to higher orders, which is not the flatness in the shared weight.

    The rise is a small difference of two losses. At the last layer it is computed in float64,
    elsewhere in the network's own precision. A float32 network does not resolve deltas below
    about 0.01; the standard error shows this.

    References
    ----------
    .. [1] Petzka et al., "Relative Flatness and Generalization", NeurIPS 2021.

    Examples
    --------
    The squared error is quadratic, so Theorem 5 has no remainder. With one feature, O is 1 or
    -1, so a pair of opposite moves has no randomness either:

    >>> from sklearn.linear_model import LinearRegression
    >>> from relflat_sk import relative_flatness
    >>> X, y = [[1.0], [2.0]], [2.0, 4.0]
    >>> regression = LinearRegression(fit_intercept=False).fit(X, y)
    >>> robustness, stderr = feature_robustness(regression, X, y, 0.1, random_state=0)
    >>> round(robustness, 12), 0.1**2 / 2 * relative_flatness(regression, X, y)
    (0.1, 0.10000000000000002)
    """
    delta = check_delta(delta)
    site = find_site(model, X, y, layer, DataOptions(criterion, batch_size, device))
    generator = make_generator(random_state, site.network.device)
    scheme = make_scheme(matrices, site.size, n_draws, generator, shared=absolute)
    relabel = None if labelling is None else lambda phi, _: labelling(phi)
    draws = mean_rises(site, scheme, delta, relabel=relabel)
    draws = draws.abs() if absolute else draws
    robustness = float(draws.mean())
    if not math.isfinite(robustness):
        warn_of_non_finite_rise(site.network.module)
    return robustness, scheme.stderr(draws)


def warn_of_non_finite_rise(module: nn.Module) -> None:
    """Say why the robustness is not finite."""
    parameter = find_non_finite(module)
    cause = "a loss is too large"
    if parameter is not None:
        cause = f"{parameter!r} of the network contains nan or infinite numbers"
    warn(
        f"the feature robustness is nan or infinite, because {cause}. Has training diverged? Train "
        "again, with a lower learning rate for example."
    )


def neuron_robustness(  # noqa: PLR0913
    model: Any,
    X: Any,
    y: Any,
    delta: float,
    *,
    layers: Any = "all",
    criterion: Any = None,
    batch_size: int = 1024,
    device: Any = None,
    random_state: RandomState = None,
) -> pd.DataFrame:
    r"""Measure how much the mean loss rises when a single feature is scaled, for every feature.

    Feature j of a layer's input is multiplied by ``1 + delta``: the matrix A is the projection on
    one neuron. At a minimum, the rise is ``delta^2 / 2 rho(j)`` up to the third order in delta.

    Parameters
    ----------
    model : nn.Module or fitted estimator
        Any model that `relative_flatness` measures.
    X, y : array-like of n samples
        Inputs and labels as the model was trained with.
    delta : float
        How far each feature is moved, as a share of its value.
    layers : int, str, nn.Module, a sequence of these, or "all", default="all"
        The layers that receive the features. They must receive one vector for each sample;
        "all" leaves out others with a warning.
    criterion, batch_size, device : optional
        The loss, the samples in one forward pass and where to compute, see `relative_flatness`.
    random_state : int, RandomState or None, default=None
        Seeds the random probes of the flatness, where it is not exact.

    Returns
    -------
    DataFrame
        One row for each layer and neuron: `layer`, `neuron`, `robustness` (the rise of the loss,
        averaged over n samples) and `flatness_term`, ``delta^2 / 2 rho(j)``.

    Raises
    ------
    ValueError
        If an argument is out of its range, or a layer receives more than one vector for each
        sample.
    LayerNotFoundError, TypeError
        If there is no such layer, or no network in the model.

    Warns
    -----
    FlatnessWarning
        If layers are left out.

    Notes
    -----
    Single neurons are projections of operator norm 1, so that Theorem 2 of [1]_ bounds the rise
    by ``delta^2 / 2 |W|^2 lambda_max(H)``. The form of the Hessian in the projected weight, ``rho``
    of Appendix B, is smaller, and is the second order of the rise itself. Figure 4 of [1]_ shows
    such projections.

    References
    ----------
    .. [1] Petzka et al., "Feature-Robustness, Flatness and Generalization Error for Deep
       Neural Networks", 2020.

    Examples
    --------
    The squared error is quadratic, so that both agree at the minimum:

    >>> from sklearn.linear_model import LinearRegression
    >>> X, y = [[1.0, 0.0], [0.0, 2.0], [1.0, 2.0]], [1.0, 2.0, 3.0]
    >>> model = LinearRegression(fit_intercept=False).fit(X, y)
    >>> neuron_robustness(model, X, y, 0.1).round(6)[["neuron", "robustness", "flatness_term"]]
       neuron  robustness  flatness_term
    0       0    0.006667       0.006667
    1       1    0.026667       0.026667
    """
    delta = check_delta(delta)
    rng = as_random_state(random_state)
    tables = []
    for site in _sites(model, X, y, layers, DataOptions(criterion, batch_size, device)):
        name = "neuron_flatness_max"
        found = measure_layers(site.network, [name], [site.name], random_state=rng)
        rho = found[site.name, name].neurons
        assert rho is not None
        table = {
            "layer": site.name,
            "neuron": range(site.size),
            "robustness": mean_rises(site, projections(range(site.size)), delta).numpy(),
            "flatness_term": delta**2 / 2 * rho,
        }
        tables.append(pd.DataFrame(table))
    return pd.concat(tables, ignore_index=True)


def _sites(model: Any, X: Any, y: Any, layers: Any, options: DataOptions) -> list[Site]:
    """Find the layers that receive one vector for each sample."""
    chosen = name_layers(model, layers)
    every = isinstance(chosen, str)
    if isinstance(chosen, str):
        chosen = list(layer_names(to_network(model, X, y, options)))
    sites = [find_site(model, X, y, layer, options) for layer in chosen]
    others = [site for site in sites if len(site.shape) != 1]
    if others and (not every or len(others) == len(sites)):
        raise ValueError(
            f"layer {others[0].name!r} receives {tuple(others[0].shape)} for each sample; single "
            "neurons need a layer that receives one vector. Choose a linear layer behind it."
        )
    if others:
        warn(
            f"{', '.join(repr(site.name) for site in others)} left out: layers that receive more "
            "than one vector for each sample have no single neurons."
        )
    return [site for site in sites if len(site.shape) == 1]
