"""Rivals without weights of their own: a classifier's predictions, and a criterion at its head.

With ``p_i`` the predicted probabilities of sample i, ``g_i`` the gradient of its loss in the last
layer's weight, ``C = mean_i g_i g_i^T`` and ``H`` the Hessian of the mean loss there:

==================  =======================================================================
inverse_confidence  ``1 / mean_i max_k p_ik`` [1]_
predictive_entropy  ``mean_i -sum_k p_ik log p_ik``, in nats
calibration_error   ``sum_b share_b |accuracy_b - confidence_b|`` over bins b [2]_
takeuchi_criterion  ``Tr(H^-1 C) / n``, an estimate of the gap in the unit of the loss [3]_
==================  =======================================================================

*Predictions.* Each token is one, and so is each output of a logistic loss. Tokens that the
criterion ignores do not count. Confidence and entropy need no labels.

*Takeuchi's criterion.* ``H`` is singular, since a softmax does not depend on the mean of its
logits. So ``ridge`` times its diagonal is added to it: the diagonal scales as ``H`` does, so that
a rescaling of neurons leaves the criterion as it is, which a multiple of the identity would not.
Weights without any curvature, as those of a dead neuron, do not count.

References
----------
.. [1] Hendrycks and Gimpel, "A Baseline for Detecting Misclassified and Out-of-Distribution
   Examples in Neural Networks", ICLR 2017.
.. [2] Guo et al., "On Calibration of Modern Neural Networks", ICML 2017.
.. [3] Thomas et al., "On the Interplay between Noise and Curvature and its Effect on
   Optimization and Generalization", AISTATS 2020.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from relflat_sk._checks import check_integer, check_number
from relflat_sk._network import Network, borrowed
from relflat_sk._numerics import or_one
from relflat_sk.measures._margin import ScoredBatch, scored_batches
from relflat_sk.measures._results import (
    EVERY_CHANGE,
    RESCALINGS,
    Estimate,
    NetworkMeasure,
    NotApplicableError,
)
from relflat_sk.measures._scan import ForwardPass, summarize

# -- predictions ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Predicted:
    """Predictions with their labels. Shapes: `logs` (r, c), `labels` (r,), `weight` (r,)."""

    logs: Tensor
    labels: Tensor | None
    weight: Tensor


def _predict(network: Network, what: str) -> Iterator[_Predicted]:
    """Predict the logarithms of probabilities, batch by batch."""
    for one in scored_batches(network, what):
        logs, labels = (_of_outputs if one.is_binary else _of_classes)(one)
        weight = one.weight.repeat_interleave(len(logs) // len(one.weight))
        if labels is not None and not one.is_binary:
            weight = weight * (labels != getattr(one.loss.criterion, "ignore_index", -100))
        yield _Predicted(logs, labels, weight)


def _of_outputs(one: ScoredBatch) -> tuple[Tensor, Tensor | None]:
    """Predict 0 or 1 for each output."""
    z = one.scores.flatten()
    labels = None if one.target is None else (one.target.flatten() > 0.5).long()
    return torch.stack([F.logsigmoid(-z), F.logsigmoid(z)], dim=1), labels


def _of_classes(one: ScoredBatch) -> tuple[Tensor, Tensor | None]:
    """Predict classes; of labels that are probabilities, take the most probable one."""
    logs, labels = one.scores.log_softmax(dim=1).movedim(1, -1).flatten(0, -2), one.target
    if labels is not None and labels.is_floating_point():
        labels = labels.argmax(dim=1)
    return logs, None if labels is None else labels.flatten()


def _mean(network: Network, what: str, each: Callable[[Tensor], Tensor]) -> float:
    """Average a function of the logarithms (r, c) over the predictions."""
    total, divisor = 0.0, 0.0
    for one in _predict(network, what):
        total += float(one.weight @ each(one.logs))
        divisor += float(one.weight.sum())
    return _ratio(*network.processes.sum_numbers(total, divisor))


def _ratio(total: float, divisor: float) -> float:
    if divisor == 0:
        raise ValueError("no sample counts: the criterion ignores all labels, or weights are zero.")
    return total / divisor


def _inverse_confidence(network: Network) -> Estimate:
    return Estimate(1 / _mean(network, "confidence", lambda logs: logs.amax(dim=1).exp()))


def _predictive_entropy(network: Network) -> Estimate:
    def entropy(logs: Tensor) -> Tensor:
        terms: Tensor = torch.special.entr(logs.exp())  # 0 log 0 is 0
        return terms.sum(dim=1)

    return Estimate(_mean(network, "entropy", entropy))


def _calibration_error(network: Network, *, n_bins: int = 15) -> Estimate:
    """Compare confidence and accuracy in bins of equal width of the confidence."""
    check_integer("n_bins", n_bins, minimum=1)
    # of each bin: summed weight of its predictions, of the right ones, summed confidence
    bins = torch.zeros(n_bins, 3, dtype=torch.float64, device=network.device)
    for one in _predict(network, "calibration"):
        if one.labels is None:
            raise ValueError("y is needed: calibration compares predictions with labels. Pass y.")
        top, predicted = one.logs.max(dim=1)
        confidence = top.exp()
        rows = torch.stack([one.weight, one.weight * (predicted == one.labels),
                            one.weight * confidence], dim=1)  # fmt: skip
        at = (confidence.nan_to_num() * n_bins).ceil().long().clamp(1, n_bins) - 1
        bins.index_add_(0, at, rows)
    weight, right, confidence = network.processes.sum(bins).T
    return Estimate(_ratio(float((right - confidence).abs().sum()), float(weight.sum())))


# -- Takeuchi's criterion -------------------------------------------------------------------------

# largest size of the weight for which the Hessian is written out
_DENSE = 2**12
# smallest curvature that is not rounding, as a share of the largest
_ROUNDING = 1e-14


class _Moments:
    """Sums over samples of the Hessian and of the gradients' outer products at one layer.

    Shapes: `hessian`, `outer` (d * m, d * m).
    """

    def __init__(self) -> None:
        self.hessian = self.outer = torch.zeros(())

    def add(self, forward: ForwardPass) -> None:
        """Add a batch."""
        (layer,) = forward.layers.values()
        size = layer.map.weight.numel()
        if size > _DENSE or not layer.is_flat:
            raise NotApplicableError(
                "takeuchi_criterion inverts the Hessian in the last layer's weight, of at most "
                f"{_DENSE} numbers, which one vector for each sample is multiplied with; layer "
                f"{layer.name!r} has {size} and features of shape {tuple(layer.features.shape)}."
            )
        if forward.target is None:
            raise ValueError("y is needed: takeuchi_criterion takes gradients of losses. Pass y.")
        weights, phi = forward.row_weights(layer), layer.features.double()
        gradients = layer.map.transpose(layer.features, layer.loss_gradient()).double().flatten(1)
        self.outer = self.outer + (weights[:, None] * gradients).T @ gradients
        rows = []
        for unit in torch.eye(layer.weight.shape[0]).to(phi):
            product = layer.product(unit.expand(len(phi), -1)[:, :, None])[:, :, 0].double()
            along = (product * weights[:, None]).T[:, :, None] * phi  # (d, n, m)
            rows.append((along.transpose(1, 2) @ phi).transpose(0, 1).flatten(1))
        self.hessian = self.hessian + torch.cat(rows)


def _takeuchi_criterion(network: Network, *, ridge: float = 1e-3) -> Estimate:
    """Solve with the Hessian in units in which its diagonal is one."""
    check_number("ridge", ridge)
    moments = _Moments()
    with borrowed(network.module):
        summary = summarize(network, [-1], moments.add)
    hessian, outer = map(network.processes.sum, (moments.hessian, moments.outer))
    diagonal = hessian.diagonal()
    curved = diagonal > _ROUNDING * diagonal.abs().amax()
    scale = or_one(diagonal.where(curved, 0.0)).sqrt()
    hessian, outer = ((one / scale / scale[:, None])[curved][:, curved] for one in (hessian, outer))
    root, failed = torch.linalg.cholesky_ex(hessian + ridge * torch.eye(len(hessian)).to(hessian))
    bent_down = bool((diagonal < -_ROUNDING * diagonal.abs().amax()).any())
    if (failed or bent_down) and math.isfinite(summary.loss):
        raise NotApplicableError(
            "the Hessian in the last layer's weight has negative eigenvalues, so the point is no "
            "minimum, and takeuchi_criterion has no meaning there. Train further."
        )
    # sums stand for means: n cancels in H^-1 C, and 1 / n is that of the criterion
    return Estimate(float(torch.cholesky_solve(outer, root).trace()) / summary.divisor)


RIVALS: dict[str, NetworkMeasure] = {
    "inverse_confidence": NetworkMeasure(_inverse_confidence, EVERY_CHANGE),
    "predictive_entropy": NetworkMeasure(_predictive_entropy, EVERY_CHANGE),
    "calibration_error": NetworkMeasure(_calibration_error, EVERY_CHANGE),
    "takeuchi_criterion": NetworkMeasure(_takeuchi_criterion, RESCALINGS),
}
