r"""The relative flatness of a training batch, from the training step's own forward pass.

For every layer there are the three ways of `relflat_sk.views`, each with its graph:

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

For the random changes see `relflat_sk.directions`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from relflat_sk.curvature import ClosedForm, pull_back, summed_forms
from relflat_sk.directions import Directions, rademacher
from relflat_sk.layer_maps import LayerMap
from relflat_sk.layers import Tap, check_thrice, find_link, hands_on, is_piecewise_linear
from relflat_sk.losses import Loss
from relflat_sk.numerics import full_precision, inverse_spread, safe_root, varies

__all__ = ["BatchLayer", "batch_flatness"]


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
    weights = None if sample_weight is None else full_precision(sample_weight.to(output.device))
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
        estimate = _estimator(loss, output, target, probed, last, weights, normalize)
        draws = [estimate() for _ in range(probes)]
        totals.append(draws[0] if probes == 1 else torch.stack(draws).mean())
    total = _sum(totals, output)
    if getattr(loss.criterion, "reduction", "mean") == "sum":
        return total
    return total / _weighted(weights, _divisors(loss, output, target))


def _weighted(weights: Tensor | None, values: Tensor) -> Tensor:
    """Sum the samples' values with their weights, if they have any."""
    return values.sum() if weights is None else weights @ values


def _sum(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """Sum numbers; zero without any."""
    if len(parts) == 1:  # each small operation is noticeable in a training step
        return parts[0]
    return torch.stack(list(parts)).sum() if parts else full_precision(like).new_zeros(())


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
    layer: BatchLayer, features: Tensor, closed: ClosedForm, weights: Tensor | None, normalize: bool
) -> Tensor:
    weight = layer.weight
    if normalize:
        spread = _spread(features)
        weight = weight * spread
        features = features * inverse_spread(spread)
    norms = torch.linalg.vecdot(features, features)
    forms = norms * summed_forms(closed, weight)
    if weights is not None:  # of samples, of each of their tokens
        weights = weights.repeat_interleave(len(forms) // len(weights))
    return _weighted(weights, forms) / (2 * weight.shape[1])


def _estimator(
    loss: Loss,
    output: Tensor,
    target: Tensor,
    layers: Sequence[BatchLayer],
    last: BatchLayer,
    weights: Tensor | None,
    normalize: bool,
) -> Callable[[], Tensor]:
    """Make what draws estimates of the layers' and samples' weighted ``kappa / (2 m)``."""
    base, curvature = _base(loss, output, target, last)
    nodes = [layer.tap.node for layer in layers]
    edges = [layer.tap.edge for layer in layers]
    directions = [_directions(layer, normalize) for layer in layers]
    if curvature is not None and is_piecewise_linear(base, *nodes, by_batch=True):
        return partial(_by_gradients, base, curvature, edges, directions, weights)
    check_thrice(output, *nodes)
    losses = loss.terms(output, target)[0]
    pulled = pull_back([losses.sum()], edges, create_graph=True)
    return partial(_by_products, losses, pulled, edges, directions, weights)


def _directions(layer: BatchLayer, normalize: bool) -> Directions:
    features = full_precision(layer.tap.check(layer.name)[0])
    spread = _spread(layer.map.channels(features)) if normalize else None
    return Directions(layer.map, features, layer.weight, spread)


def _by_gradients(
    base: Tensor,
    curvature: ClosedForm,
    edges: Sequence[GradientEdge | None],
    directions: Sequence[Directions],
    weights: Tensor | None,
) -> Tensor:
    n, d = base.shape
    signs = rademacher(n, d, full_precision(base))
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
    edges: Sequence[GradientEdge | None],
    directions: Sequence[Directions],
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
    return safe_root(variance) * moves
