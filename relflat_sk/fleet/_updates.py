"""Steps of torch's optimizers for many networks at once, each with settings of its own.

On the CPU and on CUDA devices, a step calls the kernels of torch's fused optimizers: once for
each group of neighbouring members with the same settings, since a kernel takes numbers, not
tensors, for its settings. On other devices, a few operations update all members together.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from relflat_sk.fleet._stackable import NotStackable

__all__ = ["Update", "find_update"]

Settings = Mapping[str, Any]
Tensors = list[Tensor]  # one for each parameter, with the members on the first axis


class Update(ABC):
    """The steps of an epoch; members keep their settings in it.

    Shapes: `weights, gradients` (k, ...).
    """

    # the names of the state's tensors
    names: Callable[[Settings], tuple[str, ...]]
    # settings by which members may differ; in all others, a group of nets is equal
    own: tuple[str, ...]

    def __init__(
        self,
        weights: Tensors,
        gradients: Tensors,
        states: Mapping[str, Tensors],
        settings: Sequence[Settings],
        fused: bool,
    ) -> None:
        self._all = weights, gradients, states
        self._steps = states["step"][0]
        # parameters that were frozen for a time have made fewer than others
        self._made: list[list[float]] = self._steps.cpu().tolist()
        self._settings = settings
        self._fused = fused
        self._calls = self._make_calls()

    def step(self) -> None:
        """Update all weights from the gradients."""
        self._steps.add_(1)
        for call in self._calls:
            call()

    def _make_calls(self) -> list[Callable[[], None]]:
        """Prepare the calls of a step."""
        if not self._fused:
            return [self._together()]
        calls = []
        for _, run in groupby(range(len(self._settings)), self._kind):
            members = list(run)
            calls.append(self._fused_call(slice(members[0], members[-1] + 1)))
        return calls

    def _kind(self, member: int) -> tuple[Any, ...]:
        """Return what must be equal for members to share a call of a kernel."""
        settings = self._settings[member]
        return *(settings[name] for name in self.own), *self._made[member]

    def _rows(self, tensors: Tensors, rows: slice) -> Tensors:
        return [tensor[rows] for tensor in tensors]

    def _columns(self, name: str) -> list[Tensor]:
        """Return a setting of all members, to multiply each parameter by."""
        weights = self._all[0]
        numbers = [float(settings[name]) for settings in self._settings]
        values = torch.tensor(numbers, dtype=torch.float64).to(weights[0])
        return [values.view(-1, *[1] * (weight.ndim - 1)) for weight in weights]

    @abstractmethod
    def _fused_call(self, rows: slice) -> Callable[[], None]:
        """Return a function that updates neighbouring members with the same settings."""

    @abstractmethod
    def _together(self) -> Callable[[], None]:
        """Return a function that updates all members, whatever their settings."""


class _Adam(Update):
    """Steps of Adam and AdamW."""

    decoupled = False
    own = ("lr", "weight_decay", "betas", "eps")

    @staticmethod
    def names(settings: Settings) -> tuple[str, ...]:
        """Return the names of the state's tensors."""
        return "exp_avg", "exp_avg_sq"

    def _fused_call(self, rows: slice) -> Callable[[], None]:
        weights, gradients, states = self._all
        settings = self._settings[rows.start]
        kernel: Any = torch._fused_adamw_ if self.decoupled else torch._fused_adam_
        lists = [
            self._rows(tensors, rows)
            for tensors in (weights, gradients, states["exp_avg"], states["exp_avg_sq"])
        ]
        steps = list(self._steps[rows.start])
        beta1, beta2 = settings["betas"]
        numbers = {
            "lr": float(settings["lr"]),
            "beta1": float(beta1),
            "beta2": float(beta2),
            "weight_decay": float(settings["weight_decay"]),
            "eps": float(settings["eps"]),
            "amsgrad": False,
            "maximize": False,
        }
        return lambda: kernel(*lists, [], steps, **numbers)

    def _together(self) -> Callable[[], None]:
        weights, gradients, states = self._all
        rates, decays, eps = (self._columns(name) for name in ("lr", "weight_decay", "eps"))
        numbers = [settings["betas"] for settings in self._settings]
        betas = torch.tensor(numbers, dtype=torch.float64).to(weights[0])
        decays = decays if any(settings["weight_decay"] for settings in self._settings) else []

        def update() -> None:
            corrections = 1 - betas[:, None] ** self._steps[:, :, None].to(betas)
            for i, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
                shape = (-1, *[1] * (weight.ndim - 1))
                first, second = (betas[:, j].view(shape) for j in (0, 1))
                one, two = (corrections[:, i, j].view(shape) for j in (0, 1))
                mean, square = states["exp_avg"][i], states["exp_avg_sq"][i]
                if decays and self.decoupled:
                    weight.mul_(1 - rates[i] * decays[i])
                elif decays:
                    gradient.addcmul_(weight, decays[i])
                mean.lerp_(gradient, 1 - first)
                square.lerp_(gradient.square(), 1 - second)
                weight.sub_(rates[i] / one * mean / ((square / two).sqrt_() + eps[i]))

        return update


class _AdamW(_Adam):
    """Steps of AdamW."""

    decoupled = True


class _SGD(Update):
    """Steps of SGD with momentum."""

    own = ("lr", "weight_decay", "momentum", "dampening", "nesterov")

    @staticmethod
    def names(settings: Settings) -> tuple[str, ...]:
        """Return the names of the state's tensors."""
        return ("momentum_buffer",) if settings["momentum"] else ()

    def _fused_call(self, rows: slice) -> Callable[[], None]:
        weights, gradients, states = self._all
        settings = self._settings[rows.start]
        momentum = float(settings["momentum"])
        kernel: Any = torch._fused_sgd_
        lists = [self._rows(tensors, rows) for tensors in (weights, gradients)]
        lists.append(self._rows(states["momentum_buffer"], rows) if momentum else [])
        numbers = {
            "lr": float(settings["lr"]),
            "weight_decay": float(settings["weight_decay"]),
            "momentum": momentum,
            "dampening": float(settings["dampening"]),
            "nesterov": bool(settings["nesterov"]),
            "maximize": False,
        }
        # their buffers get the gradients of the first step as they are
        made = self._made[rows.start] if momentum else []
        fresh = [i for i, steps in enumerate(made) if not steps]
        known = [i for i, steps in enumerate(made) if steps]

        def update() -> None:
            if not fresh:
                kernel(*lists, **numbers, is_first_step=False)
                return
            for places, is_first in ((fresh, True), (known, False)):
                some = [[tensors[i] for i in places] for tensors in lists]
                if places:
                    kernel(*some, **numbers, is_first_step=is_first)
            fresh.clear()

        return update

    def _together(self) -> Callable[[], None]:
        weights, gradients, states = self._all
        names = ("lr", "weight_decay", "momentum", "dampening", "nesterov")
        rates, decays, momenta, damped, nesterov = (self._columns(name) for name in names)
        decayed = any(settings["weight_decay"] for settings in self._settings)
        buffers = states.get("momentum_buffer")

        def update() -> None:
            for i, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
                if decayed:
                    gradient.addcmul_(weight, decays[i])
                move = gradient
                if buffers is not None:
                    is_first = (self._steps[:, i] == 1).view(rates[i].shape)
                    share = torch.where(is_first, 1.0, 1 - damped[i])
                    buffers[i].mul_(momenta[i]).addcmul_(gradient, share)
                    move = torch.where(
                        nesterov[i] > 0, gradient + momenta[i] * buffers[i], buffers[i]
                    )
                weight.sub_(rates[i] * move)

        return update


# by the class of the torch optimizer
_OPTIMIZERS: dict[type, type[Update]] = {
    torch.optim.Adam: _Adam,
    torch.optim.AdamW: _AdamW,
    torch.optim.SGD: _SGD,
}


def find_update(optimizer: torch.optim.Optimizer) -> type[Update]:
    """Find the steps of an optimizer, as it is set now."""
    if type(optimizer) not in _OPTIMIZERS:
        names = [kind.__name__ for kind in _OPTIMIZERS]
        raise NotStackable(f"its optimizer is {type(optimizer).__name__}, not one of {names}")
    # since torch 2.7, AdamW is Adam with this setting
    is_decoupled = optimizer.param_groups[0].get("decoupled_weight_decay")
    return _AdamW if is_decoupled else _OPTIMIZERS[type(optimizer)]
