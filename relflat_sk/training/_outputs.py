"""From a module's output, which may be a mapping with `logits`, to losses and predictions."""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from skorch import NeuralNet
from torch import Tensor, nn

from relflat_sk._losses import name_criterion
from relflat_sk._network import primary_output
from relflat_sk._numerics import full_precision

__all__ = [
    "check_measurable",
    "for_prediction",
    "log_probabilities",
    "movable",
    "refuse_mapping",
    "takes_mapping",
]

# what a criterion raises for an argument that it does not expect
_REFUSALS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def takes_mapping(criterion: Any, output: Mapping[str, Any], target: Any) -> bool:
    """Find out whether a criterion takes a module's whole output, rather than its logits.

    Parameters
    ----------
    criterion : callable
        A criterion that is not in the table of losses. It is called once or twice.
    output : mapping
        The module's output for a batch.
    target : Tensor of shape (n, ...)
        The labels of the batch.

    Returns
    -------
    bool
        False if the criterion takes the entry "logits".

    Raises
    ------
    ValueError
        If the criterion takes neither.
    """
    refusals = []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a name as the index of a tensor
        for whole in (False, True):
            try:
                criterion(output if whole else primary_output(output), target)
            except _REFUSALS as error:
                refusals.append(f"{type(error).__name__}: {error}")
            else:
                return whole
    raise ValueError(
        f"the module returned a mapping with the names {list(output)}, and "
        f"{name_criterion(criterion)} can take neither the entry "
        f"'logits' ({refusals[0]}) nor the whole output ({refusals[1]})."
    )


# what needs a criterion of one tensor, and what to do if the criterion is to stay
_NEEDS = {
    "measure": ("measures need", "pass one with the argument criterion of the measure"),
    "penalty": ("the flatness penalty needs", "train with flatness_weight=0"),
    "sample_weight": ("sample_weight needs", "leave the weights out"),
}


def refuse_mapping(criterion: Any, by: str) -> NoReturn:
    """Refuse a criterion that takes a mapping, where one of a tensor is needed.

    Parameters
    ----------
    criterion : callable
        A criterion that takes the module's whole output.
    by : {"measure", "penalty", "sample_weight"}
        What needs a criterion of a tensor.

    Raises
    ------
    ValueError
        In any case.
    """
    need, remedy = _NEEDS[by]
    raise ValueError(
        f"{name_criterion(criterion)} takes the module's whole output, a mapping, but {need} a "
        "criterion of one tensor. Use a criterion that takes the entry 'logits', which is passed "
        f"to it as a tensor, or {remedy}."
    )


def check_measurable(net: NeuralNet) -> None:
    """Refuse to measure a net whose criterion takes the module's whole output.

    Parameters
    ----------
    net : NeuralNet
        A net that was trained.

    Raises
    ------
    ValueError
        If its training has shown that the criterion takes a mapping.
    """
    if getattr(net, "_criterion_takes_mapping", False):
        refuse_mapping(net.criterion_, "measure")


def movable(output: Any) -> Any:
    """Leave out entries of a mapping that skorch cannot move to a device, such as caches.

    Parameters
    ----------
    output : object
        A module's output.

    Returns
    -------
    object
        `output` itself unless it is a mapping with such entries.
    """
    if not isinstance(output, Mapping) or all(map(_is_movable, output.values())):
        return output
    return {name: part for name, part in output.items() if _is_movable(part)}


def _is_movable(part: Any) -> bool:
    """Return whether there are only tensors in an output, possibly in containers."""
    if isinstance(part, tuple | list):
        return all(map(_is_movable, part))
    return isinstance(part, Tensor)


def for_prediction(output: Any, *, required: bool) -> Any:
    """Return what the function from outputs to predictions takes.

    Parameters
    ----------
    output : Tensor of shape (n, ...) or mapping
        A module's output.
    required : bool
        Whether it takes tensors only, so that a mapping needs an entry "logits".

    Returns
    -------
    Tensor of shape (n, ...) or mapping
        The entry "logits" of a mapping that has it.

    Raises
    ------
    TypeError
        If a mapping has no such entry, and a tensor is required.
    """
    if isinstance(output, Mapping) and (required or "logits" in output):
        return full_precision(primary_output(output))
    return output


def log_probabilities(nonlinearity: Any, *, binary: bool) -> Callable[[Any], Tensor] | None:
    """Return a function from outputs to logarithms of probabilities that never takes log(0).

    Parameters
    ----------
    nonlinearity : callable
        The function from outputs to probabilities.
    binary : bool
        Whether outputs of one column stand for two classes.

    Returns
    -------
    callable or None
        None if there is no such function for this nonlinearity.
    """
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
