"""Norms of the weights, over the margin."""

from relflat_sk.measures._norms.norms import NORMS

__all__ = ["NORMS"]
