"""The network's forward pass on one batch: its losses, and the curvature at recorded layers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from relflat_sk._losses import ClosedForm, Loss, ManyClasses, Target, warn_of_ending
from relflat_sk._network import (
    Batch,
    LayerRecord,
    Network,
    Tail,
    choose_curvatures,
    find_ending,
    find_link,
    layer_map,
    sample_weight,
)
from relflat_sk._numerics import full_precision
from relflat_sk.measures._flatness.layer_curvature import (
    ByClosedForm,
    ByGradients,
    ByProducts,
    LayerCurvature,
)
from relflat_sk.measures._flatness.layer_pass import (
    ClosedFormLayerPass,
    LayerPass,
    ManyClassesLayerPass,
)

__all__ = ["ForwardPass", "make_forward_pass"]


@dataclass(frozen=True)
class ForwardPass:
    """The forward pass on one batch of n samples. Shapes: `sample_weight` (n,)."""

    layers: dict[str, LayerPass]
    curvatures: list[LayerCurvature]
    sample_weight: Tensor
    divisor: float | Tensor
    loss: Tensor
    output_shape: torch.Size
    link: str | None
    has_labels: bool

    def __len__(self) -> int:
        return len(self.sample_weight)

    def row_weights(self, layer: LayerPass) -> Tensor:
        """Return the weights of the samples, or of the tokens if those are a layer's rows.

        Shapes: returns (n,).
        """
        repeats = len(layer.features) // len(self)
        # each small operation is a launch on a GPU
        return self.sample_weight.repeat_interleave(repeats) if repeats > 1 else self.sample_weight


def make_forward_pass(
    network: Network, batch: Batch, output: Tensor, records: Sequence[LayerRecord]
) -> ForwardPass:
    """Compute the losses of a batch, and choose how curvatures are computed."""
    for record in records:
        _check_samples(record, output)
    with torch.enable_grad():
        output = full_precision(network.loss.classes_second(output, batch.y))
    loss = network.loss.to(output.device, output.dtype)
    target = _read_target(loss, output, batch)
    link = find_link(output, records[-1].node)
    warn_of_ending(loss.criterion, find_ending(output))
    if target is None and loss.needs_target:
        raise _labels_missing(loss, records[0].name)
    if target is not None:
        network.check_criterion(output, target.values)
    weighted = batch.weight is not None
    losses = _losses(loss, output, target, each=weighted)
    tail = Tail(loss, output, target, records[-1], _precise)
    curvatures = choose_curvatures(tail, records, _Ways(tail, losses))
    passes = {name: layer for one in curvatures for name, layer in one.layers.items()}
    weights = sample_weight(batch, len(output), output.device)
    each = loss.each_divisor(output, tail.relevant)
    return ForwardPass(
        layers={record.name: passes[record.name] for record in records},
        curvatures=curvatures,
        sample_weight=weights,
        divisor=_sum(each.detach(), weights, weighted=weighted)
        if isinstance(each, Tensor)
        else each * (weights.sum() if weighted else len(weights)),
        loss=_sum(losses.detach(), weights, weighted=weighted),
        output_shape=output.shape[1:],
        link=link,
        has_labels=target is not None,
    )


def _precise(z: Tensor) -> Tensor:
    """Return outputs in float64, where probabilities close to one keep their distance from it."""
    return z.detach().double()


def _read_target(loss: Loss, output: Tensor, batch: Batch) -> Target | None:
    """Check the labels of a batch, if it has any."""
    return None if batch.y is None else loss.read_target(output, batch.y)


def _losses(loss: Loss, output: Tensor, target: Target | None, *, each: bool) -> Tensor:
    """Compute the losses of the samples, nan without labels."""
    if target is None:
        return output.new_full((len(output),), torch.nan)
    with torch.enable_grad():
        return loss.losses(output, target.values, each=each)


def _sum(values: Tensor, weights: Tensor, *, weighted: bool) -> Tensor:
    """Sum numbers of the samples in float64, in one operation if they have no weights."""
    return values.double() @ weights if weighted else values.sum(dtype=weights.dtype)


def _check_samples(record: LayerRecord, output: Tensor) -> None:
    """Refuse a network that does not give one output for each row of a layer."""
    n = len(record.check()[1])
    if len(output) != n:
        raise ValueError(
            f"the network turned {n} rows at layer {record.name!r} into outputs of shape "
            f"{tuple(output.shape)}; expected one output for each sample."
        )


@dataclass(frozen=True)
class _Ways:
    """Makes the curvatures at recorded layers, for `choose_curvatures`."""

    tail: Tail
    losses: Tensor

    def closed_form(
        self, record: LayerRecord, features: Tensor, curvature: ClosedForm
    ) -> LayerCurvature:
        """Make the curvature of one layer with a closed form."""
        return self._by_closed_form(ClosedFormLayerPass, record, features, curvature)

    def many_classes(
        self, record: LayerRecord, features: Tensor, curvature: ManyClasses
    ) -> LayerCurvature:
        """Make the curvature of one layer with very many classes."""
        return self._by_closed_form(ManyClassesLayerPass, record, features, curvature)

    def gradients(
        self, records: Sequence[LayerRecord], base: Tensor, curvature: ClosedForm
    ) -> LayerCurvature:
        """Make the curvature of the layers behind which the network is piecewise linear."""
        return ByGradients(self._layers(records), base, curvature)

    def products(self, records: Sequence[LayerRecord]) -> LayerCurvature:
        """Make the curvature of all other layers."""
        return ByProducts(self._layers(records))

    def _by_closed_form(
        self,
        kind: type[ClosedFormLayerPass],
        record: LayerRecord,
        features: Tensor,
        curvature: ClosedForm,
    ) -> LayerCurvature:
        assert record.offset is not None
        as_map = layer_map(record.layer)
        return ByClosedForm(
            kind(record.name, as_map, features, record.offset, self.losses, curvature)
        )

    def _layers(self, records: Sequence[LayerRecord]) -> dict[str, LayerPass]:
        """Make layers without a closed form, for which labels are needed."""
        if self.tail.target is None:
            raise _labels_missing(self.tail.loss, records[0].name)
        layers = {}
        for record in records:
            assert record.offset is not None
            features, _ = record.check()
            layers[record.name] = LayerPass(
                record.name, layer_map(record.layer), features, record.offset, self.losses
            )
        return layers


def _labels_missing(loss: Loss, layer: str) -> ValueError:
    """Return the error for missing labels."""
    return ValueError(
        f"y is needed: the curvature of {type(loss.criterion).__name__} at layer {layer!r} "
        "depends on the labels here. Pass y."
    )
