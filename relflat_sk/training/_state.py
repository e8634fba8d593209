"""The state of a training: what a net needs to know only while it is trained."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Size, Tensor, nn

from relflat_sk._penalty import RelativeFlatnessPenalty

__all__ = ["TrainingState"]


@dataclass(slots=True)
class TrainingState:
    """The state of one training, with that of its current step.

    A net drops it when the training ends, and leaves it out of copies and pickles.

    Shapes: `sample_weight` (n,).
    """

    sample_weight: np.ndarray | None = None
    labels_encoded: bool = False
    dataset: Any = None
    penalty: RelativeFlatnessPenalty | None = None
    first_parameter: tuple[nn.Module, nn.Parameter | None] | None = None
    output_shape: Size | None = None
    output_checked: bool = False
    # of the current step
    recorded: bool = False
    terms: tuple[Tensor, Tensor | None, Tensor | None] | None = None
