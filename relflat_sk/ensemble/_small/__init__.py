"""Training steps of one small network with NumPy, whose calls take a quarter of torch's time."""

from relflat_sk.ensemble._small.step import SmallStep, find_small_step, one_blas_thread

__all__ = ["SmallStep", "find_small_step", "one_blas_thread"]
