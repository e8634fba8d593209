"""Feature robustness: how much the loss rises when the features of a layer are moved."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from torch import Tensor

from relflat_sk._checks import check_integer, warn
from relflat_sk._models.network_of import name_layers, open_model
from relflat_sk._network.borrowing import borrowed
from relflat_sk._network.layers import Layer
from relflat_sk._network.network import Network, layer_names
from relflat_sk._random import RandomState, as_random_state, make_generator
from relflat_sk.measures._layer_measures import measure_layers
from relflat_sk.measures._measure_network import explain_non_finite
from relflat_sk.theory._moves import (
    Site,
    check_delta,
    check_matrices,
    find_site,
    haar_matrices,
    matrix_moves,
    mean_rises,
    projections,
)

# shares of the way to a vertex that are tried, the largest first
_STEPS = (1.0, 0.5, 0.25, 0.1, 0.03)


# -- the mean over matrices ----------------------------------------------------------------


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
    network = open_model(model, X, y, criterion=criterion, batch_size=batch_size, device=device)
    site = find_site(network, layer)
    generator = make_generator(random_state, site.network.device)
    moves = matrix_moves(matrices, delta, site.size, n_draws, generator, shared=absolute)
    relabel = None if labelling is None else lambda phi, _: labelling(phi)
    draws = mean_rises(site, moves, relabel)
    draws = draws.abs() if absolute else draws
    robustness = float(draws.mean())
    if not math.isfinite(robustness):
        explain_non_finite(["the feature robustness"], site.network, robustness)
    return robustness, moves.stderr(draws)


# -- single neurons ----------------------------------------------------------------------


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

    See Also
    --------
    feature_robustness : All neurons together.
    measure : ``"neuron_flatness_max"`` and ``"neuron_flatness_sum"`` are among its names.

    Notes
    -----
    Single neurons are projections of operator norm 1, so that Theorem 2 of [1]_ bounds the rise
    by ``delta^2 / 2 |W|^2 lambda_max(H)``. The form of the Hessian in the projected weight, ``rho``
    of Appendix B, is smaller, and is the second order of the rise itself; Theorem 13 bounds all
    neurons of a layer by the largest. Figure 4 of [1]_ shows such projections.

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
    network = open_model(model, X, y, criterion=criterion, batch_size=batch_size, device=device)
    for site in _sites(network, name_layers(model, layers)):
        name, neurons = "neuron_flatness_max", range(site.size)
        measured = measure_layers(site.network, [name], [site.name], random_state=rng)
        rho: Any = measured[site.name, name].neurons
        table = {
            "layer": site.name,
            "neuron": neurons,
            "robustness": mean_rises(site, projections(neurons, delta)).numpy(),
            "flatness_term": delta**2 / 2 * rho,
        }
        tables.append(pd.DataFrame(table))
    return pd.concat(tables, ignore_index=True)


def _sites(network: Network, layers: list[Layer] | str) -> list[Site]:
    """Find the layers that receive one vector for each sample."""
    chosen = layer_names(network) if isinstance(layers, str) else layers
    # a layer that is named twice counts once
    sites = {site.name: site for site in (find_site(network, layer) for layer in chosen)}
    left_out = {name: site.shape for name, site in sites.items() if len(site.shape) != 1}
    if left_out and (layers != "all" or left_out.keys() == sites.keys()):
        name, shape = left_out.popitem()
        raise ValueError(
            f"layer {name!r} receives {tuple(shape)} for each sample; single neurons need a layer "
            "that receives one vector. Choose a linear layer behind it."
        )
    if left_out:
        warn(
            f"{', '.join(map(repr, left_out))} left out: layers that receive more than one vector."
        )
    return [site for name, site in sites.items() if name not in left_out]


# -- the worst matrix --------------------------------------------------------------------


@dataclass(frozen=True)
class WorstRobustness:
    """The largest change of the loss that was found, and the bound by flatness beside it.

    Parameters
    ----------
    value : float
        The larger of `rise` and `fall`: a lower bound of the smallest epsilon for which the
        model is epsilon-feature robust.
    rise : float
        The largest rise of the mean loss that was found, not negative.
    fall : float
        The largest fall of the mean loss that was found, not negative.
    matrix : ndarray of shape (m, m)
        A matrix of operator norm at most 1 by which the loss changes by `value`; a multiple of
        one of your own if you gave any.
    flatness_bound : float
        ``delta^2 / 2 |W|^2 lambda_max(H)``; nan where the layer receives more than one vector
        for each sample.
    """

    value: float
    rise: float
    fall: float
    matrix: NDArray[np.float64]
    flatness_bound: float


def worst_feature_robustness(  # noqa: PLR0913
    model: Any,
    X: Any,
    y: Any,
    delta: float,
    *,
    layer: Layer = -1,
    matrices: Any = None,
    n_steps: int = 20,
    n_restarts: int = 2,
    criterion: Any = None,
    batch_size: int = 1024,
    device: Any = None,
    random_state: RandomState = None,
) -> WorstRobustness:
    r"""Find a matrix by which the mean loss changes most when it moves the features of a layer.

    All matrices A of operator norm at most 1 are allowed, or those that you give, and all moves
    by ``delta' A`` with ``|delta'| <= delta``. The result is a lower bound of the largest change:
    an ascent finds a local maximum.

    Parameters
    ----------
    model : nn.Module or fitted estimator
        Any model that `relative_flatness` measures.
    X, y : array-like of n samples
        Inputs and labels as the model was trained with.
    delta : float
        How far features are moved at most, as a share of their norm.
    layer : int, str or nn.Module, default=-1
        The layer whose features are moved, see `relative_flatness`.
    matrices : array of shape (m, m) or (k, m, m), optional
        Matrices A of your own. The largest change is then searched over ``delta'`` and these
        matrices alone.
    n_steps : int, default=20
        Most steps of an ascent. With `matrices`, ``delta'`` is tried at so many values on either
        side of zero; the best one is refined.
    n_restarts : int, default=2
        Ascents from random orthogonal matrices, beside those from the identity and its negative.
        Not used with `matrices`.
    criterion, batch_size, device : optional
        The loss, the samples in one forward pass and where to compute, see `relative_flatness`.
    random_state : int, RandomState or None, default=None
        Decides the random starts, which differ from call to call if None.

    Returns
    -------
    WorstRobustness
        Frozen, with `value`, `rise`, `fall`, `matrix` and `flatness_bound`; all but the matrix
        in the unit of the loss, averaged over n samples.

    Raises
    ------
    ValueError
        If an argument is out of its range, or data, labels and model do not fit together.
    LayerNotFoundError, TypeError
        If there is no such layer, or no network in the model.

    Warns
    -----
    FlatnessWarning
        If the loss is not finite; the result is nan. If a matrix has an operator norm above 1.

    See Also
    --------
    feature_robustness : The mean change over random matrices.

    Notes
    -----
    A model is :math:`((\delta, S, A), \epsilon)`-feature robust if :math:`|F(\delta', S, A)| \le
    \epsilon` for all :math:`|\delta'| \le \delta` (Definition 1 of [1]_). Since moves by
    :math:`\delta' A` are those by :math:`\delta A'` with a matrix :math:`A'` of smaller norm, one
    search over :math:`\|A\| \le 1` covers all of them. With `matrices`, the search is over
    :math:`\delta'` for each of these A. By equation 6 and Theorem 2, at a minimum

    .. math:: \max_{\|A\| \le 1} F(\delta, S, A) \le \frac{\delta^2}{2} \|W\|_F^2
        \lambda_{\max}(H) + O(\delta^3) .

    An ascent moves towards the matrix ``U V^T`` of the gradient's singular vectors, at which the
    linear approximation is largest, as far as the loss rises. Where the loss is convex in the
    layer's weight, as at the last layer, a full step never lowers it.

    References
    ----------
    .. [1] Petzka et al., "Feature-Robustness, Flatness and Generalization Error for Deep
       Neural Networks", 2020.

    Examples
    --------
    For linear regression with one output the bound is attained:

    >>> import numpy as np
    >>> from sklearn.linear_model import LinearRegression
    >>> X = np.array([[1.0, 0.0], [0.0, 2.0], [1.0, 2.0]])
    >>> model = LinearRegression(fit_intercept=False).fit(X, [1.0, 2.0, 3.0])
    >>> worst = worst_feature_robustness(model, X, [1.0, 2.0, 3.0], 0.1, random_state=0)
    >>> bool(np.isclose(worst.rise, worst.flatness_bound, rtol=1e-6)), round(worst.fall, 12)
    (True, 0.0)
    """
    delta = check_delta(delta)
    check_integer("n_steps", n_steps, minimum=1)
    check_integer("n_restarts", n_restarts, minimum=0)
    network = open_model(model, X, y, criterion=criterion, batch_size=batch_size, device=device)
    site = find_site(network, layer)
    rng = as_random_state(random_state)
    generator = make_generator(rng, site.network.device)
    identity = torch.eye(site.size, dtype=torch.float64, device=site.network.device)
    still, risk = 0 * identity, _Risk(site, delta)
    with borrowed(site.network.module):
        before = risk(still)
        if not math.isfinite(before):
            explain_non_finite(["the feature robustness"], site.network, before)
            nothing = np.full(identity.shape, np.nan)
            return WorstRobustness(math.nan, math.nan, math.nan, nothing, math.nan)
        if matrices is None:
            starts = [identity, -identity, *haar_matrices(site.size, n_restarts, generator)]
            # the loss often falls most near the features as they are
            starts_down = [still, *starts]
        else:
            starts = starts_down = list(check_matrices(matrices, site.size, identity.device))
        climb = _ascend if matrices is None else _along
        ends = [
            max(
                [(sign * before, still), *(climb(risk, start, sign, n_steps) for start in several)],
                key=itemgetter(0),
            )
            for sign, several in ((1.0, starts), (-1.0, starts_down))
        ]
    (highest, up), (lowest, down) = ends
    rise, fall = highest - before, lowest + before
    matrix = (up if rise >= fall else down).cpu().numpy()
    bound = math.nan
    if len(site.shape) == 1:
        name = "eigenvalue_flatness"
        measured = measure_layers(site.network, [name], [site.name], rtol=1e-6, random_state=rng)
        bound = delta**2 / 2 * measured[site.name, name].value
    return WorstRobustness(max(rise, fall), rise, fall, matrix, bound)


@dataclass(frozen=True)
class _Risk:
    """The mean loss as a function of the matrix, (m, m), that moves the features."""

    site: Site
    delta: float

    def __call__(self, matrix: Tensor) -> float:
        with torch.no_grad():
            sums = np.array([(float(total), part) for total, part in self._sums(matrix)])
        total, divisor = sums.sum(axis=0)
        return float(total / divisor)

    def slope(self, matrix: Tensor) -> Tensor:
        """Compute the gradient of the mean loss in the matrix."""
        leaf, slope, divisor = matrix.clone().requires_grad_(), torch.zeros_like(matrix), 0.0
        with torch.enable_grad():
            for total, part in self._sums(leaf):
                slope += torch.autograd.grad(total, leaf)[0]
                divisor += part
        return slope / divisor

    def _sums(self, matrix: Tensor) -> Iterator[tuple[Tensor, float]]:
        """Sum losses and divisors of each batch with moved features."""
        for split in self.site.splits():
            losses, divisors = split.losses(self.delta * split.features @ matrix.T)
            yield split.weights @ losses, float(split.weights @ divisors.detach())


def _along(risk: _Risk, start: Tensor, sign: float, n_steps: int) -> tuple[float, Tensor]:
    """Maximise ``sign * risk`` over multiples of the start, by shares from -1 to 1."""
    shares = np.linspace(-1, 1, 2 * n_steps + 1)
    values = [sign * risk(share * start) for share in shares]
    best = int(np.argmax(values))
    refined = minimize_scalar(
        lambda share: -sign * risk(share * start),
        bounds=(shares[max(0, best - 1)], shares[min(len(shares) - 1, best + 1)]),
        method="bounded",
        options={"xatol": 1e-6},
    )
    if -refined.fun > values[best]:
        return -float(refined.fun), float(refined.x) * start
    return values[best], shares[best] * start


def _ascend(risk: _Risk, start: Tensor, sign: float, n_steps: int) -> tuple[float, Tensor]:
    """Climb with ``sign * risk`` within the ball of operator norms at most 1."""
    matrix, value = start, sign * risk(start)
    for _ in range(n_steps):
        slope = sign * risk.slope(matrix)
        if not torch.isfinite(slope).all():
            break
        u, _s, vh = torch.linalg.svd(slope)
        vertex = u @ vh
        for share in _STEPS:
            tried = matrix + share * (vertex - matrix)
            value_there = sign * risk(tried)
            if value_there > value + 1e-12 * abs(value):
                matrix, value = tried, value_there
                break
        else:
            break
    return value, matrix
