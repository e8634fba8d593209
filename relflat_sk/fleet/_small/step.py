"""A training step of one network, with the penalty at its last layer and the limit."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from threadpoolctl import ThreadpoolController
from torch import Tensor, nn

from relflat_sk._penalty import PenaltyLimit
from relflat_sk.fleet._chain import list_layers
from relflat_sk.fleet._data import ArrayBatch
from relflat_sk.fleet._small.criteria import (
    CrossEntropy,
    LogisticLoss,
    SmallCriterion,
    SquaredError,
    Term,
)
from relflat_sk.fleet._small.layers import LAYERS, Layer, Linear

__all__ = ["SmallStep", "find_small_step", "one_blas_thread"]

Array = np.ndarray[Any, Any]

_CRITERIA: dict[type, type[SmallCriterion]] = {
    nn.CrossEntropyLoss: CrossEntropy,
    nn.MSELoss: SquaredError,
    nn.BCEWithLogitsLoss: LogisticLoss,
}
# Multiplications of a layer's forward pass. Arithmetic takes most of the time of larger ones, and
# then torch is as fast.
_MOST = 2**22


def find_small_step(
    module: nn.Module, criterion: nn.Module, inputs: Tensor, divisor: float | None
) -> "SmallStep | None":
    """Find the steps of a chain of layers whose criterion has formulas."""
    if inputs.device.type != "cpu" or inputs.dtype not in (torch.float32, torch.float64):
        return None
    if getattr(criterion, "label_smoothing", 0):
        return None
    layers: list[Layer] = []
    for name, layer in list_layers(module):
        if type(layer) is nn.Linear:
            if len(inputs) * layer.weight.numel() > _MOST:
                return None
            layers.append(Linear(name, layer))
        elif type(layer) in LAYERS:
            layers.append(LAYERS[type(layer)]())
        elif type(layer) is not nn.Identity:
            return None
    small = _CRITERIA[type(criterion)]()
    if divisor is not None and not small.fits(*layer.weight.shape):
        return None
    return SmallStep(layers, small, divisor)


class SmallStep:
    """Training steps of one network."""

    def __init__(
        self, layers: Sequence[Layer], criterion: SmallCriterion, divisor: float | None
    ) -> None:
        self._criterion, self._divisor = criterion, divisor
        first = next(i for i, layer in enumerate(layers) if isinstance(layer, Linear))
        self._before, self._layers = layers[:first], layers[first:]
        self._linear = [layer for layer in layers if isinstance(layer, Linear)]

    def bind(self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
        """Use these weights, and write gradients to these tensors.

        Shapes: `weights, gradients` (1, ...).
        """
        arrays = [
            {name: tensor[0].numpy() for name, tensor in tensors.items()}
            for tensors in (weights, gradients)
        ]
        self._gradients = list(arrays[1].values())
        for layer in self._linear:
            layer.bind(*arrays)

    def __call__(
        self, batch: ArrayBatch, factor: float, limit: PenaltyLimit | None
    ) -> tuple[float, ...]:
        """Compute the gradients of a batch."""
        z, target, _, shares = batch
        for layer in (*self._before, *self._layers):
            z = layer.forward(z)
        loss, of_z = self._criterion.slopes(z, target, shares)
        last = self._linear[-1]
        if self._divisor is None:
            self._backward(last.backward(of_z, needed=len(self._layers) > 1))
            return (loss,)
        scale = shares * (factor / (self._divisor * 2 * last.x.shape[1]))
        term = self._criterion.curvature(z, last.x, last.weight, scale)
        if limit is None:
            self._backward_with(last, of_z, term, 1.0)
            return loss, term.value, 1.0
        gain = np.float64(np.inf)
        if len(z) > 1:
            gain = np.float64(self._criterion.constant_loss(z, target, shares) - loss)
        share = self._limited(last, of_z, term, gain, limit)
        return loss, term.value, share

    def _limited(
        self, last: Linear, of_z: Array, term: Term, gain: np.float64, limit: PenaltyLimit
    ) -> float:
        """Compute all gradients; return the share of the penalty's that the limit leaves."""
        value = np.float64(term.value)
        if not limit.needs_norms:
            share = float(limit.share(gain, value).item())
            self._backward_with(last, of_z, term, share)
            return share
        self._backward_with(last, np.zeros_like(of_z), term, 1.0)
        of_penalty = [gradient.copy() for gradient in self._gradients]
        self._backward(last.backward(of_z, needed=len(self._layers) > 1))
        norms = _norm(self._gradients), _norm(of_penalty)
        share = float(limit.share(gain, value, norms).item())
        for gradient, of_term in zip(self._gradients, of_penalty, strict=True):
            np.add(gradient, share * of_term, out=gradient)
        return share

    def _backward(self, outer: Array) -> None:
        """Compute the gradients before the last layer, from that in its features."""
        for i in reversed(range(len(self._layers) - 1)):
            outer = self._layers[i].backward(outer, needed=i > 0)

    def _backward_with(self, last: Linear, of_z: Array, term: Term, share: float) -> None:
        """Compute the gradients of the loss and a share of those of the penalty."""
        of_z = of_z + share * term.z
        np.matmul(of_z.T, last.x, out=last.to_weight)
        last.to_weight += share * term.weight
        last.backward_to_bias(of_z)
        if len(self._layers) > 1:
            of_phi = of_z @ last.weight
            of_phi += (share * term.of_phi) * last.x
            self._backward(of_phi)


def _norm(arrays: Sequence[Array]) -> np.float64:
    """Compute the norm over all arrays."""
    return np.float64(sum(np.dot(array.ravel(), array.ravel()) for array in arrays) ** 0.5)


@cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Let NumPy multiply on one thread, which small matrices do not share among several."""
    with _controller().limit(limits=1, user_api="blas"), np.errstate(all="ignore"):
        yield
