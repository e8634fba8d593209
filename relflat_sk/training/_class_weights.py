"""The weights of classes, which users of scikit-learn pass as arrays and torch takes as tensors."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.loss import _Loss

__all__ = ["with_class_weights"]

_NAMES = ("weight", "pos_weight")


def with_class_weights(
    criterion: type, given: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, Any]:
    """Convert the weights of classes among the arguments of one of torch's criteria to tensors."""
    found = dict(given)
    for name in _NAMES if issubclass(criterion, _Loss) else ():
        value = found.get(name)
        if value is not None and not isinstance(value, Tensor):
            found[name] = _as_tensor(name, value, torch.promote_types(dtype, torch.float32))
    return found


def _as_tensor(name: str, value: Any, dtype: torch.dtype) -> Tensor:
    """Convert the weights of classes; refuse what holds no numbers."""
    try:
        return torch.tensor(np.asarray(value, dtype=np.float64), dtype=dtype)
    except (TypeError, ValueError):
        raise TypeError(
            f"criterion__{name} must be a tensor or an array of numbers, one for each class in the "
            f"order of classes_, got {value!r}. scikit-learn's compute_class_weight makes one from "
            'a dict or from "balanced".'
        ) from None
