"""Random and given directions in which the features of samples are moved.

A *scheme* draws directions. A symmetric scheme draws them in pairs ``+a, -a``: within a pair, the
part of the loss's rise that is linear in the length of the move cancels, and with it nearly all of
the noise.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from relflat_sk._checks import check_integer

__all__ = ["Scheme", "make_scheme"]

Directions = Callable[[Tensor], Iterator[tuple[Tensor, ...]]]


@dataclass(frozen=True)
class Scheme:
    """Draws of directions in which features are moved.

    Parameters
    ----------
    directions : callable
        From features to the draws. Each draw is a tuple of directions, over which the loss is
        averaged.
    share_left_out : float
        Share of all possible draws that is not made: 1 for independent random draws, 0 if all
        possible draws are made. The variance of the mean of the draws is in proportion to it.
    """

    directions: Directions
    share_left_out: float

    def stderr(self, draws: Tensor) -> float:
        """Compute the standard error of the mean of k draws.

        Parameters
        ----------
        draws : Tensor of shape (k,)
            One value for each draw.

        Returns
        -------
        float
            0 if all possible draws are made.
        """
        if self.share_left_out == 0:
            return 0.0
        return float((self.share_left_out * draws.var() / len(draws)).sqrt())


def _orthogonal(m: int, n_draws: int, generator: torch.Generator) -> Scheme:
    """Rotate each sample's features by a random orthogonal matrix."""

    def directions(features: Tensor) -> Iterator[tuple[Tensor, ...]]:
        # an orthogonal matrix with Haar's distribution moves a vector to a point with uniform
        # distribution on its sphere
        for _ in range(n_draws):
            moved = _on_spheres(features, generator)
            yield moved, -moved

    return Scheme(directions, 1.0)


def _truncated_normal(m: int, n_draws: int, generator: torch.Generator) -> Scheme:
    """Move each sample's features by normal noise, truncated to the length of the features."""

    def directions(features: Tensor) -> Iterator[tuple[Tensor, ...]]:
        for _ in range(n_draws):
            moved = _on_spheres(features, generator)
            moved = moved * _radii(len(features), m, generator).to(moved)[:, None]
            yield moved, -moved

    return Scheme(directions, 1.0)


def _projection(m: int, n_draws: int, generator: torch.Generator) -> Scheme:
    """Move one feature at a time, drawn without replacement."""
    chosen = torch.randperm(m, generator=generator, device=generator.device)[:n_draws]

    def directions(features: Tensor) -> Iterator[tuple[Tensor, ...]]:
        for j in chosen:
            moved = torch.zeros_like(features)
            moved[:, j] = features[:, j]
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

    Their density is proportional to ``r^(m-1) exp(-r^2 / 2)``. Rejection sampling draws radii in a
    uniform ball, and accepts each with probability ``exp(-r^2 / 2)``, which is above 0.6.
    """
    device = generator.device
    accepted: list[Tensor] = []
    while sum(map(len, accepted)) < n:
        u, v = torch.rand((2, 2 * n), generator=generator, dtype=torch.float64, device=device)
        radii = u ** (1 / m)
        accepted.append(radii[v < torch.exp(-(radii**2) / 2)])
    return torch.cat(accepted)[:n]


def make_scheme(matrices: Any, m: int, n_draws: int, generator: torch.Generator) -> Scheme:
    """Make a scheme from its name, or from matrices.

    Parameters
    ----------
    matrices : str, or array of shape (m, m) or (k, m, m)
        A key of `SCHEMES`, or the matrices ``A`` to move the features by.
    m : int
        Number of features of a sample.
    n_draws : int
        Number of draws, at least 2; not used with matrices.
    generator : torch.Generator
        Decides the draws.

    Returns
    -------
    Scheme
        Draws of directions.

    Raises
    ------
    ValueError
        If there is no such scheme, or the matrices do not fit the features.
    """
    check_integer("n_draws", n_draws, minimum=2, reason="one draw has no standard error")
    if isinstance(matrices, str):
        if matrices not in SCHEMES:
            raise ValueError(
                f"matrices must be one of {sorted(SCHEMES)} or an array, got {matrices!r}."
            )
        return SCHEMES[matrices](m, int(n_draws), generator)
    stacked = torch.as_tensor(matrices, dtype=torch.float64, device=generator.device)
    if stacked.ndim == 2:
        stacked = stacked[None]
    if stacked.shape != (len(stacked), m, m) or len(stacked) == 0:
        raise ValueError(
            f"matrices must have shape ({m}, {m}) or (k, {m}, {m}), as the layer receives {m} "
            f"features, got {tuple(torch.as_tensor(matrices).shape)}."
        )
    return Scheme(lambda features: ((features @ matrix.T,) for matrix in stacked), 0.0)
