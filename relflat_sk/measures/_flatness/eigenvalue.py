"""Largest eigenvalue of the Hessian in one layer's weight, by Lanczos on streamed products.

A product with the Hessian is a pass over the data: with the notation of
`relflat_sk._network.layer_maps`, ``H V = mean_i sum_p (B_i (V phi_i))_p phi_ip^T``.
"""

from dataclasses import dataclass

import numpy as np
import torch
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh
from torch import Tensor

from relflat_sk._network import Network
from relflat_sk._random import RandomState, seed_from
from relflat_sk._warnings import warn
from relflat_sk.measures._flatness.forward_pass import ForwardPass
from relflat_sk.measures._flatness.layer_pass import LayerPass
from relflat_sk.measures._flatness.scan import scan
from relflat_sk.measures._flatness.summary import Summary

__all__ = ["Eigenvalue", "StreamedHessians"]

# numbers of features and closed forms that are stored, to spare further passes
_MOST_STORED = 2**26
# below this size all of the matrix is cheaper than Lanczos' basis
_SMALL = 24


@dataclass
class Eigenvalue:
    """The largest eigenvalue of the Hessian of the mean loss in a layer's weight."""

    value: float
    error: float  # residual norm, which bounds the distance to an eigenvalue
    weight: Tensor  # (d, m)
    layer: str


class StreamedHessians:
    """Hessians in the weights of layers, each known through its products with vectors.

    A product takes a pass over the data, unless the layer has a closed form and few enough
    samples for it to be stored.

    Parameters
    ----------
    network : Network
        The network, with its loss and data.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self._stored: dict[str, list[tuple[LayerPass, Tensor]] | None] = {}
        self._n_stored = 0.0

    def add(self, forward: ForwardPass) -> None:
        """Store the closed forms of a batch, while there is room.

        Parameters
        ----------
        forward : ForwardPass
            The forward pass on the batch.
        """
        for name, layer in forward.layers.items():
            stored = self._stored.setdefault(name, [])
            if stored is None:
                continue
            if self._n_stored + layer.n_stored > _MOST_STORED:
                self._stored[name] = None
            else:
                self._n_stored += layer.n_stored
                stored.append((layer, forward.row_weights(layer)))

    def product(self, layer: str, matrix: Tensor) -> Tensor:
        """Multiply the Hessian of the summed loss with a matrix.

        Parameters
        ----------
        layer : str
            The layer's name.
        matrix : Tensor of shape (d, m)
            A change of the layer's weight.

        Returns
        -------
        Tensor of shape (d, m)
            In float64.
        """
        total = torch.zeros_like(matrix)
        stored = self._stored[layer]
        if stored is not None:
            for known, weights in stored:
                total += known.weight_product(matrix, weights)
            return total

        def add(forward: ForwardPass) -> None:
            found = forward.layers[layer]
            total.add_(found.weight_product(matrix, forward.row_weights(found)))

        scan(self.network, [layer], add)
        return total

    def largest(
        self,
        layer: str,
        summary: Summary,
        *,
        rtol: float = 0.01,
        random_state: RandomState = None,
        max_products: int = 1000,
    ) -> Eigenvalue:
        """Find the largest (algebraic) eigenvalue by Lanczos' iteration.

        To be used within `borrowed`.

        Parameters
        ----------
        layer : str
            The layer's name.
        summary : Summary
            Totals of the pass whose batches were added.
        rtol : float, default=0.01
            Relative tolerance of the stopping rule.
        random_state : int, RandomState or None, default=None
            For the vector that the iteration starts from.
        max_products : int, default=1000
            Most products with the Hessian.

        Returns
        -------
        Eigenvalue
            The best estimate if the iteration does not converge, nan if there is none.

        Warns
        -----
        FlatnessWarning
            If the iteration does not converge.
        """
        weight = summary.layer_weights[layer]
        size = weight.numel()

        def product(vector: np.ndarray) -> np.ndarray:
            matrix = torch.from_numpy(np.asarray(vector)).to(weight).reshape(weight.shape)
            found = self.product(layer, matrix) / summary.divisor
            flat: np.ndarray = found.flatten().cpu().numpy()
            return flat

        if size <= _SMALL:
            dense = np.stack([product(row) for row in np.eye(size)])
            value = float(np.linalg.eigvalsh((dense + dense.T) / 2)[-1])
            return Eigenvalue(value, 0.0, weight, layer)
        operator = LinearOperator((size, size), matvec=product, dtype=np.float64)
        rng = np.random.default_rng(seed_from(random_state))
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
            warn(
                f"the largest eigenvalue at layer {layer!r} did not converge to a relative "
                f"tolerance of {rtol:g} in {max_products} products with the Hessian."
            )
        if len(values) == 0:
            return Eigenvalue(np.nan, np.nan, weight, layer)
        value, vector = float(values[-1]), vectors[:, -1]
        residual = product(vector) - value * vector
        return Eigenvalue(value, float(np.linalg.norm(residual)), weight, layer)
