r"""Losses with their gradients and trace terms, by formula, over arrays of NumPy or torch.

Any leading axes stand for several networks: outputs ``z`` and targets are of shape (..., n, d),
the features ``phi`` of the last layer (..., n, m), its weight ``W`` (..., d, m), numbers of
samples (..., n), and those of networks (...). A loss is a sum of the samples' losses times their
``shares``, so that there is one formula with and without sample weights. The *trace term* is
``sum_i scale_i |phi_i|^2 Tr(W^T B_i W)`` with the curvature ``B_i`` of sample i's loss, and a
scale of shape (..., n, 1), or one number.
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from relflat_sk._numerics import (
    distances_of_many,
    dots,
    gaps_between,
    transposed,
    without_diagonal,
)


def namespace(array: Any) -> Any:
    """Return the library of an array, whose functions have the same names in both."""
    return torch if isinstance(array, Tensor) else np


class TraceTerm(NamedTuple):
    """A trace term with its partial derivatives; that in the features is ``of_phi * phi``."""

    value: Any  # (...)
    z: Any  # (..., n, d)
    of_phi: Any  # (..., n, 1)
    weight: Any  # (..., d, m)


class Slopes(NamedTuple):
    """Losses of networks with their gradients, and what the outputs ``z`` predict."""

    value: Any  # (...)
    z: Any  # (..., n, d)
    p: Any  # (..., n, d)


class ArrayLoss(ABC):
    """A loss of outputs."""

    # the slope of an output's loss, as a multiple of ``p - target``
    slope = 1.0

    def divisor(self, d: int) -> int:
        """Return what each sample adds to the divisor of the mean."""
        return d

    def targets(self, values: Any, d: int, like: Any) -> Any:
        """Return targets of the outputs' shape and kind from those that the criterion takes."""
        return values

    @abstractmethod
    def each(self, z: Any, target: Any) -> tuple[Any, Any]:
        """Compute the samples' losses, (..., n), and what the outputs predict, (..., n, d)."""

    def slopes(self, z: Any, target: Any, shares: Any) -> Slopes:
        """Compute the losses of networks, and their gradients in the outputs."""
        losses, p = self.each(z, target)
        scale = shares * (self.slope / self.divisor(z.shape[-1]))
        return Slopes(dots(losses, shares), (p - target) * scale[..., None], p)

    @abstractmethod
    def trace_term(self, p: Any, phi: Any, weight: Any, scale: Any) -> TraceTerm:
        """Compute the trace term at the last layer, given the predictions of `slopes`."""

    def of_constant(self, z: Any, target: Any, shares: Any) -> Any:
        """Compute the losses of the networks' mean output, the same for all samples."""
        losses = dots(self.each(shares[..., None, :] @ z, target)[0], shares)
        return losses + np.inf if z.shape[-2] == 1 else losses


class CrossEntropy(ArrayLoss):
    """The mean cross-entropy; a target has the probabilities of the classes."""

    def __init__(self, smoothing: float = 0.0) -> None:
        self._smoothing = smoothing

    def divisor(self, d: int) -> int:
        return 1

    def targets(self, values: Any, d: int, like: Any) -> Any:
        hot = (values[..., None] == torch.arange(d, device=values.device)).to(like)
        return hot * (1 - self._smoothing) + self._smoothing / d if self._smoothing else hot

    def each(self, z: Any, target: Any) -> tuple[Any, Any]:
        xp = namespace(z)
        top = z.amax(-1) if isinstance(z, Tensor) else z.max(-1)
        shifted = z - top[..., None]
        p = xp.exp(shifted)
        total = p.sum(-1)[..., None]
        return xp.log(total)[..., 0] - dots(target, shifted), p / total

    def trace_term(self, p: Any, phi: Any, weight: Any, scale: Any) -> TraceTerm:
        # Tr(W^T B W) = sum_k Var_p(W_k) = 1/2 sum_st p_s p_t |w_s - w_t|^2: no term is negative,
        # so the result is exact to rounding if the distances are
        gaps = gaps_between(weight)
        if gaps is None:
            rows = weight - weight.mean(-2)[..., None, :]
            distances = distances_of_many(rows)
        else:
            distances = dots(gaps, gaps)
        slope = p @ distances
        forms = dots(slope, p)[..., None]  # twice the variances
        norms = dots(phi, phi)[..., None] * scale
        weighted = p * norms
        pairs = transposed(p) @ weighted
        if gaps is None:
            # a class has no distance to itself, whose large share would round the others away
            pairs = without_diagonal(pairs)
            of_weight = 2 * (pairs.sum(-1)[..., None] * rows - pairs @ rows)
        else:
            of_weight = 2 * (pairs[..., None, :] @ gaps)[..., 0, :]
        value = dots(forms[..., 0], norms[..., 0]) / 2
        return TraceTerm(value, weighted * (slope - forms), forms * scale, of_weight)


class _OutputLoss(ArrayLoss):
    """A mean over all outputs of all samples, of a loss of each of them."""

    @abstractmethod
    def derivatives(self, p: Any) -> tuple[Any, Any]:
        """Compute the second and the third derivative of each output's loss."""

    def trace_term(self, p: Any, phi: Any, weight: Any, scale: Any) -> TraceTerm:
        second, third = self.derivatives(p)
        squares = dots(weight, weight)[..., None, :]
        norms = dots(phi, phi)[..., None] * scale
        forms = dots(second, squares)[..., None]
        of_weight = 2 * (second * norms).sum(-2)[..., None] * weight
        value = dots(forms[..., 0], norms[..., 0])
        return TraceTerm(value, third * squares * norms, 2 * forms * scale, of_weight)


class SquaredError(_OutputLoss):
    """The mean squared error."""

    slope = 2.0

    def each(self, z: Any, target: Any) -> tuple[Any, Any]:
        error = z - target
        return (error * error).mean(-1), z

    def derivatives(self, p: Any) -> tuple[Any, Any]:
        zeros = namespace(p).zeros_like(p)
        return zeros + 2, zeros


class LogisticLoss(_OutputLoss):
    """The mean logistic loss of labels from 0 to 1."""

    def each(self, z: Any, target: Any) -> tuple[Any, Any]:
        xp = namespace(z)
        losses = xp.logaddexp(xp.zeros_like(z), z) - z * target
        return losses.mean(-1), 1 / (1 + xp.exp(-z))

    def derivatives(self, p: Any) -> tuple[Any, Any]:
        second = p * (1 - p)
        return second, second * (1 - 2 * p)


def find_array_loss(criterion: Any, target: Tensor, d: int) -> ArrayLoss | None:
    """Find the formulas of a criterion for targets that it has accepted, if there are any.

    `target` holds the labels of all samples, which are none of those that the criterion ignores.
    Class weights are no part of the formulas: they act as weights of the samples.
    """
    kind, weight = type(criterion), getattr(criterion, "weight", None)
    if getattr(criterion, "reduction", "") != "mean":
        return None
    if kind is nn.CrossEntropyLoss and target.ndim == 1 and not target.is_floating_point():
        ignored = (target == criterion.ignore_index).any()
        mixed = weight is not None and criterion.label_smoothing  # weights of several classes
        return None if ignored or mixed else CrossEntropy(criterion.label_smoothing)
    if target.ndim != 2 or target.shape[1] != d or weight is not None:
        return None
    if kind is nn.MSELoss:
        return SquaredError()
    if kind is nn.BCEWithLogitsLoss and criterion.pos_weight is None:
        return LogisticLoss()
    return None
