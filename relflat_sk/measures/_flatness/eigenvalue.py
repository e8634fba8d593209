"""Largest eigenvalue of the Hessian in one layer's weight, by Lanczos on streamed products.

A product with the Hessian is a pass over the data: with the notation of
`relflat_sk._network.layer_maps`, ``H V = mean_i sum_p (B_i (V phi_i))_p phi_ip^T``.
"""

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh
from torch import Tensor

from relflat_sk._network import Layer, Network
from relflat_sk.exceptions import FlatnessWarning
from relflat_sk.measures._flatness.layer_curvature import View, observe
from relflat_sk.measures._flatness.summation import Pass

__all__ = ["Eigenvalue", "largest_eigenvalue"]

# numbers of a batch's features and closed forms that are kept instead of computed again
_KEPT = 2**26
# below this size all of the matrix is cheaper than Lanczos' basis
_SMALL = 24


@dataclass
class Eigenvalue:
    """The largest eigenvalue of the Hessian of the mean loss in a layer's weight."""

    value: float
    error: float  # residual norm, which bounds the distance to an eigenvalue
    weight: Tensor  # (d, m)
    layer: str
    seen: Pass


def largest_eigenvalue(
    network: Network,
    layer: Layer = -1,
    *,
    rtol: float = 0.01,
    random_state: int | np.random.RandomState | None = None,
    max_products: int = 1000,
) -> Eigenvalue:
    """Find the largest (algebraic) eigenvalue; to be used within `borrowed`.

    Parameters
    ----------
    network : Network
    layer : int, str or nn.Module
    rtol : float, default=0.01
        Relative tolerance of Lanczos' stopping rule.
    random_state : int, RandomState or None
        For the vector that the iteration starts from.
    max_products : int, default=1000
        Most products with the Hessian.

    Returns
    -------
    Eigenvalue

    Warns
    -----
    FlatnessWarning
        If the iteration does not converge; then with the best estimate, if there is one.
    """
    hessian = _StreamedHessian(network, layer)
    size = hessian.weight.numel()
    if size <= _SMALL:
        matrix = np.stack([hessian.product(row) for row in np.eye(size)])
        value = float(np.linalg.eigvalsh((matrix + matrix.T) / 2)[-1])
        return Eigenvalue(value, 0.0, hessian.weight, hessian.name, hessian.seen)
    operator = LinearOperator((size, size), matvec=hessian.product, dtype=np.float64)
    rng = np.random.default_rng(_seed(random_state))
    try:
        values, vectors = eigsh(
            operator,
            k=1,
            which="LA",
            v0=rng.standard_normal(size),
            tol=rtol,
            maxiter=max(1, max_products // 20),
        )
    except ArpackNoConvergence as error:
        values, vectors = error.eigenvalues, error.eigenvectors
        warnings.warn(
            f"the largest eigenvalue at layer {hessian.name!r} did not converge to a relative "
            f"tolerance of {rtol:g} in {max_products} products with the Hessian.",
            FlatnessWarning,
            stacklevel=4,
        )
    if len(values) == 0:
        return Eigenvalue(np.nan, np.nan, hessian.weight, hessian.name, hessian.seen)
    value, vector = float(values[-1]), vectors[:, -1]
    residual = hessian.product(vector) - value * vector
    return Eigenvalue(
        value, float(np.linalg.norm(residual)), hessian.weight, hessian.name, hessian.seen
    )


def _seed(random_state: int | np.random.RandomState | None) -> int | None:
    if isinstance(random_state, np.random.RandomState):
        return int(random_state.randint(2**31 - 1))
    return random_state


class _StreamedHessian:
    """Products with the Hessian; closed forms are kept if they are small enough."""

    def __init__(self, network: Network, layer: Layer) -> None:
        self.network = network
        self.layer = layer
        self.kept: list[View] | None = []
        self.seen = Pass()
        size = 0
        for view in observe(network, [layer]):
            self.seen.look(view)
            ((self.name, found),) = view.layers.items()
            self.weight = found.weight
            size += found.features.numel() + 2 * found.bump.numel()
            if found.closed is None or size > _KEPT:
                self.kept = None
            if self.kept is not None:
                self.kept.append(view)
            del view, found

    def product(self, vector: np.ndarray) -> np.ndarray:
        matrix = torch.from_numpy(np.asarray(vector)).to(self.weight).reshape(self.weight.shape)
        total = torch.zeros_like(self.weight)
        for view in self.kept or observe(self.network, [self.name]):
            found = view.layers[self.name]
            rows = found.map.apply(found.features, matrix.to(found.features.dtype))
            rows = found.product(rows) * view.weights(len(rows))[:, None, None]
            total += found.map.total(found.features, rows.to(found.features.dtype)).double()
            del view, found
        product: np.ndarray = (total / self.seen.divisor).flatten().cpu().numpy()
        return product
