r"""Limit the penalty of training steps, so that it is harmless and still effective.

A dead network is perfectly flat, so that the published objective ``loss + weight * penalty`` has
it as an attractor: with a large weight, training ends there. With the weighted penalty ``P`` of
``n`` layers and a limit ``c``, a step minimises :math:`L + s P` with `s` a constant in the
differentiation,

.. math:: s = \min\Bigl(1,\; \frac{n c}{5} \frac{(L_0 - L)^2}{L_0 R},\; 2 c \frac{G}{\rho R}\Bigr),
    \qquad R = \max(|P|, \overline{|P|}) .

**Size.** :math:`R` is the penalty of the batch, or its moving average over steps where that is
larger. With :math:`|P|` alone, a batch with a small penalty would be scaled up to the same step as
one with a large penalty, and training would follow the noise of such batches. At a first layer and
a high learning rate, networks with a large weight ended sharper than without penalty.

**Values.** :math:`L_0` is the loss of the network's mean output, the same for all samples of the
batch. A network that has not learned to distinguish samples has gained nothing over it, and gets no
penalty. So a dead network is no attractor, and a penalty cannot stop training before it has begun.
At a minimum, this is no limit. Each layer may have as much as a single one. Where all layers had to
share that, a convolutional network got less flat. The gain counts as far as it has come to that of
a perfect network. Without this factor, the penalty of a first layer cost a convolutional network 5
to 11 points of accuracy, and networks at a high learning rate hardly learned; with less of the
gain, perceptrons became less flat. (Losses that can be negative have no perfect network, and a
factor of at most 1.)

**Gradients.** :math:`G` is the typical norm of the loss's gradient in this training, a moving
average over steps. So no step is larger than those that training has shown to be stable. The
loss's gradient of the same step would vanish at a minimum, which is where flatness is decided.
Where only convolutions are penalised, a quarter of :math:`2 c G` is allowed. With all of it, the
first of them cost a convolutional network 1 to 2 points of accuracy at low rates, and it was
hardly flatter. A quarter at all layers, or at a perceptron's first one, made them less flat.

Norms are those over all parameters. They take two backward passes, and are therefore taken in the
first 8 steps and in every 8th step. :math:`\rho` is the root mean square of the measured ratios
:math:`\|\nabla P\|` to :math:`|P|`, each of which counts for 0.9 times as much as the next one.
Where it was the last ratio, steps between measurements could be 20 times as long as allowed, which
ended networks at a high learning rate. Where it was the largest ratio, the penalty at a first
layer hardly made it flatter.

There is one formula for one net or several, over arrays of NumPy or torch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relflat_sk._numerics import or_one

__all__ = ["PenaltyLimit", "constant_loss"]

# number of steps from one measurement of the norms to the next, and of first steps with one each
_EVERY = 8
_DECAY = 0.999
# how slowly the ratios of the norms to the penalties are forgotten, at each measurement
_MEMORY = 0.9
# the share of the limit of gradients that holds at convolutions
_AT_CONVOLUTIONS = 0.25
# how much of the penalty's average a step replaces
_NEWEST = 0.03
# what a limit knows of past steps
_COUNTED = "steps", "_n_norms"
_MEASURED = "_typical", "_squares", "_n_squares", "_most", "_mean"


class PenaltyLimit:
    """The limits of the penalties of one net or of several, with what past steps have shown.

    Shapes: all arrays have those of the nets: () for one net, (k,) for several.
    """

    def __init__(self) -> None:
        self.steps: Any = 0  # an integer, or a NumPy array of them
        self._n_norms: Any = 0
        self._typical: Any = 0.0  # the norm of the loss's gradient
        # the norms of the penalty's gradients over the penalties, squared: their sum and number, in
        # which old ones count for less; at first, there is no limit by it
        self._squares: Any = 0.0
        self._n_squares: Any = 1e-30
        self._most: Any = 0.0  # the largest penalty over the limit `clip`, by the gradients
        self._mean: Any = 0.0  # the penalty's size; at first, that of each batch counts

    @classmethod
    def stack(cls, limits: Sequence["PenaltyLimit"], like: Any) -> "PenaltyLimit":
        """Join the limits of several nets, as arrays of the kind of another one."""
        found = cls()
        for name in _COUNTED:
            setattr(found, name, np.array([getattr(one, name) for one in limits]))
        for name in _MEASURED:
            setattr(found, name, as_kind([float(getattr(one, name)) for one in limits], like))
        return found

    def unstack(self, limits: Sequence["PenaltyLimit"]) -> None:
        """Give the limits of several nets what these steps have shown."""
        values: Any = [getattr(self, name) for name in _MEASURED]
        if isinstance(values[0], Tensor):
            values = torch.stack(values).cpu()
        for name, numbers in zip(
            _COUNTED + _MEASURED, [self.steps, self._n_norms, *values], strict=True
        ):
            for one, value in zip(limits, numbers.tolist(), strict=True):
                setattr(one, name, value)

    def copy(self) -> "PenaltyLimit":
        """Copy the limit, for steps that are no part of the training."""
        found = PenaltyLimit()
        vars(found).update(vars(self))  # arrays are replaced, and never changed
        return found

    def __getstate__(self) -> dict[str, Any]:
        own = vars(self).items()
        return {name: value.item() if hasattr(value, "item") else value for name, value in own}

    def state_dict(self) -> dict[str, float]:
        """Return what past steps of one net have shown, as numbers."""
        return {name.lstrip("_"): value for name, value in self.__getstate__().items()}

    def load_state_dict(self, state_dict: Mapping[str, float]) -> None:
        """Replace what past steps have shown by a state dict."""
        names = {name.lstrip("_"): name for name in vars(self)}
        if state_dict.keys() != names.keys():
            raise ValueError(
                f"state_dict must have the names {sorted(names)}, got {sorted(state_dict)}. Pass "
                "that of a penalty."
            )
        vars(self).update({names[name]: value for name, value in state_dict.items()})

    @property
    def _due(self) -> Any:
        return (self.steps < _EVERY) | (self.steps % _EVERY == 0)

    @property
    def needs_norms(self) -> bool:
        """Whether the next step is one in which a net's norms are measured."""
        due = self._due
        return due if isinstance(due, bool) else bool(due.any())

    def share(
        self,
        loss: Any,
        of_constant: Any,
        penalty: Any,
        clip: Any,
        norms: tuple[Any, Any] | None = None,
        n_layers: int = 1,
        *,
        at_convolutions: bool = False,
    ) -> Any:
        """Make a step: return the share of each weighted penalty that the limit leaves.

        `of_constant` is the loss of a constant output, `penalty` the sum over layers. `norms` are
        those of the gradients of loss and weighted penalty, in a step that needs them.
        `at_convolutions` says whether all of these are convolutions before the last layer.
        """
        xp: Any = torch if isinstance(penalty, Tensor) else np
        size = abs(penalty)
        if norms is not None:
            of_loss, of_penalty = norms
            due = self._due
            self._n_norms = self._n_norms + due
            # a debiased moving average
            rate = (1 - _DECAY) / (1 - _DECAY**self._n_norms)
            typical = self._typical + (of_loss - self._typical) * as_kind(rate, penalty)
            self._typical = xp.where(_usable(due, typical), typical, self._typical)
            squares = _MEMORY * self._squares + (of_penalty / size) ** 2
            usable = _usable(due, squares)
            self._squares = xp.where(usable, squares, self._squares)
            number = _MEMORY * self._n_squares + xp.ones_like(size)
            self._n_squares = xp.where(usable, number, self._n_squares)
            self._most = 2 * self._typical * (self._n_squares / self._squares) ** 0.5
        self.steps = self.steps + 1
        mean = self._mean + _NEWEST * (size - self._mean)
        self._mean = xp.where(mean < xp.inf, mean, self._mean)
        # the share of a constant's loss that is learned, if losses cannot be negative
        learned = abs(1 - loss / xp.where(of_constant != 0, of_constant, 1.0)).clip(max=1)
        by_value = learned * (of_constant - loss) * (n_layers / 5)
        most = self._most * _AT_CONVOLUTIONS if at_convolutions else self._most
        largest = clip * by_value.clip(max=most)
        # where there is no penalty, there is nothing to limit
        return xp.where(size > 0, largest / xp.maximum(size, self._mean), 1.0).clip(0, 1)


def as_kind(values: Any, like: Any) -> Any:
    """Return numbers as an array of the kind of another one; a single number as it is."""
    if np.ndim(values) == 0:
        return values
    if isinstance(like, Tensor):
        return torch.as_tensor(values, dtype=torch.float64).to(like)
    return np.asarray(values, dtype=like.dtype)


def _usable(due: Any, measured: Any) -> Any:
    """Return which nets are due and have a finite number."""
    xp: Any = torch if isinstance(measured, Tensor) else np
    finite = xp.isfinite(measured)
    if np.all(due):
        return finite
    return finite & (torch.as_tensor(due).to(finite.device) if xp is torch else due)


def constant_loss(
    loss: Callable[[Tensor], Tensor], output: Tensor, sample_weight: Tensor | None = None
) -> Tensor:
    """Compute the loss of the mean output, the same for all samples and positions.

    Shapes: `sample_weight` (n,).
    """
    axes = [axis for axis in range(output.ndim) if axis != 1]
    if output.numel() == (output.shape[1] if output.ndim > 1 else 1):
        return output.new_full((), torch.inf)
    with torch.no_grad():
        if sample_weight is None:
            mean = output.mean(dim=axes, keepdim=True)
        else:
            share = sample_weight / or_one(sample_weight.mean())
            share = share.reshape(-1, *[1] * (output.ndim - 1))
            mean = (share * output).mean(dim=axes, keepdim=True)
        return loss(mean.expand_as(output))
