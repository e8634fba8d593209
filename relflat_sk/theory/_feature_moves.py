r"""Move the features that a layer receives, and compute how much the loss rises.

A network is split at one layer, ``f(x) = psi(phi(x))``. The features ``phi(x)`` are all numbers
that the layer receives for one sample, as one vector: of a convolution, the flattened image.

=============  ============  ==============================================================
name           shape         meaning
=============  ============  ==============================================================
``features``   ``(n, m)``    ``phi(x_i)``, flattened
``direction``  ``(n, m)``    the move of the features for ``delta = 1``: ``A phi(x_i)``
``rises``      ``(k, n)``    rise of each sample's loss, for each of k draws
=============  ============  ==============================================================

Directions come from a scheme, see `relflat_sk.theory._directions`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from relflat_sk._checks import check_number
from relflat_sk._losses import LINKS
from relflat_sk._models import DataOptions, name_layer, to_network
from relflat_sk._network import (
    Batch,
    Layer,
    LayerRecord,
    Network,
    Recorder,
    ReplacedForwards,
    borrowed,
    find_link,
    layer_input,
    layer_map,
    outcome_of,
    record_tail,
    sample_weight,
    weight_layers,
)
from relflat_sk.measures import find_measured_layer
from relflat_sk.theory._directions import Scheme

# from arrays of moved features, (n, m), and of labels before to labels after the move, as the
# criterion takes them
Relabel = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Site:
    """A layer of a network whose features are moved."""

    network: Network
    name: str
    shape: torch.Size

    @property
    def size(self) -> int:
        """Number m of features of one sample."""
        return self.shape.numel()

    @property
    def layer(self) -> Any:
        """The layer's module."""
        return self.network.module.get_submodule(self.name)

    @cached_property
    def n_samples(self) -> int:
        """Number n of labelled samples, counted in one pass over the data without the network."""
        return sum(len(_labels(batch)) for batch in self.network.batches())


@dataclass(frozen=True)
class Moved:
    """Losses of a batch of n samples, and their rises when the features move.

    Shapes: `losses`, `weights`, `divisors` (n,), `rises` (k, n).
    """

    losses: Tensor
    rises: Tensor
    weights: Tensor
    divisors: Tensor


def find_site(model: Any, X: Any, y: Any, layer: Layer, options: DataOptions) -> Site:
    """Find the network in a model and the layer whose features are moved, by running one batch."""
    network = to_network(model, X, y, options)
    batch = next(network.batches())
    _labels(batch)
    shapes: dict[str, torch.Size] = {}

    def keep_shape(record: LayerRecord, args: Any, kwargs: Any, output: Any) -> Any:
        shapes[record.name] = layer_input(args, kwargs).shape[1:]
        return output

    first = replace(network, batches=lambda: iter([batch]))
    with borrowed(network.module), Recorder(weight_layers(network.module), keep_shape):
        name = find_measured_layer(first, name_layer(model, layer))
    return Site(network, name, shapes[name])


def check_delta(delta: Any) -> float:
    """Refuse a delta that is not a finite positive number."""
    check_number("delta", delta, reason="it is how far features move, as a share of their norm")
    return float(delta)


def _labels(batch: Batch) -> Tensor:
    """Return the labels of a batch, which a loss needs."""
    if batch.y is None:
        raise ValueError("y is needed to compute a loss. Pass y.")
    return batch.y


def mean_rises(
    site: Site, scheme: Scheme, delta: float, *, relabel: Relabel | None = None
) -> Tensor:
    """Compute the rise of the mean loss for each of k draws. Shapes: returns (k,)."""
    total, divisor = torch.zeros(()), 0.0
    with borrowed(site.network.module):
        for moved in move_features(site, scheme, delta, relabel=relabel):
            total = total + (moved.rises @ moved.weights).cpu()
            divisor += float(moved.divisors @ moved.weights)
    return total / divisor


def move_features(
    site: Site,
    scheme: Scheme,
    delta: float,
    *,
    each: bool = False,
    relabel: Relabel | None = None,
) -> Iterator[Moved]:
    """Move the features of all samples, batch by batch; to be used within `borrowed`."""
    for batch in site.network.batches():
        with torch.no_grad():
            features, run = split_at(site, batch)
            losses, divisors = losses_of(site.network, batch, run(torch.zeros_like(features)), each)
            rises = []
            for draw in scheme.directions(features):
                moved = []
                for direction in draw:
                    at = batch
                    if relabel is not None:
                        at = _relabelled(batch, features + delta * direction, relabel)
                    after, parts = losses_of(site.network, at, run(delta * direction), each)
                    if relabel is not None and not torch.equal(parts, divisors):
                        raise ValueError(
                            "the labels of moved features have other class weights than the "
                            "labels, or are ignored where those are not, so that the mean losses "
                            "before and after the move are means over other samples. Use a "
                            "criterion without weight and ignore_index."
                        )
                    moved.append(after)
                rises.append((torch.stack(moved) - losses).mean(dim=0))
            weights = sample_weight(batch, len(losses), losses.device)
        yield Moved(losses, torch.stack(rises), weights, divisors)


def _relabelled(batch: Batch, moved: Tensor, relabel: Relabel) -> Batch:
    """Return the batch with the labels of its moved features."""
    before = _labels(batch)
    found = np.asarray(relabel(moved.cpu().numpy(), before.cpu().numpy()))
    labels = torch.as_tensor(found, device=before.device)
    if labels.shape != before.shape:
        raise ValueError(
            f"the labels of moved features must have the shape of the labels, {tuple(before.shape)}"
            f", got {tuple(labels.shape)}."
        )
    return replace(batch, y=labels.to(before.dtype))


def split_at(site: Site, batch: Batch) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Split the network at a layer, for one batch; to be used within `borrowed`.

    Shapes: returns features (n, m).
    """
    with torch.no_grad(), record_tail(site.network.module, site.name) as recorder:
        output = site.network(batch.x)
    features, z = recorder[site.name].check()
    link = find_link(output, recorder[site.name].node)
    flat = features.flatten(1).double()
    if link is None or z.ndim != 2:
        return flat, lambda move: _run_with(site, batch.x, move)
    # A link maps the layer's output to the network's. So the layers before need not run again, and
    # float64 resolves the rise for small deltas.
    weight, bias = layer_map(site.layer).weight.double(), site.layer.bias
    bias = None if bias is None else bias.detach().double()
    apply_link, shape = LINKS[link], output.shape
    return flat, lambda move: apply_link(F.linear(flat + move, weight, bias)).reshape(shape)


def _run_with(site: Site, x: Any, move: Tensor) -> Tensor:
    """Run the network with moved inputs of the layer."""
    forward = site.layer.forward

    def run_moved(*args: Any, **kwargs: Any) -> Tensor:
        features = layer_input(args, kwargs)
        others = {name: value for name, value in kwargs.items() if value is not features}
        moved = features + move.reshape(features.shape).to(features.dtype)
        output: Tensor = forward(moved, *args[1:], **others)
        return output

    with ReplacedForwards([(site.layer, run_moved)]):
        return site.network(x)


def losses_of(
    network: Network, batch: Batch, output: Tensor, each: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute losses and divisors of a batch's samples, see `relflat_sk._losses.Loss.terms`.

    Shapes: returns (n,).
    """
    outcome = outcome_of(network, batch, output)
    losses, divisors = outcome.loss.terms(
        outcome.output, outcome.target, each=each or outcome.weighted
    )
    return losses.double(), divisors.double()
