"""Measure trained candidates, and record in their trials what the table of minima shows."""

import re
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import numpy as np
import optuna

from relflat_sk._checks import check_device, check_integer, is_integer
from relflat_sk._models import DataOptions, to_network, to_network_with_source
from relflat_sk._network import Network, mean_loss
from relflat_sk.exceptions import LayerNotFoundError
from relflat_sk.measures import (
    Flatness,
    check_arguments,
    check_layers,
    find_measures,
    known_arguments,
    measure_network,
)
from relflat_sk.minima import DETAILS
from relflat_sk.search._data import TrainingData
from relflat_sk.search._failures import blame_call, blame_storage
from relflat_sk.search._fit import LAST, missing_layer

# arguments of measures that a search passes itself
_OWN = ("layer", "device", "random_state", "sample_weight")


class Measuring:
    """Measures all candidates of a search in the same way."""

    def __init__(
        self,
        names: Sequence[str],
        layer: Any = -1,
        params: Mapping[str, Any] | None = None,
        device: Any = None,
    ) -> None:
        if not isinstance(layer, str) and not is_integer(layer):
            raise TypeError(
                "layer must be the position of a layer or its dotted name, because every "
                f"candidate has a network of its own, got {layer!r}."
            )
        if params is not None and not isinstance(params, Mapping):
            raise TypeError(f"measure_params must be a dict or None, got {params!r}.")
        check_layers(names, layer)
        check_device(device)
        self.layer = layer
        self.params = dict(params or {})
        self.device = device
        for name in self.params:
            if name in _OWN:
                place = f"fit(..., {name}=...)" if name == "sample_weight" else f"{name}=..."
                raise ValueError(f"measure_params holds {name!r}; give it as {place} instead.")
        self.batch_size = self.params.pop("batch_size", DataOptions.batch_size)
        check_integer("batch_size", self.batch_size, minimum=1)
        weight_decay = {"weight_decay"} & self.params.keys()
        check_arguments(names, {key: self.params[key] for key in self.params.keys() - weight_decay})

    def network(self, estimator: Any, data: TrainingData) -> Network:
        """Turn a trained candidate into a network with its training data."""
        options = DataOptions(
            batch_size=self.batch_size, device=self.device, sample_weight=data.sample_weight
        )
        return to_network_with_source(estimator, data.X, data.y, options)

    def __call__(
        self, network: Network, names: Sequence[str], seed: int | None
    ) -> dict[str, Flatness]:
        """Measure a network, all measures together; one of the whole network that fails is nan."""
        known = known_arguments(names)  # others are arguments of other measures of the search
        params = {key: value for key, value in self.params.items() if key in known}
        found = measure_network(
            network,
            list(dict.fromkeys(names)),
            [self.layer],
            random_state=seed,
            tolerated=(Exception,),
            **params,
        )
        by_name = {name: result for (_, name), result in found.items()}
        return {str(name): by_name[name] for name in names}


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
    ranking: Sequence[str],
) -> dict[str, Flatness]:
    """Measure a network, and record the measures and the training loss.

    One pass over the data gives both. A network that diverged need not be measurable, but it
    has a loss, which then takes a pass of its own. A failure of a `ranking` measure is raised.
    """
    found: dict[str, Flatness] = {}
    error, train_loss = None, np.nan
    try:
        found = measuring(network, names, seed)
        train_loss = found[names[0]].risk
        error = next((found[name].error for name in ranking if name in found), None)
    except Exception as caught:
        error = caught
    if not np.isfinite(train_loss):
        train_loss = mean_loss(network)
    record["train_loss"] = train_loss
    record["converged"] = False
    if not np.isfinite(train_loss):
        record["reason"] = "the training loss is not finite"
        return {}
    if isinstance(error, LayerNotFoundError) and measuring.layer != LAST:
        raise missing_layer(measuring.layer, error) from error
    if error is not None:
        raise error
    for name, measured in found.items():
        record[name] = measured.value
    return found


def measure_held_out(
    estimator: Any,
    train_loss: float,
    data: TrainingData,
    X_test: Any,
    y_test: Any,
    criterion: Any = None,
) -> dict[str, float]:
    """Compute the loss on held-out data, and the estimator's own scores.

    Shapes: `X_test`, `y_test` (n_test, ...).
    """
    found: dict[str, float] = {}
    scored = hasattr(estimator, "score")
    if scored and data.y is not None:
        weights = data.sample_weight
        weighted = weights is not None and "sample_weight" in signature(estimator.score).parameters
        of_samples = {"sample_weight": weights} if weighted else {}
        found["train_score"] = float(estimator.score(data.X, data.y, **of_samples))
    if X_test is None:
        return found
    with blame_call("X_test and y_test cannot be evaluated", "Give data like X and y."):
        test_loss = mean_loss(to_network(estimator, X_test, y_test, DataOptions(criterion)))
        scored = scored and y_test is not None
        test_score = float(estimator.score(X_test, y_test)) if scored else np.nan
    found |= {"test_loss": test_loss, "generalization_gap": test_loss - train_loss}
    return found | ({"test_score": test_score} if scored else {})


_DETAIL = re.compile(
    "curves|depth|ended_by|in_fleet|measures|param_scaled_.*|reason|seconds|seed|test_score"
    "|train_score|weights_hash"
)


def write_record(trial: optuna.Trial, record: Mapping[str, Any]) -> None:
    """Write what was recorded of a trial as its user attributes.

    Each attribute is a transaction of the storage, so that those that users hardly read are one.
    """
    details = {name: value for name, value in record.items() if _DETAIL.fullmatch(name)}
    others = {name: value for name, value in record.items() if name not in details}
    with blame_storage():
        for name, value in (others | {DETAILS: details}).items():
            trial.set_user_attr(name, value)
        # Optuna 5: samplers and best_trial respect it
        if "ended_by" in record and hasattr(trial, "set_constraint"):
            trial.set_constraint("converged", float(not record["converged"]))
