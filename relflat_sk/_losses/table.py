"""One table: what is known of each criterion.

A row of `TABLE` says of a torch criterion which task it belongs to, how its targets must
look, what its mean divides by, which constant prediction is best, and, for each way the
network may turn the layer's output ``z`` into the criterion's input (a *link*), the
curvature of the loss in ``z`` in closed form. What is not in the table is differentiated
twice instead. Losses and curvatures are always *summed* over outputs and samples; the
divisors are summed beside them, so that batches add up whatever their sizes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from relflat_sk._losses.curvature import ClosedForm, diagonal_curvature, softmax_curvature

__all__ = ["LINKS", "TABLE", "ProbabilityNLLLoss", "Row", "Target"]

Task = Literal["classification", "binary", "regression"]
BestConstant = Callable[[Any, Tensor, Tensor, torch.Size], Tensor]
CurvatureOf = Callable[[Any, Tensor, Tensor | None], ClosedForm]


# how a network may turn the layer's output into the criterion's input
LINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda z: z,
    "softmax": lambda z: z.softmax(dim=-1),
    "log_softmax": lambda z: z.log_softmax(dim=-1),
    "sigmoid": torch.sigmoid,
}


class ProbabilityNLLLoss(nn.NLLLoss):
    """Negative log-likelihood of probabilities, as skorch's classifiers use `NLLLoss`."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Take the logarithm first; `eps` as in skorch."""
        return super().forward(torch.log(input + torch.finfo(input.dtype).eps), target)


class Target(NamedTuple):
    """A batch's target as the criterion takes it."""

    values: Tensor
    # what of it matters to curvature and divisors: None if all labels count, and count the same
    relevant: Tensor | None


@dataclass(frozen=True)
class Row:
    """What the package knows of one criterion."""

    task: Task
    read_target: Callable[[Any, Tensor, Tensor], Target]
    # what each sample adds, as one number where all add the same
    divisors: Callable[[Any, Tensor, Tensor | None], float | Tensor]
    best_constant: BestConstant | None
    links: Mapping[str, CurvatureOf] = field(default_factory=dict)
    needs_target: Callable[[Any], bool] = lambda criterion: False


# -- classes: softmax cross-entropy in its spellings -------------------------------------


def _read_classes(criterion: Any, output: Tensor, target: Tensor) -> Target:
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
    classes = target.long()
    if target.is_floating_point() and bool((classes != target).any()):
        raise ValueError(
            f"{type(criterion).__name__} needs class indices 0, 1, ..., got fractions such "
            f"as {target[classes != target][0].item():g}. Is this a regression target? Then "
            "use a regression criterion such as MSELoss."
        )
    n_classes, ignored = output.shape[1], criterion.ignore_index
    if _are_indices(classes, n_classes):  # all count, the usual case
        matter = ignored >= 0 or _class_target_matters(criterion)
        return Target(classes, classes if matter else None)
    valid = classes[classes != ignored]
    if not _are_indices(valid, n_classes):
        raise ValueError(
            f"y must hold class indices from 0 to {n_classes - 1}, one per output, got "
            f"values from {int(valid.min())} to {int(valid.max())}. Encode the labels, for "
            "instance with sklearn.preprocessing.LabelEncoder, or give the network more "
            "outputs."
        )
    return Target(classes, classes)


def _are_indices(classes: Tensor, n_classes: int) -> bool:
    if not classes.numel():
        return True
    low, high = classes.aminmax()  # one look at them, in each training step
    return low.item() >= 0 and high.item() < n_classes


def _class_totals(criterion: Any, target: Tensor, n_classes: int, dtype: torch.dtype) -> Tensor:
    """Weight ``a_ik`` that sample i's loss ``-sum_k a_ik log p_ik`` puts on class k."""
    smoothing = getattr(criterion, "label_smoothing", 0.0)
    if target.is_floating_point():
        soft = target.to(dtype)
    else:
        kept = target != criterion.ignore_index
        soft = nn.functional.one_hot(target.where(kept, 0), n_classes).to(dtype) * kept[:, None]
    soft = (1 - smoothing) * soft + smoothing * soft.sum(dim=1, keepdim=True) / n_classes
    return soft if criterion.weight is None else soft * criterion.weight.to(dtype)


def _softmax(criterion: Any, z: Tensor, target: Tensor | None) -> ClosedForm:
    if target is None:
        return softmax_curvature(z)
    if target.is_floating_point() or _class_target_matters(criterion):
        totals = _class_totals(criterion, target, z.shape[1], z.dtype)
        return softmax_curvature(z, totals.sum(dim=1))
    return softmax_curvature(z, (target != criterion.ignore_index).to(z.dtype))


def _class_target_matters(criterion: Any) -> bool:
    return criterion.weight is not None


def _class_divisors(criterion: Any, output: Tensor, target: Tensor | None) -> float | Tensor:
    n, n_classes = output.shape[:2]
    if target is None or target.is_floating_point():  # class probabilities
        return output.numel() / (n * n_classes)
    unweighted = criterion.weight is None or criterion.reduction != "mean"
    kept: Tensor = target != criterion.ignore_index
    each: Tensor = kept if unweighted else criterion.weight[target.where(kept, 0)] * kept
    return each.to(output.dtype).reshape(n, -1).sum(dim=1)


def _class_frequencies(criterion: Any, target: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
    if target.ndim > 1 and not target.is_floating_point():  # of every token its class
        weight = weight.repeat_interleave(target[0].numel())
        target = target.flatten()
    elif target.ndim > 2:
        weight = weight.repeat_interleave(target[0, 0].numel())
        target = target.movedim(1, -1).flatten(0, -2)
    totals = weight @ _class_totals(criterion, target, shape[0], weight.dtype)
    # a class that never occurs gets the smallest probability whose logarithm is finite
    shares = (totals / totals.sum()).clamp_min(torch.finfo(weight.dtype).tiny)
    return shares.reshape(-1, *(1 for _ in shape[1:])).expand(shape)


def _class_row(links: tuple[str, ...], to_output: Callable[[Tensor], Tensor]) -> Row:
    return Row(
        "classification",
        _read_classes,
        _class_divisors,
        lambda criterion, y, w, shape: to_output(_class_frequencies(criterion, y, w, shape)),
        dict.fromkeys(links, _softmax),
        _class_target_matters,
    )


# -- each output for itself: logistic, squared, Poisson ----------------------------------


def _check_numbers(criterion: Any, output: Tensor, target: Tensor) -> Tensor:
    same_rows = len(target) == len(output)
    if not (same_rows and _squeezed(target) == _squeezed(output)):
        raise ValueError(
            f"{type(criterion).__name__} needs targets of the outputs' shape "
            f"{tuple(output.shape)}, got {tuple(target.shape)}."
        )
    return target.reshape(output.shape).to(output.dtype)


def _squeezed(array: Tensor) -> tuple[int, ...]:
    return tuple(size for size in array.shape[1:] if size != 1)


def _check_shares(criterion: Any, output: Tensor, target: Tensor) -> Tensor:
    target = _check_numbers(criterion, output, target)
    if not bool(((target >= 0) & (target <= 1)).all()):
        raise ValueError(
            f"{type(criterion).__name__} needs targets from 0 to 1, got values from "
            f"{target.min().item():g} to {target.max().item():g}. Encode the two classes "
            "as 0 and 1."
        )
    return target


def _check_counts(criterion: Any, output: Tensor, target: Tensor) -> Tensor:
    target = _check_numbers(criterion, output, target)
    if bool((target < 0).any()):
        raise ValueError(
            f"{type(criterion).__name__} needs counts, which are not negative, got "
            f"{target.min().item():g}."
        )
    return target


def _output_divisors(criterion: Any, output: Tensor, target: Tensor | None) -> float:
    return 1 if criterion.reduction == "sum" else output.numel() / len(output)


def _logistic(criterion: Any, z: Tensor, target: Tensor | None) -> ClosedForm:
    beta = torch.sigmoid(z) * torch.sigmoid(-z)  # never 1 - sigmoid, which cancels
    pos_weight = getattr(criterion, "pos_weight", None)
    if pos_weight is not None:
        assert target is not None  # needs_target says so
        beta = beta * (1 + (pos_weight - 1) * target.reshape(z.shape))
    if criterion.weight is not None:
        beta = beta * _output_weight(criterion, z)
    return diagonal_curvature(beta)


def _output_weight(criterion: Any, z: Tensor) -> Tensor:
    weight: Tensor = criterion.weight
    if weight.ndim > 1 and len(weight) > 1:
        raise ValueError(
            f"the weight of {type(criterion).__name__} has shape {tuple(weight.shape)}, one "
            "per sample of a fixed batch, which says nothing about other batches; give one "
            "per output, or pass sample_weight."
        )
    return weight.to(z.dtype)


def _mean(y: Tensor, weight: Tensor) -> Tensor:
    rows = y.reshape(len(y), -1).to(weight.dtype)
    return (weight[:, None] * rows).sum(dim=0) / weight.sum()


def _best_share(criterion: Any, y: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
    share = _mean(y, weight)
    pos_weight = getattr(criterion, "pos_weight", None)
    if pos_weight is not None:
        share = pos_weight * share / (pos_weight * share + 1 - share)
    tiny = torch.finfo(weight.dtype).eps
    return share.clamp(tiny, 1 - tiny)


def _squared(criterion: Any, z: Tensor, target: Tensor | None) -> ClosedForm:
    return diagonal_curvature(torch.full_like(z, 2.0))


def _poisson(criterion: Any, z: Tensor, target: Tensor | None) -> ClosedForm:
    if criterion.log_input:  # loss exp(z) - y z
        return diagonal_curvature(z.exp())
    assert target is not None  # needs_target says so
    return diagonal_curvature(target.reshape(z.shape) / (z + criterion.eps).square())


def _best_rate(criterion: Any, y: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
    rate = _mean(y, weight).clamp_min(torch.finfo(weight.dtype).tiny)
    return rate.log() if criterion.log_input else rate


def _median(y: Tensor, weight: Tensor) -> Tensor:
    rows = y.reshape(len(y), -1).to(weight.dtype)
    ordered, order = rows.sort(dim=0)
    reached = weight[order].cumsum(dim=0) >= weight.sum() / 2
    return ordered.gather(0, reached.int().argmax(dim=0)[None])[0]


def _output_row(
    task: Task,
    check: Callable[[Any, Tensor, Tensor], Tensor],
    best_constant: BestConstant | None,
    links: Mapping[str, CurvatureOf],
    needs_target: Callable[[Any], bool] = lambda criterion: False,
) -> Row:
    def read(criterion: Any, output: Tensor, target: Tensor) -> Target:
        target = check(criterion, output, target)
        return Target(target, target)

    return Row(task, read, _output_divisors, best_constant, links, needs_target)


TABLE: dict[type, Row] = {
    nn.CrossEntropyLoss: _class_row(("identity", "log_softmax"), torch.log),
    nn.NLLLoss: _class_row(("log_softmax",), torch.log),
    ProbabilityNLLLoss: _class_row(("softmax",), lambda p: p),
    nn.BCEWithLogitsLoss: _output_row(
        "binary",
        _check_shares,
        lambda criterion, y, w, shape: _best_share(criterion, y, w, shape).logit(),
        {"identity": _logistic},
        lambda criterion: criterion.pos_weight is not None,
    ),
    nn.BCELoss: _output_row("binary", _check_shares, _best_share, {"sigmoid": _logistic}),
    nn.MSELoss: _output_row(
        "regression",
        _check_numbers,
        lambda criterion, y, w, shape: _mean(y, w),
        {"identity": _squared},
    ),
    nn.PoissonNLLLoss: _output_row(
        "regression",
        _check_counts,
        _best_rate,
        {"identity": _poisson},
        lambda criterion: not criterion.log_input,
    ),
    # no closed form, but the task and the shape of the targets are known
    nn.L1Loss: _output_row(
        "regression", _check_numbers, lambda criterion, y, w, shape: _median(y, w), {}
    ),
    nn.SmoothL1Loss: _output_row("regression", _check_numbers, None, {}),
    nn.HuberLoss: _output_row("regression", _check_numbers, None, {}),
}
