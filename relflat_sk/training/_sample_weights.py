"""Sample weights on their way through skorch, whose batches are pairs (X, y).

A weight travels with its label: a data set with weights returns `Weighted` labels, any data
loader batches them, and the net's loss separates them again. Callbacks get batches without.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.sparse import issparse
from skorch import NeuralNet
from skorch.dataset import Dataset as SkorchDataset
from skorch.utils import data_from_dataset, is_skorch_dataset, multi_indexing
from torch.utils.data import Dataset, Subset, TensorDataset

from relflat_sk._models import DataOptions, skorch_batches, skorch_network
from relflat_sk._network import (
    Batch,
    Batches,
    Network,
    as_row_source,
    is_on_disk,
)
from relflat_sk.training._tasks import check_measurable


class Weighted(NamedTuple):
    """Labels with the weights of their samples; data loaders collate both.

    Shapes: `weight` (n,).
    """

    target: Any
    weight: Any


class WeightedDataset(Dataset[Any]):
    """A data set of pairs (x, y), with a weight for each. Shapes: `weights` (n,)."""

    def __init__(self, dataset: Any, weights: np.ndarray) -> None:
        self.dataset = dataset
        self.weights = weights

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: Any) -> tuple[Any, Weighted]:
        x, y = self.dataset[i]
        return x, Weighted(y, float(self.weights[i]))

    # skorch and its callbacks read whole arrays from these attributes, if a data set has them

    @property
    def X(self) -> Any:
        """The inputs of all samples."""
        return data_from_dataset(self.dataset)[0]

    @property
    def y(self) -> Any:
        """The labels of all samples."""
        return data_from_dataset(self.dataset)[1]


class _WeightedArrays(WeightedDataset, SkorchDataset):
    """A weighted data set that skorch's callbacks recognise as skorch's own."""


def with_weights(dataset: Any, weights: np.ndarray) -> WeightedDataset:
    """Add a weight to each sample of a data set. Shapes: `weights` (n,)."""
    kind = _WeightedArrays if is_skorch_dataset(dataset) else WeightedDataset
    return kind(dataset, weights)


def plain_batch(batch: Any) -> Any:
    """Remove the sample weights from a batch."""
    if isinstance(batch, list | tuple) and len(batch) == 2 and isinstance(batch[1], Weighted):
        return [batch[0], batch[1].target]
    return batch


def split_target(y: Any) -> tuple[Any, Any]:
    """Separate the labels of a batch from its sample weights. Shapes: returns weights (n,)."""
    return y if isinstance(y, Weighted) else (y, None)


def training_network(net: NeuralNet, dataset: Any) -> Network:
    """Read a net with its training data, sample weights included.

    Arrays are read in large batches, and sparse matrices in batches as large as in training. Other
    data sets are read through the net's data loader, because only they know how to make samples.
    """
    check_measurable(net)
    base, rows, weights = _base_of(dataset)
    options = DataOptions(sample_weight=weights)
    if type(base) in (SkorchDataset, TensorDataset, net.dataset) and _has_arrays(base):
        X, y = data_from_dataset(base) if rows is None else _chosen(base, rows)
        if issparse(X) and net.batch_size > 0:  # made dense by the batch: no larger than a step's
            options = replace(options, batch_size=min(options.batch_size, int(net.batch_size)))
        batches = skorch_batches(net, X, y, options)
    elif weights is None:
        batches = skorch_batches(net, dataset, None, options)
    else:
        batches = _weighted_batches(net, dataset, options.batch_size)
    return skorch_network(net, batches, options)


def _chosen(dataset: Any, rows: Any) -> tuple[Any, Any]:
    """Return some samples of a data set of arrays; those on disk are not read."""
    X, y = data_from_dataset(dataset)
    if is_on_disk(X):
        return as_row_source(X).subset(rows), multi_indexing(y, rows)
    chosen: tuple[Any, Any] = data_from_dataset(Subset(dataset, rows))
    return chosen


def _has_arrays(dataset: Any) -> bool:
    try:
        return data_from_dataset(dataset)[1] is not None
    except AttributeError:
        return False


def _base_of(dataset: Any) -> tuple[Any, Any, np.ndarray | None]:
    """Find the innermost data set, the rows of it that are used, and the weights of these."""
    if isinstance(dataset, WeightedDataset):
        base, rows, _ = _base_of(dataset.dataset)
        return base, rows, dataset.weights
    if isinstance(dataset, Subset):
        base, rows, weights = _base_of(dataset.dataset)
        indices = np.asarray(dataset.indices)
        chosen = indices if rows is None else rows[indices]
        return base, chosen, None if weights is None else weights[indices]
    return dataset, None, None


def _weighted_batches(net: NeuralNet, dataset: Any, batch_size: int) -> Batches:
    """Batch a data set with weights through the net's validation loader."""
    params = {**net.get_params_for("iterator_valid"), "batch_size": batch_size}
    loader = net.iterator_valid(dataset, **params)

    def batches() -> Any:
        for x, (y, weight) in loader:
            yield Batch(x, torch.as_tensor(y), weight.double())

    return batches
