r"""The relative flatness of a training batch, from the training step's own forward pass.

For every layer there are the three ways of `measures._flatness.layer_curvature`, each with its
graph:

closed form
    Where the layer's output is what the criterion takes. Exact.
gradients
    Where the network behind is piecewise linear, with Jacobian ``J``, and the table has a root
    of the curvature of the loss in its output, ``C = R R^T``: with random signs ``s``, squared
    slopes along random changes of the layer, given the gradients ``J^T R s``. One backward
    pass for all layers together. Batch norm counts as the linear map that it is for the
    statistics of the batch.
products
    Anything else: the forms of the Hessian along random changes, a second derivative. Changes
    of several layers are independent and have mean zero, so one product along all of them
    together has the sum of the layers' forms as its mean.

For the random changes see `relflat_sk._penalty.random_changes`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from relflat_sk._losses import ClosedForm, Loss, Target, pull_back
from relflat_sk._network import (
    LayerMap,
    LayerRecord,
    check_thrice,
    find_link,
    hands_on,
    is_piecewise_linear,
)
from relflat_sk._numerics import full_precision, inverse_spread, safe_root, varies
from relflat_sk._penalty.random_changes import RandomChanges
from relflat_sk._random import rademacher

__all__ = ["BatchLayer", "batch_flatness"]


@dataclass(slots=True)
class BatchLayer:
    """A layer and what a training step's forward pass sent through it."""

    record: LayerRecord
    map: LayerMap
    penalised: bool

    @property
    def weight(self) -> Tensor:
        """The weight as a matrix, in full precision."""
        return full_precision(self.map.matrix)

    def check(self) -> tuple[Tensor, Tensor]:
        """Return features and output if there is something to train in them.

        Raises
        ------
        ValueError
            Also if the layer was not used exactly once.
        """
        features, output = self.record.check()
        if self.record.node is None:
            raise ValueError(
                f"there is nothing to train up to layer {self.record.name!r}: the forward pass ran "
                "without gradients, or all parameters up to there are frozen. Penalise a later "
                "layer; to measure, use relflat_sk.relative_flatness."
            )
        return features, output


def batch_flatness(
    loss: Loss,
    output: Tensor,
    target: Target,
    layers: Sequence[BatchLayer],
    *,
    probes: int = 1,
    normalize: bool = False,
    sample_weight: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    r"""Compute ``sum kappa / (2 m)`` over layers, of the criterion on a batch.

    Parameters
    ----------
    loss : Loss
    output : Tensor of shape (n, ...)
        What the criterion takes, with its graph.
    target : Target
        From `Loss.read_target`.
    layers : sequence of BatchLayer
        Those that are penalised, and the last one of the network.
    probes : int
        Random changes per sample where there is no closed form.
    normalize : bool
        Measure features in units of their standard deviation in the batch.
    sample_weight : Tensor of shape (n,), optional
    scale : float
        What to multiply the sum by.

    Returns
    -------
    Tensor of shape ()
        In the unit of the loss, with its graph; follows the criterion's reduction.

    Raises
    ------
    ValueError
        If the pass ran without gradients, or a layer was not used exactly once.
    """
    weights = None if sample_weight is None else full_precision(sample_weight.to(output.device))
    relevant = target.relevant
    share = scale * _share(loss, output, relevant, weights)
    totals, probed = [], []
    for layer in layers:
        if not layer.penalised:
            continue
        found = _closed_form(loss, output, relevant, layer)
        if found is None:
            probed.append(layer)
        else:
            totals.append(_exact(layer, *found, weights, share, normalize))
    if probed:
        curved = _base(loss, output, relevant, layers[-1])
        estimate = _estimator(loss, output, target.values, curved, probed, weights, normalize)
        draws = [estimate() for _ in range(probes)]
        totals.append(share * (draws[0] if probes == 1 else torch.stack(draws).mean()))
    return _sum(totals, output)


def _weighted(weights: Tensor | None, values: Tensor) -> Tensor:
    """Sum the samples' values with their weights, if they have any."""
    return values.sum() if weights is None else weights @ values


def _sum(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """Sum numbers; zero without any."""
    if len(parts) == 1:  # each small operation is noticeable in a training step
        return parts[0]
    return torch.stack(list(parts)).sum() if parts else full_precision(like).new_zeros(())


def _share(
    loss: Loss, output: Tensor, relevant: Tensor | None, weights: Tensor | None
) -> float | Tensor:
    """One over the divisor of the criterion's mean; one if it sums."""
    if getattr(loss.criterion, "reduction", "mean") == "sum":
        return 1.0
    each = loss.each_divisor(output, relevant)
    if isinstance(each, Tensor):
        return 1 / _weighted(weights, full_precision(each))
    return 1 / (each * (output.shape[0] if weights is None else weights.sum()))


def _closed_form(
    loss: Loss, output: Tensor, relevant: Tensor | None, layer: BatchLayer
) -> tuple[Tensor, ClosedForm] | None:
    """Features (rows, m) and the curvature in the outputs (rows, d) that belong to them."""
    features, z = layer.check()
    if layer.map.is_flat(features):
        link = find_link(output, layer.record.node)
        closed = loss.closed_form(link, full_precision(z), relevant)
        return None if closed is None else (full_precision(features), closed)
    if not (loss.has_closed_form("identity") and hands_on(output, layer.record.node, z)):
        return None
    tokens = full_precision(z).reshape(-1, z.shape[-1])
    closed = loss.closed_form("identity", tokens, loss.per_token(relevant))
    return None if closed is None else (full_precision(features).reshape(len(tokens), -1), closed)


def _exact(
    layer: BatchLayer,
    features: Tensor,
    closed: ClosedForm,
    weights: Tensor | None,
    share: float | Tensor,
    normalize: bool,
) -> Tensor:
    weight = layer.weight
    if normalize:
        spread = _spread(features)
        weight = weight * spread
        features = features * inverse_spread(spread)
    if weights is not None:  # of samples, of each of their tokens
        weights = weights.repeat_interleave(len(features) // len(weights))
    return closed.total(weight, features, weights, share / (2 * weight.shape[1]))


def _estimator(
    loss: Loss,
    output: Tensor,
    target: Tensor,
    curved: tuple[Tensor, ClosedForm | None],
    layers: Sequence[BatchLayer],
    weights: Tensor | None,
    normalize: bool,
) -> Callable[[], Tensor]:
    """Make what draws estimates of the layers' and samples' weighted ``kappa / (2 m)``."""
    base, curvature = curved
    nodes = [layer.record.node for layer in layers]
    edges = [GradientEdge(layer.record.node, layer.record.output_nr) for layer in layers]
    directions = [_directions(layer, normalize) for layer in layers]
    if curvature is not None and is_piecewise_linear(base, *nodes, by_batch=True):
        return partial(_by_gradients, base, curvature, edges, directions, weights)
    check_thrice(output, *nodes)
    losses = loss.terms(output, target)[0]
    pulled = pull_back([losses.sum()], edges, create_graph=True)
    return partial(_by_products, losses, pulled, edges, directions, weights)


def _directions(layer: BatchLayer, normalize: bool) -> RandomChanges:
    features = full_precision(layer.record.check()[0])
    spread = _spread(layer.map.channels(features)) if normalize else None
    return RandomChanges(layer.map, features, layer.weight, spread)


def _by_gradients(
    base: Tensor,
    curvature: ClosedForm,
    edges: Sequence[GradientEdge],
    directions: Sequence[RandomChanges],
    weights: Tensor | None,
) -> Tensor:
    n, d = base.shape
    signs = rademacher((n, d), full_precision(base))
    if weights is not None:
        signs = signs * weights.sqrt()[:, None]
    cotangent = curvature.root_product(signs).to(base.dtype)
    pulled = pull_back([base], edges, [cotangent], create_graph=True)
    squares = [
        along.slopes(full_precision(g)).square().sum()
        for g, along in zip(pulled, directions, strict=True)
        if g is not None
    ]
    return _sum(squares, base)


def _by_products(
    losses: Tensor,
    pulled: Sequence[Tensor | None],
    edges: Sequence[GradientEdge],
    directions: Sequence[RandomChanges],
    weights: Tensor | None,
) -> Tensor:
    curved = [
        (g, edge, along.changes(g).to(g.dtype))
        for g, edge, along in zip(pulled, edges, directions, strict=True)
        if g is not None and g.requires_grad
    ]
    if not curved:
        return _sum([], losses)
    gradients, where, changes = zip(*curved, strict=True)
    products = pull_back(gradients, where, changes, create_graph=True)
    forms = [
        _weighted(weights, (full_precision(product) * full_precision(dz)).flatten(1).sum(dim=1))
        for product, dz in zip(products, changes, strict=True)
        if product is not None
    ]
    return _sum(forms, losses)


def _base(
    loss: Loss, output: Tensor, relevant: Tensor | None, last: BatchLayer
) -> tuple[Tensor, ClosedForm | None]:
    """Find where the table's curvature applies: the output, or the logits before a softmax."""
    base, applies = output, "identity"
    if not loss.has_closed_form("identity") and last.record.calls == 1:
        base, link = last.record.check()[1], find_link(output, last.record.node)
        applies = link or ""
    if base.ndim > 2 or (base.ndim == 1 and not loss.acts_on_each_output):
        return base, None
    base = base.reshape(len(base), -1)
    return base, loss.closed_form(applies, full_precision(base), relevant)


def _spread(rows: Tensor) -> Tensor:
    """Compute standard deviations of features in the batch, 0 for what never varies: (c,)."""
    variance = rows.var(dim=0, correction=0)
    low, high = rows.detach().aminmax(dim=0)
    moves = varies(low, high, torch.finfo(rows.dtype).eps)
    return safe_root(variance) * moves
