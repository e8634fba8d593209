"""Checks of layers on a first batch: that they compute ``W x + b``, and that rows are samples."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from relflat_sk._network.graph import depends_on, find_link
from relflat_sk._network.layer_record import LayerRecord

__all__ = ["check_linear", "check_rows", "few_rows"]

# multiplications by which it is checked what a layer computes
_CHECKED = 2**24
_FEW = 8

# pulls a vector of the output's shape back to layers, see `relflat_sk._losses.pull_back`
Pull = Callable[[Sequence[Tensor], Sequence[Any], Sequence[Tensor]], Sequence[Tensor | None]]


def few_rows(record: LayerRecord, features: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Select inputs and outputs of a layer that suffice for `check_linear`.

    Shapes: returns (k, ...).
    """
    layer = record.map
    if layer.channels_last:
        features, z = (array.reshape(-1, array.shape[-1]) for array in (features, z))
    few = max(1, min(_FEW, _CHECKED // (layer.n_inputs * layer.n_outputs * layer.n_offsets)))
    return features[:few].detach(), z[:few].detach()


def check_linear(record: LayerRecord, features: Tensor, z: Tensor) -> None:
    """Refuse a layer that does not compute ``W x + b`` with its weight.

    Shapes: `features`, `z` (k, ...).
    """
    layer, bias = record.map, getattr(record.layer, "bias", None)
    with torch.no_grad():
        rows = layer.apply(features, layer.weight.to(features.dtype))
        expected = rows if bias is None else rows + bias[:, None]
        error = (layer.to_rows(z) - expected).abs().max()
        scale = expected.abs().max()
    if not bool(error <= 0.01 * scale) and bool(torch.isfinite(scale)):
        raise ValueError(
            f"layer {record.name!r} does not compute W x + b with its own weight (a subclass "
            "with another forward?), so the curvature in its weight is not that of a linear "
            "layer. Measure another layer."
        )


def check_rows(
    output: Tensor, records: Sequence[LayerRecord], pull: Pull, *, in_order: bool
) -> None:
    """Refuse layers whose rows are no samples, and those that the output does not depend on.

    The curvature at a layer is computed for all samples together, as if each row of the network's
    output depended on one row of the layer's. Backward passes show whether some rows do.
    """
    others = [record for record in records if find_link(output, record.node) is None]
    for record in others:
        if not depends_on(output, record.node):
            raise ValueError(
                f"the criterion does not depend on the output of layer {record.name!r}, or not in "
                "a way that gradients follow: the network returns it beside its first output, for "
                "example. Name another layer."
            )
    for record in (_out_of_order if in_order else _mixed)(output, others, pull):
        raise ValueError(
            f"rows of the network's output, of shape {tuple(output.shape)}, depend on other rows "
            f"of what layer {record.name!r} puts out, of shape {tuple(record.check()[1].shape)}. "
            "Rows must be samples, in the order of the data, that do not depend on each other. "
            "Use batch_first=True, for example, or name another layer."
        )


def _out_of_order(
    output: Tensor, records: Sequence[LayerRecord], pull: Pull
) -> Iterator[LayerRecord]:
    """Find layers of which other rows than every second one are used for every second sample."""
    n = len(output)
    for size in {len(record.check()[1]) for record in records}:
        same = [record for record in records if len(record.check()[1]) == size]
        sample = torch.arange(n, device=output.device) * size // n
        used = _used(output, same, pull, sample % 2 == 0)
        yield from (
            record
            for record, rows in zip(same, used, strict=True)
            if n % size or bool(rows[1::2].any())
        )


def _mixed(output: Tensor, records: Sequence[LayerRecord], pull: Pull) -> Iterator[LayerRecord]:
    """Find layers of which several rows are used for the first row, or one in the middle."""
    numbers = torch.arange(len(output), device=output.device)
    for row in {0, len(output) // 2}:
        used = _used(output, records, pull, numbers == row)
        yield from (r for r, rows in zip(records, used, strict=True) if int(rows.sum()) > 1)


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
        rows.new_zeros(0) if slopes is None else slopes.flatten(1).nan_to_num(nan=0.0).any(dim=1)
        for slopes in pull([output], edges, [vector])
    ]
