"""Training of many networks at once that are no chains, by `torch.func.vmap` and autograd."""

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from relflat_sk._engine.chain import draw_mask
from relflat_sk._engine.earlier import Probes, shapes_of_slopes
from relflat_sk._engine.epoch import make_generators, train_epoch
from relflat_sk._engine.job import Epoch, Job, NeedsOwnLoop, Parts
from relflat_sk._engine.step import Settings, Step, StepBatch
from relflat_sk._losses.curvature import ArrayLoss, find_array_loss
from relflat_sk._losses.loss import Loss, name_criterion, weighted_loss
from relflat_sk._losses.many_classes import MANY
from relflat_sk._network.batches import cast_inputs
from relflat_sk._network.borrowing import find_fused
from relflat_sk._network.network import primary_output
from relflat_sk._network.recording import (
    LayerRecord,
    Recorder,
    find_ending,
    find_link,
    is_piecewise_linear,
    keep_graph,
)
from relflat_sk._penalty.batch_flatness import changes_of_rows, n_shared, slopes_of_rows
from relflat_sk._penalty.capture import Plan
from relflat_sk._penalty.penalty import RelativeFlatnessPenalty
from relflat_sk._random import fork_rng
from relflat_sk.fleet._stack import Stack, attributes_of

Tensors = Mapping[str, Tensor]

# layers that run in another way if a penalty differentiates them twice
_OTHERWISE = (nn.MultiheadAttention, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class VmappedNets:
    """Nets of one architecture that train together, and the `Body` of their steps.

    One network shows on one batch how its nets can be stacked.
    """

    def __init__(self, job: Job) -> None:
        weight = next(job.module.parameters())
        x = cast_inputs(job.inputs[: job.batch_size], job.module, weight.device)
        y = job.targets[: job.batch_size].to(weight.device)
        self._skeleton = _copy(job.module).to("meta").train()
        # the last layer if there is a penalty; penalised ones before it, with their numbers of
        # inputs
        self._last, self._at_last, self.earlier = "", False, dict[str, int]()
        with fork_rng(weight.device), torch.enable_grad():
            output = self._run(job, _copy(job.module).train(), x, y)
            target = Loss(job.criterion).read_target(output, y).values
        self._output = output.detach()[:1]
        self._loss = self._find_loss(job, target)
        self._masks: Tensors = {}  # of layers of dropout, in the next step
        # in a call: the inputs of layers, what is added to their outputs, and the masks
        self._in_call: tuple[dict[str, Tensor], Tensors, Tensors]
        for name in self._dropped:
            dropout = self._skeleton.get_submodule(name).eval()
            dropout.register_forward_hook(
                lambda part, args, output, name=name: output * self._in_call[2][name]
            )
        for name in [*self.earlier, *([self._last] if self._last else [])]:
            layer = self._skeleton.get_submodule(name)
            layer.register_forward_hook(partial(self._record, name))
        self.prepare(job)

    def _run(self, job: Job, module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Run a copy of a network, and find what a stack needs to know of it."""
        before = attributes_of(Parts(module))
        plan = None if job.penalty is None else _try_penalty(job, module, x, y)
        named = module.named_modules()
        dropouts = {name: part for name, part in named if type(part) is nn.Dropout and part.p}
        calls: list[tuple[str, torch.Size]] = []
        for name, dropout in dropouts.items():
            dropout.register_forward_hook(
                lambda part, args, output, name=name: calls.append((name, output.shape[1:]))
            )
        with Recorder({} if plan is None else plan.layers, keep_graph) as recorder:
            output = primary_output(module(x))
        if sorted(name for name, _ in calls) != sorted(dropouts):
            raise NeedsOwnLoop("its network does not use each layer of dropout once")
        # the rates of dropout, and the shapes of its masks without the samples
        self._dropped = {name: (dropouts[name].p, shape) for name, shape in calls}
        # one copy runs for all nets; nothing reads what the pass leaves in new attributes
        after = attributes_of(Parts(module))
        for name, value in before.items():
            if after.get(name) != value:
                raise NeedsOwnLoop(f"its network changes its attribute {name} in each pass")
        self._ending = find_ending(output)
        job.check_output(Loss(job.criterion), output)
        if plan is not None:
            self._find_layers(plan, module, recorder, output)
        _refuse_gradients(module, output, job.optimizer)
        return output

    def _find_layers(
        self, plan: Plan, module: nn.Module, recorder: Recorder, output: Tensor
    ) -> None:
        """Find the penalised layers; refuse a network whose penalty is not that of a stack."""
        *others, last = (recorder[name] for name in plan.layers)
        if last.calls > 1:
            raise NeedsOwnLoop("with a penalty, its last layer must be called once")
        is_output = find_link(output, last.node) == "identity" and output.ndim == 2
        if not is_output or not _is_linear(last):
            raise NeedsOwnLoop("with a penalty, its last layer must be a Linear, and its output")
        if others and (
            any(isinstance(part, _OTHERWISE) for part in module.modules()) or find_fused(module)
        ):
            raise NeedsOwnLoop(
                "with a penalty at earlier layers, it must have no convolution, normalisation or "
                "attention"
            )
        if not all(map(_is_linear, others)):
            raise NeedsOwnLoop("a penalised layer must be a Linear, one row per sample")
        if output.shape[1] >= MANY:
            raise NeedsOwnLoop("with a penalty, it has too many classes")
        self._last, self._at_last = last.name, last.name in plan.penalised
        self.earlier = {record.name: record.check()[0].shape[-1] for record in others}
        nodes = [record.node for record in others]
        self.is_piecewise_linear = is_piecewise_linear(output, *nodes)

    def _find_loss(self, job: Job, target: Any) -> ArrayLoss | None:
        """Find the formulas of a criterion, which a penalty needs."""
        criterion, output = job.criterion, self._output
        if output.ndim == 2 and getattr(criterion, "weight", None) is None:
            loss = find_array_loss(criterion, target, output.shape[1])
            if loss is not None:
                return loss
        if self._last:
            reduction = getattr(criterion, "reduction", None)
            raise NeedsOwnLoop(
                f"with a penalty, there is no formula for {name_criterion(criterion)} "
                f"(reduction={reduction!r}, labels of {target.dtype})"
            )
        return None

    # -- an epoch ------------------------------------------------------------------------------

    def prepare(self, job: Job) -> None:
        """Check the targets of a net."""
        job.values = job.read_targets(self._output)

    def train(self, jobs: Sequence[Job], stack: Stack) -> list[Epoch]:
        """Train nets for an epoch, whose tensors are in a stack."""
        self.weights, self._buffers = stack.weights, stack.buffers
        self._to, self.slopes = stack.gradients, stack.slopes
        like = next(iter(stack.weights.values()))
        streams = make_generators(jobs, like.device) if self._dropped else []
        make_step: Any = partial(self._step_of_any, jobs[0])
        earlier, loss = None, self._loss
        if loss is not None:
            earlier = EarlierTerms(self, loss, jobs) if self.earlier else None
            make_step = Step(self, loss, at_last=self._at_last, earlier=earlier)

        def as_arrays(batch: StepBatch) -> StepBatch:
            if loss is None:
                return batch
            targets = loss.targets(batch.targets, self._output.shape[1], like)
            return batch._replace(targets=targets)

        def step(batch: StepBatch, settings: Settings | None) -> tuple[Any, ...]:
            n = batch.shares.shape[1]
            self._masks = {
                name: draw_mask(streams, (n, *shape), rate, like)
                for name, (rate, shape) in self._dropped.items()
            }
            return make_step(batch, settings)  # type: ignore[no-any-return]

        epochs = train_epoch(step, jobs, stack, like, as_arrays)
        if earlier is not None:
            earlier.finish()
        return [replace(epoch, ending=self._ending) for epoch in epochs]

    def _step_of_any(self, job: Job, batch: StepBatch, settings: Settings | None) -> tuple[Tensor]:
        """Make a step of nets whose criterion is differentiated by torch."""
        z = self.forward(batch.inputs)[0].requires_grad_()
        with torch.enable_grad():
            if job.weights is None:
                losses = vmap(job.criterion)(z, batch.targets)
            else:
                weighted = partial(weighted_loss, Loss(job.criterion))
                losses = vmap(weighted)(z, batch.targets, batch.weights)
            (gradient,) = torch.autograd.grad(losses.sum(), z)
        self.backward(gradient)
        return (losses.detach(),)

    # -- passes --------------------------------------------------------------------------------

    def _record(
        self, name: str, module: nn.Module, args: tuple[Any, ...], output: Tensor
    ) -> Tensor | None:
        """Record a layer's input, and add to its output what it is differentiated by."""
        inputs, moves, _ = self._in_call
        inputs[name] = args[0]
        return output + moves[name] if name in moves else None

    def _call(
        self, weights: Tensors, buffers: Tensors, x: Tensor, moves: Tensors, masks: Tensors
    ) -> tuple[Tensor, Tensors]:
        inputs: dict[str, Tensor] = {}
        self._in_call = inputs, moves, masks
        output = functional_call(self._skeleton, ({**weights, **buffers},), (x,))
        return primary_output(output), inputs

    def forward(
        self,
        x: Tensor,  # (k, n, ...)
    ) -> tuple[Tensor, Tensor, Tensor]:  # (k, n, ...), (k, n, m), (k, d, m)
        """Compute outputs, with features and weight of the last layer where a penalty needs them.

        Their graph is held.
        """
        with torch.enable_grad():
            self.leaves = {n: w.detach().requires_grad_() for n, w in self.weights.items()}
            self.moves = {}
            for name in self.earlier:
                weight = self.weights[f"{name}.weight"]
                shape = *x.shape[:2], weight.shape[1]
                self.moves[name] = weight.new_zeros(shape).requires_grad_()
            self.z, self.inputs = vmap(self._call)(
                self.leaves, self._buffers, x, self.moves, self._masks
            )
        if not self._last:
            return self.z.detach(), self.z, self.z
        weight = self.weights[f"{self._last}.weight"]
        return self.z.detach(), self.inputs[self._last].detach(), weight

    def backward(self, z: Tensor, phi: Any = None, weight: Any = None, *others: Any) -> None:
        """Compute the gradients of the weights, see `Body`; keep the graph."""
        pairs = [(self.z, z), *others]
        if phi is not None:
            pairs.append((self.inputs[self._last], phi))
        pairs = [(tensor, outer) for tensor, outer in pairs if tensor.requires_grad]
        gradients = torch.autograd.grad(
            [tensor for tensor, _ in pairs],
            list(self.leaves.values()),
            [outer for _, outer in pairs],
            retain_graph=True,
            materialize_grads=True,
        )
        for to, gradient in zip(self._to.values(), gradients, strict=True):
            to.copy_(gradient)
        if weight is not None:
            self._to[f"{self._last}.weight"].add_(weight)


def _copy(module: nn.Module) -> nn.Module:
    """Copy a network."""
    try:
        return copy.deepcopy(module)
    except RuntimeError as error:
        raise NeedsOwnLoop("torch cannot copy its network") from error


def _try_penalty(job: Job, module: nn.Module, x: Tensor, y: Tensor) -> Plan:
    """Refuse a network whose penalty a net by itself refuses in its first step."""
    asked = job.penalty
    assert asked is not None
    if asked.normalize:
        raise NeedsOwnLoop("flatness_normalize=True is computed for single nets only")
    penalty = RelativeFlatnessPenalty(asked.layer, probes=asked.probes)
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


def _refuse_gradients(module: nn.Module, output: Tensor, optimizer: Any) -> None:
    """Refuse a network in which some gradients are none or rounding errors; free its graph.

    A bias in front of batch normalisation changes nothing in training, but does in evaluation,
    where the running mean lags behind. Adam moves it by its rounding error in full steps, and by
    others in a stack, which rounds in another way.
    """
    names, parameters = zip(*module.named_parameters(), strict=True)
    draws = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    cotangent = draws.to(output) / len(output)
    gradients = torch.autograd.grad(output, parameters, cotangent, allow_unused=True)
    sizes = [-1.0 if gradient is None else float(abs(gradient).max()) for gradient in gradients]
    eps = optimizer.param_groups[0].get("eps", torch.inf)  # what Adam adds to sizes
    rounding = 100 * torch.finfo(output.dtype).eps * max(sizes)
    for name, size in zip(names, sizes, strict=True):
        if size < 0:
            raise NeedsOwnLoop(f"its output does not depend on {name}")
        if eps / 100 < size < rounding:
            raise NeedsOwnLoop(f"{type(optimizer).__name__} amplifies rounding errors of {name}")


# -- the penalty at earlier layers -----------------------------------------------------------


class EarlierTerms:
    """The penalties of nets at linear layers before the last one.

    Each net draws the random signs that it draws if it is trained alone.
    """

    def __init__(self, nets: VmappedNets, loss: ArrayLoss, jobs: Sequence[Job]) -> None:
        self._nets, self._loss, self._criterion = nets, loss, Loss(jobs[0].criterion)
        self._probes = Probes(jobs)
        self.finish = self._probes.finish

    def __call__(self, batch: StepBatch, factors: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the penalties, (k,), without and with their graph."""
        with torch.enable_grad():
            estimate = self._slopes if self._nets.is_piecewise_linear else self._forms
            draws = estimate(batch, [self._draw_signs(batch) for _ in range(self._probes.n_draws)])
            penalties = factors * torch.stack(draws).mean(0)
        return penalties.detach(), penalties

    def _draw_signs(self, batch: StepBatch) -> list[Tensor]:
        """Draw the signs of an estimate."""
        (n, like), widths = (batch.shares.shape[1], batch.shares), self._nets.earlier.values()
        shapes: list[tuple[int, ...]] = [(n, m) for m in widths]
        if self._nets.is_piecewise_linear:
            shapes = shapes_of_slopes(n, self._nets.z.shape[2], widths)
        return self._probes.draw(shapes, like)

    def _layers(self) -> list[tuple[Tensor, Tensor]]:
        """Return the inputs and the weight of each layer."""
        nets = self._nets
        return [(nets.inputs[name], nets.leaves[f"{name}.weight"]) for name in nets.earlier]

    def _slopes(self, batch: StepBatch, signs: list[list[Tensor]]) -> list[Tensor]:
        """Return mean squared slopes along random changes, for a piecewise linear network."""
        z, moves = self._nets.z, list(self._nets.moves.values())
        curvature = self._criterion.closed_form("identity", z.flatten(0, 1), None)
        assert curvature is not None
        roots = batch.shares.sqrt()[..., None]
        draws = []
        for of_outputs, *shared in signs:
            cotangent = curvature.root_product((of_outputs * roots).flatten(0, 1)).view_as(z)
            gradients = torch.autograd.grad(z, moves, cotangent, create_graph=True)
            squares = []
            for (features, weight), gradient in zip(self._layers(), gradients, strict=True):
                of_layer = shared.pop(0) if n_shared(weight.shape[2]) else None
                slopes = slopes_of_rows(gradient, features, weight, of_layer)
                squares.append(slopes.square().sum(dim=(1, 2)))
            draws.append(torch.stack(squares).sum(0))
        return draws

    def _forms(self, batch: StepBatch, signs: list[list[Tensor]]) -> list[Tensor]:
        """Return mean forms of the Hessian along random changes, for any other network."""
        z, moves = self._nets.z, list(self._nets.moves.values())
        losses = self._loss.each(z, batch.targets)[0].sum() * self._loss.divisor(z.shape[2])
        gradients = torch.autograd.grad(losses, moves, create_graph=True)
        draws = []
        for of_layers in signs:
            changes = [
                changes_of_rows(of_layer, features, weight)
                for of_layer, (features, weight) in zip(of_layers, self._layers(), strict=True)
            ]
            products = torch.autograd.grad(gradients, moves, changes, create_graph=True)
            forms = [
                (product * change * batch.shares[..., None]).sum(dim=(1, 2))
                for product, change in zip(products, changes, strict=True)
            ]
            draws.append(torch.stack(forms).sum(0))
        return draws
