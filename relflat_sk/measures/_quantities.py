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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from relflat_sk._losses.curvature import ClosedForm, Curvature, Factor, product_curvature
from relflat_sk._losses.many_classes import ManyClasses
from relflat_sk._network.layers import LayerMap
from relflat_sk._numerics import column_squares, full_precision
from relflat_sk._random import rademacher

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

    @property
    def method(self) -> str:
        """What reports call an exact sum."""
        return "exact" if self.curvature is None else "closed form"

    @cached_property
    def weight(self) -> Tensor:
        """The weight as a matrix of shape (d, m), in float64; that of very many classes as it is.

        A weight of very many rows is read in chunks and never copied.
        """
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

    def feature_factor(self) -> Factor:
        """Return a factor of the weight in all features, of which each group reads its own."""
        groups = self.map.groups
        if groups == 1:
            return self.left_factor()
        weight = self.weight
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

    @property
    def n_stored(self) -> float:
        """How many numbers products need without the network; infinity if they need it."""
        if self.curvature is None:
            return math.inf
        return self.features.numel() + 2 * self.offset.numel()

    def loss_gradient(self) -> Tensor:
        """Compute the gradient of each sample's loss in the layer's output."""
        found = torch.zeros_like(self.offset)
        if self.summed_loss.requires_grad:
            (found,) = torch.autograd.grad(
                self.summed_loss, self.offset, retain_graph=True, materialize_grads=True
            )
        found = full_precision(found)
        if self.is_flat:  # also where tokens or pixels count as samples
            found = found if self.map.channels_last else found.movedim(1, -1)
            return found.reshape(len(self.features), -1, 1)
        return self.map.to_rows(found)

    def apply(self, matrix: Tensor) -> Tensor:
        """Apply a change of the weight to the features, for all samples or for each."""
        return self.map.apply(self.features, matrix.to(self.features.dtype))

    def draw_rows(
        self, factor: Tensor, inverse: Tensor | None, generator: torch.Generator
    ) -> Tensor:
        """Apply ``F R_i D`` with random signs R_i to the features of each sample i.

        ``R_i = diag(s_i) R diag(t_i)`` has the law of independent signs. R is the same for all
        samples, so that no sample needs a matrix of its own, but two samples' quadratic forms are
        uncorrelated: given R, each of them is unbiased and depends on its own s_i and t_i only.
        """
        n, k, m = len(self.features), factor.shape[1], self.weight.shape[1]
        left = factor.to(self.features.dtype)
        right = rademacher((k, m), left, generator)
        outer, inner = (rademacher((n, size), left, generator) for size in (k, m))
        if inverse is not None and inverse.ndim > 1:  # each row of F reads channels of its own
            matrices = (left * outer[:, None]) @ (right * inner[:, None])
            return self.map.apply(self.features, matrices * inverse.to(left.dtype))
        if inverse is not None:
            inner = inner * inverse.to(left.dtype)
        return self.map.apply_signed(self.features, left, outer, right, inner)

    def product(self, rows: Tensor) -> Tensor:
        """Compute products with the Hessians of the samples' losses in the layer's output."""
        if self.curvature is not None:
            return self.curvature.product(rows[:, :, 0])[:, :, None]
        return self.map.to_rows(self._products.product(self._like_output(rows)))

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

    @cached_property
    def _products(self) -> Curvature:
        """The curvature in the layer's output, by differentiating twice."""
        return product_curvature(self.summed_loss, self.offset)

    def _like_output(self, rows: Tensor) -> Tensor:
        """Bring rows into shape and precision of the layer's output."""
        return self.map.from_rows(rows.to(self.offset.dtype), self.offset)


# -- what is summed over the samples --------------------------------------------------------------


class Quantity(Protocol):
    """A sum over samples of k numbers at one layer, one row of terms for each row of the features.

    `is_sum` says whether the forms of all directions are summed up; otherwise each is a number.
    """

    is_sum: bool = True

    def closed_form(self, layer: LayerPass, curvature: ClosedForm) -> Tensor:
        """Compute the terms from the curvature in the layer's output: (n, k)."""

    def gradient(self, layer: LayerPass, pulled: Tensor) -> Tensor:
        """Compute the terms of one backward pass, to be summed over the passes.

        `pulled` are gradients ``g_ic`` in the layer's output if the quantity `takes_rows`, else
        ``G_ic`` in its weight: (n, d, P) or (n, d, m), to (n, k).
        """

    def takes_rows(self, layer: LayerPass) -> bool:
        """Return whether `gradient` takes gradients in the layer's output; always if it is flat."""
        return layer.is_flat

    def n_products(self, layer: LayerPass) -> float:
        """Return the number of products that all terms take: that of `directions`."""

    def directions(self, layer: LayerPass) -> Iterator[Tensor]:
        """Yield changes (n, d, P) of the layer's output, whose quadratic forms are the terms."""

    def draw(self, layer: LayerPass, generator: torch.Generator) -> Tensor:
        """Estimate the terms without bias from one random product, independently: (n, k)."""

    def identity(self, weight: Tensor) -> Tensor:
        """Compute the quantity with the identity as Hessian, as decay adds it: (k,) or ()."""


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

    def closed_form(self, layer: LayerPass, curvature: ClosedForm) -> Tensor:
        return (self._square_norms(layer) * curvature.trace(self.factor))[:, None]

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
        (d, m), n_positions = layer.weight.shape, _n_positions(layer)
        k, by_factor = (d, 0) if self.factor is None else (self.factor.shape[1], d)
        by_rows = k * by_factor * n_positions + (k + m) * n_positions**2
        by_weight = d * m * n_positions + k * by_factor * m
        return layer.is_flat or (layer.map.groups == 1 and by_rows < by_weight)

    def n_products(self, layer: LayerPass) -> float:
        k = len(layer.weight) if self.factor is None else self.factor.shape[1]
        return k if layer.is_flat else k * layer.weight.shape[1]

    def directions(self, layer: LayerPass) -> Iterator[Tensor]:
        n, m = len(layer.features), layer.weight.shape[1]
        for column in self._columns(layer).T:
            if layer.is_flat:
                norms = self._square_norms(layer).sqrt()
                yield column.expand(n, -1)[:, :, None] * norms[:, None, None]
                continue
            for t in range(m):
                matrix = torch.zeros_like(layer.weight)
                matrix[:, t] = column
                yield layer.apply(self._mix(matrix))

    def draw(self, layer: LayerPass, generator: torch.Generator) -> Tensor:
        rows = self.random_rows(layer, generator)
        if self.deflation is None:
            return layer.form(rows)
        return self.deflation.known + layer.form(self.deflation.rest(rows))

    def deflated(self, layer: LayerPass, n_directions: int, generator: torch.Generator) -> "Trace":
        """Find directions by random products, and the trace in them by as many products again.

        As in Hutch++ [1]_, but for each sample: the Hessian of a sample has few large eigenvalues,
        as many as there are outputs if the loss is small.

        .. [1] Meyer et al., "Hutch++: Optimal Stochastic Trace Estimation", SOSA 2021.
        """
        n, seen, spread = len(layer.features), [], []
        for _ in range(n_directions):
            rows = layer.product(self.random_rows(layer, generator))
            seen.append(rows.reshape(n, -1))
            spread.append(self.covariance(layer, rows).reshape(n, -1))
        shape, dual, basis = rows.shape, torch.stack(seen, dim=1), torch.stack(spread, dim=1)
        # make them orthonormal as changes of the weight, whose products are those of both
        values, vectors = torch.linalg.eigh((dual @ basis.mT).double())
        least = torch.finfo(basis.dtype).eps ** 0.5 * values[:, -1:]
        scale = torch.where(values > least, values.clamp_min(0).rsqrt(), 0.0)
        mix = (vectors * scale[:, None]).mT.to(basis.dtype)
        dual, basis = mix @ dual, mix @ basis
        known = [layer.form(direction.reshape(shape)) for direction in basis.unbind(dim=1)]
        return replace(self, deflation=Deflation(torch.stack(known).sum(dim=0), basis, dual))

    def random_rows(self, layer: LayerPass, generator: torch.Generator) -> Tensor:
        """Draw rows whose quadratic form has the trace as its mean: (n, d, P)."""
        columns = self._columns(layer)
        if not layer.is_flat:
            return layer.draw_rows(columns, self.inverse, generator)
        signs = rademacher((len(layer.features), columns.shape[1]), columns, generator)
        return (signs @ columns.T)[:, :, None] * self._square_norms(layer).sqrt()[:, None, None]

    def covariance(self, layer: LayerPass, rows: Tensor) -> Tensor:
        """Multiply the covariance of random rows with some rows."""
        columns = self._columns(layer).to(rows.dtype)
        if self.takes_rows(layer):
            between = self._between_positions(layer).to(rows.dtype)
            return columns @ (columns.T @ (rows @ between))
        size, found = max(1, _PULLED // layer.weight.numel()), []
        for some, features in zip(
            torch.split(rows, size), torch.split(layer.features, size), strict=True
        ):
            pulled = self._mix(layer.map.transpose(features, some))
            pulled = self._mix(columns @ (columns.T @ pulled))
            found.append(layer.map.apply(features, pulled))
        return torch.cat(found)

    def identity(self, weight: Tensor) -> Tensor:
        if self.factor is None:
            return weight.new_full((), weight.numel(), dtype=torch.float64)
        return weight.shape[1] * column_squares(weight).sum()

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
    """``scale sum_p Tr(W^T B_ipp W)``, with the curvature ``B_ipp`` at each position p."""

    scale: float = 1.0

    def takes_rows(self, layer: LayerPass) -> bool:
        return True

    def gradient(self, layer: LayerPass, pulled: Tensor) -> Tensor:
        left = self._columns(layer).T @ pulled.double()
        return self.scale * left.square().sum(dim=(1, 2))[:, None]

    def n_products(self, layer: LayerPass) -> float:
        return self._columns(layer).shape[1] * _n_positions(layer)

    def directions(self, layer: LayerPass) -> Iterator[Tensor]:
        columns, n = self._columns(layer), len(layer.features)
        for column in columns.T:
            for p in range(_n_positions(layer)):
                rows = column.new_zeros(n, len(column), _n_positions(layer))
                rows[:, :, p] = math.sqrt(self.scale) * column
                yield rows

    def random_rows(self, layer: LayerPass, generator: torch.Generator) -> Tensor:
        columns = math.sqrt(self.scale) * self._columns(layer)
        shape = (len(layer.features), columns.shape[1], _n_positions(layer))
        return columns @ rademacher(shape, columns, generator)

    def covariance(self, layer: LayerPass, rows: Tensor) -> Tensor:
        columns = math.sqrt(self.scale) * self._columns(layer).to(rows.dtype)
        return columns @ (columns.T @ rows)

    def _square_norms(self, layer: LayerPass) -> Tensor:
        return torch.full_like(layer.features[:, 0], self.scale, dtype=torch.float64)


def _n_positions(layer: LayerPass) -> int:
    return 1 if layer.is_flat else layer.map.to_rows(layer.offset.detach()).shape[2]


@dataclass(frozen=True)
class Neurons(Quantity):
    """``rho(j) = (W e_j e_j^T)^T H (W e_j e_j^T)`` of each input neuron j, or their sum."""

    is_sum: bool

    def closed_form(self, layer: LayerPass, curvature: ClosedForm) -> Tensor:
        return self._finish(curvature(layer.weight) * layer.features.double().square())

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
            yield layer.apply(matrix)

    def draw(self, layer: LayerPass, generator: torch.Generator) -> Tensor:
        n, m = len(layer.features), layer.weight.shape[1]
        signed = layer.weight * rademacher((n, m), layer.weight, generator)[:, None]
        back = layer.map.transpose(layer.features, layer.product(layer.apply(signed)))
        return self._finish((back.double() * signed).sum(dim=1))

    def identity(self, weight: Tensor) -> Tensor:
        squares = column_squares(weight)
        return squares.sum() if self.is_sum else squares

    def _finish(self, terms: Tensor) -> Tensor:
        """Sum terms (n, m) over the neurons, if that is asked for."""
        return terms.sum(dim=1, keepdim=True) if self.is_sum else terms


def is_deflatable(layer: LayerPass, quantity: Quantity, most: int) -> bool:
    """Return whether a trace can be deflated, at outputs of so many numbers in a batch at most."""
    known = layer.curvature is not None or layer.gradients is not None
    # half precision holds no squares of products
    fits = layer.offset.numel() <= most and layer.offset.dtype in {torch.float32, torch.float64}
    return isinstance(quantity, Trace) and not known and fits


# -- the terms of several quantities in one batch --------------------------------------------------

Key = tuple[str, str]  # layer, name of the quantity
Layers = Mapping[str, LayerPass]
Quantities = Mapping[Key, Quantity]
# numbers in the gradients of samples in a weight that are held at a time
_PULLED = 2**24


def n_passes(layer: LayerPass, quantity: Quantity) -> float:
    """Return how many backward passes or products an exact sum takes."""
    if layer.curvature is not None:
        return 0
    if layer.gradients is not None:
        return layer.gradients.root.shape[2]
    return quantity.n_products(layer)


def exact_terms(layers: Layers, quantities: Quantities) -> Iterator[tuple[Key, Tensor]]:
    """Compute the samples' terms."""
    shared, others = _split(layers, quantities)
    for key, quantity in others.items():
        layer = layers[key[0]]
        if layer.curvature is not None:
            yield key, quantity.closed_form(layer, layer.curvature)
        else:
            yield key, _by_products(layer, quantity)
    if shared is not None:
        terms: dict[Key, Tensor] = {}
        for cotangent in shared.root.unbind(dim=2):
            for key, more in _by_gradients(layers, quantities, shared, cotangent):
                terms[key] = terms[key] + more if key in terms else more
        yield from terms.items()


def draw_terms(
    layers: Layers, quantities: Quantities, generator: torch.Generator
) -> Iterator[tuple[Key, Tensor]]:
    """Estimate the samples' terms, without bias, from one random vector each."""
    shared, others = _split(layers, quantities)
    if shared is not None:
        # one backward pass for all layers: with random signs s, E (R s)(R s)^T = R R^T
        n, _, r = shared.root.shape
        signs = rademacher((n, r, 1), shared.root, generator)
        yield from _by_gradients(layers, quantities, shared, (shared.root @ signs)[:, :, 0])
    for key, quantity in others.items():
        yield key, quantity.draw(layers[key[0]], generator)


def _split(layers: Layers, quantities: Quantities) -> tuple[Gradients | None, Quantities]:
    """Return the gradients that layers share, and the quantities of all other layers."""
    shared = [layers[name].gradients for name, _ in quantities]
    others = {key: one for key, one in quantities.items() if layers[key[0]].gradients is None}
    return next((one for one in shared if one is not None), None), others


def _by_products(layer: LayerPass, quantity: Quantity) -> Tensor:
    """Compute terms from all products that they take: (n, k)."""
    forms = map(layer.form, quantity.directions(layer))
    if not quantity.is_sum:
        return torch.cat(list(forms), dim=1)
    total = next(forms)
    for form in forms:
        total = total + form
    return total


def _by_gradients(
    layers: Layers, quantities: Quantities, shared: Gradients, cotangent: Tensor
) -> Iterator[tuple[Key, Tensor]]:
    """Yield the terms that belong to one vector (n, o) in the network's output.

    It is pulled back to rows (n, d, P) of a layer's output, or to its weight (n, d, m) for some
    samples at a time: the quantities that take that share the sum over positions.
    """
    names = [name for name, _ in quantities if layers[name].gradients is not None]
    names = list(dict.fromkeys(names))
    slopes = torch.autograd.grad(
        shared.base,
        [layers[name].offset for name in names],
        cotangent.to(shared.base.dtype),
        retain_graph=True,
        materialize_grads=True,
    )
    for name, slope in zip(names, slopes, strict=True):
        layer = layers[name]
        # in mixed precision, a layer may receive float32 and return float16
        rows = layer.map.to_rows(full_precision(slope))
        size = max(1, _PULLED // layer.weight.numel())
        parts: dict[Key, list[Tensor]] = {}
        for key in [key for key in quantities if key[0] == name]:
            if quantities[key].takes_rows(layer):
                yield key, quantities[key].gradient(layer, rows)
            else:
                parts[key] = []
        if not parts:
            continue
        for some, features in zip(
            torch.split(rows, size), torch.split(layer.features, size), strict=True
        ):
            pulled = layer.map.transpose(features, some)
            for key, terms in parts.items():
                terms.append(quantities[key].gradient(layer, pulled))
        yield from ((key, torch.cat(terms)) for key, terms in parts.items())
