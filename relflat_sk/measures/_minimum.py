"""Whether a trained model is at a minimum: better than any constant prediction, and by training."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.stats import ttest_ind, ttest_rel
from sklearn.base import BaseEstimator
from skorch import NeuralNet
from torch import nn

from relflat_sk._checks import warn
from relflat_sk._losses.curvature import is_curved_at
from relflat_sk._losses.loss import name_criterion
from relflat_sk._network.batches import Batch
from relflat_sk._network.borrowing import borrowed
from relflat_sk._network.network import Network, outcome_of
from relflat_sk.measures._equal_loss import are_no_logarithms
from relflat_sk.measures._measure_network import CURVATURES
from relflat_sk.measures._predictions import Score, auc_of, score_of
from relflat_sk.measures._scan import Passes, Results, range_of

# By which share of the best constant prediction's loss a model's loss must be below it: by more
# than float32 rounding, because a constant network that knows the class frequencies has the same
# loss up to rounding.
_ROUNDING = 1e-5
# The same for a net whose training made no progress. Over 7 architectures and 12 data sets, an
# untrained network was 15% below by luck often, and 50% below in at most 3.5% of the draws on one
# set of two classes, in none on nearly all others. Accuracy proves nothing there: by luck it can
# be anything.
_LUCK = 0.5
# Training makes progress if it lowers its own loss by this share, and by more than noise such as
# dropout's can be.
_PROGRESS = 0.02
# A difference between epochs that is beyond the noise on data of any size.
_LARGE_PROGRESS = 0.2
# Or the first epoch is above those of the second half by that many of their standard deviations:
# on large or noisy data, the first epoch may learn nearly all. If all weights but creep, losses
# fall on a line, where it is 5.
_FLATTENED = 10
_FEWEST_LATE = 5
_P_VALUE = 1e-4
# A model whose flatness is a smaller share of the best constant's loss has no curvature left.
# Flatness is the rise of the loss under noise on a layer's inputs (relative to their size, to
# second order, times 2m): such noise must cost a network what it has gained over a constant. If
# the loss is so small, flatness must be that of a criterion whose curvature does not vanish with
# it: for squared errors, it is at least twice the constant's loss then.
_VANISHED = 1e-6
# A loss that may be that share of the constant's: cross-entropies of a constant are below 10.
_TINY_LOSS = 1e-5
# curvatures that are not in the unit of the loss, or of single neurons: only zero is too little
_OF_ANY_SIZE = {
    "comparable_flatness", "hessian_max_eigenvalue", "hessian_trace", "neuron_flatness_max",
}  # fmt: skip


@dataclass(frozen=True)
class ConstantComparison:
    """A model's loss and score on some data, beside those of the best constant prediction.

    Parameters
    ----------
    loss : float
        Mean loss.
    constant_loss : float
        Mean loss of the best constant prediction; nan where there is none.
    score : Score or None
        Accuracy, area under the ROC curve or R2, if the loss is no better than the constant's.
    """

    loss: float
    constant_loss: float
    score: Score | None = None

    @property
    def is_known(self) -> bool:
        """Whether there is a constant prediction to compare with."""
        return not math.isnan(self.constant_loss)

    @property
    def beats_constant(self) -> bool:
        """Whether the loss or the score is better than the best constant prediction's."""
        has_score = self.score is not None and self.score.beats_constant
        return math.isfinite(self.loss) and (self.is_lower_by(_ROUNDING) or has_score)

    def is_lower_by(self, share: float) -> bool:
        """Return whether the loss is below the constant's by more than a share of it.

        Parameters
        ----------
        share : float
            Share of the best constant prediction's loss.

        Returns
        -------
        bool
            False where there is no constant prediction.
        """
        return self.loss < self.constant_loss - share * abs(self.constant_loss)


def compare_with_constant(network: Network, passes: Passes) -> ConstantComparison:
    """Compare a network with the best constant prediction on the data that it was measured on."""
    comparison = ConstantComparison(passes.compared_risk, range_of(network, passes).constant)
    if comparison.beats_constant or not math.isfinite(comparison.loss):
        return comparison
    score = score_of(network)
    is_accuracy = score is not None and score.name == "accuracy" and not score.beats_constant
    if is_accuracy and len(passes.own.output_shape) < 2:
        area = auc_of(network)
        score = area if area is not None and area.beats_constant else score
    return ConstantComparison(comparison.loss, comparison.constant_loss, score)


def find_objection(
    model: Any, measure: str, flatness: float, comparison: ConstantComparison
) -> str | None:
    """Explain why the flatness of a model is no score."""
    if not math.isfinite(flatness) and (math.isfinite(comparison.loss) or not comparison.is_known):
        return f"cannot be scored: the measure {measure!r} is {flatness:.3g}"
    learned = _has_learned(model, comparison) if comparison.is_known else True
    problem = _why_no_minimum(learned, comparison)
    solved = isinstance(model, BaseEstimator) and not isinstance(model, NeuralNet)
    if problem is not None and learned is None and solved and math.isfinite(comparison.loss):
        # scikit-learn's solvers end at a minimum, which may predict other data badly
        return (
            "keeps no record of its training, and these data do not show that it has learned: "
            f"{problem}. If these are other data, score it on those that it was trained on"
        )
    if problem is not None:
        return f"is not at a minimum of its loss, so its flatness means nothing: {problem}"
    if has_vanished(measure, flatness, comparison):
        return (
            f"has no curvature left that could be compared, with a flatness of {flatness:.3g}. Its "
            "network may be saturated: measure all models at equal loss, with "
            "measure_params={'at_loss': 0.05}, or train them to the same loss. Or its criterion "
            "may have no curvature: score with measure_params={'criterion': ...}"
        )
    return None


def has_vanished(measure: str, flatness: float, comparison: ConstantComparison) -> bool:
    """Return whether a measure is a curvature that is zero up to rounding."""
    if measure not in CURVATURES:
        return False
    if not comparison.is_known or measure in _OF_ANY_SIZE:
        return flatness == 0
    scale = abs(comparison.constant_loss)
    return abs(flatness) <= (1 if comparison.is_lower_by(1 - _VANISHED) else _VANISHED) * scale


def warn_of_vanished(network: Network, results: Results) -> None:
    """Warn of curvatures that are zero up to rounding, by the rule of the scorer."""
    tiny = {
        key: measured.value
        for key, measured in results.items()
        if key[1] in CURVATURES
        and (
            measured.value == 0
            or abs(measured.value) <= _VANISHED * measured.passes.compared_risk
            or abs(measured.passes.compared_risk) < _TINY_LOSS
        )
    }
    if not tiny:
        return
    passes, unknown = results[next(iter(tiny))].passes, ""
    try:
        constant = range_of(network, passes).constant
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        # a criterion of the user's own need not take a constant
        constant, unknown = math.nan, f" ({type(error).__name__}: {error})"
    if math.isnan(constant) and math.isfinite(passes.compared_risk):
        unknown = (
            f" The loss of the best constant prediction could not be computed{unknown}, which "
            "would show whether the network is dead or saturated."
        )
    comparison = ConstantComparison(passes.compared_risk, constant)
    gone = [key for key, value in tiny.items() if has_vanished(key[1], value, comparison)]
    if gone:
        why = _why_vanished(network, comparison) or (
            ": there is no curvature left that could be compared. The network may be saturated: "
            "measure at equal loss, with at_loss=0.05, or train all models to the same loss. Or "
            f"its loss may not depend on the layer.{unknown}"
        )
    elif unknown:
        gone, why = list(tiny)[:1], f".{unknown}"
    else:
        return
    names = ", ".join(dict.fromkeys(name for _, name in gone))
    warn(f"{names} is {tiny[gone[0]]:.3g}{why}")


def _why_vanished(network: Network, comparison: ConstantComparison) -> str | None:
    """Say that the criterion has no curvature, or that the network is no better than a constant."""
    if not criterion_has_curvature(network):
        return (
            f" because {name_criterion(network.loss.criterion)} has no curvature at the network's "
            "outputs. So the minimum need not be flat. Measure with a loss that is twice "
            "differentiable, such as criterion=torch.nn.MSELoss()."
        )
    is_known = comparison.is_known and math.isfinite(comparison.loss)
    if is_known and not comparison.is_lower_by(_ROUNDING):
        return (
            ", which does not mean that the minimum is flat: the network's mean loss of "
            f"{comparison.loss:.6g} is no better than the best constant prediction's, "
            f"{comparison.constant_loss:.6g}. The network may be dead, with outputs that do not "
            "depend on its inputs; or saturated: then measure at equal loss, with at_loss=0.05."
        )
    return None


# -- whether there is any curvature --------------------------------------------------------


def criterion_has_curvature(network: Network) -> bool:
    """Return whether the criterion is curved in the network's outputs, on some batch."""
    # Where it is not, as the mean absolute error, every flatness is zero behind a piecewise linear
    # network.
    with borrowed(network.module):
        # by its formula, also where outputs are too large to show it in float32
        curved = network.loss.is_curved
        if curved and type(network.loss.criterion) is nn.NLLLoss:  # linear in what it takes
            with torch.no_grad():
                curved = not are_no_logarithms(network(next(iter(network.batches())).x))
        return curved or any(_is_curved(network, batch) for batch in network.batches())


def _is_curved(network: Network, batch: Batch) -> bool:
    """Return whether a product with the Hessian in the outputs of a batch is not zero."""
    if batch.y is None:
        return True
    with torch.no_grad():
        output = network(batch.x)
    return is_curved_at(output, lambda output: outcome_of(network, batch, output).total()[0])


# -- what speaks against a minimum ----------------------------------------------------------


def _why_no_minimum(learned: bool | None, comparison: ConstantComparison) -> str | None:
    """Explain why a model is not at a minimum, or does not show it if nothing is recorded."""
    risk, score = comparison.loss, comparison.score
    if comparison.is_known and not math.isfinite(risk):
        return f"its mean loss is {risk:.3g}; has training diverged?"
    if learned or (
        comparison.beats_constant and (learned is None or comparison.is_lower_by(_LUCK))
    ):
        return None
    why, better = "", "no"
    if comparison.beats_constant:
        why = "its training made no progress, and "
        better = "little" if comparison.is_lower_by(0) else "no"
    elif score is not None:
        why = (
            f"its {score.name} of {score.value:.3g} is not clearly better than the best "
            f"constant prediction's, {score.constant:.3g}, and "
        )
    return (
        f"{why}its mean loss of {risk:.6g} is {better} better than the best constant "
        f"prediction's, {comparison.constant_loss:.6g}"
    )


# -- evidence of training ---------------------------------------------------------------------


def _has_learned(model: Any, comparison: ConstantComparison) -> bool | None:
    """Return whether the record of a training shows that it succeeded; None without a record."""
    if hasattr(type(model), "constant_comparison_"):
        own: ConstantComparison | None = getattr(model, "constant_comparison_", None)
        if own is None:  # the weights are not those that were trained
            return None
        if own.is_known:
            return own.beats_constant and is_trained(model, own)
    progress = _made_progress(model)
    if progress is not None:
        return progress
    # of an optimizer that keeps no curve; labels of other data have about the same constant
    final = getattr(model, "loss_", math.nan)
    return True if final < comparison.constant_loss * (1 - _PROGRESS) else None


def is_trained(model: Any, comparison: ConstantComparison) -> bool:
    """Return whether a loss is lower than luck can make it, or a training has lowered it."""
    return comparison.is_lower_by(_LUCK) or bool(_made_progress(model))


def _made_progress(model: Any) -> bool | None:
    """Return whether a training has lowered its loss, to its end; None without a record."""
    if isinstance(model, NeuralNet):
        recorded = [epoch["train_loss"] for epoch in model.history if "train_loss" in epoch]
        ended_worse = len(recorded) > 1 and not min(recorded[-3:]) <= recorded[0]
        return _history_shows_progress(model) and not ended_worse
    curve = getattr(model, "loss_curve_", None)
    return None if curve is None else _is_lowered(curve, _PROGRESS)


def _batch_losses(epoch: Mapping[str, Any]) -> list[float]:
    """Return the training losses of the batches of an epoch, as far as a net has recorded them."""
    return [batch["train_loss"] for batch in epoch.get("batches", ()) if "train_loss" in batch]


def epoch_losses(net: NeuralNet) -> list[float]:
    """Return the training losses of the epochs, or else the means of their batches."""
    # with callbacks="disable", a net records batches only
    each = [[e["train_loss"]] if "train_loss" in e else _batch_losses(e) for e in net.history]
    return [float(np.mean(losses)) for losses in each if losses]


def _history_shows_progress(net: NeuralNet) -> bool:
    """Compare the losses of epochs and batches at the beginning and the end of the training."""
    batches = [losses for losses in map(_batch_losses, net.history) if losses]
    epochs = epoch_losses(net)
    if _is_lowered(epochs, _LARGE_PROGRESS if batches else _PROGRESS) or _has_flattened(epochs):
        return True
    if not batches:
        return False
    shuffled = net.get_params_for("iterator_train").get("shuffle", False)
    if shuffled or max(map(len, batches)) == 1:  # batches can be compared
        losses = [loss for epoch in batches for loss in epoch]
        quarter = len(losses) // 4
        first, last = losses[:quarter], losses[len(losses) - quarter :]
        compare = partial(ttest_ind, equal_var=False)
    else:  # a batch holds the same samples in all epochs, but of another kind than others hold
        first, last, compare = batches[0], batches[-1], ttest_rel
        if len(batches) < 2 or len(first) != len(last):
            return False
    if len(first) < 2 or not _is_lowered([sum(first), sum(last)], _PROGRESS):  # as many losses
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # there may be no noise
        return bool(compare(first, last, alternative="greater").pvalue < _P_VALUE)


def _has_flattened(losses: Sequence[float]) -> bool:
    """Return whether the first epoch's loss is above those of the second half, which are even."""
    late = losses[len(losses) // 2 :]
    if len(late) < _FEWEST_LATE:
        return False
    return bool(losses[0] - np.mean(late) > _FLATTENED * np.std(late))


def _is_lowered(losses: Sequence[float], share: float) -> bool:
    """Return whether any loss is a share below the first: the last may be an outlier."""
    return any(loss < losses[0] - share * abs(losses[0]) for loss in losses[1:])
