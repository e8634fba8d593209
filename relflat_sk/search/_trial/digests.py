"""Checksums of data, which tell whether a study goes on with the same samples."""

import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from scipy import sparse

from relflat_sk._network import as_row_source, copy_rows, is_row_source

__all__ = ["digest"]

_BLOCK = 2**24  # bytes of an array that are read at a time


def digest(data: Any) -> str | None:
    """Return shape and checksum of data."""
    if sparse.issparse(data):
        matrix = data.tocsr()
        parts = [_checksum(one) for one in (matrix.data, matrix.indices, matrix.indptr)]
        return f"{data.shape} {' '.join(map(str, parts))}"
    if isinstance(data, Mapping):
        found = {str(key): digest(one) for key, one in sorted(data.items())}
        return None if None in found.values() else str(found)
    if isinstance(data, torch.Tensor):
        data = data.detach().cpu()
        # numpy has no bfloat16
        data = (data if data.dtype != torch.bfloat16 else data.view(torch.int16)).numpy()
    on_disk = is_row_source(data)
    if not (on_disk or hasattr(data, "__array__") or isinstance(data, list)):
        return None
    try:
        array = as_row_source(data) if on_disk else np.asarray(data)
    except (TypeError, ValueError):  # no numbers; lists of unequal length
        return None
    if not array.ndim:
        return None
    return f"{array.shape} {_checksum(array)}"


def _checksum(array: Any) -> int:
    """Compute the checksum of an array's bytes, block by block: it may be on disk."""
    if array.dtype == object:
        array = array.astype(str)
    if 0 in array.shape:
        return zlib.crc32(b"")
    rows = max(1, _BLOCK // max(1, math.prod(array.shape[1:]) * array.dtype.itemsize))
    checksum = 0
    for start in range(0, len(array), rows):
        block = copy_rows(array, slice(start, start + rows))
        checksum = zlib.crc32(block.reshape(-1).view(np.uint8).data, checksum)
    return checksum
