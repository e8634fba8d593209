r"""The curvature of softmax cross-entropy in closed form, exact for confident predictions too.

With logits ``z_i`` and probabilities ``p_i = softmax(z_i)``, the Hessian of sample i's loss in
``z_i`` is ``B_i = diag(p_i) - p_i p_i^T``, times the total weight of the sample's targets. Its
form ``v^T B_i v`` is the variance of the entries of ``v`` under ``p_i``. In floating point, its
usual formula ``E[v^2] - E[v]^2`` cancels to nothing where one class has nearly all probability.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from relflat_sk._losses.array_losses import CrossEntropy, TraceTerm
from relflat_sk._losses.curvature import ClosedForm, sample_factors, total_by_forms
from relflat_sk._numerics import safe_root

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
        each = sample_factors(self._weighted(weights), scale)
        if factor.shape[0] > factor.shape[1]:
            return total_by_forms(self, factor, features, each)
        total: Tensor = _Total.apply(self.z, features, factor, each)  # type: ignore[no-untyped-call]
        return total

    def _weighted(self, weights: Tensor | None) -> Tensor | None:
        """Multiply the weights of samples by their scales."""
        if self.scale is None:
            return weights
        return self.scale if weights is None else weights * self.scale

    def _others(self) -> Tensor:
        """Compute 1 - p without cancellation: for the top class, the sum of the others."""
        index = self.top[:, None]
        rest = self.p.scatter(1, index, 0.0)
        return (1 - self.p).scatter(1, index, rest.sum(dim=1, keepdim=True))

    def _scaled(self, array: Tensor) -> Tensor:
        """Multiply the rows of an array by the samples' scales."""
        return array if self.scale is None else array * self.scale[:, None]


class _Total(torch.autograd.Function):
    """`ClosedForm.total` of a softmax, with its gradient, in few operations."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, features: Tensor, factor: Tensor, each: float | Tensor
    ) -> Tensor:
        ctx.save_for_backward(z, features, factor)
        ctx.each = each.flatten() if isinstance(each, Tensor) else each
        ctx.term = _term(z, features, factor, ctx.each)
        value: Tensor = ctx.term.value
        return value

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # to be differentiated again: leave it to autograd

            def value(z: Tensor, features: Tensor, factor: Tensor) -> Tensor:
                found: Tensor = _term(z, features, factor, ctx.each).value
                return found

            return (*differentiable_backward(value, ctx, outer), None)
        _, features, _ = ctx.saved_tensors
        term = ctx.term
        return term.z * outer, features * (term.of_phi * outer), term.weight * outer, None


def _term(z: Tensor, features: Tensor, factor: Tensor, each: float | Tensor) -> TraceTerm:
    """Compute the trace term of a softmax."""
    return CrossEntropy().trace_term(z.softmax(-1), features, factor, each)


def differentiable_backward(
    function: Callable[..., Tensor], ctx: Any, outer: Tensor
) -> tuple[Tensor | None, ...]:
    """Compute the gradient of an autograd function in its saved tensors, with its own graph."""
    # each as if the others were constants: logits may depend on features and factor
    inputs = [x.view_as(x) for x in ctx.saved_tensors]
    needs = ctx.needs_input_grad[: len(inputs)]
    needed = [x for x, used in zip(inputs, needs, strict=True) if used]
    found = iter(torch.autograd.grad(function(*inputs), needed, outer, create_graph=True))
    return tuple(next(found) if used else None for used in needs)
