"""Training of many networks at once that are no chains, by `torch.func.vmap` and autograd."""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pickle import PicklingError
from typing import Any

import joblib
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from relflat_sk._engine.chain import draw_mask
from relflat_sk._engine.epoch import make_generators, train_epoch
from relflat_sk._engine.job import Epoch, Job, NeedsOwnLoop
from relflat_sk._engine.step import Settings, Step, StepBatch
from relflat_sk._losses.array_losses import ArrayLoss, find_array_loss
from relflat_sk._losses.loss import Loss, explain_ending, name_criterion, weighted_loss
from relflat_sk._losses.many_classes import MANY
from relflat_sk._network.batches import cast_inputs
from relflat_sk._network.borrowing import find_fused
from relflat_sk._network.network import primary_output
from relflat_sk._network.recording import LayerRecord, Recorder, keep_graph
from relflat_sk._network.tail import find_ending, find_link, is_piecewise_linear
from relflat_sk._penalty.batch_flatness import changes_of_rows, n_shared, slopes_of_rows
from relflat_sk._penalty.capture import Plan
from relflat_sk._penalty.penalty import RelativeFlatnessPenalty
from relflat_sk._random import draw_words, fork_rng, n_words, signs_of
from relflat_sk.fleet._stack import OF_TORCH, Stack

Tensors = Mapping[str, Tensor]

# -- what one network shows on one batch of how its nets can be stacked ----------------


# layers that run in another way if a penalty differentiates them twice
_OTHERWISE = (nn.MultiheadAttention, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# the part of a step of Adam by which rounding errors may change it
_ROUNDING = 0.01


@dataclass(frozen=True)
class PenaltyLayers:
    """The layers that a penalty needs; those before the last one with the number of their inputs.

    `is_penalised` tells whether the last one is penalised as well. Without a penalty, there are
    none.
    """

    last: str | None = None
    is_penalised: bool = False
    earlier: Mapping[str, int] = field(default_factory=dict)
    is_piecewise_linear: bool = True


@dataclass(frozen=True)
class Probe:
    """A network in training mode, and what its outputs on a batch show of it.

    `masks` has the shapes of the masks of dropout, without the samples.
    """

    module: nn.Module
    output: Tensor
    target: Tensor
    unused: Set[str]
    masks: Mapping[str, tuple[int, ...]]
    layers: PenaltyLayers
    ending: str | None


def probe(job: Job) -> Probe:
    """Run a network, and check that its penalty can be computed for many networks at once."""
    weight = next(job.module.parameters())
    x = cast_inputs(job.inputs[: job.batch_size], job.module, weight.device)
    y = job.targets[: job.batch_size].to(weight.device)
    module, loss = _copy(job.module).train(), Loss(job.criterion)
    with fork_rng(weight.device), torch.enable_grad():
        ran = _copy(module)
        masks = _find_masks(ran, x)
        _check_state(module, ran)
        # a network may hold results of its forward pass, and torch cannot copy it then
        tried, layers = _copy(module), PenaltyLayers()
        if job.penalty is not None:
            layers = _find_layers(job, tried, x, y)
        output = primary_output(tried(x))
        ending = find_ending(output)
        problem = explain_ending(loss.criterion, ending)
        if problem is not None:
            raise NeedsOwnLoop(problem)  # its own fit raises the error
        job.check_output(loss, output)
        target = loss.read_target(output, y).values
        _check_rounding(module, tried, output, job.optimizer)
        unused = _find_unused(tried, output)
    return Probe(module, output.detach()[:1], target, unused, masks, layers, ending)


def _copy(module: nn.Module) -> nn.Module:
    """Copy a network."""
    try:
        return copy.deepcopy(module)
    except RuntimeError as error:
        raise NeedsOwnLoop("torch cannot copy its network") from error


def _find_masks(module: nn.Module, x: Tensor) -> dict[str, tuple[int, ...]]:
    """Find the shapes of the outputs of layers of dropout, without the samples."""
    found: dict[str, list[tuple[int, ...]]] = {
        name: [] for name, part in module.named_modules() if type(part) is nn.Dropout and part.p
    }
    for name, shapes in found.items():
        module.get_submodule(name).register_forward_hook(
            lambda part, args, output, shapes=shapes: shapes.append(tuple(output.shape[1:]))
        )
    with torch.no_grad():
        module(x)
    if any(len(shapes) != 1 for shapes in found.values()):
        raise NeedsOwnLoop("its network does not use each layer of dropout once")
    return {name: shapes[0] for name, shapes in found.items()}


def _check_state(module: nn.Module, ran: nn.Module) -> None:
    """Refuse a network whose forward pass changes what it holds in Python, such as a counter.

    A stack runs one copy for all its nets. Results that the pass leaves in new attributes are
    harmless, for nothing reads them.
    """
    for name, part in module.named_modules():
        after = vars(ran.get_submodule(name))
        for key in vars(part).keys() - OF_TORCH:
            value = vars(part)[key]
            if value is not None and not _is_same(value, after.get(key)):
                where = f"{name}.{key}" if name else key
                raise NeedsOwnLoop(f"its network changes its attribute {where} in each pass")


def _is_same(value: Any, other: Any) -> bool:
    """Return whether a value equals its copy, which holds no tensors but plain ones."""
    if isinstance(value, Tensor):
        return isinstance(other, Tensor) and torch.equal(value, other)
    with suppress(AttributeError, PicklingError, TypeError):  # what cannot be pickled may change
        return value is other or bool(joblib.hash(value) == joblib.hash(other))
    return False


def _check_rounding(module: nn.Module, ran: nn.Module, output: Tensor, optimizer: Any) -> None:
    """Refuse a network with parameters whose gradients are rounding errors that Adam amplifies.

    A bias in front of batch normalisation changes nothing in training, but does in evaluation,
    where the running mean lags behind. Adam moves it by full steps, and a stack, which rounds in
    another way, by other ones.
    """
    eps = optimizer.param_groups[0].get("eps")  # by which sizes are divided
    is_same = all(map(torch.equal, module.buffers(), ran.buffers()))
    if eps is None or is_same or not output.requires_grad:
        return
    draws = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    cotangent = draws.to(output) / len(output)
    steps = []
    for factor in (1, 3):  # so that the second rounds in another way
        found = torch.autograd.grad(
            output, list(ran.parameters()), cotangent / factor, retain_graph=True, allow_unused=True
        )
        sizes = [0.0 if one is None else factor * one for one in found]
        steps.append([one / (abs(one) + eps) for one in sizes])
    for (name, _), one, other in zip(ran.named_parameters(), *steps, strict=True):
        if torch.as_tensor(one - other).square().mean() > _ROUNDING**2:
            raise NeedsOwnLoop(f"{type(optimizer).__name__} amplifies rounding errors of {name}")


def _find_unused(module: nn.Module, output: Tensor) -> set[str]:
    """Return the parameters that an output does not depend on; the output's graph is freed."""
    if not output.requires_grad:
        raise NeedsOwnLoop("its output depends on no parameter")  # its own fit raises the error
    names, parameters = zip(*module.named_parameters(), strict=True)
    found = torch.autograd.grad(output.sum(), parameters, allow_unused=True)
    return {name for name, gradient in zip(names, found, strict=True) if gradient is None}


# -- the layers of a penalty -----------------------------------------------------------------


def _find_layers(job: Job, module: nn.Module, x: Tensor, y: Tensor) -> PenaltyLayers:
    """Find the penalised layers; refuse a network whose penalty is not that of a stack."""
    if job.penalty is not None and job.penalty.normalize:
        raise NeedsOwnLoop("flatness_normalize=True is computed for single nets only")
    plan = _try_penalty(job, module, x, y)
    with Recorder(plan.layers, keep_graph) as recorder:
        output = primary_output(module(x))
    *others, last = (recorder[name] for name in plan.layers)
    if last.calls > 1:
        raise NeedsOwnLoop("with a penalty, its last layer must be called once")
    if find_link(output, last.node) != "identity":
        raise NeedsOwnLoop("with a penalty, its last layer must be its output")
    if output.ndim != 2 or not _is_linear(last):
        raise NeedsOwnLoop("with a penalty, its last layer must be a Linear, one row per sample")
    parts = list(module.modules())
    if others and (any(isinstance(part, _OTHERWISE) for part in parts) or find_fused(module)):
        raise NeedsOwnLoop(
            "with a penalty at earlier layers, it must have no convolution, normalisation or "
            "attention"
        )
    if not all(map(_is_linear, others)):
        raise NeedsOwnLoop("a penalised layer must be a Linear, one row per sample")
    if output.shape[1] >= MANY:
        raise NeedsOwnLoop("with a penalty, it has too many classes")
    return PenaltyLayers(
        last.name,
        last.name in plan.penalised,
        {record.name: record.check()[0].shape[-1] for record in others},
        is_piecewise_linear(output, *(record.node for record in others)),
    )


def _try_penalty(job: Job, module: nn.Module, x: Tensor, y: Tensor) -> Plan:
    """Refuse a network whose penalty a net by itself refuses in its first step."""
    given = job.penalty
    assert given is not None
    penalty = RelativeFlatnessPenalty(given.layer, given.normalize, given.probes)
    weights = None
    if job.weights is not None:
        weights = torch.ones(len(x), dtype=torch.float64, device=x.device)
    try:
        with warnings.catch_warnings():  # its own fit warns and raises
            warnings.simplefilter("ignore")
            with penalty.capture(module):
                output = primary_output(module(x))
            penalty(job.criterion, output, y, weights)
    except ValueError as error:
        raise NeedsOwnLoop(f"with a penalty, {error}") from error
    return penalty.plan


def _is_linear(record: LayerRecord) -> bool:
    """Return whether a layer maps one row of each sample."""
    return type(record.layer) is nn.Linear and record.check()[0].ndim == 2


# -- many networks in one call --------------------------------------------------------


class Vmapped:
    """Any network that `torch.func.vmap` takes, many times."""

    def __init__(self, found: Probe) -> None:
        self._skeleton = copy.deepcopy(found.module).to("meta").train()
        self._last, self._earlier = found.layers.last, list(found.layers.earlier)
        self.masks: Tensors = {}  # of layers of dropout, in the next step
        # in a call: the inputs of layers, what is added to their outputs, and the masks
        self._inputs: dict[str, Tensor] = {}
        self._moves: Tensors = {}
        self._of_call: Tensors = {}
        for name in found.masks:
            dropout = self._skeleton.get_submodule(name).eval()
            dropout.register_forward_hook(partial(self._drop, name))
        for name in [*self._earlier, *([self._last] if self._last else [])]:
            layer = self._skeleton.get_submodule(name)
            layer.register_forward_hook(partial(self._record, name))

    def _drop(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Apply a mask that is given."""
        return output * self._of_call[name]

    def _record(
        self, name: str, module: nn.Module, args: tuple[Any, ...], output: Tensor
    ) -> Tensor | None:
        """Record a layer's input, and add to its output what it is differentiated by."""
        self._inputs[name] = args[0]
        return output + self._moves[name] if name in self._moves else None

    def bind(self, stack: Stack) -> None:
        """Use the weights of a stack, and write gradients to it."""
        self.weights, self._buffers = {**stack.weights, **stack.fixed}, stack.buffers
        self._to, self.slopes = stack.gradients, stack.slopes

    def _call(
        self, weights: Tensors, buffers: Tensors, x: Tensor, moves: Tensors, masks: Tensors
    ) -> tuple[Tensor, Tensors]:
        self._moves, self._of_call = moves, masks
        try:
            output = functional_call(self._skeleton, ({**weights, **buffers},), (x,))
            if not isinstance(output, Tensor):
                raise TypeError(f"its network returns a {type(output).__name__}")
            return output, dict(self._inputs)
        finally:
            self._moves, self._of_call, self._inputs = {}, {}, {}

    def forward(
        self,
        x: Tensor,  # (k, n, ...)
    ) -> tuple[Tensor, Tensor, Tensor]:  # (k, n, ...), (k, n, m), (k, d, m)
        """Compute outputs, with features and weight of the last layer where a penalty needs them.

        Their graph is held.
        """
        with torch.enable_grad():
            self.leaves = {
                name: w.detach().requires_grad_(name in self._to)
                for name, w in self.weights.items()
            }
            self.moves = {}
            for name in self._earlier:
                weight = self.weights[f"{name}.weight"]
                shape = *x.shape[:2], weight.shape[1]
                self.moves[name] = weight.new_zeros(shape).requires_grad_()
            self.z, self.inputs = vmap(self._call)(
                self.leaves, self._buffers, x, self.moves, self.masks
            )
        if self._last is None:
            return self.z.detach(), self.z, self.z
        weight = self.weights[f"{self._last}.weight"]
        return self.z.detach(), self.inputs[self._last].detach(), weight

    def backward(self, z: Tensor, phi: Any = None, weight: Any = None, *others: Any) -> None:
        """Compute the gradients of the weights, see `Body`; keep the graph."""
        pairs = [(self.z, z), *others]
        if phi is not None:
            pairs.append((self.inputs[str(self._last)], phi))
        pairs = [(tensor, outer) for tensor, outer in pairs if tensor.requires_grad]
        found = torch.autograd.grad(
            [tensor for tensor, _ in pairs],
            [self.leaves[name] for name in self._to],
            [outer for _, outer in pairs],
            retain_graph=True,
            materialize_grads=True,
        )
        for to, gradient in zip(self._to.values(), found, strict=True):
            to.copy_(gradient)
        if weight is not None:
            self._to[f"{self._last}.weight"].add_(weight)


class VmappedNets:
    """Nets of one architecture that train together, and how."""

    def __init__(self, job: Job) -> None:
        self._found = found = probe(job)
        self._body = Vmapped(found)
        criterion, target = job.criterion, found.target
        self._loss: ArrayLoss | None = None
        if found.output.ndim == 2 and getattr(criterion, "weight", None) is None:
            self._loss = find_array_loss(criterion, target, found.output.shape[1])
        if found.layers.last is not None and self._loss is None:
            raise NeedsOwnLoop(
                "with a penalty, its criterion must be MSELoss, BCEWithLogitsLoss without weights, "
                "or CrossEntropyLoss of class indices without weights, with reduction='mean', got "
                f"{name_criterion(criterion)} (reduction={getattr(criterion, 'reduction', None)!r},"
                f" labels of {target.dtype} and shape {tuple(target.shape)})"
            )

    def prepare(self, job: Job) -> None:
        """Check the targets of a net."""
        job.values = job.read_targets(self._found.output)

    def train(self, jobs: Sequence[Job]) -> list[Epoch]:
        """Train nets for an epoch."""
        stack, body, found = Stack(jobs, self._found.unused), self._body, self._found
        like = next(iter(stack.weights.values()))
        body.bind(stack)
        streams = make_generators(jobs, like.device) if found.masks else []
        rates: dict[str, Any] = {name: found.module.get_submodule(name).p for name in found.masks}
        earlier = None
        if found.layers.earlier:
            assert self._loss is not None
            earlier = EarlierTerms(body, self._loss, found.layers, jobs)
        make_step = self._make_step(jobs[0], earlier)

        def as_arrays(batch: StepBatch) -> StepBatch:
            if self._loss is None:
                return batch
            wanted = self._loss.targets(batch.targets, found.output.shape[1], like)
            return batch._replace(targets=wanted)

        def step(batch: StepBatch, settings: Settings | None) -> tuple[Any, ...]:
            n = batch.shares.shape[1]
            body.masks = {
                name: draw_mask(streams, (n, *shape), rates[name], like)
                for name, shape in found.masks.items()
            }
            return make_step(batch, settings)

        values = [job.values for job in jobs]
        epochs = train_epoch(step, jobs, values, stack, like, as_arrays)
        if earlier is not None:
            earlier.finish()
        return [replace(epoch, has_ending=True, ending=found.ending) for epoch in epochs]

    def _make_step(
        self, job: Job, earlier: "EarlierTerms | None"
    ) -> Callable[[StepBatch, Settings | None], tuple[Any, ...]]:
        """Return a function that makes a step."""
        if self._loss is None:
            return partial(_step_of_any, self._body, job)
        at_last = self._found.layers.is_penalised
        return Step(self._body, self._loss, at_last=at_last, earlier=earlier)


def _step_of_any(
    body: Vmapped, job: Job, batch: StepBatch, settings: Settings | None
) -> tuple[Tensor]:
    """Make a step of nets whose criterion is differentiated by torch."""
    criterion = job.criterion
    z = body.forward(batch.inputs)[0].requires_grad_()
    with torch.enable_grad():
        if job.weights is None:
            losses = vmap(criterion)(z, batch.targets)
        else:
            weighted = partial(weighted_loss, Loss(criterion))
            losses = vmap(weighted)(z, batch.targets, batch.weights)
        (gradient,) = torch.autograd.grad(losses.sum(), z)
    body.backward(gradient)
    return (losses.detach(),)


# -- the penalty at earlier layers -----------------------------------------------------------


class EarlierTerms:
    """The penalties of nets at linear layers before the last one.

    Each net draws the random signs that it draws if it is trained alone.
    """

    def __init__(
        self, body: Vmapped, loss: ArrayLoss, layers: PenaltyLayers, jobs: Sequence[Job]
    ) -> None:
        self._body, self._loss, self._layers, self._jobs = body, loss, layers, jobs
        self._criterion = Loss(jobs[0].criterion)
        self._n_draws = jobs[0].penalty.probes if jobs[0].penalty else 0
        self._generators = [torch.Generator() for _ in jobs]
        for job, generator in zip(jobs, self._generators, strict=True):
            generator.set_state(job.random_state)

    def finish(self) -> None:
        """Hand the random states over to the jobs, as the last step leaves them."""
        for job, generator in zip(self._jobs, self._generators, strict=True):
            job.random_state = generator.get_state()

    def __call__(self, batch: StepBatch, factors: Tensor) -> Tensor:
        """Compute the penalties, with their graph: (k,)."""
        with torch.enable_grad():
            draw = (self._slopes if self._layers.is_piecewise_linear else self._forms)(batch)
            draws = [draw(*self._draw_signs(batch)) for _ in range(self._n_draws)]
            return factors * torch.stack(draws).mean(0)

    def _draw_signs(self, batch: StepBatch) -> list[Tensor]:
        """Draw the signs of an estimate."""
        (n, like), widths = (batch.shares.shape[1], batch.shares), self._layers.earlier.values()
        if self._layers.is_piecewise_linear:
            shared = [(n_shared(m), m) for m in widths if n_shared(m)]
            shapes = [(n, self._body.z.shape[2]), *shared]
        else:
            shapes = [(n, m) for m in widths]
        counts = [n_words(shape) for shape in shapes]
        words = torch.stack([
            draw_words(sum(counts), torch.device("cpu"), one) for one in self._generators
        ]).to(like.device)
        parts = torch.split(words, counts, 1)
        return [signs_of(part, one, like) for part, one in zip(parts, shapes, strict=True)]

    def _rows(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the inputs and the weight of each layer."""
        for name in self._layers.earlier:
            yield self._body.inputs[name], self._body.leaves[f"{name}.weight"]

    def _slopes(self, batch: StepBatch) -> Callable[..., Tensor]:
        """Return the mean squared slopes along random changes, for a piecewise linear network."""
        z, moves, rows = self._body.z, list(self._body.moves.values()), list(self._rows())
        curvature = self._criterion.closed_form("identity", z.flatten(0, 1), None)
        assert curvature is not None
        roots = batch.shares.sqrt()[..., None]

        def draw(of_outputs: Tensor, *shared: Tensor) -> Tensor:
            cotangent = curvature.root_product((of_outputs * roots).flatten(0, 1)).view_as(z)
            gradients = torch.autograd.grad(z, moves, cotangent, create_graph=True)
            signs, squares = iter(shared), []
            for (features, weight), gradient in zip(rows, gradients, strict=True):
                own = next(signs) if n_shared(weight.shape[2]) else None
                slopes = slopes_of_rows(gradient, features, weight, own)
                squares.append(slopes.square().sum(dim=(1, 2)))
            return torch.stack(squares).sum(0)

        return draw

    def _forms(self, batch: StepBatch) -> Callable[..., Tensor]:
        """Return the mean forms of the Hessian along random changes, for any other network."""
        z, moves, rows = self._body.z, list(self._body.moves.values()), list(self._rows())
        losses = self._loss.each(z, batch.targets)[0].sum() * self._loss.divisor(z.shape[2])
        gradients = torch.autograd.grad(losses, moves, create_graph=True)

        def draw(*signs: Tensor) -> Tensor:
            changes = [changes_of_rows(one, *two) for one, two in zip(signs, rows, strict=True)]
            products = torch.autograd.grad(gradients, moves, changes, create_graph=True)
            forms = [
                (product * change * batch.shares[..., None]).sum(dim=(1, 2))
                for product, change in zip(products, changes, strict=True)
            ]
            return torch.stack(forms).sum(0)

        return draw
