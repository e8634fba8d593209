r"""Move the features that a layer receives, and compute how much the loss rises.

A network is split at one layer, ``f(x) = psi(phi(x))``. The features ``phi(x)`` are all numbers
that the layer receives for one sample, as one vector: of a convolution, the flattened image.

============  ============  ==================================================================
name          shape         meaning
============  ============  ==================================================================
``features``  ``(n, m)``    ``phi(x_i)``, flattened
``move``      ``(n, m)``    what is added to the features
``rises``     ``(k, n)``    rise of each sample's loss, for each of k draws
============  ============  ==================================================================

A symmetric draw is a pair of moves ``+a, -a``: within it, the part of the rise that is linear in
the length of the move cancels, and with it nearly all of the noise. A *kernel* is a distribution of
moves around a sample, the same in all directions; it has a radius for each sample,
``delta |phi_i|``, and a width `sigma` in units of it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import gammainc, gammaincinv
from torch import Generator, Tensor
from torch.nn import functional as F

from relflat_sk._checks import check_integer, check_number, warn
from relflat_sk._losses.table import LINKS
from relflat_sk._models.network_of import name_layer
from relflat_sk._network.batches import Batch
from relflat_sk._network.borrowing import ReplacedForwards, borrowed
from relflat_sk._network.layers import Layer, LayerMap, weight_layers
from relflat_sk._network.network import Network, outcome_of, sample_weight
from relflat_sk._network.recording import LayerRecord, Recorder, find_link, layer_input, record_tail
from relflat_sk.measures._scan import scan

# from arrays of moved features, (n, m), and of labels before to labels after the move, as the
# criterion takes them
Relabel = Callable[[Any, Any], Any]


# -- the layer whose features are moved ----------------------------------------------------


@dataclass(frozen=True)
class Split:
    """A network that is split at a layer, on one batch."""

    network: Network
    batch: Batch
    features: Tensor  # (n, m)
    run: Callable[[Tensor], Tensor]  # from a move of the features, (n, m), to the output

    @property
    def weights(self) -> Tensor:
        """Weights of the samples, (n,)."""
        return sample_weight(self.batch, len(self.features), self.features.device)

    def losses(
        self, move: Tensor, *, each: bool = False, relabel: Relabel | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute losses and divisors, see `relflat_sk._losses.Loss.terms`: (n,) each."""
        batch = self.batch
        if relabel is not None:
            batch = _relabelled(batch, self.features + move, relabel)
        outcome = outcome_of(self.network, batch, self.run(move))
        each = each or outcome.weighted
        losses, divisors = outcome.loss.terms(outcome.output, outcome.target, each=each)
        return losses.double(), divisors.double()


@dataclass(frozen=True)
class Site:
    """A layer of a network whose features are moved."""

    network: Network
    name: str
    shape: torch.Size

    @property
    def size(self) -> int:
        """Number m of features of one sample."""
        return self.shape.numel()

    @cached_property
    def counts(self) -> Tensor:
        """Which of the n samples have labels that are not ignored, found without the network."""
        batches = self.network.batches()
        return torch.cat([counting(self.network, labels_of(batch)).cpu() for batch in batches])

    def splits(self) -> Iterator[Split]:
        """Split the network on one batch after the other; to be used within `borrowed`."""
        layer: Any = self.network.module.get_submodule(self.name)
        for batch in self.network.batches():
            with torch.no_grad(), record_tail(self.network.module, self.name) as recorder:
                output = self.network(batch.x)
            features, z = recorder[self.name].check()
            link = find_link(output, recorder[self.name].node)
            flat = features.flatten(1).double()
            run = _run_with(self.network, layer, batch.x)
            if link is not None and z.ndim == 2:
                run = _run_link(recorder[self.name].map, z.double(), link, output.shape)
            yield Split(self.network, batch, flat, run)


def find_site(network: Network, layer: Layer) -> Site:
    """Find the layer of a model whose features are moved, by running one batch."""
    assert network.source is not None
    batch = next(network.batches())
    labels_of(batch)
    shapes: dict[str, torch.Size] = {}

    def keep_shape(record: LayerRecord, features: Tensor, output: Tensor) -> Tensor:
        shapes[record.name] = features.shape[1:]
        return output

    first = replace(network, batches=lambda: iter([batch]))
    with borrowed(network.module), Recorder(weight_layers(network.module), keep_shape):
        asked = [name_layer(network.source.model, layer)]
        (name,) = scan(first, asked, checked=True).layer_weights
    return Site(network, name, shapes[name])


def check_delta(delta: Any) -> float:
    """Refuse a delta that is not a finite positive number."""
    check_number("delta", delta, reason="it is how far features move, as a share of their norm")
    return float(delta)


def counting(network: Network, labels: Tensor) -> Tensor:
    """Find which samples have a label that the criterion does not ignore: (n,)."""
    counts = network.loss.counting_rows(labels, len(labels))
    return labels.new_ones(len(labels), dtype=torch.bool) if counts is None else counts


def labels_of(batch: Batch) -> Tensor:
    """Return the labels of a batch, without which there is no loss."""
    if batch.y is None:
        raise ValueError("y is needed here. Pass the labels as y.")
    return batch.y


def _relabelled(batch: Batch, moved: Tensor, relabel: Relabel) -> Batch:
    """Return the batch with the labels of its moved features."""
    before = labels_of(batch)
    after = np.asarray(relabel(moved.cpu().numpy(), before.cpu().numpy()))
    labels = torch.as_tensor(after, device=before.device)
    if labels.shape != before.shape:
        raise ValueError(
            f"the labels of moved features must have the shape of the labels, {tuple(before.shape)}"
            f", got {tuple(labels.shape)}."
        )
    return replace(batch, y=labels.to(before.dtype))


def _run_link(
    as_map: LayerMap, z: Tensor, link: str, shape: torch.Size
) -> Callable[[Tensor], Tensor]:
    """Return the last layer and its link as a function of the move, in float64."""
    weight = as_map.weight.double()
    return lambda move: LINKS[link](z + F.linear(move, weight)).reshape(shape)


def _run_with(network: Network, layer: Any, x: Any) -> Callable[[Tensor], Tensor]:
    """Return the network as a function of the move of a layer's inputs."""
    forward = layer.forward

    def run(move: Tensor) -> Tensor:
        def run_moved(*args: Any, **kwargs: Any) -> Tensor:
            features = layer_input(args, kwargs)
            output: Tensor = forward(features + move.reshape(features.shape).to(features.dtype))
            return output

        with ReplacedForwards([(layer, run_moved)]):
            return network(x)

    return run


# -- the rise of the loss ------------------------------------------------------------------


@dataclass(frozen=True)
class Moves:
    """Random moves of features: a draw, from features (n, m), is one move or a pair."""

    draws: Callable[[Tensor], Iterator[tuple[Tensor, ...]]]
    # of all moves that could be drawn, for the standard error
    share_left_out: float = 0.0

    def stderr(self, draws: Tensor) -> float:
        """Compute the standard error of the mean of k draws."""
        if self.share_left_out == 0:
            return 0.0
        return float((self.share_left_out * draws.var() / len(draws)).sqrt())


@dataclass(frozen=True)
class Moved:
    """Losses of a batch of n samples, and their rises when the features move."""

    losses: Tensor  # (n,)
    rises: Tensor  # (k, n)
    weights: Tensor  # (n,)
    divisors: Tensor  # (n,)


def mean_rises(site: Site, moves: Moves, relabel: Relabel | None = None) -> Tensor:
    """Compute the rise of the mean loss for each of k draws: (k,)."""
    total: Any = 0.0
    divisor = 0.0
    for moved in move_features(site, moves, relabel=relabel):
        total = total + (moved.rises @ moved.weights).cpu()
        divisor += float(moved.divisors @ moved.weights)
    mean: Tensor = total / divisor
    return mean


def move_features(
    site: Site, moves: Moves, *, each: bool = False, relabel: Relabel | None = None
) -> Iterator[Moved]:
    """Move the features of all samples, batch by batch."""
    with borrowed(site.network.module), torch.no_grad():
        for split in site.splits():
            losses, divisors = split.losses(torch.zeros_like(split.features), each=each)
            rises = []
            for draw in moves.draws(split.features):
                moved = [split.losses(move, each=each, relabel=relabel) for move in draw]
                if not all(torch.equal(parts, divisors) for _, parts in moved):
                    raise ValueError(
                        "the labels of moved features have other class weights than the labels, or "
                        "are ignored where those are not. Leave out weight and ignore_index."
                    )
                rises.append(torch.stack([after - losses for after, _ in moved]).mean(dim=0))
            yield Moved(losses, torch.stack(rises), split.weights, divisors)


# -- moves by kernels ----------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """A distribution around 0 that is the same in all directions, in units of its radius.

    `radii` draws n lengths in m dimensions for a width sigma. `second_moment` is an upper bound of
    their mean square.
    """

    radii: Callable[[int, int, float, Generator], Tensor]
    second_moment: Callable[[int, float], float]


def _normal(shape: tuple[int, ...] | torch.Size, generator: Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device)


def _uniform(shape: tuple[int, ...], generator: Generator) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64, device=generator.device)


def _truncated_radii(n: int, m: int, sigma: float, generator: Generator) -> Tensor:
    """Draw lengths of normal vectors of deviation sigma in m dimensions, at most 1 long.

    Their density is proportional to ``r^(m-1) exp(-r^2 / (2 sigma^2))``. They are drawn by the
    inverse of their distribution function. Where that underflows, as m is large, they are drawn by
    rejection from the density ``r^(k-1)``, with ``k = m - 1 / sigma^2``, of which nearly all are
    accepted.
    """
    inside = float(gammainc(m / 2, 1 / (2 * sigma**2)))
    if inside > 1e-250:
        u = _uniform((n,), generator).cpu().numpy()
        radii_of_u: NDArray[np.float64] = sigma * np.sqrt(2 * gammaincinv(m / 2, u * inside))
        return torch.from_numpy(radii_of_u).to(generator.device)
    accepted: list[Tensor] = []
    while sum(map(len, accepted)) < n:
        u, v = _uniform((2, 2 * n), generator)
        radii = u ** (1 / (m - 1 / sigma**2))
        log_share = (torch.log(radii) - radii**2 / 2 + 0.5) / sigma**2
        accepted.append(radii[v < torch.exp(log_share)])
    return torch.cat(accepted)[:n]


KERNELS: dict[str, Kernel] = {
    "truncated_normal": Kernel(_truncated_radii, lambda m, sigma: min(1.0, m * sigma**2)),
    "normal": Kernel(
        lambda n, m, sigma, generator: sigma * _normal((n, m), generator).norm(dim=1),
        lambda m, sigma: m * sigma**2,
    ),
    "uniform": Kernel(
        lambda n, m, sigma, generator: sigma * _uniform((n,), generator) ** (1 / m),
        lambda m, sigma: m * sigma**2 / (m + 2),
    ),
    "sphere": Kernel(
        lambda n, m, sigma, generator: sigma * torch.ones(n, device=generator.device).double(),
        lambda m, sigma: sigma**2,
    ),
}


def _pairs(n_draws: int, draw: Callable[[Tensor], Tensor]) -> Moves:
    """Draw moves of its own for each sample, in pairs of opposite ones."""

    def draws(features: Tensor) -> Iterator[tuple[Tensor, ...]]:
        for _ in range(n_draws):
            move = draw(features)
            yield move, -move

    return Moves(draws, 1.0)


def kernel_moves(
    kernel: str, sigma: float, delta: float, n_draws: int, generator: Generator
) -> Moves:
    """Draw moves from a kernel of radius ``delta |phi_i|``."""

    def draw(features: Tensor) -> Tensor:
        n, m = features.shape
        uniform = F.normalize(_normal((n, m), generator).to(features), dim=1)
        lengths = torch.linalg.vector_norm(features, dim=1)
        radii = KERNELS[kernel].radii(n, m, float(sigma), generator).to(features)
        move: Tensor = uniform * (delta * lengths * radii)[:, None]
        return move

    return _pairs(n_draws, draw)


def normal_moves(deviation: float, n_draws: int, generator: Generator) -> Moves:
    """Draw moves from a normal distribution that is the same for all samples."""
    return _pairs(n_draws, lambda phi: deviation * _normal(phi.shape, generator).to(phi))


# -- moves by matrices ---------------------------------------------------------------------

# An orthogonal matrix with Haar's distribution moves a vector to a point with uniform distribution
# on its sphere.
_KERNELS_OF = {"orthogonal": "sphere", "truncated_normal": "truncated_normal"}


def matrix_moves(
    matrices: Any, delta: float, m: int, n_draws: int, generator: Generator, *, shared: bool = False
) -> Moves:
    """Move features by ``delta A phi_i``, with A given, or drawn by name for each sample or all."""
    check_integer("n_draws", n_draws, minimum=2, reason="one draw has no standard error")
    if not isinstance(matrices, str):
        return _shared_moves(delta * check_matrices(matrices, m, generator.device))
    if matrices == "projection":
        chosen = torch.randperm(m, generator=generator, device=generator.device)[:n_draws]
        return projections(chosen, delta, 1.0 - len(chosen) / m)
    kernels = {"orthogonal": "sphere"} if shared else _KERNELS_OF
    if matrices not in kernels:
        raise ValueError(
            f"matrices must be one of {sorted([*kernels, 'projection'])} or an array"
            f"{', as all samples share them with absolute=True' * shared}, got {matrices!r}."
        )
    if not shared:
        return kernel_moves(kernels[matrices], 1.0, delta, n_draws, generator)
    return _shared_moves(delta * haar_matrices(m, n_draws, generator), 1.0)


def _shared_moves(matrices: Tensor, share_left_out: float = 0.0) -> Moves:
    """Move all samples by the same matrices, one after the other."""
    return Moves(
        lambda features: ((features @ matrix.T.to(features),) for matrix in matrices),
        share_left_out,
    )


def projections(numbers: Any, delta: float, share_left_out: float = 0.0) -> Moves:
    """Move one feature at a time, those of the given numbers."""

    def draws(features: Tensor) -> Iterator[tuple[Tensor, ...]]:
        for j in numbers:
            move = torch.zeros_like(features)
            move[:, j] = delta * features[:, j]
            yield (move,)

    return Moves(draws, share_left_out)


def haar_matrices(m: int, k: int, generator: Generator) -> Tensor:
    """Draw orthogonal matrices of Haar's distribution: (k, m, m)."""
    q, r = torch.linalg.qr(_normal((k, m, m), generator))
    signed: Tensor = q * torch.sign(torch.diagonal(r, dim1=1, dim2=2))[:, None]
    return signed


def check_matrices(matrices: Any, m: int, device: torch.device) -> Tensor:
    """Check the user's matrices by which features are moved: (k, m, m)."""
    tensor = torch.as_tensor(matrices, dtype=torch.float64, device=device)
    stacked = tensor[None] if tensor.ndim == 2 else tensor
    if stacked.shape != (len(stacked), m, m) or len(stacked) == 0:
        raise ValueError(
            f"matrices must have shape ({m}, {m}) or (k, {m}, {m}), as the layer receives {m} "
            f"features, got {tuple(tensor.shape)}."
        )
    norm = float(torch.linalg.matrix_norm(stacked, 2).max())
    if norm > 1 + 1e-6:
        warn(
            f"matrices have an operator norm of up to {norm:.3g}; feature robustness is defined "
            "for norms of at most 1. Divide them by their norm, and choose delta in proportion."
        )
    return stacked
