"""From a module's output, which may be a mapping with `logits`, to losses and predictions."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from skorch import NeuralNet
from skorch.utils import to_device
from torch import Tensor, nn

from relflat_sk._losses import Loss, ProbabilityNLLLoss, explain_ending
from relflat_sk._network import find_ending, primary_output, refuse_whole
from relflat_sk._numerics import full_precision


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


@contextmanager
def known_outputs(net: Any, outputs: Tensor) -> Iterator[None]:
    """Let a net predict from outputs that its module has computed already."""

    def forward_iter(X: Any, training: bool = False, device: str = "cpu") -> Iterator[Any]:
        yield to_device(outputs, device=device)

    net.__dict__["forward_iter"] = forward_iter
    try:
        yield
    finally:
        del net.__dict__["forward_iter"]


# -- whether a module ends in logits or in probabilities -----------------------------------

# what to pass for a module that is to keep its ending
_INSTEAD = {
    "softmax": "NLLLoss, which takes probabilities here, as in skorch's classifiers",
    "log_softmax": "CrossEntropyLoss, which takes them as they are",
    "sigmoid": "BCELoss, which takes probabilities",
}
# criteria of probabilities, and what is wrong with other outputs
_PROBABILITIES: dict[type, str] = {
    ProbabilityNLLLoss: (
        "NLLLoss takes probabilities here, as in skorch's classifiers: from 0 to 1, with the sum 1 "
        "over the classes. End the module with a softmax, or use CrossEntropyLoss, which takes "
        "logits or the output of LogSoftmax."
    ),
    nn.BCELoss: (
        "BCELoss takes probabilities, from 0 to 1. End the module with a sigmoid, or use "
        "BCEWithLogitsLoss, which takes logits."
    ),
}
_ROUNDING = 0.02  # of a sum of probabilities in bfloat16


def check_ending(loss: Loss, output: Tensor) -> None:
    """Refuse probabilities where the criterion takes logits, and the other way round."""
    kind = type(loss.criterion)
    ending = find_ending(output)
    problem = explain_ending(loss.criterion, ending)
    if ending is not None and problem is not None:
        raise ValueError(
            f"{problem}. Remove it from the module, or pass criterion=torch.nn.{_INSTEAD[ending]}."
        )
    if kind in _PROBABILITIES and not _are_probabilities(output.detach(), kind):
        low, high = output.detach().aminmax()
        raise ValueError(
            f"{_PROBABILITIES[kind]} The module returned values from {low:g} to {high:g}."
        )


def _are_probabilities(output: Tensor, kind: type) -> bool:
    """Return whether numbers are in the range that a criterion takes; nan passes."""
    outside = ((output < 0) | (output > 1)).any()
    if kind is ProbabilityNLLLoss:
        outside |= ((output.sum(dim=1) - 1).abs() > _ROUNDING).any()
    return not outside
