"""What a network predicts: classes, margins, errors and scores.

Each token is a prediction, and so is each output of a logistic loss: it is that of two classes, of
which the first has the score 0. Tokens that the criterion ignores do not count.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata
from torch import Tensor, nn

from relflat_sk._losses.loss import Loss, name_criterion
from relflat_sk._losses.table import TABLE
from relflat_sk._network.borrowing import borrowed
from relflat_sk._network.network import Network, Outcome, outcomes
from relflat_sk.measures._network_measure import NotApplicableError
from relflat_sk.measures._scan import ForwardPass, scan

# R2 must be above zero by more than float32 rounding
_R2_ROUNDING = 1e-5
# share of the mean square up to which a spread is rounding in float64
_SAME = 1e-24
# by how many standard errors accuracy must be above the majority's share
_STANDARD_ERRORS = 2

# predictions (r, k), labels (r, k) or (r,), and weights (r,)
_Rows = tuple[Tensor, Tensor, Tensor]


def _class_rows(scored: Outcome) -> _Rows:
    """Arrange classes' scores (n, c, ...) in a row for each label that counts, with its class."""
    scores, target = scored.output, scored.target
    rows = scores.movedim(1, -1).flatten(0, -2)
    weight = scored.weight.repeat_interleave(len(rows) // len(scores))
    labels = target.argmax(dim=1) if target.shape == scores.shape else target  # probabilities
    counts = labels.flatten() != getattr(scored.loss.criterion, "ignore_index", -100)
    return rows[counts], labels.flatten()[counts], weight[counts]


# -- margins and errors of classifiers ------------------------------------------------------------


def _check_classifier(network: Network, what: str) -> None:
    """Refuse a network without classes, which a margin or a share of errors needs."""
    row = network.loss.row
    if row is None or row.task == "regression":
        known = [kind.__name__ for kind, row in TABLE.items() if row.task != "regression"]
        raise NotApplicableError(
            f"{what} needs a classifier, but {name_criterion(network.loss.criterion)} is not known "
            f"as a classification loss; known are {known}."
        )


def sample_margins(network: Network) -> NDArray[np.float64]:
    """Compute the margin of each sample, the logit of its class minus the largest other: (n,)."""
    _check_classifier(network, "a margin")
    parts: list[NDArray[np.float64]] = []
    with borrowed(network.module):
        scan(
            network,
            [-1],
            lambda forward: parts.append(_margins(network.loss, forward)),
            checked=False,
        )
    margins = np.concatenate(parts)
    if not len(margins):
        raise NotApplicableError("the criterion ignores all labels, so there is no margin.")
    return margins


def _margins(loss: Loss, forward: ForwardPass) -> NDArray[np.float64]:
    """Compute the margins of a batch in float64."""
    target, weight, shape = forward.target, forward.sample_weight, tuple(forward.output.shape)
    if target is None:
        raise ValueError("y is needed: the margin is that of the true class. Pass y.")
    if bool((weight != 1).any()):
        raise ValueError("the margin needs samples of equal weight: leave sample_weight out.")
    fits = not target.is_floating_point() and shape[1] > 1
    if loss.acts_on_each_output:
        fits = math.prod(shape[1:]) == 1 and bool(((target == 0) | (target == 1)).all())
    if not fits:
        raise NotApplicableError(
            "a margin needs one label for each sample: one of two classes or more, or 0 or 1 "
            f"for a single logit. Got outputs of shape {shape} with targets of {target.dtype} "
            f"such as {target.flatten()[:3].tolist()}."
        )
    logits = forward.logits(loss).double()
    if loss.acts_on_each_output:
        margins = logits.flatten() * (2 * target.flatten() - 1)
    else:
        scores, labels, _ = _class_rows(Outcome(logits, target, loss, weight, weighted=False))
        others = scores.scatter(1, labels[:, None], -math.inf).amax(dim=1)
        margins = scores.gather(1, labels[:, None])[:, 0] - others
    return margins.cpu().numpy()


def count_errors(network: Network) -> tuple[float, float]:
    """Count the labels that a classifier gets wrong, and all labels, in evaluation mode."""
    _check_classifier(network, "a share of errors")
    predicted, actual, weight = _join_rows(network, _predict)
    wrong = weight @ (predicted != actual).double()
    return float(wrong.sum()), float(weight.sum()) * len(wrong)


# -- accuracy, R2, area under the ROC curve, beside those of the best constant prediction ---------


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
    """Compute a network's accuracy or R2, in one pass over the data; None without labels."""
    if next(iter(network.batches())).y is None:
        return None
    predicted, actual, weight = _join_rows(network, _predict)
    if not float(weight.sum()) > 0:
        return None
    return (_r2 if actual.is_floating_point() else _accuracy)(predicted, actual, weight)


def auc_of(network: Network) -> Score | None:
    """Compute a classifier's area under the ROC curve, the mean over the classes that occur."""
    # Where classes are rare, it tells a network that has learned from a constant; accuracy does
    # not. Samples of weight 0 are left out, all others count alike.
    output, positive, weight = _join_rows(network, _class_columns)
    if not bool(output.isfinite().all()):
        return None
    areas, variances = [], []
    counts = (weight > 0).cpu()
    columns = output.cpu()[counts].T, positive.cpu()[counts].T
    for scores, is_positive in zip(*columns, strict=True):
        n, n_positive = len(is_positive), int(is_positive.sum())
        if 0 < n_positive < n:
            ranks = rankdata(scores)[is_positive.numpy()].sum()
            pairs = n_positive * (n - n_positive)
            areas.append((ranks - n_positive * (n_positive + 1) / 2) / pairs)
            variances.append((n + 1) / (12 * pairs))  # of outputs that know nothing
    if not areas:
        return None
    margin = _STANDARD_ERRORS * math.sqrt(max(variances))
    return Score("area under the ROC curve", sum(areas) / len(areas), 0.5, margin)


def _join_rows(network: Network, rows_of: Callable[[Outcome], _Rows]) -> _Rows:
    """Put the rows of all batches behind each other."""
    with borrowed(network.module), torch.no_grad():
        rows = list(map(rows_of, outcomes(network)))
    predicted, actual, weight = map(torch.cat, zip(*rows, strict=True))
    return predicted, actual, weight


def _task(outcome: Outcome) -> str:
    """Return the task of the criterion, by the shape of the labels if it is not in the table."""
    row, output, target = outcome.loss.row, outcome.output, outcome.target
    if row is not None and row.task is not None:
        return row.task
    has_classes = output.ndim == target.ndim + 1 and not target.is_floating_point()
    return "classification" if has_classes else "regression"


def _predict(outcome: Outcome) -> _Rows:
    """Return classes, none (-1) where an output is nan, or the numbers of a regression."""
    if _task(outcome) == "classification":
        scores, labels, weight = _class_rows(outcome)
        predicted = scores.argmax(dim=1).where(~scores.isnan().any(dim=1), -1)
        return predicted[:, None], labels[:, None], weight
    criterion: Any = outcome.loss.criterion
    output, target = (
        array.reshape(len(array), -1).double() for array in (outcome.output, outcome.target)
    )
    if _task(outcome) == "binary":
        threshold = 0.5 if isinstance(criterion, nn.BCELoss) else 0.0
        predicted = (output > threshold).long().where(~output.isnan(), -1)
        return predicted, (target > 0.5).long(), outcome.weight
    if isinstance(criterion, nn.PoissonNLLLoss) and criterion.log_input:
        output = output.exp()
    return output, target, outcome.weight


def _class_columns(outcome: Outcome) -> _Rows:
    """Return the probability of each class or label, and whether it is the true one."""
    if _task(outcome) == "binary":
        n = len(outcome.output)
        return outcome.output.reshape(n, -1), outcome.target.reshape(n, -1) > 0.5, outcome.weight
    scores, labels, weight = _class_rows(outcome)
    positive = nn.functional.one_hot(labels, scores.shape[1]) > 0
    return scores.double().softmax(dim=1), positive, weight


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
