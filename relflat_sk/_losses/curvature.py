r"""Column quadratic forms: the one primitive every flatness measure is made of.

A network is read at one layer as ``f(x) = g(W phi(x) + b)``. Everywhere in this package:

============  =============  ==========================================================
name          shape          meaning
============  =============  ==========================================================
``weight``    ``(d, m)``     ``W``, the weight matrix of the layer
``features``  ``(n, m)``     ``phi(x_i)``, the layer's input
``z``         ``(n, d)``     ``W phi(x_i) + b``, the layer's output
``B_i``       ``(d, d)``     Hessian of the loss of sample ``i`` in ``z_i``; never stored
``factor``    ``(d, k)``     a matrix ``F``, shared by all samples
============  =============  ==========================================================

Because ``z`` is linear in ``W``, the Hessian of the loss in ``W`` is exactly
``mean_i B_i (x) phi_i phi_i^T``, and all that a measure needs of ``B_i`` are the numbers

.. math:: q_i(F)_k = F_{:,k}^\top B_i F_{:,k} .

A curvature in *closed form* gives those numbers and all other quantities that measures use.
There are two: that of the softmax family, and that of losses that act on each output alone. Any
other curvature is given by its products with vectors.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from relflat_sk._numerics import (
    FEW,
    distances_of_many,
    dots,
    full_precision,
    gaps_between,
    safe_root,
    squared_distances,
    transposed,
    without_diagonal,
)
from relflat_sk._random import make_generator, rademacher

# -- losses of arrays of NumPy or torch, with gradients and trace terms by formula ---------
# Any leading axes stand for several networks: outputs z and targets are of shape (..., n, d),
# the features phi of the last layer (..., n, m), its weight W (..., d, m), numbers of samples
# (..., n), and those of networks (...). A loss is a sum of the samples' losses times their shares,
# so that there is one formula with and without sample weights. The *trace term* is
# sum_i scale_i |phi_i|^2 Tr(W^T B_i W), with a scale of shape (..., n, 1), or one number.


def namespace(array: Any) -> Any:
    """Return the library of an array, whose functions have the same names in both."""
    return torch if isinstance(array, Tensor) else np


class TraceTerm(NamedTuple):
    """A trace term with its partial derivatives; that in the features is ``of_phi * phi``."""

    value: Any  # (...)
    z: Any  # (..., n, d)
    of_phi: Any  # (..., n, 1)
    weight: Any  # (..., d, m)


class Slopes(NamedTuple):
    """Losses of networks with their gradients, and what the outputs ``z`` predict."""

    value: Any  # (...)
    z: Any  # (..., n, d)
    p: Any  # (..., n, d)


class ArrayLoss(ABC):
    """A loss of outputs."""

    # the slope of an output's loss, as a multiple of ``p - target``
    slope = 1.0

    def divisor(self, d: int) -> int:
        """Return what each sample adds to the divisor of the mean."""
        return d

    def targets(self, values: Any, d: int, like: Any) -> Any:
        """Return targets of the outputs' shape and kind from those that the criterion takes."""
        return values

    @abstractmethod
    def each(self, z: Any, target: Any) -> tuple[Any, Any]:
        """Compute the samples' losses, (..., n), and what the outputs predict, (..., n, d)."""

    def slopes(self, z: Any, target: Any, shares: Any) -> Slopes:
        """Compute the losses of networks, and their gradients in the outputs."""
        losses, p = self.each(z, target)
        scale = shares * (self.slope / self.divisor(z.shape[-1]))
        return Slopes(dots(losses, shares), (p - target) * scale[..., None], p)

    @abstractmethod
    def trace_term(self, p: Any, phi: Any, weight: Any, scale: Any) -> TraceTerm:
        """Compute the trace term at the last layer, given the predictions of `slopes`."""

    @abstractmethod
    def root_product(self, p: Any, vectors: Any) -> tuple[Any, Callable[[Any], Any]]:
        """Compute ``R_i v_i`` as a `ClosedForm` does, and a function that pulls gradients to z."""

    def of_constant(self, z: Any, target: Any, shares: Any) -> Any:
        """Compute the losses of the networks' mean output, infinite if one sample counts only."""
        losses = dots(self.each(shares[..., None, :] @ z, target)[0], shares)
        return namespace(z).where((shares >= 1).any(-1), np.inf, losses)


class CrossEntropy(ArrayLoss):
    """The mean cross-entropy; a target has the probabilities of the classes."""

    def __init__(self, smoothing: float = 0.0) -> None:
        self._smoothing = smoothing

    def divisor(self, d: int) -> int:
        return 1

    def targets(self, values: Any, d: int, like: Any) -> Any:
        hot = (values[..., None] == torch.arange(d, device=values.device)).to(like)
        return hot * (1 - self._smoothing) + self._smoothing / d if self._smoothing else hot

    def each(self, z: Any, target: Any) -> tuple[Any, Any]:
        xp = namespace(z)
        top = z.amax(-1) if isinstance(z, Tensor) else z.max(-1)
        shifted = z - top[..., None]
        p = xp.exp(shifted)
        total = p.sum(-1)[..., None]
        return xp.log(total)[..., 0] - dots(target, shifted), p / total

    def trace_term(self, p: Any, phi: Any, weight: Any, scale: Any) -> TraceTerm:
        # Tr(W^T B W) = sum_k Var_p(W_k) = 1/2 sum_st p_s p_t |w_s - w_t|^2: no term is negative,
        # so the result is exact to rounding if the distances are
        gaps = gaps_between(weight)
        if gaps is None:
            rows = weight - weight.mean(-2)[..., None, :]
            distances = distances_of_many(rows)
        else:
            distances = dots(gaps, gaps)
        slope = p @ distances
        forms = dots(slope, p)[..., None]  # twice the variances
        norms = dots(phi, phi)[..., None] * scale
        weighted = p * norms
        pairs = transposed(p) @ weighted
        if gaps is None:
            # a class has no distance to itself, whose large share would round the others away
            pairs = without_diagonal(pairs)
            of_weight = 2 * (pairs.sum(-1)[..., None] * rows - pairs @ rows)
        else:
            of_weight = 2 * (pairs[..., None, :] @ gaps)[..., 0, :]
        value = dots(forms[..., 0], norms[..., 0]) / 2
        return TraceTerm(value, weighted * (slope - forms), forms * scale, of_weight)

    def root_product(self, p: Any, vectors: Any) -> tuple[Any, Callable[[Any], Any]]:
        # see `Softmax.root_product`, which has fewer operations for a device and autograd
        roots, top = safe_root(p), p.argmax(-1)[..., None]
        classes: Any = np.arange(p.shape[-1])
        if isinstance(p, Tensor):
            classes = torch.as_tensor(classes, device=p.device)
        rest = roots * (top != classes)
        of_top = roots - rest  # 0 but for the most probable class
        divisor = 1 + of_top.sum(-1)[..., None]
        common = (p + of_top) / divisor
        parts = rest * vectors
        sums = dots(rest, vectors)[..., None]

        def pull(outer: Any) -> Any:
            # the derivatives in log p, in which roots are smooth
            share = sums / divisor
            centred = (outer - dots(outer, common)[..., None]) / 2
            of_logs = centred * (parts - share * of_top) - share * p * outer
            return of_logs - p * of_logs.sum(-1)[..., None]

        return parts - common * sums, pull


class _OutputLoss(ArrayLoss):
    """A mean over all outputs of all samples, of a loss of each of them."""

    @abstractmethod
    def derivatives(self, p: Any) -> tuple[Any, Any]:
        """Compute the second and the third derivative of each output's loss."""

    def trace_term(self, p: Any, phi: Any, weight: Any, scale: Any) -> TraceTerm:
        second, third = self.derivatives(p)
        squares = dots(weight, weight)[..., None, :]
        norms = dots(phi, phi)[..., None] * scale
        forms = dots(second, squares)[..., None]
        of_weight = 2 * (second * norms).sum(-2)[..., None] * weight
        value = dots(forms[..., 0], norms[..., 0])
        return TraceTerm(value, third * squares * norms, 2 * forms * scale, of_weight)

    def root_product(self, p: Any, vectors: Any) -> tuple[Any, Callable[[Any], Any]]:
        second, third = self.derivatives(p)
        roots = safe_root(second)
        return roots * vectors, lambda outer: outer * vectors * (third / (2 * roots))


class SquaredError(_OutputLoss):
    """The mean squared error."""

    slope = 2.0

    def each(self, z: Any, target: Any) -> tuple[Any, Any]:
        error = z - target
        return (error * error).mean(-1), z

    def derivatives(self, p: Any) -> tuple[Any, Any]:
        zeros = namespace(p).zeros_like(p)
        return zeros + 2, zeros


class LogisticLoss(_OutputLoss):
    """The mean logistic loss of labels from 0 to 1."""

    def each(self, z: Any, target: Any) -> tuple[Any, Any]:
        xp = namespace(z)
        losses = xp.logaddexp(xp.zeros_like(z), z) - z * target
        return losses.mean(-1), 1 / (1 + xp.exp(-z))

    def derivatives(self, p: Any) -> tuple[Any, Any]:
        second = p * (1 - p)
        return second, second * (1 - 2 * p)


def find_array_loss(criterion: Any, target: Tensor, d: int) -> ArrayLoss | None:
    """Find the formulas of a criterion for targets that it has accepted, if there are any."""
    # `target` holds the labels of all samples, which are none of those that the criterion ignores.
    # Class weights are no part of the formulas: they act as weights of the samples.
    kind, weight = type(criterion), getattr(criterion, "weight", None)
    if getattr(criterion, "reduction", "") != "mean":
        return None
    if kind is nn.CrossEntropyLoss and target.ndim == 1 and not target.is_floating_point():
        ignored = (target == criterion.ignore_index).any()
        mixed = weight is not None and criterion.label_smoothing  # weights of several classes
        return None if ignored or mixed else CrossEntropy(criterion.label_smoothing)
    if target.ndim != 2 or target.shape[1] != d or weight is not None:
        return None
    if kind is nn.MSELoss:
        return SquaredError()
    if kind is nn.BCEWithLogitsLoss and criterion.pos_weight is None:
        return LogisticLoss()
    return None


# -- curvatures ----------------------------------------------------------------------------

# number of rows from which the common row of a factor is computed, as their mean
_CENTRED = 1024
# largest number of rows in a chunk, and of numbers in its arrays, on a CPU and on a GPU. Large
# chunks lose digits, because a matrix product adds up more terms; small chunks take long on a GPU
_ROWS = {False: 2**10, True: 2**15}
_NUMBERS = {False: 2**23, True: 2**26}


def chunks(n: int, array: Tensor) -> Iterator[slice]:
    """Cut rows into chunks, for arrays of (n, c) and (c, m) numbers."""
    d, m = array.shape
    size = max(1, min(_ROWS[array.is_cuda], _NUMBERS[array.is_cuda] // (n + m)))
    for start in range(0, d, size):
        yield slice(start, min(start + size, d))


@dataclass(frozen=True)
class Factor:
    """A matrix F, shared by all samples of all batches, whose columns may be spread out.

    Its rows can be read some at a time, minus a common row, whose squares would cost digits.
    """

    array: Tensor  # (d, k)
    spread: Tensor | None = None  # (k,)

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrix."""
        return self.array.shape

    def matrix(self) -> Tensor:
        """Return the matrix: (d, k)."""
        return self.stretch(full_precision(self.array))

    @cached_property
    def centre(self) -> Tensor:
        """The common row: (k,)."""
        rows = self.array[:: max(1, len(self.array) // _CENTRED)]
        return full_precision(rows).mean(dim=0)

    @cached_property
    def norms(self) -> Tensor:
        """Squared norms of the rows, minus the common row: (d, 1)."""
        parts = [
            torch.linalg.vector_norm(self[part], dim=1, keepdim=True)
            for part in chunks(0, self.array)
        ]
        return torch.cat(parts).square_()

    @cached_property
    def half_distances(self) -> Tensor:
        """Half of the squared distances between the rows: (d, d)."""
        distances: Tensor = squared_distances(self.matrix())
        return distances / 2

    def __getitem__(self, index: slice | Tensor) -> Tensor:
        # some of the rows, as a new array: (c, k)
        return self.stretch(full_precision(self.array[index]) - self.centre)

    def stretch(self, rows: Tensor) -> Tensor:
        """Multiply rows by the spread: (c, k)."""
        return rows if self.spread is None else rows * self.spread.to(rows.dtype)


class ClosedForm(ABC):
    """A curvature by formula, without differentiation."""

    @abstractmethod
    def __call__(self, factor: Tensor) -> Tensor:
        """Compute quadratic forms ``F_k^T B_i F_k`` of the columns of a factor: (n, k)."""

    @abstractmethod
    def product(self, vectors: Tensor) -> Tensor:
        """Compute products ``B_i v_i``: (n, d)."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """Return the diagonals of the ``B_i``: (n, d)."""

    @abstractmethod
    def root(self) -> Tensor:
        """Return any matrices ``R_i`` with ``R_i R_i^T = B_i``: (n, d, d)."""

    @abstractmethod
    def root_product(self, vectors: Tensor) -> Tensor:
        """Compute products ``R_i v_i``, with their graph; the root may be another than `root`."""

    @abstractmethod
    def times(self, factor: float) -> "ClosedForm":
        """Multiply the ``B_i`` by a number."""

    def trace(self, factor: Factor | None) -> Tensor:
        """Compute ``Tr(F^T B_i F)``, with the identity in place of no factor: (n,)."""
        return (self.diagonal() if factor is None else self(factor.matrix())).sum(dim=1)

    def total(self, factor: Tensor, features: Tensor, each: float | Tensor) -> Tensor:
        """Sum ``each_i |phi_i|^2 Tr(F^T B_i F)`` over samples, with its graph, for training: ()."""
        return (self(factor).sum(dim=1) * features.square().sum(dim=1) * each).sum()


# -- losses that are sums over outputs ---------------------------------------------------


@dataclass(frozen=True)
class Diagonal(ClosedForm):
    """The curvature of a loss that is a sum over outputs: ``B_i = diag(beta_i)``.

    Parameters
    ----------
    beta : Tensor of shape (n, d)
        Second derivative of the loss in each output.

    Examples
    --------
    >>> Diagonal(torch.tensor([[1.0, 2.0]]))(torch.tensor([[3.0], [1.0]]))
    tensor([[11.]])
    """

    beta: Tensor

    def __call__(self, factor: Tensor) -> Tensor:
        return self.beta @ factor.square()

    def product(self, vectors: Tensor) -> Tensor:
        return self.beta * vectors

    def diagonal(self) -> Tensor:
        return self.beta

    def times(self, factor: float) -> ClosedForm:
        return Diagonal(self.beta * factor)

    def root(self) -> Tensor:
        return torch.diag_embed(self.beta.sqrt())

    def root_product(self, vectors: Tensor) -> Tensor:
        products: Tensor = safe_root(self.beta) * vectors
        return products


# -- softmax cross-entropy, exact for confident predictions too --------------------------
# With logits z_i and p_i = softmax(z_i), the Hessian of sample i's loss in z_i is
# B_i = diag(p_i) - p_i p_i^T, times the total weight of the sample's targets. Its form v^T B_i v is
# the variance of the entries of v under p_i. In floating point, the usual formula
# E[v^2] - E[v]^2 cancels to nothing where one class has nearly all probability.


# from the gradient of a total to that in logits, features and factor
SlopesOf = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Softmax(ClosedForm):
    """The curvature of cross-entropy: ``B_i = scale_i (diag(p_i) - p_i p_i^T)``.

    It is never negative, and exact to rounding also where ``p`` is nearly one-hot.

    Parameters
    ----------
    z : Tensor of shape (n, d)
        Logits, ``p_i = softmax(z_i)``.
    scale : Tensor of shape (n,), optional
        The total weight of the targets of each sample, one if None.

    Examples
    --------
    The variance of the numbers 0 and 1 under the probabilities 1/4 and 3/4 is 3/16:

    >>> z = torch.tensor([[0.25, 0.75]]).log()
    >>> Softmax(z)(torch.tensor([[0.0], [1.0]]))
    tensor([[0.1875]])
    """

    z: Tensor
    scale: Tensor | None = None
    _in_chunks: ClassVar[bool] = False  # whether a total is summed up over chunks of the classes

    @cached_property
    def p(self) -> Tensor:
        """Probabilities: (n, d)."""
        return full_precision(self.z).softmax(dim=1)

    @cached_property
    def _top(self) -> Tensor:
        """The most probable class: (n, 1)."""
        return self.p.argmax(dim=1, keepdim=True)

    @cached_property
    def _rest(self) -> Tensor:
        """Probabilities of the other classes, 0 for the most probable one: (n, d)."""
        return self.p.scatter(1, self._top, 0.0)

    def __call__(self, factor: Tensor) -> Tensor:
        # The form q_k is the variance of column k of F under p. It is computed from the
        # distance to row c, that of the most probable class: with r = sum of the other
        # probabilities,
        #   Var = sum_{s != top} p_s (F_s - c)^2 - (sum_{s != top} p_s (F_s - c))^2,
        # where the first term is of order r and the second of order r^2.
        c = factor[self._top[:, 0]]
        r = self._rest.sum(dim=1, keepdim=True)
        first = self._rest @ factor
        second = self._rest @ factor.square()
        spread = second - 2 * c * first + r * c.square()
        return self._scaled((spread - (first - r * c).square()).clamp_min(0))

    def trace(self, factor: Factor | None) -> Tensor:
        if factor is None or factor.shape[0] * factor.shape.numel() > FEW:
            return super().trace(factor)
        # 1/2 p^T D p with the squared distances D of the rows of F: there are no negative terms,
        # and few operations, whose launches take a GPU's time
        slope = self.p @ factor.half_distances
        return self._scaled((slope * self.p).sum(dim=1, keepdim=True))[:, 0]

    def product(self, vectors: Tensor) -> Tensor:
        spread = vectors - (self.p * vectors).sum(dim=1, keepdim=True)
        return self._scaled(self.p * spread)

    def diagonal(self) -> Tensor:
        # 1 - p without cancellation: for the top class, the sum of the others
        not_p = (1 - self.p).scatter(1, self._top, self._rest.sum(dim=1, keepdim=True))
        return self._scaled(self.p * not_p)

    def times(self, factor: float) -> ClosedForm:
        scale = full_precision(self.z[:, 0]).new_ones(()) if self.scale is None else self.scale
        return replace(self, scale=(scale * factor).expand(len(self.z)))

    def root(self) -> Tensor:
        # diag(p) - p p^T = sum_c p_c (e_c - p) (e_c - p)^T
        roots = self.p.sqrt()
        root = torch.diag_embed(roots) - self.p[:, :, None] * roots[:, None, :]
        return root if self.scale is None else root * self.scale.sqrt()[:, None, None]

    def root_product(self, vectors: Tensor) -> Tensor:
        # With r = sqrt(p), diag(r) (I - r r^T) is the root above. Here, it is multiplied by the
        # reflection that maps r to minus the top class, whose column is 0 then: products with
        # random signs have less variance, and none between two classes. That is good for one draw,
        # as penalties take; few draws may coincide, so that their spread tells no standard error.
        roots, highest = safe_root(self.p), self.p.gather(1, self._top)
        of_top = roots.gather(1, self._top)
        common = self.p.scatter(1, self._top, highest + of_top) / (1 + of_top)
        parts = roots.scatter(1, self._top, 0.0) * vectors
        products: Tensor = parts - common * parts.sum(dim=1, keepdim=True)
        return products if self.scale is None else products * self.scale.sqrt()[:, None]

    def total(self, factor: Tensor, features: Tensor, each: float | Tensor) -> Tensor:
        if len(factor) > factor.shape[1] and not self._in_chunks:
            return super().total(factor, features, each)
        each = each if self.scale is None else each * self.scale
        total: Tensor = _Total.apply(type(self), self.z, features, factor, each)  # type: ignore[no-untyped-call]
        return total

    @staticmethod
    def total_with_slopes(
        z: Tensor, features: Tensor, factor: Tensor, each: float | Tensor
    ) -> tuple[Tensor, SlopesOf]:
        """Compute the total, and return a function that computes its slopes."""
        each = each[..., None] if isinstance(each, Tensor) else each
        term = CrossEntropy().trace_term(z.softmax(-1), features, factor, each)
        return term.value, lambda outer: (
            term.z * outer,
            features * (term.of_phi * outer),
            term.weight * outer,
        )

    def _scaled(self, array: Tensor) -> Tensor:
        """Multiply the rows of an array by the samples' scales."""
        return array if self.scale is None else array * self.scale[:, None]


class _Total(torch.autograd.Function):
    """The total of a softmax, with a gradient that needs no graph of its operations."""

    @staticmethod
    def forward(
        ctx: Any,
        kind: type[Softmax],
        z: Tensor,
        features: Tensor,
        factor: Tensor,
        each: float | Tensor,
    ) -> Tensor:
        ctx.save_for_backward(z, features, factor)
        ctx.each = each
        value, ctx.slopes = kind.total_with_slopes(z, features, factor, each)
        return value

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return None, *ctx.slopes(outer), None
        # To be differentiated again: by autograd, from the forms. In each tensor as if the others
        # were constants, since logits may depend on features and factor.
        tensors = [x.view_as(x) for x in ctx.saved_tensors]
        z, features, factor = map(full_precision, tensors)
        total = ClosedForm.total(Softmax(z), factor, features, ctx.each)
        needs = ctx.needs_input_grad[1:4]
        needed = [x for x, is_needed in zip(tensors, needs, strict=True) if is_needed]
        slopes = iter(torch.autograd.grad(total, needed, outer, create_graph=True))
        return None, *(next(slopes) if is_needed else None for is_needed in needs), None


# -- any loss, by differentiating twice --------------------------------------------------


class ProductCurvature:
    """The curvature of any loss: each product is one double backward pass."""

    def __init__(self, loss: Tensor, z: Tensor) -> None:
        self._z = z  # (n, d)
        self._gradient: Tensor | None = None  # (n, d); None where it is constant
        if loss.requires_grad:
            (gradient,) = pull_back([loss], [z], create_graph=True)
            check_twice(gradient)
            if gradient is not None and gradient.requires_grad:
                self._gradient = gradient

    def product(self, vectors: Tensor) -> Tensor:
        """Compute products ``B_i v_i``: (n, d)."""
        products = None
        if self._gradient is not None:
            (products,) = pull_back([self._gradient], [self._z], [vectors], create_graph=False)
        # where the gradient does not depend on z, there is no curvature
        return torch.zeros_like(vectors) if products is None else products


def is_curved_at(output: Tensor, loss: Callable[[Tensor], Tensor]) -> bool:
    """Return whether a loss's Hessian is not zero at some outputs, or the gradient is."""
    with torch.enable_grad():
        output = output.detach().requires_grad_()
        value = loss(output)
        if not value.requires_grad:
            return False
        (gradient,) = pull_back([value], [output], create_graph=False)
        if gradient is None:
            return False
        if not bool(gradient.any()):
            return True
        # random signs do not cancel, as ones would in a softmax
        signs = rademacher(output.shape, output, make_generator(0, output.device))
        product = ProductCurvature(value, output).product(signs)
    return bool(product.any())


def pull_back(
    of: Sequence[Tensor],
    inputs: Sequence[Any],
    vectors: Sequence[Tensor] | None = None,
    *,
    create_graph: bool,
) -> tuple[Tensor | None, ...]:
    """Compute products of vectors with a Jacobian by one backward pass, which keeps the graph."""
    if create_graph and vectors is None:
        # torch marks what a function with ``@once_differentiable`` returns, for `check_twice`, only
        # if the gradient that it receives is to be differentiated, too
        vectors = [torch.ones_like(total, requires_grad=True) for total in of]
    elif vectors is not None:
        # in a batch of one, torch's instance norm misreads vectors in another order of axes
        vectors = [vector.contiguous() for vector in vectors]
    try:
        return torch.autograd.grad(
            of,
            inputs,
            vectors,
            retain_graph=True,
            create_graph=create_graph,
            allow_unused=True,
        )
    except RuntimeError as error:
        if "not implemented" not in str(error):
            raise
        raise ValueError(_ONCE.format(error)) from error


_ONCE = (
    "the network behind the layer, or the criterion, cannot be differentiated twice: {}. Write "
    "the operation in terms of differentiable torch functions, or measure another layer."
)


def check_twice(*gradients: Tensor | None) -> None:
    """Refuse gradients with parts that cannot be differentiated again."""
    # Behind a function with ``@once_differentiable``, torch cuts the graph of the gradient. A
    # second derivative would silently leave this part out.
    steps = [gradient.grad_fn for gradient in gradients if gradient is not None]
    seen = {None, *steps}
    while steps:
        step = steps.pop()
        if step is None:
            continue
        if step.name() == "torch::autograd::Error":
            raise ValueError(_ONCE.format("a function is marked with @once_differentiable"))
        new = {source for source, _ in step.next_functions} - seen
        seen |= new
        steps.extend(new)
