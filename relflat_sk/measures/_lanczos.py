"""The largest eigenvalue of a symmetric matrix that is known by its products."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.linalg import ArpackError, ArpackNoConvergence, LinearOperator, eigsh

from relflat_sk._random import RandomState, seed_from
from relflat_sk._warnings import warn

__all__ = ["largest_eigenvalue"]

Vector = NDArray[np.float64]

# up to this number of rows, the whole matrix costs less than the iteration
_SMALL = 24
# largest number of products in an iteration
_MAX_PRODUCTS = 1000


class _NotFiniteError(ArithmeticError):
    """A product with the matrix is not finite."""


def largest_eigenvalue(
    product: Callable[[Vector], Vector],
    size: int,
    *,
    rtol: float,
    random_state: RandomState,
    where: str,
) -> tuple[float, float]:
    """Find the largest (algebraic) eigenvalue by Lanczos' iteration."""

    def checked(vector: Vector) -> Vector:
        found = product(np.asarray(vector, dtype=np.float64).reshape(-1))
        if not np.isfinite(found).all():
            raise _NotFiniteError  # LAPACK would print a message
        return found

    try:
        if size <= _SMALL:
            dense = np.stack([checked(row) for row in np.eye(size)])
            return float(np.linalg.eigvalsh((dense + dense.T) / 2)[-1]), 0.0
        values, vectors = _iterate(checked, size, rtol, random_state, where)
        if len(values) == 0:
            return np.nan, np.nan
        value, vector = float(values[-1]), vectors[:, -1]
        return value, float(np.linalg.norm(checked(vector) - value * vector))
    except _NotFiniteError:
        return np.nan, np.nan


def _iterate(
    product: Callable[[Vector], Vector],
    size: int,
    rtol: float,
    random_state: RandomState,
    where: str,
) -> tuple[Vector, Vector]:
    """Find the largest eigenvalue and its vector, or none if the iteration fails."""
    start = np.random.default_rng(seed_from(random_state)).standard_normal(size)
    try:
        values, vectors = eigsh(
            LinearOperator((size, size), matvec=product, dtype=np.float64),
            k=1,
            which="LA",
            v0=start,
            tol=rtol,
            maxiter=max(1, _MAX_PRODUCTS // 20),
        )
    except ArpackNoConvergence as error:
        values, vectors = error.eigenvalues, error.eigenvectors
        warn(
            f"the largest eigenvalue {where} did not converge to a relative tolerance of "
            f"{rtol:g} in {_MAX_PRODUCTS} products with the Hessian."
        )
    except ArpackError:  # the matrix of a dead layer is zero, on which the iteration fails
        if product(start).any():
            raise
        values, vectors = np.zeros(1), start[:, None]
    return values, vectors
