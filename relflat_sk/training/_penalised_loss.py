"""The penalty of the loss that a net's `get_loss` returns.

A subclass may have a `get_loss` of its own, which need not call that of `FlatNet`: the penalty is
that of the loss which it returns.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple

from torch import Tensor

from relflat_sk._checks import warn
from relflat_sk._losses.loss import BatchLoss, Loss, multiple_of
from relflat_sk._losses.table import Target
from relflat_sk._network.network import REFUSALS, primary_output
from relflat_sk._numerics import full_precision
from relflat_sk._penalty.penalty import penalise_batch, quiet_hooks

Method = Callable[..., Any]


def penalised(get_loss: Method) -> Method:
    """Let a `get_loss` return its loss with the penalty of this loss in training."""

    @wraps(get_loss)
    def with_penalty(net: Any, y_pred: Any, y_true: Any, *args: Any, **kwargs: Any) -> Any:
        state = net._state()
        if state.own_loss is not None:  # called by the get_loss of a subclass
            return get_loss(net, y_pred, y_true, *args, **kwargs)
        recorded, state.recorded = state.recorded, False
        if not kwargs.get("training", args[1:2] == (True,)):
            return get_loss(net, y_pred, y_true, *args, **kwargs)
        # the first pass of a step is at its first weights
        is_first, penalty = state.terms is None, state.penalty if recorded else None
        own = state.own_loss = _OwnLoss(get_loss, net, y_pred, args, kwargs)
        try:
            loss = get_loss(net, y_pred, y_true, *args, **kwargs)
            total, terms = _with_penalty(own, loss, y_true, penalty)
        finally:
            state.own_loss = state.reading = None
        state.is_penalised |= len(terms) > 1
        if is_first:
            state.terms = terms
            if net._penalty_weight():  # it may rest
                begins = net._penalty_limit().begin_step(net.flatness_every)
                state.is_penalised |= not begins
        return total

    return with_penalty


@dataclass(eq=False)
class _OwnLoss:
    """The `get_loss` of a net in a step, as a function of the output and of targets."""

    get_loss: Method
    net: Any
    y_pred: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def part(self) -> Tensor:
        """The part of the output that a criterion takes."""
        return primary_output(self.y_pred)

    def __call__(self, output: Tensor, target: Any) -> Any:
        """Compute the loss at another output, or that of some samples."""
        whole = output if isinstance(self.y_pred, Tensor) else (output, *self.y_pred[1:])
        if len(output) != len(self.part):  # X has other samples
            return self.get_loss(self.net, whole, target, training=True)
        return self.get_loss(self.net, whole, target, *self.args, **self.kwargs)

    def read_criterion(self, loss: Tensor, y_true: Any) -> "Reading | None":
        """Read the net's criterion on the batch, if the loss is a multiple of it."""
        reading = self.net._state().reading
        if reading is not None and reading.value is loss:
            return reading  # type: ignore[no-any-return]
        part = self.part
        if not part.requires_grad:
            return None
        output = full_precision(part)
        try:
            batch = self.net._read_loss(output, y_true)
            value = batch(output)
        except REFUSALS:  # a criterion that this get_loss does not use
            return None
        factor = multiple_of(loss, value, part)
        return None if factor is None else Reading(batch, value, factor)

    def read(self, loss: Tensor, y_true: Any) -> "Reading | None":
        """Read the loss itself; None if it takes more of the output than can be changed."""
        if not isinstance(self.y_pred, Tensor | tuple):
            return None
        state = self.net._state()
        if state.own_criterion is None:
            state.own_criterion = _make_criterion(self.net, state)
        batch = BatchLoss(Loss(state.own_criterion), Target(y_true, y_true))
        return Reading(batch, loss, 1.0)


class Reading(NamedTuple):
    """A loss on a batch, as `RelativeFlatnessPenalty` takes it, and a factor of it."""

    batch: BatchLoss
    value: Tensor
    factor: float


def _make_criterion(net: Any, state: Any) -> Any:
    """Make a criterion, the same one in all steps, of the loss of the current step."""

    def own_criterion(output: Tensor, target: Tensor) -> Any:
        return state.own_loss(output, target)

    own_criterion.__name__ = f"the get_loss of {type(net).__name__}"
    own_criterion.reduction = getattr(net.criterion_, "reduction", "mean")  # type: ignore[attr-defined]
    return own_criterion


def _with_penalty(
    own: _OwnLoss, loss: Tensor, y_true: Any, penalty: Any
) -> tuple[Tensor, list[Tensor]]:
    """Add a penalty, if there is one, to the loss of a batch; return the history's terms as well.

    If the loss is the criterion's times a factor, as for gradients that accumulate, the penalty
    is the criterion's times this factor, and the history gets the loss without it.
    """
    with nullcontext() if penalty is None else quiet_hooks(penalty):
        reading = own.read_criterion(loss, y_true)
    factor = 1.0 if reading is None else reading.factor
    terms = [loss.detach() if factor == 1 else loss.detach() / factor]
    if penalty is None:
        return loss, terms
    reading = reading or own.read(loss, y_true)
    if reading is None:
        return loss, terms
    first = own.net._state().terms if "_in_second_pass" in vars(own.net) else None
    if first is not None:  # the second pass of SAM has the limit of the first
        penalty.clip = None
    added, share = penalise_batch(penalty, reading.batch, full_precision(own.part), reading.value)
    if first is not None and len(first) > 2:
        share = first[2]
    terms += [term.detach() for term in (added, share) if term is not None]
    added = added if share is None else share * added
    return loss + (added if factor == 1 else factor * added), terms


def warn_without_penalty(net: Any) -> None:
    """Warn of a net with a penalty that no step of an epoch has computed."""
    name = type(net).__name__
    warn(
        f"flatness_weight={net.flatness_weight!r} had no effect: no step of the {name} has "
        "computed the penalty. Let a step of your own call self.infer(x), and for the loss with "
        "the penalty self.get_loss(y_pred, y, X=x, training=True); or set flatness_weight=0."
    )
