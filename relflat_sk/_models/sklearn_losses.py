"""scikit-learn's losses as torch criteria, found by the name that the estimator has for them.

Criteria of classifiers take scores before any link function and targets of 0 and 1, and
weigh classes as ``BCEWithLogitsLoss`` does.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "MLP_REGRESSION_LOSSES",
    "SGD_CLASSIFICATION_LOSSES",
    "SGD_REGRESSION_LOSSES",
    "MarginLoss",
    "SquaredEpsilonInsensitiveLoss",
    "fitted_loss",
]

_Loss = TypeVar("_Loss")


def _unreduced(losses: Tensor) -> Tensor:
    return losses


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": torch.mean,
    "none": _unreduced,
    "sum": torch.sum,
}


def _check_reduction(reduction: str) -> str:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r}, expected one of {sorted(REDUCTIONS)}.")
    return reduction


class SquaredEpsilonInsensitiveLoss(nn.Module):
    r"""Squared distance to a tube around the target: ``max(0, |z - t| - epsilon)^2``."""

    def __init__(self, epsilon: float, reduction: str = "mean") -> None:
        super().__init__()
        self.epsilon = epsilon
        self.reduction = _check_reduction(reduction)

    def extra_repr(self) -> str:
        """Show the width of the tube."""
        return f"epsilon={self.epsilon}"

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Compute the loss of predictions."""
        losses = _squared_epsilon_insensitive(input - target, self.epsilon)
        return REDUCTIONS[self.reduction](losses)


class MarginLoss(nn.Module):
    """Loss as a function of the margin ``s z``, with ``s`` 1 for positives and -1 otherwise.

    Shapes: `weight, pos_weight` (k,).
    """

    weight: Tensor | None
    pos_weight: Tensor | None

    def __init__(
        self,
        of_margin: Callable[[Tensor], Tensor],
        weight: Tensor | None = None,
        pos_weight: Tensor | None = None,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        self.of_margin = of_margin
        self.register_buffer("weight", weight)
        self.register_buffer("pos_weight", pos_weight)
        self.reduction = _check_reduction(reduction)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Compute the loss of scores. Shapes: `input`, `target` (n, k)."""
        losses = self.of_margin((2 * target - 1) * input)
        if self.pos_weight is not None:
            losses = losses * (1 + (self.pos_weight - 1) * target)
        if self.weight is not None:
            losses = losses * self.weight
        return REDUCTIONS[self.reduction](losses)


def _modified_huber(margin: Tensor) -> Tensor:
    return torch.where(margin < -1, -4 * margin, _squared_hinge(margin))


def _squared_hinge(margin: Tensor) -> Tensor:
    return torch.relu(1 - margin).square()


def _squared_error(margin: Tensor) -> Tensor:
    return (1 - margin).square()


def _huber(margin: Tensor, delta: float) -> Tensor:
    return F.huber_loss(margin, torch.ones_like(margin), reduction="none", delta=delta)


def _squared_epsilon_insensitive(residual: Tensor, epsilon: float) -> Tensor:
    return torch.relu(residual.abs() - epsilon).square()


def _squared_epsilon_insensitive_margin(margin: Tensor, epsilon: float) -> Tensor:
    return _squared_epsilon_insensitive(1 - margin, epsilon)


# From the name of a loss to a function of the estimator, whose parameters some losses need. For
# classifiers the function returns a class, which is called with the class weights.
# scikit-learn codes classes as -1 and 1: the residual of a classifier is 1 - margin, up to sign.
SGD_CLASSIFICATION_LOSSES: dict[str, Callable[[Any], Callable[..., nn.Module]]] = {
    "huber": lambda sgd: partial(MarginLoss, partial(_huber, delta=sgd.epsilon)),
    "log_loss": lambda sgd: nn.BCEWithLogitsLoss,
    "modified_huber": lambda sgd: partial(MarginLoss, _modified_huber),
    "squared_epsilon_insensitive": lambda sgd: partial(
        MarginLoss, partial(_squared_epsilon_insensitive_margin, epsilon=sgd.epsilon)
    ),
    "squared_error": lambda sgd: partial(MarginLoss, _squared_error),
    "squared_hinge": lambda sgd: partial(MarginLoss, _squared_hinge),
}
SGD_REGRESSION_LOSSES: dict[str, Callable[[Any], nn.Module]] = {
    "huber": lambda sgd: nn.HuberLoss(delta=sgd.epsilon),
    "squared_epsilon_insensitive": lambda sgd: SquaredEpsilonInsensitiveLoss(sgd.epsilon),
    "squared_error": lambda sgd: nn.MSELoss(),
}
MLP_REGRESSION_LOSSES: dict[str, Callable[[Any], nn.Module]] = {
    "poisson": lambda mlp: nn.PoissonNLLLoss(log_input=True),
    "squared_error": lambda mlp: nn.MSELoss(),
}


def fitted_loss(estimator: Any, losses: Mapping[str, _Loss]) -> _Loss:
    """Look up the loss that an estimator was fitted with."""
    try:
        return losses[estimator.loss]
    except KeyError:
        raise ValueError(
            f"{type(estimator).__name__}(loss={estimator.loss!r}) has no flatness: the loss "
            "is piecewise linear, so that its second derivative is zero or does not exist. "
            f"Losses that work: {', '.join(losses)}."
        ) from None
