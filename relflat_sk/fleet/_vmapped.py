"""Forward and backward passes of many networks at once, by `torch.func`."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from relflat_sk.fleet._trace import Trace, Traced

__all__ = ["Vmapped"]

Tensors = dict[str, Tensor]


class _Masked(nn.Module):
    """Dropout with a mask that is given."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask if self.training else x


class Vmapped:
    """Any network that `torch.func.vmap` takes, many times."""

    def __init__(self, module: nn.Module, last: str | None, earlier: Iterable[str] = ()) -> None:
        self._skeleton = copy.deepcopy(module).to("meta").train()
        self.dropout: dict[str, Any] = {}
        for name, part in list(self._skeleton.named_modules()):
            if type(part) is nn.Dropout and part.p:
                self.dropout[name] = masked = _Masked()
                self._skeleton.set_submodule(name, masked)
        self._last = last
        self._found: list[Tensor] = []
        if last is not None:
            self._skeleton.get_submodule(last).register_forward_pre_hook(self._record)
        self._earlier = list(earlier)
        self._inputs: Tensors = {}
        self._moves: Tensors = {}
        for name in self._earlier:
            layer = self._skeleton.get_submodule(name)
            layer.register_forward_hook(partial(self._move, name))

    def _record(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._found.append(args[0])

    def _move(
        self, name: str, module: nn.Module, args: tuple[Any, ...], output: Tensor
    ) -> Tensor | None:
        """Record a layer's input, and add to its output what it is differentiated by."""
        if name not in self._moves:
            return None
        self._inputs[name] = args[0]
        return output + self._moves[name]

    def bind(self, weights: Tensors, gradients: Tensors, buffers: Tensors) -> None:
        """Use the weights of a stack, and write gradients to it.

        Shapes: `weights, gradients, buffers` (k, ...).
        """
        self._weights, self.gradients, self._buffers = weights, gradients, buffers

    def _call(self, weights: Tensors, buffers: Tensors, x: Tensor) -> tuple[Tensor, ...]:
        self._found.clear()
        output = functional_call(self._skeleton, (weights, buffers), (x,))
        if not isinstance(output, Tensor):
            raise TypeError(f"its network returns a {type(output).__name__}")
        return output, *self._found

    def trace(self, x: Tensor) -> Trace:
        """Compute outputs with a graph that can be differentiated twice.

        Shapes: `x` (k, n, ...).
        """
        leaves = {name: w.detach().requires_grad_() for name, w in self._weights.items()}
        weights = {name: leaves[f"{name}.weight"] for name in (*self._earlier, str(self._last))}
        moves = {
            name: weights[name].new_zeros(*x.shape[:2], weights[name].shape[1], requires_grad=True)
            for name in self._earlier
        }
        buffers = {**self._buffers, **self._masks()}
        z, phi, inputs = vmap(self._call_moved)(leaves, buffers, x, moves)
        layers = {name: Traced(inputs[name], moves[name], weights[name]) for name in moves}
        layers[str(self._last)] = Traced(phi, z, weights[str(self._last)])
        return Trace(layers, leaves, self.gradients)

    def _call_moved(
        self, weights: Tensors, buffers: Tensors, x: Tensor, moves: Tensors
    ) -> tuple[Tensor, Tensor, Tensors]:
        self._moves = moves
        try:
            z, phi = self._call(weights, buffers, x)
            return z, phi, self._inputs
        finally:
            self._moves, self._inputs = {}, {}

    def _masks(self) -> Tensors:
        return {f"{name}.mask": part.mask for name, part in self.dropout.items()}

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute outputs, with the features and the weight of the last layer if needed.

        Shapes: `x` (k, n, ...); returns z (k, n, ...), phi (k, n, m), weight (k, d, m).
        """
        with torch.enable_grad():
            self._leaves = {n: w.detach().requires_grad_() for n, w in self._weights.items()}
            self._outputs = vmap(self._call)(self._leaves, {**self._buffers, **self._masks()}, x)
        z, phi = (one.detach() for one in (self._outputs[0], self._outputs[-1]))
        return z, phi, z if self._last is None else self._weights[f"{self._last}.weight"]

    def evaluate(self, x: Tensor) -> Tensor:
        """Compute outputs in evaluation mode. Shapes: `x` (k, n, ...); returns (k, n, ...)."""
        with self._in_evaluation() as buffers:
            return vmap(self._call)(self._weights, buffers, x)[0]

    def map(self, function: Callable[[Tensor, Callable[[Tensor], Any]], Any]) -> Any:
        """Call a function for each network, all at once, in evaluation mode."""

        def of_one(weights: Tensors, buffers: Tensors) -> Any:
            weight = weights[f"{self._last}.weight"]
            return function(weight, lambda x: self._call(weights, buffers, x))

        with self._in_evaluation() as buffers:
            return vmap(of_one)(self._weights, buffers)

    @contextmanager
    def _in_evaluation(self) -> Iterator[Tensors]:
        """Set the mode of evaluation, and yield the buffers in it."""
        like = next(iter(self._weights.values()))
        masks = {f"{name}.mask": like.new_ones(len(like)) for name in self.dropout}
        self._skeleton.eval()
        try:
            yield {**self._buffers, **masks}
        finally:
            self._skeleton.train()

    def backward(self, z: Tensor) -> None:
        """Compute the gradients of the weights. Shapes: `z` (k, n, ...)."""
        self._backward(self._outputs[0], z)

    def backward_from_last(self, z: Tensor, phi: Tensor, weight: Tensor) -> None:
        """Compute the gradients of the weights, with all gradients at the last layer known.

        Shapes: `z` (k, n, d), `phi` (k, n, m), `weight` (k, d, m).
        """
        self._backward(self._outputs[-1], phi)
        self.gradients[f"{self._last}.weight"].copy_(weight)
        if f"{self._last}.bias" in self.gradients:
            torch.sum(z, 1, out=self.gradients[f"{self._last}.bias"])

    def _backward(self, tensor: Tensor, outer: Tensor) -> None:
        """Compute the gradients of what a tensor depends on; the others are zero."""
        leaves = list(self._leaves.values())
        found: Any = [None] * len(leaves)
        if tensor.requires_grad:
            found = torch.autograd.grad(tensor, leaves, outer, retain_graph=True, allow_unused=True)
        for to, gradient in zip(self.gradients.values(), found, strict=True):
            if gradient is None:
                to.zero_()
            else:
                to.copy_(gradient)
