"""Random and given matrices by which the features of samples are moved."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from relflat_sk._checks import check_integer
from relflat_sk._warnings import warn
from relflat_sk.theory._kernels import Scheme, make_kernel, on_spheres

__all__ = ["check_matrices", "haar_matrices", "make_scheme", "of_matrices"]


def _orthogonal(m: int, n_draws: int, generator: torch.Generator) -> Scheme:
    """Rotate each sample's features by a random orthogonal matrix."""

    def directions(features: Tensor) -> Iterator[tuple[Tensor, ...]]:
        # an orthogonal matrix with Haar's distribution moves a vector to a point with uniform
        # distribution on its sphere
        for _ in range(n_draws):
            moved = on_spheres(features, generator)
            yield moved, -moved

    return Scheme(directions, 1.0)


def _truncated_normal(m: int, n_draws: int, generator: torch.Generator) -> Scheme:
    """Move each sample's features by normal noise, truncated to the length of the features."""
    return make_kernel("truncated_normal", m, 1.0, n_draws, generator)


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


def haar_matrices(m: int, k: int, generator: torch.Generator) -> Tensor:
    """Draw orthogonal matrices of Haar's distribution. Shapes: returns (k, m, m)."""
    shape = (k, m, m)
    normal = torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device)
    q, r = torch.linalg.qr(normal)
    signed: Tensor = q * torch.sign(torch.diagonal(r, dim1=1, dim2=2))[:, None]
    return signed


def make_scheme(matrices: Any, m: int, n_draws: int, generator: torch.Generator) -> Scheme:
    """Make a scheme from its name, or from matrices. Shapes: `matrices` (m, m)."""
    check_integer("n_draws", n_draws, minimum=2, reason="one draw has no standard error")
    if isinstance(matrices, str):
        if matrices not in SCHEMES:
            raise ValueError(
                f"matrices must be one of {sorted(SCHEMES)} or an array, got {matrices!r}."
            )
        return SCHEMES[matrices](m, int(n_draws), generator)
    return of_matrices(check_matrices(matrices, m, generator.device))


def check_matrices(matrices: Any, m: int, device: torch.device) -> Tensor:
    """Check matrices of the user's own by which features are moved.

    Shapes: `matrices` (m, m); returns (k, m, m).
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


def of_matrices(matrices: Tensor) -> Scheme:
    """Return the scheme that moves all samples by the same matrices, one after the other.

    Shapes: `matrices` (k, m, m).
    """
    return Scheme(
        lambda features: ((features @ matrix.T.to(features),) for matrix in matrices), 0.0
    )
