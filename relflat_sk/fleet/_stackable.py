"""What is asked of a net in training that is to be one of a stacked model."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from skorch.callbacks import EpochScoring, LRScheduler
from torch import nn
from torch.nn.modules import module as of_all_modules

from relflat_sk.training import RelativeFlatnessRegularizedNet, listens

__all__ = ["NotStackable", "Parts", "check_stackable"]

# the methods that make a training step; a subclass that changes them trains in another way
_STEP = (
    "_penalty",
    "_step_optimizer",
    "_zero_grad_optimizer",
    "get_loss",
    "get_train_step_accumulator",
    "infer",
    "notify",
    "on_batch_begin",
    "on_batch_end",
    "on_grad_computed",
    "run_single_epoch",
    "train_step",
    "train_step_single",
)
# dtypes in which torch's fused optimizers and the losses compute as those of single nets do
_DTYPES = (torch.float32, torch.float64)
# what callbacks may do in every step
_EVENTS = ("on_batch_begin", "on_batch_end", "on_grad_computed")
_HOOKS = (
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks",
    "_forward_pre_hooks",
)


class NotStackable(Exception):
    """A net cannot be one of a stacked model, for the reason in the message."""


class Parts:
    """The modules inside of a network, with their tensors, all from one pass over it.

    torch's own iterators take longer than an epoch's other checks.
    """

    def __init__(self, module: nn.Module) -> None:
        self.modules = list(_walk("", module))
        self.parameters, self.buffers = (
            [
                (f"{name}.{key}" if name else key, tensor)
                for name, part in self.modules
                for key, tensor in getattr(part, attribute).items()
                if tensor is not None
            ]
            for attribute in ("_parameters", "_buffers")
        )


def _walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    yield name, module
    for child, part in module._modules.items():
        if part is not None:
            yield from _walk(f"{name}.{child}" if name else child, part)


def check_stackable(net: Any, parts: Parts, fit_params: Mapping[str, Any]) -> None:
    """Refuse nets that need a training loop of their own."""
    _check_step(net, fit_params)
    _check_callbacks(net)
    _check_network(net, parts)


def _check_step(net: Any, fit_params: Mapping[str, Any]) -> None:
    """Refuse nets with a training step of their own."""
    if fit_params:
        raise NotStackable(f"its network takes further arguments: {sorted(fit_params)}")
    library = RelativeFlatnessRegularizedNet
    changed = [name for name in _STEP if getattr(type(net), name) is not getattr(library, name)]
    if changed:
        raise NotStackable(f"{type(net).__name__} has its own {changed[0]}")
    if (list(net._modules), list(net._criteria), list(net._optimizers)) != (
        ["module"],
        ["criterion"],
        ["optimizer"],
    ):
        raise NotStackable("it has other parts than one module, criterion and optimizer")


def _check_callbacks(net: Any) -> None:
    """Refuse callbacks that are called in every step."""
    for event in _EVENTS:
        for _, callback in net.callbacks_:
            harmless = (isinstance(callback, EpochScoring) and not callback.on_train) or (
                isinstance(callback, LRScheduler) and callback.step_every == "epoch"
            )
            if listens(callback, event) and not harmless:
                raise NotStackable(f"its callback {type(callback).__name__} is called in each step")


def _check_network(net: Any, parts: Parts) -> None:
    """Refuse networks that are not plain modules."""
    if "_orig_mod" in getattr(net.module_, "_modules", {}):
        raise NotStackable("its network is compiled")
    parameters = [cast(nn.Parameter, parameter) for _, parameter in parts.parameters]
    if _has_hooks(parts, parameters):
        raise NotStackable("its network has hooks")
    kinds = {(p.dtype, p.device) for p in parameters}
    if len(kinds) != 1:
        raise NotStackable("its network has no parameters, or parameters of several types")
    dtype, device = kinds.pop()
    if dtype not in _DTYPES:
        raise NotStackable(f"its parameters are of dtype {dtype}")
    if torch.is_autocast_enabled(device.type):
        raise NotStackable("it is trained in mixed precision")
    if not all(p.requires_grad for p in parameters):
        raise NotStackable("some parameters of its network are frozen")
    if len(set(map(id, parameters))) < len(parameters):
        raise NotStackable("its network uses a parameter twice")
    if isinstance(net.criterion_, nn.Module) and Parts(net.criterion_).parameters:
        raise NotStackable("its criterion has parameters")


def _has_hooks(parts: Parts, parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether there is code of others that a pass through a network would call."""
    for _, part in parts.modules:
        if "forward" in vars(part) or any(getattr(part, name) for name in _HOOKS):
            return True
    return any(getattr(of_all_modules, f"_global{name}") for name in _HOOKS) or any(
        one._backward_hooks or one._post_accumulate_grad_hooks for one in parameters
    )
