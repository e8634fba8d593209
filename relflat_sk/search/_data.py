"""Vary the training data of a candidate: fewer samples, random labels, a confusion set [N17]_.

`MinimaObjective` documents the names. Shuffling keeps the frequencies of the labels, so it works
for any kind of target. Candidates are measured without the confusion set, so that every one that
fits the other samples is a minimum there, however badly it generalizes.

References
----------
.. [N17] Neyshabur, Bhojanapalli, McAllester, Srebro, "Exploring Generalization in Deep
   Learning", NeurIPS 2017, section 3.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import issparse
from sklearn.model_selection import train_test_split
from skorch.dataset import get_len
from torch.utils.data import DataLoader, Dataset, Subset

from relflat_sk._checks import check_integer, is_integer, is_number
from relflat_sk._network.batches import check_weights
from relflat_sk._random import as_random_state

PREFIX = "data__"
LR_SCALING = "lr_scaling"  # the rule by which learning rates follow batch sizes
DATA_NAMES = tuple(
    PREFIX + name for name in ("train_size", "random_labels", "confusion_size", "random_state")
)


@dataclass(frozen=True)
class TrainingData:
    """The data of a candidate."""

    X_fit: Any  # (n_fit, ...)
    y_fit: Any
    X: Any
    y: Any
    fit_params: Mapping[str, Any] = field(default_factory=dict)
    sample_weight: Any = None  # (n,)
    held_out: tuple[Any, Any] = (None, None)  # X_test, y_test


def split_params(params: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate parameters of the estimator from parameters of the data, without other names."""
    of_data = {name: value for name, value in params.items() if name.startswith(PREFIX)}
    if not of_data.keys() <= set(DATA_NAMES):
        raise ValueError(
            f"space names {list(of_data)}, but the names that vary the data are {list(DATA_NAMES)}."
        )
    of_net = {n: value for n, value in params.items() if n not in of_data and n != LR_SCALING}
    return of_net, {name.removeprefix(PREFIX): value for name, value in of_data.items()}


def vary_data(  # noqa: PLR0913
    X: Any,
    y: Any,
    *,
    train_size: Any = None,
    random_labels: float = 0.0,
    confusion_size: int = 0,
    random_state: int = 0,
    stratify: bool = False,
    fit_params: Mapping[str, Any] | None = None,
    sample_weight: Any = None,
) -> TrainingData:
    """Choose samples and shuffle labels; X and y stay themselves if nothing varies.

    Arguments of `fit` with one value for each sample are chosen with the samples. `stratify` says
    whether the classes have the same shares among the chosen samples as among all.
    """
    if not is_number(random_labels) or not 0 <= random_labels <= 1:
        raise ValueError(f"data__random_labels must be a share from 0 to 1, got {random_labels!r}.")
    check_integer(
        "data__confusion_size", confusion_size, minimum=0, reason="it is a number of samples"
    )
    if train_size is None and not random_labels and not confusion_size:
        return TrainingData(X, y, X, y, fit_params or {}, sample_weight)
    if y is None or not hasattr(X, "__len__"):
        raise ValueError(
            f"names in space that begin with data__ need X and y as arrays, got X of type "
            f"{type(X).__name__} and y of type {type(y).__name__}."
        )
    rng = as_random_state(random_state)
    rows, rest = _choose(y, train_size, stratify, rng)
    if confusion_size > len(rest):
        raise ValueError(
            f"data__confusion_size={confusion_size} needs as many samples beside those of "
            f"data__train_size, and of {len(y)} samples {len(rest)} are left."
        )
    labels = rows.copy()
    shuffled = rng.permutation(len(rows))[: round(random_labels * len(rows))]
    labels[shuffled] = rows[rng.permutation(shuffled)]
    confusion = rng.permutation(rest)[: int(confusion_size)]
    rows_fit = np.concatenate([rows, confusion])
    return TrainingData(
        X_fit=_take(X, rows_fit),
        y_fit=_take(y, np.concatenate([labels, rng.permutation(confusion)])),
        X=_take(X, rows),
        y=_take(y, labels),
        fit_params={
            name: _take(value, rows_fit) if _is_per_sample(value, len(y)) else value
            for name, value in (fit_params or {}).items()
        },
        sample_weight=_take(sample_weight, rows),
    )


def _is_per_sample(value: Any, n: int) -> bool:
    """Return whether an argument of `fit` has a value for each sample."""
    return not isinstance(value, str | Mapping) and hasattr(value, "__len__") and len(value) == n


def _choose(
    y: Any, train_size: Any, stratify: bool, rng: np.random.RandomState
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the rows of the chosen samples and of the others, both sorted."""
    every = np.arange(len(y))
    share_of_all = not is_integer(train_size) and train_size == 1
    if train_size is None or train_size == len(y) or share_of_all:
        return every, every[:0]
    chosen, rest = train_test_split(
        every, train_size=train_size, random_state=rng, stratify=y if stratify else None
    )
    return np.sort(chosen), np.sort(rest)


def _take(data: Any, rows: NDArray[np.intp]) -> Any:
    """Return some samples of data of any kind."""
    if data is None:
        return None
    if isinstance(data, Dataset):
        return Subset(data, rows.tolist())
    if isinstance(data, Mapping) and not issparse(data):  # a dok_matrix is a Mapping
        return {name: _take(values, rows) for name, values in data.items()}
    if isinstance(data, tuple):
        return tuple(_take(values, rows) for values in data)
    if isinstance(data, list):
        return [data[row] for row in rows]
    # frames, arrays, sparse matrices, tensors
    return getattr(data, "iloc", data)[rows]


# -- learning rates in proportion to batch sizes -------------------------------------------------

RULES: dict[str, Callable[[float], float]] = {"linear": float, "sqrt": math.sqrt}
RATES = ("lr", "learning_rate_init")  # in skorch nets, in scikit-learn's MLPs


def scale_lr(estimator: Any, params: Mapping[str, Any]) -> dict[str, float]:
    """Scale learning rates with the batch size, relative to the estimator's own batch size."""
    lr_scaling = params.get(LR_SCALING)
    if lr_scaling is None:
        return {}
    if lr_scaling not in RULES:
        raise ValueError(f"lr_scaling must be None or one of {list(RULES)}, got {lr_scaling!r}.")
    before = estimator.get_params()
    scaled = {}
    for name in [name for name in params if name.split("__")[-1] == "batch_size"]:
        size, own_size = params[name], before.get(name)
        rates_beside = [name.removesuffix("batch_size") + end for end in RATES]
        rate = next((rate for rate in rates_beside if rate in before), None)
        # -1 stands for all samples
        are_sizes = all(is_number(value) and value > 0 for value in (size, own_size))
        if rate is None or not are_sizes:
            raise ValueError(
                f"lr_scaling={lr_scaling!r} needs numbers for {name!r}, and {' or '.join(RATES)} "
                f"beside it, got {size!r} in the candidate and {own_size!r} before."
            )
        scaled[rate] = float(params.get(rate, before[rate]) * RULES[lr_scaling](size / own_size))
    return scaled


# -- checks before anything is trained -----------------------------------------------------------


def check_held_out(y: Any, X_test: Any, y_test: Any) -> None:
    """Refuse held-out samples without labels, and labels without samples."""
    # labels may be inside
    only_X = y_test is None and (y is None or isinstance(X_test, Dataset | DataLoader))
    if (X_test is None) != (y_test is None) and not only_X:
        raise ValueError("X_test and y_test go together: give both or neither.")


def check_fit_params(X: Any, fit_params: Mapping[str, Any] | None, prefix: str) -> dict[str, Any]:
    """Find the weights of samples among the arguments of `fit`, and check them."""
    passed = {} if fit_params is None else dict(fit_params)
    passed = {name: value for name, value in passed.items() if value is not None}
    weights = passed.get(f"{prefix}sample_weight", passed.get("sample_weight"))
    if weights is not None:
        weights = check_weights(weights, get_len(X))
    return {"fit_params": passed, "sample_weight": weights}
