"""Smooth a sample in a layer's feature space, and compute its losses before and after."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from relflat_sk._checks import check_number
from relflat_sk._network import borrowed
from relflat_sk._random import make_generator
from relflat_sk.theory._feature_moves import Site, move_features, split_at
from relflat_sk.theory._kernels import gaussian, make_kernel

__all__ = [
    "DEFAULT_KERNEL",
    "DEFAULT_SIGMA",
    "Smoothed",
    "Smoothing",
    "check_alphas",
    "check_bandwidth",
    "find_bandwidth",
]

Floats = NDArray[np.float64]

DEFAULT_KERNEL = "truncated_normal"
DEFAULT_SIGMA = 1.0


@dataclass(frozen=True)
class Smoothed:
    """Weighted losses of n samples before and after the smoothing.

    Shapes: `loss`, `smooth_loss`, `divisor`, `shares` (n,).
    """

    loss: Floats
    smooth_loss: Floats
    divisor: Floats
    shares: Floats
    stderr: float

    def mean_loss(self, rows: Any) -> float:
        """Compute the mean loss of some samples before the smoothing."""
        return _ratio(self.loss[rows].sum(), self.divisor[rows].sum())

    def mean_smooth_loss(self, rows: Any) -> float:
        """Compute the mean loss of some samples after the smoothing, with their shares."""
        shares = self.shares[rows]
        return _ratio(shares @ self.smooth_loss[rows], shares @ self.divisor[rows])


def _ratio(loss: float, divisor: float) -> float:
    """Compute a mean loss, if any sample counts in it."""
    if divisor == 0:
        raise ValueError(
            "no sample of one part of a split counts: their alphas are zero, or their labels are "
            "ignored. Give more samples a positive share."
        )
    return float(loss / divisor)


@dataclass(frozen=True)
class Smoothing:
    """Smooths samples in a layer's feature space."""

    kernel: str
    sigma: float
    n_draws: int
    label_noise: Callable[[Any, np.random.RandomState], Any] | None
    rng: np.random.RandomState
    bandwidth: float | str | None = None

    def __call__(self, site: Site, delta: float, shares: Floats) -> Smoothed:
        """Compute the losses of all samples before and after the smoothing.

        Shapes: `shares` (n,).
        """
        generator = make_generator(self.rng, site.network.device)
        scheme = make_kernel(self.kernel, site.size, self.sigma, self.n_draws, generator)
        bandwidth = find_bandwidth(site, self.bandwidth)
        if bandwidth is not None:
            scheme, delta = gaussian(self.n_draws, generator), bandwidth
        relabel = None if self.label_noise is None else self._relabel
        with borrowed(site.network.module):
            batches = list(move_features(site, scheme, delta, each=True, relabel=relabel))
        weight, loss = (
            torch.cat([getattr(b, key) for b in batches]) for key in ("weights", "losses")
        )
        rise = torch.cat([batch.rises for batch in batches], dim=1)
        divisor = weight * torch.cat([batch.divisors for batch in batches])
        share = torch.from_numpy(shares).to(weight)
        return Smoothed(
            (weight * loss).cpu().numpy(),
            (weight * (loss + rise.mean(dim=0))).cpu().numpy(),
            divisor.cpu().numpy(),
            shares,
            scheme.stderr(rise @ (share * weight) / (share @ divisor)),
        )

    def _relabel(self, moved: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        assert self.label_noise is not None
        return torch.as_tensor(np.asarray(self.label_noise(labels.cpu().numpy(), self.rng)))


def check_bandwidth(
    bandwidth: float | str | None, delta: float | None, kernel: str, sigma: float
) -> None:
    """Refuse a bandwidth that is neither a positive number nor a rule, or one beside a kernel."""
    if isinstance(bandwidth, str):
        if bandwidth not in ("scott", "silverman"):
            raise ValueError(
                f'bandwidth must be a positive number, "scott" or "silverman", got {bandwidth!r}.'
            )
    elif bandwidth is not None:
        check_number("bandwidth", bandwidth)
    if bandwidth is not None and delta is not None:
        raise ValueError(
            f"bandwidth={bandwidth!r} is the same for all samples, and delta={delta!r} in "
            "proportion to their features: give one of them."
        )
    if bandwidth is not None and (kernel, sigma) != (DEFAULT_KERNEL, DEFAULT_SIGMA):
        raise ValueError(
            f"bandwidth={bandwidth!r} smooths by a normal distribution of this deviation, in place "
            f"of a kernel, but kernel={kernel!r} and sigma={sigma!r} are given as well. Leave out "
            "kernel and sigma, or the bandwidth."
        )


def find_bandwidth(site: Site, bandwidth: float | str | None) -> float | None:
    """Find the bandwidth of a Gaussian kernel density estimate, by a rule in one pass."""
    if not isinstance(bandwidth, str):
        return bandwidth
    with borrowed(site.network.module):
        features = torch.cat([split_at(site, batch)[0] for batch in site.network.batches()])
    n, m = features.shape
    factor = n if bandwidth == "scott" else n * (m + 2) / 4
    return float(features.var(dim=0).mean().sqrt()) * float(factor ** (-1 / (m + 4)))


def check_alphas(alphas: Any, n: int) -> Floats:
    """Check the shares of samples in the smoothed distribution.

    Shapes: `alphas` (n,); returns (n,).
    """
    if alphas is None:
        return np.ones(n)
    shares = np.asarray(alphas, dtype=np.float64)
    if shares.shape != (n,) or not (np.isfinite(shares) & (shares >= 0)).all() or not shares.any():
        raise ValueError(
            f"alphas must be {n} numbers, one for each sample, that are not negative and not all "
            f"zero, got an array of shape {shares.shape}."
        )
    scaled: Floats = shares / shares.mean()
    return scaled
