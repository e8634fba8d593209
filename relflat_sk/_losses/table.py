"""The table of criteria: targets, divisors, best constants, curvature in closed form.

A row of `TABLE` has, for a torch criterion, the task it belongs to, the check of its targets,
the divisors of its mean, the best constant prediction, and the curvature of the loss in a
layer's output ``z`` in closed form, for each function (a *link*) by which the network may turn
``z`` into the criterion's input. Other criteria are differentiated twice instead. Losses and
curvatures are always *summed* over outputs and samples. The divisors are summed as well, so
that sums of batches of any size can be added.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from relflat_sk._losses.curvature import ClosedForm, Diagonal, Softmax
from relflat_sk._numerics import read_numbers

# The form of a row in the table of criteria.

Task = Literal["classification", "binary", "regression"]
BestConstant = Callable[[Any, Tensor, Tensor, torch.Size], Tensor]
CurvatureOf = Callable[[Any, Tensor, Tensor | None], ClosedForm]
SharesOf = Callable[[Any, Tensor, torch.Size], Tensor]

TOGETHER = 2**22  # numbers of outputs that are computed for samples at a time

# functions by which a network may turn the layer's output into the criterion's input
LINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda z: z,
    "softmax": lambda z: z.softmax(dim=-1),
    "log_softmax": lambda z: z.log_softmax(dim=-1),
    "sigmoid": torch.sigmoid,
}
# and back to logits, up to a constant for each sample
LOGITS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda z: z,
    "softmax": lambda p: (p + torch.finfo(p.dtype).tiny).log(),
    "log_softmax": lambda z: z,
    "sigmoid": torch.logit,
}


def never(criterion: Any) -> bool:
    """Return False: the curvature of a criterion does not depend on the labels."""
    return False


class Target(NamedTuple):
    """A batch's target as the criterion takes it."""

    values: Tensor
    relevant: Tensor | None  # the values, if curvatures or divisors depend on them

    def to(self, device: torch.device) -> "Target":
        """Move the labels to a device."""
        values = self.values.to(device)
        return Target(values, None if self.relevant is None else values)


@dataclass(frozen=True)
class Row:
    """A row of the table; its functions take the criterion as their first argument.

    Parameters
    ----------
    task : {"classification", "binary", "regression"}
        The kind of labels.
    read_target : callable
        From output and labels to `Target`.
    divisors : callable
        From output and `Target.relevant` to what each sample adds to the divisor of the mean:
        one number if all samples add the same.
    best_constant : callable or None
        From targets, sample weights and an output's shape to the best constant prediction.
    links : dict of str to callable
        For each link, a function from the layer's output and `Target.relevant` to the curvature.
    needs_target : callable
        Whether the curvature depends on the labels.
    has_temperature : bool
        Whether the likelihood has a scale: a temperature of logits, or a variance.
    shares : callable or None
        From targets as `read_target` returns them, and an output's shape, to weights ``a`` of
        shape (n, positions, classes) if the loss is ``-sum a_k log p_k`` over positions and
        classes. Then the lowest loss of a sample is not 0, but that of the best ``p``.
    """

    task: Task | None
    read_target: Callable[[Any, Tensor, Tensor], Target]
    divisors: Callable[[Any, Tensor, Tensor | None], float | Tensor]
    best_constant: BestConstant | None
    links: Mapping[str, CurvatureOf]
    needs_target: Callable[[Any], bool] = never
    has_temperature: bool = True
    shares: SharesOf | None = None

    @property
    def link(self) -> str:
        """The function that turns logits into the criterion's input."""
        return next(iter(self.links), "identity")


# Rows of the table for softmax cross-entropy in its spellings.


class ProbabilityNLLLoss(nn.NLLLoss):
    """Negative log-likelihood of probabilities, as skorch's classifiers use `NLLLoss`."""

    @classmethod
    def of(cls, loss: nn.NLLLoss) -> "ProbabilityNLLLoss":
        """Take over the arguments of a loss of torch."""
        return cls(weight=loss.weight, ignore_index=loss.ignore_index, reduction=loss.reduction)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Compute the loss of logarithms, with skorch's `eps`."""
        return super().forward(torch.log(input + torch.finfo(input.dtype).eps), target)


def _read_classes(criterion: Any, output: Tensor, target: Tensor) -> Target:
    """Check class indices or class probabilities."""
    if output.ndim < 2:
        raise ValueError(
            f"{type(criterion).__name__} needs one output per class, got outputs of shape "
            f"{tuple(output.shape)}. Use BCEWithLogitsLoss for a single logit."
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
    classes = target.long()
    if target.is_floating_point():
        _check_range(
            target.where(classes != target, 0).abs(),
            (0, 0),
            f"{type(criterion).__name__} needs class indices 0, 1, ..., got fractions such as "
            "{high:g}. For a regression, use a criterion such as MSELoss.",
        )
    n_classes, ignored = output.shape[1], criterion.ignore_index
    # one operation, since every training step does it
    low, high = read_numbers(*classes.aminmax())
    if low >= 0 and high < n_classes:  # the usual case, in which no label is ignored
        matter = ignored >= 0 or criterion.weight is not None
        return Target(classes, classes if matter else None)
    _check_range(
        classes.where(classes != ignored, 0),
        (0, n_classes - 1),
        f"y must hold class indices from 0 to {n_classes - 1}, one per output, got values from "
        "{low:.0f} to {high:.0f}. Encode the labels, or give the network more outputs.",
    )
    return Target(classes, classes)


def _check_range(values: Tensor, allowed: tuple[float, float], message: str) -> None:
    """Refuse values outside of a range, by a message that may name the extreme ones."""
    if not values.numel():
        return
    least, most = allowed
    low, high = read_numbers(*values.aminmax())
    if not least <= low <= high <= most:
        raise ValueError(message.format(low=low, high=high))


def _class_shares(criterion: Any, target: Tensor, shape: torch.Size) -> Tensor:
    """Return the weights of all classes at each position, as torch smooths labels."""
    n_classes = shape[0]
    if target.is_floating_point():
        counts, of_labels = target.new_ones(()), target.double().movedim(1, -1)
    else:
        matters = target != criterion.ignore_index
        counts = matters[..., None].double()
        of_labels = F.one_hot(target.where(matters, 0), n_classes) * counts
    smoothing = getattr(criterion, "label_smoothing", 0.0)
    shares = (1 - smoothing) * of_labels + smoothing / n_classes * counts
    shares = shares if criterion.weight is None else shares * criterion.weight.to(shares)
    return shares.reshape(len(target), -1, n_classes)


def shares_in_parts(
    shares: SharesOf, criterion: Any, target: Tensor, weight: Tensor, shape: torch.Size
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the weights of classes, for some samples at a time, with those of the samples."""
    size = max(1, TOGETHER // max(1, shape.numel()))
    parts = zip(torch.split(target, size), torch.split(weight, size), strict=True)
    return ((shares(criterion, y, shape), w) for y, w in parts)


def _total_shares(*data: Any) -> Tensor:
    """Sum the weights of classes over samples: (positions, classes)."""
    parts = [torch.einsum("n,npc->pc", w, a) for a, w in shares_in_parts(*data)]
    return torch.stack(parts).sum(dim=0)


def _softmax(criterion: Any, z: Tensor, target: Tensor | None) -> ClosedForm:
    """Return the curvature of cross-entropy with each sample's total weight ``sum_k a_ik``."""
    if target is None:
        return Softmax(z)
    dtype = torch.promote_types(z.dtype, torch.float32)
    weight = z.new_ones(z.shape[1], dtype=dtype)
    if criterion.weight is not None:
        weight = criterion.weight.to(dtype)
    smoothing = getattr(criterion, "label_smoothing", 0.0)
    if target.is_floating_point():
        scale = (1 - smoothing) * (target.to(dtype) @ weight) + smoothing * weight.mean()
        return Softmax(z, scale)
    # without an array of all classes, of which there may be many
    counts = target != criterion.ignore_index
    of_label = weight[target.where(counts, 0)]
    scale = ((1 - smoothing) * of_label + smoothing * weight.mean()) * counts
    return Softmax(z, scale)


def _class_divisors(criterion: Any, output: Tensor, target: Tensor | None) -> float | Tensor:
    """Count or weigh the labels of each sample that are not ignored."""
    n, n_classes = output.shape[:2]
    if target is None or target.is_floating_point():  # class probabilities
        return output.numel() / (n * n_classes)
    unweighted = criterion.weight is None or criterion.reduction != "mean"
    counts: Tensor = target != criterion.ignore_index
    weights: Tensor = counts if unweighted else criterion.weight[target.where(counts, 0)] * counts
    return weights.to(output.dtype).reshape(n, -1).sum(dim=1)


def _class_frequencies(criterion: Any, target: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
    """Return the classes' shares of the targets' weight, in the shape of one output."""
    totals = _total_shares(_class_shares, criterion, target, weight, shape).sum(dim=0)
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
        lambda criterion: criterion.weight is not None or criterion.ignore_index >= 0,
        shares=_class_shares,
    )


CLASS_LOSSES: dict[type, Row] = {
    nn.CrossEntropyLoss: _class_row(("identity", "log_softmax"), torch.log),
    nn.NLLLoss: _class_row(("log_softmax",), torch.log),
    ProbabilityNLLLoss: _class_row(("softmax",), lambda p: p),
}


# Rows of the table for criteria that are sums over outputs: logistic, squared, Poisson.


class WeightedLogisticLoss(nn.BCEWithLogitsLoss):
    """A logistic loss that divides by the weights of the samples' classes, as cross-entropy."""

    weight: Tensor  # (1,)
    pos_weight: Tensor  # (1,)

    def weights(self, target: Tensor) -> Tensor:
        """Return the weights of targets 0 and 1, in their shape."""
        return self.weight * (1 + (self.pos_weight - 1) * target)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Compute the loss of logits."""
        loss: Tensor = super().forward(input, target)
        return loss / self.weights(target).mean() if self.reduction == "mean" else loss


def _read_numbers(criterion: Any, output: Tensor, target: Tensor) -> Target:
    """Return the target in the shape and type of the output; axes of length 1 may differ."""
    sizes, expected = ([size for size in x.shape[1:] if size != 1] for x in (target, output))
    if len(target) != len(output) or sizes != expected:
        raise ValueError(
            f"{type(criterion).__name__} needs targets of the outputs' shape "
            f"{tuple(output.shape)}, got {tuple(target.shape)}."
        )
    numbers = target.reshape(output.shape).to(output.dtype)
    return Target(numbers, numbers)


def _read_within(
    allowed: tuple[float, float], needs: str, criterion: Any, output: Tensor, target: Tensor
) -> Target:
    """Read the target as `_read_numbers` does, and check that its numbers are in a range."""
    read = _read_numbers(criterion, output, target)
    _check_range(read.values, allowed, f"{type(criterion).__name__} needs {needs}")
    return read


_read_shares = partial(
    _read_within,
    (0, 1),
    "targets from 0 to 1, got values from {low:g} to {high:g}. Encode the two classes as 0 and 1.",
)
_read_counts = partial(
    _read_within, (0, math.inf), "counts, which are not negative, as targets, got {low:g}."
)


def _logistic(criterion: Any, z: Tensor, target: Tensor | None) -> ClosedForm:
    """Return the curvature of the logistic loss in its logits."""
    beta = torch.sigmoid(z) * torch.sigmoid(-z)  # never 1 - sigmoid, which cancels
    pos_weight = getattr(criterion, "pos_weight", None)
    if pos_weight is not None:
        assert target is not None  # needs_target says so
        beta = beta * (1 + (pos_weight - 1) * target.reshape(z.shape))
    if criterion.weight is not None:
        beta = beta * criterion.weight.to(z.dtype)
    return Diagonal(beta)


def _mean(y: Tensor, weight: Tensor) -> Tensor:
    """Return the weighted mean of each output."""
    return weight @ y.reshape(len(y), -1).to(weight.dtype) / weight.sum()


def _label_shares(criterion: Any, target: Tensor, shape: torch.Size) -> Tensor:
    """Return the weights of 0 and 1 at each output."""
    positive = target.double()
    negative = 1 - positive
    if getattr(criterion, "pos_weight", None) is not None:
        positive = positive * criterion.pos_weight.to(positive)
    shares = torch.stack([negative, positive], dim=-1)
    if criterion.weight is not None:
        shares = shares * criterion.weight.to(shares)[..., None]
    return shares.reshape(len(target), -1, 2)


def _best_share(criterion: Any, y: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
    """Return the probability of class 1 that minimises the logistic loss."""
    totals = _total_shares(_label_shares, criterion, y, weight, shape)
    tiny = torch.finfo(weight.dtype).eps
    return (totals[:, 1] / totals.sum(dim=1)).clamp(tiny, 1 - tiny)


def _poisson(criterion: Any, z: Tensor, target: Tensor | None) -> ClosedForm:
    """Return the curvature of the Poisson loss in log rates or in rates."""
    if criterion.log_input:  # loss exp(z) - y z
        return Diagonal(z.exp())
    assert target is not None  # needs_target says so
    return Diagonal(target.reshape(z.shape) / (z + criterion.eps).square())


def _best_rate(criterion: Any, y: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
    """Return the prediction that minimises the Poisson loss: the mean or its logarithm."""
    rate = _mean(y, weight).clamp_min(torch.finfo(weight.dtype).tiny)
    return rate.log() if criterion.log_input else rate


def _median(y: Tensor, weight: Tensor) -> Tensor:
    """Return the weighted median of each output."""
    rows = y.reshape(len(y), -1).to(weight.dtype)
    ordered, order = rows.sort(dim=0)
    reached = weight[order].cumsum(dim=0) >= weight.sum() / 2
    return ordered.gather(0, reached.int().argmax(dim=0)[None])[0]


def _n_outputs(criterion: Any, output: Tensor, target: Tensor | None) -> float:
    """Count the outputs of each sample, of which the criterion takes the mean."""
    return 1 if criterion.reduction == "sum" else output.numel() / len(output)


OUTPUT_LOSSES: dict[type, Row] = {
    nn.BCEWithLogitsLoss: Row(
        "binary",
        _read_shares,
        _n_outputs,
        lambda criterion, y, w, shape: _best_share(criterion, y, w, shape).logit(),
        {"identity": _logistic},
        lambda criterion: criterion.pos_weight is not None,
        shares=_label_shares,
    ),
    nn.BCELoss: Row(
        "binary",
        _read_shares,
        _n_outputs,
        _best_share,
        {"sigmoid": _logistic},
        shares=_label_shares,
    ),
    nn.MSELoss: Row(
        "regression",
        _read_numbers,
        _n_outputs,
        lambda criterion, y, w, shape: _mean(y, w),
        {"identity": lambda criterion, z, target: Diagonal(torch.full_like(z, 2.0))},
    ),
    nn.PoissonNLLLoss: Row(
        "regression",
        _read_counts,
        _n_outputs,
        _best_rate,
        {"identity": _poisson},
        lambda criterion: not criterion.log_input,
        has_temperature=False,  # the variance is the mean
    ),
    # no closed form, but the task and the shape of the targets are known
    nn.L1Loss: Row(
        "regression",
        _read_numbers,
        _n_outputs,
        lambda criterion, y, w, shape: _median(y, w),
        {},
        has_temperature=False,
    ),
    **dict.fromkeys(
        (nn.SmoothL1Loss, nn.HuberLoss),
        Row("regression", _read_numbers, _n_outputs, None, {}, has_temperature=False),
    ),
}
OUTPUT_LOSSES[WeightedLogisticLoss] = replace(
    OUTPUT_LOSSES[nn.BCEWithLogitsLoss],
    divisors=lambda criterion, output, target: criterion.weights(target).reshape(len(output)),
)


TABLE: dict[type, Row] = {**CLASS_LOSSES, **OUTPUT_LOSSES}

# torch's functions of output and target alone, as the modules that compute the same
MODULES_OF_FUNCTIONS: dict[Any, nn.Module] = {
    F.cross_entropy: nn.CrossEntropyLoss(),
    F.nll_loss: nn.NLLLoss(),
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss(),
    F.binary_cross_entropy: nn.BCELoss(),
    F.mse_loss: nn.MSELoss(),
    F.poisson_nll_loss: nn.PoissonNLLLoss(),
    F.l1_loss: nn.L1Loss(),
    F.smooth_l1_loss: nn.SmoothL1Loss(),
    F.huber_loss: nn.HuberLoss(),
}

# any other criterion: a mean over samples, of targets of any type
UNKNOWN = Row(
    None,
    lambda criterion, output, target: Target(target, target),
    lambda criterion, output, target: 1.0,
    None,
    {},
)
