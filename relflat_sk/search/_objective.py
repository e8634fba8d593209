"""One trial, one minimum: train a candidate on all the data, measure and record it."""

import zlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import optuna
import torch
from optuna.trial import FrozenTrial, TrialState
from sklearn.base import clone, is_classifier
from sklearn.exceptions import NotFittedError
from sklearn.pipeline import Pipeline
from skorch import NeuralNet

from relflat_sk._checks import check_integer
from relflat_sk._models.network_of import DataOptions, to_network
from relflat_sk._random import draw_seed, seeded
from relflat_sk._warnings import warn
from relflat_sk.fleet._fleet import Fleet
from relflat_sk.measures._results import Measured
from relflat_sk.minima._table import MEASURES, NO_REASON, attributes_of, remeasured_key
from relflat_sk.search._data import (
    LR_SCALING,
    TrainingData,
    check_data,
    check_fit_params,
    split_params,
    vary_data,
)
from relflat_sk.search._failures import blame_storage, failure_record
from relflat_sk.search._fit import (
    check_early_stopping,
    check_lr_scaling,
    fit,
    in_fleet,
    in_isolation,
    prepare,
    scale_lr,
    split_recorded,
    trained_rows,
)
from relflat_sk.search._goal import AUTO, check_goal, record_verdict
from relflat_sk.search._measure import (
    TRAIN_LOSS,
    Measuring,
    check_listed,
    find_objectives,
    measure_held_out,
    record_measures,
    write_record,
)
from relflat_sk.search._provenance import check_made_with
from relflat_sk.search._space import Space
from relflat_sk.search._weights import (
    ARTIFACT,
    N_ITER,
    DamagedWeightsError,
    as_store,
    check_store,
    last_prefix,
    load_weights,
    replace_weights,
    restore,
    save_weights,
)
from relflat_sk.training._after_fit import measured_later
from relflat_sk.training._skorch_net import check_parameters

SIGNS = {"minimize": 1.0, "maximize": -1.0}  # of an objective, by the direction of its study
# user attributes of a trial
SEED = "seed"  # a text, because a number would seem to be a measure
IN_FLEET = "in_fleet"  # whether its net was trained with others
# by which share the training loss may differ after training again
ROUNDING = 1e-5  # on another machine
OF_FLEETS = 1e-4  # of nets that were trained in a fleet of another size


def check_kind(estimator: Any, varied: Collection[str]) -> None:
    """Refuse an estimator of which no candidate can be trained and measured.

    Classes of the user's own are not refused: only their training shows what they are.
    """
    prefix = ""
    while isinstance(estimator, Pipeline):
        name, last = estimator.steps[-1]
        if {f"{prefix}{name}", f"{prefix}steps"} & set(varied):
            return  # candidates have another last step
        estimator, prefix = last, f"{prefix}{name}__"
    package = type(estimator).__module__.partition(".")[0]
    if package == "sklearn":
        with suppress(NotFittedError):  # which is the only objection to a network
            to_network(clone(estimator), None, None, DataOptions())
    elif isinstance(estimator, NeuralNet) and package in {"skorch", "relflat_sk"}:
        check_parameters(estimator)


class MinimaObjective:
    """Train one candidate per trial, and measure its minimum: for `optuna.Study.optimize`.

    Each trial clones the estimator, sets the parameters that the trial draws and trains on all
    of X, but for what a `train_split` of yours holds out. The trial's ``user_attrs`` then hold
    every measure, `train_loss`, `test_loss`, `generalization_gap` and `converged`, and in the
    dict `details` the other values of the table of minima, such as scores, `seconds` and
    `reason`; see `rank_minima`.

    Parameters
    ----------
    estimator : estimator
        Any model that `relative_flatness` takes. Each trial trains a clone.
    X : array-like of shape (n, n_features)
        Training data.
    y : array-like of shape (n,) or (n, n_outputs)
        Labels or values.
    space : dict of str to list, distribution of Optuna, or callable
        The values to try, by parameter name: a list of choices, a distribution, or a function
        of the trial; or one function of the trial that returns a dict of parameters. Names that
        begin with ``data__`` vary the training data:
        ``data__train_size`` (number of samples, or their share), ``data__random_labels`` (share
        of the labels that are shuffled), ``data__confusion_size`` (number of further samples,
        with shuffled labels, that are trained on but not measured on) and
        ``data__random_state``. ``"lr_scaling": ["linear"]`` scales learning rates in proportion to
        the batch size, ``"sqrt"`` to its square root, relative to the estimator's own batch size;
        the scaled rates are recorded as ``param_scaled_...``.
    measures : sequence of str, callable or FlatnessScorer, default=("relative_flatness",)
        Names of measures, functions or scorers, as in `FlatMinimaSearch`. Each is an objective of
        the study; ``"train_loss"`` can be another.
    direction : {"minimize", "maximize"}, default="minimize"
        The direction of the study. With "maximize" the objective is minus the measure.
    X_test : array-like of shape (n_test, n_features), optional
        Held-out data. Losses and scores on it are recorded, and never used to choose.
    y_test : array-like of shape (n_test,) or (n_test, n_outputs), optional
        Labels or values of the held-out data; None for a Dataset that has them inside.
    artifact_store : str, path or optuna artifact store, optional
        Where the weights of every minimum are saved; a path is a folder. Each file is a
        `state_dict` that ``torch.load(..., weights_only=True)`` reads. The user attribute
        `artifact_id` of a trial identifies its file.
    goal : "auto", float or None, default="auto"
        What nets train to that have no `StopAtLoss` or `StopAtGradientNorm` of their own, see
        `FlatMinimaSearch`.
    random_state : int, RandomState or None, default=None
        Seeds every `random_state` of the estimator that is None, and torch while a candidate
        trains. Each combination of parameters always has the same seed of its own. If None, each
        trial has a seed of its own from torch's random state. Trials record these seeds.
    n_threads : int or None, default=1
        CPU threads that train and measure a candidate; None for torch's own number.
    fit_params : dict, optional
        Arguments of the estimator's `fit`, such as ``{"sample_weight": weights}``. Measures use the
        weights.

    Raises
    ------
    TypeError
        If `estimator`, `space` or `artifact_store` is of the wrong kind.
    ValueError
        If an argument is not valid, or a name in the space is not a parameter.

    See Also
    --------
    FlatMinimaSearch : Runs such trials and predicts with the minima.
    rank_minima : Rank the trials of a study.

    Notes
    -----
    A network that diverged, or is no better than a constant prediction, fails its trial without
    an exception. Exceptions during training are recorded and raised: pass ``catch=(Exception,)``
    to ``study.optimize`` if the study should go on. With Optuna 4, ``study.best_trial`` may be a
    network that did not converge; `rank_minima` ranks those last.

    A `train_split` that you chose stays, and so does skorch's default if a callback monitors
    validation (`EarlyStopping`). Losses, scores and measures are then of the samples that are
    trained on. Otherwise, skorch's default is dropped. The `early_stopping` of scikit-learn's
    estimators is refused.

    The jobs of ``study.optimize(objective, n_jobs=2)`` are threads and take turns.

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
        space: Any,
        *,
        measures: Sequence[Any] = ("relative_flatness",),
        direction: str = "minimize",
        X_test: Any = None,
        y_test: Any = None,
        artifact_store: Any = None,
        goal: Any = AUTO,
        random_state: Any = None,
        n_threads: int | None = 1,
        fit_params: Mapping[str, Any] | None = None,
    ) -> None:
        check_integer("n_threads", n_threads, minimum=1, optional=True)
        if direction not in SIGNS:
            raise ValueError(f"direction must be one of {list(SIGNS)}, got {direction!r}.")
        check_goal(goal, estimator)
        self.estimator = estimator
        self.X, self.y, self.X_test, self.y_test = X, y, X_test, y_test
        self.space = Space(space)
        self.space.check(estimator)
        check_kind(estimator, self.space.entries)
        check_early_stopping(self.space.possible(estimator))
        check_lr_scaling(self.space.choices.get(LR_SCALING, {}).values())
        check_data(X, y, X_test, y_test, classifier=is_classifier(estimator))
        self.names, self.measuring = find_objectives(measures)
        self.per_sample = check_fit_params(
            X, y, fit_params, last_prefix(estimator), classifier=is_classifier(estimator)
        )
        self.direction = direction
        self.artifact_store = as_store(artifact_store)
        self.goal = goal
        # without a random_state, other searches have other networks
        self.seed = None if random_state is None else draw_seed(random_state)
        self._drawn = int(torch.randint(2**31 - 1, ())) if random_state is None else 0
        self.n_threads = n_threads
        self.checked: set[str] = set()  # names of studies

    def __call__(self, trial: optuna.Trial) -> float | tuple[float, ...]:
        """Train and measure one candidate."""
        study = getattr(trial, "study", None)
        if study is not None and study.study_name not in self.checked:
            directions = [one.name.lower() for one in study.directions]
            needed = [self.direction] * len(self.names)
            if directions != needed:
                raise ValueError(
                    f"the study's directions are {directions}, but this objective has "
                    f"{len(needed)} measure(s), each to {self.direction}. Create the study with "
                    f"directions={needed}."
                )
            check_made_with(study, self, own=trial.number)
            check_store(self.artifact_store)
            self.checked.add(study.study_name)
        return self._run(trial)[0]

    @property
    def depth_band(self) -> float | None:
        """The band of the depths that are compared; None if the objectives weigh flatness and loss.

        None as well if the first measure is at equal loss.
        """
        return self.measuring.depth_band(self.names[0]) if TRAIN_LOSS not in self.names else None

    @property
    def measures(self) -> tuple[str, ...]:
        """The names of the measures, without the training loss."""
        return tuple(self.measuring.names)

    @in_isolation
    def _run(self, trial: optuna.Trial) -> tuple[float | tuple[float, ...], Any]:
        """Train and measure one candidate, and return the trained estimator as well."""
        record: dict[str, Any] = {}  # written at the end, as each write waits for a disk
        try:
            params = self.space.suggest(trial)
            for name, lr in scale_lr(self.estimator, params).items():
                record[f"param_scaled_{name}"] = lr
            seed = self._seed_of(trial)
            record |= {SEED: str(seed), IN_FLEET: in_fleet()}
            with measured_later() as later:
                estimator = self._train(params, seed, record, trial)
            found = self._record(record, trial, estimator, self._data(params), seed)
            for check in later:
                check()
            if not np.isfinite(found).all():
                record["failed"] = True
            write_record(trial, record)
        except optuna.TrialPruned:
            write_record(trial, record | {"reason": NO_REASON[TrialState.PRUNED]})
            raise
        except Exception as error:
            write_record(trial, record | failure_record(error))
            raise
        values = tuple(SIGNS[self.direction] * value for value in found)
        return (values[0] if len(values) == 1 else values), estimator

    def _record(
        self,
        record: dict[str, Any],
        trial: optuna.Trial,
        estimator: Any,
        data: TrainingData,
        seed: int,
    ) -> list[float]:
        """Measure a trained candidate, record it, and save its weights."""
        study = getattr(trial, "study", None)
        # with one direction, the first measure alone, so that any sampler and pruner works
        ranking = self.names if study is None else self.names[: len(study.directions)]
        data = data.only(trained_rows(estimator))
        held_out = self.X_test, self.y_test
        with seeded(seed):  # data loaders draw from torch's random state
            networks = self.measuring.networks(estimator, data)
            found = record_measures(record, networks, seed, self.measuring, ranking)
            if not found:
                return [np.nan] * len(ranking)
            record[MEASURES] = list(found)
            record |= measure_held_out(estimator, record["train_loss"], data, *held_out)
        module = next(iter(networks.values())).module
        save_weights(self.artifact_store, trial, estimator, module, record)
        return record_verdict(record, estimator, self.goal, found, ranking)

    def _train(
        self,
        params: Mapping[str, Any],
        seed: int,
        record: dict[str, Any] | None = None,
        trial: Any = None,
    ) -> Any:
        """Train the estimator with one combination of parameters, on all the data."""
        record = {} if record is None else record
        layers = self.measuring.layers
        return fit(self._prepare(params, seed), self._data(params), seed, record, layers, trial)

    def _restore(self, params: Mapping[str, Any], trial: FrozenTrial) -> Any:
        """Restore a trained candidate from its saved weights, without training."""
        weights = load_weights(self.artifact_store, trial)
        data, seed = self._data(params), self._seed_of(trial)
        estimator = self._prepare(params, seed)
        with split_recorded(estimator, data.X_fit):
            return restore(estimator, weights, data, seed, attributes_of(trial).get(N_ITER, ()))

    @in_isolation
    def _measure(
        self,
        measuring: Measuring,
        names: Sequence[str],
        estimator: Any,
        data: TrainingData,
        trial: FrozenTrial,
    ) -> dict[str, Measured]:
        """Measure a trained candidate, all measures in as few passes over the data as possible."""
        seed, data = self._seed_of(trial), data.only(trained_rows(estimator))
        with seeded(seed):
            return measuring(measuring.networks(estimator, data), names, seed)

    def _data(self, params: Mapping[str, Any]) -> TrainingData:
        """Choose the data that a candidate is trained and measured on."""
        stratify = is_classifier(self.estimator)
        arguments = split_params(params)[1] | self.per_sample
        return vary_data(self.X, self.y, **arguments, stratify=stratify)

    def _seed_of(self, trial: Any) -> int:
        """Return the seed of a trial.

        With a `random_state`, the seed derives from it and from the drawn parameters, so that a
        candidate has the same seed in each search.
        """
        recorded = attributes_of(trial).get(SEED)
        if recorded is not None:
            return int(recorded)
        if self.seed is None:
            return zlib.crc32(b"%d" % trial.number, self._drawn) >> 1
        return zlib.crc32(repr(sorted(trial.params.items())).encode(), self.seed) >> 1

    def _prepare(self, params: Mapping[str, Any], seed: int) -> Any:
        own = split_params(params)[0] | scale_lr(self.estimator, params)
        return prepare(self.estimator, own, seed, self.goal)

    # -- the estimator of a finished trial ------------------------------------------------

    def _has_weights(self, trial: FrozenTrial) -> bool:
        """Return whether the weights of a trial were saved, and are within reach."""
        return self.artifact_store is not None and ARTIFACT in trial.user_attrs

    @in_isolation
    def _provide(self, trial: FrozenTrial, *, retrain: bool = True) -> tuple[Any, str]:
        """Restore the estimator of a trial, or train it again, and say why it is not as it was.

        Damaged weights are replaced by those of the network that is trained again.
        """
        params = self.space.values(trial)
        if self._has_weights(trial):
            try:
                return self._restore(params, trial), ""
            except DamagedWeightsError as error:
                if not retrain:
                    return None, str(error)
                warn(f"{error} The candidate is trained again.")
        estimator, in_fleet = self._train_again(params, trial)
        data, name = self._data(params), self.measures[0]
        loss = self._measure(self.measuring, [name], estimator, data, trial)[name].passes.risk
        before = trial.user_attrs["train_loss"]
        if np.isclose(loss, before, rtol=OF_FLEETS if in_fleet else ROUNDING, atol=0):
            module = to_network(estimator, data.X, data.y, DataOptions()).module
            replace_weights(self.artifact_store, trial, module)
            return estimator, ""
        return estimator, (
            f"the minimum of trial {trial.number} cannot be had again: its training loss was "
            f"{before:.8g}, and is {loss:.8g} after training again with the same seed. Another "
            "machine or version of a library computes other bits, and a part of the estimator may "
            "draw from a random state of its own. An artifact_store keeps the weights: give the "
            "search one before it trains."
        )

    def _train_again(self, params: Mapping[str, Any], trial: FrozenTrial) -> tuple[Any, bool]:
        """Train a candidate with the same seed, in a fleet if it was in one, as is returned."""
        in_fleet, trained = bool(attributes_of(trial).get(IN_FLEET)), list[Any]()

        def train_once() -> bool:
            if trained:
                return False
            trained.append(self._train(params, self._seed_of(trial)))
            return True

        # the table of minima says already whether the goal was reached
        with measured_later() as later:
            if in_fleet:
                Fleet(1).run(train_once)
            else:
                train_once()
        for check in later:
            check()
        return trained[0], in_fleet


# -- measuring finished trials again -----------------------------------------------------


def find_trial(study: optuna.Study, number: Any) -> FrozenTrial:
    """Find a finished trial by its number."""
    trials = study.get_trials(deepcopy=False)
    found = next((trial for trial in trials if trial.number == number), None)
    if found is None or found.state != TrialState.COMPLETE:
        state = (
            "there is no such trial" if found is None else attributes_of(found).get("reason", "")
        )
        raise ValueError(
            f"trial {number!r} has no estimator ({state or 'it is not finished'}). Take a number "
            "from the column 'trial' of minima_, of a row whose state is 'complete'."
        )
    return found


_TEST_LOSS = "test_loss"


def remeasure(
    study: optuna.Study, objective: MinimaObjective, measures: Sequence[Any], *, retrain: bool
) -> list[str]:
    """Measure the finished trials of a study again, and store the measures in the study."""
    check_listed(measures)
    measuring = Measuring(measures)
    check_made_with(study, objective, measuring=measuring)
    trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if not retrain and not any(objective._has_weights(trial) for trial in trials):
        raise ValueError(
            "no weights of these minima were saved, so they cannot be measured again. Give the "
            "search an artifact_store, such as a folder, before it trains, or set retrain=True."
        )
    _complete(study, objective, measuring, held_out=False, retrain=retrain)
    return measuring.names


def measure_what_is_new(study: optuna.Study, objective: MinimaObjective) -> None:
    """Measure the minima of earlier sessions as those of this one are going to be measured.

    A session may have measures or held-out data that the sessions before did not have. Minima
    without saved weights get nan.
    """
    held_out = objective.X_test is not None
    lacking = _complete(study, objective, objective.measuring, held_out=held_out)
    if lacking:
        columns = sorted({name for names in lacking.values() for name in names})
        warn(
            f"{', '.join(columns)} of trials {sorted(lacking)} stay nan: an earlier session "
            "trained them without these measures or held-out data, and their weights were not "
            "saved. With an artifact_store, such as a folder, they would be measured now."
        )


def _complete(
    study: optuna.Study,
    objective: MinimaObjective,
    measuring: Measuring,
    *,
    held_out: bool,
    retrain: bool = False,
) -> dict[int, list[str]]:
    """Measure what finished trials lack; return what is lacking where there are no weights."""
    lacking, problems = {}, []
    attributes = study.user_attrs
    for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        before: dict[str, Any] = attributes.get(remeasured_key(trial), {})
        found = trial.user_attrs | before
        wanted = (*measuring.names, *[_TEST_LOSS] * held_out)
        missing = [name for name in wanted if name not in found]
        if not missing:
            continue
        if not retrain and not objective._has_weights(trial):
            lacking[trial.number] = missing
            continue
        estimator, problem = objective._provide(trial, retrain=retrain)
        if problem:
            problems.append(problem)
            continue
        data = objective._data(objective.space.values(trial))
        names = [name for name in missing if name != _TEST_LOSS]
        measured = objective._measure(measuring, names, estimator, data, trial) if names else {}
        failed = {name: one.reason for name, one in measured.items() if one.reason}
        problems += [f"{name} of trial {trial.number}: {why}" for name, why in failed.items()]
        values = {name: float(one.value) for name, one in measured.items() if name not in failed}
        if _TEST_LOSS in missing:
            values |= measure_held_out(
                estimator, found["train_loss"], data.only(trained_rows(estimator)),
                objective.X_test, objective.y_test,
            )  # fmt: skip
        with blame_storage():
            study.set_user_attr(remeasured_key(trial), before | values)
    if problems:
        warn(
            "\n".join(problems)
            + "\nThe other minima are measured."
            + " To train the candidates of damaged files again: remeasure(..., retrain=True)."
            * (not retrain)
        )
    return lacking
