"""A trained network with its loss and its data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from relflat_sk._losses import Loss
from relflat_sk._network.batches import Batches
from relflat_sk._network.borrowing import borrowed
from relflat_sk._network.criterion_check import warn_unless_mean
from relflat_sk._network.inputs import cast_inputs, check_finite, count_samples
from relflat_sk._network.layers import find_layer
from relflat_sk._network.outputs import check_part, primary_output
from relflat_sk._network.processes import ALONE, Processes
from relflat_sk._network.recording import record_order
from relflat_sk._network.source import Source

__all__ = [
    "Network",
    "layer_names",
]


@dataclass(frozen=True)
class Network:
    """A trained network with the loss and the data that it is measured on."""

    module: nn.Module
    loss: Loss
    batches: Batches
    forward: Callable[[Any], Any] | None = None
    source: Source | None = None
    processes: Processes = ALONE
    _checked: set[bool] = field(default_factory=set, init=False, repr=False, compare=False)
    # what the module returned last, until `check_criterion` has seen it
    _whole: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def device(self) -> torch.device:
        """The device of the network's parameters."""
        tensors = (*self.module.parameters(), *self.module.buffers())
        return tensors[0].device if tensors else torch.device("cpu")

    def __call__(self, x: Any) -> Tensor:
        """Run the network on inputs as they come from the data."""
        x = self.prepare(x)
        whole = self._run(x)
        if self._must_check:
            self._whole[:] = [whole]
        output = primary_output(whole)
        if _is_one(x) and (output.ndim == 0 or len(output) != 1):
            return output[None]  # a squeeze() in the network removed the axis of a single sample
        return output

    @property
    def _must_check(self) -> bool:
        """Whether the criterion is a user's, and no batch has shown that it can be measured."""
        return self.loss.row is None and not self._checked

    def check_criterion(self, output: Tensor, target: Tensor) -> None:
        """Check on the first batch, after it was run, that a user's criterion can be measured."""
        if not self._must_check:
            return
        self._checked.add(True)
        check_part(self.loss, self._whole.pop(), target, "measure")
        warn_unless_mean(self.loss, output, target)

    def prepare(self, x: Any) -> Any:
        """Check inputs, and bring them to the module's device and type."""
        check_finite(x)
        return cast_inputs(x, self.module, self.device)

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


def layer_names(network: Network) -> list[str]:
    """List the layers with a weight matrix in forward order, by running one batch."""
    with borrowed(network.module), torch.no_grad(), record_order(network.module) as recorder:
        network(next(network.batches()).x)
    if not recorder.order:
        find_layer(network.module, -1)  # raises and says that there is no layer
    return recorder.order
