"""Penalties at linear layers before the last one of a chain, written out."""

from collections.abc import Callable, Sequence
from functools import reduce
from math import prod
from typing import Any

import torch
from torch import Tensor

from relflat_sk._engine.chain import Chain
from relflat_sk._engine.job import Job
from relflat_sk._engine.step import EarlierSlopes, EarlierTerm, StepBatch
from relflat_sk._losses.curvature import ArrayLoss, namespace
from relflat_sk._numerics import dots, transposed
from relflat_sk._penalty.batch_flatness import n_shared
from relflat_sk._random import draw_words, n_words, signs_of

# random words of a net that are drawn at a time, 64 signs each
_AT_ONCE = 2**10


class ChainTerms:
    """The penalties of chains that are piecewise linear behind the penalised layers.

    They are those of `relflat_sk._penalty.batch_flatness` by gradients: sums of
    ``|phi|^2 |A^T g|^2``, where ``g`` is ``R s`` pulled back to a layer, and ``A`` its changes.
    """

    def __init__(self, chain: Chain, loss: ArrayLoss, jobs: Sequence[Job], like: Tensor) -> None:
        self._chain, self._loss, self._jobs, self._like = chain, loss, jobs, like
        self._streams = [_stream_of(job) for job in jobs]
        self._ahead: Any = None  # (k, ...), signs for the next steps
        self._n_steps, self._n_used = len(jobs[0].sizes), 0

    def finish(self) -> None:
        """Hand the random states over to the jobs, as the last step leaves them."""
        for job in self._jobs:
            stream = _stream_of(job)
            draw_words(self._n_used, stream.device, stream)
            job.random_state = stream.get_state()

    def __call__(self, batch: StepBatch, factors: Any, p: Any) -> tuple[Any, EarlierSlopes]:
        """Compute the penalties, (k,), and a function from shares of them to derivatives."""
        penalty = self._jobs[0].penalty
        assert penalty is not None
        factors = factors / penalty.probes
        values, slopes = zip(
            *(self._estimate(batch, factors, p) for _ in range(penalty.probes)), strict=True
        )
        return sum(values), lambda shares: reduce(
            EarlierTerm.plus, (differentiate(shares) for differentiate in slopes)
        )

    def _draw_signs(self, shapes: Sequence[Sequence[int]], like: Any) -> list[Any]:
        """Draw signs of several shapes for each net, (k, ...), as arrays of the kind of another."""
        counts = [n_words(shape) for shape in shapes]
        n = sum(counts)
        if self._ahead is None or self._ahead.shape[1] < 64 * n:
            # for several steps, because an operation takes as long as a product of small matrices
            n_ahead = n * max(1, min(self._n_steps, _AT_ONCE // n))
            words = [draw_words(n_ahead, stream.device, stream) for stream in self._streams]
            stacked = torch.stack(words).to(self._like.device)
            signs: Any = signs_of(stacked, (64 * n_ahead,), self._like)
            signs = signs if isinstance(like, Tensor) else signs.numpy()
            if self._ahead is not None:
                signs = namespace(signs).concatenate([self._ahead, signs], 1)
            self._ahead = signs
        self._n_used += n
        parts = []
        for count, shape in zip(counts, shapes, strict=True):
            parts.append(self._ahead[:, : prod(shape)].reshape(-1, *shape))
            self._ahead = self._ahead[:, 64 * count :]
        return parts

    def _estimate(self, batch: StepBatch, factors: Any, p: Any) -> tuple[Any, EarlierSlopes]:
        """Compute an estimate of the penalties."""
        chain = self._chain
        layers, first = chain.linear, min(chain.earlier)
        widths = {i: layers[i].weight.shape[-1] for i in chain.earlier}
        shapes = {i: (n_shared(m), m) for i, m in widths.items() if n_shared(m)}
        of_outputs, *of_layers = self._draw_signs([p.shape[1:], *shapes.values()], p)
        shared = dict(zip(shapes, of_layers, strict=True))
        roots = namespace(p).sqrt(batch.shares)[..., None]
        product, pull_root = self._loss.root_product(p, of_outputs * roots)
        pulled = {len(layers) - 1: product}
        for i in reversed(range(first, len(layers) - 1)):
            pulled[i] = chain.pull(pulled[i + 1] @ layers[i + 1].weight, i)
        terms = {i: _squared_slopes(layers[i], pulled[i], shared.get(i)) for i in chain.earlier}

        def differentiate(shares: Any) -> EarlierTerm:
            each = (shares * factors)[:, None, None]
            slope: Any = 0  # of the values in the gradients
            weights: dict[int, Any] = {}
            of_features: dict[int, Any] = {}
            for i in range(first, len(layers)):
                if i > first:
                    slope = chain.pull(slope, i - 1)
                    weights[i] = transposed(pulled[i]) @ slope
                    slope = slope @ transposed(layers[i].weight)
                if i in terms:
                    of_gradient, of_weight, of_features[i] = terms[i][1](each)
                    slope = slope + of_gradient
                    weights[i] = weights.get(i, 0) + of_weight
            return EarlierTerm(pull_root(slope), weights, of_features)

        return factors * sum(value for value, _ in terms.values()), differentiate


def _stream_of(job: Job) -> torch.Generator:
    """Return the stream from which a net draws random signs that trains by its own loop."""
    stream = torch.Generator()
    stream.set_state(job.random_state)
    return stream


def _squared_slopes(
    layer: Any,
    gradient: Any,  # (k, n, d), in the layer's output
    signs: Any,  # (k, s, m), or None for columns of the identity in their place
) -> tuple[Any, Callable[[Any], tuple[Any, Any, Any]]]:
    """Compute squared slopes along changes, and a function that differentiates them."""
    changes = layer.weight if signs is None else layer.weight @ transposed(signs)
    scale = 0.5 / (layer.weight.shape[-1] * (1 if signs is None else signs.shape[-2]))
    along = gradient @ changes
    squares, norms = dots(along, along), dots(layer.x, layer.x)

    def differentiate(each: Any) -> tuple[Any, Any, Any]:
        """Compute derivatives in gradient, weight and features, times numbers (k, 1, 1)."""
        each = 2 * scale * each
        outer = each * norms[..., None] * along
        of_changes = transposed(gradient) @ outer
        of_weight = of_changes if signs is None else of_changes @ signs
        return outer @ transposed(changes), of_weight, each * squares[..., None]

    return scale * dots(norms, squares), differentiate
