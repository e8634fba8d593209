r"""The penalty at earlier layers, with its limit, for many networks at once.

Where the network is piecewise linear behind these layers, their curvature is known from the
gradients of the outputs, and otherwise from products with the Hessian, see
`relflat_sk._penalty.batch_flatness`. The penalty is differentiated by autograd, once for all
networks. Shapes are those of `relflat_sk.fleet._criterion`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from relflat_sk._penalty import PenaltyLimit, n_shared
from relflat_sk.fleet._chain import Chain
from relflat_sk.fleet._criterion import Criterion
from relflat_sk.fleet._data import Batch
from relflat_sk.fleet._limit import limited_gradients
from relflat_sk.fleet._member import Member
from relflat_sk.fleet._probe import Probe
from relflat_sk.fleet._signs import Signs
from relflat_sk.fleet._trace import Trace, Traced
from relflat_sk.fleet._vmapped import Vmapped

__all__ = ["EarlierPenalty", "make_earlier_penalty"]


class EarlierPenalty(ABC):
    """The penalty at linear layers, with its limit."""

    def __init__(
        self,
        criterion: Criterion,
        divisor: float,
        layers: Mapping[str, int],
        at_last: bool,
        n_outputs: int,
        n_draws: int,
    ) -> None:
        self._criterion = criterion
        self._divisor = divisor
        self._layers = dict(layers)
        self._at_last = at_last
        self._signs = Signs(lambda n: self._shapes(n, n_outputs), n_draws)

    @abstractmethod
    def _shapes(self, n: int, n_outputs: int) -> list[tuple[int, int]]:
        """Return the shapes of the random signs of a draw, for n samples."""

    @abstractmethod
    def _estimator(self, trace: Trace, batch: Batch) -> Callable[..., Tensor]:
        """Return a function from the signs of a draw to the estimates of the means: (k,)."""

    def start(self, members: Sequence[Member], sizes: Sequence[int]) -> None:
        """Begin an epoch."""
        self._signs.start(members, sizes)

    def finish(self) -> None:
        """End an epoch."""
        self._signs.finish()

    def step(
        self,
        body: Chain | Vmapped,
        batch: Batch,
        factors: Tensor,
        limit: PenaltyLimit | None,
    ) -> Tensor:
        """Compute the gradients of a batch. Shapes: `factors` (k,); returns (3, k)."""
        scale = factors / self._divisor
        with torch.enable_grad():
            trace = body.trace(batch.inputs)
            estimate = self._estimator(trace, batch)
            n = batch.inputs.shape[1]
            draws = [estimate(*signs) for signs in self._signs.step(n, batch.shares)]
            value = scale * torch.stack(draws).mean(0)
            z, phi, weight = trace.last
        loss = self._criterion.slopes(z.detach(), batch)
        total = value.detach()
        tensors: list[Tensor] = []
        slopes: list[Any] = []
        if self._at_last:
            exact = batch.shares * (scale / (2 * weight.shape[2])).view(-1, 1, 1)
            term = self._criterion.curvature(z.detach(), phi.detach(), weight.detach(), exact)
            total = total + term.value
            tensors = [z, phi, weight]
            slopes = [term.z, term.of_phi * phi.detach(), term.of_weight @ term.rows]

        def differentiate(of_loss: Any, of_penalty: Any) -> None:
            outer = [of_penalty * slope for slope in slopes]
            of_value = (of_penalty * torch.ones_like(value)[:, None, None]).view(-1)
            trace.backward([z, value, *tensors], [of_loss * loss.z, of_value, *outer])

        gain = None if limit is None else self._criterion.gain(loss.value, z.detach(), batch)
        share = limited_gradients(limit, trace.gradients, differentiate, gain, total)
        return torch.stack([loss.value, total, share])


class _BySlopes(EarlierPenalty):
    """Squared slopes along random changes, where the network is piecewise linear."""

    def _shapes(self, n: int, n_outputs: int) -> list[tuple[int, int]]:
        shared = [(n_shared(m), m) for m in self._layers.values() if n_shared(m)]
        return [(n, n_outputs), *shared]

    def _estimator(self, trace: Trace, batch: Batch) -> Callable[..., Tensor]:
        z, roots = trace.last[0], batch.shares.sqrt()
        outputs = [trace.layers[name].output for name in self._layers]

        def draw(of_outputs: Tensor, *shared: Tensor) -> Tensor:
            cotangent = self._criterion.root_product(z, of_outputs * roots)
            gradients = torch.autograd.grad(z, outputs, cotangent, create_graph=True)
            vectors = iter(shared)
            squares = []
            for (name, m), gradient in zip(self._layers.items(), gradients, strict=True):
                layer, n = trace.layers[name], n_shared(m)
                columns = layer.weight @ next(vectors).transpose(1, 2) if n else layer.weight
                slopes = (gradient * (_norms(layer) * (2 * m * max(1, n)) ** -0.5)) @ columns
                squares.append(slopes.square().sum(dim=(1, 2)))
            return torch.stack(squares).sum(0)

        return draw


class _ByForms(EarlierPenalty):
    """Forms of the Hessian along random changes, in any other network."""

    def _shapes(self, n: int, n_outputs: int) -> list[tuple[int, int]]:
        return [(n, m) for m in self._layers.values()]

    def _estimator(self, trace: Trace, batch: Batch) -> Callable[..., Tensor]:
        layers = [trace.layers[name] for name in self._layers]
        outputs = [layer.output for layer in layers]
        loss = self._criterion.each(trace.last[0], batch.targets).sum() * self._divisor
        gradients = torch.autograd.grad(loss, outputs, create_graph=True)

        def draw(*signs: Tensor) -> Tensor:
            changes = [
                (one @ layer.weight.transpose(1, 2)) * (_norms(layer) * (2 * one.shape[2]) ** -0.5)
                for one, layer in zip(signs, layers, strict=True)
            ]
            products = torch.autograd.grad(gradients, outputs, changes, create_graph=True)
            forms = [
                (product * change * batch.shares).sum(dim=(1, 2))
                for product, change in zip(products, changes, strict=True)
            ]
            return torch.stack(forms).sum(0)

        return draw


def _norms(layer: Traced) -> Tensor:
    """Return the norms of a layer's inputs: (k, n, 1)."""
    norms: Tensor = torch.linalg.vector_norm(layer.inputs, dim=2, keepdim=True)
    return norms


def make_earlier_penalty(criterion: Criterion, found: Probe, n_draws: int) -> EarlierPenalty:
    """Make the penalty at the layers that a probe has found."""
    kind = _BySlopes if found.is_piecewise_linear else _ByForms
    layers, n_outputs = found.earlier, found.output.shape[1]
    return kind(criterion, found.divisor, layers, found.at_last, n_outputs, n_draws)
