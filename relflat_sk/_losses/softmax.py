r"""The curvature of softmax cross-entropy in closed form, exact for confident predictions too.

With logits ``z_i`` and probabilities ``p_i = softmax(z_i)``, the Hessian of sample i's loss in
``z_i`` is ``B_i = diag(p_i) - p_i p_i^T``, times the total weight of the sample's targets. Its
form ``v^T B_i v`` is the variance of the entries of ``v`` under ``p_i``. In floating point, its
usual formula ``E[v^2] - E[v]^2`` cancels to nothing where one class has nearly all probability.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from relflat_sk._losses.curvature import ClosedForm, sample_factors, total_by_forms
from relflat_sk._numerics import constant, safe_root

__all__ = [
    "Softmax",
    "TotalSlopes",
    "differentiable_backward",
    "softmax_curvature",
    "total_slopes",
]

# differences between rows of a matrix are written out up to this number
_FEW = 2**16


def softmax_curvature(z: Tensor, scale: Tensor | None = None) -> ClosedForm:
    r"""Return the curvature of cross-entropy: ``B_i = scale_i (diag(p_i) - p_i p_i^T)``.

    Parameters
    ----------
    z : Tensor of shape (n, d)
        Logits, ``p_i = softmax(z_i)``.
    scale : Tensor of shape (n,), optional
        The total weight of the targets of each sample, one if None.

    Returns
    -------
    ClosedForm
        Never negative, and exact to rounding also where ``p`` is nearly one-hot.

    Examples
    --------
    The variance of the numbers 0 and 1 under the probabilities 1/4 and 3/4 is 3/16:

    >>> z = torch.tensor([[0.25, 0.75]]).log()
    >>> softmax_curvature(z)(torch.tensor([[0.0], [1.0]]))
    tensor([[0.1875]])
    """
    return Softmax(z, scale)


@dataclass(frozen=True)
class Softmax(ClosedForm):
    """The curvature of cross-entropy: ``B_i = scale_i (diag(p_i) - p_i p_i^T)``.

    Shapes: `z` (n, d), `scale` (n,).
    """

    z: Tensor
    scale: Tensor | None

    @cached_property
    def p(self) -> Tensor:
        """Probabilities: (n, d)."""
        return self.z.softmax(dim=1)

    @cached_property
    def top(self) -> Tensor:
        """The most probable class: (n,)."""
        return self.p.argmax(dim=1)

    def __call__(self, factor: Tensor) -> Tensor:
        # The form q_k is the variance of column k of F under p. It is computed from the
        # distance to row c, that of the most probable class: with r = sum of the other
        # probabilities,
        #   Var = sum_{s != top} p_s (F_s - c)^2 - (sum_{s != top} p_s (F_s - c))^2,
        # where the first term is of order r and the second of order r^2.
        c = factor[self.top]
        rest = self.p.scatter(1, self.top[:, None], 0.0)
        r = rest.sum(dim=1, keepdim=True)
        first = rest @ factor
        second = rest @ factor.square()
        spread = second - 2 * c * first + r * c.square()
        forms = (spread - (first - r * c).square()).clamp_min(0)
        return self._scaled(forms)

    def trace(self, factor: Any) -> Tensor:
        if factor is None or factor.shape[0] * factor.shape.numel() > _FEW:
            return super().trace(factor)
        # 1/2 p^T D p with the squared distances D of the rows of F: there are no negative terms,
        # and few operations, whose launches take a GPU's time
        forms: Tensor = ((self.p @ factor.half_distances) * self.p).sum(dim=1)
        return forms if self.scale is None else forms * self.scale

    def product(self, vectors: Tensor) -> Tensor:
        spread = vectors - (self.p * vectors).sum(dim=1, keepdim=True)
        return self._scaled(self.p * spread)

    def diagonal(self) -> Tensor:
        return self._scaled(self.p * self._others())

    def root(self) -> Tensor:
        # diag(p) - p p^T = sum_c p_c (e_c - p) (e_c - p)^T
        identity = torch.eye(self.p.shape[1], dtype=self.p.dtype, device=self.p.device)
        others = torch.diag_embed(self._others())
        away = torch.where(identity.bool(), others, -self.p[:, :, None])
        return away * self._scaled(self.p).sqrt()[:, None, :]

    def root_product(self, vectors: Tensor) -> Tensor:
        # This cancels for confident predictions, to values as small as rounding errors. Their
        # squares are what is used, so no care is needed as in forms.
        parts = safe_root(self.p) * vectors
        products = parts - self.p * parts.sum(dim=1, keepdim=True)
        return products if self.scale is None else products * self.scale.sqrt()[:, None]

    def total(
        self, factor: Tensor, features: Tensor, weights: Tensor | None, scale: float | Tensor
    ) -> Tensor:
        d, k = factor.shape
        if d > k:
            return total_by_forms(self, factor, features, sample_factors(weights, scale))
        if self.scale is not None:
            weights = self.scale if weights is None else weights * self.scale
        total: Tensor = _SoftmaxTotal.apply(  # type: ignore[no-untyped-call]
            self.z, features, factor, sample_factors(weights, scale)
        )
        return total

    def _others(self) -> Tensor:
        """Compute 1 - p without cancellation: for the top class, the sum of the others."""
        index = self.top[:, None]
        rest = self.p.scatter(1, index, 0.0)
        return (1 - self.p).scatter(1, index, rest.sum(dim=1, keepdim=True))

    def _scaled(self, array: Tensor) -> Tensor:
        """Multiply the rows of an array by the samples' scales."""
        return array if self.scale is None else array * self.scale[:, None]


class TotalSlopes(NamedTuple):
    """The slopes of `ClosedForm.total` in each of its arguments, the others held fixed.

    Shapes: `z` (n, d), `along` (n,), `factor` (d, k).
    """

    z: Tensor
    along: Tensor
    factor: Tensor


def total_slopes(total: Tensor) -> TotalSlopes | None:
    """Return the slopes that `ClosedForm.total` has computed together with the total."""
    return getattr(total.grad_fn, "slopes", None)


class _SoftmaxTotal(torch.autograd.Function):
    """`ClosedForm.total` of a softmax, with its gradient, in few operations.

    The gradient is computed together with the total, because the limit of a penalty needs it
    before the backward pass does.

    It uses how far the rows of F lie apart:
      Tr(F^T B_i F) = sum_k Var(F_k) = 1/2 sum_{s, t} p_s p_t |F_s - F_t|^2 = 1/2 p^T D p.
    There are no negative terms, so the result is exact to rounding relative to the largest
    distance, and arrays have d columns in place of F's k. A training step computes this with
    the caches full of other data, so that its cost is the number of operations, and above all
    of different kinds of operations. Classes are on axis 0, because torch is slow along a short
    last axis.
    """

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, features: Tensor, factor: Tensor, each: float | Tensor
    ) -> Tensor:
        p = z.T.softmax(dim=0)
        # a factor of all samples is part of products with few numbers
        scale, own = (1.0, each.reshape(-1)) if isinstance(each, Tensor) else (each, None)
        gaps = None
        if factor.shape[0] * factor.numel() > _FEW:
            squares = _distances(factor)
        else:
            gaps = factor.unsqueeze(1) - factor
            squares = torch.linalg.vector_norm(gaps, dim=2)
        norms = torch.linalg.vector_norm(features, dim=1)
        torch._foreach_mul_([squares, norms], [squares, norms])
        norms = norms if own is None else norms * own
        zero = constant(0.0, p)
        slope = torch.addmm(zero, squares, p, beta=0, alpha=scale / 2)
        forms = (slope * p).sum(dim=0)  # the variances
        weighted = p * norms
        pairs = torch.addmm(zero, p, weighted.T, beta=0, alpha=2 * scale)
        towards = (
            _summed_gaps(pairs, factor) if gaps is None else torch.bmm(pairs[:, None], gaps)[:, 0]
        )
        ctx.save_for_backward(z, features, factor)
        ctx.each = each
        of_z = torch.addcmul(zero, weighted, slope - forms, value=2)
        ctx.slopes = TotalSlopes(of_z.T, forms if own is None else forms * own, towards)
        return forms.dot(norms)

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # to be differentiated again: leave it to autograd
            by_forms = partial(_total_by_forms, each=ctx.each)
            return (*differentiable_backward(by_forms, ctx, outer, n_inputs=3), None)
        _, features, _ = ctx.saved_tensors
        of_z, along, of_factor = torch._foreach_mul(ctx.slopes, outer)
        of_features = torch.addcmul(constant(0.0, along), features, along[:, None], value=2)
        return of_z, of_features, of_factor, None


def _total_by_forms(z: Tensor, features: Tensor, factor: Tensor, each: float | Tensor) -> Tensor:
    return total_by_forms(Softmax(z, None), factor, features, each)


def differentiable_backward(
    function: Callable[..., Tensor], ctx: Any, outer: Tensor, n_inputs: int
) -> tuple[Tensor | None, ...]:
    """Compute the gradient of an autograd function with a graph of its own."""
    # each as if the others were constants: logits may depend on features and factor
    inputs: list[Any] = [None if x is None else x.view_as(x) for x in ctx.saved_tensors[:n_inputs]]
    needs = ctx.needs_input_grad[:n_inputs]
    needed = [x for x, used in zip(inputs, needs, strict=True) if used]
    found = iter(torch.autograd.grad(function(*inputs), needed, outer, create_graph=True))
    return tuple(next(found) if used else None for used in needs)


def _distances(rows: Tensor) -> Tensor:
    """Compute ``|F_s - F_t|`` without the differences themselves: (d, d)."""
    rows = rows - rows[0]  # where torch multiplies matrices, a common part would cancel
    distances: Tensor = torch.cdist(rows, rows)
    return distances


def _summed_gaps(pairs: Tensor, rows: Tensor) -> Tensor:
    """Compute ``sum_t A_st (F_s - F_t)`` without the differences themselves: (d, k)."""
    rows = rows - rows[0]
    return pairs.sum(dim=1, keepdim=True) * rows - pairs @ rows
