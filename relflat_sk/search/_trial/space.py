"""Draw the parameters that a search varies: choices, distributions, functions of a trial."""

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeGuard

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

from relflat_sk.search._trial.training_data import DATA_NAMES, is_data_name

__all__ = ["Space"]

_PLAIN = (type(None), bool, int, float, str)
# parts of a skorch net: parameters such as module__n_features are arguments of their constructors
_PARTS = ("module", "criterion", "optimizer")


@dataclass(frozen=True)
class _Choices:
    """A list of values, with the labels by which Optuna knows those that it cannot store.

    The labels are made once: a class of a script has another `repr` in a worker process.
    """

    values: Sequence[Any]
    labels: list[Any]

    @property
    def distribution(self) -> CategoricalDistribution:
        return CategoricalDistribution(self.labels)

    def suggest(self, trial: optuna.Trial, name: str) -> Any:
        return self.values[self.labels.index(trial.suggest_categorical(name, self.labels))]


@dataclass(frozen=True)
class _Drawn:
    """A range of numbers, from which the sampler draws."""

    distribution: FloatDistribution | IntDistribution

    def suggest(self, trial: optuna.Trial, name: str) -> Any:
        own = self.distribution
        if isinstance(own, IntDistribution):
            return trial.suggest_int(name, own.low, own.high, step=own.step, log=own.log)
        return trial.suggest_float(name, own.low, own.high, step=own.step, log=own.log)


@dataclass(frozen=True)
class _Computed:
    """A function of the trial; its result is recorded unless the trial has drawn it itself."""

    function: Callable[[optuna.Trial], Any]

    def suggest(self, trial: optuna.Trial, name: str) -> Any:
        value = self.function(trial)
        if name not in trial.params:
            plain = value.item() if isinstance(value, np.generic) else value
            trial.set_user_attr(f"param_{name}", _label(plain))
        return value


class Space:
    """The parameters of an estimator that a search varies.

    Choices may be any objects: classes, tuples, callbacks. If Optuna cannot store an object,
    the study has a label in its place: the object's name or `repr`. A choice that is listed
    twice counts once. A function of the trial is called again to find out which value a finished
    trial had, so its result must depend only on the trial's `suggest_...` methods and `number`.

    Parameters
    ----------
    space : dict of str to sequence, Optuna distribution or callable
        The values to try, by parameter name, nested with double underscores.

    Attributes
    ----------
    entries : dict
        How each parameter is drawn, by name.

    Raises
    ------
    TypeError
        If `space` is not a dict, or an entry is none of these.
    ValueError
        If `space` or a list of choices is empty.

    Examples
    --------
    >>> space = Space({"batch_size": [16, 64], "optimizer": [sum, max]})
    >>> len(space.grid()), space.grid()[0]
    (4, {'batch_size': 16, 'optimizer': 'sum'})
    """

    def __init__(self, space: Mapping[str, Any]) -> None:
        if not isinstance(space, Mapping):
            raise TypeError(
                "space must be a dict from parameter names to lists of choices, optuna "
                f"distributions or functions of a trial, got {type(space).__name__}."
            )
        if not space:
            raise ValueError(
                "space is empty: name at least one parameter, as in {'batch_size': [16, 64]}."
            )
        self.entries = {str(name): _entry(name, values) for name, values in space.items()}

    def check(self, estimator: Any) -> None:
        """Refuse names that are not parameters of an estimator, before anything is trained.

        Parameters
        ----------
        estimator : estimator
            The estimator that a search clones.

        Raises
        ------
        TypeError
            If `estimator` is not an estimator.
        ValueError
            If the estimator has no parameter of a name.
        """
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
                problem = f"the names that vary the data are {list(DATA_NAMES)}"
            if problem:
                raise ValueError(f"space names {name!r}, but {problem}.")

    def distributions(self) -> dict[str, BaseDistribution]:
        """Return the distributions that Optuna draws from.

        Returns
        -------
        dict of str to optuna.distributions.BaseDistribution
            By parameter name; without the parameters that functions compute.
        """
        return {
            name: entry.distribution
            for name, entry in self.entries.items()
            if not isinstance(entry, _Computed)
        }

    def check_study(self, study: optuna.Study) -> None:
        """Refuse to resume a study of another space.

        Parameters
        ----------
        study : optuna.Study
            The study to resume.

        Raises
        ------
        ValueError
            If the study's trials have other parameters, or drew them from other choices.
        """
        drawn = self.distributions()
        for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
            extra = set(trial.params) - set(drawn) if len(drawn) == len(self.entries) else set()
            if extra or set(drawn) - set(trial.params):
                raise ValueError(
                    f"study {study.study_name!r} was made over {sorted(trial.params)}, this space "
                    f"is over {sorted(self.entries)}; give this search a study_name of its own."
                )
            for name, distribution in drawn.items():
                before = trial.distributions[name]
                categorical = isinstance(distribution, CategoricalDistribution)
                if not isinstance(distribution, type(before)) or (
                    categorical and before != distribution
                ):
                    raise ValueError(
                        f"study {study.study_name!r} was made with {before} for {name!r}, this "
                        f"space has {distribution}. Optuna cannot change that within a study; "
                        "give this search a study_name of its own."
                    )

    def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        """Draw one value for each parameter.

        Parameters
        ----------
        trial : optuna.Trial
            The trial that draws.

        Returns
        -------
        dict
            Values by parameter name, as the estimator takes them.
        """
        return {name: entry.suggest(trial, name) for name, entry in self.entries.items()}

    def values(self, trial: FrozenTrial) -> dict[str, Any]:
        """Return the values that a finished trial had.

        Parameters
        ----------
        trial : optuna.trial.FrozenTrial
            The finished trial.

        Returns
        -------
        dict
            Values by parameter name, as the estimator takes them. If the trial failed while it
            drew, only those that it had drawn.
        """
        fixed: Any = FixedTrial(trial.params, trial.number)
        found = {}
        for name, entry in self.entries.items():
            with suppress(Exception):  # a user's function may raise anything
                found[name] = entry.suggest(fixed, name)
        return found

    def grid(self) -> list[dict[str, Any]] | None:
        """List all combinations of the choices.

        Returns
        -------
        list of dict or None
            Labels by parameter name, as Optuna stores them, without the parameters that
            functions compute from them. None if there are no choices, or also distributions.
        """
        columns = {n: entry.labels for n, entry in self.entries.items() if _is_choice(entry)}
        if not columns or any(isinstance(entry, _Drawn) for entry in self.entries.values()):
            return None
        return [dict(zip(columns, values, strict=True)) for values in product(*columns.values())]


def _is_choice(entry: Any) -> TypeGuard[_Choices]:
    return isinstance(entry, _Choices)


def _entry(name: str, values: Any) -> _Choices | _Drawn | _Computed:
    """Read one entry of a space."""
    if isinstance(values, CategoricalDistribution):
        values = list(values.choices)
    if isinstance(values, FloatDistribution | IntDistribution):
        return _Drawn(values)
    if hasattr(values, "tolist"):  # arrays, series, tensors
        values = values.tolist()
    if isinstance(values, Sequence) and not isinstance(values, str | bytes):
        if not len(values):
            raise ValueError(f"space[{name!r}] has no choices.")
        plain = [value.item() if isinstance(value, np.generic) else value for value in values]
        choices = _without_repetition(plain)
        return _Choices(choices, _labels(choices))
    if callable(values) and not isinstance(values, type):
        return _Computed(values)
    raise TypeError(
        f"space[{name!r}] must be a list of choices, an optuna distribution or a function of a "
        f"trial, got {values!r}. A single value goes into a list: [{_name(values)}]."
    )


def _without_repetition(values: Sequence[Any]) -> list[Any]:
    """Drop plain values that are listed again; two objects are always two choices."""
    keys = [
        (type(value), value) if isinstance(value, _PLAIN) else (index,)
        for index, value in enumerate(values)
    ]
    return [value for index, value in enumerate(values) if keys.index(keys[index]) == index]


def _labels(values: Sequence[Any]) -> list[Any]:
    """Label each value; values that are equal to Optuna, such as 1 and True, by number."""
    labels = [_label(value) for value in values]
    if len(set(labels)) < len(labels):
        labels = [f"{index}: {_name(value)}" for index, value in enumerate(values)]
    return labels


def _label(value: Any) -> Any:
    """Return a value if Optuna can store it, or else a text that every process agrees on."""
    is_nan = isinstance(value, float) and value != value  # noqa: PLR0124
    return value if isinstance(value, _PLAIN) and not is_nan else _name(value)


def _name(value: Any) -> str:
    name = getattr(value, "__name__", None) or repr(value)
    return re.sub(r" at 0x[0-9a-fA-F]+", "", name)  # an address differs in every process


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
    return f"{type(estimator).__name__} has no parameter {name!r}. It has {sorted(params)}" + (
        " and any module__, optimizer__, criterion__ ..." * isinstance(estimator, NeuralNet)
    )


def _why_no_argument(part: type, name: str) -> str:
    """Return why the constructor of a net's part cannot take an argument; empty if it can."""
    try:
        arguments = inspect.signature(part).parameters
    except (TypeError, ValueError):  # implemented in C, without a signature
        return ""
    takes_any = any(argument.kind is argument.VAR_KEYWORD for argument in arguments.values())
    if takes_any or name in arguments or name.startswith("param_groups"):
        return ""
    return f"{part.__name__} takes no argument {name!r}. It takes {sorted(arguments)}"
