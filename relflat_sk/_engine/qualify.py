"""Which nets can be trained by another loop than skorch's, with the same results."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from skorch import NeuralNet
from skorch.callbacks import Callback, EpochScoring
from torch import nn
from torch.nn.modules import module as of_all_modules
from torch.optim import Optimizer

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
# what callbacks may do in every step
_EVENTS = ("on_batch_begin", "on_batch_end", "on_grad_computed")
_HOOKS = ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks")
# optimizers that treat every number alike, and need no second pass through the network
_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


class NeedsOwnLoop(Exception):
    """A net must be trained by its own loop, for the reason in the message."""


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


def _library_class(net: Any) -> type:
    """Return the class of this library that a net is of, without what a subclass adds."""
    library = __name__.partition(".")[0]
    return next(
        kind
        for kind in type(net).__mro__
        if kind.__module__.partition(".")[0] == library and issubclass(kind, NeuralNet)
    )


def check_net(net: Any, parts: Parts, fit_params: Mapping[str, Any]) -> None:
    """Refuse nets that need a training loop of their own."""
    if fit_params:
        raise NeedsOwnLoop(f"its network takes further arguments: {sorted(fit_params)}")
    library = _library_class(net)
    changed = [n for n in _STEP if getattr(type(net), n, None) is not getattr(library, n, None)]
    if changed:
        raise NeedsOwnLoop(f"{type(net).__name__} has its own {changed[0]}")
    trained = {n for n, v in vars(net).items() if isinstance(v, nn.Module | Optimizer)}
    if not trained <= {"module", "module_", "criterion", "criterion_", "optimizer_"}:
        raise NeedsOwnLoop("it has other parts than one module, criterion and optimizer")
    _check_callbacks(net)
    _check_network(net, parts)
    if type(net.optimizer_) not in _OPTIMIZERS:
        names = [kind.__name__ for kind in _OPTIMIZERS]
        raise NeedsOwnLoop(f"its optimizer is {type(net.optimizer_).__name__}, not one of {names}")


def _check_callbacks(net: Any) -> None:
    """Refuse callbacks that are called in every step."""
    for event in _EVENTS:
        for _, callback in net.callbacks_:
            method = getattr(callback, event)
            if getattr(method, "__func__", method) is getattr(Callback, event, None):
                continue  # skorch's empty one
            harmless = (isinstance(callback, EpochScoring) and not callback.on_train) or (
                # LRScheduler of skorch, and WeightAverage
                getattr(callback, "step_every", "batch") == "epoch"
            )
            if not harmless:
                raise NeedsOwnLoop(f"its callback {type(callback).__name__} is called in each step")


def _check_network(net: Any, parts: Parts) -> None:
    """Refuse networks that are not plain modules."""
    if "_orig_mod" in getattr(net.module_, "_modules", {}):
        raise NeedsOwnLoop("its network is compiled")
    parameters = [cast(nn.Parameter, parameter) for _, parameter in parts.parameters]
    if any("forward" in vars(part) or _has_hooks(part, "") for _, part in parts.modules) or (
        _has_hooks(of_all_modules, "_global")
        or any(one._backward_hooks or one._post_accumulate_grad_hooks for one in parameters)
    ):
        raise NeedsOwnLoop("its network has hooks")
    kinds = {(p.dtype, p.device) for p in parameters}
    if len(kinds) != 1:
        raise NeedsOwnLoop("its network has no parameters, or parameters of several types")
    dtype, device = kinds.pop()
    if dtype not in (torch.float32, torch.float64):
        raise NeedsOwnLoop(f"its parameters are of dtype {dtype}")
    if torch.is_autocast_enabled(device.type):
        raise NeedsOwnLoop("it is trained in mixed precision")
    if not all(p.requires_grad for p in parameters):
        raise NeedsOwnLoop("some parameters of its network are frozen")
    if len(set(map(id, parameters))) < len(parameters):
        raise NeedsOwnLoop("its network uses a parameter twice")
    criterion = Parts(net.criterion_) if isinstance(net.criterion_, nn.Module) else None
    if criterion and criterion.parameters:
        raise NeedsOwnLoop("its criterion has parameters")
    if criterion and any(_has_hooks(part, "") for _, part in criterion.modules):
        raise NeedsOwnLoop("its criterion has hooks")


def _has_hooks(owner: Any, prefix: str) -> bool:
    """Return whether there is code of others that a pass through a network would call."""
    return any(getattr(owner, f"{prefix}{name}") for name in _HOOKS)
