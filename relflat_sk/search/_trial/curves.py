"""Record in a trial how loss and flatness went along its training."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from skorch import NeuralNet

from relflat_sk._models import final_estimator
from relflat_sk.measures import flatness_columns
from relflat_sk.minima import CURVES

__all__ = ["record_curves"]

MOST_EPOCHS = 200  # of longer trainings, epochs at equal distances, the first and the last
LOSSES = ("train_loss", "valid_loss")


def record_curves(record: dict[str, Any], estimator: Any) -> None:
    """Record the losses of the epochs, and their flatness if a `FlatnessScorer` recorded it."""
    final = final_estimator(estimator)
    if isinstance(final, NeuralNet):
        curves = _curves_of_net(final)
    else:
        losses = list(getattr(final, "loss_curve_", []))
        curves = {"epoch": range(1, len(losses) + 1), "train_loss": losses}
    n_epochs = len(list(curves["epoch"]))
    if n_epochs and len(curves) > 1:
        kept = np.unique(np.linspace(0, n_epochs - 1, MOST_EPOCHS).round().astype(int))
        record[CURVES] = {name: _short(np.asarray(values)[kept]) for name, values in curves.items()}


def _curves_of_net(net: NeuralNet) -> dict[str, Any]:
    """Return the columns of a net's history that are losses or flatness; small is flat."""
    signs = {**dict.fromkeys(LOSSES, 1.0), **flatness_columns(net)}
    recorded = {name for epoch in net.history for name in epoch}
    columns = {
        name: sign * np.array([epoch.get(name, np.nan) for epoch in net.history], dtype=np.float64)
        for name, sign in signs.items()
        if name in recorded
    }
    return {"epoch": range(1, len(net.history) + 1), **columns}


def _short(values: Iterable[Any]) -> list[float | None]:
    """Return values as JSON stores them: with six digits, None for those that are not finite."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values]
