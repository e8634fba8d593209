"""Small computations in which rounding or a division by zero would spoil more than digits."""

import torch
from torch import Tensor

__all__ = ["full_precision", "inverse_spread", "safe_root", "varies"]


def full_precision(tensor: Tensor) -> Tensor:
    """Half-precision arrays as float32; others as they are."""
    return tensor.float() if tensor.dtype in {torch.float16, torch.bfloat16} else tensor


def varies(low: Tensor, high: Tensor, eps: float) -> Tensor:
    """Say of features whether they vary by more than the rounding noise on a constant.

    Parameters
    ----------
    low, high : Tensor
        Their smallest and largest values.
    eps : float
        Of the floating type they were computed in: relative, so that scale does not matter.

    Returns
    -------
    Tensor of bool
    """
    return (high - low) > 8 * eps * torch.maximum(low.abs(), high.abs())


def inverse_spread(spread: Tensor) -> Tensor:
    """Divide one by features' spreads; 0 where a feature never varies and acts as a bias."""
    return torch.where(spread > 0, spread, torch.inf).reciprocal()


def safe_root(array: Tensor) -> Tensor:
    """Take square roots with slope 0, not infinity, at 0 (whose root is next to nothing here)."""
    return array.clamp_min(torch.finfo(array.dtype).tiny).sqrt()
