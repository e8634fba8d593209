"""A net's epoch as a job of the engine or of a fleet, and its outcome in the history."""

import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from skorch import NeuralNet
from skorch.callbacks import Callback, EpochScoring
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import RandomSampler

from relflat_sk._engine.epoch import EPOCH_TRAINER, train_alone
from relflat_sk._engine.job import Epoch, Job, NeedsOwnLoop, qualify
from relflat_sk.training._data import rows_of

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


def train_otherwise(net: Any, loader: Any, fit_params: Mapping[str, Any]) -> bool:
    """Train for an epoch together with other nets, or by written-out gradients, if possible."""
    fleet = EPOCH_TRAINER.get()
    try:
        job = make_job(net, loader, fit_params)
        epoch = train_alone(job) if fleet is None else fleet.train_epoch(job)
    except NeedsOwnLoop as reason:
        if fleet is not None:
            fleet.log_reason(reason)
        return False
    record_epoch(net, epoch)
    return True


def make_job(net: Any, loader: Any, fit_params: Mapping[str, Any]) -> Job:
    """Read a net and its data for an epoch outside of its own loop; refuse what needs that."""
    reason = _find_own_step(net, fit_params)
    if reason is not None:
        raise NeedsOwnLoop(reason)
    samples = rows_of(loader)
    if samples is None:
        raise NeedsOwnLoop("its batches are not cut out of arrays")
    inputs, targets = _whole(samples.inputs, "inputs"), _whole(samples.targets, "targets")
    rows, in_order = torch.from_numpy(samples.rows), torch.arange(len(samples))
    if samples.weights is not None and not torch.equal(rows, in_order):
        # weights are in the order of samples
        inputs, targets, rows = inputs[rows], targets[rows], in_order

    def draw_order() -> Tensor:
        _draw_seed()  # torch's loader draws a seed for workers, even if it has none
        # its sampler would turn a permutation into numbers of Python
        if isinstance(loader.sampler, RandomSampler):
            generator = torch.Generator().manual_seed(_draw_seed())
            return rows[torch.randperm(len(samples), generator=generator)]
        return rows

    size, drop_last = int(loader.batch_size or 1), bool(loader.drop_last)
    if drop_last and len(samples) < size:
        raise NeedsOwnLoop("it has fewer samples than a batch, and drops them")
    job = Job(
        net.module_,
        net.optimizer_,
        net.criterion_,
        net._penalty() if net._penalty_weight() else None,
        inputs,
        targets,
        samples.weights,
        draw_order,
        len(samples),
        min(size, len(samples)),
        drop_last,
        net._check_output,
    )
    reason = qualify(job)
    if reason is not None:
        raise NeedsOwnLoop(reason)
    return job


def _draw_seed() -> int:
    return int(torch.empty((), dtype=torch.int64).random_().item())


def _whole(data: Any, name: str) -> Tensor:
    """Return an array as a tensor that shares its memory."""
    if isinstance(data, Tensor):
        return data
    if isinstance(data, np.ndarray):
        with suppress(ValueError):  # such as negative strides
            if data.flags.writeable:
                return torch.from_numpy(data)
            with warnings.catch_warnings():
                # torch warns of arrays that it may not write to, and nobody writes to these
                warnings.filterwarnings("ignore", "The given NumPy array is not writ")
                return torch.from_numpy(data)
    raise NeedsOwnLoop(f"its {name} are not one array")


def _find_own_step(net: Any, fit_params: Mapping[str, Any]) -> str | None:
    """Return what a net does in its steps that another loop would leave out, if anything."""
    if fit_params:
        return f"its network takes further arguments: {sorted(fit_params)}"
    library = _library_class(net)
    changed = [n for n in _STEP if getattr(type(net), n, None) is not getattr(library, n, None)]
    if changed:
        return f"{type(net).__name__} has its own {changed[0]}"
    trained = {n for n, v in vars(net).items() if isinstance(v, nn.Module | Optimizer)}
    if not trained <= {"module", "module_", "criterion", "criterion_", "optimizer_"}:
        return "it has other parts than one module, criterion and optimizer"
    if "_orig_mod" in getattr(net.module_, "_modules", {}):
        return "its network is compiled"
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
                return f"its callback {type(callback).__name__} is called in each step"
    return None


def _library_class(net: Any) -> type:
    """Return the class of this library that a net is of, without what a subclass adds."""
    library = __name__.partition(".")[0]
    return next(
        kind
        for kind in type(net).__mro__
        if kind.__module__.partition(".")[0] == library and issubclass(kind, NeuralNet)
    )


def record_epoch(net: Any, epoch: Epoch) -> None:
    """Write the batches of an epoch to the history, as a net's own steps do."""
    rows = zip(epoch.sizes, epoch.losses, epoch.penalties, epoch.shares, strict=True)
    list.__getitem__(net.history, -1)["batches"].extend(
        {
            "train_loss": loss,
            "train_batch_size": size,
            "flatness_penalty": share * penalty,
            "flatness_clipped": 1.0 - share,
        }
        for size, loss, penalty, share in rows
    )
    net.history.record("train_batch_count", len(epoch.sizes))
    if epoch.has_ending:
        net._ending = epoch.ending
