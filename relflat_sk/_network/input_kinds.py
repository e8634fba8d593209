"""Refuse inputs of a kind that holds no numbers, or that cannot be cut into batches."""

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import numpy as np
import pandas as pd
import torch
from scipy.sparse import issparse
from torch import Tensor

__all__ = ["check_kind"]

# how many columns or samples an error message names
_NAMED = 5


def check_kind(X: Any) -> None:
    """Refuse inputs that would fail, or become wrong numbers, further on."""
    if isinstance(X, Tensor):
        _check_tensor(X)
    elif isinstance(X, pd.DataFrame):
        _check_columns(X)
    elif hasattr(X, "__arrow_c_stream__") and hasattr(X, "columns"):
        _check_columns(_to_pandas(X))
    elif isinstance(X, np.ndarray | pd.Series) and X.dtype.kind in "mM":
        raise TypeError(
            f"X holds dates or times, of type {X.dtype}, but a network takes numbers. Turn them "
            "into numbers, such as days since the first date."
        )
    elif isinstance(X, Mapping | tuple) and not issparse(X):  # a dok_matrix is a Mapping
        for part in X.values() if isinstance(X, Mapping) else X:
            check_kind(part)
    elif isinstance(X, list):
        _check_list(X)
    elif isinstance(X, Iterator):
        raise TypeError(
            f"X is a {type(X).__name__}, which can be read only once. Pass arrays, or a torch "
            "IterableDataset whose __iter__ returns a new iterator each time."
        )


def _check_tensor(X: Tensor) -> None:
    """Refuse tensors of which no rows can be taken."""
    if X.is_meta:
        raise TypeError("X is a tensor on the meta device, which holds no values. Pass data.")
    if X.layout is not torch.strided:
        raise TypeError(
            f"X is a sparse tensor ({X.layout}), of which no batches can be cut. Pass "
            "X.to_dense(), or a matrix of scipy.sparse, of which one batch at a time is made dense."
        )
    if X.is_complex():
        raise TypeError(
            f"X holds complex numbers ({X.dtype}), but networks are measured and trained with real "
            "numbers. Pass torch.view_as_real(X), for example."
        )


def _to_pandas(X: Any) -> pd.DataFrame:
    """Return a frame of polars or pyarrow with the types that its columns have as arrays."""
    names = X.column_names if hasattr(X, "column_names") else X.columns
    return pd.DataFrame({name: np.asarray(X[name]) for name in names}, copy=False)


def _check_columns(X: pd.DataFrame) -> None:
    """Refuse columns that hold no numbers."""
    # most frames hold nothing but numbers, which their types tell; booleans are numeric, too
    other = [i for i, kind in enumerate(X.dtypes) if not pd.api.types.is_numeric_dtype(kind)]
    reasons = {X.columns[i]: _without_numbers(X.iloc[:, i]) for i in other}
    bad = {name: reason for name, reason in reasons.items() if reason}
    if bad:
        named = ", ".join(f"{name!r} ({reason})" for name, reason in list(bad.items())[:_NAMED])
        more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
        raise TypeError(
            f"X has columns that hold no numbers: {named}{more}. Encode categories, for instance "
            "with sklearn.preprocessing.OneHotEncoder, and turn dates into numbers, both in a "
            "ColumnTransformer in front of the network."
        )


def _without_numbers(column: pd.Series) -> str:
    """Say of which type a column is if it holds no numbers; nothing otherwise."""
    kind = column.dtype
    if not (getattr(kind, "kind", "O") in "mM" or isinstance(kind, pd.PeriodDtype)):
        try:
            column.to_numpy(dtype=np.float64, na_value=np.nan)
        except (TypeError, ValueError):
            pass
        else:
            return ""
    example = column.dropna().head(1).tolist()
    return f"{kind}, such as {example[0]!r}" if example else str(kind)


def _check_list(X: list[Any]) -> None:
    """Refuse lists of batches, and lists of samples with their labels."""
    first = X[0] if X else None
    parts = list(first.values()) if isinstance(first, Mapping) else first
    if isinstance(first, Mapping) or (isinstance(parts, tuple | list) and _differ(parts)):
        _refuse_list(
            f"of {len(X)} {type(first).__name__}s, like the batches or samples of a loader"
        )
    if _differ(X):
        shapes = list(dict.fromkeys(tuple(part.shape) for part in X))
        _refuse_list(f"of arrays of different shapes, such as {shapes[0]} and {shapes[1]}")


def _differ(parts: Any) -> bool:
    """Return whether these are arrays or tensors of more than one shape."""
    if not all(isinstance(part, Tensor | np.ndarray) for part in parts):
        return False
    return len({tuple(part.shape) for part in parts}) > 1


def _refuse_list(what: str) -> NoReturn:
    raise TypeError(
        f"X is a list {what}. Expected one array with a row for each sample: put batches together "
        "with torch.cat or numpy.concatenate, or pass a torch Dataset of pairs (x, y)."
    )
