"""Checks of the inputs X, as in scikit-learn, and the sizes that a network takes from them."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_matrix, issparse
from sklearn.utils.validation import assert_all_finite, check_array, validate_data
from skorch.dataset import ValidSplit
from skorch.helper import SliceDataset
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from relflat_sk._network.batches import LoadedBatches, check_finite, check_tensor, mapped_file
from relflat_sk._numerics import native, native_type


def check_inputs(net: Any, X: Any, *, reset: bool) -> Any:
    """Check X, and learn its size or compare it with the size learned before."""
    if isinstance(X, DataLoader):
        return LoadedBatches(X)
    if isinstance(X, Dataset):
        return X
    if isinstance(X, SliceDataset) and net.get_params_for("iterator_train").get("collate_fn"):
        return X  # its rows may differ in length, and only the collate function knows how
    if isinstance(X, Mapping) and not issparse(X):  # a dok_matrix is a Mapping too
        return {name: _check_part(part) for name, part in X.items()}
    if isinstance(X, tuple):
        return tuple(map(_check_part, X))
    if isinstance(X, Tensor):
        X = _check_part(X)
        if len(X.shape) < 2:
            raise ValueError(
                f"X must have shape (n_samples, n_features, ...), got {tuple(X.shape)}. Use "
                "X.reshape(-1, 1) if there is a single feature."
            )
        if 0 in X.shape:
            raise ValueError(f"X has shape {tuple(X.shape)}, and there is nothing to learn from.")
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


def _check_loader(net: Any, loader: DataLoader[Any]) -> None:
    """Refuse parameters of a net that a data loader would leave without effect."""
    chosen = [] if net.batch_size in (loader.batch_size, 32) else ["batch_size"]  # the default
    for name in ("iterator_train", "iterator_valid"):
        given = net.get_params_for(name).keys() - {"batch_size", "shuffle"}
        chosen += [f"{name}__{argument}" for argument in sorted(given)]
    if chosen:
        raise ValueError(
            f"X is a {type(loader).__name__}, which makes the batches, so that {chosen[0]} of the "
            "net has no effect. Leave it out, or pass the data set, loader.dataset."
        )


def check_stream(net: Any, X: Any, sample_weight: Any) -> None:
    """Refuse to train on a stream where that needs a number of samples."""
    if isinstance(X, DataLoader):
        _check_loader(net, X)
    elif not isinstance(X, IterableDataset) or hasattr(X, "__len__"):
        return
    splits = isinstance(net.train_split, ValidSplit)
    if sample_weight is not None or splits:
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
    found = dict(given)
    missing = []
    for name, size in sizes.items():
        if name not in accepted or name in given:
            continue
        if size is not None:
            found[name] = size
        elif accepted[name].default is inspect.Parameter.empty:
            missing.append(name)
    if missing:
        to_pass = [f"module__{name}=..." for name in missing]
        raise ValueError(
            f"the module needs {' and '.join(missing)}, which the net does not know. It reads "
            "n_features from an array X, and n_outputs from an array y if the criterion is one of "
            "torch's for classes or numbers. Before fit, there are no data yet, and a Dataset or "
            f"DataLoader does not show its arrays. Pass {', '.join(to_pass)}."
        )
    return found
