r"""Move the features that reach a layer, and see what that does to the loss.

A network is read at one layer as ``f(x) = psi(phi(x))``. Here all that a sample sends into the
layer is one vector, of a convolution the flattened image it receives:

=============  ============  ==============================================================
name           shape         meaning
=============  ============  ==============================================================
``features``   ``(n, m)``    ``phi(x_i)``, flattened
``direction``  ``(n, m)``    where they are moved, for ``delta = 1``: ``A phi(x_i)``
``rises``      ``(k, n)``    how much each sample's loss rises by, for each of k draws
=============  ============  ==============================================================

A *scheme* draws directions. Those that are symmetric come in pairs ``+a, -a``: what is linear
in delta cancels within each pair, and with it nearly all of the noise.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from relflat_sk._losses import LINKS
from relflat_sk._network import (
    Batch,
    Layer,
    Network,
    ReplacedForwards,
    find_link,
    layer_input,
    outcome_of,
    record_tail,
    sample_weight,
)
from relflat_sk.measures import observe

__all__ = [
    "Moved",
    "Scheme",
    "Site",
    "find_site",
    "make_scheme",
    "move_features",
]

Directions = Callable[[Tensor], Iterator[tuple[Tensor, ...]]]


@dataclass(frozen=True)
class Scheme:
    """Where to move features.

    Parameters
    ----------
    directions : callable
        From features to the draws: directions over which the loss is averaged.
    left_to_chance : float
        What the variance between draws is multiplied by: 1 for independent draws, 0 where
        the draws are all there are.
    """

    directions: Directions
    left_to_chance: float

    def stderr(self, draws: Tensor) -> float:
        """Compute the standard error of the mean of k draws, (k,)."""
        if self.left_to_chance == 0:
            return 0.0
        return float((self.left_to_chance * draws.var() / len(draws)).sqrt())


def _orthogonal(m: int, n_draws: int, generator: torch.Generator) -> Scheme:
    def directions(features: Tensor) -> Iterator[tuple[Tensor, ...]]:
        # a Haar orthogonal matrix takes a vector to any on its sphere with equal chance
        for _ in range(n_draws):
            moved = _on_spheres(features, generator)
            yield moved, -moved

    return Scheme(directions, 1.0)


def _truncated_normal(m: int, n_draws: int, generator: torch.Generator) -> Scheme:
    def directions(features: Tensor) -> Iterator[tuple[Tensor, ...]]:
        for _ in range(n_draws):
            moved = _on_spheres(features, generator)
            moved = moved * _radii(len(features), m, generator).to(moved)[:, None]
            yield moved, -moved

    return Scheme(directions, 1.0)


def _projection(m: int, n_draws: int, generator: torch.Generator) -> Scheme:
    # without replacement, so that with enough draws every feature has its turn
    chosen = torch.randperm(m, generator=generator, device=generator.device)[:n_draws]

    def directions(features: Tensor) -> Iterator[tuple[Tensor, ...]]:
        for at in chosen:
            moved = torch.zeros_like(features)
            moved[:, at] = features[:, at]
            yield (moved,)

    return Scheme(directions, 1.0 - len(chosen) / m)


SCHEMES: dict[str, Callable[[int, int, torch.Generator], Scheme]] = {
    "orthogonal": _orthogonal,
    "projection": _projection,
    "truncated_normal": _truncated_normal,
}


def _on_spheres(features: Tensor, generator: torch.Generator) -> Tensor:
    """Draw vectors of the features' lengths with uniform direction."""
    shape, device = features.shape, features.device
    normal = torch.randn(shape, generator=generator, dtype=torch.float64, device=device)
    lengths: Tensor = torch.linalg.vector_norm(features, dim=1, keepdim=True)
    return F.normalize(normal, dim=1) * lengths


def _radii(n: int, m: int, generator: torch.Generator) -> Tensor:
    """Draw lengths of standard normal vectors in m dimensions that are at most 1 long.

    Their density is proportional to ``r^(m-1) exp(-r^2 / 2)``: radii of a uniform ball,
    kept with probability ``exp(-r^2 / 2)``, which is above 0.6.
    """
    device = generator.device
    kept: list[Tensor] = []
    while sum(map(len, kept)) < n:
        u, v = torch.rand((2, 2 * n), generator=generator, dtype=torch.float64, device=device)
        radii = u ** (1 / m)
        kept.append(radii[v < torch.exp(-(radii**2) / 2)])
    return torch.cat(kept)[:n]


def make_scheme(matrices: Any, m: int, n_draws: int, generator: torch.Generator) -> Scheme:
    """Make the scheme of that name, or of these matrices.

    Parameters
    ----------
    matrices : str, or array of shape (m, m) or (k, m, m)
    m : int
        Number of features.
    n_draws : int
    generator : torch.Generator

    Returns
    -------
    Scheme

    Raises
    ------
    ValueError
        If there is no such scheme, the matrices do not fit the features, or `n_draws` is
        not an integer of 2 or more.
    """
    if isinstance(n_draws, bool) or not isinstance(n_draws, int | np.integer) or n_draws < 2:
        raise ValueError(
            f"n_draws must be an integer >= 2, got {n_draws!r}: the standard error is that "
            "between draws."
        )
    if isinstance(matrices, str):
        if matrices not in SCHEMES:
            raise ValueError(
                f"matrices must be one of {sorted(SCHEMES)} or an array, got {matrices!r}."
            )
        return SCHEMES[matrices](m, int(n_draws), generator)
    given = torch.as_tensor(matrices, dtype=torch.float64, device=generator.device)
    if given.ndim == 2:
        given = given[None]
    if given.shape != (len(given), m, m) or len(given) == 0:
        raise ValueError(
            f"matrices must have shape ({m}, {m}) or (k, {m}, {m}), as the layer receives {m} "
            f"features, got {tuple(torch.as_tensor(matrices).shape)}."
        )
    return Scheme(lambda features: ((features @ matrix.T,) for matrix in given), 0.0)


@dataclass(frozen=True)
class Site:
    """A layer whose features are moved.

    Parameters
    ----------
    network : Network
    name : str
        The layer's.
    shape : torch.Size
        What one sample sends into the layer.
    n_samples : int
    """

    network: Network
    name: str
    shape: torch.Size
    n_samples: int

    @property
    def size(self) -> int:
        """Number of features m."""
        return self.shape.numel()

    @property
    def layer(self) -> Any:
        """The module itself."""
        return self.network.module.get_submodule(self.name)


@dataclass(frozen=True)
class Moved:
    """What moving the features does to a batch of n samples; all in float64.

    Weights are those of the samples, divisors what the criterion's mean divides by.
    """

    losses: Tensor  # (n,)
    rises: Tensor  # (k, n)
    weights: Tensor  # (n,)
    divisors: Tensor  # (n,)


def find_site(network: Network, layer: Layer) -> Site:
    """Find a layer by running one batch; to be used within `borrowed`.

    Parameters
    ----------
    network : Network
    layer : int, str or nn.Module

    Returns
    -------
    Site

    Raises
    ------
    LayerNotFoundError, TypeError, ValueError
        If layer, data or criterion do not fit the network, or there are no labels.
    """
    sizes = [_labels(batch).shape[0] for batch in network.batches()]
    (name,) = next(observe(network, [layer])).layers
    batch = next(network.batches())
    with torch.no_grad(), record_tail(network.module, name) as recorder:
        network(batch.x)
    return Site(network, name, recorder[name].check()[0].shape[1:], sum(sizes))


def _labels(batch: Batch) -> Tensor:
    if batch.y is None:
        raise ValueError("y is needed to compute a loss. Pass y.")
    return batch.y


def move_features(
    site: Site, scheme: Scheme, delta: float, *, each: bool = False
) -> Iterator[Moved]:
    """Move the features of all samples, batch by batch; to be used within `borrowed`.

    Parameters
    ----------
    site : Site
    scheme : Scheme
    delta : float
        What directions are multiplied by.
    each : bool, default=False
        Insist on each sample's own loss; else a criterion may give all of a batch its mean.

    Yields
    ------
    Moved
    """
    for batch in site.network.batches():
        features, run = _tail(site, batch)
        losses, divisors = _losses(site.network, batch, run(torch.zeros_like(features)), each)
        rises = []
        for draw in scheme.directions(features):
            moved = [
                _losses(site.network, batch, run(delta * direction), each)[0] for direction in draw
            ]
            rises.append((torch.stack(moved) - losses).mean(dim=0))
        weights = sample_weight(batch, len(losses), losses.device)
        yield Moved(losses, torch.stack(rises), weights, divisors)


def _tail(site: Site, batch: Batch) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Flattened features of a batch, and how to run the network with these moved."""
    with torch.no_grad(), record_tail(site.network.module, site.name) as recorder:
        output = site.network(batch.x)
    features, z = recorder[site.name].check()
    link = find_link(output, recorder[site.name].node)
    flat = features.flatten(1).double()
    if link is None or z.ndim != 2:
        return flat, lambda move: _run_with(site, batch.x, move)
    # the layer's output is the network's: no need to run what comes before it again, and
    # float64 resolves what small deltas do to the loss
    weight, bias = site.layer.weight.detach().double(), site.layer.bias
    bias = None if bias is None else bias.detach().double()
    turn, shape = LINKS[link], output.shape
    return flat, lambda move: turn(F.linear(flat + move, weight, bias)).reshape(shape)


def _run_with(site: Site, x: Any, move: Tensor) -> Tensor:
    """Run the network with moved inputs of the layer."""
    forward = site.layer.forward

    def run_moved(*args: Any, **kwargs: Any) -> Tensor:
        features = layer_input(args, kwargs)
        others = {name: value for name, value in kwargs.items() if value is not features}
        moved = features + move.reshape(features.shape).to(features.dtype)
        output: Tensor = forward(moved, *args[1:], **others)
        return output

    with torch.no_grad(), ReplacedForwards([(site.layer, run_moved)]):
        return site.network(x)


def _losses(network: Network, batch: Batch, output: Tensor, each: bool) -> tuple[Tensor, Tensor]:
    """Losses and divisors of the samples, see `relflat_sk._losses.loss.Loss.terms`."""
    with torch.no_grad():
        outcome = outcome_of(network, batch, output)
        losses, divisors = outcome.loss.terms(
            outcome.output, outcome.target, each=each or outcome.weighted
        )
    return losses.double(), divisors.double()
