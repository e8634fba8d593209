"""Functions of the user in place of measures: checked, called, and the model returned as it was."""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import joblib
import numpy as np
from torch import Tensor, nn

from relflat_sk._models.network_of import final_estimator
from relflat_sk._network.borrowing import borrowed, changed, unwrapped
from relflat_sk._network.network import Network
from relflat_sk.measures._scan import Measured

# arguments of the functions that measure; a function's own argument of such a name would get no
# value
TAKEN = {
    "aggregate", "at_loss", "batch_size", "criterion", "device", "layer", "layers", "measure",
    "measures", "name", "network", "output", "per_sample", "tolerates",
    "weight_decay",
}  # fmt: skip

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def measure_by_function(
    function: Callable[..., Any], name: str, network: Network, **params: Any
) -> Measured:
    """Call a user's function with the model and the data that a network was made of."""
    source = network.source
    assert source is not None
    if source.sample_weight is not None:
        if "sample_weight" not in arguments_of(function):
            raise ValueError(
                f"the measure {name!r} does not take sample weights: measure without "
                "sample_weight, or give its function an argument sample_weight."
            )
        params["sample_weight"] = source.sample_weight
    with kept_model(source.model):
        result = function(source.model, source.X, source.y, **params)
    both = result if isinstance(result, tuple) and len(result) == 2 else (result, 0.0)
    pair = [number.detach() if isinstance(number, Tensor) else number for number in both]
    try:
        if any(isinstance(number, str) or np.ndim(number) for number in pair):
            raise TypeError
        value, stderr = map(float, pair)
    except (TypeError, ValueError):
        raise TypeError(
            f"the measure {name!r} must return a number, or a pair of a number and its "
            f"standard error, got {result!r} of type {type(result).__name__}."
        ) from None
    return Measured(value, stderr, "function")


def arguments_of(function: Callable[..., Any]) -> frozenset[str]:
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


# -- lend a model to a function, and return it as it was ------------------------------------------


@contextmanager
def kept_model(model: Any) -> Iterator[None]:
    """Restore weights, gradients and fitted attributes when the context ends."""
    estimator = final_estimator(model)
    module = unwrapped(getattr(estimator, "module_", estimator))
    if not isinstance(module, nn.Module):  # of scikit-learn: only the random state is borrowed
        with borrowed(nn.Module()), _kept_attributes(estimator):
            yield
        return
    parameters = list(module.parameters())
    learnable = [parameter for parameter in parameters if parameter.requires_grad]
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    with (
        changed(parameters, "grad", None),  # a backward pass adds to no gradient of the user's
        changed(learnable, "requires_grad", True),
        changed(frozen, "requires_grad", False),
        borrowed(module, with_weights=True),
    ):
        yield


@contextmanager
def _kept_attributes(estimator: Any) -> Iterator[None]:
    """Restore what `fit` has set, for estimators of scikit-learn; optimizers are private there."""

    def fitted() -> dict[str, Any]:
        every = vars(estimator).items()
        return {name: one for name, one in every if name.startswith("_") or name.endswith("_")}

    before = copy.deepcopy(fitted())
    try:
        yield
    finally:
        after = fitted()
        if joblib.hash(after) != joblib.hash(before):
            for name in after.keys() - before.keys():
                delattr(estimator, name)
            vars(estimator).update(before)
