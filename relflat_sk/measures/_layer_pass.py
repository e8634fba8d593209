"""One layer in the network's forward pass on one batch, and the Hessian of the loss there.

Arrays are laid out as in `relflat_sk._network.layer_maps`: *rows* are of shape (n, d, P), with P
positions of each sample.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from relflat_sk._losses import ClosedForm, Curvature, Factor, Rows, product_curvature
from relflat_sk._network import LayerMap


@dataclass(frozen=True)
class LayerPass:
    """One layer in the forward pass on a batch of n samples. Shapes: `losses` (n,)."""

    name: str
    map: LayerMap
    features: Tensor
    offset: Tensor
    losses: Tensor

    @cached_property
    def weight(self) -> Tensor:
        """The weight as a matrix of shape (d, m), in float64."""
        return self.map.weight.double()

    def left_factor(self, spread: Tensor | None = None) -> Factor | Rows:
        """Return a matrix F with few columns and ``F F^T = W diag(spread)^2 W^T``.

        Shapes: `spread` (m,); returns (d, min(d, m).
        """
        weight = self.weight if spread is None else self.weight * spread
        d, m = weight.shape
        if d >= m:
            return Factor(weight)
        return Factor(torch.linalg.qr(weight.T, mode="r").R.T)  # W = R^T Q^T

    @cached_property
    def summed_loss(self) -> Tensor:
        """The loss, summed over the batch."""
        return self.losses.sum()

    @property
    def is_flat(self) -> bool:
        """Whether each sample has one position, and features of shape (n, m)."""
        return self.map.is_flat(self.features)

    @property
    def n_stored(self) -> float:
        """How many numbers products need without the network; infinity if they need it."""
        return math.inf

    def loss_gradient(self) -> Tensor:
        """Compute the gradient of each sample's loss in the layer's output.

        Shapes: returns (n, d, P).
        """
        found = torch.zeros_like(self.offset)
        if self.summed_loss.requires_grad:
            (found,) = torch.autograd.grad(
                self.summed_loss, self.offset, retain_graph=True, materialize_grads=True
            )
        if self.is_flat:  # also where tokens count as samples
            return found.reshape(len(self.features), -1, 1)
        return self.map.to_rows(found)

    def apply(self, matrix: Tensor) -> Tensor:
        """Apply a change of the weight to the features, for all samples or for each.

        Shapes: `matrix` (d, m) or (n, d, m); returns (n, d, P).
        """
        return self.map.apply(self.features, matrix.to(self.features.dtype))

    def product(self, rows: Tensor) -> Tensor:
        """Compute products with the Hessians of the samples' losses in the layer's output.

        Shapes: `rows` (n, d, P); returns (n, d, P).
        """
        return self.map.to_rows(self._products.product(self._like_output(rows)))

    def forms(self, directions: Sequence[Tensor]) -> list[Tensor]:
        """Compute quadratic forms of those Hessians, of several vectors in one go if possible.

        Shapes: `directions` (n, d, P); returns (n,).
        """
        products = self._product_together(directions) if len(directions) > 1 else None
        if products is None:
            products = [self.product(rows) for rows in directions]
        pairs = zip(products, directions, strict=True)
        return [(product.double() * rows).sum(dim=(1, 2)) for product, rows in pairs]

    def _product_together(self, directions: Sequence[Tensor]) -> list[Tensor] | None:
        vectors = torch.stack([self._like_output(rows) for rows in directions])
        try:
            return [self.map.to_rows(product) for product in self._products.product(vectors)]
        except (RuntimeError, ValueError):
            return None  # a user's own autograd function need not allow torch.func.vmap

    def weight_product(self, matrix: Tensor, weights: Tensor) -> Tensor:
        """Multiply the Hessian of the batch's loss in the layer's weight with a matrix.

        Shapes: `matrix` (d, m), `weights` (n,); returns (d, m).
        """
        return self.total(self.product(self.apply(matrix)), weights)

    def total(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Sum outer products of rows with the features, over samples and positions.

        Shapes: `rows` (n, d, P), `weights` (n,); returns (d, m).
        """
        rows = (rows * weights[:, None, None]).to(self.features.dtype)
        return self.map.total(self.features, rows).double()

    @cached_property
    def _products(self) -> Curvature:
        """The curvature in the layer's output, by differentiating twice."""
        return product_curvature(self.summed_loss, self.offset)

    def _like_output(self, rows: Tensor) -> Tensor:
        """Bring rows into shape and precision of the layer's output."""
        return self.map.from_rows(rows.to(self.offset.dtype), self.offset)


@dataclass(frozen=True)
class ClosedFormLayerPass(LayerPass):
    """One layer in the forward pass on a batch, with its curvature in closed form.

    Shapes: `features` (n, m), `losses` (n,).
    """

    curvature: ClosedForm

    @property
    def n_stored(self) -> float:
        return self.features.numel() + 2 * self.offset.numel()

    def product(self, rows: Tensor) -> Tensor:
        return self.curvature.product(rows[:, :, 0])[:, :, None]

    def _product_together(self, directions: Sequence[Tensor]) -> None:
        return None


@dataclass(frozen=True)
class ManyClassesLayerPass(ClosedFormLayerPass):
    """One layer with very many outputs, whose weight is read in chunks and never copied.

    Shapes: `features` (n, m), `losses` (n,).
    """

    @cached_property
    def weight(self) -> Tensor:
        """The weight as a matrix of shape (d, m), of its own floating type."""
        return self.map.weight

    def left_factor(self, spread: Tensor | None = None) -> Rows:
        """Return the weight times the spread, without a copy: (d, m)."""
        return Rows.of(self.weight, spread)
