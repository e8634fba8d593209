"""Forward and backward passes of many chains of layers at once, written out by hand.

Autograd takes as long as the arithmetic where networks are small. The gradient of a chain of
linear layers and activations is known, and goes to arrays that are there already.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from relflat_sk.fleet._trace import Trace, Traced

__all__ = ["Chain", "find_chain", "list_layers"]

_ops: Any = torch.ops.aten

Tensors = Mapping[str, Tensor]


class _Step(ABC):
    """A layer of the chain, of all networks."""

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Compute the output in training, and hold what `backward` needs."""

    @abstractmethod
    def evaluate(self, x: Tensor) -> Tensor:
        """Compute the output in evaluation."""

    @abstractmethod
    def backward(self, outer: Tensor, *, needed: bool) -> Tensor:
        """Compute the gradient in the input if it is needed, from that in the output."""


class _Linear(_Step):
    """A linear layer."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.names = _join(name, "weight"), _join(name, "bias")

    def bind(self, weights: Tensors, gradients: Tensors) -> None:
        """Use the weights of a stack, and write gradients to it."""
        weight, bias = self.names
        self.weight, self.transposed = weights[weight], weights[weight].transpose(1, 2)
        self.to_weight = gradients[weight]
        self.has_bias = bias in weights
        if self.has_bias:
            self.bias = weights[bias].unsqueeze(1)
            self.to_bias = gradients[bias]

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        return self.evaluate(x)

    def evaluate(self, x: Tensor) -> Tensor:
        if self.has_bias:
            return torch.baddbmm(self.bias, x, self.transposed)
        return x @ self.transposed

    def backward(self, outer: Tensor, *, needed: bool) -> Tensor:
        torch.bmm(outer.transpose(1, 2), self.x, out=self.to_weight)
        if self.has_bias:
            torch.sum(outer, 1, out=self.to_bias)
        return torch.bmm(outer, self.weight) if needed else outer


class _Activation(_Step):
    """A function of each number, with a derivative of its input or of its output."""

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        derivative: Callable[[Tensor, Tensor], Tensor],
        of_output: bool,
    ) -> None:
        self.function, self.derivative, self.of_output = function, derivative, of_output

    def forward(self, x: Tensor) -> Tensor:
        y = self.function(x)
        self.known = y if self.of_output else x
        return y

    def evaluate(self, x: Tensor) -> Tensor:
        return self.function(x)

    def backward(self, outer: Tensor, *, needed: bool) -> Tensor:
        return self.derivative(outer, self.known)


class _Flatten(_Step):
    """The flattening of samples."""

    def forward(self, x: Tensor) -> Tensor:
        self.shape = x.shape
        return x.flatten(2)

    def evaluate(self, x: Tensor) -> Tensor:
        return x.flatten(2)

    def backward(self, outer: Tensor, *, needed: bool) -> Tensor:
        return outer.view(self.shape)


class _Dropout(_Step):
    """Dropout, with masks that are given."""

    mask: Tensor

    def __init__(self, name: str) -> None:
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask

    def evaluate(self, x: Tensor) -> Tensor:
        return x

    def backward(self, outer: Tensor, *, needed: bool) -> Tensor:
        return outer * self.mask


def _relu(layer: nn.ReLU) -> _Step:
    # in place: the layer before needs its input only
    return _Activation(torch.relu, lambda g, y: _ops.threshold_backward(g, y, 0), True)


_ACTIVATIONS: dict[type, Callable[[Any], _Step]] = {
    nn.ReLU: _relu,
    nn.Tanh: lambda layer: _Activation(torch.tanh, _ops.tanh_backward, True),
    nn.Sigmoid: lambda layer: _Activation(torch.sigmoid, _ops.sigmoid_backward, True),
    nn.SiLU: lambda layer: _Activation(nn.functional.silu, _ops.silu_backward, False),
    nn.GELU: lambda layer: _Activation(
        lambda x: nn.functional.gelu(x, approximate=layer.approximate),
        lambda g, x: _ops.gelu_backward(g, x, approximate=layer.approximate),
        False,
    ),
    nn.LeakyReLU: lambda layer: _Activation(
        lambda x: nn.functional.leaky_relu(x, layer.negative_slope),
        lambda g, x: _ops.leaky_relu_backward(g, x, layer.negative_slope, False),
        False,
    ),
}


def find_chain(module: nn.Module, inputs: Tensor) -> "Chain | None":
    """Find the layers of a network that is a chain."""
    steps: list[_Step] = []
    flat = inputs.ndim == 2
    for name, layer in list_layers(module):
        if layer is None:
            return None
        kind = type(layer)
        if kind is nn.Linear and flat:
            steps.append(_Linear(name))
        elif kind is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
            steps.append(_Flatten())
            flat = True
        elif kind is nn.Dropout and flat:
            steps += [_Dropout(name)] if layer.p else []
        elif kind in _ACTIVATIONS:
            steps.append(_ACTIVATIONS[kind](layer))
        elif kind is not nn.Identity:
            return None
    ends = bool(steps) and isinstance(steps[-1], _Linear)
    return Chain(steps) if ends else None


def _join(*names: str) -> str:
    return ".".join(filter(None, names))


def list_layers(module: nn.Module, name: str = "") -> list[tuple[str, Any]]:
    """List the layers of nested sequences."""
    if type(module).forward is not nn.Sequential.forward:
        return [(name, module if not module._modules else None)]
    # `named_children` would leave out the second place of an activation that is used twice
    return [
        layer
        for child, part in module._modules.items()
        for layer in list_layers(cast(nn.Module, part), _join(name, child))
    ]


class Chain:
    """A chain of layers that ends in a linear layer, of many networks."""

    def __init__(self, steps: Sequence[_Step]) -> None:
        self._steps = list(steps)
        self._first = next(i for i, step in enumerate(steps) if isinstance(step, _Linear))

    @property
    def dropout(self) -> dict[str, Any]:
        """The layers that take a mask, by name."""
        return {step.name: step for step in self._steps if isinstance(step, _Dropout)}

    def bind(self, weights: Tensors, gradients: Tensors, buffers: Tensors) -> None:
        """Use the weights of a stack, and write gradients to it.

        Shapes: `weights, gradients, buffers` (k, ...).
        """
        self._weights, self.gradients = weights, gradients
        for step in self._steps:
            if isinstance(step, _Linear):
                step.bind(weights, gradients)

    def trace(self, x: Tensor) -> Trace:
        """Compute outputs with a graph that can be differentiated twice.

        Shapes: `x` (k, n, ...).
        """
        leaves = {name: w.detach().requires_grad_() for name, w in self._weights.items()}
        layers = {}
        for step in self._steps:
            if isinstance(step, _Linear):
                step.bind(leaves, self.gradients)
            inputs, x = x, step.forward(x)
            if isinstance(step, _Linear):
                layers[step.name] = Traced(inputs, x, step.weight)
        return Trace(layers, leaves, self.gradients)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute outputs, with the features and the weight of the last layer.

        Shapes: `x` (k, n, ...); returns z (k, n, d), phi (k, n, m), weight (k, d, m).
        """
        for step in self._steps:
            x = step.forward(x)
        last: Any = self._steps[-1]
        return x, last.x, last.weight

    def evaluate(self, x: Tensor) -> Tensor:
        """Compute outputs in evaluation mode. Shapes: `x` (k, n, ...); returns (k, n, d)."""
        for step in self._steps:
            x = step.evaluate(x)
        return x

    def backward(self, z: Tensor) -> None:
        """Compute the gradients of the weights. Shapes: `z` (k, n, d)."""
        last: Any = self._steps[-1]
        self._backward_to_features(last.backward(z, needed=self._first < len(self._steps) - 1))

    def backward_from_last(self, z: Tensor, phi: Tensor, weight: Tensor) -> None:
        """Compute the gradients of the weights, with all gradients at the last layer known.

        Shapes: `z` (k, n, d), `phi` (k, n, m), `weight` (k, d, m).
        """
        last: Any = self._steps[-1]
        last.to_weight.copy_(weight)
        if last.has_bias:
            torch.sum(z, 1, out=last.to_bias)
        self._backward_to_features(phi)

    def _backward_to_features(self, outer: Tensor) -> None:
        """Compute the gradients before the last layer, from that in its features."""
        for i in reversed(range(self._first, len(self._steps) - 1)):
            outer = self._steps[i].backward(outer, needed=i > self._first)
