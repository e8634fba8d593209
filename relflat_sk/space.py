"""What a sweep varies: choices, Optuna distributions and functions of a trial."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FixedTrial, FrozenTrial
from skorch import NeuralNet

__all__ = ["Space"]

_PLAIN = (type(None), bool, int, float, str)


@dataclass(frozen=True)
class _Choices:
    """A list of values; what Optuna cannot store is known to it by a label."""

    values: Sequence[Any]

    @property
    def labels(self) -> list[Any]:
        if all(isinstance(value, _PLAIN) for value in self.values):
            return list(self.values)
        names = [getattr(value, "__name__", None) or repr(value) for value in self.values]
        if len(set(names)) < len(names):
            names = [f"{index}: {name}" for index, name in enumerate(names)]
        return names

    def suggest(self, trial: optuna.Trial, name: str) -> Any:
        label = trial.suggest_categorical(name, self.labels)
        return self.values[self.labels.index(label)]


@dataclass(frozen=True)
class _Drawn:
    distribution: BaseDistribution

    def suggest(self, trial: optuna.Trial, name: str) -> Any:
        return trial._suggest(name, self.distribution)


@dataclass(frozen=True)
class _Computed:
    function: Callable[[optuna.Trial], Any]

    def suggest(self, trial: optuna.Trial, name: str) -> Any:
        value = self.function(trial)
        if name not in trial.params and isinstance(value, _PLAIN):
            trial.set_user_attr(f"param_{name}", value)
        return value


class Space:
    """The parameters of an estimator that a sweep varies.

    Parameters
    ----------
    space : dict of str to sequence, Optuna distribution or callable
        By the parameter's name, nested with double underscores.

    Raises
    ------
    TypeError
        If it is no dict, or an entry is none of these.
    ValueError
        If it, or a list of choices, is empty.

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
        """Refuse names that the estimator does not have, before anything is trained.

        Raises
        ------
        ValueError
        """
        for name in self.entries:
            if not _has_parameter(estimator, name):
                raise ValueError(
                    f"{type(estimator).__name__} has no parameter {name!r}, named in space; it "
                    f"has {sorted(estimator.get_params())}"
                    + (", and any module__, optimizer__, criterion__ ... argument of its nets.")
                )

    def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        """Draw one value for each parameter."""
        return {name: entry.suggest(trial, name) for name, entry in self.entries.items()}

    def values(self, trial: FrozenTrial) -> dict[str, Any]:
        """Return the values, as the estimator takes them, that a finished trial drew.

        Of a trial that failed while drawing, what Optuna knows of it.
        """
        try:
            return self.suggest(FixedTrial(trial.params))  # type: ignore[arg-type]
        except ValueError:
            return dict(trial.params)

    def grid(self) -> list[dict[str, Any]] | None:
        """List all combinations as Optuna knows them; None if not all entries are choices."""
        columns = []
        for entry in self.entries.values():
            if isinstance(entry, _Drawn) and isinstance(
                entry.distribution, CategoricalDistribution
            ):
                columns.append(list(entry.distribution.choices))
            elif isinstance(entry, _Choices):
                columns.append(entry.labels)
            else:
                return None
        return [dict(zip(self.entries, values, strict=True)) for values in product(*columns)]


def _entry(name: str, values: Any) -> _Choices | _Drawn | _Computed:
    if isinstance(values, BaseDistribution):
        return _Drawn(values)
    if callable(values):
        return _Computed(values)
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if isinstance(values, Sequence) and not isinstance(values, str):
        if not len(values):
            raise ValueError(f"space[{name!r}] has no choices.")
        plain = [value.item() if isinstance(value, np.generic) else value for value in values]
        return _Choices(plain)
    raise TypeError(
        f"space[{name!r}] must be a list of choices, an optuna distribution or a function of a "
        f"trial, got {values!r}."
    )


def _has_parameter(estimator: Any, name: str) -> bool:
    params = estimator.get_params()
    if name in params:
        return True
    head, _, tail = name.partition("__")
    if isinstance(estimator, NeuralNet) and tail:
        return head in estimator.prefixes_
    return (
        bool(tail)
        and hasattr(params.get(head), "get_params")
        and _has_parameter(params[head], tail)
    )
