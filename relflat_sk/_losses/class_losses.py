"""Rows of the table for softmax cross-entropy in its spellings."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from relflat_sk._checks import gathers, judge
from relflat_sk._losses.curvature import ClosedForm
from relflat_sk._losses.row import Row, Target
from relflat_sk._losses.softmax import softmax_curvature
from relflat_sk._numerics import read_numbers

__all__ = ["CLASS_LOSSES", "ProbabilityNLLLoss"]


class ProbabilityNLLLoss(nn.NLLLoss):
    """Negative log-likelihood of probabilities, as skorch's classifiers use `NLLLoss`.

    Shapes: `weight` (n_classes,).
    """

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Compute the loss of logarithms, with skorch's `eps`.

        Shapes: `input` (n, n_classes, ...).
        """
        return super().forward(torch.log(input + torch.finfo(input.dtype).eps), target)


def _read_classes(criterion: Any, output: Tensor, target: Tensor) -> Target:
    """Check class indices or class probabilities."""
    if output.ndim < 2:
        raise ValueError(
            f"{type(criterion).__name__} needs one output per class, shape (n, n_classes), "
            f"got outputs of shape {tuple(output.shape)}. Give the network one output unit "
            "per class, or use BCEWithLogitsLoss for a single logit."
        )
    if target.shape == output.shape and target.is_floating_point():
        target = target.to(output.dtype)
        return Target(target, target)
    if target.ndim == output.ndim and target.shape[1:] == (1,):
        target = target.squeeze(1)
    expected = (output.shape[0], *output.shape[2:])
    if tuple(target.shape) != expected:
        raise ValueError(
            f"{type(criterion).__name__} on outputs of shape {tuple(output.shape)} needs "
            f"targets of shape {expected}, got {tuple(target.shape)}."
        )
    if not target.numel():
        return Target(target.long(), None)
    classes = _read_integers(criterion, target)
    n_classes, ignored = output.shape[1], criterion.ignore_index
    if not gathers(classes):
        # one operation, since every training step does it
        low, high = read_numbers(*classes.aminmax())
        if low >= 0 and high < n_classes:  # the usual case, in which no label is ignored
            matter = ignored >= 0 or _class_target_matters(criterion)
            return Target(classes, classes if matter else None)
    counting = classes.where(classes != ignored, 0)
    judge(partial(_refuse_other_than_indices, n_classes), *counting.aminmax())
    if gathers(classes):  # until the error comes, there must be something to compute with
        classes = classes.where(counting == counting.clamp(0, n_classes - 1), ignored)
    return Target(classes, classes)


def _read_integers(criterion: Any, target: Tensor) -> Tensor:
    """Return labels as integers; refuse fractions."""
    classes = target.long()
    if not target.is_floating_point():
        return classes
    fractions = target.where(classes != target, 0)
    judge(partial(_refuse_fractions, type(criterion).__name__), *fractions.aminmax())
    return classes


def _refuse_fractions(criterion: str, low: float, high: float) -> None:
    """Refuse labels between the indices of classes."""
    if not low == high == 0:
        raise ValueError(
            f"{criterion} needs class indices 0, 1, ..., got fractions such as {low or high:g}. "
            "Is this a regression target? Then use a regression criterion such as MSELoss."
        )


def _refuse_other_than_indices(n_classes: int, low: float, high: float) -> None:
    """Refuse labels that are no indices of classes."""
    if not 0 <= low <= high < n_classes:
        raise ValueError(
            f"y must hold class indices from 0 to {n_classes - 1}, one per output, got "
            f"values from {low:.0f} to {high:.0f}. Encode the labels, for instance with "
            "sklearn.preprocessing.LabelEncoder, or give the network more outputs."
        )


def _class_totals(criterion: Any, target: Tensor, n_classes: int, dtype: torch.dtype) -> Tensor:
    """Return the weights ``a_ik`` of the classes in sample i's loss ``-sum_k a_ik log p_ik``."""
    if target.is_floating_point():
        soft, counts = target.to(dtype), torch.ones_like(target[:, :1], dtype=dtype)
    else:
        counts = (target != criterion.ignore_index).to(dtype)[:, None]
        labels = target.where(target != criterion.ignore_index, 0)
        soft = nn.functional.one_hot(labels, n_classes).to(dtype) * counts
    # as torch does it, also for probabilities that do not sum to one
    smoothing = getattr(criterion, "label_smoothing", 0.0)
    soft = (1 - smoothing) * soft + smoothing * counts / n_classes
    return soft if criterion.weight is None else soft * criterion.weight.to(dtype)


def _softmax(criterion: Any, z: Tensor, target: Tensor | None) -> ClosedForm:
    """Return the curvature of cross-entropy with the total weight of each sample's targets."""
    if target is None:
        return softmax_curvature(z)
    return softmax_curvature(z, _target_weights(criterion, target, z))


def _target_weights(criterion: Any, target: Tensor, z: Tensor) -> Tensor:
    """Return the total weight of each sample's targets, ``sum_k a_ik``: (n,)."""
    dtype = torch.promote_types(z.dtype, torch.float32)
    if target.is_floating_point():
        return _class_totals(criterion, target, z.shape[1], dtype).sum(dim=1)
    counts: Tensor = target != criterion.ignore_index
    if criterion.weight is None:
        return counts.to(dtype)
    # without an array of all classes, of which there may be many
    weight, smoothing = criterion.weight.to(dtype), getattr(criterion, "label_smoothing", 0.0)
    of_label = weight[target.where(counts, 0)]
    found: Tensor = (1 - smoothing) * of_label + smoothing * weight.mean()
    return found * counts


def _class_target_matters(criterion: Any) -> bool:
    """Return whether classes have weights of their own."""
    return criterion.weight is not None


def _class_divisors(criterion: Any, output: Tensor, target: Tensor | None) -> float | Tensor:
    """Count or weigh the labels of each sample that are not ignored."""
    n, n_classes = output.shape[:2]
    if target is None or target.is_floating_point():  # class probabilities
        return output.numel() / (n * n_classes)
    unweighted = criterion.weight is None or criterion.reduction != "mean"
    counts: Tensor = target != criterion.ignore_index
    each: Tensor = counts if unweighted else criterion.weight[target.where(counts, 0)] * counts
    return each.to(output.dtype).reshape(n, -1).sum(dim=1)


def _class_frequencies(criterion: Any, target: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
    """Return the classes' shares of the targets' weight, in the shape of one output."""
    if target.ndim > 1 and not target.is_floating_point():  # a class for each token
        weight = weight.repeat_interleave(target[0].numel())
        target = target.flatten()
    elif target.ndim > 2:
        weight = weight.repeat_interleave(target[0, 0].numel())
        target = target.movedim(1, -1).flatten(0, -2)
    totals = weight @ _class_totals(criterion, target, shape[0], weight.dtype)
    # a class that does not occur gets the smallest probability whose logarithm is finite
    shares = (totals / totals.sum()).clamp_min(torch.finfo(weight.dtype).tiny)
    return shares.reshape(-1, *(1 for _ in shape[1:])).expand(shape)


def _class_row(links: tuple[str, ...], to_output: Callable[[Tensor], Tensor]) -> Row:
    """Return the row of a spelling of cross-entropy, whose input `to_output` makes of shares."""
    return Row(
        "classification",
        _read_classes,
        _class_divisors,
        lambda criterion, y, w, shape: to_output(_class_frequencies(criterion, y, w, shape)),
        dict.fromkeys(links, _softmax),
        _class_target_matters,
    )


CLASS_LOSSES: dict[type, Row] = {
    nn.CrossEntropyLoss: _class_row(("identity", "log_softmax"), torch.log),
    nn.NLLLoss: _class_row(("log_softmax",), torch.log),
    ProbabilityNLLLoss: _class_row(("softmax",), lambda p: p),
}
