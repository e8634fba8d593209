"""Losses, their gradients and curvatures, for one network.

They are those of `relflat_sk.fleet._criterion`, without the axis of the members.
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit

__all__ = ["CrossEntropy", "LogisticLoss", "SmallCriterion", "SquaredError", "Term"]

Array = np.ndarray[Any, Any]


class Term(NamedTuple):
    """The penalty of a batch, with its partial derivatives.

    Shapes: `z` (n, d), `of_phi` (n, 1), `weight` (d, m).
    """

    value: float
    z: Array
    of_phi: Array
    weight: Array


class SmallCriterion(ABC):
    """A criterion with its gradient and curvature."""

    @abstractmethod
    def slopes(self, z: Array, target: Array, shares: Array) -> tuple[float, Array]:
        """Compute the loss of a batch, and its gradient.

        Shapes: `z` (n, d), `shares` (n,); returns gradient (n, d).
        """

    @abstractmethod
    def curvature(self, z: Array, phi: Array, weight: Array, scale: Array) -> Term:
        """Compute the penalty of a batch.

        Shapes: `z` (n, d), `phi` (n, m), `weight` (d, m), `scale` (n,).
        """

    @abstractmethod
    def constant_loss(self, z: Array, target: Array, shares: Array) -> float:
        """Compute the loss of the mean output. Shapes: `z` (n, d), `shares` (n,)."""

    def fits(self, d: int, m: int) -> bool:
        """Return whether the curvature at a last layer of this size takes few numbers."""
        return True


class CrossEntropy(SmallCriterion):
    """The mean cross-entropy of class indices, targets of shape (n, 1)."""

    def slopes(self, z: Array, target: Array, shares: Array) -> tuple[float, Array]:
        n, d = z.shape
        shifted = z - np.maximum.reduce(z, 1, keepdims=True)
        p = np.exp(shifted)
        sums = np.add.reduce(p, 1, keepdims=True)
        p /= sums
        self._p = p
        chosen = target[:, 0] + np.arange(0, n * d, d)  # places in the flattened array
        loss = float(np.dot(np.log(sums[:, 0]) - shifted.ravel()[chosen], shares))
        gradient = p * shares[:, None]
        gradient.reshape(-1)[chosen] -= shares
        return loss, gradient

    def curvature(self, z: Array, phi: Array, weight: Array, scale: Array) -> Term:
        # sum_k Var(W_k) = 1/2 sum_st p_s p_t |w_s - w_t|^2
        p = self._p
        gaps = weight[:, None] - weight
        distances = np.einsum("stm,stm->st", gaps, gaps)
        slope = p @ distances
        forms = np.einsum("nd,nd->n", slope, p)  # twice the variances
        norms = np.einsum("nm,nm->n", phi, phi) * scale
        weighted = p * norms[:, None]
        pairs = p.T @ weighted
        pairs *= -2
        pairs.reshape(-1)[:: len(pairs) + 1] -= np.add.reduce(pairs, 1)
        slope -= forms[:, None]
        slope *= weighted
        value = 0.5 * float(np.dot(forms, norms))
        return Term(value, slope, (forms * scale)[:, None], pairs @ (weight - weight[0]))

    def constant_loss(self, z: Array, target: Array, shares: Array) -> float:
        mean = shares @ z
        mean -= np.maximum.reduce(mean)
        losses = np.log(np.add.reduce(np.exp(mean))) - mean
        return float(np.dot(losses[target[:, 0]], shares))

    def fits(self, d: int, m: int) -> bool:
        return d * d * m <= 2**16


class _Outputs(SmallCriterion):
    """A criterion that is a mean over all outputs of all samples."""

    def curvature(self, z: Array, phi: Array, weight: Array, scale: Array) -> Term:
        second, third = self.derivatives(z)
        squares = np.einsum("dm,dm->d", weight, weight)
        norms = np.einsum("nm,nm->n", phi, phi) * scale
        forms = second @ squares
        totals = norms @ second
        totals *= 2
        inner = third * squares
        inner *= norms[:, None]
        value = float(np.dot(forms, norms))
        forms *= scale
        forms *= 2
        return Term(value, inner, forms[:, None], totals[:, None] * weight)

    def constant_loss(self, z: Array, target: Array, shares: Array) -> float:
        return self.loss(shares @ z, target, shares)

    @abstractmethod
    def loss(self, z: Array, target: Array, shares: Array) -> float:
        """Compute the loss of a batch. Shapes: `z`, `target` (n, d), `shares` (n,)."""

    @abstractmethod
    def derivatives(self, z: Array) -> tuple[Array, Array]:
        """Compute the second and third derivative of each output's loss.

        Shapes: `z` (n, d); returns (n, d).
        """


class SquaredError(_Outputs):
    """The mean squared error, targets of shape (n, d)."""

    def loss(self, z: Array, target: Array, shares: Array) -> float:
        error = z - target
        return float(np.einsum("nd,nd,n", error, error, shares) / error.shape[1])

    def slopes(self, z: Array, target: Array, shares: Array) -> tuple[float, Array]:
        error = z - target
        gradient = error * (shares / z.shape[1])[:, None]
        loss = float(np.dot(error.ravel(), gradient.ravel()))
        gradient *= 2
        return loss, gradient

    def derivatives(self, z: Array) -> tuple[Array, Array]:
        return np.full_like(z, 2.0), np.zeros_like(z)


class LogisticLoss(_Outputs):
    """The mean logistic loss, targets of shape (n, d)."""

    def loss(self, z: Array, target: Array, shares: Array) -> float:
        losses = np.logaddexp(0, z) - z * target
        return float(np.add.reduce(shares @ losses) / losses.shape[1])

    def slopes(self, z: Array, target: Array, shares: Array) -> tuple[float, Array]:
        self._p = expit(z)
        gradient = self._p - target
        gradient *= (shares / z.shape[1])[:, None]
        return self.loss(z, target, shares), gradient

    def derivatives(self, z: Array) -> tuple[Array, Array]:
        second = self._p * (1 - self._p)
        return second, second * (1 - 2 * self._p)
