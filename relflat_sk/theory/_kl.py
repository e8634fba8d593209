"""Confidence limits of means between 0 and 1, by the divergence between two biased coins."""

from scipy.special import rel_entr

__all__ = ["kl_inverse"]

# halvings of the interval; the float64 numbers in [0, 1] have 53 digits
_HALVINGS = 60


def kl_inverse(mean: float, divergence: float) -> float:
    r"""Return the largest p whose coin diverges from the coin of the mean by no more than given."""
    low, high = mean, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        apart = rel_entr(mean, middle) + rel_entr(1 - mean, 1 - middle)
        low, high = (low, middle) if apart > divergence else (middle, high)
    return high
