"""Checks of the inputs X, as in scikit-learn, and the sizes that a network takes from them."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_matrix, issparse
from sklearn.utils.validation import validate_data
from skorch.dataset import ValidSplit
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from relflat_sk._network import check_kind

__all__ = ["check_inputs", "check_stream", "with_sizes"]


def check_inputs(net: Any, X: Any, *, reset: bool) -> Any:
    """Check X, and learn its size or compare it with the size learned before.

    Parameters
    ----------
    net : NeuralNet
        Gets the attributes `n_features_in_`, `n_inputs_` and `is_double_`.
    X : array-like, sparse matrix, tensor, dict or tuple of these, or Dataset
        Inputs as a user passes them.
    reset : bool
        Whether to learn the size, rather than compare it.

    Returns
    -------
    ndarray, csr_matrix, or the type of X
        Array-likes as arrays, sparse ones as a csr_matrix; tensors, mappings, tuples and data sets
        as they are.

    Raises
    ------
    ValueError
        If X is not finite, has no samples, or has other features than those learned.
    TypeError
        If X is a data loader, or holds no numbers.
    """
    if isinstance(X, Dataset):
        return X
    _refuse_loader(X)
    check_kind(X)
    if isinstance(X, Mapping | tuple) and not issparse(X):  # a dok_matrix is a Mapping too
        for part in X.values() if isinstance(X, Mapping) else X:
            _check_finite(part)
        return X
    if isinstance(X, Tensor):
        _check_tensor(net, X, reset)
    else:
        X = validate_data(
            net, X, reset=reset, dtype="numeric", accept_sparse="csr", allow_nd=True, order="C"
        )
        if issparse(X):
            X = csr_matrix(X)  # skorch's data set takes no rows of a csr_array
        elif not X.flags.writeable:  # such as joblib's memory maps: torch warns of them
            X = X.copy()
    if reset:
        net.n_inputs_ = int(np.prod(X.shape[1:]))
        net.is_double_ = X.dtype in (np.float64, torch.float64)
    return X


def _refuse_loader(X: Any) -> None:
    """Refuse data loaders, because a net makes its own from its parameters."""
    if isinstance(X, DataLoader):
        raise TypeError(
            f"X is a {type(X).__name__}, but a net makes its own batches. Pass the data set, "
            f"loader.dataset, and the loader's arguments as parameters of the net, here "
            f"batch_size={X.batch_size}; others begin with iterator_train__ or iterator_valid__."
        )


def check_stream(net: Any, X: Any, sample_weight: Any) -> None:
    """Refuse to train on a stream where that needs a number of samples.

    Parameters
    ----------
    net : NeuralNet
        Its `train_split` must work without a length.
    X : object
        Training data; anything but an `IterableDataset` without a length passes.
    sample_weight : array-like or None
        Must be None with a stream.

    Raises
    ------
    ValueError
        If there are sample weights, or samples are to be held out.
    """
    if not isinstance(X, IterableDataset) or hasattr(X, "__len__"):
        return
    stream = f"the {type(X).__name__} is a stream without a length"
    if sample_weight is not None:
        raise ValueError(
            f"sample_weight has one weight for each sample, but {stream}. Pass a Dataset with a "
            "length, or put the weights into labels and criterion."
        )
    if isinstance(net.train_split, ValidSplit):
        raise ValueError(
            f"train_split={net.train_split!r} holds out a share of the samples, but {stream}. Pass "
            "train_split=None, or a stream of validation data with "
            "skorch.helper.predefined_split."
        )


def _check_finite(X: Any) -> None:
    """Refuse arrays and tensors with NaN or infinity."""
    finite = True
    if isinstance(X, Tensor):
        finite = bool(torch.isfinite(X).all())
    elif isinstance(X, np.ndarray) and X.dtype.kind in "fc":
        finite = bool(np.isfinite(X).all())
    if not finite:
        raise ValueError("Input X contains NaN or infinity.")


def _check_tensor(net: Any, X: Tensor, reset: bool) -> None:
    """Check a tensor as validate_data checks arrays, without a copy to numpy."""
    _check_finite(X)
    if X.ndim < 2:
        raise ValueError(
            f"X must have shape (n_samples, n_features, ...), got {tuple(X.shape)}. Use "
            "X.reshape(-1, 1) if there is a single feature."
        )
    if not X.numel():
        raise ValueError(f"X has shape {tuple(X.shape)}, and there is nothing to learn from.")
    if reset:
        net.n_features_in_ = X.shape[1]
    elif getattr(net, "n_features_in_", X.shape[1]) != X.shape[1]:
        raise ValueError(
            f"X has {X.shape[1]} features, but {type(net).__name__} is expecting "
            f"{net.n_features_in_} features as input."
        )


def with_sizes(
    factory: Callable[..., Any], given: dict[str, Any], sizes: Mapping[str, int | None]
) -> dict[str, Any]:
    """Add the sizes that a network's constructor asks for, unless the user passed them.

    Parameters
    ----------
    factory : callable
        The network's class.
    given : dict
        Arguments that the user passed.
    sizes : mapping
        Sizes by the name of the argument; None if the data do not determine a size.

    Returns
    -------
    dict
        `given` with the sizes.

    Raises
    ------
    ValueError
        If the constructor requires a size that is unknown.
    """
    accepted = inspect.signature(factory).parameters
    found = dict(given)
    for name, size in sizes.items():
        if name not in accepted or name in given:
            continue
        if size is not None:
            found[name] = size
        elif accepted[name].default is inspect.Parameter.empty:
            raise ValueError(
                f"the module needs {name}, which can be read only from arrays, and for outputs "
                f"only with a known criterion. Pass module__{name}."
            )
    return found
