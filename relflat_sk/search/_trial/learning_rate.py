"""Scale learning rates with the batch size: by the linear rule, or by the square-root rule."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from relflat_sk._checks import is_number

__all__ = ["check_lr_scaling", "scale_lr"]

RULES: dict[str, Callable[[float], float]] = {"linear": float, "sqrt": math.sqrt}
RATES = ("lr", "learning_rate_init")  # in skorch nets, in scikit-learn's MLPs


def check_lr_scaling(lr_scaling: Any) -> None:
    """Refuse a rule of scaling that there is not."""
    if lr_scaling is not None and lr_scaling not in RULES:
        raise ValueError(f"lr_scaling must be None or one of {list(RULES)}, got {lr_scaling!r}.")


def scale_lr(estimator: Any, params: Mapping[str, Any], lr_scaling: str | None) -> dict[str, float]:
    """Scale learning rates with the batch size, relative to the estimator's own batch size."""
    if lr_scaling is None:
        return {}
    own = estimator.get_params()
    found = {}
    for name, size in params.items():
        prefix, _, last = name.rpartition("batch_size")
        if last or not (prefix == "" or prefix.endswith("__")) or "batch_size" not in name:
            continue
        rate = next((prefix + one for one in RATES if prefix + one in own), None)
        before = own.get(name)
        if rate is None or not _is_size(size) or not _is_size(before):
            raise ValueError(
                f"lr_scaling={lr_scaling!r} needs numbers for {name!r} and a learning rate beside "
                f"it ({' or '.join(RATES)}), got {name}={size!r} in the candidate and {before!r} "
                "in the estimator. Give both as numbers, or leave lr_scaling out."
            )
        found[rate] = float(params.get(rate, own[rate]) * RULES[lr_scaling](size / before))
    return found


def _is_size(value: Any) -> bool:
    return is_number(value) and value > 0  # -1 stands for all samples
