"""Small computations in which rounding or a division by zero would do harm."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# numbers of a matrix that are converted to float64 at a time
_TOGETHER = 2**20


def column_squares(matrix: Tensor) -> Tensor:
    """Sum the squares of each column in float64, without a copy of the matrix: (m,)."""
    d, m = matrix.shape
    rows = max(1, _TOGETHER // m)
    parts = (matrix[start : start + rows].double() for start in range(0, d, rows))
    return torch.stack([part.square().sum(dim=0) for part in parts]).sum(dim=0)


def constant(value: float, like: Tensor) -> Tensor:
    """Return a number as a tensor, without an operation on the device but the first time."""
    return _constant(value, like.dtype, like.device)


@cache
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((), value, dtype=dtype, device=device)


def full_precision(tensor: Tensor) -> Tensor:
    """Convert half precision to float32; return other arrays as they are."""
    return tensor.float() if tensor.dtype in {torch.float16, torch.bfloat16} else tensor


def native(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array of a type that torch knows."""
    return array.astype(native_type(array.dtype), copy=False)


def native_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return a type of numbers that torch knows, and that holds those of another type."""
    if dtype.kind not in "biuf":  # dates would become numbers, complex ones lose a part
        raise TypeError(f"expected an array of real numbers, got one of {dtype}.")
    return np.dtype(np.float64) if dtype.char == "g" else dtype.newbyteorder("=")


def or_one(divisor: Tensor) -> Tensor:
    """Replace divisors that are zero by one: what they divide is zero as well."""
    return divisor.where(divisor > 0, 1.0)


def read_numbers(*tensors: Tensor) -> list[float]:
    """Read numbers from the device, for which the host waits once."""
    if tensors[0].device.type == "cpu" or len(tensors) == 1:
        return [tensor.item() for tensor in tensors]
    numbers: list[float] = torch.stack(list(tensors)).cpu().tolist()
    return numbers


def varies(low: Tensor, high: Tensor, eps: float) -> Tensor:
    """Return which features vary by more than the rounding noise on a constant."""
    return (high - low) > 8 * eps * torch.maximum(low.abs(), high.abs())


def inverse_spread(spread: Tensor) -> Tensor:
    """Invert the spreads of features; 0 for a feature that never varies and acts as a bias."""
    return torch.where(spread > 0, spread, torch.inf).reciprocal()


def safe_root(array: Any) -> Any:
    """Take square roots of an array of NumPy or torch, whose slope at 0 is 0, not infinite."""
    xp = torch if isinstance(array, Tensor) else np
    return xp.sqrt(array.clip(xp.finfo(array.dtype).tiny))


def without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """Return a context without mixed precision, also on devices that torch knows none for."""
    device = tensor.device.type
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


# -- products and distances of rows, of arrays of NumPy or torch ---------------------------

# numbers in the differences between a weight's rows, up to which they are written out
FEW = 2**16


def transposed(array: Any) -> Any:
    """Exchange the last two axes."""
    return array.swapaxes(-1, -2)


_vecdot = getattr(np, "vecdot", None)  # from NumPy 2 on; twice as fast for short rows


def dots(left: Any, right: Any) -> Any:
    """Sum products along the last axis."""
    if isinstance(left, Tensor):
        return torch.linalg.vecdot(left, right)
    if _vecdot is not None:
        return _vecdot(left, right)
    return np.einsum("...i,...i->...", left, right)


def gaps_between(rows: Any) -> Any:
    """Return the differences between few rows, (..., d, d, m), and None for many."""
    d, m = rows.shape[-2:]
    return rows[..., :, None, :] - rows[..., None, :, :] if d * d * m <= FEW else None


def squared_distances(rows: Any) -> Any:
    """Compute the squared distances between rows: (..., d, d)."""
    gaps = gaps_between(rows)
    return distances_of_many(rows) if gaps is None else dots(gaps, gaps)


def distances_of_many(rows: Any) -> Any:
    """Compute squared distances by products, which take less memory than differences."""
    # They round to the largest distance, but leave at least the distance of a row to itself 0, with
    # which a confident prediction weighs it.
    squares = dots(rows, rows)
    products = rows @ transposed(rows)
    return without_diagonal((squares[..., None] + squares[..., None, :] - 2 * products).clip(0))


def without_diagonal(matrix: Any) -> Any:
    """Set the diagonal of square matrices to 0, of one or of several networks."""
    if isinstance(matrix, Tensor):
        identity = torch.eye(matrix.shape[-1], dtype=torch.bool, device=matrix.device)
        return matrix.masked_fill(identity, 0.0)
    return np.where(np.eye(matrix.shape[-1], dtype=bool), matrix.dtype.type(0), matrix)
