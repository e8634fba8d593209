"""Values with their derivatives, for many networks at once."""

from dataclasses import dataclass

from torch import Tensor

__all__ = ["PenaltySlopes", "Slopes"]


@dataclass(frozen=True)
class Slopes:
    """The loss of each member, with its gradient.

    Parameters
    ----------
    value : Tensor of shape (k,)
        The losses.
    z : Tensor of shape (k, n, ...)
        Gradient in the outputs.
    """

    value: Tensor
    z: Tensor


@dataclass(frozen=True)
class PenaltySlopes:
    """The penalty of each member, with its partial derivatives.

    Parameters
    ----------
    value : Tensor of shape (k,)
        The penalties.
    z : Tensor of shape (k, n, d)
        Derivative in the outputs.
    of_phi : Tensor of shape (k, n, 1)
        The derivative in the features of the last layer, beside that through the outputs, is
        ``of_phi * phi``.
    of_weight : Tensor of shape (k, d, d)
        The derivative in the weight of the last layer, beside that through the outputs, is
        ``of_weight @ rows``.
    rows : Tensor of shape (k, d, m)
        The weight, which may be moved by the same vector in all rows.
    """

    value: Tensor
    z: Tensor
    of_phi: Tensor
    of_weight: Tensor
    rows: Tensor
