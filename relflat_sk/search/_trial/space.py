"""Draw the parameters that a search varies: choices, distributions, functions of a trial."""

import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from itertools import product
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
)
from optuna.trial import FixedTrial, FrozenTrial
from skorch import NeuralNet

from relflat_sk._checks import did_you_mean
from relflat_sk.search._trial.description import describe
from relflat_sk.search._trial.entries import (
    PLAIN,
    Choices,
    Computed,
    is_choice,
    is_range,
    read_entry,
)
from relflat_sk.search._trial.training_data import DATA_NAMES, is_data_name

__all__ = ["Space"]

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
                f"of optuna or scipy, or functions of a trial, got {type(space).__name__}."
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
            problem = _why_not(estimator, name, self.entries)
            if is_data_name(name) and problem:
                problem = f"the names that vary the data are {list(DATA_NAMES)}."
            if problem:
                raise ValueError(f"space names {name!r}, but {problem}")

    def possible(self, estimator: Any) -> Iterator[tuple[str, Any]]:
        """List the values that parameters may have in a search, as far as they can be listed."""
        replaced = tuple(f"{name}__" for name in self.entries)  # parameters of a step that varies
        own = estimator.get_params().items()
        found = [(name, value) for name, value in own if not name.startswith(replaced)]
        for name, entry in self.entries.items():
            for value in entry.values if is_choice(entry) else ():
                yield name, value
                if hasattr(value, "get_params") and not isinstance(value, type):  # of a step
                    found += ((f"{name}__{inner}", x) for inner, x in value.get_params().items())
        yield from ((name, value) for name, value in found if name not in self.entries)

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
        columns = {n: entry.labels for n, entry in self.entries.items() if is_choice(entry)}
        if not columns or any(map(is_range, self.entries.values())):
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


def _why_not(estimator: Any, name: str, varied: Collection[str], prefix: str = "") -> str:
    """Return why an estimator cannot be given a parameter of a name; empty if it can."""
    params = estimator.get_params()
    if name in params:
        return ""
    head, _, tail = name.partition("__")
    if tail and isinstance(estimator, NeuralNet) and head in {*_PARTS, *estimator.prefixes_}:
        part = getattr(estimator, head, None)
        if f"{prefix}{head}" in varied or head not in _PARTS:
            return ""
        return _why_no_argument(part if isinstance(part, type) else type(part), tail)
    if tail and hasattr(params.get(head), "get_params"):
        return _why_not(params[head], tail, varied, f"{prefix}{head}__")
    own = sorted(param for param in params if "__" not in param)
    others = " and any module__, optimizer__, criterion__ ..." * isinstance(estimator, NeuralNet)
    known = f" It has {own}{others}."
    question = did_you_mean(f"{prefix}{name}", [f"{prefix}{param}" for param in params])
    return f"{type(estimator).__name__} has no parameter {name!r}.{question or known}"


def _why_no_argument(part: type, name: str) -> str:
    """Return why the constructor of a net's part cannot take an argument; empty if it can."""
    try:
        arguments = inspect.signature(part).parameters
    except (TypeError, ValueError):  # implemented in C, without a signature
        return ""
    takes_any = any(argument.kind is argument.VAR_KEYWORD for argument in arguments.values())
    if takes_any or name in arguments or name.startswith("param_groups"):
        return ""
    return f"{part.__name__} takes no argument {name!r}. It takes {sorted(arguments)}."
