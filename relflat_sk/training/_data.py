"""The data of a net: checks of inputs, sample weights, and batches that are cut out of arrays.

Batches of skorch are pairs (X, y). A sample weight travels with its label: a data set with weights
returns `Weighted` labels, any data loader batches them, and the net's loss separates them again.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, issparse
from sklearn.utils.validation import assert_all_finite, check_array, validate_data
from skorch import NeuralNet
from skorch.dataset import Dataset as SkorchDataset
from skorch.dataset import ValidSplit
from skorch.helper import SliceDataset
from skorch.utils import data_from_dataset, is_skorch_dataset
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from relflat_sk._models.network_of import DataOptions, skorch_batches, skorch_network
from relflat_sk._network.batches import (
    LoadedBatches,
    Weighted,
    arrays_of,
    check_finite,
    check_tensor,
    make_batches,
    map_arrays,
    mapped_file,
    split_labels,
)
from relflat_sk._network.network import Network
from relflat_sk._numerics import native, native_type


def check_inputs(net: Any, X: Any, *, reset: bool) -> Any:
    """Check X, and learn its size or compare it with the size learned before."""
    if isinstance(X, DataLoader):
        return LoadedBatches(X)
    if isinstance(X, Dataset):
        return X
    if isinstance(X, SliceDataset) and net.get_params_for("iterator_train").get("collate_fn"):
        return X  # its rows may differ in length, and only the collate function knows how
    if isinstance(X, Mapping | tuple) and not issparse(X):  # a dok_matrix is a Mapping too
        return map_arrays(_check_part, X)
    if isinstance(X, Tensor):
        X = _check_part(X)
        if len(X.shape) < 2 or 0 in X.shape:
            raise ValueError(
                "X must have shape (n_samples, n_features, ...), with something to learn from, got "
                f"{tuple(X.shape)}. Use X.reshape(-1, 1) if there is a single feature."
            )
        validate_data(net, X, reset=reset, skip_check_array=True)
    else:
        X = _check_array(net, X, reset)
    if reset:
        net.n_inputs_ = int(np.prod(X.shape[1:]))
        dtype = X.dtype if isinstance(X, Tensor) else native_type(X.dtype)
        net.is_double_ = dtype in (np.float64, torch.float64)
    return X


def _check_part(part: Any) -> Any:
    """Check one of several inputs."""
    if isinstance(part, np.ndarray):
        assert_all_finite(part, input_name="X")
        return native(part)
    if isinstance(part, Tensor):
        check_tensor(part)
    check_finite(part)
    return part


def _check_array(net: Any, X: Any, reset: bool) -> Any:
    """Return an array-like as a csr_matrix or an array that torch and skorch take."""
    X = validate_data(
        net, X, reset=reset, dtype="numeric", accept_sparse="csr", allow_nd=True, order="C"
    )
    if issparse(X):
        # skorch's data set takes no rows of a csr_array
        return csr_matrix(X.astype(native_type(X.dtype), copy=False))
    if X.dtype == object:  # as scikit-learn 1.6 returns a frame with a category of numbers
        X = check_array(X, dtype=np.float64, allow_nd=True, order="C")
    X = native(X)
    if not X.flags.writeable and mapped_file(X) is None:  # torch warns of them
        return X.copy()
    return X


def check_stream(net: Any, X: Any, sample_weight: Any) -> None:
    """Refuse to train on a stream where that needs a number of samples."""
    is_stream = isinstance(X, IterableDataset) and not hasattr(X, "__len__")
    splits = isinstance(net.train_split, ValidSplit)
    if (is_stream or isinstance(X, DataLoader)) and (splits or sample_weight is not None):
        needs = f"train_split={net.train_split!r}" if splits else "sample_weight"
        raise ValueError(
            f"{needs} needs the number of samples, but the {type(X).__name__} is read as a stream. "
            "Pass a Dataset with a length, such as loader.dataset."
        )


def with_sizes(
    factory: Callable[..., Any], given: dict[str, Any], sizes: Mapping[str, int | None]
) -> dict[str, Any]:
    """Add the sizes that a network's constructor asks for, unless the user passed them."""
    accepted = inspect.signature(factory).parameters
    asked = [name for name in sizes if name in accepted and name not in given]
    empty = inspect.Parameter.empty
    missing = [name for name in asked if sizes[name] is None and accepted[name].default is empty]
    if missing:
        to_pass = [f"module__{name}=..." for name in missing]
        raise ValueError(
            f"the module needs {' and '.join(missing)}, which fit reads from arrays X and y if the "
            "criterion is one of torch's for classes or numbers. For a Dataset or a DataLoader, "
            f"for another criterion and before fit, pass {', '.join(to_pass)}."
        )
    return given | {name: sizes[name] for name in asked if sizes[name] is not None}


# arguments of torch's loader that do not change how a batch is made of its samples
_ARGUMENTS = {"batch_size", "shuffle", "drop_last"}

# -- sample weights ------------------------------------------------------------------------


@dataclass(eq=False)
class WeightedDataset(Dataset[Any]):
    """A data set of pairs (x, y), with a weight for each."""

    dataset: Any
    weights: NDArray[np.float64]  # (n,)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: Any) -> tuple[Any, Weighted]:
        x, y = split_labels(self.dataset[i])
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


def with_weights(dataset: Any, weights: NDArray[np.float64]) -> WeightedDataset:
    """Add a weight to each sample of a data set."""
    kind = _WeightedArrays if is_skorch_dataset(dataset) else WeightedDataset
    return kind(dataset, weights)


def plain_batch(batch: Any) -> Any:
    """Remove the sample weights from a batch."""
    if isinstance(batch, list | tuple) and len(batch) == 2 and isinstance(batch[1], Weighted):
        return [batch[0], batch[1].target]
    return batch


def training_network(net: NeuralNet, dataset: Any) -> Network:
    """Read a net with its training data, sample weights included.

    Arrays are cut into large batches, and sparse matrices, which are made dense, into batches as
    large as in training. Other data sets are read through the net's data loader.
    """
    options, rows = DataOptions(), _find_rows(dataset)
    if rows is None:
        return skorch_network(net, skorch_batches(net, dataset, None, options), options)
    size = options.batch_size
    if any(map(issparse, arrays_of(rows.inputs))) and net.batch_size > 0:
        size = min(size, int(net.batch_size))
    # torch's loader draws a seed for workers, also if there are none
    loader = rows_loader(rows, batch_size=size, generator=torch.Generator())
    return skorch_network(net, make_batches(loader), options)


# -- batches that are cut out of arrays ----------------------------------------------------


@dataclass
class ArrayRows(Dataset[Any]):
    """Samples of which torch's loader takes whole batches: rows of arrays, with their weights."""

    inputs: Any  # tensors and sparse matrices, as the targets
    targets: Any
    rows: NDArray[np.intp]  # (n,)
    weights: Tensor | None  # (n,)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, samples: list[int]) -> list[Any]:
        rows = torch.from_numpy(self.rows[samples])

        def take(data: Any) -> Tensor:
            if issparse(data):
                return torch.from_numpy(data[rows.numpy()].toarray())
            return data.index_select(0, rows.to(data.device))  # type: ignore[no-any-return]

        X, y = (map_arrays(take, part) for part in (self.inputs, self.targets))
        return [X, y if self.weights is None else Weighted(y, self.weights[samples])]

    @property
    def n_numbers(self) -> int:
        """The number of input values of a sample."""
        return sum(int(np.prod(part.shape[1:])) for part in arrays_of(self.inputs))


def make_loader(dataset: Any, **arguments: Any) -> DataLoader[Any]:
    """Make torch's loader, which cuts batches out of arrays if it can: the same in less time."""
    size = arguments.get("batch_size")
    if arguments.keys() <= _ARGUMENTS and isinstance(size, int) and size > 0:
        rows = _find_rows(dataset)
        if rows is not None and len(rows):
            return rows_loader(rows, **arguments)
    return DataLoader(dataset, **arguments)


def rows_loader(rows: ArrayRows, **arguments: Any) -> DataLoader[Any]:
    """Make a loader of rows of arrays."""
    return DataLoader(rows, collate_fn=_as_it_is, **arguments)


def rows_of(loader: Any) -> ArrayRows | None:
    """Return what a loader cuts its batches out of; accelerate's makes them in its own way."""
    found = loader.dataset if type(loader) is DataLoader else None
    return found if isinstance(found, ArrayRows) else None


def _as_it_is(batch: Any) -> Any:
    """Return a batch: workers of a loader may need to pickle the function."""
    return batch


def _find_rows(dataset: Any) -> ArrayRows | None:
    """Find the arrays inside a data set, if rows can be cut out of them.

    Classes are compared exactly, since a subclass of a subset may return other samples.
    """
    if isinstance(dataset, WeightedDataset) or type(dataset) is Subset:
        found = _find_rows(dataset.dataset)
        if found is None:
            return None
        if isinstance(dataset, WeightedDataset):
            return replace(found, weights=torch.tensor(dataset.weights, dtype=torch.float64))
        chosen = np.asarray(dataset.indices, dtype=np.intp)
        weights = None if found.weights is None else found.weights[chosen]
        return replace(found, rows=found.rows[chosen], weights=weights)
    if type(dataset) is SkorchDataset:
        # skorch replaces missing labels by zeros
        parts = dataset.X, torch.zeros(len(dataset), 1) if dataset.y is None else dataset.y
    elif type(dataset) is TensorDataset and len(dataset.tensors) == 2:
        parts = dataset.tensors
    else:
        return None
    # torch's loader makes a list of a tuple
    inputs, targets = (
        map_arrays(_as_rows, list(part) if type(part) is tuple else part) for part in parts
    )
    arrays = *arrays_of(inputs), *arrays_of(targets)
    if not all(data is not None and data.shape[:1] == (len(dataset),) for data in arrays):
        return None
    return ArrayRows(inputs, targets, np.arange(len(dataset)), None)


def _as_rows(data: Any) -> Any:
    """Return a dense array as a tensor that shares its memory; None if no rows can be cut of it."""
    if issparse(data):
        return data.tocsr()
    if type(data) in (np.ndarray, np.memmap):
        with warnings.catch_warnings(), suppress(TypeError, ValueError):  # such as strings
            # torch warns of arrays that it may not write to, and nobody writes to these
            warnings.filterwarnings("ignore", "The given NumPy array is not writ")
            data = torch.from_numpy(data)
    return data if type(data) is Tensor and data.layout is torch.strided else None
