"""A trained network with its loss and its data, and the losses of its batches."""

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from relflat_sk._checks import warn
from relflat_sk._losses.loss import Loss, constant_risk, lowest_risk, name_criterion
from relflat_sk._network.batches import Batch, Batches, cast_inputs, check_finite, count_samples
from relflat_sk._network.borrowing import borrowed
from relflat_sk._network.layers import find_layer
from relflat_sk._network.recording import nodes_behind, record_order
from relflat_sk._numerics import full_precision, read_numbers, without_autocast
from relflat_sk._random import fork_rng


@dataclass(frozen=True)
class Source:
    """The model and the data that a network was made of, for measures of your own."""

    model: Any
    X: Any
    y: Any
    sample_weight: Any = None


# -- what a criterion takes of a network's output ------------------------------------------

# what a criterion raises for an argument that it does not expect
REFUSALS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)

# what needs a criterion of one tensor, and what to do if the criterion is to stay
_NEEDS = {
    "measure": ("measures need", "pass one with the argument criterion of the measure"),
    "penalty": ("the flatness penalty needs", "train with flatness_weight=0"),
    "net": ("nets of relflat_sk need", "train a net of skorch"),
}


def primary_output(output: Any) -> Tensor:
    """Return the part of a network's output that measures and the penalty pass to the criterion."""
    part = output
    if isinstance(output, Mapping):
        part = output.get("logits")
    elif isinstance(output, tuple | list) and output:
        part = output[0]
    if not isinstance(part, Tensor):
        raise TypeError(
            "the network must return a tensor, a tuple that starts with one, or a mapping "
            f"with 'logits', got {_describe(output)}. Measures take output=, the key or "
            "the position of the tensor; a net takes a module that returns it."
        )
    return part


def _describe(output: Any) -> str:
    """Say what a network returned."""
    if isinstance(output, Mapping):
        return f"{type(output).__name__} with the names {list(output)}"
    of = f" of {len(output)}" if isinstance(output, tuple | list) else ""
    return f"{type(output).__name__}{of}"


def select_output(output: Any, which: Any) -> Any:
    """Return the part of a network's output that the user has chosen, if any."""
    try:
        return output if which is None else output[which]
    except (KeyError, IndexError, TypeError):
        raise ValueError(
            f"output={which!r} is no part of what the network returns, a "
            f"{_describe(output)}. Pass the key or the position of a tensor."
        ) from None


def check_part(loss: Loss, output: Any, target: Any, by: str) -> None:
    """Refuse a user's criterion that takes more of a network's output than `primary_output`."""
    if loss.row is not None or isinstance(output, Tensor):
        return
    answers: list[Any] = []
    with torch.no_grad(), fork_rng(None), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a name as the index of a tensor
        for choose in (primary_output, lambda output: output):
            try:
                answers.append(loss.criterion(choose(output), target))
            except REFUSALS as error:
                answers.append(error)
    part, whole = answers
    same = isinstance(part, Tensor) and isinstance(whole, Tensor) and torch.equal(part, whole)
    if not (same or isinstance(whole, Exception)):
        need, remedy = _NEEDS[by]
        raise ValueError(
            f"{name_criterion(loss.criterion)} takes the module's whole output, but {need} a "
            "criterion of one tensor. Use a criterion that takes the entry 'logits' of a mapping, "
            f"or the first entry of a tuple, which is passed to it as a tensor, or {remedy}."
        )
    if isinstance(part, Exception):
        first = "the entry 'logits'" if isinstance(output, Mapping) else "its first entry"
        raise ValueError(
            f"the module returned a {_describe(output)}, and {name_criterion(loss.criterion)} can "
            f"take neither {first} ({type(part).__name__}: {part}) nor the whole output "
            f"({type(whole).__name__}: {whole})."
        )


# -- criteria that the table of losses does not know ---------------------------------------

# by how much a mean of samples may differ from that of its parts, as a share of them
_ROUNDING = 1e-4


def warn_unless_mean(loss: Loss, output: Tensor, target: Tensor) -> bool:
    """Warn if a criterion of a user is no mean of losses of single samples."""
    # Return whether the samples could show it: weights of classes need samples of several.
    n, name = len(output), name_criterion(loss.criterion)
    if loss.row is not None or n < 2:
        return loss.row is not None
    try:
        with (
            torch.no_grad(),
            without_autocast(output),
            fork_rng(output.device),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # of the shape of a single sample, for example
            # in the order of targets or one-hot classes, whose parts differ most in their classes
            columns = target.reshape(n, -1).float()
            place = columns @ torch.arange(1, columns.shape[1] + 1).to(columns)
            values, order = place.sort()
            apart = Loss(copy.deepcopy(loss.criterion))  # it may count its calls
            together, *each = (
                float(full_precision(apart.losses(output[rows], target[rows])).sum())
                for rows in (order, *order.tensor_split(max(2, min(8, n // 2))))
            )
    except Exception as error:  # a user's criterion may raise anything
        warn(
            f"it could not be checked that {name} is a mean of losses of single samples, as "
            f"flatness needs: for some of {n} samples it raised {type(error).__name__}: {error}"
        )
        return True
    equal = abs(together - sum(each)) <= _ROUNDING * max(map(abs, (together, *each)))
    if equal or not math.isfinite(together):
        return bool(values[0] < values[-1])
    warn(
        f"{name} is no mean of losses of single samples: for {n} samples it is "
        f"{together / n:.6g}, and {sum(each) / n:.6g} as the mean of {len(each)} parts. So the "
        "flatness is not that of this criterion, and depends on batch_size. Use a criterion that "
        "averages over samples."
    )
    return True


def warn_of_weights(loss: Loss, losses: Tensor, output: Tensor, module: nn.Module) -> None:
    """Warn if a criterion of a user reads weights of the network, as for a norm of its own."""
    if loss.row is not None:
        return
    criterion = loss.criterion
    weights = {id(parameter) for parameter in module.parameters()}
    holds = isinstance(criterion, nn.Module)
    reads = holds and any(id(parameter) in weights for parameter in criterion.parameters())
    steps = nodes_behind(losses.grad_fn, until=[output.grad_fn])
    reads = reads or any(id(getattr(step, "variable", None)) in weights for step in steps)
    if reads:
        warn(
            f"{name_criterion(criterion)} reads weights of the network. What it adds beside the "
            "loss of the outputs, such as a norm, is left out. Pass weight_decay to count a norm."
        )


@dataclass
class Network:
    """A trained network with the loss and the data that it is measured on."""

    module: nn.Module
    loss: Loss
    batches: Batches
    forward: Callable[[Any], Any] | None = None
    source: Source | None = None
    output: Any = None  # which part of the module's output the criterion gets
    # whether a batch has shown that the criterion, if it is a user's, can be measured
    _is_checked: bool = field(default=False, init=False, repr=False)
    # what the module returned last, and output and target of a sample that was checked
    _whole: Any = field(default=None, init=False, repr=False)
    _seen: tuple[Tensor, Tensor] | None = field(default=None, init=False, repr=False)

    @property
    def device(self) -> torch.device:
        """The device of the network's parameters."""
        first = next(chain(self.module.parameters(), self.module.buffers()), None)
        return torch.device("cpu") if first is None else first.device

    def __call__(self, x: Any) -> Tensor:
        """Run the network on inputs as they come from the data."""
        x = self.prepare(x)
        self._whole = None  # frees the graph of the last batch
        whole = select_output(self._run(x), self.output)
        if self.loss.row is None and not self._is_checked:
            self._whole = whole
        output = primary_output(whole)
        if _is_one(x) and (output.ndim == 0 or len(output) != 1):
            return output[None]  # a squeeze() in the network removed the axis of a single sample
        return output

    def check_criterion(self, output: Tensor, target: Tensor) -> None:
        """Check on the first batches that a user's criterion can be measured."""
        # One is enough, unless it has one sample or one class.
        if self._whole is None:
            return
        check_part(self.loss, self._whole, target, "measure")
        self._whole, seen = None, self._seen
        if seen and [part.shape[1:] for part in seen] == [output.shape[1:], target.shape[1:]]:
            output, target = torch.cat([seen[0], output]), torch.cat([seen[1], target])
        self._seen = output[:1].detach(), target[:1]
        self._is_checked = warn_unless_mean(self.loss, output, target)

    def prepare(self, x: Any) -> Any:
        """Check inputs, and bring them to the module's device and type."""
        check_finite(x)
        return cast_inputs(x, self.module, self.device)

    def _run(self, x: Any) -> Any:
        """Pass inputs to the module as they are: by name, by position, or as one."""
        if self.forward is not None:
            return self.forward(x)
        if isinstance(x, Mapping):
            return self.module(**x)
        return self.module(*x) if isinstance(x, tuple | list) else self.module(x)


def _is_one(x: Any) -> bool:
    """Return whether there is one sample; False for inputs without a length."""
    try:
        return count_samples(tuple(x) if isinstance(x, list) else x) == 1
    except AttributeError:  # no array, but an object of the user's own loader
        return False


def layer_names(network: Network) -> list[str]:
    """List the layers with a weight matrix in forward order, by running one batch."""
    with borrowed(network.module), torch.no_grad(), record_order(network.module) as recorder:
        network(next(network.batches()).x)
    if not recorder.order:
        find_layer(network.module, -1, recorder.order)  # raises and says that there is no layer
    return recorder.order


# -- losses of batches ---------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """Outputs and targets of one batch of n samples, for which losses can be computed."""

    output: Tensor
    target: Tensor
    loss: Loss
    weight: Tensor  # (n,)
    weighted: bool

    def each(self) -> tuple[Tensor, Tensor]:
        """Compute each sample's own loss, and its divisor: (n,) each."""
        if self.loss.row is not None:
            return self.loss.terms(self.output, self.target, each=True)
        # an unknown criterion may return nothing but means: give it one sample at a time
        rows = [slice(i, i + 1) for i in range(len(self.output))]
        terms = [self.loss.terms(self.output[row], self.target[row]) for row in rows]
        losses, divisors = zip(*terms, strict=True)
        return torch.cat(losses), torch.cat(divisors)

    def total(self) -> tuple[Tensor, Tensor]:
        """Sum losses and divisors with the sample weights; their ratio is the mean loss."""
        losses, divisors = self.loss.terms(self.output, self.target, each=self.weighted)
        return self.weight @ losses.double(), self.weight @ divisors.detach().double()


def outcome_of(network: Network, batch: Batch, output: Tensor) -> Outcome:
    """Bring the network's output for a batch together with the batch's labels."""
    output = full_precision(network.loss.classes_second(output, batch.y))
    loss = network.loss.to(output.device, output.dtype)
    if batch.y is None:
        raise ValueError("y is needed to compute a loss. Pass y.")
    target = loss.read_target(output, batch.y).values
    network.check_criterion(output, target)
    weight = sample_weight(batch, len(output), output.device)
    return Outcome(output, target, loss, weight, batch.weight is not None)


def outcomes(network: Network) -> Iterator[Outcome]:
    """Run the network on all batches. To be used within `borrowed`."""
    for batch in network.batches():
        yield outcome_of(network, batch, network(batch.x))


def mean_loss(network: Network) -> float:
    """Compute the mean loss over the data, in evaluation mode."""
    total: Any = 0.0
    divisor: Any = 0.0
    with borrowed(network.module), torch.no_grad():
        for outcome in outcomes(network):
            loss, share = outcome.total()
            total, divisor = total + loss, divisor + share
    total_loss, total_share = read_numbers(total, divisor)
    return total_loss / total_share


def sample_weight(batch: Batch, n: int, device: torch.device) -> Tensor:
    """Return the weights of a batch's samples, ones where there are none: (n,)."""
    if batch.weight is None:
        return torch.ones(n, dtype=torch.float64, device=device)
    return batch.weight.to(device)


# -- the best constant prediction ----------------------------------------------------------


def output_shape(network: Network) -> torch.Size:
    """Return the shape of a network's output for one sample, by running one batch."""
    batch = next(iter(network.batches()))
    with borrowed(network.module), torch.no_grad():
        return outcome_of(network, batch, network(batch.x)).output.shape[1:]


# targets as the criterion takes them, and weights of the samples of a batch
Labels = tuple[Tensor, Tensor]


class LossRange(NamedTuple):
    """The mean losses between which a network learns."""

    lowest: float  # that no prediction is below: not 0 if labels are smoothed, or probabilities
    constant: float  # of the best constant prediction


def loss_range(
    network: Network, shape: torch.Size, link: str | None, labels: Iterable[Labels] | None = None
) -> LossRange:
    """Compute the mean losses of the best prediction and of the best constant one on the data."""
    # The labels are read, if they are not given. The network is not run.
    targets, weights = [], []
    for labelled in _read_labels(network, shape) if labels is None else labels:
        target, weight = labelled
        if network.loss.row is not None and target.ndim == 1 and not target.is_floating_point():
            # losses are computed for all classes of a label
            target, positions = torch.unique(target, return_inverse=True)
            weight = weight.new_zeros(len(target)).index_add_(0, positions, weight)
        targets.append(target)
        weights.append(weight)
    if not targets:
        return LossRange(math.nan, math.nan)
    data = network.loss, torch.cat(targets), torch.cat(weights), shape
    return LossRange(lowest_risk(*data), constant_risk(*data, link))


def _read_labels(network: Network, shape: torch.Size) -> Iterator[Labels]:
    """Read the labels of all batches, if there are any."""
    for batch in network.batches():
        if batch.y is None:
            return
        n, device = len(batch.y), batch.y.device
        output = torch.empty((n, *shape), dtype=torch.float64, device=device)
        target = network.loss.read_target(output, batch.y).values
        yield target, sample_weight(batch, n, device)
