"""Forward and backward passes of chains of layers, written out, for several networks at once.

Autograd takes as long as the arithmetic where networks are small. The gradient of a chain of linear
layers and activations is known. Arrays are those of NumPy or torch; their first axis is that of the
networks, and the second one that of the samples.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from relflat_sk._losses.curvature import namespace
from relflat_sk._numerics import transposed

Arrays = dict[str, Any]

# Multiplications of a layer's forward pass up to which NumPy computes it. Arithmetic takes most of
# the time of larger ones, which torch shares among threads.
_MOST = 2**22


class _Linear:
    """A linear layer."""

    def __init__(self, name: str, layer: nn.Linear) -> None:
        prefix = f"{name}." if name else ""
        self.name, self.size = name, layer.weight.numel()
        self._names = f"{prefix}weight", f"{prefix}bias"
        self._has_bias = layer.bias is not None
        self.names = set(self._names if self._has_bias else self._names[:1])

    def bind(self, weights: Arrays, gradients: Arrays, ones: Any) -> None:
        """Use the weights of networks, write gradients to arrays, and sum by ones: (1, 1, n)."""
        weight, bias = self._names
        self.weight, self.to_weight = weights[weight], gradients[weight]
        self._transposed, self._ones = transposed(self.weight), ones
        self._xp = namespace(self.weight)
        if self._has_bias:
            self._bias, self._to_bias = weights[bias][:, None], gradients[bias][:, None]

    def forward(self, x: Any) -> Any:
        """Compute the output, and hold the input."""
        self.x = x
        z = x @ self._transposed
        if self._has_bias:
            z += self._bias
        return z

    def backward(self, outer: Any) -> None:
        """Write the gradients of weight and bias, given that in the output."""
        self._xp.matmul(transposed(outer), self.x, out=self.to_weight)
        if self._has_bias:
            # a product takes less time than a sum
            self._xp.matmul(self._ones[..., : outer.shape[1]], outer, out=self._to_bias)


class _Function:
    """A function without weights, with its derivative from input and output."""

    def __init__(
        self,
        function: Callable[[Any], Any],
        backward: Callable[[Any, Any, Any], Any],
        *,
        in_pieces: bool = False,  # whether it is linear in pieces
    ) -> None:
        self._function, self._backward, self.in_pieces = function, backward, in_pieces

    def forward(self, x: Any) -> Any:
        """Compute the output, and hold it."""
        self._x, self._y = x, self._function(x)
        return self._y

    def backward(self, outer: Any) -> Any:
        """Compute the gradient in the input, given that in the output."""
        return self._backward(outer, self._x, self._y)


class _Dropout:
    """Dropout."""

    in_pieces = True

    def __init__(self, layer: nn.Dropout) -> None:
        self._rate = layer.p

    def seed(self, generators: Sequence[torch.Generator], like: Tensor, *, small: bool) -> None:
        """Draw from these streams, arrays of NumPy if the networks are small."""
        self._generators, self._like, self._small = generators, like, small

    def forward(self, x: Any) -> Any:
        """Apply a new mask, and hold it."""
        mask = draw_mask(self._generators, x.shape[1:], self._rate, self._like)
        self._mask = mask.numpy() if self._small else mask
        return x * self._mask

    def backward(self, outer: Any) -> Any:
        """Compute the gradient in the input, given that in the output."""
        return outer * self._mask


def draw_mask(
    generators: Sequence[torch.Generator], shape: Sequence[int], rate: float, like: Tensor
) -> Tensor:
    """Draw the masks of dropout of a step, of each network from a random stream of its own."""
    drawn = [
        torch.rand(shape, dtype=like.dtype, device=like.device, generator=one) for one in generators
    ]
    return (torch.stack(drawn) >= rate).to(like) / max(1 - rate, 1e-30)


def _relu(x: Any) -> Any:
    return x.clamp_min(0) if isinstance(x, Tensor) else np.maximum(x, x.dtype.type(0))


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + namespace(x).exp(-x))


def _silu_slope(g: Any, x: Any, y: Any) -> Any:
    s = _sigmoid(x)
    return g * (s * (1 + x * (1 - s)))


# by the class of torch's layer
_FUNCTIONS: dict[type, Callable[[Any], _Function]] = {
    nn.ReLU: lambda layer: _Function(
        _relu, lambda g, x, y: g * namespace(y).sign(y), in_pieces=True
    ),
    nn.LeakyReLU: lambda layer: _Function(
        lambda x: namespace(x).where(x > 0, x, x * layer.negative_slope),
        lambda g, x, y: namespace(x).where(x > 0, g, g * layer.negative_slope),
        in_pieces=True,
    ),
    nn.Tanh: lambda layer: _Function(
        lambda x: namespace(x).tanh(x), lambda g, x, y: g * (1 - y * y)
    ),
    nn.Sigmoid: lambda layer: _Function(_sigmoid, lambda g, x, y: g * (y * (1 - y))),
    nn.SiLU: lambda layer: _Function(lambda x: x * _sigmoid(x), _silu_slope),
}


class Chain:
    """A chain of layers that ends in a linear layer."""

    def __init__(self, layers: list[Any], n_outputs: int) -> None:
        self._layers, self.n_outputs = layers, n_outputs
        self.dropout = [layer for layer in layers if isinstance(layer, _Dropout)]
        self.linear = [layer for layer in layers if isinstance(layer, _Linear)]
        self.last: _Linear = self.linear[-1]
        places = [layers.index(layer) for layer in self.linear]
        # the functions behind each linear layer but the last, the last function first
        self._behind = [layers[end - 1 : start : -1] for start, end in pairwise(places)]
        # the numbers of the penalised layers before the last one, and whether that is penalised
        self.earlier: list[int] = []
        self.at_last = True

    @property
    def names(self) -> set[str]:
        """The names of the layers' weights and biases."""
        return set().union(*(layer.names for layer in self.linear))

    def is_linear_in_pieces(self, i: int) -> bool:
        """Return whether outputs are piecewise linear in the output of a linear layer."""
        return all(function.in_pieces for functions in self._behind[i:] for function in functions)

    def pull(self, outer: Any, i: int) -> Any:
        """Multiply gradients by the slopes of the functions between a linear layer and the next."""
        for function in self._behind[i]:
            outer = function.backward(outer)
        return outer

    def is_small(self, n_samples: int) -> bool:
        """Return whether NumPy computes steps with so many samples in less time than torch."""
        return all(n_samples * layer.size <= _MOST for layer in self.linear)

    def bind(self, weights: Arrays, gradients: Arrays, slopes: Any, ones: Any) -> None:
        """Use the weights of networks, (k, ...), and write gradients, which are parts of slopes.

        A batch has at most as many samples as there are ones, (1, 1, n).
        """
        self.weights, self.slopes = weights, slopes
        for layer in self.linear:
            layer.bind(weights, gradients, ones)

    def forward(self, x: Any) -> tuple[Any, Any, Any]:
        """Compute outputs, and return them with the features and the weight of the last layer."""
        for layer in self._layers:
            x = layer.forward(x)
        return x, self.last.x, self.last.weight

    def backward(self, z: Any, phi: Any = None, weight: Any = None, earlier: Any = None) -> None:
        """Compute the gradients of the weights, see `Body`."""
        of_weights = {} if earlier is None else earlier.weights
        of_features = {} if earlier is None else earlier.of_features
        last, outer = len(self._behind), z
        for i in range(last, -1, -1):
            layer = self.linear[i]
            layer.backward(outer)
            if i in of_weights:
                layer.to_weight += of_weights[i]
            if i == last and weight is not None:
                layer.to_weight += weight
            if not i:
                return
            outer = outer @ layer.weight
            if i == last and phi is not None:
                outer += phi
            if i in of_features:
                outer += of_features[i] * layer.x
            outer = self.pull(outer, i - 1)


def find_chain(module: nn.Module, shape: tuple[int, ...]) -> Chain | None:
    """Find the layers of a network that is a chain, for samples of some shape."""
    layers: list[Any] = []
    flat = len(shape) == 1
    for name, layer in _list_layers(module):
        kind = type(layer)
        if kind is nn.Linear and flat:
            last = layer
            layers.append(_Linear(name, layer))
        elif kind is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
            layers.append(
                _Function(
                    lambda x: x.reshape(*x.shape[:2], -1),
                    lambda g, x, y: g.reshape(x.shape),
                    in_pieces=True,
                )
            )
            flat = True
        elif kind is nn.Dropout and flat:
            layers += [_Dropout(layer)] if layer.p else []
        elif kind in _FUNCTIONS:
            layers.append(_FUNCTIONS[kind](layer))
        elif kind is not nn.Identity:
            return None
    if not layers or not isinstance(layers[-1], _Linear):
        return None
    return Chain(layers, last.out_features)


def _list_layers(module: nn.Module, name: str = "") -> list[tuple[str, Any]]:
    """List the layers of nested sequences."""
    if type(module).forward is not nn.Sequential.forward:
        return [(name, None if module._modules else module)]
    # `named_children` would leave out the second place of an activation that is used twice
    return [
        layer
        for child, part in module._modules.items()
        if part is not None
        for layer in _list_layers(part, f"{name}.{child}" if name else child)
    ]
