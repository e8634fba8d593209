"""What the trials of a study have in common, and how a trial becomes its estimator again.

A study records how its minima are made: a short text for each parameter of the estimator, each
part of the data, each measure and each setting. Minima that are made otherwise are refused.
"""

import re
import warnings
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import optuna
import torch
from numpy.typing import NDArray
from optuna.trial import FrozenTrial, TrialState
from sklearn.base import is_regressor
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.pipeline import Pipeline
from skorch import NeuralNet
from skorch.dataset import get_len

from relflat_sk._checks import check_integer, warn
from relflat_sk._models.network_of import (
    DataOptions,
    final_estimator,
    last_prefix,
    last_step,
    to_network,
)
from relflat_sk._network.batches import check_weights
from relflat_sk._network.borrowing import unwrapped
from relflat_sk._random import seeded
from relflat_sk.minima._table import UNITS, Minimum, remeasured_key
from relflat_sk.search._measure import Measuring, TrainingData, check_held_out, record_held_out
from relflat_sk.search._space import Space, describe, labels_of
from relflat_sk.search._storage import (
    DamagedWeightsError,
    as_store,
    blame_storage,
    load_weights,
    save_weights,
)
from relflat_sk.search._task import LR_SCALING, Task, Trained, isolated, train_again
from relflat_sk.training._after_fit import measured_later

# by which share the training loss may differ after training again
ROUNDING = 1e-5  # on another machine
OF_FLEETS = 1e-4  # of nets that were trained in a fleet of another size

MADE_WITH = "made_with"  # user attribute of a study
# parts of the record to which later sessions may add
_OPEN = ("X_test", "y_test", "measure ")
# parameters that change the time that training takes, or what it shows, but not its result
_WITHOUT_EFFECT = re.compile(
    r"(^|__)(_.*|verbose|n_jobs|memory|device|num_workers|pin_memory|persistent_workers"
    r"|prefetch_factor|train_split|callbacks__.*)$"
)


def check_fit_params(X: Any, fit_params: Mapping[str, Any] | None, prefix: str) -> dict[str, Any]:
    """Find the weights of samples among the arguments of `fit`, and check them."""
    passed = {name: value for name, value in (fit_params or {}).items() if value is not None}
    weights = passed.get(f"{prefix}sample_weight", passed.get("sample_weight"))
    if weights is not None:
        # rows of numbers are no arrays side by side
        weights = check_weights(weights, len(X) if isinstance(X, list) else get_len(X))
    return {"fit_params": passed, "sample_weight": weights}


class Recipe:
    """What the trials of a study and their minima have in common."""

    def __init__(self, task: Task, space: Any, artifact_store: Any, seed: int | None) -> None:
        estimator, X = task.estimator, task.X
        check_integer("n_threads", task.n_threads, minimum=1, optional=True)
        self.space = Space(space)
        if getattr(X, "shape", (2,))[0] < 2:
            raise ValueError(f"X holds {X.shape[0]} sample(s), which a constant fits. Pass more.")
        check_held_out(task.y, task.X_test, task.y_test)
        of_samples = check_fit_params(X, task.fit_params, last_prefix(estimator))
        self.task = replace(task, **of_samples)
        # what is wrong with the first candidate's estimator is an error of the call
        example = self.task.prepare(self.space.example(), seed=0)
        while isinstance(example, Pipeline):
            example = example.steps[-1][1]
        if type(example).__module__.startswith("sklearn."):  # only training shows it of others
            with suppress(NotFittedError):  # which is the only objection to a network
                to_network(example, None, None, DataOptions())
        self.store = as_store(artifact_store)
        self.seed = seed
        # without a random_state, other searches have other networks
        self.drawn = int(torch.randint(2**31 - 1, ())) if seed is None else seed

    def seed_of(self, trial: Any) -> int:
        """Return the seed of a trial.

        With a `random_state`, the seed derives from it and from the drawn parameters, so that a
        candidate has the same seed in each search.
        """
        recorded = Minimum.from_trial(trial).seed
        if recorded is not None:
            return recorded
        what = b"%d" % trial.number
        if self.seed is not None:
            what = repr(sorted(labels_of(trial).items())).encode()
        return zlib.crc32(what, self.drawn) >> 1

    def record(
        self, trial: Any, params: Mapping[str, Any], minimum: Minimum, trained: Trained | None
    ) -> None:
        """Save the weights of a candidate, and write what it has become."""
        minimum.params |= self.space.computed(trial, params)
        if self.store is not None and trained is not None:
            save_weights(self.store, trial, trained.weights, minimum)
        minimum.write(trial)

    # -- how minima are made -----------------------------------------------------------------------

    def check_study(
        self,
        study: optuna.Study,
        *,
        direction: str = "minimize",
        current: int = -1,  # a trial that has begun by now
        also: Measuring | None = None,  # further measures
    ) -> None:
        """Refuse a study whose minima were made otherwise; record in a new one how."""
        directions = [direction.name.lower() for direction in study.directions]
        if directions != (needed := [direction] * len(self.task.measuring.ranking)):
            create = f"direction={direction!r}" if len(needed) == 1 else f"directions={needed}"
            raise ValueError(
                f"the directions of study {study.study_name!r} are {directions}, and must be "
                f"{needed}. Create one with {create}, or pass MinimaObjective(direction=...)."
            )
        now, then = self._made_with(also), study.user_attrs.get(MADE_WITH, {})
        of_results = TrialState.COMPLETE, TrialState.PRUNED
        has_results = any(
            trial.state in of_results or "failed" in trial.user_attrs
            for trial in study.get_trials(deepcopy=False)
            if trial.number != current
        )
        if has_results and not then:
            raise ValueError(
                f"study {study.study_name!r} does not say how its minima were made, as of an "
                "earlier version. rank_minima(study) shows them. Use another study."
            )
        if has_results:
            both = now.keys() & then.keys()
            differences = [
                f"  {name}: {then.get(name, 'nothing')} then, {now.get(name, 'nothing')} now"
                for name in sorted(now.keys() | then.keys())
                if then.get(name) != now.get(name) and (name in both or not name.startswith(_OPEN))
            ]
            if differences:
                raise ValueError(
                    f"study {study.study_name!r} was made with something else:\n"
                    + "\n".join(differences)
                    + "\nUndo the difference, or use another study_name; none for folds."
                )
            now = then | now
        if then != now:
            study.set_user_attr(MADE_WITH, now)
            units = {"loss_unit": ""} if is_regressor(self.task.estimator) else {}
            study.set_user_attr(UNITS, units)

    def _made_with(self, also: Measuring | None) -> dict[str, str]:
        """Describe everything that changes the results."""
        task, varied = self.task, set(self.space.entries)
        if LR_SCALING in varied:  # the rates are those of the estimator's own batch size
            varied -= {name for name in varied if name.endswith("batch_size")}
        params = task.estimator.get_params()
        data = {"X": task.X, "y": task.y, "X_test": task.X_test, "y_test": task.y_test}
        parts = {
            "estimator": type(task.estimator),
            **{n: x for n, x in params.items() if not (n in varied or _WITHOUT_EFFECT.search(n))},
            **{name: value for name, value in data.items() if value is not None},
            **{f"fit {name}": value for name, value in (task.fit_params or {}).items()},
            "search objectives": task.measuring.ranking,
            "search goal": task.goal,
            "search random_state": self.seed,
            **{f"space {name}": entry for name, entry in self.space.described().items()},
        }
        for measuring in (task.measuring, also or task.measuring):
            for name, way in measuring.ways.items():
                parts[f"measure {name}"] = [measuring.measures[name], way.arguments()]
        return {name: describe(part) for name, part in parts.items()}

    # -- the estimator of a finished trial ---------------------------------------------------------

    def has_weights(self, trial: FrozenTrial) -> bool:
        """Return whether the weights of a trial were saved, and are within reach."""
        return self.store is not None and Minimum.from_trial(trial).artifact_id is not None

    def _restore(self, trial: FrozenTrial, trained: Trained) -> Any:
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

    def provide(
        self, trial: FrozenTrial, trained: Trained | None = None, *, retrain: bool = True
    ) -> tuple[Any, str]:
        """Restore the estimator of a trial, or train it again, and say why it is not as it was."""
        if trained is not None:
            return self._restore(trial, trained), ""
        minimum = Minimum.from_trial(trial)
        if self.has_weights(trial):
            of_training = {"n_iter_": minimum.n_iter} if minimum.n_iter else {}
            try:
                weights = load_weights(self.store, trial)
                return self._restore(trial, Trained(None, weights, of_training)), ""
            except DamagedWeightsError as error:
                if not retrain:
                    return None, str(error)
                warn(f"{error} The candidate is trained again.")
        if not retrain:
            return None, ""
        task, params, seed = self.task, self.space.values(trial), self.seed_of(trial)
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

    # -- measuring finished trials -----------------------------------------------------------------

    def complete(self, study: optuna.Study, measuring: Measuring, *, retrain: bool = False) -> None:
        """Measure what minima of earlier sessions lack: measures, and the loss on held-out data.

        Minima without saved weights get nan.
        """
        lacking, problems = dict[int, list[str]](), []
        task, attributes = replace(self.task, measuring=measuring), study.user_attrs
        for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
            minimum = Minimum.from_trial(trial)
            before: dict[str, Any] = attributes.get(remeasured_key(trial), {})
            row = minimum.row() | before
            names = [name for name in measuring.names if name not in row]
            lacks_loss = task.X_test is not None and "test_loss" not in row
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
            for name, result in task.measure(names, estimator, data, self.seed_of(trial)).items():
                if result.reason:
                    problems.append(f"{name} of trial {trial.number}: {result.reason}")
                else:
                    again.measures[name] = float(result.value)
            if lacks_loss:
                record_held_out(again, estimator, data)
            with blame_storage(study):
                study.set_user_attr(remeasured_key(trial), before | again.row())
        if problems:
            advice = "To train the candidates of damaged files again: remeasure(..., retrain=True)."
            text = "\n".join([*problems, "The other minima are measured."])
            warn(text if retrain else f"{text} {advice}")
        if lacking:
            columns = sorted({name for names in lacking.values() for name in names})
            warn(
                f"{', '.join(columns)} of trials {sorted(lacking)} stay nan: an earlier session "
                "trained them without, and saved no weights, which takes an artifact_store."
            )


def restore(estimator: Any, trained: Trained, data: TrainingData, seed: int) -> Any:
    """Fit an estimator without training its network, which gets the weights of a trained one.

    The other steps of a pipeline are fitted, classes are learned and the network gets its size
    from the data, as they were when the network was trained.
    """
    inner = last_step(estimator)
    settings: dict[str, Any] = {"max_epochs": 0, "callbacks": []}
    if not isinstance(inner, NeuralNet):  # one step of the solver gives all arrays their sizes
        settings = {"max_iter": 1} if getattr(inner, "max_iter", None) is not None else {}
    before = {name: getattr(inner, name) for name in settings}
    vars(inner).update(settings)
    with warnings.catch_warnings(), seeded(seed), measured_later() as later:
        warnings.simplefilter("ignore", ConvergenceWarning)
        estimator.fit(data.X_fit, data.y_fit, **data.fit_params)
    fitted = final_estimator(estimator)
    if isinstance(fitted, NeuralNet):
        unwrapped(fitted.module_).load_state_dict(trained.weights)
    else:
        _set_coefficients(fitted, [tensor.numpy() for tensor in trained.weights.values()])
    for net in (inner, fitted):  # a TransformedTargetRegressor fits a copy of its net
        vars(net).update(before)
    of_training = dict(trained.of_training)
    if isinstance(of_training.get("n_iter_"), list):  # of a file
        of_one_step, n_iter = fitted.n_iter_, of_training["n_iter_"]
        as_array = isinstance(of_one_step, np.ndarray)
        of_training["n_iter_"] = np.array(n_iter, of_one_step.dtype) if as_array else n_iter[0]
    vars(fitted).update(of_training)
    for measure in later if "_record" not in of_training else []:
        measure()
    return estimator


def _set_coefficients(estimator: Any, arrays: list[NDArray[Any]]) -> None:
    """Set coefficients from pairs of (weight, bias), one pair per layer; the inverse of to_torch.

    The weights of scikit-learn's MLPs are transposed.
    """
    if hasattr(estimator, "coefs_"):
        held = [*estimator.coefs_, *estimator.intercepts_]
        for old, new in zip(
            held, [*(weight.T for weight in arrays[::2]), *arrays[1::2]], strict=True
        ):
            old[...] = new
        return
    weight, bias = arrays
    estimator.coef_ = weight.astype(estimator.coef_.dtype).reshape(estimator.coef_.shape)
    old = np.asarray(estimator.intercept_)
    if old.size == bias.size:
        estimator.intercept_ = bias.reshape(old.shape).astype(old.dtype)[()]
