"""Count, check and convert the inputs of a network, which may be dicts or tuples of arrays."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from relflat_sk._checks import gathers, judge
from relflat_sk._numerics import read_numbers

__all__ = ["cast_inputs", "check_finite", "count_samples", "floating_parameter"]


def count_samples(X: Any) -> int:
    """Count the samples of an array, or of a dict or tuple of arrays of equal length."""
    if isinstance(X, Mapping | tuple):
        values = list(X.values()) if isinstance(X, Mapping) else list(X)
        sizes = {count_samples(value) for value in values}
        if len(sizes) != 1:
            raise ValueError(f"the arrays of X must have equal lengths, got {sorted(sizes)}.")
        return sizes.pop()
    return int(X.shape[0])


def cast_inputs(x: Any, module: nn.Module, device: torch.device | None = None) -> Any:
    """Bring inputs to the network's device and floating type, as skorch's users expect.

    Integers become floating-point numbers, too, unless the network has an embedding that they
    may be indices of.
    """
    first = floating_parameter(module)
    dtype = None if first is None else first.dtype

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor):
            value = value if device is None else value.to(device)
            if value.dtype == dtype or dtype is None:
                return value
            is_index = not value.is_floating_point() and _has_embedding(module)
            return value if is_index else value.to(dtype)
        if isinstance(value, Mapping):
            return {name: cast(part) for name, part in value.items()}
        if isinstance(value, tuple | list):
            parts = [cast(part) for part in value]
            is_named = hasattr(value, "_fields")  # a namedtuple takes its parts one by one
            return type(value)(*parts) if is_named else type(value)(parts)
        return value

    return cast(x)


def floating_parameter(module: nn.Module) -> nn.Parameter | None:
    """Return the first parameter of a floating type, which inputs are expected to have, too."""
    return next((p for p in module.parameters() if p.is_floating_point()), None)


def _has_embedding(module: nn.Module) -> bool:
    """Return whether a network looks integers up in a table."""
    return any(isinstance(part, nn.Embedding | nn.EmbeddingBag) for part in module.modules())


def check_finite(x: Any) -> None:
    """Refuse NaN and infinity anywhere in the inputs."""
    if isinstance(x, Mapping | tuple | list):
        for part in x.values() if isinstance(x, Mapping) else x:
            check_finite(part)
    elif isinstance(x, Tensor) and x.is_floating_point() and x.numel():
        if gathers(x):
            judge(_refuse_infinite, *x.aminmax())
        # the sum of finite numbers is nearly always finite, and needs no second array
        elif not bool(torch.isfinite(x.sum())):
            _refuse_infinite(*read_numbers(*x.aminmax()))


def _refuse_infinite(low: float, high: float) -> None:
    """Refuse the smallest and the largest number of inputs that are not finite."""
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(
            "X contains NaN or infinity. Impute missing values first, for instance with "
            "sklearn.impute.SimpleImputer in a pipeline."
        )
