r"""The curvature of softmax cross-entropy over very many classes, with its gradient.

For the sums, and the notation, see `relflat_sk._losses.class_chunks`.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from relflat_sk._losses.class_chunks import Odds, Rows, Sums
from relflat_sk._losses.class_slopes import ClassSlopes, Head, Slot
from relflat_sk._losses.curvature import ClosedForm, sample_factors, total_by_forms
from relflat_sk._losses.softmax import Softmax, differentiable_backward
from relflat_sk._numerics import full_precision, without_autocast

__all__ = ["MANY", "ManyClasses"]

# number of classes from which on they are read in chunks
MANY = 4096


@dataclass(frozen=True)
class ManyClasses(Softmax):
    """The curvature of cross-entropy: ``B_i = scale_i (diag(p_i) - p_i p_i^T)``.

    Forms, traces and totals are computed over chunks of the classes. Products, diagonals and
    roots are arrays with all classes, as in `Softmax`.

    Shapes: `z` (n, d), `scale` (n,).
    """

    @classmethod
    def of(cls, curvature: ClosedForm | None) -> "ManyClasses | None":
        """Return the curvature for chunks of the classes, if it is that of a softmax."""
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

    def total(
        self,
        factor: Tensor,
        features: Tensor,
        weights: Tensor | None,
        scale: float | Tensor,
        spread: Tensor | None = None,
        head: Head | None = None,
    ) -> Tensor:
        """Sum ``scale w_i |phi_i|^2 Tr(F^T B_i F)``, for training: ().

        Shapes: `factor` (d, m), `features` (n, m), `weights` (n,), `spread` (m,).
        """
        if self.scale is not None:
            weights = self.scale if weights is None else weights * self.scale
        each, (handle, slot) = sample_factors(weights, scale), head or Head(None, Slot())
        total: Tensor = _Total.apply(  # type: ignore[no-untyped-call]
            self.z, features, factor, spread, handle, slot, each
        )
        return total


class _Total(torch.autograd.Function):
    """The total of `ManyClasses.total`, with its gradient over chunks.

    The gradient in the logits is computed together with the total, because the limit of a penalty
    needs it before the backward pass does. The gradient in the weight is as large as the weight:
    the layer's own call makes it, together with that of the loss.
    """

    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        features: Tensor,
        weight: Tensor,
        spread: Tensor | None,
        handle: Tensor | None,
        slot: Slot,
        each: float | Tensor,
    ) -> Tensor:
        needed = ctx.needs_input_grad
        rows = Rows.of(weight, spread)
        sums = Sums.over(z, rows, columns=needed[3])
        norms = features.double().square().sum(dim=1, keepdim=True)
        slopes = ClassSlopes(z.detach(), rows, sums, norms * each)
        along = (2 * slopes.variances * each).to(features.dtype)
        ctx.save_for_backward(z, features, weight, spread)
        ctx.each, ctx.along, ctx.slot = each, along, slot
        slot.slopes, slot.of_z = slopes, slopes.of_logits() if needed[0] else None
        if needed[1]:
            slot.direct.append((features, features * along))
        if spread is not None and needed[3]:
            slot.direct.append((spread, slopes.of_spread()))
        return (slopes.variances * slopes.outer).sum().to(full_precision(z).dtype)

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # to be differentiated again: leave it to autograd
            by_forms = partial(_dense_total, each=ctx.each)
            return (*differentiable_backward(by_forms, ctx, outer, n_inputs=4), None, None, None)
        needed, slot, features = ctx.needs_input_grad, ctx.slot, ctx.saved_tensors[1]
        slopes, of_z, slot.of_z = slot.slopes, slot.of_z, None
        with without_autocast(outer):
            if needed[0]:  # the first backward pass takes the array, another one computes it anew
                of_z = (slopes.of_logits() if of_z is None else of_z).mul_(outer)
            return (
                of_z,
                features * (ctx.along * outer) if needed[1] else None,
                slopes.of_weight(outer) if needed[2] and not needed[4] else None,
                slopes.of_spread() * outer if needed[3] else None,
                outer if needed[4] else None,
                None,
                None,
            )


def _dense_total(
    z: Tensor, features: Tensor, weight: Tensor, spread: Tensor | None, each: float | Tensor
) -> Tensor:
    """Compute the same with arrays of all classes, differentiable any number of times."""
    factor = full_precision(weight)
    factor = factor if spread is None else factor * spread
    return total_by_forms(Softmax(full_precision(z), None), factor, features, each)
