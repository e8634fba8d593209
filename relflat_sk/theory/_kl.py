"""Confidence limits of means between 0 and 1, by the divergence between two biased coins."""

from scipy.special import rel_entr

__all__ = ["kl_inverse"]

# halvings of the interval; the float64 numbers in [0, 1] have 53 digits
_HALVINGS = 60


def kl_inverse(mean: float, divergence: float) -> float:
    r"""Return the largest p whose coin diverges from the coin of the mean by no more than given.

    Parameters
    ----------
    mean : float
        An observed mean q, between 0 and 1.
    divergence : float
        Largest divergence allowed, in nats.

    Returns
    -------
    float
        :math:`\max\{p \in [q, 1] : q \ln\frac{q}{p} + (1 - q) \ln\frac{1 - q}{1 - p} \le c\}`,
        rounded up. It is at most ``q + sqrt(c / 2)``, by Pinsker's inequality.

    Examples
    --------
    >>> round(kl_inverse(0.0, 0.1), 6)  # 1 - exp(-0.1)
    0.095163
    >>> kl_inverse(0.5, 0.02) < 0.5 + 0.1
    True
    """
    low, high = mean, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        apart = rel_entr(mean, middle) + rel_entr(1 - mean, 1 - middle)
        low, high = (low, middle) if apart > divergence else (middle, high)
    return high
