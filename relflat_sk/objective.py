"""One trial, one minimum: train a candidate on all the data and record what it is like."""

import signal
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import torch
from optuna.artifacts import upload_artifact
from optuna.trial import TrialState
from sklearn.base import clone
from sklearn.utils import check_random_state
from skorch import NeuralNet
from skorch.callbacks import Callback

from relflat_sk._estimators import DataOptions, final_estimator, to_network
from relflat_sk.measures import check_name, evaluate
from relflat_sk.minima import NO_REASON
from relflat_sk.network import mean_loss
from relflat_sk.space import Space

__all__ = ["MinimaObjective"]

_SIGNS = {"minimize": 1.0, "maximize": -1.0}


class MinimaObjective:
    """One trial, one minimum: for `optuna.Study.optimize`.

    Clones the estimator, sets the parameters that the trial suggests, trains on all of X
    (no fold is held out: the `train_split` of skorch nets and the `early_stopping` of
    scikit-learn's are switched off), and records in ``trial.user_attrs`` what the table of
    minima shows: every measure, `train_loss`, `test_loss`, `generalization_gap`, scores,
    `converged`, `seconds`, `reason`.

    A network that diverged or is no better than a constant fails its trial, without an
    exception. What training raises goes through: pass ``catch=(Exception,)`` to
    ``study.optimize`` for the study to go on.

    Parameters
    ----------
    estimator : estimator
        Any model that `relative_flatness` takes; cloned for each trial.
    X, y : array-like
        Training data.
    space : dict
        By parameter name, a list of choices, an Optuna distribution or a function of the
        trial.
    measures : sequence of str, default=("relative_flatness",)
        What to measure, see `get_measure_names`; one objective for each.
    direction : {"minimize", "maximize"}, default="minimize"
        The direction of the study: "maximize" makes the objective minus the measure.
    X_test, y_test : array-like, optional
        Held-out data; recorded, never used to choose.
    artifact_store : optuna artifact store, optional
        Where to keep the weights of every minimum (a `state_dict` that
        ``torch.load(..., weights_only=True)`` reads); the trial's attribute `artifact_id`
        says which.
    random_state : int, RandomState or None, default=None
        Seeds every `random_state` of the estimator that is None, differently for each
        combination of parameters and the same when it is trained again.

    Raises
    ------
    ValueError
        If the space or a name in it is not valid, before anything is trained.

    Examples
    --------
    >>> import optuna
    >>> from sklearn.datasets import load_iris
    >>> from sklearn.linear_model import LogisticRegression
    >>> optuna.logging.set_verbosity(optuna.logging.WARNING)
    >>> X, y = load_iris(return_X_y=True)
    >>> objective = MinimaObjective(
    ...     LogisticRegression(max_iter=1000), X, y, {"C": [0.01, 1.0]}
    ... )
    >>> grid = optuna.samplers.GridSampler({"C": [0.01, 1.0]}, seed=0)
    >>> study = optuna.create_study(sampler=grid)
    >>> study.optimize(objective)
    >>> study.best_params
    {'C': 0.01}
    """

    def __init__(  # noqa: PLR0913
        self,
        estimator: Any,
        X: Any,
        y: Any,
        space: Mapping[str, Any],
        *,
        measures: Sequence[str] = ("relative_flatness",),
        direction: str = "minimize",
        X_test: Any = None,
        y_test: Any = None,
        artifact_store: Any = None,
        random_state: Any = None,
    ) -> None:
        if direction not in _SIGNS:
            raise ValueError(f"direction must be one of {list(_SIGNS)}, got {direction!r}.")
        if isinstance(measures, str) or not measures:
            raise ValueError(f"measures must be a sequence of names, got {measures!r}.")
        for name in measures:
            check_name(name)
        if (X_test is None) != (y_test is None):
            raise ValueError("X_test and y_test go together: give both or neither.")
        self.estimator = estimator
        self.X, self.y = X, y
        self.X_test, self.y_test = X_test, y_test
        self.space = Space(space)
        self.space.check(estimator)
        self.measures = tuple(measures)
        self.direction = direction
        self.artifact_store = artifact_store
        self.base_seed = (
            None
            if random_state is None
            else int(check_random_state(random_state).randint(np.iinfo(np.int32).max))
        )

    def __call__(self, trial: optuna.Trial) -> float | tuple[float, ...]:
        """Train and measure one candidate.

        Parameters
        ----------
        trial : optuna.Trial

        Returns
        -------
        float, or tuple of float if there are several measures
            nan, with which Optuna marks the trial as failed and goes on, for a network that
            diverged or is no better than a constant: it is perfectly flat and useless.

        Raises
        ------
        ValueError
            If the study optimises in other directions.
        """
        self._check_directions(trial)
        return self.run(trial)[0]

    def run(self, trial: optuna.Trial) -> tuple[float | tuple[float, ...], Any]:
        """Train and measure one candidate, and hand the trained estimator over as well.

        Parameters
        ----------
        trial : optuna.Trial

        Returns
        -------
        (float or tuple of float, estimator)
        """
        try:
            params = self.space.suggest(trial)
            estimator = self.train(params, trial.params, trial)
            with _seeded(self._seed(trial.params)):  # loaders draw from torch's random state
                found = self._record(trial, estimator)
        except optuna.TrialPruned:
            trial.set_user_attr("reason", NO_REASON[TrialState.PRUNED])
            raise
        except Exception as error:
            trial.set_user_attr("reason", f"{type(error).__name__}: {error}")
            raise
        values = tuple(_SIGNS[self.direction] * value for value in found)
        return (values[0] if len(values) == 1 else values), estimator

    def train(self, params: Mapping[str, Any], drawn: Mapping[str, Any], trial: Any = None) -> Any:
        """Train the estimator with one combination of parameters, on all the data.

        Parameters
        ----------
        params : dict
            Values by parameter name.
        drawn : dict
            The same as Optuna knows them, from which seeds derive.
        trial : optuna.Trial, optional
            Is told the time, and each epoch for its study's pruner.

        Returns
        -------
        estimator
            A new one; the user's own stays as it is.
        """
        estimator = clone(self.estimator)
        estimator.set_params(**{name: clone(value, safe=False) for name, value in params.items()})
        _hold_nothing_out(estimator, params)
        seed = self._seed(drawn)
        if seed is not None:
            unset = [
                name
                for name, value in estimator.get_params().items()
                if name.split("__")[-1] == "random_state" and value is None
            ]
            estimator.set_params(**dict.fromkeys(unset, seed))
        started = time.perf_counter()
        try:
            with _interruptible(), _seeded(seed), _pruned(estimator, trial):
                estimator.fit(self.X, self.y)
        finally:
            if trial is not None:
                trial.set_user_attr("seconds", time.perf_counter() - started)
        return estimator

    def _check_directions(self, trial: Any) -> None:
        study = getattr(trial, "study", None)
        if study is None:  # a FixedTrial
            return
        directions = [direction.name.lower() for direction in study.directions]
        if directions != [self.direction] * len(self.measures):
            raise ValueError(
                f"the study's directions are {directions}, but this objective has "
                f"{len(self.measures)} measure(s), each to {self.direction}. Create the study "
                f"with directions={[self.direction] * len(self.measures)}."
            )

    def _seed(self, drawn: Mapping[str, Any]) -> int | None:
        """Derive a candidate's seed from its parameters: the same if it is trained again."""
        if self.base_seed is None:
            return None
        return zlib.crc32(repr(sorted(drawn.items())).encode(), self.base_seed) >> 1

    def _record(self, trial: optuna.Trial, estimator: Any) -> list[float]:
        """Write what the table of minima shows; return the measures, nan if there is nothing."""
        # a network that diverged need not be measurable, its loss always is
        train_loss = mean_loss(to_network(estimator, self.X, self.y, DataOptions()))
        trial.set_user_attr("train_loss", train_loss)
        trial.set_user_attr("converged", False)
        if not np.isfinite(train_loss):
            trial.set_user_attr("reason", "the training loss is not finite")
            return [np.nan] * len(self.measures)
        seed = self._seed(trial.params)
        found = {
            name: evaluate(name, estimator, self.X, self.y, random_state=seed)
            for name in self.measures
        }
        for name, measured in found.items():
            trial.set_user_attr(name, measured.value)
        self._record_held_out(trial, estimator, train_loss)
        first = found[self.measures[0]]
        if self.artifact_store is not None:
            trial.set_user_attr("artifact_id", self._keep_weights(trial, first.network.module))
        values = [measured.value for measured in found.values()]
        reason = ""
        if train_loss >= first.constant_risk():
            reason = "the training loss is no better than a constant prediction's"
            values = [np.nan] * len(values)
        elif not np.isfinite(values).all():
            reason = "a measure is not finite"
        elif not _has_converged(final_estimator(estimator)):
            reason = "training stopped before its goal was reached"
        trial.set_user_attr("converged", not reason)
        trial.set_user_attr("reason", reason)
        if hasattr(trial, "set_constraint"):  # optuna >= 5: samplers and best_trial look at it
            trial.set_constraint("converged", float(bool(reason)))
        return values

    def _record_held_out(self, trial: optuna.Trial, estimator: Any, train_loss: float) -> None:
        if self.X_test is not None:
            network = to_network(estimator, self.X_test, self.y_test, DataOptions())
            test_loss = mean_loss(network)
            trial.set_user_attr("test_loss", test_loss)
            trial.set_user_attr("generalization_gap", test_loss - train_loss)
        for name, X, y in (("train", self.X, self.y), ("test", self.X_test, self.y_test)):
            if y is not None and hasattr(estimator, "score"):
                trial.set_user_attr(f"{name}_score", float(estimator.score(X, y)))

    def _keep_weights(self, trial: optuna.Trial, module: torch.nn.Module) -> str:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"minimum_{trial.number}.pt"
            torch.save(module.state_dict(), path)
            artifact: str = upload_artifact(
                artifact_store=self.artifact_store, file_path=str(path), study_or_trial=trial
            )
        return artifact


def _has_converged(estimator: Any) -> bool:
    """Say whether training reached its goal, where the estimator tells."""
    n_iter, max_iter = getattr(estimator, "n_iter_", None), getattr(estimator, "max_iter", None)
    if n_iter is not None and max_iter is not None:  # scikit-learn's
        return bool(np.max(n_iter) < max_iter)
    return bool(getattr(estimator, "converged_", True))


def _hold_nothing_out(estimator: Any, params: Mapping[str, Any]) -> None:
    """Switch validation splits off: those of skorch, and scikit-learn's early stopping."""
    for net in _nets(estimator):
        net.set_params(train_split=None)
    for name, value in estimator.get_params().items():
        if name.split("__")[-1] == "early_stopping" and value is True and name not in params:
            estimator.set_params(**{name: False})


def _nets(estimator: Any) -> list[NeuralNet]:
    """List the skorch nets in an estimator, itself included."""
    parts = [estimator, *estimator.get_params().values()]
    return [part for part in parts if isinstance(part, NeuralNet)]


class _ReportToPruner(Callback):
    """Tell the study's pruner the training loss after each epoch."""

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial = trial

    def __deepcopy__(self, memo: Any) -> "_ReportToPruner":
        return self  # a copy of the trial would report to a copy of the study

    def __sklearn_clone__(self) -> "_ReportToPruner":
        return self

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        return {}

    def on_epoch_end(self, net: NeuralNet, **kwargs: Any) -> None:
        self.trial.report(net.history[-1, "train_loss"], len(net.history))
        if self.trial.should_prune():
            raise optuna.TrialPruned


@contextmanager
def _pruned(estimator: Any, trial: Any) -> Iterator[None]:
    """Let the study's pruner, if there is one, watch the nets of an estimator as they train."""
    study = getattr(trial, "study", None)
    if (
        study is None
        or len(study.directions) > 1
        or isinstance(study.pruner, optuna.pruners.NopPruner)
    ):
        yield
        return
    watched = [net for net in _nets(estimator) if net.callbacks != "disable"]
    for net in watched:
        net.set_params(callbacks=[*(net.callbacks or []), _ReportToPruner(trial)])
    yield
    if watched:  # what was fitted may be a copy, as in a TransformedTargetRegressor
        for net in [*watched, final_estimator(estimator)]:
            _forget_pruner(net)


def _forget_pruner(net: Any) -> None:
    """Drop the callback that holds on to the study."""
    others = [one for one in net.callbacks or [] if not isinstance(one, _ReportToPruner)]
    net.callbacks = others or None
    if hasattr(net, "callbacks_"):
        net.callbacks_ = [
            (name, one) for name, one in net.callbacks_ if not isinstance(one, _ReportToPruner)
        ]


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Seed torch's random state, from which plain skorch nets draw, and give it back."""
    if seed is None:
        yield
        return
    cuda = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=cuda):
        torch.manual_seed(seed)
        yield


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C end the sweep: skorch takes it for the end of one net's training."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    pressed = []

    def remember(number: int, frame: Any) -> None:
        pressed.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt
