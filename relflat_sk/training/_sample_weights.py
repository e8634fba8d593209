"""Sample weights on their way through skorch, whose batches are pairs (X, y).

A weight travels with its label: a data set with weights gives `Weighted` labels, any
loader batches them, and the net's loss takes them apart again. Callbacks never see them.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from skorch import NeuralNet
from skorch.dataset import Dataset as SkorchDataset
from skorch.utils import data_from_dataset, is_skorch_dataset
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from relflat_sk._losses import Loss
from relflat_sk._models import DataOptions, skorch_batches, skorch_network
from relflat_sk._network import Batch, Batches, Network

__all__ = ["Weighted", "plain", "split_target", "training_network", "weigh", "with_weights"]


class Weighted(NamedTuple):
    """Labels with the weights of their samples; loaders collate both."""

    target: Any
    weight: Any


class WeightedDataset(Dataset[Any]):
    """A data set of pairs (x, y), with a weight for each."""

    def __init__(self, dataset: Any, weights: np.ndarray) -> None:
        self.dataset = dataset
        self.weights = weights

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: Any) -> tuple[Any, Weighted]:
        x, y = self.dataset[i]
        return x, Weighted(y, float(self.weights[i]))

    # skorch and its callbacks find whole arrays by these names, where there are any

    @property
    def X(self) -> Any:
        """The inputs of all samples."""
        return data_from_dataset(self.dataset)[0]

    @property
    def y(self) -> Any:
        """The labels of all samples."""
        return data_from_dataset(self.dataset)[1]


class _WeightedArrays(WeightedDataset, SkorchDataset):
    """The same of skorch's own data set, which its callbacks look into."""


def with_weights(dataset: Any, weights: np.ndarray) -> WeightedDataset:
    """Give each sample of a data set its weight."""
    kind = _WeightedArrays if is_skorch_dataset(dataset) else WeightedDataset
    return kind(dataset, weights)


def plain(batch: Any) -> Any:
    """Return a batch as it is without weights."""
    if isinstance(batch, list | tuple) and len(batch) == 2 and isinstance(batch[1], Weighted):
        return [batch[0], batch[1].target]
    return batch


def split_target(y: Any) -> tuple[Any, Any]:
    """Take labels and weights of a batch apart; weights are None where none were given."""
    return y if isinstance(y, Weighted) else (y, None)


def weigh(loss: Loss, output: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Compute the weighted mean loss of a batch, its weighted sum for ``reduction="sum"``.

    As in scikit-learn, a mean is over the weights of the batch at hand. A batch without any
    weight has no loss.
    """
    losses, divisors = loss.terms(output, target, each=True)
    total = (weight * losses).sum()  # a product of vectors loses digits under autocast
    if getattr(loss.criterion, "reduction", "mean") == "sum":
        return total
    divisor = (weight * divisors).sum()
    return total / divisor.where(divisor > 0, 1.0)


def training_network(net: NeuralNet, dataset: Any) -> Network:
    """Read a net and what it trains on, weights included.

    In large batches where the data are arrays, through a loader where only the user's own
    data set knows how to make samples.
    """
    base, rows, weights = _unwrapped(dataset)
    options = DataOptions(sample_weight=weights)
    if type(base) in (SkorchDataset, TensorDataset, net.dataset) and _has_arrays(base):
        X, y = data_from_dataset(base if rows is None else Subset(base, rows))
        batches = skorch_batches(net, X, y, options)
    elif weights is None:
        batches = skorch_batches(net, dataset, None, options)
    else:
        batches = _weighted_batches(net, dataset, options.batch_size)
    return skorch_network(net, batches, options)


def _has_arrays(dataset: Any) -> bool:
    try:
        return data_from_dataset(dataset)[1] is not None
    except AttributeError:
        return False


def _unwrapped(dataset: Any) -> tuple[Any, Any, np.ndarray | None]:
    """Find the data set at the bottom, the rows of it that are used, and the weights of these."""
    if isinstance(dataset, WeightedDataset):
        base, rows, _ = _unwrapped(dataset.dataset)
        return base, rows, dataset.weights
    if isinstance(dataset, Subset):
        base, rows, weights = _unwrapped(dataset.dataset)
        indices = np.asarray(dataset.indices)
        chosen = indices if rows is None else rows[indices]
        return base, chosen, None if weights is None else weights[indices]
    return dataset, None, None


def _weighted_batches(net: NeuralNet, dataset: Any, batch_size: int) -> Batches:
    params = {**net.get_params_for("iterator_valid"), "batch_size": batch_size}
    loader = net.iterator_valid(dataset, **params)

    def batches() -> Any:
        for x, (y, weight) in loader:
            yield Batch(x, torch.as_tensor(y), weight.double())

    return batches
