"""Forward and backward passes of the layers of one network."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from scipy.special import expit
from torch import nn

__all__ = ["LAYERS", "Layer", "Linear"]

Array = np.ndarray[Any, Any]


class Layer(ABC):
    """A layer."""

    @abstractmethod
    def forward(self, x: Array) -> Array:
        """Compute the output, and hold what `backward` needs."""

    @abstractmethod
    def backward(self, outer: Array, *, needed: bool) -> Array:
        """Compute the gradients of the weights, and that in the input."""


class Linear(Layer):
    """A linear layer."""

    def __init__(self, name: str, layer: nn.Linear) -> None:
        names = [f"{name}.weight" if name else "weight", f"{name}.bias" if name else "bias"]
        self._names = names if layer.bias is not None else names[:1]

    def bind(self, weights: Mapping[str, Array], gradients: Mapping[str, Array]) -> None:
        """Use these weights, and write gradients to these arrays."""
        name, *others = self._names
        self.weight, self.to_weight = weights[name], gradients[name]
        self._transposed = self.weight.T
        self._bias = [(weights[bias], gradients[bias]) for bias in others]

    def forward(self, x: Array) -> Array:
        self.x = x
        z = x @ self._transposed
        for bias, _ in self._bias:
            z += bias
        return z

    def backward(self, outer: Array, *, needed: bool) -> Array:
        np.matmul(outer.T, self.x, out=self.to_weight)
        self.backward_to_bias(outer)
        return outer @ self.weight if needed else outer

    def backward_to_bias(self, outer: Array) -> None:
        """Compute the gradient of the bias. Shapes: `outer` (n, d)."""
        for _, gradient in self._bias:
            np.add.reduce(outer, 0, out=gradient)


class _Activation(Layer):
    """A function of each number, whose derivative is known from its output."""

    def __init__(
        self, function: Callable[[Array], Array], backward: Callable[[Array, Array], Array]
    ) -> None:
        self._function, self._backward = function, backward

    def forward(self, x: Array) -> Array:
        self._y = self._function(x)
        return self._y

    def backward(self, outer: Array, *, needed: bool) -> Array:
        return self._backward(outer, self._y)


class _Flatten(Layer):
    """The flattening of samples."""

    def forward(self, x: Array) -> Array:
        return x.reshape(len(x), -1)

    def backward(self, outer: Array, *, needed: bool) -> Array:
        return outer  # what comes before has no weights


# by the class of torch's layer
LAYERS: dict[type, Callable[[], Layer]] = {
    nn.Flatten: _Flatten,
    nn.ReLU: lambda: _Activation(lambda x: np.maximum(x, 0), lambda g, y: g * (y > 0)),
    nn.Tanh: lambda: _Activation(np.tanh, lambda g, y: g * (1 - y * y)),
    nn.Sigmoid: lambda: _Activation(expit, lambda g, y: g * (y * (1 - y))),
}
