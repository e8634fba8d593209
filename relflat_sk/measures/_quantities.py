r"""Quantities that measures sum over samples, layer by layer.

With ``B_i = sum_c g_ic g_ic^T`` (see `relflat_sk._network.tail`) and ``G_ic = sum_p g_icp
phi_ip^T``, the gradient in the weight matrix that belongs to ``g_ic``, the Hessian of the loss in
the weight of the layer is ``H = mean_i sum_c vec(G_ic) vec(G_ic)^T``, so that for any ``F``,
``D``

.. math:: \sum_{k,t} (F_k D_{tt} e_t^\top)^\top H (F_k D_{tt} e_t^\top)
    = \mathrm{mean}_i \sum_c \|F^\top G_{ic} D\|_F^2 .

That is the trace of ``H`` for ``F = I`` and relative flatness for ``F F^T = W W^T``. A quantity
computes its terms in that sum from a closed form, from gradients, from all Hessian-vector products
it takes, or from random ones; `FeaturePairs` from the first two only.
"""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import torch
from torch import Tensor

from relflat_sk._losses import ClosedForm, Factor, Rows
from relflat_sk._numerics import inverse_spread
from relflat_sk._random import rademacher
from relflat_sk.measures._layer_pass import ClosedFormLayerPass, LayerPass


class Quantity:
    """A sum over samples of one or several numbers at one layer.

    Attributes
    ----------
    has_products : bool
        Whether Hessian-vector products give the terms, too: all that it takes, or random ones.
    """

    has_products = True

    def closed_form(self, layer: ClosedFormLayerPass) -> Tensor:
        """Compute each sample's terms from the layer's closed form.

        Parameters
        ----------
        layer : ClosedFormLayerPass
            The layer.

        Returns
        -------
        Tensor of shape (n, k)
            One row for each row of the features.
        """
        raise NotImplementedError

    def gradient(self, layer: LayerPass, pulled: Tensor) -> Tensor:
        """Compute each sample's terms that belong to one backward pass.

        Parameters
        ----------
        layer : LayerPass
            The layer.
        pulled : Tensor of shape (n, d, 1) or (n, d, m)
            Gradients ``g_ic`` in a flat layer's output, or ``G_ic`` in any other's weight.

        Returns
        -------
        Tensor of shape (n, k)
            To be summed over the passes.
        """
        raise NotImplementedError

    def sum_terms(self, layer: LayerPass, terms: Tensor, weights: Tensor) -> Tensor:
        """Sum terms over samples.

        Parameters
        ----------
        layer : LayerPass
            The layer.
        terms : Tensor of shape (n, k)
            Each sample's terms, in float64.
        weights : Tensor of shape (n,)
            Weight of each sample.

        Returns
        -------
        Tensor of shape (k,)
            One number or several.
        """
        return weights @ terms

    def n_products(self, layer: LayerPass) -> float:
        """Return the number of products that all terms take.

        Parameters
        ----------
        layer : LayerPass
            The layer.

        Returns
        -------
        float
            Infinity if `has_products` is False.
        """
        return math.inf

    def directions(self, layer: LayerPass) -> Iterator[Tensor]:
        """Yield changes of the layer's output, whose quadratic forms sum up to the terms.

        Parameters
        ----------
        layer : LayerPass
            The layer.

        Yields
        ------
        Tensor of shape (n, d, P)
            Rows.
        """
        raise NotImplementedError

    def collect(self, index: int, forms: Tensor, total: Tensor) -> Tensor:
        """Add the quadratic forms of one direction to the terms.

        Parameters
        ----------
        index : int
            Position of the direction.
        forms : Tensor of shape (n,)
            The forms.
        total : Tensor of shape () or (n, k)
            Terms of the directions before; zero for the first one.

        Returns
        -------
        Tensor of shape (n, k)
            Terms so far.
        """
        raise NotImplementedError

    def draw(self, layer: LayerPass, generator: torch.Generator) -> Tensor:
        """Estimate each sample's terms, without bias, from one random product.

        Parameters
        ----------
        layer : LayerPass
            The layer.
        generator : torch.Generator
            Draws the product's vectors.

        Returns
        -------
        Tensor of shape (n, k)
            Independent for each sample.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Trace(Quantity):
    """``sum_c |F^T G_c D|^2``; with F = I the trace of the Hessian.

    Shapes: `factor` (d, k), `inverse` (m,).
    """

    factor: Factor | Rows | None = None
    inverse: Tensor | None = None

    def closed_form(self, layer: ClosedFormLayerPass) -> Tensor:
        return (self._square_norms(layer) * layer.curvature.trace(self.factor))[:, None]

    def gradient(self, layer: LayerPass, pulled: Tensor) -> Tensor:
        if layer.is_flat:
            left = pulled[:, :, 0].double()
            left = left if self.factor is None else left @ self._columns(layer)
            return (self._square_norms(layer) * left.square().sum(dim=1))[:, None]
        if self.inverse is not None:
            pulled = pulled * self.inverse.to(pulled.dtype)
        if self.factor is not None:
            pulled = self._columns(layer).T.to(pulled.dtype) @ pulled
        return pulled.double().square().sum(dim=(1, 2))[:, None]

    def n_products(self, layer: LayerPass) -> float:
        k = len(layer.weight) if self.factor is None else self.factor.shape[1]
        return k if layer.is_flat else k * layer.weight.shape[1]

    def directions(self, layer: LayerPass) -> Iterator[Tensor]:
        columns, scale = self._columns(layer), self._scale(layer)
        n = len(layer.features)
        for column in columns.T:
            if layer.is_flat:
                norms = self._square_norms(layer).sqrt()
                yield column.expand(n, -1)[:, :, None] * norms[:, None, None]
                continue
            for t in range(scale.shape[1]):
                matrix = torch.zeros_like(layer.weight)
                matrix[:, t] = column * scale[:, t]
                yield layer.map.apply(layer.features, matrix.to(layer.features.dtype))

    def collect(self, index: int, forms: Tensor, total: Tensor) -> Tensor:
        return total + forms[:, None]

    def draw(self, layer: LayerPass, generator: torch.Generator) -> Tensor:
        columns, n = self._columns(layer), len(layer.features)
        k, m = columns.shape[1], layer.weight.shape[1]
        if layer.is_flat:
            rows = (rademacher((n, k), columns, generator) @ columns.T)[:, :, None]
            rows = rows * self._square_norms(layer).sqrt()[:, None, None]
        else:
            signs = rademacher((n, k, m), columns, generator)
            matrices = (columns @ signs) * self._scale(layer)
            rows = layer.map.apply(layer.features, matrices.to(layer.features.dtype))
        return layer.forms([rows])[0][:, None]

    def _columns(self, layer: LayerPass) -> Tensor:
        """Return ``F``."""
        if self.factor is None:
            weight = layer.weight
            return torch.eye(len(weight), dtype=weight.dtype, device=weight.device)
        return self.factor.matrix()

    def _scale(self, layer: LayerPass) -> Tensor:
        """Return ``D`` for each row: (d, m)."""
        ones = torch.ones_like(layer.weight)
        return ones if self.inverse is None else ones * self.inverse

    def _square_norms(self, layer: LayerPass) -> Tensor:
        """Return ``|D phi_i|^2`` of a flat layer: (n,)."""
        if self.inverse is None:
            norm: Tensor = torch.linalg.vector_norm(layer.features, dim=1, dtype=torch.float64)
            return norm.square()
        return (layer.features.double() * self.inverse).square().sum(dim=1)


@dataclass(frozen=True)
class Neurons(Quantity):
    """``rho(j) = (W e_j e_j^T)^T H (W e_j e_j^T)`` of each input neuron j, or their sum."""

    total: bool

    def closed_form(self, layer: ClosedFormLayerPass) -> Tensor:
        return self._finish(layer.curvature(layer.weight) * layer.features.double().square())

    def gradient(self, layer: LayerPass, pulled: Tensor) -> Tensor:
        weight = layer.weight.to(pulled.dtype)
        if layer.is_flat:
            along = (pulled[:, :, 0] @ weight) * layer.features
        else:
            along = (pulled * weight).sum(dim=1)
        return self._finish(along.double().square())

    def n_products(self, layer: LayerPass) -> float:
        return layer.weight.shape[1]

    def directions(self, layer: LayerPass) -> Iterator[Tensor]:
        for j in range(layer.weight.shape[1]):
            matrix = torch.zeros_like(layer.weight)
            matrix[:, j] = layer.weight[:, j]
            yield layer.map.apply(layer.features, matrix.to(layer.features.dtype))

    def collect(self, index: int, forms: Tensor, total: Tensor) -> Tensor:
        if self.total:
            return total + forms[:, None]
        return torch.cat([total, forms[:, None]], dim=1) if index else forms[:, None]

    def draw(self, layer: LayerPass, generator: torch.Generator) -> Tensor:
        n, m = len(layer.features), layer.weight.shape[1]
        signed = layer.weight * rademacher((n, m), layer.weight, generator)[:, None]
        rows = layer.map.apply(layer.features, signed.to(layer.features.dtype))
        back = layer.map.transpose(layer.features, layer.product(rows))
        return self._finish((back.double() * signed).sum(dim=1))

    def _finish(self, terms: Tensor) -> Tensor:
        """Sum terms (n, m) over the neurons, if that is asked for."""
        return terms.sum(dim=1, keepdim=True) if self.total else terms


@dataclass(frozen=True)
class FeaturePairs(Quantity):
    """``M_tj = mean_i phi_it^2 (w_j^T B_i w_j)``, with ``w_j`` the columns of ``W``: (m, m).

    From ``M`` and the features' standard deviations ``s`` the normalised flatness follows as
    ``sum_tj (s_j / s_t)^2 M_tj``, so that one pass over the data gives both. Only for flat
    layers, from closed forms or gradients.
    """

    has_products = False

    def closed_form(self, layer: ClosedFormLayerPass) -> Tensor:
        return layer.curvature(layer.weight)

    def gradient(self, layer: LayerPass, pulled: Tensor) -> Tensor:
        return (pulled[:, :, 0].double() @ layer.weight).square()

    def sum_terms(self, layer: LayerPass, terms: Tensor, weights: Tensor) -> Tensor:
        squares = layer.features.double().square() * weights[:, None]
        return (squares.T @ terms).flatten()

    @staticmethod
    def normalize(pairs: Tensor, spread: Tensor) -> Tensor:
        """Compute the normalised flatness.

        Shapes: `pairs` (m * m,), `spread` (m,); returns (1,).
        """
        ratios = inverse_spread(spread).square()[:, None] * spread.square()
        return (ratios.flatten() * pairs).sum()[None]


# Sums over the curvature at layers, in the ways that it is known.
#
# `relflat_sk._network.tail` chooses the way from what the network computed. Here each of them is a
# class that sums the terms of quantities (see `terms`) exactly, or draws them at random:
#
# ==================  ========================================================================
# `ByClosedForm`      from the formulas of the table of losses, over chunks of very many classes
# `ByGradients`       from one backward pass for each column of a root of the curvature of the
#                     loss in the network's output, shared by all layers and quantities
# `ByProducts`        from Hessian-vector products, one for each direction
# ==================  ========================================================================

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
