"""Penalties at linear layers before the last one: their random signs, and a chain's formulas."""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from relflat_sk._engine.chain import Chain
from relflat_sk._engine.job import Job
from relflat_sk._engine.step import StepBatch
from relflat_sk._losses.curvature import ArrayLoss, namespace
from relflat_sk._numerics import dots, transposed
from relflat_sk._penalty.batch_flatness import n_shared
from relflat_sk._random import draw_words, n_words, signs_of


class Probes:
    """Draws the random signs that each net draws if it trains by its own loop."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs
        self.n_draws = jobs[0].penalty.probes if jobs[0].penalty else 0
        self._generators = [torch.Generator() for _ in jobs]
        for job, generator in zip(jobs, self._generators, strict=True):
            generator.set_state(job.random_state)

    def draw(self, shapes: Sequence[Sequence[int]], like: Tensor) -> list[Tensor]:
        """Draw signs of several shapes for each net: (k, ...)."""
        counts = [n_words(shape) for shape in shapes]
        words = torch.stack([
            draw_words(sum(counts), torch.device("cpu"), one) for one in self._generators
        ]).to(like.device)
        # all at once, because each operation takes as long as a product of small matrices
        signs = signs_of(words, (64 * sum(counts),), like)
        parts = torch.split(signs, [64 * n for n in counts], dim=1)
        return [
            part[:, : prod(shape)].view(-1, *shape)
            for part, shape in zip(parts, shapes, strict=True)
        ]

    def finish(self) -> None:
        """Hand the random states over to the jobs, as the last step leaves them."""
        for job, generator in zip(self._jobs, self._generators, strict=True):
            job.random_state = generator.get_state()


class EarlierTerm(NamedTuple):
    """A penalty at earlier layers by its partial derivatives, each times the networks' factors."""

    z: Any  # (k, n, d), in the outputs
    weights: dict[int, Any]  # (k, d, m), in the weights of layers
    of_features: dict[int, Any]  # (k, n, 1); the derivative in a layer's input is that times it


class ChainTerms:
    """The penalties of chains that are piecewise linear behind the penalised layers.

    They are those of `relflat_sk._penalty.batch_flatness` by gradients: sums of
    ``|phi|^2 |A^T g|^2``, where ``g`` is ``R s`` pulled back to a layer, and ``A`` its changes.
    """

    def __init__(self, chain: Chain, loss: ArrayLoss, probes: Probes, like: Tensor) -> None:
        self._chain, self._loss, self._probes, self._like = chain, loss, probes, like

    def __call__(self, batch: StepBatch, factors: Any, p: Any) -> tuple[Any, EarlierTerm]:
        """Compute the penalties, (k,), and their derivatives."""
        factors = factors / self._probes.n_draws
        (value, term), *further = (
            self._estimate(batch, factors, p) for _ in range(self._probes.n_draws)
        )
        for more, other in further:
            value = value + more
            term = EarlierTerm(
                term.z + other.z,
                *(
                    {i: one[i] + two[i] for i in one}
                    for one, two in zip(term[1:], other[1:], strict=True)
                ),
            )
        return value, term

    def _estimate(self, batch: StepBatch, factors: Any, p: Any) -> tuple[Any, EarlierTerm]:
        """Compute an estimate of the penalties."""
        chain, each = self._chain, factors[:, None, None]
        layers, first = chain.linear, chain.earlier[0]
        widths = [layers[i].weight.shape[-1] for i in chain.earlier]
        shapes = [p.shape[1:], *((n_shared(m), m) for m in widths if n_shared(m))]
        signs = self._probes.draw(shapes, self._like)
        of_outputs, *shared = (one if isinstance(p, Tensor) else one.numpy() for one in signs)
        roots = namespace(p).sqrt(batch.shares)[..., None]
        product, pull_root = self._loss.root_product(p, of_outputs * roots)
        pulled = {len(layers) - 1: product}
        for i in reversed(range(first, len(layers) - 1)):
            pulled[i] = chain.pull(pulled[i + 1] @ layers[i + 1].weight, i)
        value: Any = 0
        slope: Any = 0  # of the value in the gradients
        weights: dict[int, Any] = {}
        of_features: dict[int, Any] = {}
        for i in range(first, len(layers)):
            if i > first:
                slope = chain.pull(slope, i - 1)
                weights[i] = transposed(pulled[i]) @ slope
                slope = slope @ transposed(layers[i].weight)
            if i in chain.earlier:
                has_signs = n_shared(layers[i].weight.shape[-1])
                squares, of_gradient, of_weight, of_features[i] = _squared_slopes(
                    layers[i], pulled[i], shared.pop(0) if has_signs else None, each
                )
                value, slope = value + squares, slope + of_gradient
                weights[i] = weights.get(i, 0) + of_weight
        return value, EarlierTerm(pull_root(slope), weights, of_features)


def _squared_slopes(
    layer: Any,
    gradient: Any,  # (k, n, d), in the layer's output
    signs: Any,  # (k, s, m), or None for columns of the identity in their place
    each: Any,  # (k, 1, 1), the networks' factors
) -> tuple[Any, Any, Any, Any]:
    """Compute squared slopes along changes, with derivatives in gradient, weight and features."""
    changes = layer.weight if signs is None else layer.weight @ transposed(signs)
    scale = each / (2 * layer.weight.shape[-1] * (1 if signs is None else signs.shape[-2]))
    along = gradient @ changes
    squares, sizes = dots(along, along), scale * dots(layer.x, layer.x)[..., None]
    outer = 2 * sizes * along
    of_changes = transposed(gradient) @ outer
    of_weight = of_changes if signs is None else of_changes @ signs
    of_features = 2 * scale * squares[..., None]
    return dots(sizes[..., 0], squares), outer @ transposed(changes), of_weight, of_features
