"""A training step of one network, with the penalty at its last layer and the limit."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from threadpoolctl import ThreadpoolController
from torch import Tensor, nn

from relflat_sk._penalty import AT_LAST_LAYER
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
        for layer in self._linear:
            layer.bind(*arrays)

    def __call__(self, batch: ArrayBatch, factor: float, limit: float | None) -> tuple[float, ...]:
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
        room = np.inf
        if limit is not None and len(z) > 1:
            room = AT_LAST_LAYER * (self._criterion.constant_loss(z, target, shares) - loss)
        share = self._backward_with(last, of_z, term, room, limit)
        return loss, term.value, share

    def _backward(self, outer: Array) -> None:
        """Compute the gradients before the last layer, from that in its features."""
        for i in reversed(range(len(self._layers) - 1)):
            outer = self._layers[i].backward(outer, needed=i > 0)

    def _backward_with(
        self, last: Linear, of_z: Array, term: Term, room: float, limit: float | None
    ) -> float:
        """Compute all gradients; return the share of the penalty's that the limit leaves."""
        n, learns_features = len(of_z), len(self._layers) > 1
        to_weight = last.to_weight
        np.matmul(of_z.T, last.x, out=to_weight)
        term_to_weight = term.z.T @ last.x
        term_to_weight += term.weight
        of_phi = np.concatenate((of_z, term.z)) @ last.weight if learns_features else None
        if of_phi is not None:
            of_phi[n:] += term.of_phi * last.x
        share = 1.0
        if limit is not None:
            compared = [(to_weight, term_to_weight)]
            if of_phi is not None:
                through = of_phi.reshape(2, n, -1)
                shift, gain = np.add.reduce(through, 1), np.einsum("tnm,nm->tm", through, last.x)
                compared += [(shift[0], shift[1]), (gain[0], gain[1])]
            share = _share_left(limit, (room, term.value), compared)
        of_z += share * term.z
        last.backward_to_bias(of_z)
        term_to_weight *= share
        to_weight += term_to_weight
        if of_phi is not None:
            self._backward(of_phi[:n] + share * of_phi[n:])
        return share


def _share_left(
    limit: float, values: tuple[float, float], gradients: Sequence[tuple[Array, Array]]
) -> float:
    """Return the share of a penalty that its limit leaves; see `relflat_sk.fleet._limit`."""
    pairs = [values, *((_norm(of_loss), _norm(of_term)) for of_loss, of_term in gradients)]
    # where there is no penalty, there is nothing to limit
    ratios = (of_loss / of_term for of_loss, of_term in pairs if of_term > 0)
    least = min((ratio for ratio in ratios if not math.isnan(ratio)), default=math.inf)
    return min(max(limit * least, 0.0), 1.0)


def _norm(array: Array) -> float:
    flat = array.ravel()
    return math.sqrt(np.dot(flat, flat))


@cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Let NumPy multiply on one thread, which small matrices do not share among several."""
    with _controller().limit(limits=1, user_api="blas"), np.errstate(all="ignore"):
        yield
