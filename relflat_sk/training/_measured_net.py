"""The flatness that a net records of its own training data, at the end of training or later."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning

from relflat_sk._losses import name_criterion
from relflat_sk._models import describe
from relflat_sk._random import fork_rng
from relflat_sk._warnings import warn
from relflat_sk.measures import (
    ConstantComparison,
    Flatness,
    compare_with_constant,
    criterion_has_curvature,
    measure_layers,
)
from relflat_sk.training._convergence import missed_goal
from relflat_sk.training._fast_net import FastNet
from relflat_sk.training._sample_weights import training_network

__all__ = ["MeasuredNet", "measured_later"]

# what is left to do for nets that are fitted inside of `measured_later`
_LATER: ContextVar[list[Callable[[], None]] | None] = ContextVar("_LATER", default=None)


@contextmanager
def measured_later() -> Iterator[list[Callable[[], None]]]:
    """Let nets that are fitted inside the context be measured by the caller."""
    later: list[Callable[[], None]] = []
    token = _LATER.set(later)
    try:
        yield later
    finally:
        _LATER.reset(token)


# A net has collapsed if its best epoch had learned something, as a share of a constant's loss, and
# if it lost this share of that gain. In 450 trainings with learning rates from 0.01 to 0.1 on five
# data sets, noise cost at most 0.27 of it.
_GAIN, _LOST = 0.25, 0.5
# A net has hardly learned if its loss is below the best constant's by no more than this share.
_HARDLY = 0.05
# the attributes that are measured on the training data
_MEASURED = ("relative_flatness_", "constant_comparison_")
# parameters with which they would have other values; skorch makes a new module or criterion at once
_MEASURED_WITH = {"criterion", "flatness_layer", "flatness_normalize", "module"}


class MeasuredNet(FastNet):
    """Record the relative flatness of the training data, and how the net compares to a constant."""

    flatness_weight: float
    flatness_layer: Any
    flatness_normalize: bool
    flatness_clip: float | None

    # training data and seed of a measurement that is made when somebody asks for it
    _unmeasured: tuple[Any, int] | None = None

    def __getattr__(self, name: str) -> Any:
        if name in _MEASURED and self.__dict__.get("_unmeasured") is not None:
            (dataset, seed), self._unmeasured = self.__dict__["_unmeasured"], None
            self._measure_flatness(dataset, seed)
            return self.__dict__[name]
        return super().__getattr__(name)

    def __getstate__(self) -> dict[str, Any]:
        # measured now, because copies and pickles hold no training data
        getattr(self, "relative_flatness_", None)
        state: dict[str, Any] = super().__getstate__()
        return state

    def set_params(self, **params: Any) -> Any:
        """Set parameters as skorch does; what is left to measure is measured with the old ones.

        Parameters
        ----------
        **params
            New values by name.

        Returns
        -------
        self
        """
        if _MEASURED_WITH & {name.partition("__")[0] for name in params}:
            getattr(self, "relative_flatness_", None)
        return super().set_params(**params)

    def _layers(self) -> Any:
        """Return the penalised layers in the form that measures take: a sequence or "all"."""
        several = isinstance(self.flatness_layer, list | tuple) or self.flatness_layer == "all"
        return self.flatness_layer if several else [self.flatness_layer]

    def _record_outcome(self, dataset: Any, first: int) -> None:
        """Measure a trained net, and check how its training ended, now or when the caller asks."""
        later = _LATER.get()  # who measures later judges the depth as well
        self._record_flatness(dataset, now=later is None)
        if later is None:
            self._check_outcome(first)
            self._check_goal(first)
        else:
            later.append(partial(self._check_outcome, first))

    def adopt_flatness(self, found: Flatness) -> None:
        """Take a measurement on the training data as the net's own, not to measure twice.

        Parameters
        ----------
        found : Flatness
            The measure of `relative_flatness_` at the net's layer, on all training data.
        """
        self._unmeasured = None
        self._learn_flatness([found])

    def _record_flatness(self, dataset: Any, *, now: bool) -> None:
        """Measure `relative_flatness_` on the training data, now or when it is first read."""
        with fork_rng(None):  # the draw must not change what users draw next
            seed = int(torch.randint(2**31 - 1, ()))
        if now:
            self._measure_flatness(dataset, seed)
        else:
            for name in _MEASURED:
                self.__dict__.pop(name, None)
            self._unmeasured = dataset, seed

    def _measure_flatness(self, dataset: Any, seed: int) -> None:
        """Measure `relative_flatness_` on a data set; nan if it cannot be measured.

        The loss and the score from the same pass are recorded as well, for `FlatnessScorer`.
        """
        name = "normalized_relative_flatness" if self.flatness_normalize else "relative_flatness"
        self.constant_comparison_ = ConstantComparison(np.nan, np.nan)
        try:
            network = training_network(self, dataset)
            found = measure_layers(network, [name], self._layers(), random_state=seed)
        except (TypeError, ValueError) as error:
            warn(f"relative_flatness_ could not be measured: {error}")
            self.relative_flatness_ = np.nan
        else:
            self._learn_flatness(list(found.values()))

    def _learn_flatness(self, found: Sequence[Flatness]) -> None:
        """Record measurements at the net's layers; warn of a dead net, or a vain penalty."""
        self.relative_flatness_ = sum(flatness.value for flatness in found)
        self.constant_comparison_ = _compared(found[0])
        if self._is_flat() and not _is_curved(found[0]):
            # of the class only: one warning for many nets at a line
            warn(
                f"the penalty of the {type(self).__name__} has no effect: "
                f"{name_criterion(found[0].network.loss.criterion)} has no curvature at the "
                "network's outputs, so that the flatness is 0 whatever the weights are. Train with "
                "a loss that is twice differentiable, such as criterion=torch.nn.MSELoss, or with "
                "flatness_weight=0."
            )
        elif self._has_died():
            warn(
                f"the network of {describe(self)} is perfectly flat: it has probably died (its "
                f"outputs are constant). {self._advice()}"
            )

    def _is_flat(self) -> bool:
        """Return whether the net has a penalty, and is perfectly flat."""
        return self.flatness_weight > 0 and self.relative_flatness_ == 0

    def _has_died(self) -> bool:
        """Return whether the net is perfectly flat, and no better than a constant."""
        return self._is_flat() and not self.constant_comparison_.beats_constant

    def _check_outcome(self, first: int) -> None:
        """Warn if training ended badly, unless that was said in other words.

        It ended badly if it diverged, if it ended much worse than it was, or if the net has hardly
        learned and the penalty can be the reason, see `_has_outweighed`.
        """
        losses = [epoch["train_loss"] for epoch in self.history[first:] if "train_loss" in epoch]
        found = self.constant_comparison_
        diverged = found.is_known and not math.isfinite(found.loss)
        if diverged or not all(map(math.isfinite, losses[-1:])):
            warn(f"the training of {describe(self)} has diverged: its loss is not finite.")
        elif not losses or self._has_died():
            return
        elif _has_collapsed(losses, found):
            best = int(np.nanargmin(losses))
            warn(
                f"{describe(self)} ended much worse than it was: its training loss was "
                f"{losses[best]:.3g} in epoch {first + best + 1} and {losses[-1]:.3g} in the last "
                f"one, where the best constant prediction has {found.constant_loss:.3g}. "
                f"{self._advice()} skorch's callback Checkpoint(load_best=True) keeps the best "
                "epoch."
            )
        elif found.is_known and not found.is_lower_by(_HARDLY) and self._has_outweighed(first):
            warn(
                f"{describe(self)} has hardly learned, because its penalty was larger than its "
                f"loss: its training loss is {found.loss:.4g}, where the best constant prediction "
                f"has {found.constant_loss:.4g}. {self._advice()}"
            )

    def _has_outweighed(self, first: int) -> bool:
        """Return whether the penalty can have kept the net from learning.

        It was larger than the loss in some epoch, and its limit allowed its gradient to be at
        least as large as the loss's. With a lower limit, each step still lowers the loss.
        """
        limited = self.flatness_clip is not None and self.flatness_clip < 1
        return not limited and any(
            epoch.get("flatness_penalty", 0.0) > epoch.get("train_loss", np.inf)
            for epoch in self.history[first:]
        )

    def _check_goal(self, first: int) -> None:
        """Warn if the net has not reached its goal, as networks of scikit-learn do."""
        goal = missed_goal(self, len(self.history) - first)
        if goal:
            # of the class only: one warning for many nets at a line that differ in their seeds
            warn(
                f"the {type(self).__name__} has not reached {goal} with max_epochs="
                f"{self.max_epochs}. Train longer, or to a goal within reach.",
                ConvergenceWarning,
            )

    def _advice(self) -> str:
        """Say what helps against a training that ends badly."""
        if not self.flatness_weight:
            return "Use a lower learning rate."
        limit = (
            "a limit of the penalty (flatness_clip=0.5)"
            if self.flatness_clip is None
            else f"a smaller flatness_clip than {self.flatness_clip!r}"
        )
        return (
            f"Use {limit}, a lower learning rate, or a flatness_weight below "
            f"{self.flatness_weight!r}."
        )


def _has_collapsed(losses: Sequence[float], found: ConstantComparison) -> bool:
    """Return whether a net lost much of what its best epoch had gained over the best constant.

    The last epoch and the final weights must show it, because a callback may have restored the
    weights of the best epoch.
    """
    last, best = min(losses[-1], found.loss), np.nanmin(losses)
    gain = found.constant_loss - best
    return bool(gain > _GAIN * abs(found.constant_loss) and last - best > _LOST * gain)


# a stream that is read once, a criterion of the user's own: no reason for fit to fail
_UNKNOWN = ArithmeticError, LookupError, RuntimeError, TypeError, ValueError


def _compared(measured: Flatness) -> ConstantComparison:
    """Compare a net with the best constant; nan if the data or the criterion do not allow it."""
    try:
        return compare_with_constant(measured)
    except _UNKNOWN:
        return ConstantComparison(np.nan, np.nan)


def _is_curved(measured: Flatness) -> bool:
    """Return whether the criterion has a curvature; True if this cannot be found out."""
    try:
        return criterion_has_curvature(measured.network)
    except _UNKNOWN:
        return True
