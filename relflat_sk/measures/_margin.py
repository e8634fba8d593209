"""The margin: by how much the score of the true class exceeds that of any other class."""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from relflat_sk._checks import check_number
from relflat_sk._losses import Loss, ProbabilityNLLLoss, name_criterion
from relflat_sk._network import (
    Batch,
    Network,
    borrowed,
    find_link,
    layer_names,
    record_tail,
    sample_weight,
)
from relflat_sk._warnings import warn
from relflat_sk.measures._results import Estimate, NotApplicableError


@dataclass(frozen=True)
class Scores:
    """How a criterion's first argument and the classes' scores belong together."""

    link: str  # from the scores, the last layer's output, to the criterion's first argument
    undo: Callable[[Tensor], Tensor]  # the inverse of the link, up to a constant per sample


SCORES: dict[type, Scores] = {
    nn.CrossEntropyLoss: Scores("identity", lambda z: z),
    nn.NLLLoss: Scores("log_softmax", lambda z: z),
    ProbabilityNLLLoss: Scores("softmax", lambda p: (p + torch.finfo(p.dtype).tiny).log()),
    nn.BCEWithLogitsLoss: Scores("identity", lambda z: z),
    nn.BCELoss: Scores("sigmoid", torch.logit),
}
BINARY = (nn.BCEWithLogitsLoss, nn.BCELoss)
FROM_LOGITS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda z: z,
    "softmax": lambda z: z.softmax(dim=1),
    "log_softmax": lambda z: z.log_softmax(dim=1),
}


@dataclass(frozen=True)
class ScoredBatch:
    """The classes' scores of a batch in float64, before any softmax or sigmoid.

    Shapes: `scores` (n, c, ...), `target` (n, ...), `weight` (n,).
    """

    loss: Loss
    scores: Tensor
    target: Tensor | None
    weight: Tensor
    weighted: bool

    @property
    def is_binary(self) -> bool:
        """Whether a score is that of class 1 against class 0, rather than that of its class."""
        return isinstance(self.loss.criterion, BINARY)


def scored_batches(network: Network, what: str) -> Iterator[ScoredBatch]:
    """Run a classifier batch by batch; `what` needs one, as an error says."""
    criterion = network.loss.criterion
    if type(criterion) not in SCORES:
        raise NotApplicableError(
            f"{what} needs a classifier, but {name_criterion(criterion)} is not known as a "
            f"classification loss. Known are {[kind.__name__ for kind in SCORES]}; if the "
            "network's outputs are logits, pass criterion=torch.nn.CrossEntropyLoss()."
        )
    (last,) = layer_names(network)[-1:]
    with borrowed(network.module):
        for batch in network.batches():
            yield _scored(network, last, batch)


def _scored(network: Network, last: str, batch: Batch) -> ScoredBatch:
    """Run one batch, and take its scores from the last layer's output where possible."""
    with torch.no_grad(), record_tail(network.module, last) as recorder:
        output = network(batch.x)
    record = recorder[last]
    loss = network.loss
    known = SCORES[type(loss.criterion)]
    scores = output.detach()
    if known.link != "identity" and find_link(output, record.node) == known.link:
        # probabilities close to 1 have lost digits that the layer's output has
        scores = record.check()[1].reshape(output.shape)
    else:
        scores = known.undo(scores)
    scores, target = loss.classes_second(scores.double(), batch.y), None
    if batch.y is not None:
        target = loss.check_target(scores, batch.y.to(scores.device))
    weight = sample_weight(batch, len(scores), scores.device)
    return ScoredBatch(loss, scores, target, weight, batch.weight is not None)


def sample_margins(network: Network) -> NDArray[np.float64]:
    """Compute the margin of each sample, ``f(x)[y] - max_{k != y} f(x)[k]``.

    ``f`` are the logits, before any softmax or sigmoid. A single logit z is the score of class
    1; the score of class 0 is then 0, and the margin z or -z.

    Shapes: returns (n,).
    """
    parts = []
    for one in scored_batches(network, "a margin"):
        if one.target is None:
            raise ValueError("y is needed: the margin is that of the true class. Pass y.")
        if one.weighted:
            raise ValueError(
                "the margin is a percentile of samples with equal weights: leave sample_weight out."
            )
        found = (_binary if one.is_binary else _multiclass)(one.loss, one.scores, one.target)
        parts.append(found.cpu().numpy())
    margins: NDArray[np.float64] = np.concatenate(network.processes.gather(np.concatenate(parts)))
    if not len(margins):
        raise NotApplicableError("the criterion ignores all labels, so there is no margin.")
    return margins


def _multiclass(loss: Loss, scores: Tensor, target: Tensor) -> Tensor:
    """Compare the true class with the best other class."""
    if target.is_floating_point() or scores.shape[1] < 2:
        raise NotApplicableError(
            "a margin needs two classes or more and one label for each sample, got outputs of "
            f"shape {tuple(scores.shape)} with targets of {target.dtype}."
        )
    scores, target = scores.movedim(1, -1).flatten(0, -2), target.flatten()
    labelled = target != getattr(loss.criterion, "ignore_index", -100)
    scores, target = scores[labelled], target[labelled, None]
    others = scores.scatter(1, target, -math.inf)
    return scores.gather(1, target)[:, 0] - others.amax(dim=1)


def _binary(loss: Loss, scores: Tensor, target: Tensor) -> Tensor:
    """Give each sample's logit the sign of its label."""
    if scores[0].numel() != 1 or bool(((target != 0) & (target != 1)).any()):
        raise NotApplicableError(
            "a margin needs one label, 0 or 1, for each sample, got outputs of shape "
            f"{tuple(scores.shape)} and targets such as {target.flatten()[:3].tolist()}."
        )
    return ((2 * target - 1) * scores).flatten()


# -- norms from their logarithms ----------------------------------------------------------------

PERCENTILE = 5.0
_LARGEST = math.log(sys.float_info.max)


def log(value: float) -> float:
    """Return the natural logarithm of a number that is not negative; minus infinity for 0."""
    return math.log(value) if value > 0 else -math.inf


def positive_margin(network: Network, percentile: float) -> float:
    """Return the margin of a classifier; nan, with a warning, if it is not positive."""
    check_number("percentile", percentile, positive=False)
    if percentile > 100:
        raise ValueError(f"percentile must be between 0 and 100, got {percentile!r}.")
    gamma = float(np.percentile(sample_margins(network), percentile))
    if gamma > 0:
        return gamma
    warn(
        f"the margin is {gamma:.3g}, not positive: it is the {percentile:g}th percentile of the "
        "samples' margins, and a negative margin is that of a sample that is classified wrongly. "
        "What is divided by the margin means nothing and is given as nan. Train until the network "
        "fits the training data, and measure on those, or pass a larger percentile."
    )
    return math.nan


def estimate_from_log(log_norm: float, tolerance: float = 0.0) -> Estimate:
    """Return a norm from its logarithm, with the relative tolerance of an iteration."""
    if log_norm > _LARGEST:
        warn(f"the norm is exp({log_norm:.6g}), too large for a float: it is given as infinite.")
        return Estimate(math.inf)
    norm = math.exp(log_norm)
    return Estimate(norm, tolerance * norm, "lanczos") if tolerance else Estimate(norm)
