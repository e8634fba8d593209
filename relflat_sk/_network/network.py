"""A trained network with its loss and its data, and the losses of its batches."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from relflat_sk._losses import Loss
from relflat_sk._network.batches import Batch, Batches
from relflat_sk._network.borrowing import borrowed
from relflat_sk._network.inputs import cast_inputs, check_finite, count_samples
from relflat_sk._network.layers import find_layer
from relflat_sk._network.processes import ALONE, Processes
from relflat_sk._network.recording import record_order
from relflat_sk._network.source import Source
from relflat_sk._numerics import full_precision

__all__ = [
    "Network",
    "Outcome",
    "layer_names",
    "mean_loss",
    "outcome_of",
    "outcomes",
    "primary_output",
    "sample_weight",
]


@dataclass(frozen=True)
class Network:
    """A trained network with the loss and the data that it is measured on.

    Parameters
    ----------
    module : nn.Module
        Contains the layers.
    loss : Loss
        The criterion.
    batches : callable
        Starts a pass over the data, see `relflat_sk._network.batches.make_batches`.
    forward : callable, optional
        Turns inputs into the criterion's first argument; ``module(x)`` if None.
    source : Source, optional
        The model and the data that the network was made of; None if nobody needs them.
    processes : Processes, optional
        Those that hold the data, each a part; the calling process alone by default.
    """

    module: nn.Module
    loss: Loss
    batches: Batches
    forward: Callable[[Any], Any] | None = None
    source: Source | None = None
    processes: Processes = ALONE

    @property
    def device(self) -> torch.device:
        """The device of the network's parameters."""
        tensors = (*self.module.parameters(), *self.module.buffers())
        return tensors[0].device if tensors else torch.device("cpu")

    def __call__(self, x: Any) -> Tensor:
        """Run the network on inputs as they come from the data."""
        check_finite(x)
        x = cast_inputs(x, self.module, self.device)
        output = primary_output(self._run(x))
        if _is_one(x) and (output.ndim == 0 or len(output) != 1):
            return output[None]  # a squeeze() in the network removed the axis of a single sample
        return output

    def _run(self, x: Any) -> Any:
        """Pass inputs to the module as they are: by name, by position, or as one."""
        if self.forward is not None:
            return self.forward(x)
        if isinstance(x, Mapping):
            return self.module(**x)
        if isinstance(x, tuple | list):
            return self.module(*x)
        return self.module(x)


def _is_one(x: Any) -> bool:
    """Return whether there is one sample; False for inputs without a length."""
    try:
        return count_samples(tuple(x) if isinstance(x, list) else x) == 1
    except AttributeError:  # no array, but an object of the user's own loader
        return False


def primary_output(output: Any) -> Tensor:
    """Return the part of a network's output that the criterion takes.

    Parameters
    ----------
    output : Tensor, tuple, list or mapping
        As the network returns it.

    Returns
    -------
    Tensor of shape (n, ...)
        The tensor itself, the first of several, or the entry "logits" of a mapping.

    Raises
    ------
    TypeError
        If there is no such tensor.
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and "logits" in output:
        output = output["logits"]
    elif isinstance(output, tuple | list) and output:
        output = output[0]
    if not isinstance(output, Tensor):
        raise TypeError(
            "the network must return a tensor, a tuple that starts with one, or a mapping "
            f"with 'logits', got {type(output).__name__}."
        )
    return output


def layer_names(network: Network) -> list[str]:
    """List the layers with a weight matrix in forward order, by running one batch.

    Parameters
    ----------
    network : Network
        Its first batch is run.

    Returns
    -------
    list of str
        Dotted names.

    Raises
    ------
    LayerNotFoundError
        If there is no such layer.
    """
    with borrowed(network.module), torch.no_grad(), record_order(network.module) as recorder:
        network(next(network.batches()).x)
    if not recorder.order:
        find_layer(network.module, -1)  # raises and says that there is no layer
    return recorder.order


# -- the loss of batches -----------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """Outputs and targets of one batch of n samples, for which losses can be computed.

    Parameters
    ----------
    output : Tensor of shape (n, ...)
        The criterion's input.
    target : Tensor of shape (n, ...)
        Labels as the criterion takes them.
    loss : Loss
        The criterion, on the output's device.
    weight : Tensor of shape (n,)
        Sample weights, float64; ones if there are none.
    weighted : bool
        Whether there are sample weights.
    """

    output: Tensor
    target: Tensor
    loss: Loss
    weight: Tensor
    weighted: bool

    def each(self) -> tuple[Tensor, Tensor]:
        """Compute each sample's own loss.

        Returns
        -------
        losses : Tensor of shape (n,)
            Per-sample losses.
        divisors : Tensor of shape (n,)
            What each sample adds to the divisor of the criterion's mean.
        """
        if self.loss.row is not None:
            return self.loss.terms(self.output, self.target, each=True)
        # an unknown criterion may return nothing but means: give it one sample at a time
        rows = [slice(i, i + 1) for i in range(len(self.output))]
        terms = [self.loss.terms(self.output[row], self.target[row]) for row in rows]
        losses, divisors = zip(*terms, strict=True)
        return torch.cat(losses), torch.cat(divisors)

    def total(self) -> tuple[Tensor, float]:
        """Sum losses and divisors with the sample weights; their ratio is the mean loss.

        Returns
        -------
        loss : Tensor of shape ()
            Float64, with its graph.
        divisor : float
            Weighted sum of the divisors.
        """
        losses, divisors = self.loss.terms(self.output, self.target, each=self.weighted)
        return self.weight @ losses.double(), float(self.weight @ divisors.detach().double())


def outcome_of(network: Network, batch: Batch, output: Tensor) -> Outcome:
    """Bring the network's output for a batch together with the batch's labels.

    Parameters
    ----------
    network : Network
        Has the loss.
    batch : Batch
        Has the labels and the weights.
    output : Tensor of shape (n, ...)
        The network's output for the batch; its losses are in float32 at least.

    Returns
    -------
    Outcome
        From which losses can be computed.

    Raises
    ------
    ValueError
        If there are no labels, or they do not fit the output.
    """
    output = full_precision(network.loss.classes_second(output, batch.y))
    loss = network.loss.to(output.device, output.dtype)
    if batch.y is None:
        raise ValueError("y is needed to compute a loss. Pass y.")
    target = loss.check_target(output, batch.y.to(output.device))
    weight = sample_weight(batch, len(output), output.device)
    return Outcome(output, target, loss, weight, batch.weight is not None)


def outcomes(network: Network) -> Iterator[Outcome]:
    """Run the network on all batches. To be used within `borrowed`.

    Parameters
    ----------
    network : Network
        With labels.

    Yields
    ------
    Outcome
        One for each batch.

    Raises
    ------
    ValueError
        If there are no labels, or they do not fit the network's output.
    """
    for batch in network.batches():
        yield outcome_of(network, batch, network(batch.x))


def mean_loss(network: Network) -> float:
    """Compute the mean loss over the data, in evaluation mode.

    Parameters
    ----------
    network : Network
        With labels; given back as it was.

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
    total, divisor = network.processes.sum_numbers(total, divisor)
    return total / divisor


def sample_weight(batch: Batch, n: int, device: torch.device) -> Tensor:
    """Return the weights of a batch's samples, ones where there are none.

    Parameters
    ----------
    batch : Batch
        The batch.
    n : int
        Number of its samples.
    device : torch.device
        Device of the result.

    Returns
    -------
    Tensor of shape (n,)
        Float64.
    """
    if batch.weight is None:
        return torch.ones(n, dtype=torch.float64, device=device)
    return batch.weight.to(device)
