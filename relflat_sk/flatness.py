r"""Relative flatness of one layer, from one pass over the data.

The definition [1]_ sums the traces of the blocks of the layer's Hessian, weighed by the
inner products of the rows of the weight matrix. Since the Hessian is
``mean_i B_i (x) phi_i phi_i^T`` exactly, with the notation of `relflat_sk.curvature`,

.. math:: \kappa = \sum_{s,t} \langle w_s, w_t \rangle \mathrm{Tr}(H_{s,t})
    = \mathrm{mean}_i \, |\phi_i|^2 \sum_k q_i(F)_k \quad\text{for any } F F^\top = W W^\top .

References
----------
.. [1] H. Petzka et al., "Relative Flatness and Generalization", NeurIPS 2021, Definition 3
   and, for the normalised variant, Theorem 4.
"""

import math
import warnings
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from relflat_sk.exceptions import FlatnessWarning
from relflat_sk.layers import Layer
from relflat_sk.network import Network, Observation, borrowed, observe, sample_weight

__all__ = ["METHODS", "Flatness", "measure_flatness"]

METHODS = ("auto", "exact", "hutchinson")

# Hessian-vector products that "auto" always affords, whatever the number of samples
_FEW_PRODUCTS = 64
_MAX_PROBES = 10_000


@dataclass
class Flatness:
    """A flatness with what else the same pass over the data showed."""

    value: float
    stderr: float
    risk: float  # mean loss; nan without labels
    n_samples: int
    method: str  # "closed form", "exact" or "hutchinson"
    network: Network
    output_shape: torch.Size = field(default_factory=torch.Size)
    link: str | None = None

    def constant_risk(self) -> float:
        """Compute the mean loss of the best constant prediction on the same data.

        Returns
        -------
        float
            nan without labels. Goes through the labels again, not through the network.
        """
        if math.isnan(self.risk) and not self._has_labels():
            return math.nan
        targets, weights = [], []
        for batch in self.network.batches():
            assert batch.y is not None
            n, device = len(batch.y), batch.y.device
            output = torch.empty((n, *self.output_shape), dtype=torch.float64, device=device)
            targets.append(self.network.loss.check_target(output, batch.y))
            weights.append(sample_weight(batch, n, device))
        return self.network.loss.constant_risk(
            torch.cat(targets), torch.cat(weights), self.output_shape, self.link
        )

    def _has_labels(self) -> bool:
        return next(self.network.batches()).y is not None


@dataclass
class _Sums:
    """Sums over samples; float64."""

    value: float = 0.0  # of |phi|^2 q, averaged over probes
    variance: float = 0.0  # of the variance between a sample's probes
    loss: float = 0.0
    divisor: float = 0.0
    closed_form: bool = True
    n_samples: int = 0
    output_shape: torch.Size = field(default_factory=torch.Size)
    link: str | None = None

    def look(self, seen: Observation) -> None:
        self.loss += seen.loss
        self.divisor += seen.divisor
        self.closed_form &= seen.closed_form
        self.n_samples += len(seen.features)
        self.output_shape, self.link = seen.output_shape, seen.link


def measure_flatness(
    network: Network,
    layer: Layer = -1,
    *,
    normalize: bool = False,
    method: str = "auto",
    n_probes: int | None = None,
    rtol: float = 0.01,
    random_state: int | np.random.RandomState | None = None,
) -> Flatness:
    """Measure the relative flatness of one layer; see `relflat_sk.relative_flatness`.

    Parameters
    ----------
    network : Network
    layer : int, str or nn.Module
    normalize : bool
    method : {"auto", "exact", "hutchinson"}
    n_probes : int, optional
    rtol : float
    random_state : int, RandomState or None

    Returns
    -------
    Flatness

    Raises
    ------
    ValueError
        If an argument is out of its range, or the data or layer do not fit the network.
    """
    _check_arguments(method, n_probes, rtol)
    with borrowed(network.module):
        spread = feature_spread(network, layer) if normalize else None
        if method != "hutchinson":
            sums = _exact(network, layer, spread, _FEW_PRODUCTS if method == "auto" else None)
            if sums is not None:
                how = "closed form" if sums.closed_form else "exact"
                return _result(network, sums, how, 0.0)
        return _hutchinson(network, layer, spread, method, n_probes, rtol, random_state)


def _check_arguments(method: str, n_probes: int | None, rtol: float) -> None:
    if method not in METHODS:
        raise ValueError(f"method must be one of {METHODS}, got {method!r}.")
    if n_probes is not None and (not isinstance(n_probes, int) or n_probes < 2):
        raise ValueError(
            f"n_probes must be an integer of at least 2 (one probe has no error bar) or None, "
            f"got {n_probes!r}."
        )
    if not rtol > 0:
        raise ValueError(f"rtol must be positive, got {rtol!r}.")


def _result(network: Network, sums: _Sums, method: str, stderr: float) -> Flatness:
    if sums.divisor == 0:
        raise ValueError(
            "no sample counts in the mean loss: every label is ignored (ignore_index) or has "
            "weight zero."
        )
    return Flatness(
        value=sums.value / sums.divisor,
        stderr=stderr,
        risk=sums.loss / sums.divisor,
        n_samples=sums.n_samples,
        method=method,
        network=network,
        output_shape=sums.output_shape,
        link=sums.link,
    )


def _exact(
    network: Network, layer: Layer, spread: Tensor | None, most_products: int | None
) -> _Sums | None:
    """Sum exactly; None if that takes more than `most_products` products per batch."""
    sums = _Sums()
    factor = None
    for seen in observe(network, layer):
        factor = _factor(seen.weight, spread) if factor is None else factor
        if not seen.closed_form and most_products and factor.shape[1] > most_products:
            return None
        sums.look(seen)
        forms = seen.curvature(factor).double().sum(dim=1)
        sums.value += seen.weighted_sum(_squared_norm(seen.features, spread) * forms)
        del seen, forms  # frees the batch before the next one is run
    return sums


def _factor(weight: Tensor, spread: Tensor | None) -> Tensor:
    """Return a matrix F with min(d, m) columns and F F^T = W W^T (W V where normalised)."""
    if spread is not None:
        weight = weight * spread
    d, m = weight.shape
    if d >= m or not bool(torch.isfinite(weight).all()):  # diverged: the SVD would raise
        return weight
    u, s, _ = torch.linalg.svd(weight, full_matrices=False)
    factor: Tensor = u * s
    return factor


def _squared_norm(features: Tensor, spread: Tensor | None) -> Tensor:
    if spread is None:
        norm: Tensor = torch.linalg.vector_norm(features, dim=1, dtype=torch.float64)
        return norm.square()
    # a feature that never varies acts as a bias: it drops out of both factors
    inverse = torch.where(spread > 0, spread, torch.inf).reciprocal()
    return (features.double() * inverse).square().sum(dim=1)


def feature_spread(network: Network, layer: Layer) -> Tensor:
    """Compute the standard deviation of each feature over the samples, 0 where it never varies.

    Parameters
    ----------
    network : Network
    layer : int, str or nn.Module

    Returns
    -------
    Tensor of shape (m,)
        float64, divided by n. The standard deviation, not the variance of the paper's
        text: only with it is the normalised flatness invariant.
    """
    n = 0
    mean = squares = torch.zeros((), dtype=torch.float64, device=network.device)
    low, high = mean + torch.inf, mean - torch.inf
    eps = 0.0
    for seen in observe(network, layer):
        batch = seen.features.double()
        size, centre = len(batch), batch.mean(dim=0)
        shift = centre - mean  # Chan's update: the mean of all, without cancellation
        squares = squares + (batch - centre).square().sum(dim=0)
        squares = squares + shift.square() * (n * size / (n + size))
        mean = mean + shift * (size / (n + size))
        n += size
        low = torch.minimum(low, batch.amin(dim=0))
        high = torch.maximum(high, batch.amax(dim=0))
        eps = torch.finfo(seen.features.dtype).eps
        del seen
    # rounding noise on a constant is no variation; relative, so that scale does not matter
    varies = (high - low) > 8 * eps * torch.maximum(low.abs(), high.abs())
    return torch.where(varies, (squares / n).sqrt(), 0.0)


def _hutchinson(
    network: Network,
    layer: Layer,
    spread: Tensor | None,
    method: str,
    n_probes: int | None,
    rtol: float,
    random_state: int | np.random.RandomState | None,
) -> Flatness:
    """Average probes drawn for each sample by itself, until the error bar is small.

    With ``v = F r``, r Rademacher, ``E v^T B v = Tr(F^T B F)``. Two probes for each sample
    show the variance between a sample's probes, from which follows how many are needed.
    """
    generator = _generator(random_state, network.device)
    cap = n_probes or _MAX_PROBES
    total, done = 0.0, 0
    scatter, freedom = 0.0, 0
    missing = min(2, cap)
    while True:
        sums, columns = _probe(network, layer, spread, missing, generator)
        total += missing * sums.value
        scatter += (missing - 1) * sums.variance
        done, freedom = done + missing, freedom + missing - 1
        sums.value = total / done
        value = sums.value / sums.divisor
        stderr = math.sqrt(scatter / freedom / done) / abs(sums.divisor)
        if not math.isfinite(value) or stderr <= rtol * abs(value) or done >= cap:
            break
        needed = math.inf
        if value != 0:
            needed = scatter / freedom / (rtol * value * sums.divisor) ** 2
        if method == "auto" and needed >= columns:
            # the error bar asked for costs more than no error at all
            exact = _exact(network, layer, spread, None)
            assert exact is not None
            return _result(network, exact, "exact", 0.0)
        missing = (
            int(min(max(math.ceil(1.05 * needed) - done, 2), cap - done))
            if (needed < math.inf)
            else cap - done
        )
    if n_probes is None and stderr > rtol * abs(value):
        warnings.warn(
            f"{done} probes left a standard error of {stderr:.3g} on a flatness of "
            f"{value:.3g}, more than rtol={rtol:g} asks for; use method='exact'.",
            FlatnessWarning,
            stacklevel=3,
        )
    return _result(network, sums, "hutchinson", stderr)


def _probe(
    network: Network,
    layer: Layer,
    spread: Tensor | None,
    n_probes: int,
    generator: torch.Generator,
) -> tuple[_Sums, int]:
    sums = _Sums()
    columns = 0
    factor = None
    for seen in observe(network, layer):
        sums.look(seen)
        factor = _factor(seen.weight, spread) if factor is None else factor
        n, columns = len(seen.features), factor.shape[1]
        norms = _squared_norm(seen.features, spread) * seen.sample_weight
        mean = torch.zeros_like(norms)
        squares = torch.zeros_like(norms)
        for j in range(1, n_probes + 1):
            signs = torch.randint(0, 2, (n, columns), generator=generator, device=norms.device)
            vectors = (2.0 * signs.double() - 1) @ factor.T
            draw = norms * seen.curvature(vectors[:, :, None])[:, 0].double()
            shift = draw - mean
            mean = mean + shift / j
            squares = squares + shift * (draw - mean)
        sums.value += float(mean.sum())
        sums.variance += float(squares.sum()) / max(n_probes - 1, 1)
        del seen
    return sums, columns


def _generator(
    random_state: int | np.random.RandomState | None, device: torch.device
) -> torch.Generator:
    """Make a generator of our own, so that torch's global random state is left alone."""
    generator = torch.Generator(device=device)
    if random_state is None:
        generator.seed()
    elif isinstance(random_state, np.random.RandomState):
        generator.manual_seed(int(random_state.randint(2**31 - 1)))
    elif isinstance(random_state, int | np.integer) and not isinstance(random_state, bool):
        generator.manual_seed(int(random_state))
    else:
        raise ValueError(
            f"random_state must be an int, a numpy RandomState or None, got {random_state!r}."
        )
    return generator
