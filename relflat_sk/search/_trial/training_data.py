"""Ways to make minima differ by their training data: fewer samples, random labels.

Names in a search's space that begin with ``data__`` are not parameters of the estimator but of
the data that a candidate is trained on:

=====================  ======================================================================
name                   meaning
=====================  ======================================================================
data__train_size       how many samples, or what share of them; all if it is not in the space
data__random_labels    share of the labels that are shuffled among each other, from 0 to 1
data__confusion_size   how many samples more, of those left over, with shuffled labels [N17]_
data__random_state     seeds all of this, 0 if it is not in the space
=====================  ======================================================================

Shuffled labels keep their frequencies, so that every kind of target can be had. A confusion set
is trained on and then left out: losses, scores and measures are of the rest, the same for all
candidates, for which all of them are minima, good or bad ones.

References
----------
.. [N17] Neyshabur, Bhojanapalli, McAllester, Srebro, "Exploring Generalization in Deep
   Learning", NeurIPS 2017, section 3.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import train_test_split
from sklearn.utils import _safe_indexing, check_random_state

__all__ = ["DATA_NAMES", "TrainingData", "is_data_name", "split_params", "vary_data"]

PREFIX = "data__"
DATA_NAMES = tuple(
    PREFIX + name for name in ("train_size", "random_labels", "confusion_size", "random_state")
)


@dataclass(frozen=True)
class TrainingData:
    """What a candidate is trained on, and what it is measured on."""

    X_fit: Any
    y_fit: Any
    X: Any
    y: Any


def is_data_name(name: str) -> bool:
    """Say whether a name in a space is of the data."""
    return name.startswith(PREFIX)


def split_params(params: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part parameters of the estimator from those of the data.

    Parameters
    ----------
    params : dict
        By the names in the space.

    Returns
    -------
    (dict, dict)
        The second without its prefix.

    Examples
    --------
    >>> split_params({"lr": 0.1, "data__train_size": 100})
    ({'lr': 0.1}, {'train_size': 100})
    """
    own = {name: value for name, value in params.items() if not is_data_name(name)}
    data = {
        name.removeprefix(PREFIX): value for name, value in params.items() if is_data_name(name)
    }
    return own, data


def vary_data(
    X: Any,
    y: Any,
    *,
    train_size: Any = None,
    random_labels: float = 0.0,
    confusion_size: int = 0,
    random_state: int = 0,
    stratify: bool = False,
) -> TrainingData:
    """Choose samples and shuffle labels.

    Parameters
    ----------
    X, y : array-like of length n
    train_size : int or float, optional
        How many samples, or what share; all if None.
    random_labels : float, default=0.0
        Share of the labels that are shuffled.
    confusion_size : int, default=0
        How many of the samples left over are trained on, with shuffled labels.
    random_state : int, default=0
        Seed.
    stratify : bool, default=False
        Whether the samples chosen have the classes in the shares that all have.

    Returns
    -------
    TrainingData
        The arrays handed in themselves if nothing is to change.

    Raises
    ------
    ValueError
        If a share is not between 0 and 1, or there are not so many samples.

    Examples
    --------
    >>> import numpy as np
    >>> data = vary_data(np.arange(10), np.arange(10), train_size=5, confusion_size=3)
    >>> len(data.X), len(data.X_fit), bool((data.X == data.y).all())
    (5, 8, True)
    """
    if not isinstance(random_labels, Real) or not 0 <= random_labels <= 1:
        raise ValueError(f"data__random_labels must be a share from 0 to 1, got {random_labels!r}.")
    if not isinstance(confusion_size, Integral) or confusion_size < 0:
        raise ValueError(
            f"data__confusion_size must be a number of samples, got {confusion_size!r}."
        )
    if train_size is None and not random_labels and not confusion_size:
        return TrainingData(X, y, X, y)
    if y is None or not hasattr(X, "__len__"):
        raise ValueError("names in space that begin with data__ need X and y as arrays.")
    rng = check_random_state(random_state)
    rows, rest = _choose(y, train_size, stratify, rng)
    if confusion_size > len(rest):
        raise ValueError(
            f"data__confusion_size={confusion_size} samples are to come from those that are not "
            f"trained on otherwise, and of {len(y)} there are {len(rest)} left. Choose a "
            "smaller data__train_size."
        )
    labels = _shuffle(rows, random_labels, rng)
    confusion = rng.permutation(rest)[: int(confusion_size)]
    return TrainingData(
        X_fit=_take(X, np.concatenate([rows, confusion])),
        y_fit=_take(y, np.concatenate([labels, rng.permutation(confusion)])),
        X=_take(X, rows),
        y=_take(y, labels),
    )


def _choose(
    y: Any, train_size: Any, stratify: bool, rng: np.random.RandomState
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    every = np.arange(len(y))
    share_of_all = not isinstance(train_size, Integral) and train_size == 1
    if train_size is None or train_size == len(y) or share_of_all:
        return every, every[:0]
    chosen, rest = train_test_split(
        every, train_size=train_size, random_state=rng, stratify=y if stratify else None
    )
    return np.sort(chosen), np.sort(rest)


def _shuffle(rows: NDArray[np.intp], share: float, rng: np.random.RandomState) -> NDArray[np.intp]:
    labels = rows.copy()
    chosen = rng.permutation(len(rows))[: round(share * len(rows))]
    labels[chosen] = rows[rng.permutation(chosen)]
    return labels


def _take(data: Any, rows: NDArray[np.intp]) -> Any:
    if hasattr(data, "iloc") or isinstance(data, list):
        return _safe_indexing(data, rows)
    return data[rows]  # arrays, sparse matrices, tensors
