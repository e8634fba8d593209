"""Norms of the weights, divided by the margin or not."""

from relflat_sk.measures._norms.norms import NORM_MEASURES

__all__ = ["NORM_MEASURES"]
