"""The criteria that many networks are trained with at once, by formula where there is one."""

from abc import abstractmethod
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import vmap

from relflat_sk._losses import Loss, weighted_loss
from relflat_sk._numerics import safe_root
from relflat_sk.fleet._criterion import Criterion, mean, mean_output
from relflat_sk.fleet._data import Batch
from relflat_sk.fleet._slopes import PenaltySlopes, Slopes

__all__ = ["find_criterion"]


class _AnyCriterion(Criterion):
    """A criterion that is differentiated by torch."""

    is_known = False

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
        return self._at_labels(z.log_softmax(-1), target).squeeze(-1).neg_()

    def slopes(self, z: Tensor, batch: Batch) -> Slopes:
        logarithms = z.log_softmax(-1)
        values = mean(self._at_labels(logarithms, batch.targets), batch).neg_()
        gradient = self._less_labels(logarithms.exp_(), batch.targets).mul_(batch.shares)
        return Slopes(values, gradient)

    def _at_labels(self, logarithms: Tensor, target: Tensor) -> Tensor:
        """Return the mean of each sample's logarithms, weighted as its label says: (k, n, 1)."""
        return logarithms.gather(-1, target)

    def _less_labels(self, p: Tensor, target: Tensor) -> Tensor:
        """Subtract the weights of that mean from probabilities, in place: (k, n, d)."""
        minus = p.new_full((1, 1, 1), -1.0).expand(target.shape)
        return p.scatter_add_(-1, target, minus)

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
        logarithms = mean_output(z, batch).log_softmax(-1).expand_as(z)
        return mean(self._at_labels(logarithms, batch.targets), batch).neg_()

    def root_product(self, z: Tensor, vectors: Tensor) -> Tensor:
        p = z.softmax(-1)
        parts = safe_root(p) * vectors
        return parts - p * parts.sum(-1, keepdim=True)


class _SmoothedCrossEntropy(_CrossEntropy):
    """The same with label smoothing, a share of which each class gets; its curvature is equal."""

    def _at_labels(self, logarithms: Tensor, target: Tensor) -> Tensor:
        of_classes = logarithms.mean(-1, keepdim=True)
        return super()._at_labels(logarithms, target).lerp(of_classes, self._smoothing)

    def _less_labels(self, p: Tensor, target: Tensor) -> Tensor:
        minus = p.new_full((1, 1, 1), self._smoothing - 1).expand(target.shape)
        return p.sub_(self._smoothing / p.shape[-1]).scatter_add_(-1, target, minus)

    @property
    def _smoothing(self) -> float:
        return float(self.criterion.label_smoothing)


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

        Shapes: `z` (k, n, d); returns (k, n, d).
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


def find_criterion(
    criterion: Any,
    output: Tensor,
    target: Tensor,
    *,
    ignores: bool = False,
    weighted: bool = False,
) -> Criterion:
    """Find the gradient and the curvature of a criterion."""
    any_other = (_WeightedCriterion if weighted else _AnyCriterion)(criterion)
    kind, mean = type(criterion), getattr(criterion, "reduction", "") == "mean"
    if not mean or getattr(criterion, "weight", None) is not None or output.ndim != 2:
        return any_other
    if kind is nn.CrossEntropyLoss and target.shape == output.shape[:1]:
        if ignores:
            return any_other
        return (_SmoothedCrossEntropy if criterion.label_smoothing else _CrossEntropy)(criterion)
    if target.shape == output.shape:
        if kind is nn.MSELoss:
            return _SquaredError(criterion)
        if kind is nn.BCEWithLogitsLoss and criterion.pos_weight is None:
            return _LogisticLoss(criterion)
    return any_other
