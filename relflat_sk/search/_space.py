"""The parameters that a search varies: choices, ranges of numbers, functions of a trial.

Values are described in short texts that are the same in every process, where a study cannot store
them. Classes and functions of the user have a checksum of their source: an edited comment counts.
"""

import inspect
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
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
from torch.utils.data import Dataset

from relflat_sk._checks import check_kind, warn
from relflat_sk.search._storage import quiet_log

Range = FloatDistribution | IntDistribution
Entry = CategoricalDistribution | FloatDistribution | IntDistribution | Callable[[Any], Any]


class Space:
    """The parameters of an estimator that a search varies.

    Choices may be any objects: classes, tuples, callbacks. If Optuna cannot store an object,
    the study has a label in its place: the object's name or `repr`. A choice that is listed
    twice counts once. A function of the trial is called again to find out which value a finished
    trial had, so its result must depend only on the trial's `suggest_...` methods and `number`.
    """

    def __init__(self, space: Any) -> None:
        # the function of the whole space has no name
        self.entries: dict[str, Entry] = {}
        # labels are made once: a class of a script has another `repr` in a worker process
        self.choices: dict[str, dict[Any, Any]] = {}  # the value of each label
        if callable(space) and not isinstance(space, type):
            self.entries[""] = space
            return
        kind = "a dict of parameters, or a function of a trial that returns one"
        check_kind(isinstance(space, Mapping), "space", space, kind)
        if not space:
            raise ValueError("space is empty: name a parameter, as in {'batch_size': [16, 64]}.")
        for name, values in dict(space).items():
            self._read(str(name), values)

    def _read(self, name: str, values: Any) -> None:
        """Read one entry."""
        if isinstance(values, CategoricalDistribution):
            values = values.choices
        if hasattr(values, "tolist"):  # arrays, series, tensors
            values = values.tolist()
        if isinstance(values, Range) or (callable(values) and not isinstance(values, type)):
            self.entries[name] = values
            return
        are_choices = isinstance(values, Sequence) and not isinstance(values, str | bytes)
        kind = "a list of choices, be it one, a distribution of optuna, or a function of a trial"
        check_kind(are_choices, f"space[{name!r}]", values, kind)
        if not len(values):
            raise ValueError(f"space[{name!r}] has no choices.")
        self.choices[name] = _label_each(values)
        self.entries[name] = CategoricalDistribution(tuple(self.choices[name]))

    def example(self) -> dict[str, Any]:
        """Return a value for each parameter: its first choice, or the least of its range."""
        choices = {name: next(iter(values.values())) for name, values in self.choices.items()}
        entries = self.entries.items()
        return choices | {name: entry.low for name, entry in entries if isinstance(entry, Range)}

    def distributions(self) -> dict[str, BaseDistribution]:
        """Return the distributions that Optuna draws from."""
        entries = self.entries.items()
        return {name: entry for name, entry in entries if isinstance(entry, BaseDistribution)}

    def described(self) -> dict[str, Any]:
        """Return what must stay as it is if trials are to be added to a study.

        A range may change: its trials stay what they are.
        """
        ranges = {n: [type(x), x.log] for n, x in self.entries.items() if isinstance(x, Range)}
        return self.entries | self.choices | ranges

    def suggest(self, trial: Any) -> dict[str, Any]:
        """Draw one value for each parameter, from functions that can be called again."""
        params = dict[str, Any]()
        for name, entry in self.entries.items():
            params |= self._draw(trial, name, entry)
        again, name = FixedTrial(trial.params, trial.number), ""
        try:
            for name, entry in self.entries.items():
                self._draw(again, name, entry)
        except Exception as error:  # of a function of the user's
            raise ValueError(
                f"the function of space[{name!r}] raises {type(error).__name__} when it is called "
                f"again: {error}. It may use a trial's suggest_... methods, params and number only."
            ) from error
        return params

    def _draw(self, trial: Any, name: str, entry: Entry) -> dict[str, Any]:
        """Draw the value of one parameter, or all of them by the function of the whole space."""
        if isinstance(entry, CategoricalDistribution):
            drawn = trial.suggest_categorical(name, entry.choices)
            return {name: list(self.choices[name].values())[int(entry.to_internal_repr(drawn))]}
        if isinstance(entry, Range):
            draw = trial.suggest_int if isinstance(entry, IntDistribution) else trial.suggest_float
            return {name: draw(name, entry.low, entry.high, step=entry.step, log=entry.log)}
        value = entry(trial)
        if name:
            return {name: value}
        check_kind(isinstance(value, Mapping), "what space returns", value, "a dict of parameters")
        return dict(value)

    def computed(self, trial: Any, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that functions returned, as columns; without those that Optuna drew."""
        return {name: label_of(x) for name, x in params.items() if name not in trial.params}

    def values(self, trial: FrozenTrial) -> dict[str, Any]:
        """Return the values that a finished trial had; of a failed one, those that it drew."""
        values, again = dict[str, Any](), FixedTrial(trial.params, trial.number)
        for name, entry in self.entries.items():
            then = trial.distributions.get(name)
            if isinstance(entry, Range) and isinstance(then, Range):
                entry = then  # noqa: PLW2901  (it drew from this range)
            with suppress(Exception):  # a user's function may raise anything
                values |= self._draw(again, name, entry)
        return values

    def grid(self) -> list[dict[str, Any]] | None:
        """List all combinations of the choices; None if something else is drawn as well."""
        drawn = self.distributions()
        if not self.choices or len(self.choices) < len(drawn):
            return None
        combinations = product(*self.choices.values())
        points = [dict(zip(self.choices, labels, strict=True)) for labels in combinations]
        if len(drawn) < len(self.entries):
            with quiet_log():
                study = optuna.create_study()
            for point in points:
                study.enqueue_trial(point)
                trial = study.ask()
                for name, entry in self.entries.items():
                    with suppress(Exception):
                        self._draw(trial, name, entry)
                if trial.params.keys() - point.keys():
                    return None
        return points


# -- labels of choices -----------------------------------------------------------------------------


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
        # a study in memory copies what is enqueued, and a database stores tuples as lists
        is_function = inspect.isroutine(self.value) or isinstance(self.value, type)
        is_copy = not is_function and describe(self.value) == describe(other)
        return self.value is other or is_copy

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def __reduce__(self) -> Any:
        return _Label, (str(self), self.value)

    def __deepcopy__(self, memo: Any) -> "_Label":
        return self


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
        labels = [_Label(f"{i}: {_name(value)}", value) for i, value in enumerate(unique.values())]
    return dict(zip(labels, unique.values(), strict=True))


def label_of(value: Any) -> Any:
    """Return a value if Optuna can store it, or else a text that every process agrees on."""
    value = value.item() if isinstance(value, np.generic) else value
    is_nan = isinstance(value, float) and value != value  # noqa: PLR0124
    return value if isinstance(value, PLAIN) and not is_nan else _Label(_name(value), value)


def _name(value: Any) -> str:
    return getattr(value, "__name__", None) or plain_repr(value)


# -- descriptions ----------------------------------------------------------------------------------

PLAIN = (type(None), bool, int, float, str)  # the types that Optuna stores
_DEEPEST, _LONG = 6, 100


def plain_repr(value: Any) -> str:
    """Return the `repr` of a value without addresses, which differ in every process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def describe(value: Any, depth: int = 0) -> str:
    """Describe a value by its contents, those that are long by a checksum."""
    text = _describe(value, depth)
    return text if len(text) <= 200 else f"{text[:200]}... ({joblib.hash(text)[:8]})"


def _describe(value: Any, depth: int) -> str:  # noqa: C901, PLR0911
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().double().numpy()
    if isinstance(value, np.ndarray):
        return f"{value.shape} {_hash(np.ascontiguousarray(value))}"
    if inspect.isclass(value) or inspect.isroutine(value):
        return _describe_code(value)
    if depth > _DEEPEST:
        return _describe_code(type(value))
    if isinstance(value, Mapping):
        items = (f"{key!r}: {describe(item, depth + 1)}" for key, item in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list | tuple) and len(value) < _LONG:
        return "[" + ", ".join(describe(item, depth + 1) for item in value) + "]"
    if hasattr(value, "get_params"):  # those of estimators have a name of their own
        held = {} if hasattr(value, "fit") else value.get_params(deep=False)
    elif isinstance(value, torch.nn.Module):
        plain = {n: x for n, x in vars(value).items() if isinstance(x, PLAIN) and n != "training"}
        held = {**plain, "layers": plain_repr(value), **value.state_dict()}
    elif hasattr(value, "shape") or not getattr(value, "__dict__", None):
        return f"{type(value).__name__} {getattr(value, 'shape', '')} {_hash(value)}"
    else:
        # data may be in private attributes, where others hold what they have computed
        is_data = isinstance(value, Dataset)
        held = {n: x for n, x in vars(value).items() if is_data or not n.startswith("_")}
    return _describe_code(type(value)) + (describe(held, depth + 1) if held else "")


def _hash(value: Any) -> str:
    """Return a checksum of a value's contents, or of its text if they cannot be read."""
    try:
        return str(joblib.hash(value))[:8]
    except Exception as error:  # pickling runs code of any class
        text = plain_repr(value)
        warn(
            f"{text} cannot be pickled ({type(error).__name__}: {error}). So a search that is "
            "resumed notices another one only if its repr is another one."
        )
        return str(joblib.hash(text))[:8]


# Python's parser, by which `inspect` finds a class, fails in several threads at once
_PARSER = threading.Lock()


def _describe_code(code: Any) -> str:
    """Name a class or function; those of the user have a checksum of their source."""
    name = str(getattr(code, "__qualname__", code)).rpartition("<locals>.")[2]
    sources = []
    for part in code.__mro__ if inspect.isclass(code) else [code]:
        if _is_of_user(part):
            try:
                with _PARSER:
                    sources.append(inspect.getsource(part))
            except (OSError, TypeError):  # typed at a prompt
                sources.append(plain_repr(part))
    return f"{name} ({joblib.hash(sources)[:8]})" if sources else name


def _is_of_user(code: Any) -> bool:
    """Return whether a class or function is no library's."""
    module = getattr(code, "__module__", None) or type(code).__module__
    top = module.partition(".")[0]
    if top == __name__.partition(".")[0] or (top in sys.stdlib_module_names and top != "__main__"):
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is None or {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
