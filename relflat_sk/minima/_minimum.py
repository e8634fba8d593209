"""One minimum: the only list of what a trial records, and the only place that writes and reads it.

A trial stores what users read as user attributes, and the rest as the dict ``details``, because
each attribute is a transaction of the storage.
"""

from dataclasses import dataclass, field, fields
from typing import Any

import optuna

from relflat_sk._checks import is_number

PARAM_PREFIX = "param_"
LOSSES = ("train_loss", "test_loss", "generalization_gap")
SCORES = ("train_score", "test_score")
DEPTH = "depth"
STATUS = ("converged", "ended_by", "seconds", "state", "reason")
FIXED = ("trial", *LOSSES, DEPTH, *SCORES, STATUS[0], "comparable", *STATUS[1:], "rank")

DETAILS = "details"  # the user attribute with what users hardly read
_SHOWN = {*LOSSES, "converged", "failed", "artifact_id"}  # user attributes, as are measures


@dataclass
class Minimum:
    """What a candidate has become; None is not known."""

    measures: dict[str, float] = field(default_factory=dict)  # in the order of the search
    # beside what Optuna drew: what functions computed, and scaled learning rates
    params: dict[str, Any] = field(default_factory=dict)
    train_loss: float | None = None
    test_loss: float | None = None
    generalization_gap: float | None = None
    depth: float | None = None
    train_score: float | None = None
    test_score: float | None = None
    converged: bool | None = None
    ended_by: str | None = None
    seconds: float | None = None
    reason: str | None = None
    failed: bool | None = None  # trials that were interrupted do not have it
    constant_loss: float | None = None
    n_samples: int | None = None
    n_iter: list[int] | None = None  # of a solver
    curves: dict[str, list[Any]] | None = None  # losses and flatness of the epochs, by column
    seed: int | None = None
    in_fleet: bool | None = None  # whether the net was trained with others
    weights_hash: str | None = None
    artifact_id: str | None = None  # of the file with the weights
    values: list[float] = field(default_factory=list)  # of the objectives, which Optuna stores
    error: Exception | None = None  # which failed it

    def fail(self, error: Exception) -> None:
        """Record that training or measuring failed."""
        self.failed, self.error = True, error
        self.reason = f"{type(error).__name__}: {error}"

    def row(self) -> dict[str, Any]:
        """Return what is known as columns."""
        known = {n: getattr(self, n) for n in _COLUMNS if getattr(self, n) is not None}
        params = {f"{PARAM_PREFIX}{name}": value for name, value in self.params.items()}
        return params | self.measures | known

    def attributes(self) -> dict[str, Any]:
        """Return the user attributes of a trial."""
        row = self.row()
        details = {n: x for n, x in row.items() if n in _COLUMNS and n not in _SHOWN}
        details["measures"] = list(self.measures)  # databases forget the order
        return {n: x for n, x in row.items() if n not in details} | {DETAILS: details}

    def write(self, trial: optuna.Trial) -> None:
        """Write the minimum as a trial's user attributes."""
        for name, value in self.attributes().items():
            trial.set_user_attr(name, value)
        # Optuna 5: samplers and best_trial respect it
        if self.ended_by is not None and hasattr(trial, "set_constraint"):
            trial.set_constraint("converged", float(not self.converged))

    @classmethod
    def from_trial(cls, trial: Any) -> "Minimum":
        """Read a minimum; numbers that another program recorded are measures."""
        details = trial.user_attrs.get(DETAILS, {})
        stored = trial.user_attrs | details
        names = dict.fromkeys([*details.get("measures", ()), *stored])
        params = {
            name.removeprefix(PARAM_PREFIX): value
            for name, value in stored.items()
            if name.startswith(PARAM_PREFIX)
        }
        minimum = cls(
            {n: stored[n] for n in names if not is_reserved(n) and is_number(stored.get(n))},
            params,
            **{name: stored[name] for name in _COLUMNS if name in stored},
        )
        minimum.seed = None if minimum.seed is None else int(minimum.seed)  # once a text
        return minimum


_COLUMNS = [
    column.name
    for column in fields(Minimum)
    if column.name not in {"measures", "params", "values", "error"}
]
# what trials record beside their minimum, and columns that only some tables have
_OTHERS = {DETAILS, "measures", "owner", "pareto", "candidate", "process", "sweep", "killed"}


def is_reserved(name: str) -> bool:
    """Return whether a name has a meaning of its own in tables of minima and their trials."""
    return name in FIXED or name in {*_COLUMNS, *_OTHERS} or name.startswith(PARAM_PREFIX)
