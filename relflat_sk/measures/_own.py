"""A measure that the user wrote: a function of model, X and y, under the name of its column."""

import inspect
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
from torch import Tensor

from relflat_sk._network import Network
from relflat_sk.measures._estimate import Estimate
from relflat_sk.measures._kept_model import kept_model

__all__ = ["TAKEN", "OwnMeasure"]

# arguments of the functions that measure; a function's own argument of such a name would get no
# value
TAKEN = {
    "aggregate",
    "batch_size",
    "criterion",
    "device",
    "layer",
    "layers",
    "measure",
    "measures",
    "name",
    "names",
    "network",
    "per_sample",
    "process_group",
    "refuse",
    "weight_decay",
}

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class OwnMeasure(str):
    """The name of a measure that the user wrote, which holds the function.

    As a string it can be the key of a table or a study as any other name. As it holds its
    function, it works in processes in which nothing was registered.
    """

    function: Callable[..., Any]
    invariance: str
    arguments: frozenset[str]

    def __new__(
        cls, name: str, function: Callable[..., Any], invariance: str = "unknown"
    ) -> "OwnMeasure":
        """Make a name that holds a function."""
        own = super().__new__(cls, name)
        own.function = function
        own.invariance = invariance
        own.arguments = _arguments(function)
        return own

    def __deepcopy__(self, memo: Any) -> "OwnMeasure":
        """Return the name itself, with the same function, as of any string."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Hold the function by its code where pickle finds it by no name, as for lambdas."""
        return _unpickle, (str(self), cloudpickle.dumps(self.function), self.invariance)

    def measure(self, network: Network, **params: Any) -> Estimate:
        """Measure a model."""
        source = network.source
        assert source is not None
        if source.sample_weight is not None:
            if "sample_weight" not in self.arguments:
                raise ValueError(
                    f"the measure {str(self)!r} does not take sample weights: measure without "
                    "sample_weight, or give its function an argument sample_weight."
                )
            params["sample_weight"] = source.sample_weight
        with kept_model(source.model):
            result = self.function(source.model, source.X, source.y, **params)
        both = result if isinstance(result, tuple) and len(result) == 2 else (result, 0.0)
        pair = [number.detach() if isinstance(number, Tensor) else number for number in both]
        if any(isinstance(number, str) or np.ndim(number) for number in pair):
            raise self._no_number(result)
        try:
            value, stderr = map(float, pair)
        except (TypeError, ValueError):
            raise self._no_number(result) from None
        if stderr < 0:
            raise ValueError(f"the measure {str(self)!r} returned a standard error of {stderr}.")
        return Estimate(value, stderr, "own")

    def _no_number(self, result: Any) -> TypeError:
        return TypeError(
            f"the measure {str(self)!r} must return a number, or a pair of a number and its "
            f"standard error, got {result!r} of type {type(result).__name__}."
        )


def _unpickle(name: str, function: bytes, invariance: str) -> OwnMeasure:
    return OwnMeasure(name, cloudpickle.loads(function), invariance)


def _arguments(function: Callable[..., Any]) -> frozenset[str]:
    """List the arguments of a function beside model, X and y; refuse what is no measure."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some functions written in C do not say
        return frozenset()
    first = [p for p in parameters if p.kind in _POSITIONAL][:3]
    if len(first) < 3 and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise TypeError(
            f"a measure must be a function of model, X and y, got {function!r} with the arguments "
            f"({', '.join(map(str, parameters))})."
        )
    names = {p.name for p in parameters if p.kind in _BY_NAME and p not in first}
    if taken := sorted(names & TAKEN):
        raise ValueError(
            f"the measure {function!r} has an argument {taken[0]!r}, which the functions that "
            "measure use themselves and do not pass on: give it another name."
        )
    return frozenset(names)
