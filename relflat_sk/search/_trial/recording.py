"""Measure a trained candidate, and record in its trial what the table of minima shows."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from inspect import signature
from typing import Any

import numpy as np
import optuna
import torch
from torch import Tensor, nn

from relflat_sk._models import DataOptions, final_estimator, to_network
from relflat_sk._network import Network, mean_loss
from relflat_sk._random import seeded
from relflat_sk.exceptions import LayerNotFoundError
from relflat_sk.measures import Flatness, find_measures
from relflat_sk.search._trial.failures import blame_call, blame_storage
from relflat_sk.search._trial.held_out import trained_rows
from relflat_sk.search._trial.measuring import Measuring
from relflat_sk.search._trial.training_data import TrainingData
from relflat_sk.search._trial.verdict import Measured, record_verdict
from relflat_sk.search._trial.watching import LAST, missing_layer
from relflat_sk.search._trial.weight_files import save_weights
from relflat_sk.training import RelativeFlatnessRegularizedNet, known_outputs

__all__ = ["check_names", "measure_held_out", "record_trial", "write_record"]

TRAIN_LOSS = "train_loss"


def check_names(given: Sequence[Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Check the measures of a search, and separate them from other objectives."""
    if isinstance(given, str) or callable(given) or not given:
        raise ValueError(f"measures must be a sequence of names, got {given!r}.")
    others = [one for one in given if one != TRAIN_LOSS]
    if not others:
        raise ValueError(f"measures must name a measure beside {TRAIN_LOSS!r}.")
    measures = iter(find_measures(others))
    names = tuple(one if one == TRAIN_LOSS else next(measures) for one in given)
    return names, tuple(name for name in names if name != TRAIN_LOSS)


def record_measures(
    record: dict[str, Any],
    network: Network,
    names: Sequence[str],
    seed: int | None,
    measuring: Measuring,
    found: Mapping[str, Flatness] | None = None,
) -> Measured:
    """Measure a network, and record the measures and the training loss.

    One pass over the data gives both. A network that diverged need not be measurable, but it
    has a loss, which then takes a pass of its own.
    """
    error, train_loss = None, np.nan
    if _has_finite_weights(network.module):
        try:
            found = found or measuring(network, names, seed)
            train_loss = found[names[0]].risk
        except Exception as caught:
            error = caught
    if not np.isfinite(train_loss):
        train_loss = mean_loss(network)
    record["train_loss"] = train_loss
    record["converged"] = False
    if not np.isfinite(train_loss):
        record["reason"] = "the training loss is not finite"
        return Measured(train_loss, {})
    if isinstance(error, LayerNotFoundError) and measuring.layer != LAST:
        raise missing_layer(measuring.layer, error) from error
    if error is not None:
        raise error
    assert found
    for name, measured in found.items():
        record[name] = measured.value
    return Measured(train_loss, dict(found))


def record_trial(
    record: dict[str, Any],
    trial: optuna.Trial,
    estimator: Any,
    data: TrainingData,
    objective: Any,
    seed: int,
) -> list[float]:
    """Measure a trained candidate, record it, and save its weights."""
    is_training_data = data.X is data.X_fit and data.y is data.y_fit
    data = data.only(trained_rows(estimator))
    with seeded(seed):  # data loaders draw from torch's random state
        network = objective.measuring.network(estimator, data)
        names, measuring = objective.measures, objective.measuring
        found, outputs = measuring.with_others(network, names)
        measured = record_measures(record, network, names, seed, measuring, found)
        if not measured.found:
            return [np.nan] * len(objective.names)
        if is_training_data and data.sample_weight is None:
            _hand_over(estimator, measured.found, measuring)
        held_out = objective.X_test, objective.y_test
        record_held_out(record, estimator, measured.train_loss, data, *held_out, outputs)
    save_weights(objective.artifact_store, trial, network.module, record)
    values = {name: found.value for name, found in measured.found.items()}
    values["train_loss"] = measured.train_loss
    objectives = [values[name] for name in objective.names]
    return record_verdict(record, estimator, objective.goal, measured, objectives)


def _hand_over(estimator: Any, found: Mapping[str, Flatness], measuring: Measuring) -> None:
    """Give a net the measure that it would make of its training data itself, if it is exact."""
    net = final_estimator(estimator)
    if not isinstance(net, RelativeFlatnessRegularizedNet) or measuring.params or measuring.device:
        return
    name = "normalized_relative_flatness" if net.flatness_normalize else "relative_flatness"
    if name in found and not found[name].stderr and net.flatness_layer == measuring.layer:
        net.adopt_flatness(found[name])


def _has_finite_weights(module: nn.Module) -> bool:
    return all(bool(torch.isfinite(weight).all()) for weight in module.parameters())


def record_held_out(
    record: dict[str, Any],
    estimator: Any,
    train_loss: float,
    data: TrainingData,
    X_test: Any,
    y_test: Any,
    outputs: Tensor | None = None,
) -> None:
    """Record the loss on held-out data, and the estimator's own scores.

    Shapes: `X_test`, `y_test` (n_test, ...), `outputs` (n, d).
    """
    scored = hasattr(estimator, "score")
    if scored and data.y is not None:
        weights = data.sample_weight
        weighted = weights is not None and "sample_weight" in signature(estimator.score).parameters
        of_samples = {"sample_weight": weights} if weighted else {}
        with nullcontext() if outputs is None else known_outputs(estimator, outputs):
            record["train_score"] = float(estimator.score(data.X, data.y, **of_samples))
    if X_test is None:
        return
    with blame_call("X_test and y_test cannot be evaluated", "Give data like X and y."):
        test_loss = mean_loss(to_network(estimator, X_test, y_test, DataOptions()))
        test_score = float(estimator.score(X_test, y_test)) if scored else np.nan
    record["test_loss"] = test_loss
    record["generalization_gap"] = test_loss - train_loss
    if scored:
        record["test_score"] = test_score


def measure_held_out(
    estimator: Any, train_loss: float, data: TrainingData, X_test: Any, y_test: Any
) -> dict[str, float]:
    """Measure what `record_held_out` records, for a minimum of an earlier session.

    Shapes: `X_test`, `y_test` (n_test, ...).
    """
    found: dict[str, float] = {}
    data = data.only(trained_rows(estimator))
    record_held_out(found, estimator, train_loss, data, X_test, y_test)
    return found


def write_record(trial: optuna.Trial, record: Mapping[str, Any]) -> None:
    """Write what was recorded of a trial as its user attributes."""
    with blame_storage():
        for name, value in record.items():
            trial.set_user_attr(name, value)
        # Optuna 5: samplers and best_trial respect it
        if "ended_by" in record and hasattr(trial, "set_constraint"):
            trial.set_constraint("converged", float(not record["converged"]))
