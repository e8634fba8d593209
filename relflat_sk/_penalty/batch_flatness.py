r"""The relative flatness of a training batch, from the training step's own forward pass.

The curvature at each layer is known in one of the three ways of `relflat_sk._network.tail`. Each
of them gives a term of the penalty with its graph:

closed form
    Exact. Sums over very many classes, and those of the gradient, run over chunks of them.
gradients
    With random signs ``s`` and the gradients ``J^T R s`` in the layers' outputs, the squared
    slopes along random changes of the layers. One backward pass for all layers together. Batch
    norm counts as the linear map that it is for the statistics of the batch.
products
    Forms of the Hessian along random changes, a second derivative. Changes of several layers are
    independent and have mean zero, so one product along all of them together has the sum of the
    layers' forms as its mean.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from relflat_sk._losses.curvature import ClosedForm, check_twice
from relflat_sk._losses.loss import BatchLoss, Loss
from relflat_sk._losses.many_classes import ManyClasses
from relflat_sk._network.borrowing import ExplicitLayers
from relflat_sk._network.layers import LayerMap, select_channels
from relflat_sk._network.recording import LayerRecord, check_thrice
from relflat_sk._network.tail import Tail, choose_curvatures
from relflat_sk._numerics import full_precision, inverse_spread, or_one, safe_root, varies
from relflat_sk._random import rademacher

# Random changes of a layer's weight, by which training estimates its relative flatness.
#
# Let ``D`` be a random matrix of the weight's shape, with mean zero and
# ``E[D_st D_s't'] = <w_s, w_s'> 1[t = t']``. The quadratic form of the Hessian along ``D`` then has
# the mean
#
# .. math:: E\langle D, H D\rangle = \sum_{s,s'} \langle w_s, w_{s'}\rangle \mathrm{Tr}(H_{s,s'})
#     = \kappa .
#
# ``D = W v u^T`` is such a matrix if ``v`` and ``u`` are independent and
# ``E[v v^T] = E[u u^T] = I``. It changes the layer's output by ``(W v) (u^T phi)``.
#
# The vectors ``v`` are random signs. Each sample has one vector, or, for slopes, all samples share
# some vectors: the gradient in the layer's output is then known, any number of changes costs
# little, and few products with the weight are needed. (Single columns of the identity would need
# no products and have no more variance. But their slopes involve few columns of the weight, and a
# net trains worse with them.)
#
# The vectors ``u`` are of two kinds, and neither takes a product with the patches of a
# convolution. If a sample has one position, ``u^T phi`` is replaced by its root mean square
# ``|phi|``. Otherwise ``u`` is a column of the identity times ``sqrt(m)``. It has less variance
# than random signs, because neighbouring inputs are alike. For slopes there are several such
# columns, for different channels at the same position of the kernel.

# number of vectors v that all samples of a batch share
_SHARED = 32
# number of columns u of each sample, for slopes
_CHANNELS = 16


def n_shared(m: int) -> int:
    """Return how many vectors ``v`` all samples share, for slopes; 0 for columns in their place."""
    return 0 if m <= 2 * _SHARED else _SHARED


class RandomChanges:
    """Random changes of a layer's output, scaled to estimate ``kappa / (2 m)``."""

    def __init__(
        self, layer: LayerMap, features: Tensor, weight: Tensor, spread: Tensor | None
    ) -> None:
        self.layer = layer
        self.features = features
        self.weight = weight if spread is None else weight * spread[layer.column_channels()]
        self.inverse = None if spread is None else inverse_spread(spread)
        self.is_flat = features.ndim == 2
        if self.is_flat and self.inverse is not None:
            self.features = features * self.inverse

    def changes(self, z: Tensor) -> Tensor:
        """Draw one change of the layer's output for each sample, with its graph."""
        signs = rademacher((len(self.features), self.weight.shape[1]), self.weight)
        units = signs @ self.weight.T
        if self.is_flat:
            return units * self._sizes(1)
        blocks: Tensor = self._in_blocks(units[:, :, None]) * self._planes(1, 1.0)
        return self.layer.from_rows(blocks.flatten(1, 2), z)

    def slopes(self, gradient: Tensor) -> Tensor:
        """Draw slopes along changes, (..., k), given the gradient in the layer's output."""
        d, m = self.weight.shape
        n = n_shared(m)
        signs = rademacher((n, m), self.weight) if n else None
        columns = self.weight if signs is None else self.weight @ signs.T
        if self.is_flat:
            return (gradient * self._sizes(max(1, n))) @ columns
        blocks = self._in_blocks(self.layer.to_rows(gradient))
        along = blocks @ self._planes(_CHANNELS, max(1, n) ** -0.5).transpose(2, 3)
        return along.permute(0, 3, 1, 2).reshape(-1, d) @ columns

    def _sizes(self, n: int) -> Tensor:
        """Return norms of features, divided by the root of ``2 m n``: (n, 1)."""
        # vector_norm has the slope zero at zero, unlike the root of a sum of squares
        norms = torch.linalg.vector_norm(self.features, dim=-1, keepdim=True)
        sizes: Tensor = norms * (2 * self.weight.shape[1] * n) ** -0.5
        return sizes

    def _in_blocks(self, rows: Tensor) -> Tensor:
        """Reshape rows (n, d, P) by groups of outputs: (n, groups, d / groups, P)."""
        return rows.view(len(rows), self.layer.groups, -1, rows.shape[2])

    def _planes(self, n_at_most: int, scale: float) -> Tensor:
        """Return columns of the patches, times ``scale / sqrt(2 k)``: (n, groups, k, P)."""
        layer, features, inverse = self.layer, self.features, self.inverse
        n, m = len(features), self.weight.shape[1]
        offset = int(torch.randint(layer.n_offsets, ()))
        n_channels = m // layer.n_offsets
        if n_channels <= n_at_most:
            k, channels = n_channels, None
        else:
            k = n_at_most
            first = torch.randint(n_channels, (n, 1), device=features.device)
            steps = torch.arange(k, device=features.device) * (n_channels // k)
            channels = (first + steps) % n_channels
        planes: Tensor = layer.planes(features, channels, offset) * (scale / (2 * k) ** 0.5)
        if inverse is None:
            return planes
        units = select_channels(
            inverse.view(1, layer.groups, -1).expand(n, -1, -1).transpose(1, 2), channels
        )
        return planes * units.transpose(1, 2)[:, :, :, None]


def batch_flatness(
    batch: BatchLoss,
    output: Tensor,
    layers: Sequence[LayerRecord],
    last: LayerRecord,
    explicit: ExplicitLayers,
    *,
    probes: int = 1,
    normalize: bool = False,
    scale: float = 1.0,
) -> Tensor:
    """Compute ``sum kappa / (2 m)`` over layers, of the criterion on a batch."""
    loss, target, weights = batch.loss, batch.target, batch.weight
    weights = None if weights is None else full_precision(weights.to(output.device))
    if not layers:
        return _sum([], output)
    for record in layers:
        record.check()  # that it was called once
        if record.node is None:
            raise ValueError(
                f"there is nothing to train up to layer {record.name!r}, where all is frozen or "
                "ran without gradients. Penalise a later layer, or measure: relative_flatness."
            )
    share = scale * _share(loss, output, target.relevant, weights)
    tail = Tail(loss, output, target, last, full_precision)
    # in a network that is piecewise linear behind some layers only, two ways would cost more
    chosen = choose_curvatures(tail, layers, together=True)
    make = _Terms(tail, explicit, weights, normalize, probes, share)
    terms = [make.closed_form(*one) for one in chosen.closed]
    if chosen.linear and chosen.base is not None:
        terms.append(make.gradients(chosen.linear, *chosen.base))
    if chosen.others:
        terms.append(make.products(chosen.others))
    return _sum(terms, output)


def _share(
    loss: Loss, output: Tensor, relevant: Tensor | None, weights: Tensor | None
) -> float | Tensor:
    """Return one over the divisor of the criterion's mean; one if it sums."""
    if getattr(loss.criterion, "reduction", "mean") == "sum":
        return 1.0
    each = loss.each_divisor(output, relevant)
    if weights is None and not isinstance(each, Tensor):
        return 1 / (each * output.shape[0])
    divisors = loss.divisors(output, relevant)
    return 1 / or_one(_weighted(weights, full_precision(divisors)))


@dataclass(slots=True)
class _Terms:
    """Computes the terms of the penalty; `share` multiplies them."""

    tail: Tail
    explicit: ExplicitLayers
    weights: Tensor | None
    normalize: bool
    probes: int
    share: float | Tensor

    def closed_form(self, record: LayerRecord, features: Tensor, curvature: ClosedForm) -> Tensor:
        """Compute the term of one layer with a closed form."""
        features, weight = full_precision(features), record.map.matrix
        if not isinstance(curvature, ManyClasses):  # which makes no copy of the weight
            weight = full_precision(weight)
        weights = self._weights_of(features)
        if self.normalize:
            spread = self._spread(features, features)
            weight = weight * spread
            features = features * inverse_spread(spread)
        scale = self.share / (2 * weight.shape[1])
        return curvature.total(weight, features, scale if weights is None else scale * weights)

    def gradients(
        self, records: Sequence[LayerRecord], base: Tensor, curvature: ClosedForm
    ) -> Tensor:
        """Compute the term of the layers behind which the network is piecewise linear."""
        edges, changes = self._probed(records)

        def draw() -> Tensor:
            # squared slopes along random changes
            signs = rademacher(base.shape, full_precision(base))
            if self.weights is not None:
                signs = signs * self.weights.sqrt()[:, None]
            cotangent = curvature.root_product(signs).to(base.dtype)
            pulled = self.explicit.pull_back([base], edges, [cotangent])
            squares = [
                change.slopes(full_precision(gradient)).square().sum()
                for gradient, change in zip(pulled, changes, strict=True)
                if gradient is not None
            ]
            return _sum(squares, base)

        return self._mean_of(draw)

    def products(self, records: Sequence[LayerRecord]) -> Tensor:
        """Compute the term of the other layers."""
        tail = self.tail
        assert tail.target is not None
        check_thrice(tail.output, *(record.node for record in records))
        edges, changes = self._probed(records)
        losses = tail.loss.terms(tail.output, tail.target.values)[0]
        gradients = self.explicit.pull_back([losses.sum()], edges)
        check_twice(*gradients)
        curved = [
            (gradient, edge, change)
            for gradient, edge, change in zip(gradients, edges, changes, strict=True)
            if gradient is not None and gradient.requires_grad
        ]

        def draw() -> Tensor:
            # forms of the Hessian along random changes
            if not curved:
                return _sum([], losses)
            of, at, _ = zip(*curved, strict=True)
            moves = [change.changes(gradient).to(gradient.dtype) for gradient, _, change in curved]
            products = self.explicit.pull_back(of, at, moves)
            forms = [
                (full_precision(product) * full_precision(dz)).flatten(1).sum(dim=1)
                for product, dz in zip(products, moves, strict=True)
                if product is not None
            ]
            return _sum([_weighted(self.weights, form) for form in forms], losses)

        return self._mean_of(draw)

    def _mean_of(self, draw: Callable[[], Tensor]) -> Tensor:
        """Average estimates of a sum over layers and samples."""
        draws = [draw() for _ in range(self.probes)]
        return self.share * (draws[0] if len(draws) == 1 else torch.stack(draws).mean())

    def _probed(
        self, records: Sequence[LayerRecord]
    ) -> tuple[list[GradientEdge], list[RandomChanges]]:
        """Return where gradients are taken, and the random changes of the layers."""
        edges, changes = [], []
        for record in records:
            layer, features = record.map, full_precision(record.check()[0])
            spread = self._spread(features, layer.channels(features)) if self.normalize else None
            edges.append(GradientEdge(record.node, record.output_nr))
            changes.append(RandomChanges(layer, features, full_precision(layer.matrix), spread))
        return edges, changes

    def _spread(
        self,
        features: Tensor,
        rows: Tensor,  # (r, c)
    ) -> Tensor:  # (c,)
        """Compute standard deviations of features in the batch, 0 for what never varies.

        Rows with ignored labels only, and those of samples of weight 0, do not count.
        """
        weights = self._weights_of(rows)
        counts = self.tail.loss.counting_rows(self.tail.relevant, len(features))
        if counts is not None:
            each = counts.to(rows).repeat_interleave(len(rows) // len(counts))
            weights = each if weights is None else weights * each
        if weights is None:
            variance = rows.var(dim=0, correction=0)
        else:
            shares = weights / or_one(weights.sum())
            mean = shares @ rows
            variance = shares @ (rows - mean).square()
            rows = torch.where(weights[:, None] > 0, rows, mean)
        low, high = rows.detach().aminmax(dim=0)
        moves = varies(low, high, torch.finfo(rows.dtype).eps)
        spread: Tensor = safe_root(variance) * moves
        return spread

    def _weights_of(self, rows: Tensor) -> Tensor | None:
        """Return the weights of rows of features: those of the samples, for each position."""
        if self.weights is None:
            return None
        return self.weights.repeat_interleave(len(rows) // len(self.weights))


def _weighted(weights: Tensor | None, values: Tensor) -> Tensor:
    """Sum the samples' values with their weights, if they have any."""
    return values.sum() if weights is None else weights @ values


def _sum(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """Sum numbers; zero without any."""
    if len(parts) == 1:  # each small operation is noticeable in a training step
        return parts[0]
    return torch.stack(list(parts)).sum() if parts else full_precision(like).new_zeros(())
