"""Feature robustness in the worst case: the largest change of the loss over all matrices."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from torch import Tensor

from relflat_sk._checks import check_integer
from relflat_sk._models import DataOptions
from relflat_sk._network import Layer, borrowed, sample_weight
from relflat_sk._random import RandomState, as_random_state, make_generator
from relflat_sk.measures import measure_layers
from relflat_sk.theory._directions import check_matrices, haar_matrices
from relflat_sk.theory._feature_moves import Site, check_delta, find_site, losses_of, split_at
from relflat_sk.theory._robustness import warn_of_non_finite_rise

# shares of the way to a vertex that are tried, the largest first
_STEPS = (1.0, 0.5, 0.25, 0.1, 0.03)


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
    site = find_site(model, X, y, layer, DataOptions(criterion, batch_size, device))
    rng = as_random_state(random_state)
    generator = make_generator(rng, site.network.device)
    identity = torch.eye(site.size, dtype=torch.float64, device=site.network.device)
    still = 0 * identity
    with borrowed(site.network.module):
        risk = _Risk(site, delta)
        before = risk(still)
        if not math.isfinite(before):
            warn_of_non_finite_rise(site.network.module)
            nothing = np.full(identity.shape, np.nan)
            return WorstRobustness(math.nan, math.nan, math.nan, nothing, math.nan)
        if matrices is None:
            starts = [identity, -identity]
            starts += haar_matrices(site.size, n_restarts, generator).to(identity)
            found = [_ascend(risk, start, 1.0, n_steps) for start in starts]
            # the loss often falls most near the features as they are
            falls = [_ascend(risk, start, -1.0, n_steps) for start in (still, *starts)]
        else:
            given = check_matrices(matrices, site.size, identity.device)
            found = [best for one in given for best in _along(risk, one, 1.0, n_steps)]
            falls = [best for one in given for best in _along(risk, one, -1.0, n_steps)]
    rise, highest = max([(before, still), *found], key=lambda one: one[0])
    fall, lowest = max([(-before, still), *falls], key=lambda one: one[0])
    rise, fall = rise - before, fall + before
    return WorstRobustness(
        value=max(rise, fall),
        rise=rise,
        fall=fall,
        matrix=(highest if rise >= fall else lowest).cpu().numpy(),
        flatness_bound=_flatness_bound(site, delta, rng),
    )


def _flatness_bound(site: Site, delta: float, rng: np.random.RandomState) -> float:
    """Compute the right-hand side of equation 6 without its remainder."""
    if len(site.shape) != 1:
        return np.nan
    name = "eigenvalue_flatness"
    found = measure_layers(site.network, [name], [site.name], rtol=1e-6, random_state=rng)
    return delta**2 / 2 * found[site.name, name].value


@dataclass(frozen=True)
class _Risk:
    """The mean loss as a function of the matrix, (m, m), that moves the features."""

    site: Site
    delta: float

    def __call__(self, matrix: Tensor) -> float:
        """Compute the mean loss."""
        with torch.no_grad():
            sums = list(self._sums(matrix))
        return float(torch.stack([total for total, _ in sums]).sum()) / sum(
            part for _, part in sums
        )

    def slope(self, matrix: Tensor) -> Tensor:
        """Compute the gradient of the mean loss in the matrix."""
        leaf, slope, divisor = matrix.clone().requires_grad_(), torch.zeros_like(matrix), 0.0
        with torch.enable_grad():
            for total, part in self._sums(leaf):
                if total.requires_grad:
                    slope += torch.autograd.grad(total, leaf)[0]
                divisor += part
        return slope / divisor

    def _sums(self, matrix: Tensor) -> Iterator[tuple[Tensor, float]]:
        """Sum losses and divisors of each batch with moved features."""
        for batch in self.site.network.batches():
            features, run = split_at(self.site, batch)
            output = run(self.delta * features @ matrix.T)
            losses, divisors = losses_of(self.site.network, batch, output)
            weights = sample_weight(batch, len(losses), losses.device)
            yield weights @ losses, float(weights @ divisors.detach())


def _along(
    risk: _Risk, matrix: Tensor, sign: float, n_steps: int
) -> Iterator[tuple[float, Tensor]]:
    """Maximise ``sign * risk`` over multiples of a matrix, by shares from -1 to 1."""
    shares = np.linspace(-1, 1, 2 * n_steps + 1)
    values = [sign * risk(share * matrix) for share in shares]
    best = int(np.argmax(values))
    yield values[best], shares[best] * matrix
    found = minimize_scalar(
        lambda share: -sign * risk(share * matrix),
        bounds=(shares[max(0, best - 1)], shares[min(len(shares) - 1, best + 1)]),
        method="bounded",
        options={"xatol": 1e-6},
    )
    yield -float(found.fun), float(found.x) * matrix


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
            found = sign * risk(tried)
            if found > value + 1e-12 * abs(value):
                matrix, value = tried, found
                break
        else:
            break
    return value, matrix
