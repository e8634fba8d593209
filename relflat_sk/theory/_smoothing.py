"""Smooth a sample in a layer's feature space, and compute its losses before and after."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from relflat_sk._checks import check_integer, check_number
from relflat_sk._network import borrowed
from relflat_sk._random import make_generator
from relflat_sk.theory._moves import (
    KERNELS,
    Site,
    check_delta,
    kernel_moves,
    move_features,
    normal_moves,
)

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False, kw_only=True)
class Smoothing:
    r"""How a sample is smoothed in a layer's feature space.

    Every ``phi(x_i)`` is replaced by a distribution around it, with the weight ``alpha_i`` and the
    label ``y_i``. For `representativeness` and `generalization_bound`.

    Parameters
    ----------
    kernel : {"truncated_normal", "normal", "uniform", "sphere"}, default="truncated_normal"
        The distribution, with ``r_i = delta |phi(x_i)|``: normal with deviation ``sigma r_i`` in
        each direction, given a length of at most ``r_i``; the same without that limit, which makes
        the smoothed sample a Gaussian kernel density estimate with a bandwidth for each sample;
        uniform in the ball, or on the sphere, of radius ``sigma r_i``.
    sigma : float, default=1
        Width of the kernel.
    bandwidth : float, "scott" or "silverman", optional
        Smooth all samples by a Gaussian kernel density estimate with this bandwidth, in the unit
        of the features and the same for all samples, in place of a kernel whose radius is in
        proportion to the features, so that `kernel`, `sigma` and ``delta`` are left out. The rules
        of Scott and Silverman take the root mean variance of the features times
        ``n^(-1/(m+4))`` and ``(n (m+2)/4)^(-1/(m+4))``, with n samples and m features.
    alphas : array of shape (n,), optional
        Weights ``alpha_i`` of the samples, divided by their sum; equal if None. Some may be zero,
        but not those of all samples in one part of a split. A DataLoader must not shuffle then.
    label_noise : callable, optional
        Moves the labels, too: from an array of labels, as the criterion takes them, and a
        RandomState to an array of noisy labels of the same shape. Each draw has its own noise.

    Raises
    ------
    ValueError
        If there is no such kernel, an argument is out of its range, or a bandwidth stands beside a
        kernel.

    Examples
    --------
    >>> from relflat_sk.theory import Smoothing, representativeness
    >>> from sklearn.datasets import load_iris
    >>> from sklearn.linear_model import LogisticRegression
    >>> X, y = load_iris(return_X_y=True)
    >>> model = LogisticRegression(max_iter=1000).fit(X, y)
    >>> narrow, wide = (
    ...     representativeness(model, X, y, smoothing=Smoothing(bandwidth=h), random_state=0)[0]
    ...     for h in (0.01, 1)
    ... )
    >>> narrow > wide  # the smoothed sample has the larger loss
    True
    """

    kernel: str = "truncated_normal"
    sigma: float = 1.0
    bandwidth: float | str | None = None
    alphas: Any = None
    label_noise: Callable[[Any, np.random.RandomState], Any] | None = None

    def __post_init__(self) -> None:
        """Refuse what is no distribution, before anything is computed."""
        if not isinstance(self.kernel, str) or self.kernel not in KERNELS:
            raise ValueError(f"kernel must be one of {sorted(KERNELS)}, got {self.kernel!r}.")
        check_number("sigma", self.sigma)
        if self.bandwidth not in ("scott", "silverman"):
            named = 'bandwidth, where it is not "scott" or "silverman",'
            check_number(named, self.bandwidth, optional=True)
        changed = (self.kernel, self.sigma) != ("truncated_normal", 1.0)
        if self.bandwidth is not None and changed:
            raise ValueError(
                f"bandwidth={self.bandwidth!r} smooths by a normal distribution of this deviation, "
                f"in place of a kernel, but kernel={self.kernel!r} and sigma={self.sigma!r} are "
                "given as well. Leave out kernel and sigma, or the bandwidth."
            )


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

    def mean_loss(self, rows: Any = slice(None)) -> float:
        """Compute the mean loss of some samples before the smoothing."""
        return _ratio(self.loss[rows].sum(), self.divisor[rows].sum())

    def mean_smooth_loss(self, rows: Any = slice(None)) -> float:
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


def smooth(
    site: Site,
    smoothing: Smoothing,
    delta: float,
    n_draws: int,
    rng: np.random.RandomState,
    shares: Floats | None = None,
) -> Smoothed:
    """Compute the losses of all samples before and after the smoothing, with shares (n,)."""
    check_integer("n_draws", n_draws, minimum=2, reason="one draw has no standard error")
    noise, generator = smoothing.label_noise, make_generator(rng, site.network.device)
    if smoothing.bandwidth is None:
        moves = kernel_moves(smoothing.kernel, smoothing.sigma, delta, n_draws, generator)
    else:
        moves = normal_moves(find_bandwidth(site, smoothing.bandwidth), n_draws, generator)
    relabel = None if noise is None else lambda _, labels: noise(labels, rng)
    batches = list(move_features(site, moves, each=True, relabel=relabel))
    weight = torch.cat([batch.weights for batch in batches])
    loss = weight * torch.cat([batch.losses for batch in batches])
    rises = weight * torch.cat([batch.rises for batch in batches], dim=1)
    divisor = weight * torch.cat([batch.divisors for batch in batches])
    shares = np.ones(len(weight)) if shares is None else shares
    share = torch.from_numpy(shares).to(weight)
    return Smoothed(
        loss.cpu().numpy(),
        (loss + rises.mean(dim=0)).cpu().numpy(),
        divisor.cpu().numpy(),
        shares,
        moves.stderr(rises @ share / (share @ divisor)),
    )


def find_bandwidth(site: Site, bandwidth: float | str) -> float:
    """Find the bandwidth of a Gaussian kernel density estimate, by a rule in one pass."""
    if not isinstance(bandwidth, str):
        return bandwidth
    with borrowed(site.network.module):
        features = torch.cat([split.features for split in site.splits()])
    n, m = features.shape
    factor = n if bandwidth == "scott" else n * (m + 2) / 4
    return float(features.var(dim=0).mean().sqrt()) * float(factor ** (-1 / (m + 4)))


def check_smoothing(smoothing: Smoothing | None, delta: float | None) -> Smoothing:
    """Return the smoothing, the default one if None, after a check that it fits the radius."""
    if smoothing is None:
        return Smoothing()
    if not isinstance(smoothing, Smoothing):
        raise TypeError(
            f"smoothing must be a Smoothing or None, got {type(smoothing).__name__}. Pass "
            'relflat_sk.theory.Smoothing(kernel="normal"), for example.'
        )
    if smoothing.bandwidth is not None and delta is not None:
        raise ValueError(
            f"bandwidth={smoothing.bandwidth!r} is the same for all samples, and delta={delta!r} "
            "in proportion to their features: give one of them."
        )
    return smoothing


def find_delta(site: Site, delta: float | None) -> float:
    """Return the radius of the smoothing, by default that of Theorem 6."""
    if delta is not None:
        return check_delta(delta)
    return float(site.n_samples ** (-1 / (4 + site.size)))


def check_alphas(alphas: Any, n: int) -> Floats:
    """Check the shares of samples in the smoothed distribution, and scale them to a mean of 1.

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
