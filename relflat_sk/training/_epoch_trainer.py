"""The place where something other than the net's own loop can train the net's epochs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

__all__ = ["EPOCH_TRAINER", "EpochTrainer", "OwnLoop", "set_single_trainer", "single_trainer"]


class EpochTrainer(ABC):
    """Trains epochs of nets, for instance of many nets together."""

    @abstractmethod
    def train_epoch(self, net: Any, iterator: Any, fit_params: Mapping[str, Any]) -> bool:
        """Train a net for an epoch, and record its batches."""

    @abstractmethod
    def training_loss(self, net: Any, goal: float) -> float | None:
        """Compute the loss of a net on its training data, in evaluation mode."""

    @abstractmethod
    def gradient_norm(self, net: Any, goal: float) -> float | None:
        """Compute the norm of the gradient on a net's training data, in evaluation mode."""

    @abstractmethod
    def release(self, net: Any) -> None:
        """Forget a net, whose training has ended."""


class OwnLoop(EpochTrainer):
    """Leaves everything to the net's own loop."""

    def train_epoch(self, net: Any, iterator: Any, fit_params: Mapping[str, Any]) -> bool:
        return False

    def training_loss(self, net: Any, goal: float) -> float | None:
        return None

    def gradient_norm(self, net: Any, goal: float) -> float | None:
        return None

    def release(self, net: Any) -> None:
        pass


# the trainer of all nets that are fitted in this context; None if each has a trainer of its own
EPOCH_TRAINER: ContextVar[EpochTrainer | None] = ContextVar("EPOCH_TRAINER", default=None)

_single: Callable[[], EpochTrainer] = OwnLoop


def set_single_trainer(make: Callable[[], EpochTrainer]) -> None:
    """Determine what trains a net that is fitted by itself.

    A package above this one calls it, which imports the nets.
    """
    global _single  # noqa: PLW0603
    _single = make


def single_trainer() -> EpochTrainer:
    """Make the trainer of a net that is fitted by itself."""
    return _single()
