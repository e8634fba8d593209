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
There are two: that of the softmax family, see `relflat_sk._losses.softmax`, and that of losses
that act on each output alone. Any other curvature is given by its products with vectors.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from relflat_sk._numerics import safe_root


class Curvature(ABC):
    """The Hessians ``B_i`` of the samples' losses in an array of shape (n, d)."""

    @abstractmethod
    def product(self, vectors: Tensor) -> Tensor:
        """Compute products ``B_i v_i``. Shapes: `vectors` (n, d); returns (n, d)."""


class ClosedForm(Curvature):
    """A curvature by formula, without differentiation."""

    @abstractmethod
    def __call__(self, factor: Tensor) -> Tensor:
        """Compute quadratic forms ``F_k^T B_i F_k`` of the columns of a factor: (n, k)."""

    def trace(self, factor: Any) -> Tensor:
        """Sum the quadratic forms of the columns of a factor: ``Tr(F^T B_i F)``.

        Parameters
        ----------
        factor : Factor of shape (d, k) or None
            The matrix F; the identity if None. `ManyClasses` takes `Rows` instead.

        Returns
        -------
        Tensor of shape (n,)
            One number for each sample.
        """
        return (self.diagonal() if factor is None else self(factor.matrix())).sum(dim=1)

    @abstractmethod
    def diagonal(self) -> Tensor:
        """Return the diagonals of the ``B_i``.

        Returns
        -------
        Tensor of shape (n, d)
            One diagonal for each sample.
        """

    @abstractmethod
    def root(self) -> Tensor:
        """Return matrices ``R_i`` with ``R_i R_i^T = B_i``.

        Returns
        -------
        Tensor of shape (n, d, d)
            One root for each sample; any root will do.
        """

    @abstractmethod
    def root_product(self, vectors: Tensor) -> Tensor:
        """Compute products ``R_i v_i``, with their graph.

        Parameters
        ----------
        vectors : Tensor of shape (n, d)
            One vector for each sample.

        Returns
        -------
        Tensor of shape (n, d)
            One product for each sample.
        """

    @abstractmethod
    def total(
        self, factor: Tensor, features: Tensor, weights: Tensor | None, scale: float | Tensor
    ) -> Tensor:
        """Sum ``scale w_i |phi_i|^2 Tr(F^T B_i F)`` over samples, for training.

        Parameters
        ----------
        factor : Tensor of shape (d, k)
            The matrix F.
        features : Tensor of shape (n, m)
            The layer's input.
        weights : Tensor of shape (n,) or None
            Weights of the samples, constants; ones if None.
        scale : float or Tensor of shape ()
            Multiplies the sum, a constant.

        Returns
        -------
        Tensor of shape ()
            With its graph.
        """


def sample_factors(weights: Tensor | None, scale: float | Tensor) -> float | Tensor:
    """Return the numbers by which the samples' forms are multiplied in a weighted sum.

    Shapes: `weights` (n,); returns (n, 1).
    """
    return scale if weights is None else scale * weights[:, None]


def total_by_forms(
    curvature: ClosedForm, factor: Tensor, features: Tensor, each: float | Tensor
) -> Tensor:
    """Compute `ClosedForm.total` from the quadratic forms.

    Shapes: `factor` (d, k), `features` (n, m).
    """
    forms = curvature(factor).sum(dim=1, keepdim=True)
    norms = features.square().sum(dim=1, keepdim=True)
    return (forms * norms * each).sum()


# -- losses that are sums over outputs ---------------------------------------------------


def diagonal_curvature(beta: Tensor) -> ClosedForm:
    """Return the curvature of a loss that is a sum over outputs: ``B_i = diag(beta_i)``.

    Parameters
    ----------
    beta : Tensor of shape (n, d)
        Second derivative of the loss in each output.

    Returns
    -------
    ClosedForm
        With root ``diag(sqrt(beta_i))``.

    Examples
    --------
    >>> diagonal_curvature(torch.tensor([[1.0, 2.0]]))(torch.tensor([[3.0], [1.0]]))
    tensor([[11.]])
    """
    return _Diagonal(beta)


@dataclass(frozen=True)
class _Diagonal(ClosedForm):
    beta: Tensor  # (n, d): second derivative of the loss in each output

    def __call__(self, factor: Tensor) -> Tensor:
        return self.beta @ factor.square()

    def trace(self, factor: Any) -> Tensor:
        return super().trace(factor) if factor is None else self.beta @ factor.norms

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
        return total_by_forms(self, factor, features, sample_factors(weights, scale))


# -- any loss, by differentiating twice --------------------------------------------------


def product_curvature(loss: Tensor, z: Tensor) -> Curvature:
    """Return the curvature of any loss: each product is one double backward pass.

    Shapes: `z` (n, d).
    """
    gradient = None
    if loss.requires_grad:
        (gradient,) = pull_back([loss], [z], create_graph=True)
        check_twice(gradient)
    curved = gradient is not None and gradient.requires_grad
    return _Products(z, gradient if curved else None)


@dataclass(frozen=True)
class _Products(Curvature):
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


def pull_back(
    of: Sequence[Tensor],
    inputs: Sequence[Any],
    vectors: Sequence[Tensor] | None = None,
    *,
    create_graph: bool,
    many: bool = False,
) -> tuple[Tensor | None, ...]:
    """Compute products of vectors with a Jacobian by one backward pass, which keeps the graph."""
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
    except RuntimeError as error:
        if "not implemented" not in str(error):
            raise
        raise ValueError(_ONCE.format(error)) from error


_ONCE = (
    "the network behind the layer, or the criterion, cannot be differentiated twice: {}. Write "
    "the operation in terms of differentiable torch functions, or measure another layer."
)


def check_twice(*gradients: Tensor | None) -> None:
    """Refuse gradients with parts that cannot be differentiated again.

    Behind a function with ``@once_differentiable``, torch cuts the graph of the gradient. A
    second derivative would silently leave this part out.
    """
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


# A matrix whose quadratic forms are summed over its columns, with what these sums need of it.


@dataclass(frozen=True)
class Factor:
    """A matrix F, shared by all samples of all batches. Shapes: `array` (d, k)."""

    array: Tensor

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrix."""
        return self.array.shape

    def matrix(self) -> Tensor:
        """Return the matrix. Shapes: returns (d, k)."""
        return self.array

    @cached_property
    def norms(self) -> Tensor:
        """Squared norms of the rows: (d,)."""
        return self.array.square().sum(dim=1)

    @cached_property
    def half_distances(self) -> Tensor:
        """Half of the squared distances between the rows: (d, d)."""
        gaps = self.array.unsqueeze(1) - self.array
        return 0.5 * (gaps * gaps).sum(dim=2)
