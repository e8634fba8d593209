r"""Limit the penalty of training steps, so that it is harmless and still effective.

A dead network is perfectly flat, so that the published objective ``loss + weight * penalty`` has
it as an attractor. And steps along the penalty's gradient become unstable at learning rates at
which those of the loss are stable: the weights grow from step to step, until all units are zero.
With the weighted penalty ``P`` and a limit ``c``, a step minimises :math:`L + s P`
with `s` a constant in the differentiation,

.. math:: s = \min\Bigl(\frac{L_0 - L}{2 R},\; \frac{1}{1 + r \rho^2 R / c}\Bigr),
    \qquad R = \max(|P|, \overline{|P|}) .

**Values.** :math:`L_0` is the loss of the network's mean output, the same for all samples of the
batch. The penalty is at most half of what the network has gained over it. With more, a dead network
would still be an attractor: if the outputs are small and grow by a factor `t`, the gain grows by
`t`, and the penalty by :math:`t^2`. So the gradient of :math:`s P` is :math:`2 s P / t`, and must
not exceed that of the gain, :math:`(L_0 - L) / t`.

**Steps.** A step of the rate :math:`r` along the gradient of :math:`s P` removes about the share
:math:`q = s r \rho^2 R` of it. With the limit, this share is :math:`c x / (c + x)`, if `x` is the
share without it. A share of 1 is Polyak's step, the stable one for a function whose minimum is zero
[1]_. A sharp limit, the smaller of `c` and `x`, made all weights train the same network at high
rates. With `c` of 2, some networks died at the edge of what training without penalty survives.

:math:`r` is what training shows: the root of the mean squares of the weights' movement between two
measurements, over the root of the number of steps, and of the step's gradient,
:math:`\|\nabla L\|^2 + s^2 \|\nabla P\|^2`. It thus counts momentum, the scaling of Adam and
schedules, for any optimizer and any loop. :math:`\rho` is the mean of the ratios
:math:`\|\nabla P\| / |P|`.

**Size.** :math:`R` is the penalty of the batch, or its moving average over about 30 steps where
that is larger. Otherwise, training would follow the noise of batches with a small penalty.

Norms are those over all parameters. They take two backward passes, and are therefore taken in the
first 8 steps and in every 8th step; for :math:`r`, the weights of the last measurement are kept.

There is one formula for one net or several, over numbers, or arrays of NumPy or torch.

.. [1] Polyak, "Minimization of unsmooth functionals", 1969.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from relflat_sk._numerics import or_one

__all__ = ["Measured", "PenaltyLimit", "constant_loss"]

# number of steps from one measurement to the next, and of first steps with one each
_EVERY = 8
# how slowly measurements are forgotten: the last ten or so count
_MEMORY = 0.9
# the share of what is learned that the penalty may have
_GAIN = 0.5
# how much of the penalty's average a step replaces
_NEWEST = 0.03
# what a limit knows of past steps: counts, and numbers
_COUNTED = "steps", "measured_at", "rest"
_MEASURED = "gradient", "gradients", "movements", "ratios", "n_ratios", "most", "mean"


class Measured(NamedTuple):
    """What is measured in a step: norms of gradients, and all weights in one row per net."""

    of_loss: Any  # () or (k,)
    of_penalty: Any  # () or (k,)
    weights: Any  # (p,) or (k, p)


class _Numbers:
    """What `PenaltyLimit` needs of NumPy and torch, for plain numbers: a quarter of the time."""

    inf, isfinite, isnan, sqrt, maximum = math.inf, math.isfinite, math.isnan, math.sqrt, max

    @staticmethod
    def where(condition: bool, yes: Any, no: Any) -> Any:
        """Choose one of two numbers."""
        return yes if condition else no

    @staticmethod
    def divide(dividend: float, divisor: float) -> float:
        """Divide as arrays do, which raise no error."""
        return dividend / divisor if divisor else dividend * math.inf

    @staticmethod
    def clip(number: float, low: float, high: float) -> float:
        """Limit a number; nan stays nan."""
        return min(max(number, low), high)


@dataclass(eq=False)
class PenaltyLimit:
    """The limits of the penalties of one net or of several, with what past steps have shown.

    Numbers have the shapes of the nets: (k,) for several. Those of one net are floats on the host,
    and tensors () elsewhere.
    """

    steps: Any = 0  # with a penalty: an integer, or a NumPy array of them
    measured_at: Any = 0  # step of the last measurement, less those without a penalty since then
    rest: Any = 0  # number of steps until the next one with a penalty
    gradient: Any = np.nan  # of the last measurement, its norm squared
    # sums over measurements, in which old ones count for less: of `gradient`; of the weights'
    # squared movements per step; of the ratios of the penalty's gradient to the penalty
    gradients: Any = 0.0
    movements: Any = 0.0
    ratios: Any = 0.0
    n_ratios: Any = 0.0
    most: Any = np.inf  # the penalty of which a step removes all, by the movements
    mean: Any = 0.0  # the penalty's size; at first, that of each batch counts
    weights: Any = None  # those of the last measurement, as `Measured` has them

    @classmethod
    def stack(cls, limits: Sequence["PenaltyLimit"], like: Any) -> "PenaltyLimit":
        """Join the limits of several nets, as arrays of the kind of another one."""
        stacked = cls()
        for name in _COUNTED:
            setattr(stacked, name, np.array([getattr(limit, name) for limit in limits]))
        for name in _MEASURED:
            numbers = [float(getattr(limit, name)) for limit in limits]
            setattr(stacked, name, as_kind(numbers, like))
        known = [torch.as_tensor(limit.weights) for limit in limits if limit.weights is not None]
        if known:
            unknown = torch.full_like(known[0], torch.nan)
            rows = [unknown if limit.weights is None else limit.weights for limit in limits]
            # the rows of nets that were copied are on the host
            place = like.device if isinstance(like, Tensor) else "cpu"
            stack = torch.stack([torch.as_tensor(row).to(place) for row in rows])
            stacked.weights = as_kind(stack, like)
        return stacked

    def unstack(self, limits: Sequence["PenaltyLimit"]) -> None:
        """Give the limits of several nets what these steps have shown."""
        values: Any = [getattr(self, name) for name in _MEASURED]
        if isinstance(values[0], Tensor):
            values = torch.stack(values).cpu()
        counts = [getattr(self, name) for name in _COUNTED]
        for name, numbers in zip(_COUNTED + _MEASURED, [*counts, *values], strict=True):
            for limit, value in zip(limits, numbers.tolist(), strict=True):
                setattr(limit, name, value)
        if self.weights is not None:
            for limit, row in zip(limits, torch.as_tensor(self.weights), strict=True):
                limit.weights = row.clone()  # a view would keep the weights of all nets

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))
        for name in _COUNTED + _MEASURED:
            if hasattr(state[name], "item"):
                state[name] = state[name].item()
        if self.weights is not None:
            row = torch.as_tensor(self.weights).cpu()
            # skops stores arrays, and no tensors outside of modules; NumPy has no bfloat16
            state["weights"] = (row.float() if row.dtype == torch.bfloat16 else row).numpy()
        return state

    def state_dict(self) -> dict[str, Any]:
        """Return what past steps of one net have shown, as numbers and a row of weights."""
        state = self.__getstate__()
        if state["weights"] is not None:
            state["weights"] = torch.as_tensor(state["weights"])
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace what past steps have shown by a state dict."""
        if state_dict.keys() != vars(self).keys():
            raise ValueError(f"state_dict needs {sorted(vars(self))}, got {sorted(state_dict)}.")
        vars(self).update(state_dict)

    def is_resting(self, every: int) -> bool:
        """Return whether the next step has no penalty, if one in `every` steps has."""
        return every > 1 and bool(np.any(self.rest))

    def begin_step(self, every: int) -> bool:
        """Count a step of the training; return whether it has a penalty."""
        if self.is_resting(every):
            self.rest, self.measured_at = self.rest - 1, self.measured_at - 1
            return False
        self.rest = 0 * self.rest + every - 1
        return True

    @property
    def _due(self) -> Any:
        return (self.steps < _EVERY) | (self.steps % _EVERY == 0)

    @property
    def needs_measurement(self) -> bool:
        """Whether the next step is one in which something of a net is measured."""
        due = self._due
        return due if isinstance(due, bool) else bool(due.any())

    def share(
        self, loss: Any, of_constant: Any, penalty: Any, clip: Any, measured: Measured | None = None
    ) -> Any:
        """Make a step: return the share of each weighted penalty that the limit leaves.

        `of_constant` is the loss of a constant output, `penalty` the weighted sum over layers.
        `measured` are the norms of the gradients of loss and weighted penalty, and the weights, in
        a step that needs them.
        """
        if not isinstance(self.steps, int):
            return self._share(loss, of_constant, penalty, clip, measured)
        # one net: plain numbers on the host, and elsewhere tensors, for which nobody waits
        on_host = not isinstance(penalty, Tensor) or penalty.device.type == "cpu"
        read = methodcaller("item") if on_host else methodcaller("reshape", ())
        if measured is not None:
            norms = read(measured.of_loss), read(measured.of_penalty)
            measured = Measured(*norms, measured.weights.reshape(-1))
        share = self._share(read(loss), read(of_constant), read(penalty), clip, measured)
        return as_kind(share, penalty).reshape(penalty.shape)

    def _share(
        self, loss: Any, of_constant: Any, penalty: Any, clip: Any, measured: Measured | None
    ) -> Any:
        """Compute what `share` returns."""
        xp, size, due = _module_of(penalty), abs(penalty), None
        if measured is not None:
            due = torch.as_tensor(self._due).to(size.device) if xp is torch else self._due
            self._measure(measured, size, due)
        self.steps = self.steps + 1
        mean = self.mean + _NEWEST * (size - self.mean)
        self.mean = xp.where(mean < xp.inf, mean, self.mean)
        size = xp.where(size > 0, xp.maximum(size, self.mean), 0.0)
        share = xp.divide(_GAIN * (of_constant - loss), size)
        # where there is no penalty, there is nothing to limit
        share = xp.where(size > 0, share, 1.0)
        by_movement = 1.0 / (1.0 + xp.divide(size, clip * self.most))
        share = xp.clip(xp.where(by_movement < share, by_movement, share), 0.0, 1.0)
        if measured is not None:
            of_loss, of_penalty = measured.of_loss, share * measured.of_penalty
            gradient = of_loss * of_loss + of_penalty * of_penalty
            self.gradient = xp.where(due, gradient, self.gradient)
        return share

    def _measure(self, measured: Measured, size: Any, due: Any) -> None:
        """Update what past steps have shown by a measurement of the nets that are due."""
        xp, counts = _module_of(size), _module_of(self.steps)

        def remember(sums: Any, newest: Any, usable: Any) -> Any:
            return xp.where(usable, _MEMORY * sums + newest, sums)

        ratio = xp.divide(measured.of_penalty, size)
        usable = xp.isfinite(ratio) & due
        self.ratios = remember(self.ratios, ratio, usable)
        self.n_ratios = remember(self.n_ratios, 1.0, usable)
        last, weights = self.weights, measured.weights
        if last is not None and last.shape == weights.shape:
            is_tensor = isinstance(weights, Tensor)
            last = torch.as_tensor(last).to(weights) if is_tensor else np.asarray(last)
            moved = weights - last
            squares = (moved * moved).sum(-1)
            n_steps = counts.maximum(self.steps - self.measured_at, 1)
            n_steps = n_steps if counts is _Numbers else as_kind(n_steps, size)
            movement = (squares.item() if xp is _Numbers else squares) / n_steps
            usable = xp.isfinite(movement + self.gradient) & due
            self.movements = remember(self.movements, movement, usable)
            self.gradients = remember(self.gradients, self.gradient, usable)
            per_penalty = xp.divide(self.n_ratios, self.ratios)
            slowness = xp.sqrt(xp.divide(self.gradients, self.movements))
            most = slowness * per_penalty * per_penalty
            self.most = xp.where(xp.isnan(most), xp.inf, most)
            weights = xp.where(due if weights.ndim == 1 else due[:, None], weights, last)
        self.weights = weights
        self.measured_at = counts.where(self._due, self.steps, self.measured_at)


def as_kind(values: Any, like: Any) -> Any:
    """Return numbers as an array of the kind of another one."""
    if isinstance(like, Tensor):
        is_tensor = isinstance(values, Tensor)
        return (values if is_tensor else torch.as_tensor(values, dtype=torch.float64)).to(like)
    return np.asarray(values, dtype=like.dtype)


def _module_of(numbers: Any) -> Any:
    """Return what has the functions for numbers, arrays or tensors."""
    if isinstance(numbers, Tensor):
        return torch
    return np if isinstance(numbers, np.ndarray) else _Numbers


def constant_loss(
    loss: Callable[[Tensor], Tensor],
    output: Tensor,
    sample_weight: Tensor | None = None,  # (n,)
) -> Tensor:
    """Compute the loss of the mean output, the same for all samples and positions.

    It is infinite for one output, which is its own mean.
    """
    axes = [axis for axis in range(output.ndim) if axis != 1]
    n_outputs = output.numel() // (output.shape[1] if output.ndim > 1 else 1)
    if n_outputs == 1:
        return output.new_full((), torch.inf)
    with torch.no_grad():
        if sample_weight is None:
            mean = output.mean(dim=axes, keepdim=True)
        else:
            share = sample_weight / or_one(sample_weight.mean())
            share = share.reshape(-1, *[1] * (output.ndim - 1))
            mean = (share * output).mean(dim=axes, keepdim=True)
        value = loss(mean.expand_as(output))
        if sample_weight is None or n_outputs > len(output):
            return value
        return value.where(sample_weight.amax() < sample_weight.sum(), torch.inf)
