"""Directions in which the features of samples are moved, and kernels that draw them.

A *scheme* draws directions. A symmetric scheme draws them in pairs ``+a, -a``: within a pair, the
part of the loss's rise that is linear in the length of the move cancels, and with it nearly all of
the noise. A *kernel* is a distribution of moves around a sample, the same in all directions; it
has a radius for each sample, ``delta |phi_i|``, and a width `sigma` in units of it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import gammainc, gammaincinv
from torch import Generator, Tensor
from torch.nn import functional as F

from relflat_sk._checks import check_integer
from relflat_sk._warnings import warn


@dataclass(frozen=True)
class Scheme:
    """Draws of directions in which features, (n, m), are moved."""

    directions: Callable[[Tensor], Iterator[tuple[Tensor, ...]]]
    # of all directions that could be drawn, for the standard error
    share_left_out: float = 0.0

    def stderr(self, draws: Tensor) -> float:
        """Compute the standard error of the mean of k draws. Shapes: `draws` (k,)."""
        if self.share_left_out == 0:
            return 0.0
        return float((self.share_left_out * draws.var() / len(draws)).sqrt())


# -- kernels -----------------------------------------------------------------------------


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
    u = _uniform((n,), generator).cpu().numpy()
    radii: NDArray[np.float64] = sigma * np.sqrt(2 * gammaincinv(m / 2, u * inside))
    return torch.from_numpy(radii).to(generator.device)


def _accepted(
    n: int, k: float, log_share: Callable[[Tensor], Tensor], generator: Generator
) -> Tensor:
    """Draw n radii of the density ``r^(k-1)`` in [0, 1], of which only a share is accepted."""
    accepted: list[Tensor] = []
    while sum(map(len, accepted)) < n:
        u, v = _uniform((2, 2 * n), generator)
        radii = u ** (1 / k)
        accepted.append(radii[v < torch.exp(log_share(radii))])
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
        lambda n, m, sigma, generator: torch.full(
            (n,), sigma, dtype=torch.float64, device=generator.device
        ),
        lambda m, sigma: sigma**2,
    ),
}


def _pairs(n_draws: int, draw: Callable[[Tensor], Tensor]) -> Scheme:
    """Make the scheme that draws moves of its own for each sample, in pairs of opposite ones."""

    def directions(features: Tensor) -> Iterator[tuple[Tensor, ...]]:
        for _ in range(n_draws):
            move = draw(features)
            yield move, -move

    return Scheme(directions, 1.0)


def kernel_scheme(kernel: str, sigma: float, n_draws: int, generator: Generator) -> Scheme:
    """Make the scheme of a kernel."""

    def draw(features: Tensor) -> Tensor:
        n, m = features.shape
        uniform = F.normalize(_normal((n, m), generator).to(features), dim=1)
        lengths = torch.linalg.vector_norm(features, dim=1, keepdim=True)
        radii = KERNELS[kernel].radii(n, m, float(sigma), generator).to(features)
        move: Tensor = uniform * lengths * radii[:, None]
        return move

    return _pairs(n_draws, draw)


def gaussian_scheme(n_draws: int, generator: Generator) -> Scheme:
    """Make the scheme of a normal distribution that is the same for all samples."""
    return _pairs(n_draws, lambda features: _normal(features.shape, generator).to(features))


# -- matrices ----------------------------------------------------------------------------

# An orthogonal matrix with Haar's distribution moves a vector to a point with uniform distribution
# on its sphere.
_KERNELS_OF = {"orthogonal": "sphere", "truncated_normal": "truncated_normal"}


def make_scheme(
    matrices: Any, m: int, n_draws: int, generator: Generator, *, shared: bool = False
) -> Scheme:
    """Make a scheme from its name, or from matrices, (m, m); on demand, one that samples share."""
    check_integer("n_draws", n_draws, minimum=2, reason="one draw has no standard error")
    if not isinstance(matrices, str):
        return _of_matrices(check_matrices(matrices, m, generator.device))
    if matrices == "projection":
        chosen = torch.randperm(m, generator=generator, device=generator.device)[:n_draws]
        return projections(chosen, 1.0 - len(chosen) / m)
    if matrices not in _KERNELS_OF:
        known = sorted([*_KERNELS_OF, "projection"])
        raise ValueError(f"matrices must be one of {known} or an array, got {matrices!r}.")
    if not shared:
        return kernel_scheme(_KERNELS_OF[matrices], 1.0, n_draws, generator)
    if matrices != "orthogonal":
        raise ValueError(
            f"absolute=True needs matrices that all samples share, but {matrices!r} moves each "
            'sample on its own. Use "orthogonal", "projection" or an array.'
        )
    return _of_matrices(haar_matrices(m, n_draws, generator), 1.0)


def projections(features_moved: Any, share_left_out: float = 0.0) -> Scheme:
    """Make the scheme that moves one feature at a time, those of the given numbers."""

    def directions(features: Tensor) -> Iterator[tuple[Tensor, ...]]:
        for j in features_moved:
            moved = torch.zeros_like(features)
            moved[:, j] = features[:, j]
            yield (moved,)

    return Scheme(directions, share_left_out)


def haar_matrices(m: int, k: int, generator: Generator) -> Tensor:
    """Draw orthogonal matrices of Haar's distribution. Shapes: returns (k, m, m)."""
    q, r = torch.linalg.qr(_normal((k, m, m), generator))
    signed: Tensor = q * torch.sign(torch.diagonal(r, dim1=1, dim2=2))[:, None]
    return signed


def check_matrices(matrices: Any, m: int, device: torch.device) -> Tensor:
    """Check the user's matrices by which features are moved.

    Shapes: `matrices` (m, m) or (k, m, m); returns (k, m, m).
    """
    stacked = torch.as_tensor(matrices, dtype=torch.float64, device=device)
    if stacked.ndim == 2:
        stacked = stacked[None]
    if stacked.shape != (len(stacked), m, m) or len(stacked) == 0:
        raise ValueError(
            f"matrices must have shape ({m}, {m}) or (k, {m}, {m}), as the layer receives {m} "
            f"features, got {tuple(torch.as_tensor(matrices).shape)}."
        )
    norm = float(torch.linalg.matrix_norm(stacked, 2).max())
    if norm > 1 + 1e-6:
        warn(
            f"matrices have an operator norm of up to {norm:.3g}; feature robustness is defined "
            "for norms of at most 1 (P19, Definition 1), and its bounds hold for those only. "
            "Divide them by their norm, and choose delta in proportion."
        )
    return stacked


def _of_matrices(matrices: Tensor, share_left_out: float = 0.0) -> Scheme:
    """Make the scheme that moves all samples by the same matrices, one after the other."""
    return Scheme(
        lambda features: ((features @ matrix.T.to(features),) for matrix in matrices),
        share_left_out,
    )
