"""One pass over the data: what every flatness measure needs from a network.

`observe` streams the samples through the network once and yields, batch by batch, the
features that reach the layer, the curvature of the loss behind it, and the loss. Memory
does not grow with the number of samples.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from relflat_sk.batches import Batch, Batches, cast_inputs, check_finite, count_samples
from relflat_sk.curvature import Curvature, product_curvature
from relflat_sk.layers import (
    Layer,
    Tap,
    call_order,
    check_layer,
    find_layer,
    find_link,
    primary_output,
    tap,
    weight_layers,
)
from relflat_sk.losses import Loss

__all__ = ["Network", "Observation", "borrowed", "mean_loss", "observe", "sample_weight"]


@dataclass(frozen=True)
class Network:
    """A trained network with the loss it is judged by and the data it is judged on.

    Parameters
    ----------
    module : nn.Module
        Holds the layers.
    loss : Loss
    batches : callable
        Starts a pass over the data, see `relflat_sk.batches.make_batches`.
    forward : callable, optional
        Inputs to the criterion's first argument; ``module(x)`` if None.
    """

    module: nn.Module
    loss: Loss
    batches: Batches
    forward: Callable[[Any], Any] | None = None

    @property
    def device(self) -> torch.device:
        """Where the network's parameters are."""
        tensors = (*self.module.parameters(), *self.module.buffers())
        return tensors[0].device if tensors else torch.device("cpu")

    def __call__(self, x: Any) -> Tensor:
        """Run the network on inputs as they come from the data."""
        check_finite(x)
        x = cast_inputs(x, self.module, self.device)
        output = primary_output(self._run(x))
        if _is_one(x) and (output.ndim == 0 or len(output) != 1):
            return output[None]  # a squeeze() in the network took the axis of a last lone sample
        return output

    def _run(self, x: Any) -> Any:
        if self.forward is not None:
            return self.forward(x)
        if isinstance(x, Mapping):
            return self.module(**x)
        if isinstance(x, tuple | list):
            return self.module(*x)
        return self.module(x)


def _is_one(x: Any) -> bool:
    try:
        return count_samples(tuple(x) if isinstance(x, list) else x) == 1
    except AttributeError:  # no array: whatever a user's own loader hands out
        return False


@dataclass(frozen=True)
class Observation:
    """What one batch shows at one layer. All sums are over the batch's n samples."""

    weight: Tensor  # (d, m), float64
    features: Tensor  # (n, m)
    curvature: Curvature  # of the summed loss of each sample, in the layer's output
    closed_form: bool  # whether `curvature` needs no further backward passes
    sample_weight: Tensor  # (n,), float64
    divisor: float  # what the criterion's mean divides this batch's sum by
    loss: float  # summed loss; nan without labels
    output_shape: torch.Size  # of one sample
    link: str | None  # from the layer's output to the network's, see `find_link`

    def weighted_sum(self, per_sample: Tensor) -> float:
        """Sum over samples, in float64."""
        return float(self.sample_weight @ per_sample.double())


def observe(network: Network, layer: Layer) -> Iterator[Observation]:
    """Stream the data through the network and look at one layer.

    To be used within `borrowed`.

    Parameters
    ----------
    network : Network
    layer : int, str or nn.Module
        See `relflat_sk.layers.find_layer`; positions count in forward order.

    Yields
    ------
    Observation
        One for each batch.

    Raises
    ------
    LayerNotFoundError, TypeError, ValueError
        If the layer, the data or the criterion do not fit the network.
    """
    name: str | None = None
    for batch in network.batches():
        if name is None:
            name, output, seen = _first_pass(network, layer, batch)
            _check_linear(network.module, name, seen)
        else:
            output, seen = _forward(network, network.module.get_submodule(name), batch)
        observation = _look(network, name, batch, output, seen)
        del output, seen
        yield observation
        del observation  # nothing of a batch is alive when the next one is run


def _first_pass(network: Network, layer: Layer, batch: Batch) -> tuple[str, Tensor, Tap]:
    """Run the first batch, and find the layer by the order in which layers are called."""
    module = network.module
    registered = list(weight_layers(module))
    if isinstance(layer, int) and not isinstance(layer, bool) and registered:
        # most networks register layers in the order of their calls: a guess, checked below
        name = registered[layer] if -len(registered) <= layer < len(registered) else registered[0]
    else:
        name = find_layer(module, layer)
    with call_order(module) as order:
        output, seen = _forward(network, module.get_submodule(name), batch)
    if isinstance(layer, int):
        found = find_layer(module, layer, order)
        if found != name:  # registered in another order than called: look again
            name = found
            output, seen = _forward(network, module.get_submodule(name), batch)
    return name, output, seen


def _forward(network: Network, layer: nn.Module, batch: Batch) -> tuple[Tensor, Tap]:
    with torch.no_grad(), tap(layer, tail_only=True) as seen:
        return network(batch.x), seen


def _check_linear(module: nn.Module, name: str, seen: Tap) -> None:
    layer = check_layer(module, name)
    features, z = seen.check(name)
    with torch.no_grad():
        expected = nn.functional.linear(features, layer.weight, layer.bias)
        error = (z - expected).abs().max()
        scale = expected.abs().max()
    if not bool(error <= 0.01 * scale) and bool(torch.isfinite(scale)):
        raise ValueError(
            f"layer {name!r} does not compute W x + b with its own weight (a subclass with "
            "another forward, or a hook that changes its output?), so the curvature in its "
            "weight is not that of a linear layer. Measure another layer."
        )


def _look(network: Network, name: str, batch: Batch, output: Tensor, seen: Tap) -> Observation:
    features, z = seen.check(name)
    weight = check_layer(network.module, name).weight.detach().double()
    n = len(z)
    if len(output) != n:
        raise ValueError(
            f"the network turned {n} rows at layer {name!r} into outputs of shape "
            f"{tuple(output.shape)}; expected one output for each sample."
        )
    loss = network.loss.to(output.device, output.dtype)
    target = None
    if batch.y is not None:
        target = loss.check_target(output, batch.y.to(output.device))
    link = find_link(output, seen.node)
    loss.warn_of(link)
    if target is None and (loss.needs_target or not loss.has_closed_form(link)):
        raise ValueError(
            f"y is needed: the curvature of {type(loss.criterion).__name__} at layer {name!r} "
            "depends on the labels here. Pass y."
        )
    # float64 from here on: probabilities close to one keep their distance from one
    exact = loss.closed_form(link, z.detach().double(), target)
    losses, divisors = z.new_full((n,), torch.nan), z.new_ones(n)
    if target is not None:
        with torch.set_grad_enabled(exact is None):
            losses, divisors = loss.terms(output, target)
    elif loss.row is not None:
        divisors = loss.row.divisors(loss.criterion, output, None)
    weights = sample_weight(batch, n, z.device)
    with torch.enable_grad():
        curvature = exact or product_curvature(losses.sum(), z)
    return Observation(
        weight=weight,
        features=features,
        curvature=curvature,
        closed_form=exact is not None,
        sample_weight=weights,
        divisor=float(weights @ divisors.double()),
        loss=float(weights @ losses.detach().double()),
        output_shape=output.shape[1:],
        link=link,
    )


def mean_loss(network: Network) -> float:
    """Mean loss over the data, in evaluation mode; the network is given back as it was.

    Parameters
    ----------
    network : Network

    Returns
    -------
    float
        In the unit of the loss.
    """
    total, divisor = 0.0, 0.0
    with borrowed(network.module), torch.no_grad():
        for batch in network.batches():
            output = network(batch.x)
            loss = network.loss.to(output.device, output.dtype)
            if batch.y is None:
                raise ValueError("y is needed to compute a loss. Pass y.")
            target = loss.check_target(output, batch.y.to(output.device))
            losses, divisors = loss.terms(output, target)
            weight = sample_weight(batch, len(output), output.device)
            total += float(weight @ losses.double())
            divisor += float(weight @ divisors.double())
    return total / divisor


def sample_weight(batch: Batch, n: int, device: torch.device) -> Tensor:
    """Weights of the n samples of a batch, float64: ones where none were given."""
    if batch.weight is None:
        return torch.ones(n, dtype=torch.float64, device=device)
    return batch.weight.to(device)


@contextmanager
def borrowed(module: nn.Module) -> Iterator[None]:
    """Put a network into evaluation mode, and give it back bit by bit as it was.

    Train/eval mode of every submodule, buffers and the random state come back, also after
    an exception.
    """
    modes = [(m, m.training) for m in module.modules()]
    buffers = [(m, key, b) for m in module.modules() for key, b in m._buffers.items()]
    contents = [(b, b._version, b.clone()) for _, _, b in buffers if b is not None]
    device = next((p.device for p in module.parameters() if p.is_cuda), None)
    with (
        torch.inference_mode(False),
        torch.random.fork_rng(devices=[] if device is None else [device]),
    ):
        try:
            module.eval()
            yield
        finally:
            for m, mode in modes:
                m.training = mode
            for m, key, buffer in buffers:
                m._buffers[key] = buffer
            for buffer, version, content in contents:
                if buffer._version != version:
                    with torch.no_grad():
                        buffer.copy_(content)
