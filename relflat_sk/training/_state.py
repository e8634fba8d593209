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

    Parameters
    ----------
    sample_weight : ndarray of shape (n,), optional
        Weights of all samples; None if the user gave none.
    labels_encoded : bool, default=False
        Whether labels reach the net as the criterion's targets, as they do during `fit`.
    dataset : torch Dataset, optional
        The training data, without what is held out for validation.
    penalty : RelativeFlatnessPenalty, optional
        The penalty of all steps, kept because it learns the network's structure only once.
    first_parameter : (nn.Module, Parameter or None), optional
        The network, and its first floating-point parameter, whose dtype inputs must have.
    output_shape : torch.Size, optional
        Shape of the output for one sample; None if the labels determine it.
    output_checked : bool, default=False
        Whether a batch has shown that the network ends in what its criterion takes.
    recorded : bool, default=False
        Whether the penalty has recorded the forward pass of the current step.
    terms : (Tensor, Tensor or None, Tensor or None), optional
        Loss and penalty of the current step, and the share of the penalty that its limit left.
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
