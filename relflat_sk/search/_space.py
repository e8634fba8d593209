"""The parameters that a search varies: choices, ranges of numbers, functions of a trial."""

import inspect
import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import FixedTrial, FrozenTrial, TrialState
from skorch import NeuralNet

from relflat_sk._checks import did_you_mean
from relflat_sk.minima import PARAM_PREFIX
from relflat_sk.search._data import DATA_NAMES, is_data_name
from relflat_sk.search._provenance import describe

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


def read_entry(name: str, values: Any) -> Choices | Drawn | Computed:
    """Read one entry of a space."""
    if isinstance(values, CategoricalDistribution):
        values = list(values.choices)
    if isinstance(values, FloatDistribution | IntDistribution):
        return Drawn(values)
    if hasattr(values, "support") and (hasattr(values, "ppf") or hasattr(values, "icdf")):
        raise TypeError(
            f"space[{name!r}] must be a distribution of optuna, not of scipy, got {values!r}. "
            "For scipy's uniform, loguniform and randint take "
            "optuna.distributions.FloatDistribution(low, high), FloatDistribution(low, high, "
            "log=True) and IntDistribution(low, high). For others take a function of the trial: "
            "lambda trial: scipy.stats.norm(0, 1).ppf(trial.suggest_float('share', 0.001, 0.999))."
        )
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
        f"space[{name!r}] must be a list of choices, a distribution of optuna, or a "
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
    return getattr(value, "__name__", None) or plain_repr(value)


def plain_repr(value: Any) -> str:
    """Return the `repr` of a value without addresses, which differ in every process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


# parts of a skorch net: parameters such as module__n_features are arguments of their constructors
_PARTS = ("module", "criterion", "optimizer")


class Space:
    """The parameters of an estimator that a search varies.

    Choices may be any objects: classes, tuples, callbacks. If Optuna cannot store an object,
    the study has a label in its place: the object's name or `repr`. A choice that is listed
    twice counts once. A function of the trial is called again to find out which value a finished
    trial had, so its result must depend only on the trial's `suggest_...` methods and `number`.
    """

    def __init__(self, space: Mapping[str, Any]) -> None:
        if not isinstance(space, Mapping):
            raise TypeError(
                "space must be a dict from parameter names to lists of choices, distributions "
                f"of optuna, or functions of a trial, got {type(space).__name__}."
            )
        if not space:
            raise ValueError(
                "space is empty: name at least one parameter, as in {'batch_size': [16, 64]}."
            )
        self.entries = {str(name): read_entry(name, values) for name, values in space.items()}

    def check(self, estimator: Any) -> None:
        """Refuse names that are not parameters of an estimator, before anything is trained."""
        if isinstance(estimator, type) or not hasattr(estimator, "get_params"):
            raise TypeError(
                "estimator must be an instance of a scikit-learn estimator or skorch net, got "
                f"{estimator!r}."
            )
        for name in self.entries:
            if name in DATA_NAMES:
                continue
            problem = _problem_with(estimator, name, self.entries)
            if is_data_name(name) and problem:
                problem = f"the names that vary the data are {list(DATA_NAMES)}."
            if problem:
                raise ValueError(f"space names {name!r}, but {problem}")

    def possible(self, estimator: Any) -> Iterator[tuple[str, Any]]:
        """List the values that parameters have in a search, but for those of steps that vary."""
        varied = tuple(f"{name}__" for name in self.entries)
        for name, value in estimator.get_params().items():
            if not f"{name}__".startswith(varied):
                yield name, value
        for name, entry in self.entries.items():
            for value in entry.values if isinstance(entry, Choices) else ():
                yield name, value

    def distributions(self) -> dict[str, BaseDistribution]:
        """Return the distributions that Optuna draws from."""
        return {
            name: entry.distribution
            for name, entry in self.entries.items()
            if not isinstance(entry, Computed)
        }

    def describe_choices(self) -> dict[str, str]:
        """Describe the values that Optuna cannot store, and the functions."""
        found = {}
        for name, entry in self.entries.items():
            if isinstance(entry, Choices):
                for label, value in zip(entry.labels, entry.values, strict=True):
                    if not isinstance(value, PLAIN):
                        found[f"{name}={label}"] = describe(value)
            elif isinstance(entry, Computed):
                found[name] = describe(entry.function)
        return found

    def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        """Draw one value for each parameter."""
        return {name: entry.suggest(trial, name) for name, entry in self.entries.items()}

    def values(self, trial: FrozenTrial) -> dict[str, Any]:
        """Return the values that a finished trial had."""
        return self.draw_again(trial)[0]

    def draw_again(self, trial: FrozenTrial) -> tuple[dict[str, Any], set[str]]:
        """Return the values that a finished trial had, and which names the space draws for them."""
        fixed: Any = FixedTrial(trial.params, trial.number)
        found = {}
        for name, entry in self.entries.items():
            with suppress(Exception):  # a user's function may raise anything
                found[name] = entry.suggest(fixed, name)
        return found, set(fixed.params)

    def grid(self) -> list[dict[str, Any]] | None:
        """List all combinations of the choices."""
        entries = self.entries.items()
        columns = {name: entry.labels for name, entry in entries if isinstance(entry, Choices)}
        if not columns or any(isinstance(entry, Drawn) for _, entry in entries):
            return None
        points = [dict(zip(columns, values, strict=True)) for values in product(*columns.values())]
        computes = len(columns) < len(self.entries)
        return None if computes and any(map(self._draws_more, points)) else points

    def _draws_more(self, point: Mapping[str, Any]) -> bool:
        """Return whether functions draw more than choices that are made already."""
        trial: Any = _Point(dict(point))
        for name, entry in self.entries.items():
            with suppress(Exception):  # a user's function may raise anything
                entry.suggest(trial, name)
        return not trial.asked <= point.keys()


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

_OTHER_NAME = "give this search a study_name of its own."
_SCALED = f"{PARAM_PREFIX}scaled_"  # learning rates that the search computes itself


def check_space(space: Space, study: optuna.Study) -> None:
    """Refuse to continue a study of another space, and take over the order of its choices.

    Optuna knows choices by their position, so that further ones go to the end.
    """
    _follow(space, study)
    drawn = space.distributions()
    for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        for name, distribution in drawn.items():
            before = trial.distributions.get(name, distribution)
            problem = _problem_with_range(before, distribution)
            if problem:
                raise ValueError(
                    f"study {study.study_name!r} was made with {before} for {name!r}, this space "
                    f"has {distribution}: {problem}, or {_OTHER_NAME}"
                )
        _check_trial(space, study.study_name, trial)


def new_choices(space: Space, study: optuna.Study) -> dict[str, CategoricalDistribution]:
    """Return the lists of choices that are longer than those of a study."""
    drawn = [trial.distributions for trial in study.get_trials(deepcopy=False)]
    return {
        name: entry.distribution
        for name, entry in space.entries.items()
        if isinstance(entry, Choices)
        and any(name in one and one[name] != entry.distribution for one in drawn)
    }


def _follow(space: Space, study: optuna.Study) -> None:
    """Bring the choices of a space into the order in which a study has them."""
    drawn = [trial.distributions for trial in study.get_trials(deepcopy=False)]
    for name, entry in space.entries.items():
        lists = [one[name] for one in drawn if name in one]
        before = [one.choices for one in lists if isinstance(one, CategoricalDistribution)]
        if isinstance(entry, Choices) and before:
            space.entries[name] = entry.in_order_of(max(before, key=len))


def _check_trial(space: Space, study_name: str, trial: FrozenTrial) -> None:
    """Refuse a space that gives a finished trial other parameters, or computes other values."""
    recorded = {
        name.removeprefix(PARAM_PREFIX): value
        for name, value in trial.user_attrs.items()
        if name.startswith(PARAM_PREFIX) and not name.startswith(_SCALED)
    }
    values, again = space.draw_again(trial)
    drawn = again | space.distributions().keys()
    then = _mark_computed(trial.params.keys() | recorded.keys(), trial.params)
    now = _mark_computed(values.keys() | drawn, drawn)
    if then != now:
        raise ValueError(
            f"study {study_name!r} was made over {then}, this space is over {now}; {_OTHER_NAME}"
        )
    for name, entry in space.entries.items():
        if isinstance(entry, Computed) and name in recorded:
            had, gives = recorded[name], as_stored(values[name])
            if gives != had:
                raise ValueError(
                    f"study {study_name!r} was made with another function for {name!r}: it "
                    f"gave trial {trial.number} the value {had!r}, and this one gives {gives!r}. "
                    f"Restore the function, or {_OTHER_NAME}"
                )


def _mark_computed(names: Iterable[str], drawn: Container[str]) -> list[str]:
    """List names in order, and mark those that are not drawn."""
    return [name if name in drawn else f"{name} (computed)" for name in sorted(names)]


def _problem_with_range(before: Any, now: Any) -> str:
    """Say what to do if a distribution cannot continue another one; empty if it can."""
    logs = [getattr(one, "log", None) for one in (before, now)]
    if not isinstance(now, type(before)) or logs[0] != logs[1]:
        return "Optuna cannot change that within a study. Draw this parameter as the study did"
    if isinstance(before, CategoricalDistribution):
        dropped = [choice for choice in before.choices if choice not in now.choices]
        return f"choices can be added, but not removed. Put {dropped} back" if dropped else ""
    if now.low > before.low or now.high < before.high:
        return "ranges can be wider, but not narrower. Give this one at least the old ends"
    return ""
