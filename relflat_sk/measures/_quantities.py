r"""Quantities that measures sum over samples, and their terms from what is known of a curvature.

With ``B_i = sum_c g_ic g_ic^T`` (see `relflat_sk._network.tail`) and ``G_ic = sum_p g_icp
phi_ip^T``, the gradient in the weight matrix that belongs to ``g_ic``, the Hessian of the loss in
the weight of the layer is ``H = mean_i sum_c vec(G_ic) vec(G_ic)^T``, so that for any ``F``,
``D``

.. math:: \sum_{k,t} (F_k D_{tt} e_t^\top)^\top H (F_k D_{tt} e_t^\top)
    = \mathrm{mean}_i \sum_c \|F^\top G_{ic} D\|_F^2 .

That is the trace of ``H`` for ``F = I`` and relative flatness for ``F F^T = W W^T``.
`relflat_sk._network.tail` chooses from what the network computed how a quantity gets its terms in
that sum: from the closed form of the table of losses, from gradients, or from Hessian-vector
products, all that it takes or random ones.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from relflat_sk._losses.curvature import ClosedForm, Factor, ProductCurvature
from relflat_sk._losses.many_classes import ManyClasses
from relflat_sk._network.layers import LayerMap
from relflat_sk._numerics import full_precision
from relflat_sk._random import rademacher

# numbers in the gradients of samples in a weight that are held at a time
_PULLED = 2**24

# -- one layer in the forward pass on a batch -----------------------------------------------------
# arrays are laid out as in `relflat_sk._network.layers`: *rows* are of shape (n, d, P), with P
# positions of each sample


@dataclass(frozen=True)
class Gradients:
    """The curvature at all layers behind which the network is piecewise linear.

    One backward pass for each column of a root of the curvature in `base` serves all layers.
    """

    base: Tensor  # (n, o)
    curvature: ClosedForm

    @cached_property
    def root(self) -> Tensor:
        """A root of the curvature of the loss in `base`: (n, o, r), float64."""
        return self.curvature.root()


@dataclass(frozen=True)
class LayerPass:
    """One layer in the forward pass on a batch of n samples.

    Its curvature is known by a closed form, or by gradients, or else by products only.
    """

    name: str
    map: LayerMap
    features: Tensor
    offset: Tensor
    losses: Tensor  # (n,)
    curvature: ClosedForm | None = None
    gradients: Gradients | None = None

    @cached_property
    def weight(self) -> Tensor:
        """The weight as a matrix (d, m) in float64; that of very many classes without a copy."""
        weight = self.map.weight
        return weight if isinstance(self.curvature, ManyClasses) else weight.double()

    def left_factor(self, spread: Tensor | None = None) -> Factor:
        """Return a matrix F with few columns and ``F F^T = W diag(spread)^2 W^T``."""
        if isinstance(self.curvature, ManyClasses):
            return Factor(self.weight, spread)
        weight = self.weight if spread is None else self.weight * spread
        d, m = weight.shape
        if d >= m:
            return Factor(weight)
        return Factor(torch.linalg.qr(weight.T, mode="r").R.T)  # W = R^T Q^T

    def feature_factor(self, scale: Tensor | None = None) -> Factor:
        """Return a factor of the weight in all features, of which each group reads its own."""
        groups = self.map.groups
        if groups == 1:
            return self.left_factor(scale)
        weight = self.weight if scale is None else self.weight * scale
        group = torch.arange(groups, device=weight.device).repeat_interleave(len(weight) // groups)
        own = group[:, None, None] == torch.arange(groups, device=weight.device)[:, None]
        return Factor((weight[:, None] * own).flatten(1))

    @cached_property
    def summed_loss(self) -> Tensor:
        """The loss, summed over the batch."""
        return self.losses.sum()

    @property
    def is_flat(self) -> bool:
        """Whether each sample has one position, and features of shape (n, m)."""
        return self.features.ndim == 2

    @cached_property
    def n_positions(self) -> int:
        """How many positions each sample has."""
        return 1 if self.is_flat else self.map.to_rows(self.offset.detach()).shape[2]

    @property
    def n_stored(self) -> float:
        """How many numbers products need without the network; infinity if they need it."""
        if self.curvature is None:
            return math.inf
        return self.features.numel() + 2 * self.offset.numel()

    def loss_gradient(self) -> Tensor:
        """Compute the gradient of each sample's loss in the layer's output."""
        slope = torch.zeros_like(self.offset)
        if self.summed_loss.requires_grad:
            (slope,) = torch.autograd.grad(
                self.summed_loss, self.offset, retain_graph=True, materialize_grads=True
            )
        slope = full_precision(slope)
        if self.is_flat:  # also where tokens or pixels count as samples
            slope = slope if self.map.channels_last else slope.movedim(1, -1)
            return slope.reshape(len(self.features), -1, 1)
        return self.map.to_rows(slope)

    def apply(self, matrix: Tensor) -> Tensor:
        """Apply a change of the weight to the features, for all samples or for each."""
        return self.map.apply(self.features, matrix.to(self.features.dtype))

    def product(self, rows: Tensor) -> Tensor:
        """Compute products with the Hessians of the samples' losses in the layer's output."""
        if self.curvature is not None:
            return self.curvature.product(rows[:, :, 0])[:, :, None]
        vectors = self.map.from_rows(rows.to(self.offset.dtype), self.offset)
        return self.map.to_rows(self._products.product(vectors))

    def form(self, rows: Tensor) -> Tensor:
        """Compute the quadratic form of those Hessians for each sample's row (n, d, P): (n, 1)."""
        return (self.product(rows).double() * rows).sum(dim=(1, 2))[:, None]

    def weight_product(self, matrix: Tensor, weights: Tensor) -> Tensor:
        """Multiply the Hessian of the batch's loss in the layer's weight with a matrix."""
        return self.total(self.product(self.apply(matrix)), weights)

    def total(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Sum outer products of rows with the features, over samples and positions."""
        rows = (rows * weights[:, None, None]).to(self.features.dtype)
        return self.map.total(self.features, rows).double()

    def pull(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield features of some samples, and what rows become in the weight: (n', d, m)."""
        size = max(1, _PULLED // self.weight.numel())
        for some, features in zip(
            torch.split(rows, size), torch.split(self.features, size), strict=True
        ):
            yield features, self.map.transpose(features, some)

    @cached_property
    def _products(self) -> ProductCurvature:
        """The curvature in the layer's output, by differentiating twice."""
        return ProductCurvature(self.summed_loss, self.offset)


# -- what is summed over the samples --------------------------------------------------------------


class Quantity(ABC):
    """A sum over samples of k numbers at one layer, with terms for each row of the features."""

    @abstractmethod
    def exact(self, layer: LayerPass) -> Tensor:
        """Compute the terms from the closed form of a curvature, or from products: (n, k)."""

    @abstractmethod
    def draw(self, layer: LayerPass, generator: torch.Generator) -> Tensor:
        """Estimate the terms without bias from one random product, independently: (n, k)."""

    @abstractmethod
    def gradient(self, layer: LayerPass, pulled: Tensor) -> Tensor:
        """Compute the terms of one backward pass, to be summed over the passes.

        `pulled` are gradients ``g_ic`` in the layer's output if the quantity `takes_rows`, else
        ``G_ic`` in its weight: (n, d, P) or (n, d, m), to (n, k).
        """

    def takes_rows(self, layer: LayerPass) -> bool:
        """Return whether `gradient` takes gradients in the layer's output; always if it is flat."""
        return layer.is_flat

    def n_passes(self, layer: LayerPass) -> float:
        """Return how many backward passes or products an exact sum takes."""
        if layer.curvature is not None:
            return 0
        if layer.gradients is not None:
            return layer.gradients.root.shape[2]
        return self.n_products(layer)

    @abstractmethod
    def n_products(self, layer: LayerPass) -> float:
        """Return how many products `exact` takes without a closed form."""


# directions of each sample that deflate a trace, and the products that this takes
N_DIRECTIONS = 8
DEFLATION = 2 * N_DIRECTIONS
_KEPT = 2**26  # numbers that it may keep for a batch


@dataclass(frozen=True)
class Deflation:
    """Directions of each sample in which a trace is known, as changes of the layer's output."""

    known: Tensor  # (n, 1)
    basis: Tensor  # (n, r, d * P)
    dual: Tensor  # (n, r, d * P)

    def rest(self, rows: Tensor) -> Tensor:
        """Leave the directions out of rows."""
        along = self.dual @ rows.flatten(1)[:, :, None].to(self.dual.dtype)
        return rows - (self.basis.mT @ along).reshape(rows.shape)


@dataclass(frozen=True)
class Trace(Quantity):
    """``sum_c |F^T G_c D|^2``; with F = I the trace of the Hessian."""

    factor: Factor | None = None  # F, (d, k)
    inverse: Tensor | None = None  # the diagonal of D, (m,)
    deflation: Deflation | None = field(default=None, kw_only=True)

    def exact(self, layer: LayerPass) -> Tensor:
        if layer.curvature is not None:
            return (self._square_norms(layer) * layer.curvature.trace(self.factor))[:, None]
        terms: Tensor = sum(map(layer.form, self._directions(layer)))  # type: ignore[assignment]
        return terms

    def draw(self, layer: LayerPass, generator: torch.Generator) -> Tensor:
        rows = self._random_rows(layer, generator)
        if self.deflation is None:
            return layer.form(rows)
        return self.deflation.known + layer.form(self.deflation.rest(rows))

    def gradient(self, layer: LayerPass, pulled: Tensor) -> Tensor:
        if self.takes_rows(layer):  # |F^T sum_p g_p phi_p^T|^2, from products between positions
            left = pulled.double().mT
            left = left if self.factor is None else left @ self.factor.matrix()
            return ((left @ left.mT) * self._between_positions(layer)).sum(dim=(1, 2))[:, None]
        pulled = self._mix(pulled)
        if self.factor is not None:
            pulled = self.factor.matrix().T.to(pulled.dtype) @ pulled
        return pulled.double().square().sum(dim=(1, 2))[:, None]

    def takes_rows(self, layer: LayerPass) -> bool:
        # whichever takes fewer multiplications
        (d, m), n_positions = layer.weight.shape, layer.n_positions
        k, by_factor = (d, 0) if self.factor is None else (self.factor.shape[1], d)
        by_rows = k * by_factor * n_positions + (k + m) * n_positions**2
        by_weight = d * m * n_positions + k * by_factor * m
        return layer.is_flat or (layer.map.groups == 1 and by_rows < by_weight)

    def n_products(self, layer: LayerPass) -> float:
        k = len(layer.weight) if self.factor is None else self.factor.shape[1]
        return k if layer.is_flat else k * layer.weight.shape[1]

    def is_deflatable(self, layer: LayerPass) -> bool:
        """Return whether only products are known, which half precision cannot square."""
        is_known = layer.curvature is not None or layer.gradients is not None
        fits = layer.offset.numel() <= _KEPT // DEFLATION
        return not is_known and fits and layer.offset.dtype in {torch.float32, torch.float64}

    def deflated(self, layer: LayerPass, generator: torch.Generator) -> "Trace":
        """Find directions by random products, and the trace in them by as many products again.

        As in Hutch++ [1]_, but for each sample: the Hessian of a sample has few large eigenvalues,
        as many as there are outputs if the loss is small.

        .. [1] Meyer et al., "Hutch++: Optimal Stochastic Trace Estimation", SOSA 2021.
        """
        n, seen, spread = len(layer.features), [], []
        for _ in range(N_DIRECTIONS):
            rows = layer.product(self._random_rows(layer, generator))
            seen.append(rows.reshape(n, -1))
            spread.append(self._covariance(layer, rows).reshape(n, -1))
        shape, dual, basis = rows.shape, torch.stack(seen, dim=1), torch.stack(spread, dim=1)
        # make them orthonormal as changes of the weight, whose products are those of both
        values, vectors = torch.linalg.eigh((dual @ basis.mT).double())
        least = torch.finfo(basis.dtype).eps ** 0.5 * values[:, -1:]
        scale = torch.where(values > least, values.clamp_min(0).rsqrt(), 0.0)
        mix = (vectors * scale[:, None]).mT.to(basis.dtype)
        dual, basis = mix @ dual, mix @ basis
        known = [layer.form(direction.reshape(shape)) for direction in basis.unbind(dim=1)]
        return replace(self, deflation=Deflation(torch.stack(known).sum(dim=0), basis, dual))

    def _directions(self, layer: LayerPass) -> Iterator[Tensor]:
        """Yield changes (n, d, P) of the layer's output, whose quadratic forms add up."""
        for column in self._columns(layer).T:
            if layer.is_flat:
                norms = self._square_norms(layer).sqrt()
                yield column[:, None] * norms[:, None, None]
                continue
            for t in range(layer.weight.shape[1]):
                matrix = torch.zeros_like(layer.weight)
                matrix[:, t] = column
                yield layer.apply(self._mix(matrix))

    def _random_rows(self, layer: LayerPass, generator: torch.Generator) -> Tensor:
        """Draw rows whose quadratic form has the trace as its mean: (n, d, P).

        They are ``F R_i D phi_i`` with random signs R_i. ``R_i = diag(s_i) R diag(t_i)`` has the
        law of independent signs. R is the same for all samples, so that no sample needs a matrix
        of its own, but two samples' quadratic forms are uncorrelated: given R, each of them is
        unbiased and depends on its own s_i and t_i only.
        """
        columns, n, m = self._columns(layer), len(layer.features), layer.weight.shape[1]
        k = columns.shape[1]
        if layer.is_flat:
            signs = rademacher((n, k), columns, generator)
            return (signs @ columns.T)[:, :, None] * self._square_norms(layer).sqrt()[:, None, None]
        left = columns.to(layer.features.dtype)
        right = rademacher((k, m), left, generator)
        outer, inner = (rademacher((n, size), left, generator) for size in (k, m))
        if self.inverse is not None and self.inverse.ndim > 1:  # each row of F has its channels
            matrices = (left * outer[:, None]) @ (right * inner[:, None])
            return layer.map.apply(layer.features, self._mix(matrices))
        return layer.map.apply_signed(layer.features, left, outer, right, self._mix(inner))

    def _covariance(self, layer: LayerPass, rows: Tensor) -> Tensor:
        """Multiply the covariance of random rows with some rows."""
        columns = self._columns(layer).to(rows.dtype)
        if self.takes_rows(layer):
            between = self._between_positions(layer).to(rows.dtype)
            return columns @ (columns.T @ (rows @ between))
        return torch.cat([
            layer.map.apply(features, self._mix(columns @ (columns.T @ self._mix(pulled))))
            for features, pulled in layer.pull(rows)
        ])

    def _mix(self, matrices: Tensor) -> Tensor:
        """Multiply with ``D``, or its transpose, from the right."""
        return matrices if self.inverse is None else matrices * self.inverse.to(matrices.dtype)

    def _columns(self, layer: LayerPass) -> Tensor:
        """Return ``F``."""
        weight = layer.weight
        if self.factor is None:
            return torch.eye(len(weight), dtype=weight.dtype, device=weight.device)
        return self.factor.matrix()

    def _square_norms(self, layer: LayerPass) -> Tensor:
        """Return ``|D phi_i|^2`` of a flat layer: (n,)."""
        if self.inverse is None:
            norm: Tensor = torch.linalg.vector_norm(layer.features, dim=1, dtype=torch.float64)
            return norm.square()
        return (layer.features.double() * self.inverse).square().sum(dim=1)

    def _between_positions(self, layer: LayerPass) -> Tensor:
        """Return ``<D phi_ip, D phi_iq>`` of all positions p and q: (n, P, P)."""
        if layer.is_flat:
            return self._square_norms(layer)[:, None, None]
        patches = (phi.flatten(1, 2).mT.double() for phi in layer.map.patches(layer.features))
        return torch.cat([phi @ phi.mT for phi in map(self._mix, patches)])


@dataclass(frozen=True)
class FeatureTrace(Trace):
    """``sum_p Tr(F^T B_ipp F)``, with the curvature ``B_ipp`` at each position p."""

    def gradient(self, layer: LayerPass, pulled: Tensor) -> Tensor:
        left = self._columns(layer).T @ pulled.double()
        return left.square().sum(dim=(1, 2))[:, None]

    def takes_rows(self, layer: LayerPass) -> bool:
        return True

    def n_products(self, layer: LayerPass) -> float:
        return self._columns(layer).shape[1] * layer.n_positions

    def _directions(self, layer: LayerPass) -> Iterator[Tensor]:
        for column in self._columns(layer).T:
            for p in range(layer.n_positions):
                rows = column.new_zeros(len(layer.features), len(column), layer.n_positions)
                rows[:, :, p] = column
                yield rows

    def _random_rows(self, layer: LayerPass, generator: torch.Generator) -> Tensor:
        columns = self._columns(layer)
        shape = (len(layer.features), columns.shape[1], layer.n_positions)
        return columns @ rademacher(shape, columns, generator)

    def _covariance(self, layer: LayerPass, rows: Tensor) -> Tensor:
        columns = self._columns(layer).to(rows.dtype)
        return columns @ (columns.T @ rows)

    def _square_norms(self, layer: LayerPass) -> Tensor:
        return torch.ones_like(layer.features[:, 0], dtype=torch.float64)


@dataclass(frozen=True)
class Neurons(Quantity):
    """``rho(j) = (W e_j e_j^T)^T H (W e_j e_j^T)`` of each input neuron j, or their sum."""

    is_sum: bool

    def exact(self, layer: LayerPass) -> Tensor:
        if layer.curvature is not None:
            squares = layer.features.double().square()
            return self._finish(layer.curvature(layer.weight) * squares)
        neurons = torch.arange(layer.weight.shape[1], device=layer.weight.device)
        changes = (layer.weight * (neurons == j) for j in range(len(neurons)))
        return self._finish(torch.cat(list(map(layer.form, map(layer.apply, changes))), dim=1))

    def draw(self, layer: LayerPass, generator: torch.Generator) -> Tensor:
        n, m = len(layer.features), layer.weight.shape[1]
        signed = layer.weight * rademacher((n, m), layer.weight, generator)[:, None]
        back = layer.map.transpose(layer.features, layer.product(layer.apply(signed)))
        return self._finish((back.double() * signed).sum(dim=1))

    def gradient(self, layer: LayerPass, pulled: Tensor) -> Tensor:
        weight = layer.weight.to(pulled.dtype)
        if layer.is_flat:
            along = (pulled[:, :, 0] @ weight) * layer.features
        else:
            along = (pulled * weight).sum(dim=1)
        return self._finish(along.double().square())

    def n_products(self, layer: LayerPass) -> float:
        return layer.weight.shape[1]

    def _finish(self, terms: Tensor) -> Tensor:
        """Sum terms (n, m) over the neurons, if that is asked for."""
        return terms.sum(dim=1, keepdim=True) if self.is_sum else terms


# -- the terms of several quantities in one batch --------------------------------------------------

Key = tuple[str, str]  # layer, name of the quantity
Layers = Mapping[str, LayerPass]
Quantities = Mapping[Key, Quantity]


def sample_terms(
    layers: Layers, quantities: Quantities, generator: torch.Generator | None = None
) -> dict[Key, Tensor]:
    """Compute the samples' terms; with a generator, estimate them from one random vector each."""
    linear = {key: one for key, one in quantities.items() if layers[key[0]].gradients is not None}
    terms = _by_gradients(layers, linear, generator) if linear else {}
    for key, quantity in quantities.items():
        layer = layers[key[0]]
        if key not in linear:
            terms[key] = (
                quantity.exact(layer) if generator is None else quantity.draw(layer, generator)
            )
    return terms


def _by_gradients(
    layers: Layers, quantities: Quantities, generator: torch.Generator | None
) -> dict[Key, Tensor]:
    """Compute the terms by backward passes that layers and quantities share."""
    names = list(dict.fromkeys(name for name, _ in quantities))
    shared = layers[names[0]].gradients
    assert shared is not None
    root = shared.root
    if generator is not None:  # one pass: with random signs s, E (R s)(R s)^T = R R^T
        root = root @ rademacher((len(root), root.shape[2], 1), root, generator)
    terms: dict[Key, Tensor] = {}
    for cotangent in root.unbind(dim=2):
        slopes = torch.autograd.grad(
            shared.base,
            [layers[name].offset for name in names],
            cotangent.to(shared.base.dtype),
            retain_graph=True,
            materialize_grads=True,
        )
        for name, slope in zip(names, slopes, strict=True):
            own = {key: one for key, one in quantities.items() if key[0] == name}
            for key, more in _pull_back(layers[name], slope, own):
                terms[key] = terms[key] + more if key in terms else more
    return terms


def _pull_back(
    layer: LayerPass, slope: Tensor, quantities: Quantities
) -> Iterator[tuple[Key, Tensor]]:
    """Yield the terms of quantities at a layer that belong to a gradient in its output."""
    # Those that take gradients in the weight share the sum over positions.
    # in mixed precision, a layer may receive float32 and return float16
    rows = layer.map.to_rows(full_precision(slope))
    by_weight = {key: one for key, one in quantities.items() if not one.takes_rows(layer)}
    for key, quantity in quantities.items():
        if key not in by_weight:
            yield key, quantity.gradient(layer, rows)
    parts: dict[Key, list[Tensor]] = {key: [] for key in by_weight}
    for _, pulled in layer.pull(rows) if by_weight else ():
        for key, quantity in by_weight.items():
            parts[key].append(quantity.gradient(layer, pulled))
    yield from ((key, torch.cat(terms)) for key, terms in parts.items())
