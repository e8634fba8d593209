r"""The relative flatness of a training batch, from the training step's own forward pass.

The curvature at each layer is known in one of the four ways of `relflat_sk._network.tail`. Each
of them gives a term of the penalty with its graph:

closed form
    Exact.
many classes
    Exact. The sums over the classes, and those of the gradient, run over chunks of them.
gradients
    With random signs ``s`` and the gradients ``J^T R s`` in the layers' outputs, the squared
    slopes along random changes of the layers. One backward pass for all layers together. Batch
    norm counts as the linear map that it is for the statistics of the batch.
products
    Forms of the Hessian along random changes, a second derivative. Changes of several layers are
    independent and have mean zero, so one product along all of them together has the sum of the
    layers' forms as its mean.

For the random changes see `relflat_sk._penalty.random_changes`.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from relflat_sk._losses import ClosedForm, Head, Loss, ManyClasses, Target
from relflat_sk._network import (
    ExplicitLayers,
    LayerRecord,
    Tail,
    check_thrice,
    choose_curvatures,
)
from relflat_sk._numerics import full_precision, inverse_spread, or_one, safe_root, varies
from relflat_sk._penalty.random_changes import RandomChanges
from relflat_sk._random import rademacher

__all__ = ["batch_flatness"]


def batch_flatness(  # noqa: PLR0913
    loss: Loss,
    output: Tensor,
    target: Target,
    records: Sequence[LayerRecord],
    penalised: Collection[str],
    explicit: ExplicitLayers,
    *,
    probes: int = 1,
    normalize: bool = False,
    sample_weight: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    r"""Compute ``sum kappa / (2 m)`` over layers, of the criterion on a batch.

    Shapes: `sample_weight` (n,).
    """
    weights = None if sample_weight is None else full_precision(sample_weight.to(output.device))
    layers = [record for record in records if record.name in penalised]
    if not layers:
        return _sum([], output)
    for record in layers:
        _check_trainable(record)
    share = scale * _share(loss, output, target.relevant, weights)
    tail = Tail(loss, output, target, records[-1], full_precision)
    # in a network that is piecewise linear behind some layers only, two ways would cost more
    terms = choose_curvatures(
        tail, layers, _Terms(tail, explicit, weights, normalize), together=True
    )
    return _sum([term.total(share, probes) for term in terms], output)


def _check_trainable(record: LayerRecord) -> None:
    """Refuse a layer that was not called once, or up to which there is nothing to train."""
    record.check()
    if record.node is None:
        raise ValueError(
            f"there is nothing to train up to layer {record.name!r}: the forward pass ran "
            "without gradients, or all parameters up to there are frozen. Penalise a later "
            "layer; to measure, use relflat_sk.relative_flatness."
        )


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


class _Term(Protocol):
    """The penalty at some layers."""

    def total(self, share: float | Tensor, probes: int) -> Tensor:
        """Return the sum of ``kappa / (2 m)`` over the layers, each sample's times `share`."""


@dataclass(slots=True)
class _Terms:
    """Makes the terms of the penalty, for `choose_curvatures`."""

    tail: Tail
    explicit: ExplicitLayers
    weights: Tensor | None
    normalize: bool

    def closed_form(self, record: LayerRecord, features: Tensor, curvature: ClosedForm) -> _Term:
        """Make the term of one layer with a closed form."""
        features, weight = full_precision(features), _weight(record)
        weights = self._weights_of(features)
        if self.normalize:
            spread = _spread(features, weights)
            weight = weight * spread
            features = features * inverse_spread(spread)
        return _ExactTerm(curvature, weight, features, weights)

    def many_classes(self, record: LayerRecord, features: Tensor, curvature: ManyClasses) -> _Term:
        """Make the term of one layer that puts out the logits of very many classes."""
        features, spread = full_precision(features), None
        weights = self._weights_of(features)
        if self.normalize:
            spread = _spread(features, weights)
            features = features * inverse_spread(spread)
        weight = record.map.matrix
        return _ManyClassesTerm(curvature, weight, spread, features, weights, record.head)

    def gradients(
        self, records: Sequence[LayerRecord], base: Tensor, curvature: ClosedForm
    ) -> _Term:
        """Make the term of the layers behind which the network is piecewise linear."""
        return _GradientTerm(base, curvature, *self._probed(records), self.weights, self.explicit)

    def products(self, records: Sequence[LayerRecord]) -> _Term:
        """Make the term of the other layers."""
        tail = self.tail
        assert tail.target is not None
        check_thrice(tail.output, *(record.node for record in records))
        edges, changes = self._probed(records)
        losses = tail.loss.terms(tail.output, tail.target.values)[0]
        gradients = self.explicit.pull_back([losses.sum()], edges, linear=False)
        return _ProductTerm(losses, gradients, edges, changes, self.weights, self.explicit)

    def _probed(
        self, records: Sequence[LayerRecord]
    ) -> tuple[list[GradientEdge], list[RandomChanges]]:
        """Return where gradients are taken, and the random changes of the layers."""
        edges = [GradientEdge(record.node, record.output_nr) for record in records]
        return edges, [self._changes(record) for record in records]

    def _changes(self, record: LayerRecord) -> RandomChanges:
        layer, features = record.map, full_precision(record.check()[0])
        spread = None
        if self.normalize:
            rows = layer.channels(features)
            spread = _spread(rows, self._weights_of(rows))
        return RandomChanges(layer, features, full_precision(layer.matrix), spread)

    def _weights_of(self, rows: Tensor) -> Tensor | None:
        """Return the weights of rows of features: those of the samples, for each position."""
        if self.weights is None:
            return None
        return self.weights.repeat_interleave(len(rows) // len(self.weights))


@dataclass(slots=True)
class _ExactTerm:
    """The penalty at a layer whose curvature has a closed form."""

    curvature: ClosedForm
    weight: Tensor
    features: Tensor
    weights: Tensor | None

    def total(self, share: float | Tensor, probes: int) -> Tensor:
        """Return ``kappa / (2 m)``."""
        each = share / (2 * self.weight.shape[1])
        return self.curvature.total(self.weight, self.features, self.weights, each)


@dataclass(slots=True)
class _ManyClassesTerm:
    """The penalty at a layer with very many classes, whose weight is never copied."""

    curvature: ManyClasses
    weight: Tensor
    spread: Tensor | None
    features: Tensor
    weights: Tensor | None
    head: Head | None

    def total(self, share: float | Tensor, probes: int) -> Tensor:
        """Return ``kappa / (2 m)``."""
        each = share / (2 * self.weight.shape[1])
        return self.curvature.total(
            self.weight, self.features, self.weights, each, self.spread, self.head
        )


class _RandomTerm:
    """The penalty at layers where it is estimated by random changes."""

    __slots__ = ()

    def total(self, share: float | Tensor, probes: int) -> Tensor:
        """Return the mean of some estimates."""
        if probes == 1:
            return share * self.draw()
        return share * torch.stack([self.draw() for _ in range(probes)]).mean()

    def draw(self) -> Tensor:
        """Draw an estimate of the sum over the layers and samples."""
        raise NotImplementedError


@dataclass(slots=True)
class _GradientTerm(_RandomTerm):
    """The penalty at layers behind which the network is piecewise linear."""

    base: Tensor
    curvature: ClosedForm
    edges: Sequence[GradientEdge]
    changes: Sequence[RandomChanges]
    weights: Tensor | None
    explicit: ExplicitLayers

    def draw(self) -> Tensor:
        """Draw squared slopes along random changes."""
        signs = rademacher(self.base.shape, full_precision(self.base))
        if self.weights is not None:
            signs = signs * self.weights.sqrt()[:, None]
        cotangent = self.curvature.root_product(signs).to(self.base.dtype)
        pulled = self.explicit.pull_back([self.base], self.edges, [cotangent], linear=True)
        squares = [
            changes.slopes(full_precision(gradient)).square().sum()
            for gradient, changes in zip(pulled, self.changes, strict=True)
            if gradient is not None
        ]
        return _sum(squares, self.base)


@dataclass(slots=True)
class _ProductTerm(_RandomTerm):
    """The penalty at layers whose curvature is known by its products with vectors."""

    losses: Tensor
    gradients: Sequence[Tensor | None]
    edges: Sequence[GradientEdge]
    changes: Sequence[RandomChanges]
    weights: Tensor | None
    explicit: ExplicitLayers

    def draw(self) -> Tensor:
        """Draw forms of the Hessian along random changes."""
        curved = [
            (gradient, edge, changes.changes(gradient).to(gradient.dtype))
            for gradient, edge, changes in zip(
                self.gradients, self.edges, self.changes, strict=True
            )
            if gradient is not None and gradient.requires_grad
        ]
        if not curved:
            return _sum([], self.losses)
        gradients, edges, moves = zip(*curved, strict=True)
        products = self.explicit.pull_back(gradients, edges, moves, linear=False)
        forms = [
            _weighted(
                self.weights, (full_precision(product) * full_precision(dz)).flatten(1).sum(dim=1)
            )
            for product, dz in zip(products, moves, strict=True)
            if product is not None
        ]
        return _sum(forms, self.losses)


def _weight(record: LayerRecord) -> Tensor:
    """Return a layer's weight as a matrix, in full precision."""
    return full_precision(record.map.matrix)


def _weighted(weights: Tensor | None, values: Tensor) -> Tensor:
    """Sum the samples' values with their weights, if they have any."""
    return values.sum() if weights is None else weights @ values


def _sum(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """Sum numbers; zero without any."""
    if len(parts) == 1:  # each small operation is noticeable in a training step
        return parts[0]
    return torch.stack(list(parts)).sum() if parts else full_precision(like).new_zeros(())


def _spread(rows: Tensor, weights: Tensor | None) -> Tensor:
    """Compute standard deviations of features in the batch, 0 for what never varies: (c,)."""
    if weights is None:
        variance = rows.var(dim=0, correction=0)
    else:
        shares = weights / or_one(weights.sum())
        mean = shares @ rows
        variance = shares @ (rows - mean).square()
        # samples of weight 0 do not count
        rows = torch.where(weights[:, None] > 0, rows, mean)
    low, high = rows.detach().aminmax(dim=0)
    moves = varies(low, high, torch.finfo(rows.dtype).eps)
    return safe_root(variance) * moves
