"""An epoch of nets that train by written-out gradients: batches, steps, histories."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from threadpoolctl import ThreadpoolController
from torch import Tensor, nn
from torch.nn.functional import pad

from relflat_sk._engine.chain import Chain, find_chain
from relflat_sk._engine.qualify import NeedsOwnLoop, Parts
from relflat_sk._engine.step import Batch, Own, Settings, Step, settings_of
from relflat_sk._losses.array_losses import ARRAY_LOSSES, ArrayLoss, find_array_loss
from relflat_sk._losses.loss import Loss
from relflat_sk._losses.many_classes import MANY
from relflat_sk._network.batches import cast_inputs
from relflat_sk._network.layers import find_layer
from relflat_sk._numerics import or_one

# what trains the epochs of all nets that are fitted in this context, for instance of many nets
# together: its `train_epoch(net, iterator, fit_params)` returns whether it did; None if each net
# trains by itself
EPOCH_TRAINER: ContextVar[Any] = ContextVar("EPOCH_TRAINER", default=None)

# input values of batches that are cut at a time
_NUMBERS = 2**20


@dataclass(eq=False)
class Member:
    """A net in training with the data of an epoch; `draw_order` returns the order of its rows."""

    net: Any
    parts: Parts
    inputs: Tensor
    targets: Tensor
    weights: Tensor | None
    draw_order: Callable[[], Tensor]
    n_rows: int
    batch_size: int
    drop_last: bool
    order: Tensor = field(init=False)
    seed: int = field(init=False)
    random_state: Tensor = field(init=False)
    # of a chain: its layers, the formulas of its loss, and the checked targets
    chain: Any = None
    # set by a fleet: what nets that train together have in common; checked targets of no chain
    key: Any = None
    values: Any = None

    @property
    def module(self) -> nn.Module:
        """The net's own network."""
        module: nn.Module = self.net.module_
        return module

    def start_epoch(self) -> None:
        """Set the mode of training; draw what is random from torch's global random state."""
        for part in (self.net.module_, self.net.criterion_):
            if isinstance(part, nn.Module):
                part.train()
        order = self.draw_order()
        n = len(order)
        self.order = order[: n - n % self.batch_size] if self.drop_last else order
        if any(type(part) is nn.Dropout and part.p for _, part in self.parts.modules):
            self.seed = int(torch.randint(2**63 - 1, ()))
        self.random_state = torch.get_rng_state()

    def read_targets(self, output: Tensor) -> Tensor:
        """Check all targets and return those that the criterion takes; `output` has one row."""
        loss = Loss(self.net.criterion_)
        shape = output.shape[1:]
        self.net._check_output(loss, output.expand(self.batch_size, *shape))
        return loss.read_target(output.expand(len(self.targets), *shape), self.targets).values


def _cut_batches(
    members: Sequence[Member],
    targets: Sequence[Tensor],
    like: Tensor,
    convert: Callable[[Batch], Batch],
) -> Iterator[Batch]:
    """Cut the batches of an epoch, those of several steps at once, of the type of a tensor."""
    first, size = members[0], members[0].batch_size
    numbers = max(1, first.inputs[:1].numel()) * len(members)
    at_once = size * max(1, _NUMBERS // (size * numbers))
    data = [member.inputs for member in members]
    if len(first.inputs) <= at_once * len(members) and _is_shared(data):
        # to the device at once, where each net would bring its own copy of each row
        data = [first.inputs.to(like.device)] * len(members)
    for start in range(0, len(first.order), at_once):
        rows = [member.order[start : start + at_once] for member in members]
        inputs = _taken(data, rows)
        several = convert(
            Batch(
                cast_inputs(inputs, first.module, like.device),
                _taken(targets, rows).to(like.device),
                *_weights(members, rows, like),
            )
        )
        for one in range(0, len(rows[0]), size):
            yield Batch(*(array[:, one : one + size] for array in several if array is not None))


def _is_shared(data: Sequence[Tensor]) -> bool:
    """Tell whether all tensors, of one type, are the same memory."""
    places = ((one.data_ptr(), one.shape, one.stride()) for one in data)
    return len(set(places)) == 1


def _taken(data: Sequence[Tensor], rows: Sequence[Tensor]) -> Tensor:
    """Take some rows of each tensor: (k, n, ...)."""
    if _is_shared(data):
        index = torch.stack(list(rows)).to(data[0].device)
        return data[0].index_select(0, index.flatten()).view(*index.shape, *data[0].shape[1:])
    return torch.stack([
        one.index_select(0, own.to(one.device)) for one, own in zip(data, rows, strict=True)
    ])


def _weights(
    members: Sequence[Member], rows: Sequence[Tensor], like: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return the shares of samples in their batches, and their weights if they have any: (k, n)."""
    k, n, size = len(rows), len(rows[0]), members[0].batch_size
    if members[0].weights is None:
        shares = like.new_full((k, n), 1 / size)
        shares[:, n - n % size :] = 1 / max(1, n % size)
        return shares, None
    weights = torch.stack([
        cast(Tensor, m.weights)[own] for m, own in zip(members, rows, strict=True)
    ]).to(like)
    batches = pad(weights, (0, -n % size)).view(k, -1, size)
    shares = batches / or_one(batches.sum(2, keepdim=True))
    return shares.view(k, -1)[:, :n], weights


# -- chains ---------------------------------------------------------------------------------


def find_chain_of(member: Member) -> tuple[Chain, ArrayLoss, Tensor]:
    """Find the written-out formulas for a net, and its targets as the criterion takes them."""
    net = member.net
    chain = find_chain(member.module, tuple(member.inputs.shape[1:]))
    if chain is None or chain.names != {name for name, _ in member.parts.parameters}:
        raise NeedsOwnLoop("its network is no chain of layers")
    weight = next(member.module.parameters())
    d = chain.n_outputs
    if type(net.criterion_) not in ARRAY_LOSSES:
        raise NeedsOwnLoop("there is no formula for its criterion")
    if net.flatness_weight != 0:
        names = [layer.name for layer in chain.linear]
        asked = names if net.flatness_layer == "all" else net._layers()
        if net.flatness_normalize or d >= MANY:
            raise NeedsOwnLoop("its penalty is no plain sum over few classes")
        if {find_layer(member.module, layer, names) for layer in asked} != {names[-1]}:
            raise NeedsOwnLoop("its penalty is at earlier layers")
    targets = member.read_targets(weight.new_zeros(1, d))
    loss = find_array_loss(net.criterion_, targets, d)
    if loss is None:
        raise NeedsOwnLoop("there is no formula for its criterion")
    return chain, loss, targets


def train_alone(member: Member) -> None:
    """Train a net for an epoch by written-out gradients, with its own optimizer."""
    member.chain = find_chain_of(member)
    member.start_epoch()
    train_chain([member], Own(member.net))


def train_chain(members: Sequence[Member], stack: Any) -> None:
    """Train nets whose network is a chain for an epoch, and record their batches."""
    chain, loss, _ = members[0].chain
    targets = [member.chain[2] for member in members]
    like = next(iter(stack.weights.values()))
    small = like.device.type == "cpu" and chain.is_small(members[0].batch_size)

    def convert(tensor: Tensor) -> Any:
        return tensor.numpy() if small else tensor

    def as_arrays(batch: Batch) -> Batch:
        wanted = loss.targets(batch.targets, chain.n_outputs, like)
        return Batch(convert(batch.inputs), convert(wanted), convert(batch.shares))

    chain.bind(
        {name: convert(weight) for name, weight in stack.weights.items()},
        {name: convert(gradient) for name, gradient in stack.gradients.items()},
    )
    for layer in chain.dropout:
        layer.seed(make_generators(members, like.device), like, small=small)
    with _one_blas_thread() if small else nullcontext():
        train_epoch(Step(chain, loss), members, targets, stack, convert(like), as_arrays)


def train_epoch(
    step: Callable[[Batch, Settings | None], tuple[Any, ...]],
    members: Sequence[Member],
    targets: Sequence[Tensor],
    stack: Any,
    like: Any,
    as_arrays: Callable[[Batch], Batch],
) -> None:
    """Train nets for an epoch, by steps that write the gradients of a stack; record the batches.

    `like` is an array of the kind that the steps take.
    """
    settings = settings_of([member.net for member in members], like)
    recorded = []
    with torch.no_grad():
        for batch in _cut_batches(members, targets, next(iter(stack.weights.values())), as_arrays):
            recorded.append(step(batch, settings))
            stack.step()
    if settings is not None:
        settings.finish(member.net for member in members)
    stack.hand_over()
    _record_epoch(members, recorded)


def make_generators(members: Sequence[Member], device: torch.device) -> list[torch.Generator]:
    """Make the streams from which dropout draws in an epoch."""
    return [torch.Generator(device).manual_seed(member.seed) for member in members]


# made once, in the first epoch, because it searches the process for its libraries
_controller = cache(ThreadpoolController)


@contextmanager
def _one_blas_thread() -> Iterator[None]:
    """Let NumPy multiply on one thread, which small matrices do not share among several."""
    with _controller().limit(limits=1, user_api="blas"), np.errstate(all="ignore"):
        yield


# -- histories ------------------------------------------------------------------------------


def _record_epoch(members: Sequence[Member], recorded: Sequence[tuple[Any, ...]]) -> None:
    """Write the batches of an epoch to the histories, as the nets do.

    `recorded` has the losses of a step, and with a penalty also penalties and their shares.
    """
    n, size = len(members[0].order), members[0].batch_size
    sizes = [min(size, n - first) for first in range(0, n, size)]
    if recorded and isinstance(recorded[0][0], Tensor):
        steps: Any = torch.stack([torch.stack(step) for step in recorded]).cpu().numpy()
    else:
        steps = np.array(recorded)
    for member, parts in zip(members, np.moveaxis(steps, -1, 0).swapaxes(1, 2), strict=True):
        losses, *penalty = parts.tolist()
        terms, shares = penalty or ([0.0] * len(sizes), [1.0] * len(sizes))
        history = member.net.history
        list.__getitem__(history, -1)["batches"].extend(
            {
                "train_loss": loss,
                "train_batch_size": size,
                "flatness_penalty": share * term,
                "flatness_clipped": float(share < 1),
            }
            for loss, size, term, share in zip(losses, sizes, terms, shares, strict=True)
        )
        history.record("train_batch_count", len(sizes))
