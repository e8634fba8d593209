"""The columns of a net's history that record its flatness along training."""

from skorch import NeuralNet
from skorch.callbacks import EpochScoring

from relflat_sk.measures._api import relative_flatness
from relflat_sk.measures._scorer import FlatnessScorer

__all__ = ["PENALTY", "flatness_columns"]

PENALTY = "flatness_penalty"


def flatness_columns(net: NeuralNet) -> dict[str, float]:
    """Return the columns of flatness in a net's history, with the sign that makes small flat."""
    signs = {PENALTY: 1.0}
    for _, callback in getattr(net, "callbacks_", []):
        if isinstance(callback, EpochScoring) and isinstance(callback.scoring, FlatnessScorer):
            signs[callback.name_] = -1.0
        elif isinstance(callback, EpochScoring) and callback.scoring is relative_flatness:
            signs[callback.name_] = 1.0
    names = dict.fromkeys(name for epoch in net.history for name in epoch)
    return {name: signs[name] for name in names if name in signs}
