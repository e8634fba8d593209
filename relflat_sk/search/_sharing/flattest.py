"""Hold the estimators of the candidates that may rank first, while a search goes on."""

from typing import Any, NamedTuple

import numpy as np
from optuna.trial import FrozenTrial, TrialState

__all__ = ["FlattestSoFar", "is_minimum"]


def is_minimum(trial: FrozenTrial) -> bool:
    """Return whether a trial has found a minimum."""
    return trial.state == TrialState.COMPLETE and bool(trial.user_attrs.get("converged"))


class _Held(NamedTuple):
    """A candidate with its estimator; equally flat minima rank in the order of their trials."""

    value: float
    number: int
    depth: float
    estimator: Any


class FlattestSoFar:
    """The estimators of the candidates that may rank first.

    Only minima of about the same depth are compared, and which depth that is depends on all
    candidates. A minimum cannot rank first any more once flatter ones at least as deep and at
    least as shallow lie within one band: every band that contains it contains one of them. As
    long as there is no minimum, the first of the other candidates is held.
    """

    def __init__(self, enabled: bool, depth_band: float | None) -> None:
        self.enabled = enabled
        self.band = np.inf if depth_band is None else depth_band
        self.held: list[_Held] = []
        self.other: _Held | None = None

    def offer(self, trial: FrozenTrial, estimator: Any) -> None:
        """Hold the estimator of a trial if it may rank first."""
        if not self.enabled or trial.state != TrialState.COMPLETE:
            return
        depth = trial.user_attrs.get("depth", np.nan)
        offered = _Held(trial.values[0], trial.number, depth, estimator)
        if is_minimum(trial):
            self.held = [*self.held, offered]
            self.held = [one for one in self.held if not self._is_beaten(one)]
            self.other = None
        elif not self.held and (self.other is None or _order(offered) < _order(self.other)):
            self.other = offered

    def estimator(self, number: int) -> Any:
        """Return the estimator of a trial."""
        held = self.held if self.other is None else [self.other]
        return next((one.estimator for one in held if one.number == number), None)

    def _is_beaten(self, one: _Held) -> bool:
        """Return whether flatter minima share every band with a minimum."""
        flatter = [other for other in self.held if other[:2] < one[:2]]
        if np.isnan(one.depth):  # it is in every band
            return any(np.isnan(other.depth) for other in flatter)
        deeper = min((o.depth for o in flatter if o.depth >= one.depth), default=np.inf)
        shallower = max((o.depth for o in flatter if o.depth <= one.depth), default=0.0)
        beside = any(np.isnan(other.depth) for other in flatter)
        return beside or (bool(flatter) and np.isinf(self.band)) or deeper <= self.band * shallower


def _order(one: _Held) -> tuple[Any, ...]:
    """Return what ranks candidates that are no minima: the deepest first, as in `rank_minima`."""
    if np.isnan(one.depth):
        return not np.isfinite(one.value), np.inf, one.value, one.number
    return not np.isfinite(one.value), -one.depth, 0.0, one.number
