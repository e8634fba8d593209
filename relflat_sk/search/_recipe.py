"""What the trials of a study have in common, and how a trial becomes its estimator again."""

import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import optuna
import torch
from optuna.trial import FrozenTrial, TrialState
from sklearn.base import is_classifier
from sklearn.exceptions import NotFittedError
from sklearn.pipeline import Pipeline

from relflat_sk._checks import check_integer
from relflat_sk._models.network_of import DataOptions, last_prefix, to_network
from relflat_sk._random import draw_seed
from relflat_sk._warnings import warn
from relflat_sk.minima._minimum import Minimum
from relflat_sk.minima._table import remeasured_key
from relflat_sk.search._data import check_data, check_fit_params
from relflat_sk.search._failures import blame_storage
from relflat_sk.search._fit import isolated
from relflat_sk.search._measure import TRAIN_LOSS, Measuring, find_objectives, record_held_out
from relflat_sk.search._space import Space, labels_of
from relflat_sk.search._task import Task, Trained, train_again
from relflat_sk.search._weights import (
    DamagedWeightsError,
    as_store,
    from_file,
    restore,
    save_weights,
)

# by which share the training loss may differ after training again
ROUNDING = 1e-5  # on another machine
OF_FLEETS = 1e-4  # of nets that were trained in a fleet of another size


@dataclass
class Recipe:
    """What the trials of a study and their minima have in common."""

    space: Space
    task: Task
    store: Any  # of artifacts
    seed: int | None
    drawn: int  # from torch's random state, if there is no seed

    @classmethod
    def of(  # noqa: PLR0913
        cls,
        estimator: Any,
        X: Any,
        y: Any,
        space: Any,
        measures: Any,
        *,
        n_objectives: int | None = None,  # of the measures, the first; all if None
        X_test: Any,
        y_test: Any,
        artifact_store: Any,
        goal: Any,
        random_state: Any,
        n_threads: int | None,
        fit_params: Mapping[str, Any] | None,
    ) -> "Recipe":
        """Check the arguments of a search or of an objective, before anything is trained."""
        check_integer("n_threads", n_threads, minimum=1, optional=True)
        if isinstance(estimator, type) or not hasattr(estimator, "get_params"):
            raise TypeError(
                "estimator must be an instance of a scikit-learn estimator or skorch net, got "
                f"{estimator!r}."
            )
        searched = Space(space)
        check_data(X, y, X_test, y_test, classifier=is_classifier(estimator))
        names, measuring = find_objectives(measures)
        of_samples = check_fit_params(X, fit_params, last_prefix(estimator))
        task = Task(
            estimator, X, y, X_test, y_test, **of_samples, measuring=measuring,
            ranking=names[:n_objectives], goal=goal, n_threads=n_threads,
        )  # fmt: skip
        # what is wrong with the first candidate's estimator is an error of the call
        _check_kind(task.prepare(searched.example(), seed=0))
        seed = None if random_state is None else draw_seed(random_state)
        # without a random_state, other searches have other networks
        drawn = int(torch.randint(2**31 - 1, ())) if seed is None else 0
        return cls(searched, task, as_store(artifact_store), seed, drawn)

    @property
    def depth_band(self) -> float | None:
        """The band of the depths that are compared; None if measures are at equal loss.

        None as well if the objectives weigh flatness and loss.
        """
        ranking = self.task.ranking
        return None if TRAIN_LOSS in ranking else self.task.measuring.depth_band(ranking[0])

    def seed_of(self, trial: Any) -> int:
        """Return the seed of a trial.

        With a `random_state`, the seed derives from it and from the drawn parameters, so that a
        candidate has the same seed in each search.
        """
        recorded = Minimum.from_trial(trial).seed
        if recorded is not None:
            return recorded
        if self.seed is None:
            return zlib.crc32(b"%d" % trial.number, self.drawn) >> 1
        return zlib.crc32(repr(sorted(labels_of(trial).items())).encode(), self.seed) >> 1

    def record(
        self, trial: Any, params: Mapping[str, Any], minimum: Minimum, trained: Trained | None
    ) -> None:
        """Save the weights of a candidate, and write what it has become."""
        minimum.params |= self.space.computed(trial, params)
        if self.store is not None and trained is not None:
            save_weights(self.store, trial, trained.weights, minimum)
        minimum.write(trial)

    # -- the estimator of a finished trial -------------------------------------------------------

    def has_weights(self, trial: FrozenTrial) -> bool:
        """Return whether the weights of a trial were saved, and are within reach."""
        return self.store is not None and Minimum.from_trial(trial).artifact_id is not None

    def restore(self, trial: FrozenTrial, trained: Trained) -> Any:
        """Make the estimator of a trial of its weights."""
        if trained.estimator is not None:
            return trained.estimator
        params, seed = self.space.values(trial), self.seed_of(trial)
        with isolated(self.task.n_threads):
            estimator = self.task.prepare(params, seed)
            return restore(estimator, trained, self.task.data(params), seed)

    def estimator_of(self, trial: FrozenTrial | None, number: Any) -> Any:
        """Return the estimator of a trial as it was; refuse one that was not trained to its end."""
        if trial is None or trial.state != TrialState.COMPLETE:
            state = "there is no such trial" if trial is None else Minimum.from_trial(trial).reason
            raise ValueError(
                f"trial {number!r} has no estimator ({state or 'it is not finished'}). Take a "
                "number from the column 'trial' of minima_, of a row whose state is 'complete'."
            )
        estimator, problem = self.provide(trial)
        if problem:
            raise ValueError(problem)
        return estimator

    def provide(self, trial: FrozenTrial, *, retrain: bool = True) -> tuple[Any, str]:
        """Restore the estimator of a trial, or train it again, and say why it is not as it was."""
        if self.has_weights(trial):
            try:
                return self.restore(trial, from_file(self.store, trial)), ""
            except DamagedWeightsError as error:
                if not retrain:
                    return None, str(error)
                warn(f"{error} The candidate is trained again.")
        task, params, seed = self.task, self.space.values(trial), self.seed_of(trial)
        minimum = Minimum.from_trial(trial)
        estimator = train_again(task, params, seed, together=bool(minimum.in_fleet))
        name = task.measuring.names[0]
        loss = task.measure([name], estimator, task.data(params), seed)[name].passes.risk
        before = minimum.train_loss
        assert before is not None
        if np.isclose(loss, before, rtol=OF_FLEETS if minimum.in_fleet else ROUNDING, atol=0):
            return estimator, ""
        return estimator, (
            f"the minimum of trial {trial.number} cannot be had again: its training loss was "
            f"{before:.8g}, and is {loss:.8g} after training again with the same seed, as on "
            "another machine or with a random state that the seed does not reach. An "
            "artifact_store keeps the weights, if the search has one before it trains."
        )

    # -- measuring finished trials ---------------------------------------------------------------

    def measure_what_is_new(self, study: optuna.Study) -> None:
        """Measure the minima of earlier sessions as those of this one are going to be measured.

        A session may have measures or held-out data that the sessions before did not have. Minima
        without saved weights get nan.
        """
        task = self.task
        lacking = self.complete(study, task.measuring, held_out=task.X_test is not None)
        if lacking:
            columns = sorted({name for names in lacking.values() for name in names})
            warn(
                f"{', '.join(columns)} of trials {sorted(lacking)} stay nan: an earlier session "
                "trained them without, and saved no weights, which takes an artifact_store."
            )

    def complete(
        self, study: optuna.Study, measuring: Measuring, *, held_out: bool, retrain: bool = False
    ) -> dict[int, list[str]]:
        """Measure what finished trials lack; return what is lacking where there are no weights."""
        lacking: dict[int, list[str]] = {}
        problems = []
        task, attributes = replace(self.task, measuring=measuring), study.user_attrs
        for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
            minimum = Minimum.from_trial(trial)
            before: dict[str, Any] = attributes.get(remeasured_key(trial), {})
            row = minimum.row() | before
            names = [name for name in measuring.names if name not in row]
            lacks_loss = held_out and "test_loss" not in row
            if not names and not lacks_loss:
                continue
            if not retrain and not self.has_weights(trial):
                lacking[trial.number] = [*names, *["test_loss"] * lacks_loss]
                continue
            estimator, problem = self.provide(trial, retrain=retrain)
            if problem:
                problems.append(problem)
                continue
            data = task.data(self.space.values(trial))
            again = Minimum(train_loss=minimum.train_loss)
            measured = task.measure(names, estimator, data, self.seed_of(trial)) if names else {}
            again.measures = {n: float(x.value) for n, x in measured.items() if not x.reason}
            problems += [
                f"{name} of trial {trial.number}: {result.reason}"
                for name, result in measured.items()
                if result.reason
            ]
            if lacks_loss:
                record_held_out(again, estimator, data, task.X_test, task.y_test)
            with blame_storage(study):
                study.set_user_attr(remeasured_key(trial), before | again.row())
        if problems:
            warn(
                "\n".join(problems)
                + "\nThe other minima are measured."
                + " To train the candidates of damaged files again: remeasure(..., retrain=True)."
                * (not retrain)
            )
        return lacking


def _check_kind(estimator: Any) -> None:
    """Refuse an estimator of scikit-learn that is no network; only training shows it of others."""
    while isinstance(estimator, Pipeline):
        estimator = estimator.steps[-1][1]
    if type(estimator).__module__.startswith("sklearn."):
        with suppress(NotFittedError):  # which is the only objection to a network
            to_network(estimator, None, None, DataOptions())
