r"""The curvature of softmax cross-entropy over very many classes, with its gradient.

For the sums, and the notation, see `relflat_sk._losses.class_chunks`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from relflat_sk._losses.class_chunks import Odds, Rows, Sums, chunks
from relflat_sk._losses.curvature import ClosedForm, sample_factors, total_by_forms
from relflat_sk._losses.factor import Factor
from relflat_sk._losses.softmax import Softmax, TotalSlopes, differentiable_backward
from relflat_sk._numerics import full_precision, without_autocast

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

    def trace(self, factor: Rows | None) -> Tensor:
        """Compute ``Tr(F^T B_i F)``, the trace of ``B_i`` without a factor: (n,)."""
        if factor is None:
            found = Odds.of(self.z).trace(self.z)
        else:
            found = Sums.over(self.z, factor).variances()[:, 0]
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

    def total(
        self, factor: Tensor, features: Tensor, weights: Tensor | None, scale: float | Tensor
    ) -> Tensor:
        """Sum ``scale w_i |phi_i|^2 Tr(F^T B_i F)``, where ``F`` has any floating type: ()."""
        if self.scale is not None:
            weights = self.scale if weights is None else weights * self.scale
        total: Tensor = _Total.apply(  # type: ignore[no-untyped-call]
            self.z, features, factor, sample_factors(weights, scale)
        )
        return total


class _Total(torch.autograd.Function):
    """The total of `ManyClasses.total`, with its gradient over chunks.

    The gradient is computed together with the total, because the limit of a penalty needs it
    before the backward pass does.
    """

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, features: Tensor, weight: Tensor, each: float | Tensor
    ) -> Tensor:
        rows = Rows.of(weight)
        sums = Sums.over(z, rows)
        variances = sums.variances()
        of_variances = features.double().square().sum(dim=1, keepdim=True) * each
        ctx.save_for_backward(z, features, weight)
        ctx.each, ctx.rows, ctx.sums, ctx.of_variances = each, rows, sums, of_variances
        ctx.slopes = _slopes(ctx, z, features) if any(ctx.needs_input_grad) else None
        return (variances * of_variances).sum().to(full_precision(z).dtype)

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # to be differentiated again: leave it to autograd
            by_forms = partial(_dense_total, each=ctx.each)
            return (*differentiable_backward(by_forms, ctx, outer, n_inputs=3), None)
        z, features, _ = ctx.saved_tensors
        # the gradient in the weight is as large as the weight: the first backward pass takes it,
        # and another one computes it anew
        slopes, ctx.slopes = ctx.slopes, None
        with without_autocast(outer):
            of_z, along, of_weight = slopes or _slopes(ctx, z, features)
        in_z, in_features, in_weight, _ = ctx.needs_input_grad
        return (
            of_z.mul_(outer) if in_z else None,
            features * (2 * along * outer)[:, None] if in_features else None,
            of_weight.mul_(outer) if in_weight else None,
            None,
        )


def _slopes(ctx: Any, z: Tensor, features: Tensor) -> TotalSlopes:
    """Compute the gradients of a total; that in the weight only where it is needed."""
    of_z, of_weight, _ = _gradients(
        z, ctx.rows, ctx.sums, ctx.of_variances, (True, ctx.needs_input_grad[2], False)
    )
    assert of_z is not None
    along = (ctx.each * ctx.sums.variances())[:, 0].to(features.dtype)
    return TotalSlopes(of_z, along, z.new_zeros(()) if of_weight is None else of_weight)


def _dense_total(z: Tensor, features: Tensor, weight: Tensor, each: float | Tensor) -> Tensor:
    """Compute the same with arrays of all classes, differentiable any number of times."""
    curvature = Softmax(full_precision(z), None)
    return total_by_forms(curvature, full_precision(weight), features, each)


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
        ctx.save_for_backward(z, weight, spread)
        ctx.rows, ctx.sums = rows, sums
        return variances[:, 0].to(full_precision(z).dtype)

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # to be differentiated again: leave it to autograd
            return differentiable_backward(_dense_variances, ctx, outer, n_inputs=3)
        with without_autocast(outer):
            return _gradients(
                ctx.saved_tensors[0],
                ctx.rows,
                ctx.sums,
                outer.double()[:, None],
                ctx.needs_input_grad,
            )


def _gradients(
    z: Tensor, rows: Rows, sums: Sums, outer: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Compute the gradients in logits, weight and spread, from that in V: (n, 1)."""
    in_z, in_weight, in_spread = needed
    weight, odds, variances = rows.factor, sums.odds, sums.variances()
    p, g = odds.shares(sums.total)
    away = g * (sums.total * sums.row - sums.first)  # x_t - xbar
    mean = sums.row - away
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
        stretch = stretch.to(rows.centre.dtype)
    if moves is not None:
        moves.index_add_(0, odds.top[:, 0], rows.stretch(of_top).to(moves.dtype))
    return slopes, moves, stretch


def _dense_variances(z: Tensor, weight: Tensor, spread: Tensor | None) -> Tensor:
    """Compute the same with arrays of all classes, differentiable any number of times."""
    factor = full_precision(weight)
    factor = factor if spread is None else factor * spread
    return Softmax(full_precision(z), None).trace(Factor(factor))
