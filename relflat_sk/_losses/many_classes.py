r"""The curvature of softmax cross-entropy over very many classes, with its gradient.

For the sums, and the notation, see `relflat_sk._losses.class_chunks`.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from relflat_sk._losses.class_chunks import Odds, Rows, Sums, chunks
from relflat_sk._losses.curvature import ClosedForm
from relflat_sk._losses.softmax import Softmax, differentiable_backward
from relflat_sk._numerics import full_precision

__all__ = ["MANY", "ManyClasses"]

# number of classes from which on they are read in chunks
MANY = 4096


@dataclass(frozen=True)
class ManyClasses(Softmax):
    """The curvature of cross-entropy: ``B_i = scale_i (diag(p_i) - p_i p_i^T)``.

    Forms, traces and totals are computed over chunks of the classes. Products, diagonals and
    roots are arrays with all classes, as in `Softmax`.

    Parameters
    ----------
    z : Tensor of shape (n, d)
        Logits of any floating type.
    scale : Tensor of shape (n,) or None
        The total weight of the targets of each sample, one if None.
    """

    @classmethod
    def of(cls, curvature: ClosedForm | None) -> "ManyClasses | None":
        """Return the curvature for chunks of the classes, if it is that of a softmax.

        Parameters
        ----------
        curvature : ClosedForm or None
            From the table of losses.

        Returns
        -------
        ManyClasses or None
            None for any other curvature.
        """
        return cls(curvature.z, curvature.scale) if isinstance(curvature, Softmax) else None

    @cached_property
    def p(self) -> Tensor:
        """Probabilities: (n, d)."""
        return full_precision(self.z).softmax(dim=1)

    def __call__(self, factor: Tensor) -> Tensor:
        """Compute quadratic forms ``F_k^T B_i F_k`` of the columns of a factor: (n, k)."""
        rows = Rows.of(factor)
        return self._scaled(Sums.over(self.z, rows, columns=True).variances())

    def trace(self, factor: "Tensor | Rows | None") -> Tensor:
        """Compute ``Tr(F^T B_i F)``, the trace of ``B_i`` without a factor: (n,)."""
        if factor is None:
            found = Odds.of(self.z).trace(self.z)
        else:
            rows = Rows.of(factor) if isinstance(factor, Tensor) else factor
            found = Sums.over(self.z, rows).variances()[:, 0]
        return found if self.scale is None else found * self.scale

    def variances(self, weight: Tensor, spread: Tensor | None) -> Tensor:
        """Compute ``Tr(F^T B_i F)`` for training, where ``F`` is the weight times the spread.

        Parameters
        ----------
        weight : Tensor of shape (d, m)
            Weight of the layer, of any floating type.
        spread : Tensor of shape (m,) or None
            Multiplies the columns of the weight; ones if None.

        Returns
        -------
        Tensor of shape (n,)
            With its graph. Its gradient is computed over chunks as well.
        """
        found: Tensor = _Variances.apply(self.z, weight, spread)  # type: ignore[no-untyped-call]
        return found if self.scale is None else found * self.scale


class _Variances(torch.autograd.Function):
    """The variances of `ManyClasses.variances`, with their gradient over chunks.

    With the mean row ``xbar = sum_k p_k x_k`` of a sample, the gradients of ``V`` are
    ``p_k (|x_k - xbar|^2 - V)`` in the logits and ``2 p_k (x_k - xbar)`` in the rows. Those of
    the most probable class come from ``x_t - xbar = g (U x_t - S)``, where nothing cancels.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, weight: Tensor, spread: Tensor | None) -> Tensor:
        rows = Rows.of(weight, spread)
        sums = Sums.over(z, rows)
        variances = sums.variances()
        ctx.save_for_backward(z, weight, spread, sums.total, sums.first, sums.row, variances)
        ctx.odds, ctx.rows = sums.odds, rows
        return variances[:, 0].to(full_precision(z).dtype)

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # to be differentiated again: leave it to autograd
            return differentiable_backward(_dense_variances, ctx, outer, n_inputs=3)
        with torch.autocast(outer.device.type, enabled=False):
            return _gradients(ctx, outer.double()[:, None])


def _gradients(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
    """Compute the gradients in logits, weight and spread, from that in V: (n, 1)."""
    z, weight, spread, total, first, row, variances = ctx.saved_tensors
    odds, rows = ctx.odds, ctx.rows
    in_z, in_weight, in_spread = ctx.needs_input_grad
    p, g = odds.shares(total)
    away = g * (total * row - first)  # x_t - xbar
    mean = row - away
    of_top = 2 * outer * p * away
    mean, share, offset = (
        x.to(rows.centre.dtype)
        for x in (mean, outer * g, mean.square().sum(dim=1, keepdim=True) - variances)
    )
    slopes = torch.empty_like(z) if in_z else None
    moves = torch.empty_like(weight) if in_weight else None
    stretch = torch.zeros_like(rows.centre, dtype=torch.float64) if in_spread else None
    for part in chunks(len(z), weight):
        shares, x = odds.others(z, part).mul_(share), rows[part]
        if slopes is not None:
            distances = torch.addmm(rows.norms[part].T, mean, x.T, alpha=-2).add_(offset)
            slopes[:, part] = distances.mul_(shares)
        if moves is not None or stretch is not None:
            x.mul_(2 * shares.sum(dim=0)[:, None]).addmm_(shares.T, mean, alpha=-2)
            if stretch is not None:
                stretch += (x * rows.plain(part)).sum(dim=0)
            if moves is not None:
                moves[part] = rows.stretch(x)
    if slopes is not None:
        gaps = away.square().sum(dim=1, keepdim=True) - variances
        slopes.scatter_(1, odds.top, (outer * p * gaps).to(slopes.dtype))
    if stretch is not None:
        stretch += (of_top * rows.plain(odds.top[:, 0])).sum(dim=0)
        stretch = stretch.to(spread.dtype)
    if moves is not None:
        moves.index_add_(0, odds.top[:, 0], rows.stretch(of_top).to(moves.dtype))
    return slopes, moves, stretch


def _dense_variances(z: Tensor, weight: Tensor, spread: Tensor | None) -> Tensor:
    """Compute the same with arrays of all classes, differentiable any number of times."""
    factor = full_precision(weight)
    factor = factor if spread is None else factor * spread
    return Softmax(full_precision(z), None).trace(factor)
