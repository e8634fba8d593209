"""From a module's output, which may be a mapping with `logits`, to losses and predictions."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from skorch import NeuralNet
from torch import Tensor, nn

from relflat_sk._network import primary_output, refuse_whole
from relflat_sk._numerics import full_precision

__all__ = [
    "check_measurable",
    "for_prediction",
    "log_probabilities",
    "movable",
]


def check_measurable(net: NeuralNet) -> None:
    """Refuse to measure a net whose criterion takes the module's whole output."""
    if getattr(net, "_criterion_takes_whole", False):
        refuse_whole(net.criterion_, "measure")


def movable(output: Any) -> Any:
    """Leave out entries of a mapping that skorch cannot move to a device, such as caches."""
    if not isinstance(output, Mapping) or all(map(_is_movable, output.values())):
        return output
    return {name: part for name, part in output.items() if _is_movable(part)}


def _is_movable(part: Any) -> bool:
    """Return whether there are only tensors in an output, possibly in containers."""
    if isinstance(part, tuple | list):
        return all(map(_is_movable, part))
    return isinstance(part, Tensor)


def for_prediction(output: Any, *, required: bool) -> Any:
    """Return what the function from outputs to predictions takes."""
    if isinstance(output, Mapping) and (required or "logits" in output):
        return full_precision(primary_output(output))
    return output


def log_probabilities(nonlinearity: Any, *, binary: bool) -> Callable[[Any], Tensor] | None:
    """Return a function from outputs to logarithms of probabilities that never takes log(0)."""
    if isinstance(nonlinearity, partial) and nonlinearity.func is torch.softmax:
        logarithm: Callable[..., Tensor] = partial(torch.log_softmax, **nonlinearity.keywords)
    elif nonlinearity is torch.sigmoid and binary:
        logarithm = _log_sigmoid
    else:
        return None
    return lambda output: logarithm(full_precision(primary_output(output)))


def _log_sigmoid(z: Tensor) -> Tensor:
    """Return the logarithms for two classes with one logit, or for each of several labels."""
    if z.ndim == 2 and z.shape[1] > 1:
        return nn.functional.logsigmoid(z)
    z = z.reshape(-1)
    return nn.functional.logsigmoid(torch.stack([-z, z], dim=1))
