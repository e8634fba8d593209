"""How much the loss rises when the weights are disturbed: the rivals of flatness by name."""

from collections.abc import Callable

from relflat_sk.estimates import Estimate

__all__ = ["SHARPNESS"]

# from a network, and keyword arguments of its own, to the measure
SHARPNESS: dict[str, Callable[..., Estimate]] = {}
