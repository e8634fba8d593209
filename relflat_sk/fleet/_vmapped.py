"""Training of many networks at once that are no chains, by `torch.func.vmap` and autograd."""

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from relflat_sk._engine.chain import draw_mask
from relflat_sk._engine.epoch import make_generators, train_epoch
from relflat_sk._engine.job import Epoch, Job, NeedsOwnLoop, Parts
from relflat_sk._engine.step import Step
from relflat_sk._losses.loss import Loss
from relflat_sk._network.batches import cast_inputs
from relflat_sk._network.network import primary_output
from relflat_sk._network.recording import Recorder, find_ending, find_link
from relflat_sk._penalty.penalty import RelativeFlatnessPenalty
from relflat_sk._random import fork_rng
from relflat_sk.fleet._stack import Stack, attributes_of

Tensors = Mapping[str, Tensor]


class VmappedNets:
    """Nets of one architecture that train together, and the `Body` of their steps.

    One network shows on one batch how its nets can be stacked.
    """

    def __init__(self, job: Job) -> None:
        weight = next(job.module.parameters())
        x = cast_inputs(job.inputs[: job.batch_size], job.module, weight.device)
        y = job.targets[: job.batch_size].to(weight.device)
        self._skeleton = _copy(job.module).to("meta").train()
        self._last = ""  # the last layer, if there is a penalty
        with fork_rng(weight.device), torch.enable_grad():
            self._run(job, _copy(job.module).train(), x, y)
        self._in_call: Tensors  # the masks of a net's layers of dropout
        self._features: Tensor  # what the last layer receives in a call
        for name in self._dropped:
            dropout = self._skeleton.get_submodule(name).eval()
            dropout.register_forward_hook(
                lambda part, args, output, name=name: output * self._in_call[name]
            )
        if self._last:
            last = self._skeleton.get_submodule(self._last)
            last.register_forward_hook(lambda *call: setattr(self, "_features", call[1][0]))
        job.prepare(self.n_outputs)

    def _run(self, job: Job, module: nn.Module, x: Tensor, y: Tensor) -> None:
        """Run a copy of a network, and find what a stack needs to know of it."""
        before = attributes_of(Parts(module))
        if job.penalty is not None:
            self._last = _try_penalty(job, module, x, y)
        named = module.named_modules()
        dropouts = {name: part for name, part in named if type(part) is nn.Dropout and part.p}
        calls: list[tuple[str, torch.Size]] = []
        for name, dropout in dropouts.items():
            dropout.register_forward_hook(
                lambda part, args, output, name=name: calls.append((name, output.shape[1:]))
            )
        layers = {self._last: module.get_submodule(self._last)} if self._last else {}
        with Recorder(layers) as recorder:
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
        for name in layers:
            last = recorder[name]
            is_output = find_link(output, last.node) == "identity" and output.ndim == 2
            is_linear = type(last.layer) is nn.Linear and last.check()[0].ndim == 2
            if not (is_output and is_linear):
                raise NeedsOwnLoop("its penalty must be at a Linear that is its output")
        if output.ndim != 2:
            raise NeedsOwnLoop(f"there is no formula for outputs of shape {tuple(output.shape)}")
        self.n_outputs = output.shape[1]
        _refuse_gradients(module, output, job.optimizer)

    def length(self, job: Job) -> int:
        """Return what the epochs of networks that train together have in common."""
        return len(job.order)  # a batch norm would see samples that others lack

    # -- an epoch ------------------------------------------------------------------------------

    def train(self, jobs: Sequence[Job], stack: Stack) -> list[Epoch]:
        """Train nets for an epoch, whose tensors are in a stack."""
        self.weights, self._buffers = stack.weights, stack.buffers
        self._to, self.slopes = stack.gradients, stack.slopes
        self._streams = make_generators(jobs, self.slopes.device) if self._dropped else []
        epochs = train_epoch(Step(self, jobs[0].loss), jobs, stack)
        return [replace(epoch, ending=self._ending) for epoch in epochs]

    # -- passes --------------------------------------------------------------------------------

    def _call(
        self, weights: Tensors, buffers: Tensors, x: Tensor, masks: Tensors
    ) -> tuple[Tensor, Tensor]:
        """Compute a net's output, and what its last layer receives."""
        self._in_call, self._features = masks, x
        output = functional_call(self._skeleton, ({**weights, **buffers},), (x,))
        return primary_output(output), self._features

    def forward(
        self,
        x: Tensor,  # (k, n, ...)
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # (k, n, d), (k, n, m), (k, d, m)
        """Compute outputs, with features and weight of the last layer if there is a penalty."""
        masks = {
            name: draw_mask(self._streams, (x.shape[1], *shape), rate, self.slopes)
            for name, (rate, shape) in self._dropped.items()
        }
        with torch.enable_grad():
            self._leaves = {n: w.detach().requires_grad_() for n, w in self.weights.items()}
            # their graph is held
            self._z, self._phi = vmap(self._call)(self._leaves, self._buffers, x, masks)
        weight = self.weights[f"{self._last}.weight"] if self._last else None
        return self._z.detach(), self._phi.detach(), weight

    def backward(self, z: Tensor, phi: Any = None, weight: Any = None, earlier: Any = None) -> None:
        """Compute the gradients of the weights, see `Body`; keep the graph."""
        pairs = [(self._z, z)] if phi is None else [(self._z, z), (self._phi, phi)]
        pairs = [(tensor, outer) for tensor, outer in pairs if tensor.requires_grad]
        outputs, outers = zip(*pairs, strict=True)
        leaves = list(self._leaves.values())
        gradients = torch.autograd.grad(
            outputs, leaves, outers, retain_graph=True, materialize_grads=True
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


def _try_penalty(job: Job, module: nn.Module, x: Tensor, y: Tensor) -> str:
    """Refuse a network whose penalty a net by itself refuses, or one at other layers than the last.

    Return the name of this layer.
    """
    asked = job.penalty
    assert asked is not None
    penalty = RelativeFlatnessPenalty(asked.layer)
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
    (*others, last), penalised = penalty.plan.layers, penalty.plan.penalised
    if others or penalised != [last]:
        raise NeedsOwnLoop("its penalty is at earlier layers, and it is no chain of layers")
    return last


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
