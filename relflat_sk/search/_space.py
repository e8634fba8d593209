"""The parameters that a search varies: choices, ranges of numbers, functions of a trial."""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import product
from pickle import PicklingError
from typing import Any

import joblib
import numpy as np
import optuna
import torch
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import FixedTrial, FrozenTrial
from torch import Tensor

from relflat_sk.search._storage import quiet_log

PLAIN = (type(None), bool, int, float, str)  # the types that Optuna stores

Entry = CategoricalDistribution | FloatDistribution | IntDistribution | Callable[[Any], Any]


class Space:
    """The parameters of an estimator that a search varies.

    Choices may be any objects: classes, tuples, callbacks. If Optuna cannot store an object,
    the study has a label in its place: the object's name or `repr`. A choice that is listed
    twice counts once. A function of the trial is called again to find out which value a finished
    trial had, so its result must depend only on the trial's `suggest_...` methods and `number`.
    """

    def __init__(self, space: Mapping[str, Any] | Callable[[Any], Mapping[str, Any]]) -> None:
        self.function = None if isinstance(space, type) or not callable(space) else space
        space = {} if self.function is not None else space
        if not isinstance(space, Mapping):
            raise TypeError(
                "space must be a dict of parameters, see FlatMinimaSearch, or a function of a "
                f"trial that returns one, got {type(space).__name__}."
            )
        if not space and self.function is None:
            raise ValueError(
                "space is empty: name at least one parameter, as in {'batch_size': [16, 64]}."
            )
        self.entries: dict[str, Entry] = {}
        # labels are made once: a class of a script has another `repr` in a worker process
        self.choices: dict[str, dict[Any, Any]] = {}  # the value of each label
        for name, values in space.items():
            self._read(str(name), values)

    def _read(self, name: str, values: Any) -> None:
        """Read one entry."""
        if isinstance(values, CategoricalDistribution):
            values = values.choices
        if hasattr(values, "tolist"):  # arrays, series, tensors
            values = values.tolist()
        is_function = callable(values) and not isinstance(values, type)
        if isinstance(values, FloatDistribution | IntDistribution) or is_function:
            self.entries[name] = values
            return
        if not isinstance(values, Sequence) or isinstance(values, str | bytes):
            raise TypeError(
                f"space[{name!r}] must be a list of choices, a distribution of optuna, or a "
                f"function of a trial, got {values!r}. A value goes into a list: [{_name(values)}]."
            )
        if not len(values):
            raise ValueError(f"space[{name!r}] has no choices.")
        self.choices[name] = _label_each(values)
        self.entries[name] = CategoricalDistribution(tuple(self.choices[name]))

    def example(self) -> dict[str, Any]:
        """Return a value for each parameter: its first choice, or the least of its range."""
        choices = {name: next(iter(values.values())) for name, values in self.choices.items()}
        return choices | {
            name: entry.low
            for name, entry in self.entries.items()
            if isinstance(entry, FloatDistribution | IntDistribution)
        }

    def distributions(self) -> dict[str, BaseDistribution]:
        """Return the distributions that Optuna draws from."""
        entries = self.entries.items()
        return {name: entry for name, entry in entries if isinstance(entry, BaseDistribution)}

    def described(self) -> dict[str, Any]:
        """Return what must stay as it is if trials are to be added to a study.

        A range may change: its trials stay what they are.
        """
        described: dict[str, Any] = {} if self.function is None else {"": self.function}
        for name, entry in self.entries.items():
            if isinstance(entry, FloatDistribution | IntDistribution):
                described[name] = [type(entry), entry.log]
            else:
                described[name] = self.choices.get(name, entry)
        return described

    def suggest(self, trial: Any) -> dict[str, Any]:
        """Draw one value for each parameter, from functions that can be called again."""
        params = self._draw(trial)
        _, errors = self.draw_again(FixedTrial(trial.params, trial.number))
        for name, error in errors.items():
            raise ValueError(
                f"the function of the space{f' for {name!r}' if name else ''} raises "
                f"{type(error).__name__} when it is called again for the same trial: {error}. It "
                "may use the trial's suggest_... methods, params and number only."
            ) from error
        return params

    def _draw(self, trial: Any) -> dict[str, Any]:
        """Draw one value for each parameter."""
        if self.function is None:
            return {name: self._suggest(trial, name) for name in self.entries}
        params = self.function(trial)
        if not isinstance(params, Mapping):
            raise TypeError(f"the function space must return a dict of parameters, got {params!r}.")
        return dict(params)

    def _suggest(self, trial: Any, name: str) -> Any:
        """Draw the value of one parameter."""
        entry = self.entries[name]
        if isinstance(entry, CategoricalDistribution):
            drawn = trial.suggest_categorical(name, entry.choices)
            return list(self.choices[name].values())[int(entry.to_internal_repr(drawn))]
        if isinstance(entry, IntDistribution):
            return trial.suggest_int(name, entry.low, entry.high, step=entry.step, log=entry.log)
        if isinstance(entry, FloatDistribution):
            return trial.suggest_float(name, entry.low, entry.high, step=entry.step, log=entry.log)
        return entry(trial)

    def computed(self, trial: Any, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that functions returned, as columns; without those that Optuna drew."""
        functions = params if self.function is not None else self.entries
        return {
            name: label_of(params[name])
            for name in functions
            if callable(self.entries.get(name, self.function))
            and name in params
            and name not in trial.params
        }

    def values(self, trial: FrozenTrial) -> dict[str, Any]:
        """Return the values that a finished trial had; of a failed one, those that it drew.

        Ranges are those from which it drew.
        """
        then = copy.copy(self)
        ranges = FloatDistribution | IntDistribution
        then.entries = self.entries | {
            name: distribution
            for name, distribution in trial.distributions.items()
            if isinstance(distribution, ranges) and isinstance(self.entries.get(name), ranges)
        }
        return then.draw_again(FixedTrial(trial.params, trial.number))[0]

    def draw_again(self, trial: Any) -> tuple[dict[str, Any], dict[str, Exception]]:
        """Draw the values of a trial of which all or some are known, and return what fails.

        A user's function may raise anything. The name of the function of a whole space is empty.
        """
        values, errors = dict[str, Any](), dict[str, Exception]()
        if self.function is not None:
            try:
                values = self._draw(trial)
            except Exception as error:
                errors[""] = error
        for name in self.entries:
            try:
                values[name] = self._suggest(trial, name)
            except Exception as error:
                errors[name] = error
        return values, errors

    def grid(self) -> list[dict[str, Any]] | None:
        """List all combinations of the choices."""
        drawn = self.distributions()
        if not self.choices or len(self.choices) < len(drawn):
            return None
        labels = product(*self.choices.values())
        points = [dict(zip(self.choices, combination, strict=True)) for combination in labels]
        draws_more = len(drawn) < len(self.entries) and self._draws_more(points)
        return None if draws_more else points

    def _draws_more(self, points: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether functions draw other parameters than the choices of a grid."""
        with quiet_log():
            study = optuna.create_study()
        for point in points:
            study.enqueue_trial(dict(point))
            trial = study.ask()
            self.draw_again(trial)
            if trial.params.keys() - point.keys():
                return True
        return False


class _Label(str):
    """The text of a choice that Optuna cannot store; it equals the choice, to be enqueued."""

    __slots__ = ("value",)
    value: Any

    def __new__(cls, text: str, value: Any) -> "_Label":
        label = super().__new__(cls, text)
        label.value = value
        return label

    __array_ufunc__ = None  # so that an array leaves the comparison to the label

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            return str.__eq__(self, other)
        return _is_copy(self.value, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def __reduce__(self) -> Any:
        return _Label, (str(self), self.value)

    def __deepcopy__(self, memo: Any) -> "_Label":
        return self


def _is_copy(value: Any, other: Any) -> bool:
    """Return whether two objects have the same contents.

    A study in memory copies what is enqueued, and a database stores tuples as lists.
    """
    if isinstance(value, list | tuple) and isinstance(other, list | tuple):
        return len(value) == len(other) and all(map(_is_copy, value, other))
    if value is other or type(value) is not type(other):
        return value is other
    if isinstance(value, Mapping):
        return value.keys() == other.keys() and all(_is_copy(value[k], other[k]) for k in value)
    if isinstance(value, Tensor):
        return torch.equal(value, other)
    is_equal = False
    with suppress(AttributeError, PicklingError, TypeError):  # it holds a function without a name
        is_equal = joblib.hash(value) == joblib.hash(other)
    if not is_equal and getattr(value, "__dict__", None):
        is_equal = _is_copy(vars(value), vars(other))
    return is_equal


def labels_of(trial: Any) -> dict[str, Any]:
    """Return the parameters of a trial as its study stores them, also those that were enqueued."""
    return {
        name: distribution.to_external_repr(distribution.to_internal_repr(trial.params[name]))
        for name, distribution in trial.distributions.items()
    }


def _label_each(values: Sequence[Any]) -> dict[Any, Any]:
    """Label choices for Optuna; those that are equal to it, such as 1 and True, by number.

    Plain values that are listed again are dropped; two objects are always two choices.
    """
    unique: dict[Any, Any] = {}
    for index, value in enumerate(values):
        plain = value.item() if isinstance(value, np.generic) else value
        key = (type(plain), plain) if isinstance(plain, PLAIN) else index
        unique.setdefault(key, plain)
    labels = [label_of(value) for value in unique.values()]
    if len(set(labels)) < len(labels):
        labels = [
            _Label(f"{index}: {_name(value)}", value) for index, value in enumerate(unique.values())
        ]
    return dict(zip(labels, unique.values(), strict=True))


def label_of(value: Any) -> Any:
    """Return a value if Optuna can store it, or else a text that every process agrees on."""
    value = value.item() if isinstance(value, np.generic) else value
    is_nan = isinstance(value, float) and value != value  # noqa: PLR0124
    return value if isinstance(value, PLAIN) and not is_nan else _Label(_name(value), value)


def _name(value: Any) -> str:
    return getattr(value, "__name__", None) or plain_repr(value)


def plain_repr(value: Any) -> str:
    """Return the `repr` of a value without addresses, which differ in every process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
