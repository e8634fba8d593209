"""Sums over the curvature at layers, in the ways that it is known.

`relflat_sk._network.tail` chooses the way from what the network computed. Here each of them is a
class that sums the terms of quantities (see `terms`) exactly, or draws them at random:

==================  ========================================================================
`ByClosedForm`      from the formulas of the table of losses, over chunks of very many classes
`ByGradients`       from one backward pass for each column of a root of the curvature of the
                    loss in the network's output, shared by all layers and quantities
`ByProducts`        from Hessian-vector products, one for each direction
==================  ========================================================================
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import torch
from torch import Tensor

from relflat_sk._losses import ClosedForm
from relflat_sk._random import rademacher
from relflat_sk.measures._flatness.layer_pass import ClosedFormLayerPass, LayerPass
from relflat_sk.measures._flatness.terms import Quantity

__all__ = ["ByClosedForm", "ByGradients", "ByProducts", "Key", "LayerCurvature"]

Key = tuple[str, Hashable]  # layer, name of the quantity
# numbers in the products that are taken at a time, by whether on a GPU. Small ones cost their
# overhead: 16 of a layer's output of (16, 100) take a fifth of the time together, of (1024, 100)
# no less
_TOGETHER = {False: 2**17, True: 2**25}


class LayerCurvature:
    """The curvature at some layers, in one batch of n samples."""

    method = "exact"

    @property
    def layers(self) -> Mapping[str, LayerPass]:
        """The layers by name."""
        raise NotImplementedError

    def n_passes(self, layer: LayerPass, quantity: Quantity) -> float:
        """Return how many backward passes or products an exact sum takes."""
        raise NotImplementedError

    def sum_exactly(self, quantities: Mapping[Key, Quantity]) -> Iterator[tuple[Key, Tensor]]:
        """Compute the terms of several quantities. Shapes: returns terms (n, k)."""
        raise NotImplementedError

    def draw(
        self, quantities: Mapping[Key, Quantity], generator: torch.Generator
    ) -> dict[Key, Tensor]:
        """Estimate the terms of several quantities, without bias. Shapes: returns (n, k)."""
        return {
            key: quantity.draw(self.layers[key[0]], generator)
            for key, quantity in quantities.items()
        }


@dataclass(frozen=True)
class ByClosedForm(LayerCurvature):
    """The curvature at a layer for which the table of losses has a closed form."""

    layer: ClosedFormLayerPass
    method = "closed form"

    @property
    def layers(self) -> Mapping[str, LayerPass]:
        """The layer by its name."""
        return {self.layer.name: self.layer}

    def n_passes(self, layer: LayerPass, quantity: Quantity) -> float:
        """Return zero: neither backward passes nor products are needed."""
        return 0

    def sum_exactly(self, quantities: Mapping[Key, Quantity]) -> Iterator[tuple[Key, Tensor]]:
        """Yield the terms (n, k) of each quantity."""
        for key, quantity in quantities.items():
            yield key, quantity.closed_form(self.layer)


@dataclass(frozen=True)
class ByGradients(LayerCurvature):
    """The curvature at all layers behind which the network is piecewise linear.

    Shapes: `base` (n, o).
    """

    passes: Mapping[str, LayerPass]
    base: Tensor
    curvature: ClosedForm

    @property
    def layers(self) -> Mapping[str, LayerPass]:
        """The layers by name."""
        return self.passes

    @cached_property
    def root(self) -> Tensor:
        """A root of the curvature of the loss in `base`: (n, o, r), float64."""
        return self.curvature.root()

    def n_passes(self, layer: LayerPass, quantity: Quantity) -> float:
        """Return the number of backward passes, which all layers and quantities share."""
        return self.root.shape[2]

    def sum_exactly(self, quantities: Mapping[Key, Quantity]) -> Iterator[tuple[Key, Tensor]]:
        """Yield the terms (n, k) of each quantity, after all backward passes."""
        if not quantities:
            return
        terms: dict[Key, Tensor] = {}
        for cotangent in self.root.unbind(dim=2):
            for key, more in self._pull_terms(cotangent, quantities):
                terms[key] = terms[key] + more if key in terms else more
        yield from terms.items()

    def draw(
        self, quantities: Mapping[Key, Quantity], generator: torch.Generator
    ) -> dict[Key, Tensor]:
        """Return terms from one backward pass for all layers."""
        if not quantities:
            return {}
        # with random signs s, E (R s)(R s)^T = R R^T
        signs = rademacher((len(self.base), self.root.shape[2], 1), self.root, generator)
        return dict(self._pull_terms((self.root @ signs)[:, :, 0], quantities))

    def _pull_terms(
        self, cotangent: Tensor, quantities: Mapping[Key, Quantity]
    ) -> Iterator[tuple[Key, Tensor]]:
        """Yield the terms that belong to one vector (n, o) in the network's output."""
        names = list(dict.fromkeys(name for name, _ in quantities))
        pulled = self._pull(cotangent, [self.layers[name] for name in names])
        for key, quantity in quantities.items():
            yield key, quantity.gradient(self.layers[key[0]], pulled[key[0]])

    def _pull(self, cotangent: Tensor, layers: Sequence[LayerPass]) -> dict[str, Tensor]:
        """Pull vectors (n, o) in the network's output back to layers.

        That is to rows (n, d, 1) of a flat layer's output, and to the weight (n, d, m) of any
        other: all quantities there share the sum over positions, which dominates the cost.
        """
        found = torch.autograd.grad(
            self.base,
            [layer.offset for layer in layers],
            cotangent.to(self.base.dtype),
            retain_graph=True,
            allow_unused=True,
        )
        pulled = {}
        for layer, slope in zip(layers, found, strict=True):
            gradient = torch.zeros_like(layer.offset) if slope is None else slope
            rows = layer.map.to_rows(gradient)
            pulled[layer.name] = (
                rows if layer.is_flat else layer.map.transpose(layer.features, rows)
            )
        return pulled


@dataclass(frozen=True)
class ByProducts(LayerCurvature):
    """The curvature at layers for which only Hessian-vector products are known."""

    passes: Mapping[str, LayerPass]

    @property
    def layers(self) -> Mapping[str, LayerPass]:
        """The layers by name."""
        return self.passes

    def n_passes(self, layer: LayerPass, quantity: Quantity) -> float:
        """Return the number of products."""
        return quantity.n_products(layer)

    def sum_exactly(self, quantities: Mapping[Key, Quantity]) -> Iterator[tuple[Key, Tensor]]:
        """Yield the terms (n, k) of each quantity."""
        for key, quantity in quantities.items():
            yield key, _sum_products(self.layers[key[0]], quantity)


def _sum_products(layer: LayerPass, quantity: Quantity) -> Tensor:
    """Sum the forms of all directions of a quantity, some of them at a time."""
    total = torch.zeros((), dtype=torch.float64)
    together = max(1, _TOGETHER[layer.offset.is_cuda] // layer.offset.numel())
    directions, index = quantity.directions(layer), 0
    while some := list(islice(directions, together)):
        for forms in layer.forms(some):
            total = quantity.collect(index, forms, total)
            index += 1
    return total
