"""Rows that a pipeline's step transforms when they are read."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import issparse

from relflat_sk._network import RowSource, as_row_source, is_row_source, mapped_file

__all__ = ["transform"]


def transform(step: Any, X: Any) -> Any:
    """Transform the inputs of a network by a step of its pipeline.

    Parameters
    ----------
    step : transformer
        A fitted step.
    X : array-like of shape (n, ...)
        Inputs of the step.

    Returns
    -------
    array-like of shape (n, ...)
        What the step returns. Rows of arrays on disk and of memory-mapped files are transformed
        when they are read, batch by batch: a transformer of scikit-learn transforms each row by
        itself.
    """
    if is_row_source(X) or mapped_file(X) is not None:
        return RowSource(_TransformedRows(step, as_row_source(X)))
    return step.transform(X)


class _TransformedRows:
    """An array-like whose rows are transformed when they are read."""

    def __init__(self, step: Any, rows: RowSource) -> None:
        self._step = step
        self._rows = rows
        first = self[:1]
        self.shape = (len(rows), *first.shape[1:])
        self.dtype = first.dtype

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        found = self._step.transform(self._rows[rows])
        return np.asarray(found.toarray() if issparse(found) else found)
