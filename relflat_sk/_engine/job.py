"""What training hands down for an epoch, what comes back, and which networks qualify for it."""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_all_modules
from torch.optim import Optimizer
from torch.optim import optimizer as of_all_optimizers

from relflat_sk._losses.curvature import ArrayLoss, find_array_loss
from relflat_sk._losses.loss import Loss, name_criterion
from relflat_sk._losses.many_classes import MANY
from relflat_sk._penalty.penalty import RelativeFlatnessPenalty

# optimizers that treat every number alike, and need no second pass through the network
_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
# where torch keeps code of others that a module calls, all modules, and all steps
_OF_EACH = [f"_{kind}_hooks" for kind in ("backward", "backward_pre", "forward", "forward_pre")]
_OF_ALL = [f"_global{name}" for name in _OF_EACH]
_OF_STEPS = ("pre_hooks", "post_hooks")


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


@dataclass(eq=False)
class Job:
    """A network that is to be trained for an epoch, with its data.

    ``check_output(criterion, output)`` refuses outputs that do not fit the labels.
    """

    module: nn.Module
    optimizer: Optimizer
    criterion: Any
    penalty: RelativeFlatnessPenalty | None  # with its limit
    inputs: Tensor
    targets: Tensor
    rows: Tensor  # (n,), of inputs and targets, that the samples are
    weights: Tensor | None  # (n,), of the samples
    shuffles: bool
    batch_size: int
    drop_last: bool
    check_output: Callable[[Loss, Tensor], None]
    parts: Parts = field(init=False)
    # drawn at the start of the epoch
    order: Tensor = field(init=False)  # of the samples
    seed: int = field(init=False)
    random_state: Tensor = field(init=False)
    # the targets that the criterion takes, its formulas, and the weights of the targets in it
    n_outputs: int = field(init=False)
    values: Tensor = field(init=False)
    loss: ArrayLoss = field(init=False)
    class_weights: Tensor | None = field(default=None, init=False)
    # what networks that train together have in common, and what their epochs have
    key: Any = field(default=None, init=False)
    length: Hashable = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.parts = Parts(self.module)

    def start_epoch(self) -> None:
        """Set the mode of training; draw what is random from torch's global random state."""
        if not all(part.training for _, part in self.parts.modules):  # which is dear to set
            self.module.train()
        if isinstance(self.criterion, nn.Module) and not self.criterion.training:
            self.criterion.train()
        n = len(self.rows)
        self.order = torch.arange(n - n % self.batch_size if self.drop_last else n)
        _draw_seed()  # as torch's loader does for workers, also if there are none
        if self.shuffles:  # torch's sampler would turn the permutation into numbers of Python
            generator = torch.Generator().manual_seed(_draw_seed())
            self.order = torch.randperm(n, generator=generator)[: len(self.order)]
        if any(type(part) is nn.Dropout and part.p for _, part in self.parts.modules):
            self.seed = int(torch.randint(2**63 - 1, ()))
        self.random_state = torch.get_rng_state()

    @property
    def sizes(self) -> list[int]:
        """The numbers of samples in the batches."""
        n, size = len(self.order), self.batch_size
        return [min(size, n - first) for first in range(0, n, size)]

    def prepare(self, n_outputs: int) -> None:
        """Check all targets, and find the formulas of the criterion and of the penalty."""
        self.n_outputs = n_outputs
        if self.penalty is not None and (self.penalty.normalize or n_outputs >= MANY):
            raise NeedsOwnLoop("its penalty has flatness_normalize=True, or too many classes")
        criterion, (_, weight) = Loss(self.criterion), self.parts.parameters[0]
        output = weight.new_zeros(1, n_outputs)
        self.check_output(criterion, output.expand(self.batch_size, -1))
        whole = output.expand(len(self.targets), -1)
        self.values = criterion.read_target(whole, self.targets).values
        loss = find_array_loss(self.criterion, self.values, n_outputs)
        if loss is None:
            name = name_criterion(self.criterion)
            reduction = getattr(self.criterion, "reduction", None)
            raise NeedsOwnLoop(f"there is no formula for {name} (reduction={reduction!r})")
        self.loss = loss
        class_weights = getattr(self.criterion, "weight", None)
        if class_weights is not None:
            self.class_weights = class_weights.cpu()[self.values.cpu()]

    def weights_of(self, samples: Tensor) -> Tensor:
        """Return the weights of some samples, those of their classes included."""
        if self.class_weights is None:
            return self.weights[samples]  # type: ignore[index]
        of_classes = self.class_weights[self.rows[samples]]
        return of_classes if self.weights is None else self.weights[samples] * of_classes


def _draw_seed() -> int:
    return int(torch.empty((), dtype=torch.int64).random_().item())


@dataclass(frozen=True)
class Epoch:
    """The batches of an epoch: losses, penalties and the shares of them that the limit left."""

    sizes: list[int]
    losses: list[float]
    penalties: list[float]
    shares: list[float]
    ending: str | None = None  # the function that the network ends in


def qualify(job: Job) -> str | None:
    """Return why a network cannot be trained by another loop than its own, if it cannot."""
    return next(chain(_obstacles(job), _obstacles_of_criterion(job.criterion)), None)


def _obstacles(job: Job) -> Iterator[str]:
    """Yield the reasons why a network needs its own loop."""
    parameters = [parameter for _, parameter in job.parts.parameters]
    if _runs_hooks(job.parts):
        yield "its network has hooks"
    if len({(p.dtype, p.device) for p in parameters}) != 1:
        yield "its network has no parameters, or parameters of several types"
    if parameters[0].dtype not in (torch.float32, torch.float64):
        yield f"its parameters are of dtype {parameters[0].dtype}"
    if torch.is_autocast_enabled(parameters[0].device.type):
        yield "it is trained in mixed precision"
    if not all(p.requires_grad for p in parameters):
        yield "some parameters of its network are frozen"
    if len(set(map(id, parameters))) < len(parameters):
        yield "its network uses a parameter twice"
    if type(job.optimizer) not in _OPTIMIZERS:
        names = [kind.__name__ for kind in _OPTIMIZERS]
        yield f"its optimizer is {type(job.optimizer).__name__}, not one of {names}"
    owners = (job.optimizer, "_optimizer_step_"), (of_all_optimizers, "_global_optimizer_")
    if any(getattr(owner, f"{prefix}{name}") for owner, prefix in owners for name in _OF_STEPS):
        yield "its optimizer has hooks"


def _obstacles_of_criterion(criterion: Any) -> Iterator[str]:
    """Yield the reasons why a criterion needs a network's own loop."""
    parts = Parts(criterion) if isinstance(criterion, nn.Module) else None
    if parts is not None and parts.parameters:
        yield "its criterion has parameters"
    if parts is not None and _runs_hooks(parts):
        yield "its criterion has hooks"


def _runs_hooks(parts: Parts) -> bool:
    """Return whether passes through modules, or gradients of parameters, run code of others."""
    return (
        any(
            "forward" in vars(part) or any(getattr(part, name) for name in _OF_EACH)
            for _, part in parts.modules
        )
        or any(getattr(of_all_modules, name) for name in _OF_ALL)
        or any(p._backward_hooks or p._post_accumulate_grad_hooks for _, p in parts.parameters)
    )
