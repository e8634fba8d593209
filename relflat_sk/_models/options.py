"""How a model is run over data: criterion, batch size, device and sample weights."""

from dataclasses import dataclass
from typing import Any

from relflat_sk._checks import check_device
from relflat_sk._losses import Loss, as_criterion
from relflat_sk._network import Batches, make_batches

__all__ = ["DataOptions"]


@dataclass(frozen=True)
class DataOptions:
    """How to run a model of any kind over data.

    Parameters
    ----------
    criterion : torch loss, optional
        The loss to measure; the model's own if None.
    batch_size : int, default=1024
        Samples in one forward pass.
    device : str or torch.device, optional
        Where to compute; where the model is if None.
    sample_weight : array of shape (n,), optional
        Weight of each sample in the mean loss.
    in_order : bool, default=False
        Whether to refuse loaders that may shuffle the samples.
    """

    criterion: Any = None
    batch_size: int = 1024
    device: Any = None
    sample_weight: Any = None
    in_order: bool = False

    def __post_init__(self) -> None:
        """Refuse a device that torch cannot use, before anything is computed."""
        check_device(self.device)

    def batches(self, X: Any, y: Any) -> Batches:
        """Cut data into batches.

        Parameters
        ----------
        X, y : array-like of n samples
            Inputs and numeric labels; y may be None.

        Returns
        -------
        callable
            Each call starts a new pass over the data.
        """
        return make_batches(
            X,
            y,
            batch_size=self.batch_size,
            sample_weight=self.sample_weight,
            in_order=self.in_order,
        )

    def loss(self, own: Any) -> Loss:
        """Choose between the criterion in these options and the model's own.

        Parameters
        ----------
        own : torch loss or None
            The model's criterion, for options without one.

        Returns
        -------
        Loss
            The chosen criterion, as the measures use it.
        """
        return Loss(as_criterion(own if self.criterion is None else self.criterion))
