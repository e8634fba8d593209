r"""Column quadratic forms: the one primitive every flatness measure is made of.

A network is read at one layer as ``f(x) = g(W phi(x) + b)``. Everywhere in this package:

============  =============  ==========================================================
name          shape          meaning
============  =============  ==========================================================
``weight``    ``(d, m)``     ``W``, the weight matrix of the layer
``features``  ``(n, m)``     ``phi(x_i)``, what the layer receives
``z``         ``(n, d)``     ``W phi(x_i) + b``, what the layer puts out
``B_i``       ``(d, d)``     Hessian of the loss of sample ``i`` in ``z_i``; never stored
``factor``    ``(d, k)``     a matrix ``F``, shared by all samples
============  =============  ==========================================================

Because ``z`` is linear in ``W``, the Hessian of the loss in ``W`` is exactly
``mean_i B_i (x) phi_i phi_i^T``, and all that a measure needs of ``B_i`` are the numbers

.. math:: q_i(F)_k = F_{:,k}^\top B_i F_{:,k} .

A curvature in *closed form* knows those numbers, and with them all that any measure asks for.
There are two: that of the softmax family, and that of losses that act on each output alone.
Anything else is known through its products with vectors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from relflat_sk._numerics import safe_root

__all__ = [
    "ClosedForm",
    "Curvature",
    "diagonal_curvature",
    "product_curvature",
    "pull_back",
    "softmax_curvature",
]


class Curvature(Protocol):
    """The Hessians ``B_i`` of the samples' losses in an array of shape (n, d)."""

    def product(self, vectors: Tensor) -> Tensor:
        """Products ``B_i v_i`` of vectors of the shape of ``z``, or of several such arrays."""


class ClosedForm(Curvature, Protocol):
    """A curvature that is known, not differentiated."""

    def __call__(self, factor: Tensor) -> Tensor:
        """Quadratic forms ``F_k^T B_i F_k`` of the columns of a factor: (n, k)."""

    def diagonal(self) -> Tensor:
        """Return the diagonals of the ``B_i``: (n, d)."""

    def root(self) -> Tensor:
        """Matrices ``R_i`` with ``R_i R_i^T = B_i``: (n, d, d)."""

    def root_product(self, vectors: Tensor) -> Tensor:
        """Products ``R_i v_i`` of vectors of the shape of ``z``, with their graph: (n, d)."""

    def total(
        self, factor: Tensor, features: Tensor, weights: Tensor | None, scale: float | Tensor
    ) -> Tensor:
        """Sum ``scale w_i |phi_i|^2 Tr(F^T B_i F)`` over samples, for training.

        Weights (n,), one if None, and scale are constants.
        """


def _each(weights: Tensor | None, scale: float | Tensor) -> float | Tensor:
    """Return what the samples' forms are multiplied by: a number or (n, 1)."""
    return scale if weights is None else scale * weights[:, None]


def _total(curvature: ClosedForm, factor: Tensor, features: Tensor, each: float | Tensor) -> Tensor:
    forms = curvature(factor).sum(dim=1, keepdim=True)
    norms = features.square().sum(dim=1, keepdim=True)
    return (forms * norms * each).sum()


@dataclass(frozen=True)
class _Softmax:
    z: Tensor  # (n, d) logits
    scale: Tensor | None  # (n,) what multiplies diag(p) - p p^T, or None for one

    @cached_property
    def p(self) -> Tensor:
        """Probabilities: (n, d)."""
        return self.z.softmax(dim=1)

    @cached_property
    def top(self) -> Tensor:
        """The likeliest class: (n,)."""
        return self.p.argmax(dim=1)

    def __call__(self, factor: Tensor) -> Tensor:
        # q_k is the variance of column k of F under p. As E[F^2] - E[F]^2 it would cancel
        # to nothing for confident predictions (p one-hot up to 1e-16). So measure from the
        # row c of the likeliest class: with r = sum of the other probabilities,
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
        # for confident predictions this cancels, to something that is as small as rounding and
        # is going to be squared: no need for the care that forms take
        parts = safe_root(self.p) * vectors
        products = parts - self.p * parts.sum(dim=1, keepdim=True)
        return products if self.scale is None else products * self.scale.sqrt()[:, None]

    def total(
        self, factor: Tensor, features: Tensor, weights: Tensor | None, scale: float | Tensor
    ) -> Tensor:
        d, k = factor.shape
        if d > k:
            return _total(self, factor, features, _each(weights, scale))
        if self.scale is not None:
            weights = self.scale if weights is None else weights * self.scale
        total: Tensor = _SoftmaxTotal.apply(  # type: ignore[no-untyped-call]
            self.z, features, factor, _each(weights, scale)
        )
        return total

    def _others(self) -> Tensor:
        """1 - p, for the likeliest class as the sum of the others: uncancelled."""
        index = self.top[:, None]
        rest = self.p.scatter(1, index, 0.0)
        return (1 - self.p).scatter(1, index, rest.sum(dim=1, keepdim=True))

    def _scaled(self, array: Tensor) -> Tensor:
        return array if self.scale is None else array * self.scale[:, None]


# differences between rows that are so few numbers that one writes them all out
_FEW = 2**16


class _SoftmaxTotal(torch.autograd.Function):
    """What `ClosedForm.total` is for a softmax, with its gradient.

    Exact to rounding relative to the largest distance between rows of F. It takes nothing of F
    but how far its rows lie apart:
      Tr(F^T B_i F) = sum_k Var(F_k) = 1/2 sum_{s, t} p_s p_t |F_s - F_t|^2 = 1/2 p^T D p,
    without negative terms, in arrays of d columns in place of F's k. A training step does this
    each time, just after the network has filled the caches with other things, so that what it
    costs is the number of operations, and above all of kinds of them.
    """

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, features: Tensor, factor: Tensor, each: float | Tensor
    ) -> Tensor:
        p = z.softmax(dim=1)
        gaps = None
        if factor.shape[0] * factor.numel() > _FEW:
            distances = _squared_distances(factor)
        else:
            gaps = factor.unsqueeze(1) - factor
            distances = (gaps * gaps).sum(dim=2)
        slope = p @ distances
        forms = (slope * p).sum(dim=1, keepdim=True)  # twice the variances
        norms = (features * features).sum(dim=1, keepdim=True)
        ctx.save_for_backward(z, features, factor, gaps, p, slope, forms, norms)
        ctx.each = each
        total: Tensor = (forms * norms * (0.5 * each)).sum()
        return total

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        z, features, factor, gaps, p, slope, forms, norms = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again: leave it to autograd
            total = _total(_Softmax(z, None), factor, features, ctx.each)
            needed = ctx.needs_input_grad
            inputs = [
                x for x, want in zip((z, features, factor, None), needed, strict=True) if want
            ]
            found = iter(torch.autograd.grad(total, inputs, outer, create_graph=True))
            return tuple(next(found) if want else None for want in needed)
        each = outer * ctx.each
        weighted = p * (norms * each)
        pairs = p.T @ (weighted + weighted)
        if gaps is None:
            towards = _summed_gaps(pairs, factor)
        else:
            towards = (pairs.unsqueeze(2) * gaps).sum(dim=1)
        return weighted * (slope - forms), features * (forms * each), towards, None


def _squared_distances(rows: Tensor) -> Tensor:
    """``|F_s - F_t|^2``, without writing the differences out: (d, d)."""
    rows = rows - rows[0]  # where torch multiplies matrices, a common part would cancel
    distances = torch.cdist(rows, rows)
    return distances * distances


def _summed_gaps(pairs: Tensor, rows: Tensor) -> Tensor:
    """``sum_t A_st (F_s - F_t)``, in the same way: of the shape of F."""
    rows = rows - rows[0]
    return pairs.sum(dim=1, keepdim=True) * rows - pairs @ rows


@dataclass(frozen=True)
class _Diagonal:
    beta: Tensor  # (n, d): second derivative of the loss in each output

    def __call__(self, factor: Tensor) -> Tensor:
        return self.beta @ factor.square()

    def product(self, vectors: Tensor) -> Tensor:
        return self.beta * vectors

    def diagonal(self) -> Tensor:
        return self.beta

    def root(self) -> Tensor:
        return torch.diag_embed(self.beta.sqrt())

    def root_product(self, vectors: Tensor) -> Tensor:
        return safe_root(self.beta) * vectors

    def total(
        self, factor: Tensor, features: Tensor, weights: Tensor | None, scale: float | Tensor
    ) -> Tensor:
        return _total(self, factor, features, _each(weights, scale))


@dataclass(frozen=True)
class _Products:
    z: Tensor  # (n, d), part of the graph of `gradient`
    gradient: Tensor | None  # (n, d) of the summed loss in z; None where it is constant

    def product(self, vectors: Tensor) -> Tensor:
        found = None
        if self.gradient is not None:
            many = vectors.ndim > self.z.ndim
            (found,) = pull_back(
                [self.gradient], [self.z], [vectors], create_graph=False, many=many
            )
        # where the gradient does not depend on z, there is no curvature
        return torch.zeros_like(vectors) if found is None else found


def softmax_curvature(z: Tensor, scale: Tensor | None = None) -> ClosedForm:
    r"""Curvature of cross-entropy: ``B_i = scale_i (diag(p_i) - p_i p_i^T)``.

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
    return _Softmax(z, scale)


def diagonal_curvature(beta: Tensor) -> ClosedForm:
    """Curvature of a loss that is a sum over outputs: ``B_i = diag(beta_i)``.

    Parameters
    ----------
    beta : Tensor of shape (n, d)
        Second derivative of the loss in each output.

    Returns
    -------
    ClosedForm

    Examples
    --------
    >>> diagonal_curvature(torch.tensor([[1.0, 2.0]]))(torch.tensor([[3.0], [1.0]]))
    tensor([[11.]])
    """
    return _Diagonal(beta)


def product_curvature(loss: Tensor, z: Tensor) -> Curvature:
    """Curvature of any twice differentiable loss: one double backward pass for each product.

    Parameters
    ----------
    loss : Tensor of shape ()
        Sum over samples of the loss, with its graph back to `z`. Samples must not mix.
    z : Tensor of shape (n, d)
        Output of the layer; requires grad.

    Returns
    -------
    Curvature

    Examples
    --------
    >>> z = torch.tensor([[1.0, 2.0]], requires_grad=True)
    >>> product_curvature(z.pow(3).sum(), z).product(torch.ones(1, 2))
    tensor([[ 6., 12.]])
    """
    gradient = None
    if loss.requires_grad:
        (gradient,) = pull_back([loss], [z], create_graph=True)
    curved = gradient is not None and gradient.requires_grad
    return _Products(z, gradient if curved else None)


def pull_back(
    of: Sequence[Tensor],
    inputs: Sequence[Any],
    vectors: Sequence[Tensor] | None = None,
    *,
    create_graph: bool,
    many: bool = False,
) -> tuple[Tensor | None, ...]:
    """Differentiate and keep the graph; None for inputs that do not matter.

    Parameters
    ----------
    of : sequence of Tensor
        What to differentiate, weighted with `vectors`, or numbers.
    inputs : sequence of Tensor or torch.autograd.graph.GradientEdge
    vectors : sequence of Tensor, optional
    create_graph : bool
        Whether the result is to be differentiated again.
    many : bool, default=False
        Whether the vectors, and so the results, have a first axis more: of several vectors,
        all of which are pulled back in one go.

    Returns
    -------
    tuple of Tensor or None

    Raises
    ------
    ValueError
        If an operation in between cannot be differentiated a second time.
    """
    try:
        return torch.autograd.grad(
            of,
            inputs,
            vectors,
            retain_graph=True,
            create_graph=create_graph,
            allow_unused=True,
            is_grads_batched=many,
        )
    except (RuntimeError, NotImplementedError) as error:
        if "not implemented" not in str(error):
            raise
        raise ValueError(
            "the network behind the layer, or the criterion, cannot be differentiated twice: "
            f"{error}. Write the operation in terms of differentiable torch functions, or "
            "measure another layer."
        ) from error
