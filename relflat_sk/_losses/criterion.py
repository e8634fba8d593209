"""Criteria as users give them, and how they are called."""

import copy
from typing import Any

from torch import Tensor, nn

__all__ = ["as_criterion", "call_criterion", "name_criterion"]


_ONE_TENSOR = (
    ". Measures and the penalty pass one tensor to a criterion: the entry 'logits' if the network "
    "returns a mapping, the first entry if it returns a tuple."
)


def as_criterion(criterion: Any) -> Any:
    """Make a criterion from a class, an instance or a plain function."""
    if isinstance(criterion, type) and issubclass(criterion, nn.Module):
        return criterion()
    if callable(criterion) and not isinstance(criterion, type):
        return criterion
    raise TypeError(
        f"criterion must be a torch loss such as torch.nn.CrossEntropyLoss(), its class or a "
        f"function (output, target) -> loss, got {criterion!r}."
    )


def call_criterion(criterion: Any, output: Tensor, target: Tensor, *, each: bool) -> Tensor:
    """Call a criterion."""
    if each and isinstance(criterion, nn.Module) and hasattr(criterion, "reduction"):
        unreduced: Any = copy.copy(criterion)
        unreduced.reduction = "none"
        # accelerate replaces forward by a function that is bound to the original
        vars(unreduced).pop("forward", None)
        criterion = unreduced
    try:
        losses = criterion(output, target)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        of_torch = type(criterion).__module__.startswith("torch.")
        raise ValueError(
            f"{name_criterion(criterion)} cannot take outputs of shape {tuple(output.shape)} "
            f"({output.dtype}) with targets of shape {tuple(target.shape)} ({target.dtype}): "
            f"{error}{'' if of_torch else _ONE_TENSOR}"
        ) from error
    if not isinstance(losses, Tensor):
        raise ValueError(
            f"{name_criterion(criterion)} returned {type(losses).__name__}, expected a tensor."
        )
    return losses


def name_criterion(criterion: Any) -> str:
    """Return the name of a criterion's class, or of a function, for error messages."""
    return getattr(criterion, "__name__", type(criterion).__name__)
