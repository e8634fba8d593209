r"""Choose how the curvature of the loss in the outputs of layers is computed.

The *tail* of a network is its part behind a layer, up to the loss. Let ``B_i`` be the Hessian of
the loss of sample i in the layer's output. What the tail computed in a forward pass decides which
of three ways to ``B_i`` there are:

closed form
    The layer's output is what the criterion takes, but for a constant factor, or is turned into
    that by one function that the table of losses knows: the table has ``B_i``. The same holds for
    each token of a language model whose last layer puts out the logits, and for each pixel of a
    convolution's, whose kernel has one pixel. For a softmax over thousands of classes it is
    `ManyClasses`, whose sums run over chunks of them.
gradients
    The tail up to the criterion's input is piecewise linear, with Jacobian ``J_i``, and the table
    has the curvature ``R_i R_i^T`` of the loss in that input: then ``B_i = (J_i^T R_i)
    (J_i^T R_i)^T``. A backward pass pulls one vector of each sample back to all layers at once.
products
    Anything else: products ``B_i v_i`` by differentiating twice.

The measures and the penalty both choose here, and refuse layers at which the curvature would not be
that of one weight and single samples.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.modules.dropout import _DropoutNd

from relflat_sk._checks import warn
from relflat_sk._losses.curvature import ClosedForm, Softmax
from relflat_sk._losses.loss import Loss
from relflat_sk._losses.many_classes import MANY, ManyClasses
from relflat_sk._losses.table import Target
from relflat_sk._network.borrowing import changed, requiring_grad
from relflat_sk._network.layers import adapted_layer
from relflat_sk._network.recording import (
    LayerRecord,
    Recorder,
    find_factor,
    find_link,
    find_multiplier,
    graph_alone,
    is_piecewise_linear,
    kind_of,
    nodes_behind,
    normalises_batch,
    only_moves_axes,
)
from relflat_sk._numerics import without_autocast


@dataclass(frozen=True)
class Curvatures:
    """Which of some layers have their curvature in which way."""

    # those that the table of losses knows, with their features (n, m); `ManyClasses` for those that
    # put out the logits of very many classes
    closed: list[tuple[LayerRecord, Tensor, ClosedForm]]
    linear: list[LayerRecord]  # behind which the network is piecewise linear
    base: tuple[Tensor, ClosedForm] | None  # up to where it is, (n, o), and the curvature there
    others: list[LayerRecord]  # for which there are only products


@dataclass(slots=True)
class Tail:
    """The network's output and the loss, behind some layers in one forward pass."""

    loss: Loss
    output: Tensor
    target: Target | None
    last: LayerRecord | None
    precise: Callable[[Tensor], Tensor]

    @property
    def relevant(self) -> Tensor | None:
        """The labels, if curvatures depend on them."""
        return None if self.target is None else self.target.relevant

    def closed_form(self, record: LayerRecord) -> tuple[LayerRecord, Tensor, ClosedForm] | None:
        """Return a layer with its features and curvature, if the table of losses has it."""
        features, z = record.check()
        loss, relevant, factor = self.loss, self.relevant, 1.0
        if z.ndim == 2:
            link = self._link(record)
            if link is None and z.shape == self.output.shape and z.shape[1] < MANY:
                factor = find_factor(self.output, record.node) or 0.0
                link, z = ("identity" if factor else None), self.output
        elif (
            loss.has_closed_form("identity")
            and not record.is_overwritten
            and not loss.weighs_outputs  # along axes that have moved
            and (positions := record.map.by_position(features, z)) is not None
            and only_moves_axes(self.output, record.node, positions[-1])
        ):
            link, relevant = "identity", loss.per_token(relevant)
            layer, features, z = positions
            record = replace(record, position_map=layer)
        else:
            return None
        if not loss.has_closed_form(link):
            return None
        if z.shape[1] >= MANY:
            found = loss.closed_form(link, z, relevant)
            if isinstance(found, Softmax):
                return record, features, ManyClasses(found.z, found.scale)
        curvature = loss.closed_form(link, self.precise(z), relevant)
        if curvature is None:
            return None
        return record, features, curvature if factor == 1 else curvature.times(factor * factor)

    def _link(self, record: LayerRecord) -> str | None:
        """Return the function behind a layer; None where the criterion sees other axes than it."""
        z = None if record.is_overwritten else record.output
        same = self.output.ndim <= 2 and z is not None and len(self.output) == len(z)
        return find_link(self.output, record.node) if same else None

    def base(self) -> tuple[Tensor, ClosedForm] | None:
        """Return where the table's curvature applies, as (n, o), and that curvature."""
        loss, base, link = self.loss, self.output, "identity"
        if not loss.has_closed_form(link):
            if self.last is None or self.last.calls != 1:
                return None
            _, z = self.last.check()
            base = z if self.last.tail_input is None else self.last.tail_input
            link = self._link(self.last) or ""
        if base.ndim > 2 or (base.ndim == 1 and not loss.acts_on_each_output):
            return None
        base = base.reshape(len(base), -1)
        curvature = loss.closed_form(link, self.precise(base), self.relevant)
        return None if curvature is None else (base, curvature)


def choose_curvatures(
    tail: Tail, records: Sequence[LayerRecord], *, together: bool = False
) -> Curvatures:
    """Choose how the curvatures at some layers are computed."""
    closed, others = [], {}
    for record in records:
        found = tail.closed_form(record)
        if found is None:
            others[record.name] = record
        else:
            closed.append(found)
    base = tail.base() if others else None
    linear: set[str] = set()
    if base is not None:
        # a network that is piecewise linear in all outputs together is so in each of them
        if is_piecewise_linear(base[0], *(record.node for record in others.values())):
            linear = set(others)
        elif not together and len(others) > 1:
            linear = {
                n for n, record in others.items() if is_piecewise_linear(base[0], record.node)
            }
    by_gradients = [record for name, record in others.items() if name in linear]
    by_products = [record for name, record in others.items() if name not in linear]
    return Curvatures(closed, by_gradients, base, by_products)


# -- layers at which the curvature would not be that of one weight and single samples -------

# multiplications by which it is checked what a layer computes
_CHECKED = 2**24
_FEW = 8

# pulls a vector of the output's shape back to layers, see `relflat_sk._losses.pull_back`
Pull = Callable[[Sequence[Tensor], Sequence[Any], Sequence[Tensor]], Sequence[Tensor | None]]


def few_rows(record: LayerRecord, features: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Select inputs and outputs of a layer that suffice for `is_linear`."""
    layer = record.map
    if layer.channels_last:
        features, z = (array.reshape(-1, array.shape[-1]) for array in (features, z))
    few = max(1, min(_FEW, _CHECKED // (layer.n_inputs * layer.n_outputs * layer.n_offsets)))
    return features[:few].detach(), z[:few].detach()


def is_linear(record: LayerRecord, features: Tensor, z: Tensor) -> bool:
    """Return whether a layer computes ``W x + b`` with its weight."""
    layer, bias = record.map, record.bias
    with torch.no_grad():
        rows = layer.apply(features, layer.weight.to(features.dtype))
        expected = rows if bias is None else rows + bias[:, None]
        found, scale = layer.to_rows(z), expected.abs().max()
        # an output_size that is given in the call makes another shape
        error = (found - expected).abs().max() if found.shape == expected.shape else torch.inf
    return bool(error <= 0.01 * scale) or not bool(torch.isfinite(scale))


def why_not_linear(record: LayerRecord, features: Tensor, z: Tensor) -> str:
    """Say that a layer does not compute ``W x + b`` with its weight; nothing if it does."""
    if is_linear(record, features, z) or _is_linear_without_noise(record, features):
        return ""
    return (
        f"layer {record.name!r} does not compute W x + b with its own weight (a subclass with "
        "another forward, as of DoRA, or an output_size?). Measure another layer."
    )


def why_no_samples(record: LayerRecord, output: Tensor) -> str:
    """Say that the network does not give one output for each row of a layer; nothing if it does."""
    n = len(record.check()[1])
    if len(output) == n:
        return ""
    return (
        f"the network turned {n} rows at layer {record.name!r} into outputs of shape "
        f"{tuple(output.shape)}; expected one output for each sample."
    )


def _is_linear_without_noise(record: LayerRecord, features: Tensor) -> bool:
    """Return whether a layer computes ``W x + b`` but for dropout in its adapters."""
    # What dropout changes there counts as noise that is added to the layer's output.
    layer, base = record.layer, adapted_layer(record.layer)
    inside = set() if base is None else set(layer.modules()) - set(base.modules())
    dropouts = [part for part in inside if isinstance(part, _DropoutNd) and part.training]
    if not dropouts:
        return False
    with changed(dropouts, "training", False), torch.no_grad(), without_autocast(features):
        features = features.to(record.map.weight)
        return is_linear(record, features, layer.forward(features))


def find_mixed_rows(
    output: Tensor, records: Sequence[LayerRecord], pull: Pull, *, in_order: bool
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Find layers whose rows are no samples, and which rows of the others have had slopes."""
    # The curvature at a layer is computed for all samples together, as if each row of the network's
    # output depended on one row of the layer's. Backward passes show whether some rows do.
    unknown = [record for record in records if find_link(output, record.node) is None]
    behind = nodes_behind(output.grad_fn) if unknown else []
    reasons = {
        record.name: (
            f"the criterion does not depend on the output of layer {record.name!r} in a way that "
            "gradients follow. Name another layer."
        )
        for record in unknown
        if record.node not in behind
    }
    unknown = [record for record in unknown if record.name not in reasons]
    seen, wrong = (_out_of_order if in_order else _mixed)(output, unknown, pull)
    for record in wrong:
        reasons[record.name] = (
            f"rows of the network's output, of shape {tuple(output.shape)}, depend on other rows "
            f"of what layer {record.name!r} puts out, of shape {tuple(record.check()[1].shape)}. "
            "Rows must be samples in order. Use batch_first=True, or name another layer."
        )
        if any(map(normalises_batch, behind)):
            reasons[record.name] = (
                f"behind layer {record.name!r}, batch norm mixes the samples of the batch. Use a "
                "layer with track_running_stats=True, or name a layer behind it."
            )
    return {record.name: rows for record, rows in zip(unknown, seen, strict=True)}, reasons


def warn_of_other_head(
    output: Tensor, last: LayerRecord, module: nn.Module, called: Iterable[nn.Module]
) -> None:
    """Warn if the last layer, which was asked for by its position, is no head."""
    # The graph also shows the weights of other layers that were `called`.
    head = find_multiplier(output, last.node)
    if head is None or any(head is one for layer in called for one in layer.parameters()):
        return
    names = {id(one): name for name, one in module.named_parameters()}
    warn(
        f"layer=-1 is {last.name!r}, the last layer with a weight matrix, but the network "
        f"multiplies its output by the parameter {names.get(id(head), '')!r}, which is no layer "
        "that it calls. If you mean the head, make it an nn.Linear, and call it; if you mean the "
        f"layer before it, name it: {last.name!r}."
    )


# which rows of some layers have had slopes, and the layers whose rows are no samples
Seen = tuple[list[Tensor], list[LayerRecord]]


def _out_of_order(output: Tensor, records: Sequence[LayerRecord], pull: Pull) -> Seen:
    """Find layers of which other rows than every second one are used for every second sample."""
    n = len(output)
    sizes = [len(record.check()[1]) for record in records]
    used: dict[str, Tensor] = {}
    for size in set(sizes):
        same = [record for record, rows in zip(records, sizes, strict=True) if rows == size]
        sample = torch.arange(n, device=output.device) * size // n
        slopes = _used(output, same, pull, sample % 2 == 0)
        used |= {record.name: rows for record, rows in zip(same, slopes, strict=True)}
    wrong = [
        record
        for record, size in zip(records, sizes, strict=True)
        if n % size or bool(used[record.name][1::2].any())
    ]
    return [used[record.name][::2] for record in records], wrong


def _mixed(output: Tensor, records: Sequence[LayerRecord], pull: Pull) -> Seen:
    """Find layers of which several rows are used for one row of the output."""
    # That is the first one, one in the middle, or the one for which most rows seem to be used.
    n = len(output)
    numbers = torch.arange(n, device=output.device)
    seen = _used(output, records, pull, numbers >= 0)
    counts = torch.zeros(n, device=output.device)
    for rows in seen:
        position = torch.arange(len(rows), device=output.device) * n // max(1, len(rows))
        counts.index_add_(0, position, rows.to(counts))
    wrong = []
    for row in {0, n // 2, int(counts.argmax())}:
        used = _used(output, records, pull, numbers == row)
        wrong += [r for r, rows in zip(records, used, strict=True) if int(rows.sum()) > 1]
    return seen, wrong


def _used(output: Tensor, records: Sequence[LayerRecord], pull: Pull, rows: Tensor) -> list[Tensor]:
    """Return which rows of layers some rows of the output depend on."""
    if not records:
        return []
    # slopes of a sum over the classes of a softmax would cancel
    vector = torch.linspace(1, 2, output.numel(), dtype=output.dtype, device=output.device)
    vector = (vector.reshape(len(output), -1) * rows[:, None]).reshape(output.shape)
    edges = [GradientEdge(record.node, record.output_nr) for record in records]
    # a slope of zero times infinity, of another sample, is nan
    return [
        rows.new_zeros(len(record.check()[1]))
        if slopes is None
        else slopes.flatten(1).nan_to_num(nan=0.0).any(dim=1)
        for record, slopes in zip(records, pull([output], edges, [vector]), strict=True)
    ]


# -- uses of a weight outside of the calls of its layer ------------------------------------
# An autoencoder whose decoder is ``F.linear(h, encoder.weight.T)`` calls its encoder once, and no
# other module has the weight. The curvature in the weight is not that of the layer's call then.


def _parameters_of_weight(layer: nn.Module) -> list[nn.Parameter]:
    """List the parameters that a weight is, or is computed from."""
    weight = layer._parameters.get("weight")
    if weight is not None:
        return [weight]
    computed = getattr(layer, "parametrizations", {})
    if "weight" in computed:
        return list(computed["weight"].parameters())
    # hooks of torch compute it before each call: weight_g, weight_v; weight_orig
    named = layer._parameters.items()
    return [one for name, one in named if name.startswith("weight_") and one is not None]


def uses_elsewhere(output: Tensor, record: LayerRecord) -> bool:
    """Return whether a network's output depends on a layer's weight other than by its call."""
    parameters = {id(parameter) for parameter in _parameters_of_weight(record.layer)}
    starts = [value.grad_fn for value in (output, record.features) if value is not None]
    behind = nodes_behind(
        *starts, until=[record.node], enters=lambda step: not kind_of(step).startswith("Embedding")
    )
    # where the gradient in a parameter is added up
    return any(id(getattr(step, "variable", None)) in parameters for step in behind)


def find_uses_elsewhere(run: Callable[[], Tensor], layers: Mapping[str, nn.Module]) -> set[str]:
    """Find the layers, of those called once, whose weights a network uses outside of the call."""
    # A head that is tied to an embedding counts as if it had a copy of the weight to itself.
    weights = [weight for layer in layers.values() for weight in _parameters_of_weight(layer)]
    with requiring_grad(weights), torch.enable_grad(), Recorder(layers) as recorder, graph_alone():
        output = run()
    once = [recorder[name] for name in layers if recorder[name].calls == 1]
    return {record.name for record in once if uses_elsewhere(output, record)}


def why_used_elsewhere(name: str) -> str:
    """Say that the weight of a layer is used outside of the layer's call."""
    return (
        f"the network uses the weight of layer {name!r} outside of the layer's call, as a tied "
        "autoencoder does. Measure another layer; or detach the weight there, if it is only read."
    )


def refuse_layers(reasons: Iterable[str]) -> None:
    """Refuse layers for the first of some reasons, if there is one."""
    for reason in filter(None, reasons):
        raise ValueError(reason)
