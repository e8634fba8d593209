"""Adapter to the private attributes of Optuna's studies: further objects for the same study."""

from collections.abc import Sequence

import optuna
from optuna.trial import FrozenTrial

__all__ = ["OneTrialStudy", "StoppableStudy", "with_trials"]


class _View(optuna.Study):
    """A second object for a study, made without a read of its storage.

    Parameters
    ----------
    study : optuna.Study
        The study.
    """

    def __init__(self, study: optuna.Study) -> None:
        self.__setstate__(study.__getstate__())  # as a copy by pickle, but for the storage


class OneTrialStudy(_View):
    """A view of a study whose ``optimize(..., n_trials=1)`` runs a trial that exists already.

    Parameters
    ----------
    study : optuna.Study
        The study that holds the trial.
    trial_id : int
        The trial's id in the storage, as returned by `add_trial`.

    Attributes
    ----------
    trial_id : int
        The same id.
    stopped : bool
        Whether the sampler asked to stop, because it has nothing left to draw.
    """

    def __init__(self, study: optuna.Study, trial_id: int) -> None:
        super().__init__(study)
        self.trial_id = trial_id
        self.stopped = False

    def _pop_waiting_trial_id(self) -> int:
        return self.trial_id

    def stop(self) -> None:
        """Stop as `optuna.Study.stop` does, and remember it."""
        super().stop()
        self.stopped = True


class StoppableStudy(_View):
    """A view of a study for callbacks, whose `stop` says that a search is to end.

    Parameters
    ----------
    study : optuna.Study
        The study.

    Attributes
    ----------
    stopped : bool
        Whether `stop` was called.
    """

    def __init__(self, study: optuna.Study) -> None:
        super().__init__(study)
        self.stopped = False

    def stop(self) -> None:
        """End the search after the candidates that are in training."""
        self.stopped = True


def with_trials(study: optuna.Study, trials: Sequence[FrozenTrial]) -> optuna.Study:
    """Return a view of a study whose sampler sees given trials.

    A study hands its sampler the trials that it read when it last began a trial.

    Parameters
    ----------
    study : optuna.Study
        Any study.
    trials : sequence of optuna.trial.FrozenTrial
        The trials that the study holds now.

    Returns
    -------
    optuna.Study
        The same study. It is not meant to run trials.
    """
    view = _View(study)
    view._thread_local.cached_all_trials = list(trials)
    return view
