"""Values with their derivatives, for many networks at once."""

from dataclasses import dataclass

from torch import Tensor

__all__ = ["PenaltySlopes", "Slopes"]


@dataclass(frozen=True)
class Slopes:
    """The loss of each member, with its gradient. Shapes: `value` (k,), `z` (k, n, ...)."""

    value: Tensor
    z: Tensor


@dataclass(frozen=True)
class PenaltySlopes:
    """The penalty of each member, with its partial derivatives.

    Shapes: `value` (k,), `z` (k, n, d), `of_phi` (k, n, 1), `of_weight` (k, d, d), `rows` (k, d,
    m).
    """

    value: Tensor
    z: Tensor
    of_phi: Tensor
    of_weight: Tensor
    rows: Tensor
