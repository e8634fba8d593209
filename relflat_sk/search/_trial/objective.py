"""One trial, one minimum: train a candidate on all the data and record what it is like."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import optuna
from optuna.trial import FrozenTrial, TrialState
from sklearn.base import is_classifier
from sklearn.utils import check_random_state

from relflat_sk._minima_table import NO_REASON
from relflat_sk._models import DataOptions, final_estimator, to_network
from relflat_sk._network import mean_loss
from relflat_sk.measures import Flatness, check_name, evaluate
from relflat_sk.search._trial.fitting import fit, prepare, seeded
from relflat_sk.search._trial.learning_rate import LR_SCALINGS, scale_lr
from relflat_sk.search._trial.space import Space
from relflat_sk.search._trial.training_data import TrainingData, split_params, vary_data
from relflat_sk.search._trial.weights import as_store, keep_weights, load_weights, restore

__all__ = ["MinimaObjective"]

TRAIN_LOSS = "train_loss"
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
        trial. Names that begin with ``data__`` vary the training data: ``data__train_size``
        (a number or share of samples), ``data__random_labels`` (share of labels shuffled),
        ``data__confusion_size`` (number of samples more, with shuffled labels, that are trained
        on but not measured on), ``data__random_state``.
    measures : sequence of str, default=("relative_flatness",)
        What to measure, see `get_measure_names`; one objective for each. ``"train_loss"`` can
        be another one.
    direction : {"minimize", "maximize"}, default="minimize"
        The direction of the study: "maximize" makes the objective minus the measure.
    X_test, y_test : array-like, optional
        Held-out data; recorded, never used to choose.
    artifact_store : str, path or optuna artifact store, optional
        Where to keep the weights of every minimum, in a folder if it is a path: a `state_dict`
        each, which ``torch.load(..., weights_only=True)`` reads; the trial's attribute
        `artifact_id` says which.
    lr_scaling : "linear", optional
        Scale learning rates in proportion to the batch size, relative to the estimator's own;
        what came out is recorded as ``param_scaled_...``.
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
        lr_scaling: str | None = None,
        random_state: Any = None,
    ) -> None:
        if direction not in _SIGNS:
            raise ValueError(f"direction must be one of {list(_SIGNS)}, got {direction!r}.")
        if lr_scaling not in LR_SCALINGS:
            raise ValueError(f"lr_scaling must be one of {list(LR_SCALINGS)}, got {lr_scaling!r}.")
        if isinstance(measures, str) or not measures:
            raise ValueError(f"measures must be a sequence of names, got {measures!r}.")
        for name in measures:
            if name != TRAIN_LOSS:
                check_name(name)
        if (X_test is None) != (y_test is None):
            raise ValueError("X_test and y_test go together: give both or neither.")
        self.estimator = estimator
        self.X, self.y = X, y
        self.X_test, self.y_test = X_test, y_test
        self.space = Space(space)
        self.space.check(estimator)
        self.names = tuple(measures)  # what there is an objective for
        self.measures = tuple(name for name in measures if name != TRAIN_LOSS)
        if not self.measures:
            raise ValueError(f"measures must name a measure beside {TRAIN_LOSS!r}.")
        self.direction = direction
        self.artifact_store = as_store(artifact_store)
        self.lr_scaling = lr_scaling
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
            if self.lr_scaling is not None:
                for name, lr in scale_lr(self.estimator, params).items():
                    trial.set_user_attr(f"param_scaled_{name}", lr)
            estimator = self.train(params, trial.params, trial)
            with seeded(self.seed(trial.params)):  # loaders draw from torch's random state
                found = self._record(trial, estimator, self.data(params))
        except optuna.TrialPruned:
            trial.set_user_attr("reason", NO_REASON[TrialState.PRUNED])
            raise
        except Exception as error:
            trial.set_user_attr("reason", f"{type(error).__name__}: {error}")
            trial.set_user_attr("failed", True)
            raise
        if not np.isfinite(found).all():
            trial.set_user_attr("failed", True)
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
        data = self.data(params)
        seed = self.seed(drawn)
        return fit(self._prepare(params, seed), data.X_fit, data.y_fit, seed, trial)

    def restore(self, params: Mapping[str, Any], trial: FrozenTrial) -> Any:
        """Give a candidate the weights that were kept of it, in place of training it again.

        Parameters
        ----------
        params : dict
            Values by parameter name.
        trial : optuna.trial.FrozenTrial
            The one in which it was trained.

        Returns
        -------
        estimator

        Raises
        ------
        ValueError
            If no weights of it were kept.
        """
        weights = load_weights(self.artifact_store, trial)
        data, seed = self.data(params), self.seed(trial.params)
        return restore(self._prepare(params, seed), weights, data.X_fit, data.y_fit, seed)

    def measure(
        self, names: Sequence[str], estimator: Any, data: TrainingData, drawn: Mapping[str, Any]
    ) -> dict[str, Flatness]:
        """Measure a candidate.

        Parameters
        ----------
        names : sequence of str
        estimator : estimator
            Trained.
        data : TrainingData
        drawn : dict
            Its parameters as Optuna knows them, from which seeds derive.

        Returns
        -------
        dict
            What was found, by name.
        """
        seed = self.seed(drawn)
        with seeded(seed):
            return {
                name: evaluate(name, estimator, data.X, data.y, random_state=seed) for name in names
            }

    def data(self, params: Mapping[str, Any]) -> TrainingData:
        """Choose what a candidate is trained on, and what it is measured on."""
        stratify = is_classifier(self.estimator)
        return vary_data(self.X, self.y, **split_params(params)[1], stratify=stratify)

    def _prepare(self, params: Mapping[str, Any], seed: int | None) -> Any:
        own = split_params(params)[0]
        if self.lr_scaling is not None:
            own |= scale_lr(self.estimator, own)
        return prepare(self.estimator, own, seed)

    def _check_directions(self, trial: Any) -> None:
        study = getattr(trial, "study", None)
        if study is None:  # a FixedTrial
            return
        directions = [direction.name.lower() for direction in study.directions]
        if directions != [self.direction] * len(self.names):
            raise ValueError(
                f"the study's directions are {directions}, but this objective has "
                f"{len(self.names)} measure(s), each to {self.direction}. Create the study "
                f"with directions={[self.direction] * len(self.names)}."
            )

    def seed(self, drawn: Mapping[str, Any]) -> int | None:
        """Derive a candidate's seed from its parameters: the same if it is trained again."""
        if self.base_seed is None:
            return None
        return zlib.crc32(repr(sorted(drawn.items())).encode(), self.base_seed) >> 1

    def _record(self, trial: optuna.Trial, estimator: Any, data: TrainingData) -> list[float]:
        """Write what the table of minima shows; return the measures, nan if there is nothing."""
        # a network that diverged need not be measurable, its loss always is
        train_loss = mean_loss(to_network(estimator, data.X, data.y, DataOptions()))
        trial.set_user_attr("train_loss", train_loss)
        trial.set_user_attr("converged", False)
        if not np.isfinite(train_loss):
            trial.set_user_attr("reason", "the training loss is not finite")
            return [np.nan] * len(self.names)
        found = self.measure(self.measures, estimator, data, trial.params)
        for name, measured in found.items():
            trial.set_user_attr(name, measured.value)
        self._record_held_out(trial, estimator, train_loss, data)
        first = found[self.measures[0]]
        if self.artifact_store is not None:
            keep_weights(self.artifact_store, trial, first.network.module)
        known = {TRAIN_LOSS: train_loss} | {name: one.value for name, one in found.items()}
        values = [known[name] for name in self.names]
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

    def _record_held_out(
        self, trial: optuna.Trial, estimator: Any, train_loss: float, data: TrainingData
    ) -> None:
        if self.X_test is not None:
            network = to_network(estimator, self.X_test, self.y_test, DataOptions())
            test_loss = mean_loss(network)
            trial.set_user_attr("test_loss", test_loss)
            trial.set_user_attr("generalization_gap", test_loss - train_loss)
        for name, X, y in (("train", data.X, data.y), ("test", self.X_test, self.y_test)):
            if y is not None and hasattr(estimator, "score"):
                trial.set_user_attr(f"{name}_score", float(estimator.score(X, y)))


def _has_converged(estimator: Any) -> bool:
    """Say whether training reached its goal, where the estimator tells."""
    n_iter, max_iter = getattr(estimator, "n_iter_", None), getattr(estimator, "max_iter", None)
    if n_iter is not None and max_iter is not None:  # scikit-learn's
        return bool(np.max(n_iter) < max_iter)
    return bool(getattr(estimator, "converged_", True))
