r"""The relative flatness of a training batch, from the training step's own forward pass.

For every layer there are the three ways of `relflat_sk.views`, each with its graph:

closed form
    Where the layer's output is what the criterion takes. Exact.
tangents
    Where the network behind is piecewise linear, with Jacobian ``J``, and the table has the
    curvature ``C`` of the loss in its output: the forms of ``C`` along ``J dz`` for a random
    change ``dz`` of the layer's output, see `relflat_sk.directions`. Batch norm counts as the
    linear map that it is for the statistics of the batch.
products
    Anything else: the forms of the Hessian along ``dz`` itself, a second derivative.

Random changes of several layers are independent of each other and have mean zero, so one
tangent or product along all of them together has the sum of the layers' forms as its mean.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from relflat_sk.curvature import ClosedForm, pull_back, summed_forms
from relflat_sk.directions import draw_change
from relflat_sk.layer_maps import LayerMap
from relflat_sk.layers import Tap, check_thrice, find_link, hands_on, is_piecewise_linear
from relflat_sk.losses import Loss
from relflat_sk.numerics import full_precision, inverse_spread, varies

__all__ = ["BatchLayer", "batch_flatness"]

# from changes of the layers' outputs, one array for each, to one number per sample
FormsAlong = Callable[[Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class BatchLayer:
    """A layer and what a training step's forward pass sent through it."""

    name: str
    map: LayerMap
    tap: Tap

    @property
    def weight(self) -> Tensor:
        """The weight as a matrix, in full precision."""
        return full_precision(self.map.matrix)

    def check(self) -> None:
        """Refuse what was computed without gradients, and what nothing is to be trained in.

        Raises
        ------
        ValueError
        """
        self.tap.check(self.name)
        if self.tap.edge is None:
            raise ValueError(
                f"there is nothing to train up to layer {self.name!r}: the forward pass ran "
                "without gradients, or all parameters up to there are frozen. Penalise a later "
                "layer; to measure, use relflat_sk.relative_flatness."
            )


def batch_flatness(
    loss: Loss,
    output: Tensor,
    target: Tensor,
    layers: Mapping[str, BatchLayer],
    names: Sequence[str],
    *,
    probes: int = 1,
    normalize: bool = False,
    sample_weight: Tensor | None = None,
) -> Tensor:
    r"""Compute ``sum kappa / (2 m)`` over layers, of the criterion on a batch.

    Parameters
    ----------
    loss : Loss
    output : Tensor of shape (n, ...)
        What the criterion takes, with its graph.
    target : Tensor
        As `Loss.check_target` returns it.
    layers : dict of str to BatchLayer
        Those that are penalised, and the last one of the network.
    names : sequence of str
        Those that are penalised.
    probes : int
        Random changes per sample where there is no closed form.
    normalize : bool
        Measure features in units of their standard deviation in the batch.
    sample_weight : Tensor of shape (n,), optional

    Returns
    -------
    Tensor of shape ()
        In the unit of the loss, with its graph; follows the criterion's reduction.

    Raises
    ------
    ValueError
        If the pass ran without gradients, or a layer was not used exactly once.
    """
    weights = output.new_ones(len(output)) if sample_weight is None else sample_weight
    weights = full_precision(weights.to(output.device))
    totals, probed = [], []
    for name in names:
        layer = layers[name]
        layer.check()
        found = _closed_form(loss, output, target, layer)
        if found is None:
            probed.append(layer)
        else:
            totals.append(_exact(layer, *found, weights, normalize))
    if probed:
        last = list(layers.values())[-1]
        forms = _probe(loss, output, target, probed, last, probes, normalize)
        totals.append(weights @ forms)
    total = totals[0] if len(totals) == 1 else torch.stack(totals).sum()
    if getattr(loss.criterion, "reduction", "mean") == "sum":
        return total
    return total / (weights @ _divisors(loss, output, target))


def _divisors(loss: Loss, output: Tensor, target: Tensor) -> Tensor:
    """Return what each sample adds to the divisor of the criterion's mean."""
    if loss.row is None:
        return full_precision(output.new_ones(len(output)))
    return full_precision(loss.row.divisors(loss.criterion, output, target))


def _closed_form(
    loss: Loss, output: Tensor, target: Tensor, layer: BatchLayer
) -> tuple[Tensor, ClosedForm] | None:
    """Features (rows, m) and the curvature in the outputs (rows, d) that belong to them."""
    features, z = layer.tap.check(layer.name)
    if layer.map.is_flat(features):
        link = find_link(output, layer.tap.node)
        closed = loss.closed_form(link, full_precision(z), target)
        return None if closed is None else (full_precision(features), closed)
    if not (loss.has_closed_form("identity") and hands_on(output, layer.tap.node, z)):
        return None
    tokens = full_precision(z).reshape(-1, z.shape[-1])
    closed = loss.closed_form("identity", tokens, loss.per_token(target))
    return None if closed is None else (full_precision(features).reshape(len(tokens), -1), closed)


def _exact(
    layer: BatchLayer, features: Tensor, closed: ClosedForm, weights: Tensor, normalize: bool
) -> Tensor:
    weight = layer.weight
    if normalize:
        spread = _spread(features)
        weight = weight * spread
        features = features * inverse_spread(spread)
    norms = torch.linalg.vecdot(features, features)
    forms = norms * summed_forms(closed, weight)
    each = weights.repeat_interleave(len(forms) // len(weights))
    total: Tensor = (each @ forms) / (2 * weight.shape[1])
    return total


def _probe(
    loss: Loss,
    output: Tensor,
    target: Tensor,
    layers: Sequence[BatchLayer],
    last: BatchLayer,
    probes: int,
    normalize: bool,
) -> Tensor:
    """Sum the samples' ``kappa / (2 m)`` over layers, from random changes: (n,)."""
    edges = [layer.tap.edge for layer in layers]
    base, curvature = _base(loss, output, target, last)
    nodes = [layer.tap.node for layer in layers]
    if curvature is not None and is_piecewise_linear(base, *nodes, by_batch=True):
        forms_along = _by_tangents(base, curvature, edges)
    else:
        check_thrice(output, *nodes)
        forms_along = _by_products(loss.terms(output, target)[0], edges)
    draws = [forms_along([_draw(layer, normalize) for layer in layers]) for _ in range(probes)]
    return draws[0] if probes == 1 else torch.stack(draws).mean(dim=0)


def _by_tangents(base: Tensor, curvature: ClosedForm, edges: Sequence[Any]) -> FormsAlong:
    # a vector-Jacobian product is linear in the vector, and its transpose is the tangent
    cotangent = torch.zeros_like(base, requires_grad=True)
    pulled = pull_back([base], edges, [cotangent], create_graph=True)

    def forms(changes: Sequence[Tensor]) -> Tensor:
        pairs = [(g, dz) for g, dz in zip(pulled, changes, strict=True) if g is not None]
        if not pairs:
            return full_precision(base).new_zeros(len(base))
        gradients, along = zip(*pairs, strict=True)
        (tangent,) = pull_back(gradients, [cotangent], along, create_graph=True)
        assert tangent is not None
        return summed_forms(curvature, full_precision(tangent)[:, :, None])

    return forms


def _by_products(losses: Tensor, edges: Sequence[Any]) -> FormsAlong:
    pulled = pull_back([losses.sum()], edges, create_graph=True)

    def forms(changes: Sequence[Tensor]) -> Tensor:
        curved = [
            (g, edge, dz)
            for g, edge, dz in zip(pulled, edges, changes, strict=True)
            if g is not None and g.requires_grad
        ]
        total = full_precision(losses).new_zeros(len(losses))
        if not curved:
            return total
        gradients, where, along = zip(*curved, strict=True)
        products = pull_back(gradients, where, along, create_graph=True)
        for product, dz in zip(products, along, strict=True):
            if product is not None:
                total = total + (full_precision(product) * full_precision(dz)).flatten(1).sum(dim=1)
        return total

    return forms


def _draw(layer: BatchLayer, normalize: bool) -> Tensor:
    """Draw a change of the layer's output whose form has the mean ``kappa / (2 m)``."""
    features, z = layer.tap.check(layer.name)
    features, weight = full_precision(features), layer.weight
    spread = _spread(layer.map.channels(features)) if normalize else None
    rows = draw_change(layer.map, features, weight, spread) / (2 * weight.shape[1]) ** 0.5
    return layer.map.from_rows(rows.to(z.dtype), z)


def _base(
    loss: Loss, output: Tensor, target: Tensor, last: BatchLayer
) -> tuple[Tensor, ClosedForm | None]:
    """Find where the table's curvature applies: the output, or the logits before a softmax."""
    base, applies = output, "identity"
    if not loss.has_closed_form("identity") and last.tap.calls == 1:
        base, link = last.tap.check(last.name)[1], find_link(output, last.tap.node)
        applies = link or ""
    if base.ndim > 2 or (base.ndim == 1 and not loss.acts_on_each_output):
        return base, None
    base = base.reshape(len(base), -1)
    return base, loss.closed_form(applies, full_precision(base), target)


def _spread(rows: Tensor) -> Tensor:
    """Compute standard deviations of features in the batch, 0 for what never varies: (c,)."""
    variance = rows.var(dim=0, correction=0)
    low, high = rows.detach().aminmax(dim=0)
    moves = varies(low, high, torch.finfo(rows.dtype).eps)
    # a root has no slope at zero
    return variance.where(moves, 1.0).sqrt() * moves
