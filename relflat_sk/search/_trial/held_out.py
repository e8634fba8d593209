"""What nets hold out for validation: their `train_split`, in a search.

A search trains on all data. A `train_split` that the user chose stays, and so does skorch's own
default if a callback monitors validation, such as `EarlyStopping`. Other nets train on all data,
because skorch's classes hold a fifth out that nobody asked for. Candidates with a split are
measured on the samples that they are trained on. The `early_stopping` of scikit-learn's estimators
holds out samples that nobody can name afterwards, so it is refused.
"""

import inspect
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from skorch import NeuralNet
from skorch.dataset import get_len
from torch.utils.data import IterableDataset, Subset

from relflat_sk._models import final_estimator
from relflat_sk.search._trial.weights import last_step

__all__ = [
    "check_early_stopping",
    "drop_default_splits",
    "explain_missing_validation",
    "split_recorded",
    "trained_rows",
]


def drop_default_splits(nets: Iterable[NeuralNet]) -> None:
    """Let nets train on all data, unless their user or one of their callbacks needs a split."""
    for net in nets:
        if _is_default(net) and not any(map(_monitors_validation, _callbacks(net))):
            net.set_params(train_split=None)


def check_early_stopping(params: Iterable[tuple[str, Any]]) -> None:
    """Refuse parameters by which an estimator of scikit-learn holds data out."""
    for name, value in params:
        if name.split("__")[-1] == "early_stopping" and isinstance(value, bool) and value:
            raise ValueError(
                f"{name}=True holds out a part of the data in each candidate, and does not tell "
                "which, so that nothing can be measured on the samples that it is trained on. Set "
                f"{name}=False: candidates stop at the search's goal, or by their tolerance. Or "
                "search over a skorch net with train_split and EarlyStopping, which are kept."
            )


def _is_default(net: NeuralNet) -> bool:
    """Return whether the split of a net is what skorch's own class sets without being asked."""
    split = net.train_split
    for kind in type(net).__mro__:
        default = inspect.signature(kind).parameters.get("train_split")
        if kind.__module__.startswith("skorch.") and default is not None:
            other = default.default
            return type(split) is type(other) and vars(split) == vars(other)
    return False


def _callbacks(net: NeuralNet) -> list[Any]:
    given = [] if net.callbacks in (None, "disable") else net.callbacks
    return [part[1] if isinstance(part, tuple) else part for part in given]


def _monitors_validation(callback: Any) -> bool:
    """Return whether a callback, or a class of callbacks, monitors more than the training loss."""
    if isinstance(callback, type):
        argument = inspect.signature(callback).parameters.get("monitor")
        monitor = None if argument is None else argument.default
    else:
        monitor = getattr(callback, "monitor", None)
    if isinstance(monitor, str):
        return not monitor.startswith("train_loss")
    return callable(monitor) and monitor is not inspect.Parameter.empty


class _RecordedSplit:
    """The `train_split` of a net, which remembers the rows that it leaves for training."""

    rows: NDArray[np.intp] | None = None
    n_samples = 0

    def __init__(self, split: Any) -> None:
        self.split = split

    def __call__(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        trained, valid = self.split(dataset, *args, **kwargs)
        if isinstance(trained, Subset) and trained.dataset is dataset:
            self.rows = np.sort(np.asarray(trained.indices, dtype=np.intp))
            self.n_samples = get_len(dataset)
        return trained, valid

    def __deepcopy__(self, memo: Any) -> "_RecordedSplit":
        return self  # an estimator around the net fits a clone of it


@contextmanager
def split_recorded(estimator: Any, X: Any) -> Iterator[None]:
    """Note in the net of an estimator which rows it is trained on, if it holds out others."""
    net = last_step(estimator)
    split = getattr(net, "train_split", None)
    if not isinstance(net, NeuralNet) or split is None or isinstance(X, IterableDataset):
        yield
        return
    net.train_split = recorded = _RecordedSplit(split)
    try:
        yield
    finally:
        net.train_split = split
    fitted = final_estimator(estimator)  # a TransformedTargetRegressor fits a copy of its net
    fitted.train_split = split
    if recorded.rows is not None and recorded.n_samples == get_len(X):
        fitted.trained_rows_ = recorded.rows


def trained_rows(estimator: Any) -> NDArray[np.intp] | None:
    """Return which rows of the data the network of an estimator was trained on.

    Shapes: returns (n_trained,).
    """
    rows: NDArray[np.intp] | None = getattr(final_estimator(estimator), "trained_rows_", None)
    return rows


def explain_missing_validation(error: KeyError) -> Exception:
    """Explain the error of a callback that reads a validation loss that nobody computes."""
    missing = re.search(r"\bvalid\w*", str(error))
    if missing is None:
        return error
    return ValueError(
        f"{missing[0]!r} is missing: a callback reads it, but the net holds no data out. "
        "A search drops skorch's default train_split unless a callback has an attribute `monitor`. "
        "Pass a train_split of your own, such as skorch.dataset.ValidSplit(0.2)."
    )
