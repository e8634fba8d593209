r"""Sums over very many classes of a softmax, in little memory.

The head of a language model has 50,000 classes and more. This module computes sums over the
classes chunk by chunk. It stores neither an array of the shape of the weight nor the probabilities
of all classes.

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
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from relflat_sk._numerics import full_precision, without_autocast

__all__ = ["Odds", "Rows", "Sums", "chunks"]

# largest number of classes in a chunk, and of numbers in its arrays, on a CPU and on a GPU. Large
# chunks lose digits, because a matrix product adds up more terms; small chunks take long on a GPU
_CLASSES = {False: 2**10, True: 2**13}
_NUMBERS = {False: 2**23, True: 2**26}
# number of rows from which the row that is subtracted is computed, as their mean
_CENTRED = 1024


@dataclass(frozen=True)
class Rows:
    """The rows ``x_k`` of a factor, minus a common row, whose squares would cost digits.

    Shapes: `factor` (d, m), `centre`, `spread` (m,).
    """

    factor: Tensor
    centre: Tensor
    spread: Tensor | None = None

    @classmethod
    def of(cls, factor: Tensor, spread: Tensor | None = None) -> "Rows":
        """Centre the rows of a factor. Shapes: `factor` (d, m), `spread` (m,)."""
        factor = factor.detach()
        some = factor[:: max(1, len(factor) // _CENTRED)]
        centre = full_precision(some).mean(dim=0)
        return cls(factor, centre, None if spread is None else spread.detach())

    @property
    def shape(self) -> torch.Size:
        """Shape of the factor."""
        return self.factor.shape

    def matrix(self) -> Tensor:
        """Return a copy of the factor, with the spread. Shapes: returns (d, m)."""
        return self.stretch(full_precision(self.factor).clone())

    @cached_property
    def norms(self) -> Tensor:
        """Squared norms ``|x_k|^2``: (d, 1)."""
        parts = [
            torch.linalg.vector_norm(self[part], dim=1, keepdim=True).square_()
            for part in chunks(0, self.factor)
        ]
        return torch.cat(parts)

    def __getitem__(self, index: slice | Tensor) -> Tensor:
        # some of the rows, as a new array: (c, m)
        return self.stretch(self.plain(index))

    def plain(self, index: slice | Tensor) -> Tensor:
        """Compute some of the rows without the spread. Shapes: `index` (c,); returns (c, m)."""
        return full_precision(self.factor[index]) - self.centre

    def stretch(self, rows: Tensor) -> Tensor:
        """Multiply rows by the spread, in place. Shapes: `rows` (c, m); returns (c, m)."""
        return rows if self.spread is None else rows.mul_(self.spread)


@dataclass(frozen=True)
class Odds:
    """The most probable class of each sample, and how probable the other classes are beside it.

    Shapes: `top`, `reference`, `ratio` (n, 1).
    """

    top: Tensor
    reference: Tensor
    ratio: Tensor

    @classmethod
    def of(cls, z: Tensor) -> "Odds":
        """Find the two most probable classes. Shapes: `z` (n, d)."""
        logits, classes = z.detach().topk(2, dim=1)
        first, second = logits.double().unbind(dim=1)
        second = second.clamp_min(torch.finfo(z.dtype).min)  # logits may be -inf
        reference = full_precision(logits[:, 1:].clamp_min(torch.finfo(z.dtype).min))
        return cls(classes[:, :1], reference, (second - first).exp()[:, None])

    def others(self, z: Tensor, part: slice) -> Tensor:
        """Compute ``u`` for the classes of a chunk. Shapes: `z` (n, d); returns (n, c)."""
        u = (full_precision(z[:, part]) - self.reference).exp_()
        at = self.top - part.start
        inside = (at >= 0) & (at < u.shape[1])
        at = at.clamp(0, u.shape[1] - 1)
        return u.scatter_(1, at, u.gather(1, at).masked_fill(inside, 0))

    def shares(self, total: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probability of the most probable class, and a factor of all others.

        Shapes: `total` (n, 1); returns p (n, 1), g (n, 1).
        """
        p = 1 / (1 + self.ratio * total)
        return p, self.ratio * p

    def trace(self, z: Tensor) -> Tensor:
        """Compute ``sum_k p_k (1 - p_k)``. Shapes: `z` (n, d); returns (n,)."""
        total = squares = torch.zeros_like(self.ratio)
        for part in chunks(0, z.T):
            u = self.others(z, part)
            total = total + u.sum(dim=1, keepdim=True)
            squares = squares + u.square_().sum(dim=1, keepdim=True)
        p, g = self.shares(total)
        return (g * (total * (1 + p) - g * squares))[:, 0]


@dataclass(frozen=True)
class Sums:
    """Sums over the classes but the most probable one, in float64.

    Shapes: `total`, `second` (n, 1), `first`, `row` (n, m).
    """

    odds: Odds
    total: Tensor
    first: Tensor
    second: Tensor
    row: Tensor

    @classmethod
    def over(cls, z: Tensor, rows: Rows, *, columns: bool = False) -> "Sums":
        """Compute the sums chunk by chunk. Shapes: `z` (n, d)."""
        odds = Odds.of(z)
        total = first = second = torch.zeros_like(odds.ratio)
        with without_autocast(z):
            for part in chunks(len(z), rows.factor):
                u = odds.others(z, part)
                total = total + u.sum(dim=1, keepdim=True)
                first = first + u @ full_precision(rows.factor[part])
                second = second + u @ (rows[part].square_() if columns else rows.norms[part])
        # the common row costs digits in squares, but not in sums, where it is subtracted at the end
        first = rows.stretch(first - total * rows.centre)
        return cls(odds, total, first, second, rows[odds.top[:, 0]].double())

    def variances(self) -> Tensor:
        """Compute the variance of each column under ``p``, or their sum.

        Shapes: returns (n, m).
        """
        p, g = self.odds.shares(self.total)
        own, mixed, squares = self.row.square(), self.row * self.first, self.first.square()
        if self.second.shape[1] == 1:
            own, mixed, squares = (x.sum(dim=1, keepdim=True) for x in (own, mixed, squares))
        others = self.second - g * squares
        return g * (others + p * (self.total * own - 2 * mixed)).clamp_min(0)


def chunks(n: int, factor: Tensor) -> Iterator[slice]:
    """Cut the classes into chunks, for arrays of (n, c) and (c, m) numbers.

    Shapes: `factor` (d, m).
    """
    d, m = factor.shape
    size = max(1, min(_CLASSES[factor.is_cuda], _NUMBERS[factor.is_cuda] // (n + m)))
    for start in range(0, d, size):
        yield slice(start, min(start + size, d))
