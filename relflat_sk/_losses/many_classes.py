r"""The curvature of softmax cross-entropy over very many classes, in little memory.

The head of a language model has 50,000 classes and more. Sums over the classes run chunk by chunk.
In training, the penalty's gradient in the weight is one array more of the weight's size.

Let ``t`` be the most probable class of a sample, ``z_n`` the greatest of its other logits, and

.. math:: u_k = e^{z_k - z_n} \;(k \ne t), \quad a = e^{z_n - z_t}, \quad
    p_t = \frac{1}{1 + a \sum_k u_k}, \quad g = a p_t,

so that ``p_k = g u_k``. With the rows ``x_k`` of a factor, from which a common row has been
subtracted, the sums ``U = sum u_k``, ``S = sum u_k x_k`` and ``Q = sum u_k |x_k|^2`` over all
classes but ``t`` give the variance of the rows under ``p``:

.. math:: V = \sum_k p_k |x_k|^2 - \Bigl|\sum_k p_k x_k\Bigr|^2
    = g \bigl(Q - g |S|^2 + p_t (U |x_t|^2 - 2 x_t \cdot S)\bigr) .

``V`` is the trace ``Tr(F^T B F)``; without the sum over columns, the formula gives the quadratic
form of each column. Where ``p`` is nearly one-hot, no digits cancel, because ``g`` is a factor, and
no exponential underflows. Therefore float32 is enough within a chunk. The sums of the chunks are
added up in float64.

With the mean row ``xbar = sum_k p_k x_k`` of a sample, the gradients of its ``V`` are
``p_k (|x_k - xbar|^2 - V)`` in the logits and ``2 p_k (x_k - xbar)`` in the rows. Those of the most
probable class come from ``x_t - xbar = g (U x_t - S)``, where nothing cancels.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from relflat_sk._losses.curvature import Factor, SlopesOf, Softmax, chunks
from relflat_sk._numerics import full_precision, without_autocast

# number of classes from which on they are read in chunks
MANY = 4096


@dataclass(frozen=True)
class _Odds:
    """The most probable class of each sample, and how probable the other classes are beside it."""

    top: Tensor  # (n, 1)
    reference: Tensor  # (n, 1)
    ratio: Tensor  # (n, 1)

    @classmethod
    def of(cls, z: Tensor) -> "_Odds":
        """Find the two most probable classes."""
        logits, classes = z.detach().topk(2, dim=1)
        first, second = logits.double().unbind(dim=1)
        second = second.clamp_min(torch.finfo(z.dtype).min)  # logits may be -inf
        reference = full_precision(logits[:, 1:].clamp_min(torch.finfo(z.dtype).min))
        return cls(classes[:, :1], reference, (second - first).exp()[:, None])

    def place(self, part: slice) -> tuple[Tensor, Tensor]:
        """Return the place of the most probable class in a chunk, and whether it is there."""
        at = self.top.clamp(part.start, part.stop - 1)
        return at - part.start, at == self.top

    def others(self, z: Tensor, part: slice) -> Tensor:
        """Compute ``u`` for the classes of a chunk: (n, c)."""
        u = (full_precision(z[:, part]) - self.reference).exp_()
        at, inside = self.place(part)
        return u.scatter_(1, at, u.gather(1, at).masked_fill(inside, 0))

    def shares(self, total: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probability of the most probable class, (n, 1), and a factor of the others."""
        p = 1 / (1 + self.ratio * total)
        return p, self.ratio * p

    def trace(self, z: Tensor) -> Tensor:
        """Compute ``sum_k p_k (1 - p_k)``: (n, 1)."""
        total = squares = torch.zeros_like(self.ratio)
        for part in chunks(0, z.T):
            u = self.others(z, part)
            total = total + u.sum(dim=1, keepdim=True)
            squares = squares + u.square_().sum(dim=1, keepdim=True)
        p, g = self.shares(total)
        return g * (total * (1 + p) - g * squares)


@dataclass(frozen=True)
class _Sums:
    """Sums over the classes but the most probable one, in float64."""

    odds: _Odds
    total: Tensor  # (n, 1)
    first: Tensor  # (n, m)
    second: Tensor  # (n, 1)
    row: Tensor  # (n, m)

    @classmethod
    def over(cls, z: Tensor, factor: Factor, *, columns: bool = False) -> "_Sums":
        """Compute the sums chunk by chunk."""
        odds = _Odds.of(z)
        total = first = second = torch.zeros_like(odds.ratio)
        with without_autocast(z):
            for part in chunks(len(z), factor.array):
                u = odds.others(z, part)
                total = total + u.sum(dim=1, keepdim=True)
                first = first + u @ full_precision(factor.array[part])
                second = second + u @ (factor[part].square_() if columns else factor.norms[part])
        # the common row costs digits in squares, but not in sums, where it is subtracted at the end
        first = factor.stretch(first - total * factor.centre)
        return cls(odds, total, first, second, factor[odds.top[:, 0]].double())

    def variances(self) -> Tensor:
        """Compute the variance of each column under ``p``, or their sum: (n, m)."""
        p, g = self.odds.shares(self.total)
        of_top, mixed, squares = self.row.square(), self.row * self.first, self.first.square()
        if self.second.shape[1] == 1:
            of_top, mixed, squares = (x.sum(dim=1, keepdim=True) for x in (of_top, mixed, squares))
        of_rest = self.second - g * squares
        return g * (of_rest + p * (self.total * of_top - 2 * mixed)).clamp_min(0)

    def gradients(self, z: Tensor, factor: Factor, outer: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the gradients of ``sum_i outer_i V_i`` in logits, (n, d), and rows, (d, m)."""
        dtype, (p, g) = factor.centre.dtype, self.odds.shares(self.total)
        variances, away = self.variances(), g * (self.total * self.row - self.first)
        mean, factor_of_u = (self.row - away).to(dtype), (outer * g).to(dtype)
        offset = (mean.double().square().sum(dim=1, keepdim=True) - variances).to(dtype)
        of_top = (2 * outer * p * away).to(dtype)
        in_logits, in_rows = torch.empty_like(z), torch.empty_like(factor.array)
        for part in chunks(len(z), factor.array):
            shares, x = self.odds.others(z, part).mul_(factor_of_u), factor[part]
            distances = torch.addmm(factor.norms[part].T, mean, x.T, alpha=-2)
            in_logits[:, part] = distances.add_(offset).mul_(shares)
            x.mul_(2 * shares.sum(dim=0)[:, None]).addmm_(shares.T, mean, alpha=-2)
            at, inside = self.odds.place(part)
            in_rows[part] = x.index_add_(0, at[:, 0], of_top.masked_fill(~inside, 0))
            del x, shares, distances  # before the next chunk's are made
        gaps = away.square().sum(dim=1, keepdim=True) - variances
        in_logits.scatter_(1, self.odds.top, (outer * p * gaps).to(z.dtype))
        return in_logits, in_rows


@dataclass(frozen=True)
class ManyClasses(Softmax):
    """The curvature of cross-entropy: ``B_i = scale_i (diag(p_i) - p_i p_i^T)``.

    Forms, traces and totals are computed over chunks of the classes. Products, diagonals and
    roots are arrays with all classes, as in `Softmax`.
    """

    _in_chunks: ClassVar[bool] = True

    def __call__(self, factor: Tensor) -> Tensor:
        return self._scaled(_Sums.over(self.z, Factor(factor), columns=True).variances())

    def trace(self, factor: Factor | None) -> Tensor:
        if factor is None:
            return self._scaled(_Odds.of(self.z).trace(self.z))[:, 0]
        return self._scaled(_Sums.over(self.z, factor).variances())[:, 0]

    @staticmethod
    def total_with_slopes(
        z: Tensor, features: Tensor, factor: Tensor, each: float | Tensor
    ) -> tuple[Tensor, SlopesOf]:
        rows = Factor(factor)
        sums = _Sums.over(z, rows)
        variances = sums.variances()
        each = each[:, None] if isinstance(each, Tensor) and each.ndim else each
        norms = features.double().square().sum(dim=1, keepdim=True) * each

        def slopes(outer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            with without_autocast(outer):
                of_z, of_factor = sums.gradients(z, rows, norms * outer)
            along = 2 * variances * each * outer
            return of_z, features * along.to(features.dtype), of_factor

        return (variances * norms).sum().to(full_precision(z).dtype), slopes
