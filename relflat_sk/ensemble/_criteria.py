r"""Losses, their gradients and curvatures, for many networks at once.

In this module, arrays have the members on their first axis: outputs ``z`` are of shape
(k, n, d), the features ``phi`` of the last layer (k, n, m), its weight ``W`` (k, d, m), and values
(k,). The penalty is ``sum_i scale_i |phi_i|^2 Tr(W^T B_i W)`` with the curvature ``B_i`` of
sample i's loss in its output; see `relflat_sk._penalty` for one network. Means over samples are
sums with the shares of a batch, so that there is one formula with and without sample weights.
"""

from abc import ABC, abstractmethod
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import vmap

from relflat_sk._losses import Loss, weighted_loss
from relflat_sk._numerics import safe_root
from relflat_sk.ensemble._data import Batch
from relflat_sk.ensemble._slopes import PenaltySlopes, Slopes

__all__ = ["Criterion", "find_criterion"]


class Criterion(ABC):
    """A criterion with its gradient and curvature.

    Parameters
    ----------
    criterion : nn.Module or callable
        The criterion of one network.
    """

    takes_columns = False  # whether targets are of shape (k, n, 1)

    def __init__(self, criterion: Any) -> None:
        self.criterion = criterion

    def each(self, z: Tensor, target: Tensor) -> Tensor:
        """Compute the losses of the members' samples, which are not negative.

        Parameters
        ----------
        z : Tensor of shape (k, n, ...)
            Outputs.
        target : Tensor of shape (k, n, ...)
            Targets.

        Returns
        -------
        Tensor of shape (k, n)
            Losses, whose mean is that of the member.
        """
        raise NotImplementedError

    def loss(self, z: Tensor, batch: Batch) -> Tensor:
        """Compute the losses of the members.

        Parameters
        ----------
        z : Tensor of shape (k, n, ...)
            Outputs.
        batch : Batch
            Targets and sample weights.

        Returns
        -------
        Tensor of shape (k,)
            One loss for each member.
        """
        return _mean(self.each(z, batch.targets)[..., None], batch)

    @abstractmethod
    def slopes(self, z: Tensor, batch: Batch) -> Slopes:
        """Compute the losses of the members, and their gradients in the outputs.

        Parameters
        ----------
        z : Tensor of shape (k, n, ...)
            Outputs.
        batch : Batch
            Targets and sample weights.

        Returns
        -------
        Slopes
            Losses and gradients.
        """

    def curvature(self, z: Tensor, phi: Tensor, weight: Tensor, scale: Tensor) -> PenaltySlopes:
        """Compute the penalties of the members, and their gradients.

        Parameters
        ----------
        z : Tensor of shape (k, n, d)
            Outputs.
        phi : Tensor of shape (k, n, m)
            Features of the last layer.
        weight : Tensor of shape (k, d, m)
            Weight of the last layer.
        scale : Tensor of shape (k, n, 1)
            Factors of the samples' terms.

        Returns
        -------
        PenaltySlopes
            Penalties and gradients.
        """
        raise NotImplementedError

    def root_product(self, z: Tensor, vectors: Tensor) -> Tensor:
        """Multiply vectors by roots of the curvatures of the samples' losses, with their graph.

        Parameters
        ----------
        z : Tensor of shape (k, n, d)
            Outputs.
        vectors : Tensor of shape (k, n, d)
            One vector for each sample.

        Returns
        -------
        Tensor of shape (k, n, d)
            Products ``R_i v_i`` with ``R_i R_i^T = B_i``.
        """
        raise NotImplementedError

    def gain(self, loss: Tensor, z: Tensor, batch: Batch) -> Tensor:
        """Compute what the members have gained over a constant output.

        Parameters
        ----------
        loss : Tensor of shape (k,)
            Their losses.
        z : Tensor of shape (k, n, ...)
            Their outputs.
        batch : Batch
            Targets and sample weights.

        Returns
        -------
        Tensor of shape (k,)
            Negative if a constant is better; infinite for a single sample, whose output is the
            mean.
        """
        if z.shape[1] == 1:
            return torch.full_like(loss, torch.inf)
        return self.constant_loss(z, batch) - loss

    def constant_loss(self, z: Tensor, batch: Batch) -> Tensor:
        """Compute the losses of the members' mean outputs.

        Parameters
        ----------
        z : Tensor of shape (k, n, ...)
            Outputs.
        batch : Batch
            Targets and sample weights.

        Returns
        -------
        Tensor of shape (k,)
            One loss for each member.
        """
        return self.loss(_mean_output(z, batch).expand_as(z), batch)

    @property
    def is_known(self) -> bool:
        """Whether there are formulas for `each` and `curvature`."""
        return not isinstance(self, _AnyCriterion)


class _AnyCriterion(Criterion):
    """A criterion that is differentiated by torch."""

    def loss(self, z: Tensor, batch: Batch) -> Tensor:
        return cast(Tensor, vmap(self.criterion)(z, batch.targets))

    def slopes(self, z: Tensor, batch: Batch) -> Slopes:
        with torch.enable_grad():
            leaf = z.detach().requires_grad_()
            values = self.loss(leaf, batch)
            (gradient,) = torch.autograd.grad(values.sum(), leaf)
        return Slopes(values.detach(), gradient)


class _WeightedCriterion(_AnyCriterion):
    """The mean with sample weights of a criterion that is differentiated by torch."""

    def loss(self, z: Tensor, batch: Batch) -> Tensor:
        loss = partial(weighted_loss, Loss(self.criterion))
        return vmap(loss)(z, batch.targets, batch.weights)


class _CrossEntropy(Criterion):
    """The mean cross-entropy of class indices."""

    takes_columns = True

    def each(self, z: Tensor, target: Tensor) -> Tensor:
        return z.log_softmax(-1).gather(-1, target).squeeze(-1).neg_()

    def slopes(self, z: Tensor, batch: Batch) -> Slopes:
        logarithms, target = z.log_softmax(-1), batch.targets
        values = _mean(logarithms.gather(-1, target), batch).neg_()
        minus = z.new_full((1, 1, 1), -1.0).expand(target.shape)
        gradient = logarithms.exp_().scatter_add_(-1, target, minus).mul_(batch.shares)
        return Slopes(values, gradient)

    def curvature(self, z: Tensor, phi: Tensor, weight: Tensor, scale: Tensor) -> PenaltySlopes:
        # as relflat_sk._losses.softmax does: sum_k Var(W_k) = 1/2 sum_st p_s p_t |w_s - w_t|^2
        p = z.softmax(-1)
        rows = weight - weight[:, :1]
        distances = torch.cdist(rows, rows).square_()
        slope = torch.bmm(p, distances)
        forms = (slope * p).sum(-1, keepdim=True)  # twice the variances
        norms = phi.square().sum(-1, keepdim=True) * scale
        # with beta=0, a product times a factor; the first argument is not used
        value = torch.baddbmm(forms[:, :1], forms.mT, norms, beta=0, alpha=0.5).view(-1)
        weighted = p * norms
        pairs = torch.baddbmm(distances, p.transpose(1, 2), weighted, beta=0, alpha=-2)
        pairs.diagonal(dim1=1, dim2=2).sub_(pairs.sum(-1))
        return PenaltySlopes(value, weighted * slope.sub_(forms), forms * scale, pairs, rows)

    def constant_loss(self, z: Tensor, batch: Batch) -> Tensor:
        logarithms = _mean_output(z, batch).log_softmax(-1).expand_as(z)
        return _mean(logarithms.gather(-1, batch.targets), batch).neg_()

    def root_product(self, z: Tensor, vectors: Tensor) -> Tensor:
        p = z.softmax(-1)
        parts = safe_root(p) * vectors
        return parts - p * parts.sum(-1, keepdim=True)


class _Outputs(Criterion):
    """A criterion that is a mean over all outputs of all samples."""

    def curvature(self, z: Tensor, phi: Tensor, weight: Tensor, scale: Tensor) -> PenaltySlopes:
        second, third = self.derivatives(z)
        squares = weight.square().sum(-1)[:, None]
        norms = phi.square().sum(-1, keepdim=True) * scale
        forms = (second * squares).sum(-1, keepdim=True)
        value = (forms * norms).sum(dim=(1, 2))
        twice = (norms * second).sum(1).mul_(2)
        inner = third * squares * norms
        return PenaltySlopes(value, inner, forms * scale * 2, torch.diag_embed(twice), weight)

    def root_product(self, z: Tensor, vectors: Tensor) -> Tensor:
        return safe_root(self.derivatives(z)[0]) * vectors

    @abstractmethod
    def derivatives(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the second and third derivative of each output's loss.

        Parameters
        ----------
        z : Tensor of shape (k, n, d)
            Outputs.

        Returns
        -------
        second, third : Tensor of shape (k, n, d)
            Derivatives.
        """


class _SquaredError(_Outputs):
    """The mean squared error."""

    def each(self, z: Tensor, target: Tensor) -> Tensor:
        return (z - target).square_().mean(2)

    def slopes(self, z: Tensor, batch: Batch) -> Slopes:
        error = z - batch.targets
        scaled = error * (batch.shares / z.shape[2])
        return Slopes(error.mul_(scaled).sum(dim=(1, 2)), scaled.mul_(2))

    def derivatives(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return torch.full_like(z, 2.0), torch.zeros_like(z)


class _LogisticLoss(_Outputs):
    """The mean logistic loss of labels 0 and 1."""

    def each(self, z: Tensor, target: Tensor) -> Tensor:
        losses = nn.functional.binary_cross_entropy_with_logits(z, target, reduction="none")
        return losses.mean(2)

    def slopes(self, z: Tensor, batch: Batch) -> Slopes:
        shares = batch.shares / z.shape[2]
        return Slopes(self.loss(z, batch), (z.sigmoid() - batch.targets).mul_(shares))

    def derivatives(self, z: Tensor) -> tuple[Tensor, Tensor]:
        p = z.sigmoid()
        second = p * (1 - p)
        return second, second * (1 - 2 * p)


def _mean(values: Tensor, batch: Batch) -> Tensor:
    """Return the means over the samples of values of shape (k, n, 1): (k,)."""
    return (values * batch.shares).sum(dim=(1, 2))


def _mean_output(z: Tensor, batch: Batch) -> Tensor:
    """Return the mean output of each member: (k, 1, d)."""
    return (z * batch.shares).sum(1, keepdim=True)


def find_criterion(
    criterion: Any,
    output: Tensor,
    target: Tensor,
    *,
    ignores: bool = False,
    weighted: bool = False,
) -> Criterion:
    """Find the gradient and the curvature of a criterion.

    Parameters
    ----------
    criterion : nn.Module or callable
        The criterion of one network.
    output : Tensor of shape (n, ...)
        Outputs of one network.
    target : Tensor of shape (n, ...)
        Their targets, as the criterion takes them.
    ignores : bool, default=False
        Whether the criterion ignores some targets.
    weighted : bool, default=False
        Whether samples have weights.

    Returns
    -------
    Criterion
        With a gradient by formula if there is one for outputs of this shape.
    """
    any_other = (_WeightedCriterion if weighted else _AnyCriterion)(criterion)
    kind, mean = type(criterion), getattr(criterion, "reduction", "") == "mean"
    if not mean or getattr(criterion, "weight", None) is not None or output.ndim != 2:
        return any_other
    if kind is nn.CrossEntropyLoss and target.shape == output.shape[:1]:
        plain = not criterion.label_smoothing and not ignores
        return _CrossEntropy(criterion) if plain else any_other
    if target.shape == output.shape:
        if kind is nn.MSELoss:
            return _SquaredError(criterion)
        if kind is nn.BCEWithLogitsLoss and criterion.pos_weight is None:
            return _LogisticLoss(criterion)
    return any_other
