"""Replace the forward method of modules for a while, and recognise modules whose own is replaced.

Every replacement in the package is made here: to record what passes a layer, to run attention
step by step, to differentiate normalisations through their definition. An instance attribute
costs less than a hook, which counts in training steps, and reaches every caller of the
module, also those that call `forward` itself.
"""

from collections.abc import Callable, Iterable
from typing import Any, Self

from torch import nn

__all__ = ["ReplacedForwards", "has_own_forward"]


class ReplacedForwards:
    """Context in which modules run another forward method; afterwards they run their own.

    Replacements can be nested: a forward method that somebody else put in place of the class's
    is put back, too. A class instead of a generator, because the training step enters it.
    """

    def __init__(self, forwards: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> None:
        self._forwards = forwards
        self._before: list[tuple[dict[str, Any], Any]] = []

    def __enter__(self) -> Self:
        for module, forward in self._forwards:
            attributes = module.__dict__
            self._before.append((attributes, attributes.get("forward")))
            attributes["forward"] = forward
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            attributes, forward = self._before.pop()
            if forward is None:
                attributes.pop("forward", None)
            else:
                attributes["forward"] = forward


def has_own_forward(module: nn.Module) -> bool:
    """Return whether a module runs a forward method other than its class's."""
    return "forward" in module.__dict__
