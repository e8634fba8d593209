"""Optimize a study of one's own, and train the nets of several trials together."""

from collections.abc import Iterable
from itertools import count
from typing import Any

import optuna

from relflat_sk._checks import check_integer
from relflat_sk.search._optuna_views import StoppableStudy
from relflat_sk.search._sharing import Stopping, give_up, train_together
from relflat_sk.search._trial import MinimaObjective

__all__ = ["optimize_study"]


def optimize_study(
    study: optuna.Study,
    objective: MinimaObjective,
    n_trials: int | None = None,
    *,
    timeout: float | None = None,
    catch: Iterable[type[Exception]] | type[Exception] = (),
    callbacks: Any = None,
    fleet: int | str | None = "auto",
) -> None:
    """Add trials to a study as `optuna.Study.optimize` does, and train their nets together.

    Several trials are in training at a time, in turns and in this process. Their nets take their
    steps as one stacked model, see `FleetTrainer`. The study gets the trials, attributes and
    weights that ``study.optimize(objective)`` gives it, up to rounding.

    Parameters
    ----------
    study : optuna.Study
        The study.
    objective : MinimaObjective
        Trains and measures one candidate per trial.
    n_trials : int, optional
        Number of trials to add. If None, trials are added until the sampler, a callback, `timeout`
        or Ctrl-C ends it.
    timeout : float, optional
        Seconds after which no trial begins; those in training are finished.
    catch : tuple of Exception types, default=()
        Exceptions of candidates that fail their trial only. After any other, the trials that are
        in training fail as well, and the exception is raised.
    callbacks : list of callable, optional
        Functions of the study and of a finished trial. In them, ``study.stop()`` ends it after the
        trials in training; the study that they get is a view of yours.
    fleet : int, "auto" or None, default="auto"
        Number of trials at a time, see `FlatMinimaSearch`; None for one after the other. A sampler
        that learns from results knows fewer of them.

    Raises
    ------
    TypeError
        If `objective` is no `MinimaObjective`, or `callbacks` is no list of functions.
    ValueError
        If a number is not valid, or the study's minima were made with something else.

    See Also
    --------
    FlatMinimaSearch : Makes such a study of its own.
    fleet_training : Trains nets together that scikit-learn or your own functions fit.

    Examples
    --------
    >>> import optuna
    >>> from sklearn.datasets import load_iris
    >>> from relflat_sk import MinimaObjective, RelativeFlatnessRegularizedClassifier
    >>> optuna.logging.set_verbosity(optuna.logging.WARNING)
    >>> X, y = load_iris(return_X_y=True)
    >>> net = RelativeFlatnessRegularizedClassifier(max_epochs=50, lr=0.03, verbose=0)
    >>> objective = MinimaObjective(net, X, y, {"batch_size": [16, 32]}, goal=0.2, random_state=0)
    >>> study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    >>> optimize_study(study, objective, n_trials=4)
    >>> [trial.user_attrs["converged"] for trial in study.trials]
    [True, True, True, True]
    """
    if not isinstance(objective, MinimaObjective):
        raise TypeError(
            f"objective must be a MinimaObjective, got a {type(objective).__name__}. Functions of "
            "your own that fit nets can run inside of fleet_training(), by joblib.Parallel."
        )
    check_integer("n_trials", n_trials, minimum=1, optional=True)
    stopping = Stopping(timeout, callbacks)
    caught = catch if isinstance(catch, type) else tuple(catch)
    view, begun = StoppableStudy(study), set[int]()
    numbers = count() if n_trials is None else iter(range(n_trials))

    def run(trial: optuna.Trial) -> Any:
        begun.add(trial.number)
        return objective(trial)

    def train() -> bool:
        if view.stopped or stopping.is_due(study, "") or next(numbers, None) is None:
            return False
        view.optimize(run, n_trials=1, catch=caught, callbacks=list(stopping.callbacks))
        return True

    try:
        train_together(train, study, objective.estimator, fleet, objective.n_threads)
    except BaseException:  # Optuna has noted the end of trials that raise, not that of the others
        give_up(study, lambda trial: trial.number in begun)
        raise
