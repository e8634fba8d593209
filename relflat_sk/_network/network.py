"""A trained network with its loss and data, borrowed and given back."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from relflat_sk._losses import Loss
from relflat_sk._network.attention import explicit_attention
from relflat_sk._network.batches import Batch, Batches, cast_inputs, check_finite, count_samples
from relflat_sk._network.layers import primary_output

__all__ = ["Network", "Outcome", "borrowed", "mean_loss", "outcome_of", "outcomes", "sample_weight"]


@dataclass(frozen=True)
class Network:
    """A trained network with the loss it is judged by and the data it is judged on.

    Parameters
    ----------
    module : nn.Module
        Holds the layers.
    loss : Loss
    batches : callable
        Starts a pass over the data, see `relflat_sk._network.batches.make_batches`.
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
        for outcome in outcomes(network):
            loss, share = outcome.total()
            total += float(loss)
            divisor += share
    return total / divisor


@dataclass(frozen=True)
class Outcome:
    """What came of one batch of n samples."""

    output: Tensor  # (n, ...)
    target: Tensor
    loss: Loss
    weight: Tensor  # (n,), float64
    weighted: bool  # whether the weights are other than one

    def each(self) -> tuple[Tensor, Tensor]:
        """Losses and divisors of the samples by themselves, (n,) both."""
        if self.loss.row is not None:
            return self.loss.terms(self.output, self.target, each=True)
        # an unknown criterion may know no more than means: give it one sample at a time
        rows = [slice(i, i + 1) for i in range(len(self.output))]
        terms = [self.loss.terms(self.output[row], self.target[row]) for row in rows]
        losses, divisors = zip(*terms, strict=True)
        return torch.cat(losses), torch.cat(divisors)

    def total(self) -> tuple[Tensor, float]:
        """Weighted sums of losses and of divisors, whose ratio is the mean loss."""
        losses, divisors = self.loss.terms(self.output, self.target, each=self.weighted)
        return self.weight @ losses.double(), float(self.weight @ divisors.detach().double())


def outcomes(network: Network) -> Iterator[Outcome]:
    """Stream the data through the network. To be used within `borrowed`.

    Parameters
    ----------
    network : Network

    Yields
    ------
    Outcome
        One for each batch.

    Raises
    ------
    ValueError
        Without labels, or if they do not fit the network's output.
    """
    for batch in network.batches():
        yield outcome_of(network, batch, network(batch.x))


def outcome_of(network: Network, batch: Batch, output: Tensor) -> Outcome:
    """Judge what came out of a batch.

    Parameters
    ----------
    network : Network
    batch : Batch
    output : Tensor of shape (n, ...)

    Returns
    -------
    Outcome

    Raises
    ------
    ValueError
        Without labels, or if they do not fit the output.
    """
    loss = network.loss.to(output.device, output.dtype)
    output = loss.classes_second(output, batch.y)
    if batch.y is None:
        raise ValueError("y is needed to compute a loss. Pass y.")
    target = loss.check_target(output, batch.y.to(output.device))
    weight = sample_weight(batch, len(output), output.device)
    return Outcome(output, target, loss, weight, batch.weight is not None)


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
        explicit_attention(module),
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
