"""Run a network that `torch.compile` has compiled up to its last layer, which is recorded.

Compiled code does not notice that a layer's forward method is replaced, and its graph shows
nothing of what is inside. But it notices that a layer is another one. Here, a twin takes the
place of the last layer that returns what it receives, so that the network returns the features.
The last layer itself then runs without compilation.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor, nn

__all__ = ["CompiledBody"]


class CompiledBody:
    """A network in front of its last layer, in compiled code."""

    def __init__(self, module: nn.Module, name: str) -> None:
        owner, _, self._child = name.rpartition(".")
        self._siblings = module.get_submodule(owner)._modules
        self._layer: Any = module.get_submodule(name)
        self._twin = _make_twin(self._layer)

    def run(self, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        """Run the network."""
        received: list[Tensor] = []
        vars(self._twin)["received"] = received
        self._siblings[self._child] = self._twin
        try:
            features = compiled(*args, **kwargs)
        finally:
            self._siblings[self._child] = self._layer
        if len(received) != 1 or features is not received[0]:
            raise RuntimeError(
                f"the compiled network returned the output of its last layer ({self._child!r}) at "
                "first, and something else now. Call the network without torch.compile in steps "
                "with a penalty."
            )
        output: Tensor = self._layer(features)
        return output


def _make_twin(layer: nn.Module) -> nn.Module:
    """Make a layer with everything of another one but what it computes."""
    kind = _twin_of_class(type(layer))  # type: ignore[arg-type]  # classes are hashable
    twin: nn.Module = kind.__new__(kind)
    # `copy.copy` refuses layers with a parametrization, such as weight norm
    vars(twin).update(vars(layer))
    # the layer's hooks run when the layer itself does
    for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
        vars(twin)[hooks] = type(vars(layer)[hooks])()
    return twin


@cache
def _twin_of_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Make a class, once, because code is compiled again for another one."""
    return type(kind.__name__, (kind,), {"forward": _return_input})


def _return_input(self: Any, features: Tensor) -> Tensor:
    self.received.append(features)
    return features
