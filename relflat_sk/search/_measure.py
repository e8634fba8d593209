"""Measure trained candidates, each in the same way."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np

from relflat_sk._checks import check_device, check_integer, is_integer
from relflat_sk._models.network_of import DataOptions, open_model
from relflat_sk._network.network import Network, mean_loss
from relflat_sk.exceptions import LayerNotFoundError
from relflat_sk.measures._measure_network import measure_network
from relflat_sk.measures._names import check_arguments, check_layers, check_options, find_measures
from relflat_sk.measures._results import Measure, Measured, range_of
from relflat_sk.measures._scorer import FlatnessScorer, read_measure
from relflat_sk.minima._minimum import Minimum
from relflat_sk.minima._ranking import AUTO, depth_of, find_depth_band
from relflat_sk.minima._table import column_of
from relflat_sk.search._data import TrainingData
from relflat_sk.search._failures import blame_call
from relflat_sk.search._fit import LAST, missing_layer

_OF_LOSS = {"at_loss", "weight_decay"}  # arguments that each measure takes


@dataclass(frozen=True)
class Way:
    """How a measure is taken: at a layer, in batches on a device, with further arguments."""

    layer: Any
    batch_size: int
    device: Any
    params: dict[str, Any]

    @property
    def reading(self) -> tuple[int, str]:
        """How the data are read, which some ways share."""
        return self.batch_size, str(self.device)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that change the values."""
        return ({} if self.layer == LAST else {"layer": self.layer}) | self.params


def _find_way(measure: Measure, scorer: FlatnessScorer) -> Way:
    """Check the arguments of a measure."""
    layer, params = scorer.layer, dict(scorer.measure_params or {})
    if not isinstance(layer, str) and not is_integer(layer):
        raise TypeError(
            "layer must be the position of a layer or its dotted name, because every "
            f"candidate has a network of its own, got {layer!r}."
        )
    check_layers([measure], layer)
    batch_size = params.pop("batch_size", DataOptions.batch_size)
    check_integer("batch_size", batch_size, minimum=1)
    device = params.pop("device", None)
    check_device(device)
    check_arguments([measure], {key: params[key] for key in params.keys() - _OF_LOSS})
    check_options([measure], at_loss=params.get("at_loss"))
    return Way(layer, batch_size, device, params)


class Measuring:
    """Measures all candidates of a search in the same way."""

    def __init__(self, measures: Sequence[Any], criterion: Any = None) -> None:
        scorers = [read_measure(measure) for measure in measures]
        self.measures = find_measures([scorer.measure for scorer in scorers])
        names = [column_of(scorer.measure) for scorer in scorers]
        self.names = list(self.measures)
        self.criterion = criterion
        self.ways: dict[str, Way] = {}
        for name, scorer in zip(names, scorers, strict=True):
            way = _find_way(self.measures[name], scorer)
            if self.ways.setdefault(name, way) != way:
                raise ValueError(
                    f"{name} is to be measured with the arguments {self.ways[name].arguments()} "
                    f"and {way.arguments()}. For one of the two pass a function of another name."
                )

    def depth_band(self, by: str) -> float | None:
        """Choose the band of the depths that are compared by a measure."""
        return find_depth_band(AUTO, by, self.ways[by].params.get("at_loss"))

    @property
    def layers(self) -> list[Any]:
        """The layers that each candidate must have, but for the last."""
        return list(dict.fromkeys(way.layer for way in self.ways.values() if way.layer != LAST))

    def networks(self, estimator: Any, data: TrainingData) -> dict[tuple[int, str], Network]:
        """Turn a trained candidate into networks with its training data, as they are read."""
        return {
            way.reading: open_model(
                estimator,
                data.X,
                data.y,
                criterion=self.criterion,
                batch_size=way.batch_size,
                device=way.device,
                sample_weight=data.sample_weight,
            )
            for way in {way.reading: way for way in self.ways.values()}.values()
        }

    def __call__(
        self,
        networks: Mapping[Any, Network],
        names: Sequence[str],
        seed: int | None,
        required: Sequence[str] = (),
    ) -> dict[str, Measured]:
        """Measure a network; a measure of the whole network that fails is nan, with a reason.

        Errors of the measures that are `required` are raised.

        Measures that are taken in the same way share their passes over the data.
        """
        results: dict[str, Measured] = {}
        left = list(dict.fromkeys(names))
        while left:
            way = self.ways[left[0]]
            alike = [name for name in left if self.ways[name] == way]
            left = [name for name in left if name not in alike]
            try:
                measured = measure_network(
                    networks[way.reading],
                    [self.measures[name] for name in alike],
                    [way.layer],
                    tolerates=lambda name, error: name not in required,
                    **{"random_state": seed} | way.params,
                )
            except LayerNotFoundError as error:
                if way.layer == LAST:
                    raise
                raise missing_layer(way.layer, error) from error
            results |= {name: result for (_, name), result in measured.items()}
        return {name: results[name] for name in names}


TRAIN_LOSS = "train_loss"


def is_train_loss(measure: Any) -> bool:
    """Return whether an objective of a search is the training loss, which is no measure."""
    return isinstance(measure, str) and measure == TRAIN_LOSS


def listed(measure: Any) -> list[Any]:
    """Return a measure, or several, as a list."""
    measures = [measure] if isinstance(measure, str) or callable(measure) else measure
    if not isinstance(measures, Iterable) or not list(measures):
        raise ValueError(
            "measure must be a name, a function, a FlatnessScorer or a sequence of these, got "
            f"{measure!r}. See get_measure_names."
        )
    return list(measures)


def find_objectives(measure: Any) -> tuple[tuple[str, ...], Measuring]:
    """Check the objectives of a search, and separate the measures from the training loss."""
    objectives = listed(measure)
    measuring = Measuring(listed([x for x in objectives if not is_train_loss(x)]))
    names = iter(measuring.names)
    return tuple(TRAIN_LOSS if is_train_loss(x) else next(names) for x in objectives), measuring


def record_measures(
    minimum: Minimum,
    networks: Mapping[Any, Network],
    seed: int | None,
    measuring: Measuring,
    ranking: Sequence[str],
) -> dict[str, Measured]:
    """Measure a network, and record the measures and the training loss.

    One pass over the data gives both. A network that diverged need not be measurable, but it
    has a loss, which then takes a pass of its own. A failure of a `ranking` measure is raised.
    """
    measured: dict[str, Measured] = {}
    error, train_loss = None, np.nan
    try:
        measured = measuring(networks, measuring.names, seed, required=ranking)
        train_loss = next(iter(measured.values())).passes.risk
    except Exception as caught:
        error = caught
    if not np.isfinite(train_loss):
        train_loss = mean_loss(next(iter(networks.values())))
    minimum.train_loss, minimum.converged = train_loss, False
    if not np.isfinite(train_loss):
        minimum.reason = "the training loss is not finite"
        return {}
    if error is not None:
        raise error
    minimum.measures = {name: result.value for name, result in measured.items()}
    first = measuring.names[0]
    losses = range_of(networks[measuring.ways[first].reading], measured[first].passes)
    if np.isfinite(losses.constant):
        minimum.constant_loss = losses.constant
    depth = depth_of(train_loss, losses)
    if np.isfinite(depth):
        minimum.depth = depth
    return measured


def record_held_out(
    minimum: Minimum,
    estimator: Any,
    data: TrainingData,
    X_test: Any,  # (n_test, ...)
    y_test: Any,
    criterion: Any = None,
) -> None:
    """Record the loss on held-out data, and the estimator's own scores."""
    scored = hasattr(estimator, "score")
    if scored and data.y is not None:
        weights = data.sample_weight
        weighted = weights is not None and "sample_weight" in signature(estimator.score).parameters
        of_samples = {"sample_weight": weights} if weighted else {}
        minimum.train_score = float(estimator.score(data.X, data.y, **of_samples))
    if X_test is None:
        return
    with blame_call(
        "X_test and y_test cannot be evaluated",
        "Give data like X and y, or a Dataset with labels.",
    ):
        test_loss = mean_loss(open_model(estimator, X_test, y_test, criterion=criterion))
        if scored:
            minimum.test_score = (
                np.nan if y_test is None else float(estimator.score(X_test, y_test))
            )
    assert minimum.train_loss is not None
    minimum.test_loss, minimum.generalization_gap = test_loss, test_loss - minimum.train_loss
