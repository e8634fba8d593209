"""When a candidate is a minimum, as docs/searching.md says: it reached a goal or a plateau.

At a **plateau**, the mean training loss of the last fifth of the epochs differs from that of the
fifth before by at most 1% of the drop from the best constant prediction's loss. With fewer than
`FEWEST_EPOCHS` epochs nothing can be said.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import is_regressor
from skorch import NeuralNet
from torch import nn

from relflat_sk._checks import is_number
from relflat_sk._losses.table import TABLE
from relflat_sk._models.network_of import final_estimator, last_step
from relflat_sk.measures._minimum import ConstantComparison, epoch_losses, has_vanished
from relflat_sk.measures._results import Measured
from relflat_sk.minima._minimum import Minimum
from relflat_sk.training import StopAtGradientNorm, StopAtLoss
from relflat_sk.training._convergence import StopAtDepth

AUTO = "auto"
FEWEST_EPOCHS = 10
EQUAL_LOSS = "equal loss"  # what ended the training of a network that is ranked at equal loss
WINDOW = 5  # the last fifth of the epochs
STILL = 0.01  # of the drop of the loss
ROUNDING = 1e-5  # of a loss, between two passes in float32

Floats = NDArray[np.float64]


def check_goal(goal: Any, estimator: Any) -> None:
    """Refuse a goal that is not valid, or that the estimator has already."""
    if goal is None or goal == AUTO:
        return
    if not is_number(goal) or not 0 < goal < np.inf:
        raise ValueError(
            f"goal must be {AUTO!r}, a training loss greater than 0 or None, got {goal!r}."
        )
    net = last_step(estimator)
    if isinstance(net, NeuralNet) and own_goals(net):
        raise ValueError(
            f"goal={goal!r}, but the net has a goal of its own: {own_goals(net)}. Remove these "
            f"callbacks, or leave goal at {AUTO!r}, which keeps them."
        )


def own_goals(net: NeuralNet) -> list[Any]:
    """List the callbacks of a net that stop its training at a goal."""
    kinds = (StopAtLoss, StopAtGradientNorm)
    return [
        callback
        for callback in callbacks_of(net)
        if issubclass(callback if isinstance(callback, type) else type(callback), kinds)
    ]


def callbacks_of(net: NeuralNet) -> list[Any]:
    """List the callbacks that a net was given, without their names."""
    callbacks = [] if net.callbacks in (None, "disable") else net.callbacks
    return [item[1] if isinstance(item, tuple) else item for item in callbacks]


def add_goal(estimator: Any, goal: Any) -> None:
    """Let the net of an estimator stop at the goal of the search, unless it has its own."""
    check_goal(goal, estimator)
    net = last_step(estimator)
    if goal is None or not isinstance(net, NeuralNet) or net.callbacks == "disable":
        return
    if own_goals(net) or (goal == AUTO and predicts_numbers(net)):
        return
    callback = StopAtDepth() if goal == AUTO else StopAtLoss(goal)
    net.set_params(callbacks=[*(net.callbacks or []), callback])


def predicts_numbers(net: NeuralNet) -> bool:
    """Return whether a net does regression, whose loss may fall far below any share of the start.

    How far depends on the noise, which nobody knows: such nets train to their plateau.
    """
    criterion = net.criterion if isinstance(net.criterion, type) else type(net.criterion)
    row = TABLE.get(criterion)
    return is_regressor(net) if row is None else row.task == "regression"


def find_ending(
    estimator: Any, goal: Any, train_loss: float, constant_loss: float
) -> tuple[str, str]:
    """Return what ended the training of a candidate at a minimum, or why it is none."""
    final = final_estimator(estimator)
    if isinstance(final, nn.Module):  # has no record of its training
        return "", ""
    if isinstance(final, NeuralNet):
        return _ending_of_net(final, constant_loss)
    if is_number(goal) and train_loss > goal * (1 + ROUNDING):
        return "", f"the training loss did not reach the goal of {goal:g}"
    n_iter, max_iter = getattr(final, "n_iter_", None), getattr(final, "max_iter", None)
    if n_iter is not None and max_iter is not None and np.max(n_iter) >= max_iter:
        return "", f"the solver stopped at max_iter={max_iter}, before its tolerance was reached"
    return "goal" if is_number(goal) else "solver", ""


def _ending_of_net(net: NeuralNet, constant_loss: float) -> tuple[str, str]:
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
    if _is_at_plateau(losses[~np.isnan(losses)], constant_loss):
        return "plateau", ""
    goal = f"a training loss of {auto.loss:.3g} or " if auto is not None and auto.is_known else ""
    return "", f"training stopped before {goal}a plateau was reached, {after}"


def _is_at_plateau(losses: Floats, constant_loss: float) -> bool:
    """Return whether the losses of the epochs have come to a plateau, see the module."""
    if len(losses) < FEWEST_EPOCHS:
        return False
    n_window = len(losses) // WINDOW
    before, after = losses[-2 * n_window : -n_window].mean(), losses[-n_window:].mean()
    start = constant_loss if np.isfinite(constant_loss) else losses[0]
    return bool(abs(before - after) <= STILL * (start - after))


def _has_goal(estimator: Any, goal: Any) -> bool:
    """Return whether a user has chosen a goal, for the search or for the net."""
    net = final_estimator(estimator)
    chosen = own_goals(net) if isinstance(net, NeuralNet) else []
    return is_number(goal) or not all(isinstance(callback, StopAtDepth) for callback in chosen)


# how the reason of a minimum begins whose measures are nan or infinite
NO_MEASURE = "cannot be ranked: "
# the reason of a network that is perfectly flat, however well it predicts
SATURATED = (
    "has no curvature left: the network may be nearly constant, or saturated, so that the loss of "
    "nearly all samples rounds to 0, or the criterion has no curvature"
)


def record_verdict(
    minimum: Minimum,
    estimator: Any,
    goal: Any,
    results: Mapping[str, Measured],
    ranking: Sequence[str],
) -> list[float]:
    """Record whether a candidate is a minimum, and why not.

    Returns the values of the measures that rank, infinity where flatness cannot be compared: such
    a network may predict well. Failures of others are recorded.
    """
    assert minimum.train_loss is not None
    row = minimum.row()
    train_loss, values = minimum.train_loss, [row[name] for name in ranking]
    ranked = next(iter(results.values())).passes
    constant_loss = np.nan if minimum.constant_loss is None else minimum.constant_loss
    minimum.n_samples = ranked.n_samples
    # at equal loss, it does not matter what the loss itself leaves of other curvatures
    judged = {
        name: measured
        for name, measured in results.items()
        if ranked.at_loss is None or measured.passes.at_loss is not None
    }
    ended_by = ""
    if train_loss >= constant_loss and ranked.fitted is None:
        reason = "the training loss is no better than a constant prediction's"
        values = [np.nan] * len(values)
    elif any(
        has_vanished(
            name,
            measured.value,
            ConstantComparison(measured.passes.compared_risk, constant_loss),
        )
        for name, measured in judged.items()
    ):
        reason = SATURATED
        values = [np.inf] * len(values)
    elif not np.isfinite(values).all():
        wrong = [name for name in ranking if not np.isfinite(row[name])]
        why = {name: x.reason and f", {x.reason}" for name, x in results.items()}
        reason = NO_MEASURE + ", ".join(
            f"{name} is {row[name]}{why.get(name, '')}" for name in wrong
        )
        values = [np.inf if np.isnan(value) else value for value in values]
    else:
        ended_by, reason = find_ending(estimator, goal, train_loss, constant_loss)
        if reason and ranked.fitted is not None and not _has_goal(estimator, goal):
            ended_by, reason = EQUAL_LOSS, ""
    failed = [
        f"{name} is nan: {measured.reason}"
        for name, measured in results.items()
        if name not in ranking and measured.reason
    ]
    reasons = [reason, *failed] if reason else failed
    minimum.converged, minimum.ended_by = not reason, ended_by
    minimum.reason = "; ".join(reasons)
    return values
