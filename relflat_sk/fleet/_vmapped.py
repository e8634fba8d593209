"""Training of many networks at once that are no chains, by `torch.func.vmap` and autograd."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from relflat_sk._engine import (
    Batch,
    Member,
    Settings,
    Step,
    cut_batches,
    draw_mask,
    limited,
    make_generators,
    record_epoch,
    settings_of,
)
from relflat_sk._losses import Loss, find_array_loss, weighted_loss
from relflat_sk._penalty import n_shared
from relflat_sk._random import draw_words, n_words, signs_of
from relflat_sk.fleet._probe import Probe, probe
from relflat_sk.fleet._stack import Stack

Tensors = Mapping[str, Tensor]


class _Masked(nn.Module):
    """Dropout with a mask that is given."""

    mask: Tensor

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.register_buffer("mask", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask if self.training else x


class Vmapped:
    """Any network that `torch.func.vmap` takes, many times.

    `last` and `earlier` name the layers whose inputs and outputs a penalty needs.
    """

    def __init__(self, module: nn.Module, last: str | None, earlier: Sequence[str] = ()) -> None:
        self._skeleton = copy.deepcopy(module).to("meta").train()
        self.dropout: dict[str, _Masked] = {}
        for name, part in list(self._skeleton.named_modules()):
            if type(part) is nn.Dropout and part.p:
                self.dropout[name] = masked = _Masked(part.p)
                self._skeleton.set_submodule(name, masked)
        self.last, self.earlier = last, list(earlier)
        self._inputs: dict[str, Tensor] = {}
        self._moves: Tensors = {}
        for name in {*self.earlier, *([last] if last else [])}:
            layer = self._skeleton.get_submodule(name)
            layer.register_forward_hook(partial(self._record, name))

    def _record(
        self, name: str, module: nn.Module, args: tuple[Any, ...], output: Tensor
    ) -> Tensor | None:
        """Record a layer's input, and add to its output what it is differentiated by."""
        self._inputs[name] = args[0]
        return output + self._moves[name] if name in self._moves else None

    def bind(self, weights: Tensors, gradients: Tensors, buffers: Tensors) -> None:
        """Use the weights of a stack, and write gradients to it. Shapes: (k, ...)."""
        self.weights, self._buffers = weights, buffers
        self._to = gradients
        self.gradients = list(gradients.values())

    def set_masks(self, masks: Tensors) -> None:
        """Use masks of dropout in the next step."""
        self._buffers = {**self._buffers, **masks}

    def _call(
        self, weights: Tensors, buffers: Tensors, x: Tensor, moves: Tensors
    ) -> tuple[Tensor, Tensors]:
        self._moves = moves
        try:
            output = functional_call(self._skeleton, ({**weights, **buffers},), (x,))
            if not isinstance(output, Tensor):
                raise TypeError(f"its network returns a {type(output).__name__}")
            return output, dict(self._inputs)
        finally:
            self._moves, self._inputs = {}, {}

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
            self.moves = {
                name: x.new_zeros(
                    *x.shape[:2],
                    self.weights[f"{name}.weight"].shape[1],
                    dtype=self.weights[f"{name}.weight"].dtype,
                    requires_grad=True,
                )
                for name in self.earlier
            }
            self.z, self.inputs = vmap(self._call)(self.leaves, self._buffers, x, self.moves)
        if self.last is None:
            return self.z.detach(), self.z, self.z
        return self.z.detach(), self.inputs[self.last].detach(), self.weights[f"{self.last}.weight"]

    def backward(self, z: Tensor, phi: Any = None, weight: Any = None) -> None:
        """Compute the gradients of the weights, given that in the output.

        `phi` and `weight` are added to the gradients in features and weight of the last layer.
        """
        self.pull([(self.z, z), *([] if phi is None else [(self.inputs[str(self.last)], phi)])])
        if weight is not None:
            self._to[f"{self.last}.weight"].add_(weight)

    def pull(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Compute the gradients of the weights from those in some tensors; keep the graph."""
        pairs = [(tensor, outer) for tensor, outer in pairs if tensor.requires_grad]
        leaves = [self.leaves[name] for name in self._to]
        found = torch.autograd.grad(
            [tensor for tensor, _ in pairs],
            leaves,
            [outer for _, outer in pairs],
            retain_graph=True,
            materialize_grads=True,
        )
        for to, gradient in zip(self.gradients, found, strict=True):
            to.copy_(gradient)


class VmappedNets:
    """Nets of one architecture that train together, and how."""

    def __init__(self, member: Member) -> None:
        self._found = found = probe(member)
        self._body = Vmapped(found.module, found.last, list(found.earlier))
        criterion = member.net.criterion_
        self._loss = None
        if found.output.ndim == 2:
            self._loss = find_array_loss(criterion, found.target, found.output.shape[1])
        if found.last is not None and self._loss is None:
            raise found.refuse_criterion(criterion)

    def read_targets(self, member: Member) -> None:
        """Check the targets of a net."""
        member.values = member.read_targets(self._found.output)

    def train(self, members: Sequence[Member]) -> None:
        """Train nets for an epoch, and record their batches."""
        stack, body, found = Stack(members, self._found.unused), self._body, self._found
        like = next(iter(stack.weights.values()))
        body.bind({**stack.weights, **stack.fixed}, stack.gradients, stack.buffers)
        settings = settings_of([member.net for member in members], like)
        step = self._step(members)
        masks = [] if not body.dropout else make_generators(members, like.device)
        recorded = []

        def as_arrays(batch: Batch) -> Batch:
            if self._loss is None:
                return batch
            d = found.output.shape[1]
            return batch._replace(targets=self._loss.targets(batch.targets, d, like))

        with torch.no_grad():
            values = [member.values for member in members]
            for batch in cut_batches(members, values, like, as_arrays):
                body.set_masks({
                    f"{name}.mask": draw_mask(
                        masks, (batch.shares.shape[1], *found.masks[name]), part.rate, like
                    )
                    for name, part in body.dropout.items()
                })
                recorded.append(step(batch, settings))
                stack.step()
        if isinstance(step, EarlierStep):
            step.finish()
        if settings is not None:
            settings.finish(member.net for member in members)
        stack.hand_over()
        record_epoch(members, recorded)

    def _step(self, members: Sequence[Member]) -> Callable[[Batch, Settings | None], Any]:
        if self._found.earlier:
            return EarlierStep(self._body, self._loss, self._found, members)
        if self._loss is not None:
            return Step(self._body, self._loss)
        return partial(_step_of_any, self._body, members[0])


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


class EarlierStep:
    """Steps with a penalty at linear layers before the last one, see `_penalty.random_changes`.

    Each net draws the random signs that it draws if it is trained alone.
    """

    def __init__(self, body: Vmapped, loss: Any, found: Probe, members: Sequence[Member]) -> None:
        self._body, self._loss, self._found = body, loss, found
        self._criterion = Loss(members[0].net.criterion_)
        self._n_draws = members[0].net.flatness_probes
        self._members = members
        self._generators = [torch.Generator() for _ in members]
        for member, generator in zip(members, self._generators, strict=True):
            generator.set_state(member.random_state)

    def finish(self) -> None:
        """Hand the random states over to the members, as the last step leaves them."""
        for member, generator in zip(self._members, self._generators, strict=True):
            member.random_state = generator.get_state()

    def __call__(self, batch: Batch, settings: Settings | None) -> tuple[Any, ...]:
        """Write the gradients of a batch; return losses, penalties and shares of them."""
        assert settings is not None
        body = self._body
        z, phi, weight = body.forward(batch.inputs)
        loss, of_z, p = self._loss.slopes(z, batch.targets, batch.shares)
        scale = settings.factors / self._loss.divisor(z.shape[-1])
        with torch.enable_grad():
            draw = (self._slopes if self._found.is_piecewise_linear else self._forms)(batch)
            draws = [draw(*self._signs(batch)) for _ in range(self._n_draws)]
            value = scale * torch.stack(draws).mean(0)
        total, term = value.detach(), None
        if self._found.at_last:
            exact = batch.shares * (scale / (2 * phi.shape[-1]))[:, None]
            term = self._loss.trace_term(p, phi, weight, exact[..., None])
            total = total + term.value

        def differentiate(of_loss: float, of_penalty: Tensor) -> None:
            each = of_penalty[:, None, None]
            if term is None:
                body.pull([(body.z, of_loss * of_z), (value, of_penalty)])
                return
            pairs = [
                (body.z, of_loss * of_z + each * term.z),
                (value, of_penalty),
                (body.inputs[str(body.last)], each * term.of_phi * phi),
                (body.leaves[f"{body.last}.weight"], each * term.weight),
            ]
            body.pull(pairs)

        gain = self._loss.gain(loss, z, batch.targets, batch.shares)
        share = limited(settings.limit, body.gradients, differentiate, gain, total)
        return loss, total, share

    def _signs(self, batch: Batch) -> list[Tensor]:
        """Draw the signs of a draw."""
        n, like = batch.shares.shape[1], batch.shares
        if self._found.is_piecewise_linear:
            shared = [(n_shared(m), m) for m in self._found.earlier.values() if n_shared(m)]
            shapes = [(n, self._found.output.shape[1]), *shared]
        else:
            shapes = [(n, m) for m in self._found.earlier.values()]
        counts = [n_words(shape) for shape in shapes]
        words = torch.stack([
            draw_words(sum(counts), torch.device("cpu"), one) for one in self._generators
        ]).to(like.device)
        parts = torch.split(words, counts, 1)
        return [signs_of(part, one, like) for part, one in zip(parts, shapes, strict=True)]

    def _layers(self) -> Iterator[tuple[Tensor, Tensor, Tensor, int]]:
        """Yield what moves the output of each layer, norms of its inputs, weight and width."""
        for name, m in self._found.earlier.items():
            norms = torch.linalg.vector_norm(self._body.inputs[name], dim=2, keepdim=True)
            yield self._body.moves[name], norms, self._body.leaves[f"{name}.weight"], m

    def _slopes(self, batch: Batch) -> Callable[..., Tensor]:
        """Return the mean squared slopes along random changes, for a piecewise linear network."""
        z, layers = self._body.z, list(self._layers())
        curvature = self._criterion.closed_form("identity", z.flatten(0, 1), None)
        assert curvature is not None
        roots = batch.shares.sqrt()[..., None]

        def draw(of_outputs: Tensor, *shared: Tensor) -> Tensor:
            cotangent = curvature.root_product((of_outputs * roots).flatten(0, 1)).view_as(z)
            moves = [move for move, *_ in layers]
            gradients = torch.autograd.grad(z, moves, cotangent, create_graph=True)
            vectors, squares = iter(shared), []
            for (_, norms, weight, m), gradient in zip(layers, gradients, strict=True):
                n = n_shared(m)
                columns = weight @ next(vectors).transpose(1, 2) if n else weight
                slopes = (gradient * (norms * (2 * m * max(1, n)) ** -0.5)) @ columns
                squares.append(slopes.square().sum(dim=(1, 2)))
            return torch.stack(squares).sum(0)

        return draw

    def _forms(self, batch: Batch) -> Callable[..., Tensor]:
        """Return the mean forms of the Hessian along random changes, for any other network."""
        layers = list(self._layers())
        moves = [move for move, *_ in layers]
        divisor = self._loss.divisor(self._body.z.shape[-1])
        losses = self._loss.each(self._body.z, batch.targets)[0].sum() * divisor
        gradients = torch.autograd.grad(losses, moves, create_graph=True)

        def draw(*signs: Tensor) -> Tensor:
            changes = [
                (one @ weight.transpose(1, 2)) * (norms * (2 * m) ** -0.5)
                for one, (_, norms, weight, m) in zip(signs, layers, strict=True)
            ]
            products = torch.autograd.grad(gradients, moves, changes, create_graph=True)
            forms = [
                (product * change * batch.shares[..., None]).sum(dim=(1, 2))
                for product, change in zip(products, changes, strict=True)
            ]
            return torch.stack(forms).sum(0)

        return draw
