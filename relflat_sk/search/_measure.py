"""Measure trained candidates, each in the same way, and judge whether they are minima.

A candidate is a minimum, as docs/searching.md says, if it reached a goal or a plateau. At a
**plateau**, the mean training loss of the last fifth of the epochs differs from that of the fifth
before by at most 1% of the drop from the best constant prediction's loss, and the training made
progress, as for a scorer. With fewer than `FEWEST_EPOCHS` epochs nothing can be said.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn import config_context
from sklearn.base import is_regressor
from skorch import NeuralNet
from torch import nn
from torch.utils.data import DataLoader, Dataset

from relflat_sk._checks import check_device, check_integer, check_kind, is_integer, is_number
from relflat_sk._losses.table import TABLE
from relflat_sk._models.network_of import DataOptions, final_estimator, last_step, open_model
from relflat_sk._network.network import Network, mean_loss
from relflat_sk.exceptions import LayerNotFoundError
from relflat_sk.measures._measure_network import (
    Measure,
    check_arguments,
    check_layers,
    check_options,
    find_measures,
    measure_network,
)
from relflat_sk.measures._minimum import (
    ConstantComparison,
    epoch_losses,
    has_vanished,
    is_trained,
)
from relflat_sk.measures._scan import Measured, range_of
from relflat_sk.measures._scorer import FlatnessScorer, read_measure
from relflat_sk.minima._ranking import depth_of, find_depth_band
from relflat_sk.minima._table import Minimum, column_of
from relflat_sk.search._storage import KEPT, CallError, blame_call
from relflat_sk.training import StopAtGradientNorm, StopAtLoss
from relflat_sk.training._callbacks import StopAtDepth

AUTO = "auto"
LAST = -1  # the position of the last layer, which each network has that can be measured at one
TRAIN_LOSS = "train_loss"  # an objective that is no measure

# -- what candidates are measured on --------------------------------------------------------------


@dataclass(frozen=True)
class TrainingData:
    """The data of a candidate."""

    X_fit: Any  # (n_fit, ...)
    y_fit: Any
    X: Any
    y: Any
    fit_params: Mapping[str, Any] = field(default_factory=dict)
    sample_weight: Any = None  # (n,)
    held_out: tuple[Any, Any] = (None, None)  # X_test, y_test


def check_held_out(y: Any, X_test: Any, y_test: Any) -> None:
    """Refuse held-out samples without labels, and labels without samples."""
    # labels may be inside
    only_X = y_test is None and (y is None or isinstance(X_test, Dataset | DataLoader))
    if (X_test is None) != (y_test is None) and not only_X:
        raise ValueError("X_test and y_test go together: give both or neither.")


# -- how candidates are measured -----------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """How a measure is taken: at a layer, in batches on a device, with further arguments."""

    layer: Any
    reading: tuple[int, Any]  # batch size and device, which some ways share
    params: dict[str, Any]

    @classmethod
    def of(cls, measure: Measure, scorer: FlatnessScorer) -> "Way":
        """Check the arguments of a measure."""
        layer, params = scorer.layer, dict(scorer.measure_params or {})
        # every candidate has a network of its own
        is_name = (isinstance(layer, str) and layer != "all") or is_integer(layer)
        check_kind(is_name, "layer", layer, "the position of a layer or its dotted name")
        check_layers([measure], layer)
        batch_size = params.pop("batch_size", DataOptions.batch_size)
        check_integer("batch_size", batch_size, minimum=1)
        device = params.pop("device", None)
        check_device(device)
        # every measure takes the arguments of the loss
        check_arguments([measure], dict.fromkeys(params.keys() - {"at_loss", "weight_decay"}))
        check_options([measure], at_loss=params.get("at_loss"))
        return cls(layer, (batch_size, device), params)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that change the values."""
        return ({} if self.layer == LAST else {"layer": self.layer}) | self.params


class Measuring:
    """Measures all candidates of a search in the same way."""

    def __init__(self, measures: Any, criterion: Any = None) -> None:
        scorers = [read_measure(measure) for measure in listed(measures)]
        self.measures = find_measures([scorer.measure for scorer in scorers])
        self.names = list(self.measures)
        self.ranking = self.names[:1]  # the objectives
        self.criterion = criterion
        self.ways: dict[str, Way] = {}
        for scorer in scorers:
            name = column_of(scorer.measure)
            way = Way.of(self.measures[name], scorer)
            if self.ways.setdefault(name, way) != way:
                raise ValueError(
                    f"{name} is to be measured with the arguments {self.ways[name].arguments()} "
                    f"and {way.arguments()}. For one of the two pass a function of another name."
                )

    @property
    def depth_band(self) -> float | None:
        """The band of the depths that are compared; None if measures are at equal loss.

        None as well if the objectives weigh flatness and loss.
        """
        if TRAIN_LOSS in self.ranking:
            return None
        by = self.ranking[0]
        return find_depth_band(AUTO, by, self.ways[by].params.get("at_loss"))

    @property
    def layers(self) -> list[Any]:
        """The layers that each candidate must have, but for the last."""
        return list(dict.fromkeys(way.layer for way in self.ways.values() if way.layer != LAST))

    def networks(self, estimator: Any, data: TrainingData) -> dict[Any, Network]:
        """Turn a trained candidate into networks with its training data, as they are read."""
        options = {"criterion": self.criterion, "sample_weight": data.sample_weight}
        return {
            reading: open_model(
                estimator, data.X, data.y, batch_size=reading[0], device=reading[1], **options
            )
            for reading in dict.fromkeys(way.reading for way in self.ways.values())
        }

    def __call__(
        self,
        networks: Mapping[Any, Network],
        names: Sequence[str],
        seed: int | None,
        required: Sequence[str] = (),
    ) -> dict[str, Measured]:
        """Measure a network; measures that are taken in the same way share their passes.

        A measure of the whole network that fails is nan, with a reason, unless it is `required`.
        """
        results: dict[str, Measured] = {}
        while left := [name for name in names if name not in results]:
            way = self.ways[left[0]]
            try:
                together = [self.measures[name] for name in left if self.ways[name] == way]
                options: dict[str, Any] = {"random_state": seed, **way.params}
                options["tolerates"] = lambda name, error: name not in required
                network = networks[way.reading]
                measured = measure_network(network, together, [way.layer], **options)
            except LayerNotFoundError as error:
                if way.layer == LAST:
                    raise
                raise missing_layer(way.layer, error) from error
            results |= {name: result for (_, name), result in measured.items()}
        return {name: results[name] for name in names}


def missing_layer(layer: Any, error: Exception) -> CallError:
    """Return the error for a layer that a candidate does not have."""
    return CallError(
        f"layer={layer!r} cannot be measured: {error} Give a layer that each candidate has.{KEPT}"
    )


def listed(measure: Any) -> list[Any]:
    """Return a measure, or several, as a list."""
    measures = [measure] if isinstance(measure, str) or callable(measure) else measure
    if not isinstance(measures, Iterable) or not list(measures):
        raise ValueError(
            f"measure must be a name, function, FlatnessScorer or several, got {measure!r}."
        )
    return list(measures)


def read_objectives(measure: Any, n_objectives: int | None = None) -> Measuring:
    """Read what a search measures, of which the first, or all, and the training loss rank."""
    objectives = listed(measure)
    measuring = Measuring([objective for objective in objectives if objective != TRAIN_LOSS])
    names = iter(measuring.names)
    ranking = [TRAIN_LOSS if x == TRAIN_LOSS else next(names) for x in objectives]
    measuring.ranking = ranking[:n_objectives]
    return measuring


# -- one candidate -------------------------------------------------------------------------------


def assess(
    minimum: Minimum,
    estimator: Any,
    data: TrainingData,
    measuring: Measuring,
    seed: int | None,
    goal: Any = None,
    *,
    has_record: bool = True,  # of its training
) -> Network:
    """Measure a trained candidate, and record what is found and whether it is a minimum.

    The values of the minimum are those of its ranking: nan if the candidate is no better than a
    constant, infinity if its flatness cannot be compared.
    """
    networks, ranking = measuring.networks(estimator, data), measuring.ranking
    network = next(iter(networks.values()))
    minimum.values, minimum.converged = [np.nan] * len(ranking), False
    measured: dict[str, Measured] = {}
    error, train_loss = None, np.nan
    try:
        measured = measuring(networks, measuring.names, seed, required=ranking)
        train_loss = next(iter(measured.values())).passes.risk
    except Exception as caught:
        error = caught
    if not np.isfinite(train_loss):  # one that diverged need not be measurable, but it has a loss
        train_loss = mean_loss(network)
    minimum.train_loss = train_loss
    if not np.isfinite(train_loss):
        minimum.reason = "the training loss is not finite"
        return network
    if error is not None:
        raise error
    minimum.measures = {name: result.value for name, result in measured.items()}
    first = measuring.names[0]
    losses = range_of(networks[measuring.ways[first].reading], measured[first].passes)
    depth = depth_of(train_loss, losses)
    minimum.constant_loss = losses.constant if np.isfinite(losses.constant) else None
    minimum.depth = depth if np.isfinite(depth) else None
    record_held_out(minimum, estimator, data, measuring.criterion)
    _judge(minimum, estimator if has_record else network.module, goal, measured, ranking)
    return network


def record_held_out(
    minimum: Minimum, estimator: Any, data: TrainingData, criterion: Any = None
) -> None:
    """Record the loss on held-out data, and the estimator's own scores."""
    X_test, y_test = data.held_out
    scored = hasattr(estimator, "score")
    if scored and data.y is not None:
        weights = data.sample_weight
        weighted = weights is not None and "sample_weight" in signature(estimator.score).parameters
        of_samples = {"sample_weight": weights} if weighted else {}
        # routing would ask for requests of steps that users of `fit` need not make
        with config_context(enable_metadata_routing=False):
            minimum.train_score = float(estimator.score(data.X, data.y, **of_samples))
    if X_test is None:
        return
    what = "X_test and y_test cannot be evaluated"
    with blame_call(what, "Give data like X and y, or a Dataset with labels."):
        test_loss = mean_loss(open_model(estimator, X_test, y_test, criterion=criterion))
        if scored and y_test is not None:
            minimum.test_score = float(estimator.score(X_test, y_test))
    assert minimum.train_loss is not None
    minimum.test_loss, minimum.generalization_gap = test_loss, test_loss - minimum.train_loss


# the reason of a network that is perfectly flat, however well it predicts
SATURATED = (
    "has no curvature left: the network may be nearly constant, or saturated, so that the loss of "
    "nearly all samples rounds to 0, or the criterion has no curvature"
)
EQUAL_LOSS = "equal loss"  # what ended the training of a network that is ranked at equal loss


def _judge(
    minimum: Minimum,
    estimator: Any,
    goal: Any,
    results: Mapping[str, Measured],
    ranking: Sequence[str],
) -> None:
    """Record whether a measured candidate is a minimum, why not, and the values that rank."""
    row = minimum.row()
    values, train_loss = [row[name] for name in ranking], row[TRAIN_LOSS]
    constant_loss = row.get("constant_loss", np.nan)
    ranked = next(iter(results.values())).passes
    # at equal loss, it does not matter what the loss itself leaves of other curvatures
    judged = [
        (name, result.value, ConstantComparison(result.passes.compared_risk, constant_loss))
        for name, result in results.items()
        if ranked.at_loss is None or result.passes.at_loss is not None
    ]
    why = {name: f", {result.reason}" for name, result in results.items() if result.reason}
    without = [name for name in ranking if not np.isfinite(row[name])]
    minimum.n_samples = ranked.n_samples
    minimum.ended_by = reason = ""
    if train_loss >= constant_loss and ranked.fitted is None:
        reason = "the training loss is no better than a constant prediction's"
        values = [np.nan] * len(values)
    elif any(has_vanished(*case) for case in judged):
        reason = SATURATED
        values = [np.inf] * len(values)
    elif without:
        without_values = [f"{name} is {row[name]}{why.get(name, '')}" for name in without]
        reason = f"cannot be ranked: {', '.join(without_values)}"
        values = [np.inf if np.isnan(value) else value for value in values]
    else:
        minimum.ended_by, reason = _find_ending(estimator, goal, train_loss, constant_loss)
        chosen = own_goals(final_estimator(estimator))  # by a user, if it is no search's
        has_goal = is_number(goal) or not all(isinstance(x, StopAtDepth) for x in chosen)
        if reason and ranked.fitted is not None and not has_goal:
            minimum.ended_by, reason = EQUAL_LOSS, ""
    further = [
        f"{n} is nan: {x.reason}" for n, x in results.items() if x.reason and n not in ranking
    ]
    minimum.values, minimum.converged = values, not reason
    minimum.reason = "; ".join([reason] * bool(reason) + further)


# -- goals ---------------------------------------------------------------------------------------

FEWEST_EPOCHS = 10
WINDOW = 5  # the last fifth of the epochs
STILL = 0.01  # of the drop of the loss
ROUNDING = 1e-5  # of a loss, between two passes in float32


def own_goals(net: Any) -> list[Any]:
    """List the callbacks of a net that stop its training at a goal."""
    return callbacks_of(net, StopAtLoss, StopAtGradientNorm)


def callbacks_of(net: Any, *kinds: type) -> list[Any]:
    """List the callbacks of a net, or their classes, that are of some kinds."""
    if not isinstance(net, NeuralNet) or net.callbacks in (None, "disable"):
        return []
    callbacks = [item[1] if isinstance(item, tuple) else item for item in net.callbacks]
    return [x for x in callbacks if issubclass(x if isinstance(x, type) else type(x), kinds)]


def add_goal(estimator: Any, goal: Any) -> None:
    """Let the net of an estimator stop at the goal of the search, unless it has its own."""
    net = last_step(estimator)
    own = own_goals(net)
    if goal is not None and goal != AUTO:
        if not is_number(goal) or not 0 < goal < np.inf:
            raise ValueError(f"goal must be {AUTO!r}, a training loss > 0 or None, got {goal!r}.")
        if own:
            raise ValueError(
                f"goal={goal!r}, but the net has goals: {own}. Remove them, or leave goal {AUTO!r}."
            )
    is_open = isinstance(net, NeuralNet) and net.callbacks != "disable" and not own
    if goal is None or not is_open or (goal == AUTO and _predicts_numbers(net)):
        return
    callback = StopAtDepth() if goal == AUTO else StopAtLoss(goal)
    net.set_params(callbacks=[*(net.callbacks or []), callback])


def _predicts_numbers(net: NeuralNet) -> bool:
    """Return whether a net does regression, whose loss may fall far below any share of the start.

    How far depends on the noise, which nobody knows: such nets train to their plateau.
    """
    criterion = net.criterion if isinstance(net.criterion, type) else type(net.criterion)
    row = TABLE.get(criterion)
    return is_regressor(net) if row is None else row.task == "regression"


def _find_ending(
    estimator: Any, goal: Any, train_loss: float, constant_loss: float
) -> tuple[str, str]:
    """Return what ended the training of a candidate at a minimum, or why it is none."""
    final = final_estimator(estimator)
    if isinstance(final, nn.Module):  # has no record of its training
        return "", ""
    if isinstance(final, NeuralNet):
        return _ending_of_net(final, ConstantComparison(train_loss, constant_loss))
    if is_number(goal) and train_loss > goal * (1 + ROUNDING):
        return "", f"the training loss did not reach the goal of {goal:g}"
    n_iter, max_iter = getattr(final, "n_iter_", None), getattr(final, "max_iter", None)
    if n_iter is not None and max_iter is not None and np.max(n_iter) >= max_iter:
        return "", f"the solver stopped at max_iter={max_iter}, before its tolerance was reached"
    return "goal" if is_number(goal) else "solver", ""


def _ending_of_net(net: NeuralNet, comparison: ConstantComparison) -> tuple[str, str]:
    """Return what ended the training of a net at a minimum, or why it is none."""
    if getattr(net, "converged_", False):
        return "goal", ""
    callbacks = [callback for _, callback in getattr(net, "callbacks_", [])]
    auto = next((x for x in callbacks if isinstance(x, StopAtDepth)), None)
    n_epochs = len(net.history)
    after = f"after {n_epochs} epoch{'' if n_epochs == 1 else 's'}"
    if auto is None and hasattr(net, "converged_"):
        return "", f"training stopped before its goal was reached, {after}"
    losses = np.array(epoch_losses(net), dtype=np.float64)
    if _is_at_plateau(losses[~np.isnan(losses)], comparison.constant_loss):
        if is_trained(net, comparison):
            return "plateau", ""
        return "", f"its training made no progress {after}: its loss is about that of the first"
    goal = f"a training loss of {auto.loss:.3g} or " if auto is not None and auto.is_known else ""
    return "", f"training stopped before {goal}a plateau was reached, {after}"


def _is_at_plateau(losses: NDArray[np.float64], constant_loss: float) -> bool:
    """Return whether the losses of the epochs have come to a plateau, see the module."""
    if len(losses) < FEWEST_EPOCHS:
        return False
    n_window = len(losses) // WINDOW
    before, after = losses[-2 * n_window : -n_window].mean(), losses[-n_window:].mean()
    start = constant_loss if np.isfinite(constant_loss) else losses[0]
    return bool(abs(before - after) <= STILL * (start - after))
