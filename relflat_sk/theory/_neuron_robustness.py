"""Feature robustness towards single neurons, beside the bound by each neuron's flatness."""

from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from relflat_sk._models import DataOptions, name_layers, to_network
from relflat_sk._network import borrowed, layer_names
from relflat_sk._random import RandomState, as_random_state
from relflat_sk._warnings import warn
from relflat_sk.measures import measure_layers
from relflat_sk.theory._feature_moves import Site, check_delta, find_site, move_features
from relflat_sk.theory._kernels import Scheme

__all__ = ["neuron_robustness"]


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
    X : array-like of n samples
        Inputs as the model takes them.
    y : array-like of shape (n, ...)
        Labels as the model was trained with.
    delta : float
        How far each feature is moved, as a share of its value.
    layers : int, str, nn.Module, a sequence of these, or "all", default="all"
        The layers that receive the features. They must receive one vector for each sample;
        "all" leaves out others with a warning.
    criterion : torch loss, optional
        Needed for a bare module; an estimator knows its own.
    batch_size : int, default=1024
        Samples in one forward pass.
    device : str or torch.device, optional
        Where to compute; where the model is if None.
    random_state : int, RandomState or None, default=None
        Seeds the random probes of the flatness, where it is not exact.

    Returns
    -------
    DataFrame
        One row for each layer and neuron: `layer`, `neuron`, `robustness` (the rise of the mean
        loss, 1/n is in) and `flatness_term`, ``delta^2 / 2 rho(j)``.

    Raises
    ------
    ValueError
        If an argument is out of its range, or a layer receives more than one vector for each
        sample.
    LayerNotFoundError
        If there is no such layer.
    TypeError
        If there is no network in the model.

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
    options = DataOptions(criterion, batch_size, device)
    rng = as_random_state(random_state)
    tables = []
    for site in _sites(model, X, y, layers, options):
        rises = _rises(site, delta)
        name = "neuron_flatness_max"
        found = measure_layers(site.network, [name], [site.name], random_state=rng)
        rho = found[site.name, name].neurons
        assert rho is not None
        columns = {"robustness": rises.numpy(), "flatness_term": delta**2 / 2 * rho}
        tables.append(pd.DataFrame({"layer": site.name, "neuron": range(site.size), **columns}))
    return pd.concat(tables, ignore_index=True)


def _sites(model: Any, X: Any, y: Any, layers: Any, options: DataOptions) -> list[Site]:
    """Find the layers that receive one vector for each sample."""
    chosen = name_layers(model, layers)
    every = isinstance(chosen, str)
    if every:
        network = to_network(model, X, y, options)
        with borrowed(network.module):
            chosen = list(layer_names(network))
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


def _rises(site: Site, delta: float) -> Tensor:
    """Compute the rise of the mean loss by each feature."""

    def directions(features: Tensor) -> Iterator[tuple[Tensor, ...]]:
        for j in range(site.size):
            moved = torch.zeros_like(features)
            moved[:, j] = features[:, j]
            yield (moved,)

    total, divisor = torch.zeros(site.size, dtype=torch.float64), 0.0
    with borrowed(site.network.module):
        for moved in move_features(site, Scheme(directions, 0.0), delta):
            total += (moved.rises @ moved.weights).cpu()
            divisor += float(moved.divisors @ moved.weights)
    return total / divisor
