"""Norms of a network's weights, over its margin or not: the rivals that look at no curvature."""

from collections.abc import Callable

from relflat_sk.estimates import Estimate

__all__ = ["NORMS"]

# from a network, and keyword arguments of its own, to the measure
NORMS: dict[str, Callable[..., Estimate]] = {}
