"""The form of a row in the table of criteria."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from relflat_sk._losses.curvature import ClosedForm

__all__ = ["LINKS", "BestConstant", "CurvatureOf", "Row", "Target", "Task", "never"]

Task = Literal["classification", "binary", "regression"]
BestConstant = Callable[[Any, Tensor, Tensor, torch.Size], Tensor]
CurvatureOf = Callable[[Any, Tensor, Tensor | None], ClosedForm]

# functions by which a network may turn the layer's output into the criterion's input
LINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda z: z,
    "softmax": lambda z: z.softmax(dim=-1),
    "log_softmax": lambda z: z.log_softmax(dim=-1),
    "sigmoid": torch.sigmoid,
}


def never(criterion: Any) -> bool:
    """Return False: the curvature of a criterion does not depend on the labels."""
    return False


class Target(NamedTuple):
    """A batch's target as the criterion takes it."""

    values: Tensor
    relevant: Tensor | None

    def to(self, device: torch.device) -> "Target":
        """Move the labels to a device."""
        values = self.values.to(device)
        if self.relevant is None or self.relevant is self.values:
            return Target(values, None if self.relevant is None else values)
        return Target(values, self.relevant.to(device))


@dataclass(frozen=True)
class Row:
    """A row of the table; its functions take the criterion as their first argument.

    Parameters
    ----------
    task : {"classification", "binary", "regression"}
        The kind of labels.
    read_target : callable
        From output and labels to `Target`.
    divisors : callable
        From output and `Target.relevant` to what each sample adds to the divisor of the mean:
        one number if all samples add the same.
    best_constant : callable or None
        From targets, sample weights and an output's shape to the best constant prediction.
    links : dict of str to callable
        For each link, a function from the layer's output and `Target.relevant` to the curvature.
    needs_target : callable
        Whether the curvature depends on the labels.
    """

    task: Task
    read_target: Callable[[Any, Tensor, Tensor], Target]
    divisors: Callable[[Any, Tensor, Tensor | None], float | Tensor]
    best_constant: BestConstant | None
    links: Mapping[str, CurvatureOf] = field(default_factory=dict)
    needs_target: Callable[[Any], bool] = field(default_factory=lambda: never)
