"""The parameters that a search varies: choices, ranges of numbers, functions of a trial."""

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from optuna.trial import FixedTrial, FrozenTrial, TrialState
from skorch import NeuralNet
from torch import Tensor

from relflat_sk._checks import did_you_mean, is_number
from relflat_sk._warnings import warn
from relflat_sk.minima._minimum import Minimum
from relflat_sk.search._data import DATA_NAMES, LR_SCALING, is_data_name

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
                "space must be a dict from parameter names to lists of choices, distributions "
                "of optuna, or functions of a trial, or one function of a trial that returns a "
                f"dict of parameters, got {type(space).__name__}."
            )
        if not space and self.function is None:
            raise ValueError(
                "space is empty: name at least one parameter, as in {'batch_size': [16, 64]}."
            )
        self.entries: dict[str, Entry] = {}
        # labels are made once: a class of a script has another `repr` in a worker process
        self.choices: dict[str, dict[Any, Any]] = {}  # the value of each label
        self.pairs: dict[str, tuple[float, float]] = {}  # which may be meant as ranges
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
                f"function of a trial, got {values!r}. A single value goes into a list: "
                f"[{_name(values)}]."
            )
        if isinstance(values, tuple) and len(values) == 2 and all(map(is_number, values)):
            self.pairs[name] = values
        if not len(values):
            raise ValueError(f"space[{name!r}] has no choices.")
        self.choices[name] = _label_each(values)
        self.entries[name] = CategoricalDistribution(tuple(self.choices[name]))

    def check(self, estimator: Any) -> None:
        """Refuse names that are not parameters of an estimator, before anything is trained."""
        if isinstance(estimator, type) or not hasattr(estimator, "get_params"):
            raise TypeError(
                "estimator must be an instance of a scikit-learn estimator or skorch net, got "
                f"{estimator!r}."
            )
        of_search = (*DATA_NAMES, LR_SCALING)
        for name in self.entries:
            if name in of_search:
                continue
            problem = _problem_with(estimator, name, self.entries)
            meant = [one for one in of_search if name.endswith(f"__{one}")]
            if is_data_name(name) and problem:
                problem = f"the names that vary the data are {list(DATA_NAMES)}."
            elif meant and problem:
                problem = f"{meant[0]!r} is the search's own: write it without a prefix."
            if problem:
                raise ValueError(f"space names {name!r}, but {problem}")
        for name, pair in self.pairs.items():
            low, high = sorted(pair)
            # parameters of a net's parts have no value yet
            if low < high and any(
                isinstance(one, float) for one in (*pair, estimator.get_params().get(name))
            ):
                warn(
                    f"space[{name!r}] is two choices, {low} and {high}. For the range between "
                    f"them, give optuna.distributions.FloatDistribution({low}, {high}); "
                    f"for two choices, a list: [{low}, {high}]."
                )

    def possible(self, estimator: Any) -> Iterator[tuple[str, Any]]:
        """List the values that parameters have in a search, but for those of steps that vary."""
        varied = tuple(f"{name}__" for name in self.entries)
        for name, value in estimator.get_params().items():
            if not f"{name}__".startswith(varied):
                yield name, value
        for name, choices in self.choices.items():
            yield from ((name, value) for value in choices.values())

    def distributions(self) -> dict[str, BaseDistribution]:
        """Return the distributions that Optuna draws from."""
        entries = self.entries.items()
        return {name: one for name, one in entries if isinstance(one, BaseDistribution)}

    def described(self) -> dict[str, Any]:
        """Return what the study cannot know: functions, and choices that Optuna cannot store."""
        functions = {name: entry for name, entry in self.entries.items() if callable(entry)}
        choices = {
            f"{name}={label}": value
            for name, values in self.choices.items()
            for label, value in values.items()
            if not isinstance(value, PLAIN)
        }
        return choices | functions | ({} if self.function is None else {"": self.function})

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
        """Return the values that a finished trial had; of a failed one, those that it drew."""
        return self.draw_again(FixedTrial(trial.params, trial.number))[0]

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
        points = [dict(zip(self.choices, one, strict=True)) for one in labels]
        if len(drawn) < len(self.entries):  # functions may draw more
            for point in points:
                trial = _Point(dict(point))
                self.draw_again(trial)  # a candidate reports what its functions raise
                if not trial.asked <= point.keys():
                    return None
        return points


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


class _Point(FixedTrial):
    """A trial with the choices of a grid, which notes the names that functions ask for."""

    def __init__(self, params: dict[str, Any]) -> None:
        super().__init__(params)
        self.asked: set[str] = set()

    def suggest_float(self, name: str, *args: Any, **kwargs: Any) -> float:
        self.asked.add(name)
        return super().suggest_float(name, *args, **kwargs)

    def suggest_int(self, name: str, *args: Any, **kwargs: Any) -> int:
        self.asked.add(name)
        return super().suggest_int(name, *args, **kwargs)

    def suggest_categorical(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self.asked.add(name)
        return super().suggest_categorical(name, *args, **kwargs)


# parts of a skorch net: parameters such as module__n_features are arguments of their constructors
_PARTS = ("module", "criterion", "optimizer")


def _problem_with(estimator: Any, name: str, varied: Collection[str], prefix: str = "") -> str:
    """Return why an estimator cannot be given a parameter of a name; empty if it can."""
    params = estimator.get_params()
    if name in params:
        return ""
    head, _, tail = name.partition("__")
    if tail and isinstance(estimator, NeuralNet) and head in {*_PARTS, *estimator.prefixes_}:
        part = getattr(estimator, head, None)
        if f"{prefix}{head}" in varied or head not in _PARTS:
            return ""
        return _problem_with_argument(part if isinstance(part, type) else type(part), tail)
    if tail and hasattr(params.get(head), "get_params"):
        return _problem_with(params[head], tail, varied, f"{prefix}{head}__")
    own = sorted(param for param in params if "__" not in param)
    others = " and any module__, optimizer__, criterion__ ..." * isinstance(estimator, NeuralNet)
    known = f" It has {own}{others}."
    question = did_you_mean(f"{prefix}{name}", [f"{prefix}{param}" for param in params])
    return f"{type(estimator).__name__} has no parameter {name!r}.{question or known}"


def _problem_with_argument(part: type, name: str) -> str:
    """Return why the constructor of a net's part cannot take an argument; empty if it can."""
    try:
        arguments = inspect.signature(part).parameters
    except (TypeError, ValueError):  # implemented in C, without a signature
        return ""
    takes_any = any(argument.kind is argument.VAR_KEYWORD for argument in arguments.values())
    if takes_any or name in arguments or name.startswith("param_groups"):
        return ""
    return f"{part.__name__} takes no argument {name!r}. It takes {sorted(arguments)}."


# -- continuing a study: the same parameters, in ranges that are at least as wide -----------------


def check_space(space: Space, study: optuna.Study) -> None:
    """Refuse to continue a study of another space."""
    for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        problem = _problem_with_trial(space, trial)
        if problem:
            raise ValueError(
                f"study {study.study_name!r} was made over another space: {problem}. Within a "
                "study, ranges can be made wider, but choices stay. For another space, give this "
                "search a study_name of its own."
            )


def _problem_with_trial(space: Space, trial: FrozenTrial) -> str:
    """Say how a space gives a finished trial other parameters than it has; empty if it does not."""
    for name, distribution in space.distributions().items():
        before = trial.distributions.get(name, distribution)
        if not _continues(before, distribution):
            return f"{name!r} was drawn from {before}, and is now drawn from {distribution}"
    again = FixedTrial(trial.params, trial.number)
    params, errors = space.draw_again(again)
    recorded = Minimum.from_trial(trial).params.items()
    # the search computes scaled learning rates itself
    then = trial.params | {n: x for n, x in recorded if not n.startswith("scaled_")}
    now = dict.fromkeys(space.entries, "no value") | again.params | space.computed(again, params)
    if then == now:
        return ""
    why = "".join(f" ({name}: {error})" for name, error in errors.items())
    return f"trial {trial.number} has {then}, but in this space it has {now}{why}"


def _continues(before: Any, now: Any) -> bool:
    """Return whether a distribution can continue another one."""
    if type(before) is not type(now) or isinstance(before, CategoricalDistribution):
        return bool(before == now)
    return bool(before.log == now.log and now.low <= before.low and before.high <= now.high)
