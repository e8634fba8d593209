"""What a criterion takes of a network's output: one tensor of it, or all of it."""

import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from relflat_sk._losses import Loss, name_criterion
from relflat_sk._random import fork_rng

__all__ = ["check_part", "primary_output", "refuse_whole", "takes_whole"]

# what a criterion raises for an argument that it does not expect
_REFUSALS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)

# what needs a criterion of one tensor, and what to do if the criterion is to stay
_NEEDS = {
    "measure": ("measures need", "pass one with the argument criterion of the measure"),
    "penalty": ("the flatness penalty needs", "train with flatness_weight=0"),
    "sample_weight": ("sample_weight needs", "leave the weights out"),
}


def primary_output(output: Any) -> Tensor:
    """Return the part of a network's output that measures and the penalty pass to the criterion."""
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


def takes_whole(criterion: Any, output: Any, target: Any) -> bool:
    """Find out whether a criterion takes a network's whole output, rather than one tensor of it."""
    refusals: list[str] = []
    found: dict[bool, Any] = {}
    with torch.no_grad(), fork_rng(None), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a name as the index of a tensor
        for whole in (False, True):
            try:
                found[whole] = criterion(output if whole else primary_output(output), target)
            except _REFUSALS as error:
                refusals.append(f"{type(error).__name__}: {error}")
    if not found:
        raise ValueError(
            f"the module returned {_describe(output)}, and {name_criterion(criterion)} can take "
            f"neither {_describe_part(output)} ({refusals[0]}) nor the whole output "
            f"({refusals[1]})."
        )
    return True in found and not (False in found and _equal(found[False], found[True]))


def _equal(one: Any, other: Any) -> bool:
    """Return whether two losses are equal."""
    both = isinstance(one, Tensor) and isinstance(other, Tensor)
    return both and one.shape == other.shape and torch.equal(one, other)


def _describe(output: Any) -> str:
    if isinstance(output, Mapping):
        return f"a mapping with the names {list(output)}"
    return f"a {type(output).__name__} of {len(output)}"


def _describe_part(output: Any) -> str:
    return "the entry 'logits'" if isinstance(output, Mapping) else "its first entry"


def refuse_whole(criterion: Any, by: str) -> NoReturn:
    """Refuse a criterion that takes the whole output, where one of a tensor is needed."""
    need, remedy = _NEEDS[by]
    raise ValueError(
        f"{name_criterion(criterion)} takes the module's whole output, but {need} a criterion of "
        "one tensor. Use a criterion that takes the entry 'logits' of a mapping, or the first "
        f"entry of a tuple, which is passed to it as a tensor, or {remedy}."
    )


def check_part(loss: Loss, output: Any, target: Any, by: str) -> None:
    """Refuse a criterion that takes more than `primary_output`."""
    if loss.row is not None or isinstance(output, Tensor):
        return
    if takes_whole(loss.criterion, output, target):
        refuse_whole(loss.criterion, by)
