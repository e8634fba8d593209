"""The place where something other than a net's own loop can train the net's epochs."""

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Protocol


class EpochTrainer(Protocol):
    """Trains epochs of nets, for instance of many nets together."""

    def train_epoch(self, net: Any, iterator: Any, fit_params: Mapping[str, Any]) -> bool:
        """Train a net for an epoch, and record its batches; return whether it did."""


# the trainer of all nets that are fitted in this context; None if each trains by itself
EPOCH_TRAINER: ContextVar[EpochTrainer | None] = ContextVar("EPOCH_TRAINER", default=None)
