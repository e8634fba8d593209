"""Training of many networks at once that are no chains, by `torch.func.vmap` and autograd."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from relflat_sk._engine.chain import draw_mask
from relflat_sk._engine.epoch import Member, make_generators, train_epoch
from relflat_sk._engine.qualify import NeedsOwnLoop
from relflat_sk._engine.step import Batch, Settings, Step
from relflat_sk._losses.array_losses import ArrayLoss, find_array_loss
from relflat_sk._losses.loss import Loss, name_criterion, weighted_loss
from relflat_sk._penalty.batch_flatness import changes_of_rows, n_shared, slopes_of_rows
from relflat_sk._random import draw_words, n_words, signs_of
from relflat_sk.fleet._probe import PenaltyLayers, Probe, probe
from relflat_sk.fleet._stack import Stack

Tensors = Mapping[str, Tensor]


class Vmapped:
    """Any network that `torch.func.vmap` takes, many times."""

    def __init__(self, found: Probe) -> None:
        self._skeleton = copy.deepcopy(found.module).to("meta").train()
        layers = found.layers
        self._last = None if layers is None else layers.last
        self._earlier = [] if layers is None else list(layers.earlier)
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
        """Use the weights of a stack, and write gradients to it. Shapes: (k, ...)."""
        self.weights, self._buffers = {**stack.weights, **stack.fixed}, stack.buffers
        self._to = stack.gradients
        self.gradients = list(stack.gradients.values())

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

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute outputs, with features and weight of the last layer where a penalty needs them.

        Their graph is held. Shapes: `x` (k, n, ...); returns z (k, n, ...), phi (k, n, m), weight
        (k, d, m).
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
        for to, gradient in zip(self.gradients, found, strict=True):
            to.copy_(gradient)
        if weight is not None:
            self._to[f"{self._last}.weight"].add_(weight)


class VmappedNets:
    """Nets of one architecture that train together, and how."""

    def __init__(self, member: Member) -> None:
        self._found = found = probe(member)
        self._body = Vmapped(found)
        criterion, target = member.net.criterion_, found.target
        self._loss: ArrayLoss | None = None
        if found.output.ndim == 2:
            self._loss = find_array_loss(criterion, target, found.output.shape[1])
        if found.layers is not None and self._loss is None:
            raise NeedsOwnLoop(
                "with a penalty, its criterion must be MSELoss, BCEWithLogitsLoss without weights, "
                "or CrossEntropyLoss of class indices without weights, with reduction='mean', got "
                f"{name_criterion(criterion)} (reduction={getattr(criterion, 'reduction', None)!r},"
                f" labels of {target.dtype} and shape {tuple(target.shape)})"
            )

    def prepare(self, member: Member) -> None:
        """Check the targets of a net."""
        member.values = member.read_targets(self._found.output)

    def train(self, members: Sequence[Member]) -> None:
        """Train nets for an epoch, and record their batches."""
        stack, body, found = Stack(members, self._found.unused), self._body, self._found
        like = next(iter(stack.weights.values()))
        body.bind(stack)
        streams = make_generators(members, like.device) if found.masks else []
        rates: dict[str, Any] = {name: found.module.get_submodule(name).p for name in found.masks}
        earlier = None
        if found.layers is not None and found.layers.earlier:
            assert self._loss is not None
            earlier = EarlierTerms(body, self._loss, found.layers, members)
        make_step = self._make_step(members[0], earlier)

        def as_arrays(batch: Batch) -> Batch:
            if self._loss is None:
                return batch
            wanted = self._loss.targets(batch.targets, found.output.shape[1], like)
            return batch._replace(targets=wanted)

        def step(batch: Batch, settings: Settings | None) -> tuple[Any, ...]:
            n = batch.shares.shape[1]
            body.masks = {
                name: draw_mask(streams, (n, *shape), rates[name], like)
                for name, shape in found.masks.items()
            }
            return make_step(batch, settings)

        values = [member.values for member in members]
        train_epoch(step, members, values, stack, like, as_arrays)
        if earlier is not None:
            earlier.finish()

    def _make_step(
        self, member: Member, earlier: "EarlierTerms | None"
    ) -> Callable[[Batch, Settings | None], tuple[Any, ...]]:
        """Return a function that makes a step."""
        if self._loss is None:
            return partial(_step_of_any, self._body, member)
        layers = self._found.layers
        at_last = layers is not None and layers.is_penalised
        return Step(self._body, self._loss, at_last=at_last, earlier=earlier)


def _step_of_any(
    body: Vmapped, member: Member, batch: Batch, settings: Settings | None
) -> tuple[Tensor]:
    """Make a step of nets whose criterion is differentiated by torch."""
    criterion = member.net.criterion_
    z = body.forward(batch.inputs)[0].requires_grad_()
    with torch.enable_grad():
        if member.weights is None:
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
        self, body: Vmapped, loss: ArrayLoss, layers: PenaltyLayers, members: Sequence[Member]
    ) -> None:
        self._body, self._loss, self._layers, self._members = body, loss, layers, members
        self._criterion = Loss(members[0].net.criterion_)
        self._n_draws = members[0].net.flatness_probes
        self._generators = [torch.Generator() for _ in members]
        for member, generator in zip(members, self._generators, strict=True):
            generator.set_state(member.random_state)

    def finish(self) -> None:
        """Hand the random states over to the members, as the last step leaves them."""
        for member, generator in zip(self._members, self._generators, strict=True):
            member.random_state = generator.get_state()

    def __call__(self, batch: Batch, factors: Tensor) -> Tensor:
        """Compute the penalties, with their graph. Shapes: `factors` (k,), returns (k,)."""
        with torch.enable_grad():
            draw = (self._slopes if self._layers.is_piecewise_linear else self._forms)(batch)
            draws = [draw(*self._draw_signs(batch)) for _ in range(self._n_draws)]
            return factors * torch.stack(draws).mean(0)

    def _draw_signs(self, batch: Batch) -> list[Tensor]:
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

    def _slopes(self, batch: Batch) -> Callable[..., Tensor]:
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

    def _forms(self, batch: Batch) -> Callable[..., Tensor]:
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
