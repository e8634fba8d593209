"""A forward pass of many networks, with a graph that can be differentiated twice."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Trace", "Traced"]


@dataclass(frozen=True)
class Traced:
    """A linear layer in a forward pass.

    Shapes: `inputs` (k, n, m), `output` (k, n, d), `weight` (k, d, m).
    """

    inputs: Tensor
    output: Tensor
    weight: Tensor


class Trace:
    """A forward pass with its graph. Shapes: `leaves`, `gradients` (k, ...)."""

    def __init__(
        self,
        layers: Mapping[str, Traced],
        leaves: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
    ) -> None:
        self.layers = layers
        self._leaves, self.gradients = leaves, gradients

    @property
    def last(self) -> tuple[Tensor, Tensor, Tensor]:
        """Output, inputs and weight of the last layer."""
        last = list(self.layers.values())[-1]
        return last.output, last.inputs, last.weight

    def backward(self, tensors: Sequence[Tensor], outer: Sequence[Tensor]) -> None:
        """Compute the gradients of the weights."""
        leaves = list(self._leaves.values())
        found = torch.autograd.grad(
            tensors, leaves, outer, retain_graph=True, materialize_grads=True
        )
        for name, gradient in zip(self._leaves, found, strict=True):
            self.gradients[name].copy_(gradient)
