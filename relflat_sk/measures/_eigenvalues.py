"""The largest eigenvalue of a symmetric matrix that is known by its products."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
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

# Up to this number of rows, the iteration goes on to the whole space, and is exact.
_SMALL = 24
# Vectors that the iteration holds at most, and with how many of them it goes on then. With more,
# it takes hardly fewer products.
_N_VECTORS, _N_KEPT = 8, 4
# The share of the tolerance that the residual may have. With all of it, the iteration took the
# second eigenvalue for the largest in 50 of 3,000 random symmetric matrices; with a tenth, in two,
# and where few curvatures are large, it takes a product or two more.
_RESIDUAL = 0.1
# what rounding leaves of a residual, as a share of the largest number in size
_ROUNDING = 1e-14
# Numbers of products in an iteration. With fewer than six, the second eigenvalue was taken for the
# largest in 17 of 1,500 matrices of which the two were close and all others small.
_FEWEST_PRODUCTS, _MAX_PRODUCTS = 6, 1000


def largest_eigenvalue(
    product: Callable[[Tensor], Tensor],
    size: int,
    *,
    rtol: float,
    random_state: RandomState,
    where: str,
) -> tuple[float, float]:
    """Find the largest (algebraic) eigenvalue, and the residual's norm, by products on the CPU.

    It is Lanczos' iteration with thick restarts [1]_. The residual is known after each product.

    .. [1] Wu and Simon, "Thick-Restart Lanczos Method for Large Symmetric Eigenvalue Problems",
       SIAM Journal on Matrix Analysis and Applications 22, 2000.
    """
    most = size if size <= _SMALL else _N_VECTORS
    start = np.random.default_rng(seed_from(random_state)).standard_normal(size)
    basis = np.empty((most + 1, size))
    basis[0] = start / np.linalg.norm(start)
    projected = np.zeros((most, most))  # the matrix in the basis, of which eigh reads half
    k = 0
    for n_products in range(1, _MAX_PRODUCTS + 1):
        rest = product(torch.from_numpy(basis[k])).double().cpu().numpy()
        if not np.isfinite(rest).all():
            return np.nan, np.nan
        k += 1
        for _ in range(2):  # rounding leaves something the first time
            along = basis[:k] @ rest
            rest = rest - along @ basis[:k]
            projected[k - 1, :k] += along
        norm = np.linalg.norm(rest)
        values, vectors = np.linalg.eigh(projected[:k, :k])
        value, error = float(values[-1]), float(norm * abs(vectors[-1, -1]))
        goes_on = most == size or n_products < _FEWEST_PRODUCTS
        tolerance = 0.0 if goes_on else _RESIDUAL * rtol * abs(value)
        if error <= max(tolerance, _ROUNDING * abs(values).max()):
            return value, error
        if k == most:
            k = _N_KEPT
            basis[:k] = vectors[:, -k:].T @ basis[:most]
            projected = np.zeros((most, most))
            projected[range(k), range(k)] = values[-k:]
        basis[k] = rest / norm
    warn(f"the largest eigenvalue {where} did not converge to a relative tolerance of {rtol:g}.")
    return value, error


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
    is small enough to be stored for all samples, or the data are one batch, whose graph is kept.
    """

    network: Network
    rtol: float
    random_state: RandomState
    weight_decay: float
    _stored: dict[str, list[tuple[LayerPass, Tensor]] | None] = field(default_factory=dict)
    _n_stored: float = 0.0
    _n_batches: int = 0

    def add(self, forward: ForwardPass) -> None:
        """Store the closed forms of a batch, while there is room."""
        self._n_batches += 1
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
        open_layers = [layer for layer, stored in self._stored.items() if stored is None]
        if open_layers and self._n_batches == 1:
            scan_again(self.network, open_layers, self._keep)
        for layer, weight in summary.layer_weights.items():
            largest, error = self._largest(layer, summary)
            square = float(column_squares(weight).sum())
            for name, factor in zip(EIGENVALUE_LIKE, (1.0, square), strict=True):
                value, stderr = factor * (largest + self.weight_decay), factor * error
                results[layer, name] = Measured(value, stderr, "lanczos", passes=passes)
        return results

    def _keep(self, forward: ForwardPass) -> None:
        """Store the layers of the only batch with their graph."""
        for name, layer in forward.layers.items():
            self._stored[name] = [(layer, forward.row_weights(layer))]

    def _largest(self, layer: str, summary: Summary) -> tuple[float, float]:
        """Return the largest (algebraic) eigenvalue at a layer, and the error, which may be nan."""
        weight, stored = summary.layer_weights[layer], self._stored.pop(layer)

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
