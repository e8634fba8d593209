"""How a model is run over data: criterion, batch size, device and sample weights."""

from dataclasses import dataclass
from typing import Any

from relflat_sk._checks import check_device
from relflat_sk._losses import Loss, as_criterion
from relflat_sk._network import Batches, make_batches

__all__ = ["DataOptions"]


@dataclass(frozen=True)
class DataOptions:
    """How to run a model of any kind over data. Shapes: `sample_weight` (n,)."""

    criterion: Any = None
    batch_size: int = 1024
    device: Any = None
    sample_weight: Any = None
    in_order: bool = False

    def __post_init__(self) -> None:
        """Refuse a device that torch cannot use, before anything is computed."""
        check_device(self.device)

    def batches(self, X: Any, y: Any) -> Batches:
        """Cut data into batches."""
        return make_batches(
            X,
            y,
            batch_size=self.batch_size,
            sample_weight=self.sample_weight,
            in_order=self.in_order,
        )

    def loss(self, own: Any) -> Loss:
        """Choose between the criterion in these options and the model's own."""
        return Loss(as_criterion(own if self.criterion is None else self.criterion))
