"""Penalties at linear layers before the last one of a chain, written out."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from relflat_sk._engine.chain import Chain
from relflat_sk._engine.job import Job
from relflat_sk._engine.step import EarlierTerm, StepBatch
from relflat_sk._losses.curvature import ArrayLoss, namespace
from relflat_sk._numerics import dots, transposed
from relflat_sk._penalty.batch_flatness import n_shared
from relflat_sk._random import draw_words, n_words, signs_of


class ChainTerms:
    """The penalties of chains that are piecewise linear behind the penalised layers.

    They are those of `relflat_sk._penalty.batch_flatness` by gradients: sums of
    ``|phi|^2 |A^T g|^2``, where ``g`` is ``R s`` pulled back to a layer, and ``A`` its changes.
    """

    def __init__(self, chain: Chain, loss: ArrayLoss, jobs: Sequence[Job], like: Tensor) -> None:
        self._chain, self._loss, self._jobs, self._like = chain, loss, jobs, like
        # the streams from which nets draw random signs that train by their own loop
        self._generators = [torch.Generator() for _ in jobs]
        for job, generator in zip(jobs, self._generators, strict=True):
            generator.set_state(job.random_state)

    def finish(self) -> None:
        """Hand the random states over to the jobs, as the last step leaves them."""
        for job, generator in zip(self._jobs, self._generators, strict=True):
            job.random_state = generator.get_state()

    def __call__(self, batch: StepBatch, factors: Any, p: Any) -> tuple[Any, EarlierTerm]:
        """Compute the penalties, (k,), and their derivatives."""
        penalty = self._jobs[0].penalty
        assert penalty is not None
        factors = factors / penalty.probes
        (value, term), *further = (self._estimate(batch, factors, p) for _ in range(penalty.probes))
        for more, other in further:
            value = value + more
            weights, of_features = (
                {i: before[i] + after[i] for i in before}
                for before, after in zip(term[1:], other[1:], strict=True)
            )
            term = EarlierTerm(term.z + other.z, weights, of_features)
        return value, term

    def _draw_signs(self, shapes: Sequence[Sequence[int]]) -> list[Any]:
        """Draw signs of several shapes for each net: (k, ...)."""
        counts = [n_words(shape) for shape in shapes]
        words = torch.stack([
            draw_words(sum(counts), torch.device("cpu"), one) for one in self._generators
        ])
        # all at once, because each operation takes as long as a product of small matrices
        signs = signs_of(words.to(self._like.device), (64 * sum(counts),), self._like)
        parts = torch.split(signs, [64 * n for n in counts], dim=1)
        return [
            part[:, : prod(shape)].view(-1, *shape)
            for part, shape in zip(parts, shapes, strict=True)
        ]

    def _estimate(self, batch: StepBatch, factors: Any, p: Any) -> tuple[Any, EarlierTerm]:
        """Compute an estimate of the penalties."""
        chain, each = self._chain, factors[:, None, None]
        layers, first = chain.linear, min(chain.earlier)
        widths = {i: layers[i].weight.shape[-1] for i in chain.earlier}
        shapes = {i: (n_shared(m), m) for i, m in widths.items() if n_shared(m)}
        is_tensor = isinstance(p, Tensor)
        of_outputs, *of_layers = (
            signs if is_tensor else signs.numpy()
            for signs in self._draw_signs([p.shape[1:], *shapes.values()])
        )
        shared = dict(zip(shapes, of_layers, strict=True))
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
                squares, of_gradient, of_weight, of_features[i] = _squared_slopes(
                    layers[i], pulled[i], shared.get(i), each
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
