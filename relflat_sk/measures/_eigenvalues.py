"""The largest eigenvalue of a symmetric matrix that is known by its products."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh
from torch import Tensor

from relflat_sk._checks import warn
from relflat_sk._network.network import Network
from relflat_sk._numerics import column_squares
from relflat_sk._random import RandomState, seed_from
from relflat_sk.measures._quantities import LayerPass
from relflat_sk.measures._scan import (
    ForwardPass,
    Measured,
    Passes,
    Results,
    Summary,
    scan_again,
)

Vector = NDArray[np.float64]

# up to this number of rows, the whole matrix costs less than the iteration
_SMALL = 24
# Vectors that the iteration holds. A loss has few large curvatures, so that five vectors find the
# largest one to the tolerance with a third of the products of ARPACK's usual twenty.
_N_VECTORS = 5
# The share of the tolerance that the residual may have. With all of it, the iteration took the
# second eigenvalue for the largest in 34 of 3,000 random symmetric matrices; with a tenth, in none,
# and where few curvatures are large, it takes a product or two more.
_RESIDUAL = 0.1
# largest number of products in an iteration
_MAX_PRODUCTS = 1000


def largest_eigenvalue(
    product: Callable[[Tensor], Tensor],
    size: int,
    *,
    rtol: float,
    random_state: RandomState,
    where: str,
) -> tuple[float, float]:
    """Find the largest (algebraic) eigenvalue, and the residual's norm, by products on the CPU."""

    def multiply(vector: Vector) -> Vector:
        image: Vector = product(torch.from_numpy(vector)).double().cpu().numpy()
        return image

    start = np.random.default_rng(seed_from(random_state)).standard_normal(size)
    image = multiply(start)
    if not np.isfinite(image).all():
        return np.nan, np.nan
    if not image.any():  # the matrix of a dead layer is zero, on which the iteration fails
        return 0.0, 0.0
    if size <= _SMALL:
        dense = np.stack([multiply(row) for row in np.eye(size)])
        return float(np.linalg.eigvalsh((dense + dense.T) / 2)[-1]), 0.0
    operator = LinearOperator(
        (size, size), matvec=lambda vector: multiply(vector.reshape(-1)), dtype=np.float64
    )
    try:
        values, vectors = eigsh(
            operator,
            k=1,
            which="LA",
            v0=start,
            ncv=_N_VECTORS,
            tol=_RESIDUAL * rtol,
            maxiter=_MAX_PRODUCTS // _N_VECTORS,
        )
    except ArpackNoConvergence as error:
        warn(
            f"the largest eigenvalue {where} did not converge to a relative tolerance of "
            f"{rtol:g} in {_MAX_PRODUCTS} products with the Hessian."
        )
        values, vectors = error.eigenvalues, error.eigenvectors
        if len(values) == 0:
            return np.nan, np.nan
    value, vector = float(values[-1]), vectors[:, -1]
    return value, float(np.linalg.norm(multiply(vector) - value * vector))


# The largest eigenvalue of the Hessian in a layer's weight, and the measures made of it.
#
# The eigenvalue is found by Lanczos' iteration. A product with the Hessian is a pass over the data:
# with the notation of `relflat_sk._network.layers`,
# ``H V = mean_i sum_p (B_i (V phi_i))_p phi_ip^T``.


# the measures, and the changes of the weights under which they are invariant
EIGENVALUE_LIKE: dict[str, tuple[str, ...]] = {
    "hessian_max_eigenvalue": (),
    "eigenvalue_flatness": ("layer",),
}
# numbers of features and closed forms that are stored, to spare further passes
_MOST_STORED = 2**26


@dataclass
class EigenvalueMeasures:
    """The measures of `EIGENVALUE_LIKE`, by Lanczos' iteration at one layer after the other.

    A product with the Hessian takes a pass over the data, unless the layer has a closed form that
    is small enough to be stored for all samples.
    """

    network: Network
    rtol: float
    random_state: RandomState
    weight_decay: float
    _stored: dict[str, list[tuple[LayerPass, Tensor]] | None] = field(default_factory=dict)
    _n_stored: float = 0.0

    def add(self, forward: ForwardPass) -> None:
        """Store the closed forms of a batch, while there is room."""
        for name, layer in forward.layers.items():
            stored = self._stored.setdefault(name, [])
            if stored is None:
                continue
            if self._n_stored + layer.n_stored > _MOST_STORED:
                self._stored[name] = None
            else:
                self._n_stored += layer.n_stored
                stored.append((layer, forward.row_weights(layer)))

    def finish(self, summary: Summary) -> Results:
        """Compute the measures at all layers whose batches were added, within `borrowed`."""
        results, passes = {}, Passes(summary)
        for layer, weight in summary.layer_weights.items():
            largest, error = self._largest(layer, summary)
            square = float(column_squares(weight).sum())
            for name, factor in zip(EIGENVALUE_LIKE, (1.0, square), strict=True):
                value, stderr = factor * (largest + self.weight_decay), factor * error
                results[layer, name] = Measured(value, stderr, "lanczos", passes=passes)
        return results

    def _largest(self, layer: str, summary: Summary) -> tuple[float, float]:
        """Return the largest (algebraic) eigenvalue at a layer, and the error, which may be nan."""
        weight, stored = summary.layer_weights[layer], self._stored[layer]

        def product(vector: Tensor) -> Tensor:
            matrix = vector.to(weight.device).reshape(weight.shape)
            total = torch.zeros_like(matrix)
            for known, weights in stored or ():
                total += known.weight_product(matrix, weights)
            if stored is None:

                def add(forward: ForwardPass) -> None:
                    found = forward.layers[layer]
                    total.add_(found.weight_product(matrix, forward.row_weights(found)))

                scan_again(self.network, [layer], add)
            return (total / summary.divisor).flatten()

        return largest_eigenvalue(
            product,
            weight.numel(),
            rtol=self.rtol,
            random_state=self.random_state,
            where=f"at layer {layer!r}",
        )
