"""The dropout masks of many networks: each network has a random stream of its own."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from relflat_sk.fleet._member import Member
from relflat_sk.fleet._stackable import NotStackable

__all__ = ["Masks"]

# numbers that are drawn at a time, for each network and layer
_AT_ONCE = 2**17


class Masks:
    """The masks of the layers of dropout.

    A mask depends on the seed of the member and epoch, and not on the other members.
    """

    def __init__(self, module: nn.Module, body: Any, inputs: Tensor) -> None:
        self._layers = body.dropout
        self._rates = {name: _rate(module.get_submodule(name)) for name in self._layers}
        self._shapes: dict[str, Tensor] = {}
        if self._layers:
            self._find_shapes(module, inputs)

    def _find_shapes(self, module: nn.Module, inputs: Tensor) -> None:
        """Run the network once, and hold an array of each mask's shape."""
        hooks, uses = [], []
        for name in self._layers:

            def note(part: Any, args: Any, output: Any, name: str = name) -> None:
                uses.append(name)
                self._shapes[name] = torch.empty_like(output)

            hooks.append(module.get_submodule(name).register_forward_hook(note))
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            module(inputs)
        for hook in hooks:
            hook.remove()
        if sorted(uses) != sorted(self._layers):
            raise NotStackable("its network does not use each layer of dropout once")

    def ones(self) -> None:
        """Give all layers masks of ones, of a single network."""
        for name, shape in self._shapes.items():
            self._layers[name].mask = torch.ones_like(shape)[None]

    def start(self, members: Sequence[Member]) -> None:
        """Begin an epoch."""
        if not self._layers:
            return
        device = next(iter(self._shapes.values())).device
        self._generators = [torch.Generator(device).manual_seed(m.seed) for m in members]
        numbers = max(shape.numel() for shape in self._shapes.values())
        self._n_steps = max(1, _AT_ONCE // numbers)

    def set(self, step: int, n: int) -> None:
        """Give all layers their masks of a step."""
        if not self._layers:
            return
        chunk = step % self._n_steps
        if not chunk:
            self._drawn = {name: self._draw(name) for name in self._layers}
        for name, layer in self._layers.items():
            layer.mask = self._drawn[name][:, chunk, :n]

    def _draw(self, name: str) -> Tensor:
        """Draw the masks of some steps: (k, steps, n, ...)."""
        like, rate = self._shapes[name], self._rates[name]
        drawn = [
            torch.rand(
                self._n_steps, *like.shape, dtype=like.dtype, device=like.device, generator=one
            )
            for one in self._generators
        ]
        return (torch.stack(drawn) >= rate).to(like.dtype).div_(max(1 - rate, 1e-30))


def _rate(layer: Any) -> float:
    return float(layer.p)
