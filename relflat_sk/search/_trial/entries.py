"""The entries of a space: lists of choices, ranges of numbers, functions of a trial."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from relflat_sk.search._trial.scipy_distributions import (
    Quantiles,
    is_scipy_distribution,
    range_of,
)

__all__ = [
    "PLAIN",
    "Choices",
    "Computed",
    "Drawn",
    "as_stored",
    "is_choice",
    "is_range",
    "read_entry",
]

PLAIN = (type(None), bool, int, float, str)  # the types that Optuna stores


@dataclass(frozen=True)
class Choices:
    """A list of values, with the labels by which Optuna knows those that it cannot store.

    The labels are made once: a class of a script has another `repr` in a worker process.
    """

    values: Sequence[Any]
    labels: list[Any]

    @property
    def distribution(self) -> CategoricalDistribution:
        """The distribution that Optuna draws from."""
        return CategoricalDistribution(self.labels)

    def in_order_of(self, labels: Sequence[Any]) -> "Choices":
        """Return the same choices in another order."""
        known = [self.labels.index(label) for label in labels if label in self.labels]
        order = [*known, *(index for index in range(len(self.labels)) if index not in known)]
        return Choices([self.values[i] for i in order], [self.labels[i] for i in order])

    def suggest(self, trial: optuna.Trial, name: str) -> Any:
        """Draw a value."""
        return self.values[self.labels.index(trial.suggest_categorical(name, self.labels))]


@dataclass(frozen=True)
class Drawn:
    """A range of numbers, from which the sampler draws."""

    distribution: FloatDistribution | IntDistribution

    def suggest(self, trial: optuna.Trial, name: str) -> Any:
        """Draw a value."""
        own = self.distribution
        if isinstance(own, IntDistribution):
            return trial.suggest_int(name, own.low, own.high, step=own.step, log=own.log)
        return trial.suggest_float(name, own.low, own.high, step=own.step, log=own.log)


@dataclass(frozen=True)
class Computed:
    """A function of the trial; its result is recorded unless the trial has drawn it itself."""

    function: Callable[[optuna.Trial], Any]

    def suggest(self, trial: optuna.Trial, name: str) -> Any:
        """Draw a value."""
        value = self.function(trial)
        if name not in trial.params:
            trial.set_user_attr(f"param_{name}", as_stored(value))
        return value


def is_choice(entry: Any) -> TypeGuard[Choices]:
    """Return whether an entry of a space is a list of choices."""
    return isinstance(entry, Choices)


def is_range(entry: Any) -> bool:
    """Return whether an entry of a space draws from more values than a grid can have."""
    by_quantile = isinstance(entry, Computed) and isinstance(entry.function, Quantiles)
    return by_quantile or isinstance(entry, Drawn)


def read_entry(name: str, values: Any) -> Choices | Drawn | Computed:
    """Read one entry of a space."""
    if isinstance(values, CategoricalDistribution):
        values = list(values.choices)
    if isinstance(values, FloatDistribution | IntDistribution):
        return Drawn(values)
    if is_scipy_distribution(values):
        same = range_of(values)
        return Computed(Quantiles(name, values)) if same is None else Drawn(same)
    if hasattr(values, "tolist"):  # arrays, series, tensors
        values = values.tolist()
    if isinstance(values, Sequence) and not isinstance(values, str | bytes):
        if not len(values):
            raise ValueError(f"space[{name!r}] has no choices.")
        plain = [value.item() if isinstance(value, np.generic) else value for value in values]
        choices = _without_repetition(plain)
        return Choices(choices, _labels(choices))
    if callable(values) and not isinstance(values, type):
        return Computed(values)
    raise TypeError(
        f"space[{name!r}] must be a list of choices, a distribution of optuna or scipy, or a "
        f"function of a trial, got {values!r}. A single value goes into a list: [{_name(values)}]."
    )


def _without_repetition(values: Sequence[Any]) -> list[Any]:
    """Drop plain values that are listed again; two objects are always two choices."""
    keys = [
        (type(value), value) if isinstance(value, PLAIN) else (index,)
        for index, value in enumerate(values)
    ]
    return [value for index, value in enumerate(values) if keys.index(keys[index]) == index]


def _labels(values: Sequence[Any]) -> list[Any]:
    """Label each value; values that are equal to Optuna, such as 1 and True, by number."""
    labels = [_label(value) for value in values]
    if len(set(labels)) < len(labels):
        labels = [f"{index}: {_name(value)}" for index, value in enumerate(values)]
    return labels


def as_stored(value: Any) -> Any:
    """Return the result of a function as a study stores it."""
    return _label(value.item() if isinstance(value, np.generic) else value)


def _label(value: Any) -> Any:
    """Return a value if Optuna can store it, or else a text that every process agrees on."""
    is_nan = isinstance(value, float) and value != value  # noqa: PLR0124
    return value if isinstance(value, PLAIN) and not is_nan else _name(value)


def _name(value: Any) -> str:
    name = getattr(value, "__name__", None) or repr(value)
    return re.sub(r" at 0x[0-9a-fA-F]+", "", name)  # an address differs in every process
