"""How well a network predicts its data: accuracy or R2, beside those of the best constant."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from scipy.stats import rankdata
from torch import Tensor, nn

from relflat_sk._losses import Loss
from relflat_sk._network import Network, Outcome, borrowed, outcomes

# R2 must be above zero by more than float32 rounding
_R2_ROUNDING = 1e-5
# share of the mean square up to which a spread is rounding in float64
_SAME = 1e-24
# by how many standard errors accuracy must be above the majority's share
_STANDARD_ERRORS = 2


@dataclass(frozen=True)
class Score:
    """A network's score, and that of the best constant prediction."""

    name: str
    value: float
    constant: float
    margin: float

    @property
    def beats_constant(self) -> bool:
        """Whether the score is clearly better than that of the best constant prediction."""
        return self.value > self.constant + self.margin


def score_of(network: Network) -> Score | None:
    """Compute a network's accuracy or R2, in one pass over the data.

    The criterion decides which. For a criterion that is not in the table of losses, the shape
    and the values of the labels decide.
    """
    rows = []
    with borrowed(network.module), torch.no_grad():
        if next(iter(network.batches())).y is None:
            return None
        for outcome in outcomes(network):
            row = _class_rows(outcome) if _has_classes(outcome) else _number_rows(outcome)
            if row is None:
                return None
            rows.append(row)
    parts = (torch.cat(batches) for batches in zip(*rows, strict=True))
    predicted, actual, weight = network.processes.join_rows(*parts)
    if not float(weight.sum()) > 0:
        return None
    if not actual.is_floating_point():
        return _accuracy(predicted, actual, weight)
    threshold = _threshold(network.loss, predicted, actual)
    if threshold is None:
        return _r2(predicted, actual, weight)
    positive = actual > (0.5 if bool((actual >= 0).all()) else 0)
    return _accuracy(predicted > threshold, positive, weight)


def auc_of(network: Network) -> Score | None:
    """Compute the area under the ROC curve, the mean over the classes or labels that occur.

    Where classes are rare, it tells a network that has learned from a constant; accuracy does not.
    Samples of weight 0 are left out, all others count alike.
    """
    rows = []
    with borrowed(network.module), torch.no_grad():
        for outcome in outcomes(network):
            row = _class_columns(outcome) if _has_classes(outcome) else _number_rows(outcome)
            if row is None:
                return None
            rows.append(row)
    parts = (torch.cat(batches) for batches in zip(*rows, strict=True))
    output, actual, weight = network.processes.join_rows(*parts)
    if _threshold(network.loss, output, actual) is None or not bool(output.isfinite().all()):
        return None
    areas, variances = [], []
    counts = (weight > 0).cpu()
    columns = output.cpu()[counts].T, actual.cpu()[counts].T > 0.5
    for scores, positive in zip(*columns, strict=True):
        n, n_positive = len(positive), int(positive.sum())
        if 0 < n_positive < n:
            ranks = rankdata(scores)[positive.numpy()].sum()
            pairs = n_positive * (n - n_positive)
            areas.append((ranks - n_positive * (n_positive + 1) / 2) / pairs)
            variances.append((n + 1) / (12 * pairs))  # of outputs that know nothing
    if not areas:
        return None
    margin = _STANDARD_ERRORS * math.sqrt(max(variances))
    return Score("area under the ROC curve", sum(areas) / len(areas), 0.5, margin)


def count_errors(network: Network) -> tuple[float, float]:
    """Count the labels that a classifier gets wrong, and all labels, in evaluation mode."""
    row = network.loss.row
    if row is None or row.task == "regression":
        raise ValueError(
            f"{network.loss.criterion!r} has no classes, and so no errors to count; pass a "
            "classifier."
        )
    total, divisor = 0.0, 0.0
    with borrowed(network.module), torch.no_grad():
        for outcome in outcomes(network):
            if row.task == "classification":
                predicted, actual, counts = _classes(outcome)
                wrong = (predicted != actual) & counts
            else:
                threshold = 0.5 if isinstance(outcome.loss.criterion, nn.BCELoss) else 0.0
                wrong = (outcome.output > threshold) != (outcome.target > 0.5)
                wrong = wrong | outcome.output.isnan()
                counts = torch.ones_like(wrong)
            n = len(wrong)
            total += float(outcome.weight @ wrong.reshape(n, -1).sum(dim=1).double())
            divisor += float(outcome.weight @ counts.reshape(n, -1).sum(dim=1).double())
    total, divisor = network.processes.sum_numbers(total, divisor)
    return total, divisor


# -- predictions of one batch ---------------------------------------------------------------------

# predictions (n, k), true labels (n, k) and weights (n,) of a batch
_Rows = tuple[Tensor, Tensor, Tensor]


def _has_classes(outcome: Outcome) -> bool:
    """Return whether the network has one output for each class, and labels are classes."""
    row, output, target = outcome.loss.row, outcome.output, outcome.target
    if row is not None:
        return row.task == "classification"
    return output.ndim == target.ndim + 1 and not target.is_floating_point()


def _classes(outcome: Outcome) -> tuple[Tensor, Tensor, Tensor]:
    """Return the classes with the largest output, the true ones, and which of them count.

    Where an output is nan, no class is predicted. Shapes: (n, ...).
    """
    output, actual = outcome.output, outcome.target
    if actual.shape == output.shape:  # class probabilities
        actual = actual.argmax(dim=1)
    predicted = output.argmax(dim=1).where(~output.isnan().any(dim=1), -1)
    return predicted, actual, actual != getattr(outcome.loss.criterion, "ignore_index", -100)


def _class_rows(outcome: Outcome) -> _Rows:
    """Predict classes; tokens count as samples."""
    predicted, actual, counts = _classes(outcome)
    weight = outcome.weight.reshape(-1, *(1 for _ in actual.shape[1:])).expand(actual.shape)
    return predicted[counts][:, None], actual[counts][:, None], weight[counts]


def _class_columns(outcome: Outcome) -> _Rows | None:
    """Return the probability of each class, and whether it is the true one."""
    if outcome.output.ndim != 2:
        return None
    _, actual, counts = _classes(outcome)
    probabilities = outcome.output[counts].double().softmax(dim=1)
    positive = nn.functional.one_hot(actual[counts], outcome.output.shape[1]).double()
    return probabilities, positive, outcome.weight[counts]


def _number_rows(outcome: Outcome) -> _Rows | None:
    """Predict the output itself, or its exponential where the criterion takes log rates."""
    criterion: Any = outcome.loss.criterion
    if outcome.output.numel() != outcome.target.numel():
        return None
    output, target = (
        array.reshape(len(array), -1).double() for array in (outcome.output, outcome.target)
    )
    if isinstance(criterion, nn.PoissonNLLLoss) and criterion.log_input:
        output = output.exp()
    return output, target, outcome.weight


def _threshold(loss: Loss, output: Tensor, target: Tensor) -> float | None:
    """Return the output above which the positive class is predicted; None for a regression."""
    if loss.row is not None:
        if loss.row.task == "regression":
            return None
        return 0.5 if isinstance(loss.criterion, nn.BCELoss) else 0.0
    if not (((target == 0) | (target == 1)).all() or (target.abs() == 1).all()):
        return None
    return 0.5 if bool(((output >= 0) & (output <= 1)).all()) else 0.0  # probabilities or scores


# -- scores ---------------------------------------------------------------------------------------


def _accuracy(predicted: Tensor, actual: Tensor, weight: Tensor) -> Score:
    """Compute the share of correct labels, and that of each column's most frequent label."""
    share = weight / weight.sum()
    right = float((share @ (predicted == actual).double()).mean())
    most = []
    for column in actual.unbind(dim=1):
        labels, positions = torch.unique(column, return_inverse=True)
        most.append(float(share.new_zeros(len(labels)).index_add_(0, positions, share).max()))
    constant = sum(most) / len(most)
    # the labels of one sample depend on each other: it counts once
    variance = max(constant * (1 - constant), 0.0) * float(share.square().sum())
    return Score("accuracy", right, constant, _STANDARD_ERRORS * math.sqrt(variance))


def _r2(predicted: Tensor, actual: Tensor, weight: Tensor) -> Score:
    """Compute the coefficient of determination, the mean over the outputs that vary."""
    share = weight / weight.sum()
    spread = share @ (actual - share @ actual).square()
    error = share @ (actual - predicted).square()
    varies = spread > _SAME * (share @ actual.square())
    value = float((1 - error[varies] / spread[varies]).mean()) if bool(varies.any()) else 0.0
    return Score("R2", value, 0.0, _R2_ROUNDING)
