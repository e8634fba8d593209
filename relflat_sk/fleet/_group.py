"""Nets of one architecture, trained epoch by epoch as one stacked model."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import isfunction
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from relflat_sk._losses import name_criterion
from relflat_sk._penalty import PenaltyLimit
from relflat_sk._random import fork_rng
from relflat_sk.fleet._chain import Chain, find_chain
from relflat_sk.fleet._criteria import find_criterion
from relflat_sk.fleet._data import Batch, Data, make_batch
from relflat_sk.fleet._earlier import EarlierPenalty, make_earlier_penalty
from relflat_sk.fleet._evaluation import losses_on_all
from relflat_sk.fleet._gradients import FAR_GRADIENT, RunningGradients, gradient_norms
from relflat_sk.fleet._masks import Masks
from relflat_sk.fleet._member import Member
from relflat_sk.fleet._penalty import LastPenalty
from relflat_sk.fleet._probe import Probe, check_penalty, copy_network, probe
from relflat_sk.fleet._recording import record_batches
from relflat_sk.fleet._small import SmallStep, find_small_step, one_blas_thread
from relflat_sk.fleet._stack import Stack
from relflat_sk.fleet._stackable import NotStackable
from relflat_sk.fleet._vmapped import Vmapped
from relflat_sk.training import knows_its_batch

__all__ = ["Group"]

Array = np.ndarray[Any, Any]

_FUSED_ON = ("cpu", "cuda")


class Group:
    """Nets that can be stacked, and how."""

    def __init__(self, member: Member) -> None:
        net = member.net
        x, y = member.first_batch()
        module = copy_network(member.module).train()
        chain = find_chain(module, x)
        with fork_rng(x.device):
            # a network may hold results of its forward pass, and torch cannot copy it then
            tried = copy_network(module) if chain is None else module
            if chain is None and member.is_penalised:
                check_penalty(net, tried, x, y, weighted=member.has_weights)
            found = probe(net, tried, x, y)
        self._criterion = find_criterion(
            net.criterion_,
            found.output,
            found.target,
            ignores=member.has_ignored,
            weighted=member.has_weights,
        )
        self._output = found.output[:1]
        self._unused = found.unused
        self.device = x.device
        self._body: Chain | Vmapped = chain or Vmapped(module, found.last, found.earlier)
        self._penalty = self._make_penalty(net, found) if member.is_penalised else None
        self._masks = Masks(module, self._body, x)
        self._small = self._find_small_step(net, module, x)
        self._stack: Stack | None = None
        self._data: Data | None = None
        self._try(member, x, found.target)
        self._evaluable = self._can_evaluate(module, x)
        self._acts_alike = self._criterion.is_known and acts_alike(module)

    def _make_penalty(self, net: Any, found: Probe) -> LastPenalty | EarlierPenalty:
        """Make the penalty at the layers that the probe has found."""
        if not self._criterion.is_known:
            criterion, labels = net.criterion_, found.target
            raise NotStackable(
                "with a penalty, its criterion must be MSELoss, BCEWithLogitsLoss without weights, "
                "or CrossEntropyLoss of class indices without weights, with reduction='mean', got "
                f"{name_criterion(criterion)} (reduction={getattr(criterion, 'reduction', None)!r},"
                f" labels of {labels.dtype} and shape {tuple(labels.shape)})"
            )
        if not found.earlier:
            return LastPenalty(self._criterion, found.divisor)
        return make_earlier_penalty(self._criterion, found, net.flatness_probes)

    def _find_small_step(self, net: Any, module: nn.Module, x: Tensor) -> SmallStep | None:
        """Find how NumPy trains a single member, where this takes less time."""
        penalty = self._penalty
        known = self._criterion.is_known and isinstance(self._body, Chain)
        if not known or isinstance(penalty, EarlierPenalty):
            return None
        divisor = None if penalty is None else penalty.divisor
        return find_small_step(module, net.criterion_, x, divisor)

    def _try(self, member: Member, x: Tensor, target: Tensor) -> None:
        """Refuse a network or a criterion that cannot be stacked."""
        weights = {n: p.detach()[None].clone() for n, p in member.module.named_parameters()}
        buffers = {n: b[None].clone() for n, b in member.module.named_buffers()}
        gradients = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        self._body.bind(weights, gradients, buffers)
        self._masks.ones()
        targets = target[:, None] if self._criterion.takes_columns else target
        # a copy, because layers hold their inputs until the next pass
        batch = make_batch(x.clone(), targets, self._output)
        member.random_state = torch.get_rng_state()
        try:
            with torch.no_grad(), fork_rng(x.device):
                if self._penalty is not None:
                    self._penalty.start([member], [len(x)])
                factors = self._factors([member], batch.shares)
                self._step(batch, factors, self._limit([member], batch.shares))
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            text = str(error).strip().split("\n")[0]
            raise NotStackable(f"torch.func cannot stack it: {text}") from error

    def _can_evaluate(self, module: nn.Module, x: Tensor) -> bool:
        """Return whether losses of samples are known, and do not depend on other samples."""
        if not self._criterion.is_known or any(map(knows_its_batch, module.modules())):
            return False
        try:
            with torch.no_grad(), fork_rng(x.device):
                self._body.evaluate(x[None])
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            return False
        return True

    def train(self, members: Sequence[Member]) -> None:
        """Train members for an epoch, and record their batches."""
        stack, data = self._prepared(members)
        stack.take_over()
        data.start(members)
        self._masks.start(members)
        device = data.inputs.device
        update = stack.make_update(device.type in _FUSED_ON)
        if self._penalty is not None:
            self._penalty.start(members, data.sizes)
        recorded = []
        running = None
        if any(member.stops_at_gradient for member in members) and not data.drops_some:
            running = RunningGradients(stack.gradients.values())
        with torch.no_grad(), self._steps(members, stack, data) as (batches, compute):
            for step, batch in enumerate(batches):
                self._masks.set(step, data.sizes[step])
                recorded.append(compute(batch))
                if running is not None:
                    running.add(batch)
                update.step()
        if self._penalty is not None:
            self._penalty.finish()
        norms = [0.0] * len(members) if running is None else running.norms()
        for member, norm in zip(members, norms, strict=True):
            member.running_gradient = norm
        stack.hand_over()
        record_batches(members, recorded, data.sizes)

    def _prepared(self, members: Sequence[Member]) -> tuple[Stack, Data]:
        """Return stack and data of these members, which may be those of the last epoch."""
        if self._stack is None or self._stack.members != list(members):
            self._stack = self._data = None  # first, so that nothing is in memory twice
        if self._data is None or not all(member.has_own_inputs for member in members):
            self._data = None
            for i, member in enumerate(members):
                member.share_data(members[:i])
        if self._stack is None or not self._stack.is_current:
            self._stack = Stack(members, self._unused)
        if self._data is None:
            columns = self._criterion.takes_columns
            self._data = Data(members, self._output, takes_columns=columns)
        return self._stack, self._data

    @contextmanager
    def _steps(
        self, members: Sequence[Member], stack: Stack, data: Data
    ) -> Iterator[tuple[Iterable[Any], Callable[[Any], Any]]]:
        """Yield the batches, and a function that computes the gradients of a batch.

        The function returns what is recorded.
        """
        alone = self._small is not None and len(members) == 1
        limit = self._limit(members, np.zeros(1) if alone else data.inputs)
        if self._small is not None and alone:
            self._small.bind(stack.weights, stack.gradients)
            settings = {"factor": members[0].net._penalty_weight(), "limit": limit}
            with one_blas_thread():
                yield data.arrays(), partial(self._small, **settings)
        else:
            self._body.bind(stack.weights, stack.gradients, stack.buffers)
            factors = self._factors(members, data.inputs)
            yield data, lambda batch: self._step(batch, factors, limit)
        if limit is not None:
            limit.unstack([member.limit for member in members])

    def _step(self, batch: Batch, factors: Tensor | None, limit: PenaltyLimit | None) -> Tensor:
        """Compute the gradients of a batch; return losses, penalties and shares of them."""
        if self._penalty is not None and factors is not None:
            body: Any = self._body
            return self._penalty.step(body, batch, factors, limit)
        z, _, _ = self._body.forward(batch.inputs)
        slopes = self._criterion.slopes(z, batch)
        self._body.backward(slopes.z)
        return slopes.value[None]

    def _factors(self, members: Sequence[Member], like: Tensor) -> Tensor | None:
        """Return the weights of the penalties in this epoch."""
        if self._penalty is None:
            return None
        weights = [member.net._penalty_weight() for member in members]
        return torch.tensor(weights, dtype=torch.float64).to(like)

    def _limit(self, members: Sequence[Member], like: Tensor | Array) -> PenaltyLimit | None:
        """Return the limits of the penalties."""
        if self._penalty is None or members[0].net.flatness_clip is None:
            return None
        return PenaltyLimit.stack([member.limit for member in members], like)

    def evaluates(self, member: Member) -> bool:
        """Return whether the loss of a member on all its data can be computed in the stack."""
        return self._evaluable and self._holds(member)

    def _holds(self, member: Member) -> bool:
        """Return whether a member has been trained in the last epoch, and has its tensors."""
        return self._stack is not None and self._stack.holds(member)

    def losses(self, members: Sequence[Member], goals: Sequence[float]) -> list[float]:
        """Compute the losses of members on all their data, in evaluation mode."""
        stack, data = self._stack, self._data
        assert stack is not None
        assert data is not None
        stack.take_over()
        positions = [stack.members.index(member) for member in members]
        return losses_on_all(self._body, self._criterion, stack, data, positions, goals)

    def is_far(self, member: Member, goal: float) -> bool:
        """Return whether the last epoch's gradients are far from a goal."""
        return self._acts_alike and member.running_gradient > FAR_GRADIENT * goal

    def differentiates(self, member: Member) -> bool:
        """Return whether a member's gradient on all its data can be computed in the stack."""
        return (
            self._acts_alike
            and self._holds(member)
            and member.valid_batch_size is not None
            and not isinstance(self._penalty, EarlierPenalty)
        )

    def gradient_norms(self, members: Sequence[Member]) -> list[float]:
        """Compute the norms of the gradients of members on all their data, penalty included."""
        # the limit of a penalty depends on the batch
        found: dict[int, float] = {}
        for size in {member.valid_batch_size for member in members}:
            some = [member for member in members if member.valid_batch_size == size]
            found |= dict(zip(map(id, some), self._norms_of(some, int(size or 1)), strict=True))
        return [found[id(member)] for member in members]

    def _norms_of(self, members: Sequence[Member], batch_size: int) -> list[float]:
        """Compute the norms of members whose data are evaluated in batches of the same size."""
        stack, data = self._stack, self._data
        assert stack is not None
        assert data is not None
        stack.take_over()
        positions = [stack.members.index(member) for member in members]
        weights, buffers = stack.of(positions)
        gradients = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        self._body.bind(weights, gradients, buffers)
        settings = self._factors(members, data.inputs), self._limit(members, data.inputs)
        with torch.no_grad():
            return gradient_norms(
                list(gradients.values()),
                data.in_order(positions, None, batch_size),
                lambda batch: self._step(batch, *settings),
            )

    def release(self) -> None:
        """Forget the stack, because its members change or have ended."""
        self._stack = self._data = None


def _is_from(definition: Any, *packages: str) -> bool:
    """Return whether a class or function is defined in one of some packages."""
    module = str(getattr(definition, "__module__", ""))
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


def acts_alike(module: nn.Module) -> bool:
    """Return whether a network is known to act in training as it does in evaluation."""
    return not any(map(_asks_for_mode, module.modules()))


def _asks_for_mode(part: nn.Module) -> bool:
    if isinstance(part, _DropoutNd | _NormBase | nn.RReLU) or getattr(part, "dropout", False):
        return True
    others = [
        kind
        for kind in type(part).__mro__
        if not _is_from(kind, "torch.nn", "relflat_sk", "builtins")
    ]
    if "forward" in vars(part) or any(_is_from(kind, "torch") for kind in others):
        return True  # compiled to something that cannot be read
    functions = [one for kind in others for one in vars(kind).values() if isfunction(one)]
    return any({"training", "dropout"} & _names_in(one.__code__) for one in functions)


def _names_in(code: CodeType) -> set[str]:
    """Return the names of attributes and functions in the code of a function."""
    inner = [_names_in(one) for one in code.co_consts if isinstance(one, CodeType)]
    return set(code.co_names).union(*inner)
