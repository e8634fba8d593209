"""What a progress bar says of a search: the flattest minimum, goals reached, failures."""

from collections import Counter
from collections.abc import Iterable

from optuna.trial import FrozenTrial, TrialState

from relflat_sk.search._sharing.flattest import is_minimum

__all__ = ["Progress"]


class Progress:
    """Counts of the candidates that are finished."""

    def __init__(self, trials: Iterable[FrozenTrial]) -> None:
        self.counts: Counter[str] = Counter()
        self.best: tuple[float, int] | None = None
        for trial in trials:
            if trial.state == TrialState.COMPLETE or "failed" in trial.user_attrs:
                self.add(trial)

    def add(self, trial: FrozenTrial) -> None:
        """Count a trial."""
        if is_minimum(trial):
            self.counts["plateau" if trial.user_attrs.get("ended_by") == "plateau" else "goal"] += 1
            found = (trial.values[0], trial.number)
            self.best = found if self.best is None else min(self.best, found)
        else:
            self.counts["open" if trial.state == TrialState.COMPLETE else "failed"] += 1

    def __str__(self) -> str:
        n = self.counts
        best = "no minimum yet"
        if self.best is not None:
            best = f"flattest {self.best[0]:.4g} (trial {self.best[1]})"
        return (
            f"{best}, goal reached {n['goal']}, plateau {n['plateau']}, "
            f"not converged {n['open']}, failed {n['failed']}"
        )
