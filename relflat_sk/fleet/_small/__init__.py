"""Training steps of one small network with NumPy, whose calls cost less than torch's."""

from relflat_sk.fleet._small.step import SmallStep, find_small_step, one_blas_thread

__all__ = ["SmallStep", "find_small_step", "one_blas_thread"]
