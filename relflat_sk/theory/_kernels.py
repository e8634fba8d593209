"""Directions in which the features of samples are moved, and kernels that draw them.

A *scheme* draws directions. A symmetric scheme draws them in pairs ``+a, -a``: within a pair, the
part of the loss's rise that is linear in the length of the move cancels, and with it nearly all of
the noise. A *kernel* is a distribution of moves around a sample, the same in all directions; it
has a radius for each sample, ``delta |phi_i|``, and a width `sigma` in units of it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import gammainc, gammaincinv
from torch import Tensor
from torch.nn import functional as F

from relflat_sk._checks import check_integer, check_number

__all__ = [
    "KERNELS",
    "Scheme",
    "check_kernel",
    "gaussian",
    "make_kernel",
    "on_spheres",
    "second_moment",
]

Directions = Callable[[Tensor], Iterator[tuple[Tensor, ...]]]


@dataclass(frozen=True)
class Scheme:
    """Draws of directions in which features are moved."""

    directions: Directions
    share_left_out: float

    def stderr(self, draws: Tensor) -> float:
        """Compute the standard error of the mean of k draws. Shapes: `draws` (k,)."""
        if self.share_left_out == 0:
            return 0.0
        return float((self.share_left_out * draws.var() / len(draws)).sqrt())


def on_spheres(features: Tensor, generator: torch.Generator) -> Tensor:
    """Draw vectors of the features' lengths with uniform direction.

    Shapes: `features` (n, m); returns (n, m).
    """
    shape, device = features.shape, features.device
    normal = torch.randn(shape, generator=generator, dtype=torch.float64, device=device)
    lengths: Tensor = torch.linalg.vector_norm(features, dim=1, keepdim=True)
    return F.normalize(normal, dim=1) * lengths


def _truncated_radii(n: int, m: int, sigma: float, generator: torch.Generator) -> Tensor:
    """Draw lengths of normal vectors of deviation sigma in m dimensions, at most 1 long.

    Their density is proportional to ``r^(m-1) exp(-r^2 / (2 sigma^2))``. Wide normal distributions
    are drawn by rejection from a uniform ball, narrow ones by the inverse of their distribution
    function. Where that function underflows, as m is large, they are drawn by rejection from the
    density ``r^(k-1)``, with ``k = m - 1 / sigma^2``, of which nearly all are accepted.
    """
    if sigma >= 1:
        return _accepted(n, m, lambda r: -(r**2) / (2 * sigma**2), generator)
    inside = float(gammainc(m / 2, 1 / (2 * sigma**2)))
    if inside < 1e-250:
        k = m - 1 / sigma**2
        return _accepted(n, k, lambda r: (torch.log(r) - r**2 / 2 + 0.5) / sigma**2, generator)
    device = generator.device
    u = torch.rand(n, generator=generator, dtype=torch.float64, device=device).cpu().numpy()
    radii: NDArray[np.float64] = sigma * np.sqrt(2 * gammaincinv(m / 2, u * inside))
    return torch.from_numpy(radii).to(device)


def _accepted(
    n: int, k: float, log_share: Callable[[Tensor], Tensor], generator: torch.Generator
) -> Tensor:
    """Draw n radii of the density ``r^(k-1)`` in [0, 1], of which only a share is accepted."""
    device = generator.device
    accepted: list[Tensor] = []
    while sum(map(len, accepted)) < n:
        u, v = torch.rand((2, 2 * n), generator=generator, dtype=torch.float64, device=device)
        radii = u ** (1 / k)
        accepted.append(radii[v < torch.exp(log_share(radii))])
    return torch.cat(accepted)[:n]


def _normal_radii(n: int, m: int, sigma: float, generator: torch.Generator) -> Tensor:
    """Draw lengths of normal vectors of deviation sigma in m dimensions."""
    normal = torch.randn((n, m), generator=generator, dtype=torch.float64, device=generator.device)
    lengths: Tensor = torch.linalg.vector_norm(normal, dim=1)
    return sigma * lengths


def _uniform_radii(n: int, m: int, sigma: float, generator: torch.Generator) -> Tensor:
    """Draw lengths of vectors that are uniform in a ball of radius sigma."""
    u = torch.rand(n, generator=generator, dtype=torch.float64, device=generator.device)
    return sigma * u ** (1 / m)


def _sphere_radii(n: int, m: int, sigma: float, generator: torch.Generator) -> Tensor:
    """Return the radius of a sphere."""
    return torch.full((n,), sigma, dtype=torch.float64, device=generator.device)


@dataclass(frozen=True)
class Kernel:
    """A distribution around 0 that is the same in all directions, in units of its radius."""

    radii: Callable[[int, int, float, torch.Generator], Tensor]
    second_moment: Callable[[int, float], float]


KERNELS: dict[str, Kernel] = {
    "truncated_normal": Kernel(_truncated_radii, lambda m, sigma: min(1.0, m * sigma**2)),
    "normal": Kernel(_normal_radii, lambda m, sigma: m * sigma**2),
    "uniform": Kernel(_uniform_radii, lambda m, sigma: m * sigma**2 / (m + 2)),
    "sphere": Kernel(_sphere_radii, lambda m, sigma: sigma**2),
}


def check_kernel(kernel: str, sigma: float) -> None:
    """Refuse a kernel that there is not, or a width that is no positive number."""
    if not isinstance(kernel, str) or kernel not in KERNELS:
        raise ValueError(f"kernel must be one of {sorted(KERNELS)}, got {kernel!r}.")
    check_number("sigma", sigma)


def make_kernel(
    kernel: str, m: int, sigma: float, n_draws: int, generator: torch.Generator
) -> Scheme:
    """Make the scheme of a kernel, which moves each sample by draws of its own."""
    check_kernel(kernel, sigma)
    check_integer("n_draws", n_draws, minimum=2, reason="one draw has no standard error")
    draw_radii = KERNELS[kernel].radii

    def directions(features: Tensor) -> Iterator[tuple[Tensor, ...]]:
        for _ in range(n_draws):
            moved = on_spheres(features, generator)
            radii = draw_radii(len(features), m, float(sigma), generator)
            moved = moved * radii.to(moved)[:, None]
            yield moved, -moved

    return Scheme(directions, 1.0)


def gaussian(n_draws: int, generator: torch.Generator) -> Scheme:
    """Make the scheme of a normal distribution that is the same for all samples."""

    def directions(features: Tensor) -> Iterator[tuple[Tensor, ...]]:
        shape, device = features.shape, features.device
        for _ in range(n_draws):
            moved = torch.randn(shape, generator=generator, dtype=torch.float64, device=device)
            yield moved, -moved

    return Scheme(directions, 1.0)


def second_moment(kernel: str, m: int, sigma: float) -> float:
    """Return an upper bound of the mean squared length of a kernel's draws."""
    return KERNELS[kernel].second_moment(m, sigma)
