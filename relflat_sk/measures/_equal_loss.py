r"""Networks at equal loss: the temperature at which a network has a given mean loss.

A classifier at temperature T has the logits ``z / T``, and so the classes that it predicts. With
``beta = 1 / T``, the mean loss ``L(beta)`` is convex. At ``beta = 0`` every prediction is the same,
so the loss is no less than that of the best constant prediction. The larger T of a smaller loss
belongs to the smaller beta. Newton's iteration from ``beta = 0`` finds it: a tangent of a convex
function is below it, so no step goes past the root, and a point where the loss is larger and does
not fall proves that there is no root.

With label smoothing, or labels that are probabilities, no network is below their entropy. The share
of the constant's loss is then that of what is above it.

A squared error is, up to constants, the negative logarithm of a normal density with the variance T:
``|y - z|^2 / T``. So the temperature divides the loss, and ``T = L / target`` for every network.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from relflat_sk._losses.loss import name_criterion
from relflat_sk._network.borrowing import borrowed
from relflat_sk._network.layers import Layer
from relflat_sk._network.network import LossRange, Network, Outcome, loss_range, outcomes
from relflat_sk.measures._scan import ForwardPass, Summary, scan

# numbers of logits that are stored, to spare passes
_MOST_STORED = 2**27
# numbers of logits that are computed with at a time
_TOGETHER = 2**20
# a share of the target loss, and of beta, that is rounding
_ROUNDING = 1e-13
_MAX_STEPS = 500
# logits of classes that are masked out, in place of minus infinity, which has no derivative
_MASKED = -1e30
# by how much the logarithm of summed probabilities may differ from 0
_NOT_LOGARITHMS = 1e-2


def are_no_logarithms(output: Tensor) -> bool:
    """Return whether the probabilities with these logarithms do not sum to 1."""
    return bool(output.logsumexp(dim=1).abs().max() > _NOT_LOGARITHMS)


@dataclass
class EqualLoss:
    """A network with its loss at a temperature, or the reason why there is none."""

    network: Network
    own: Summary  # totals of the pass at temperature 1
    reason: str | None = None  # empty if the loss or logits are nan or infinite


def at_equal_loss(
    network: Network, layers: Sequence[Layer] | str, share: float, *, checked: bool
) -> EqualLoss:
    """Find the temperature at which a network's loss is a share of the best constant's."""
    loss, recording = network.loss, _Recording(network)
    with borrowed(network.module):
        if loss.row is None or not loss.row.has_temperature:
            return EqualLoss(
                network,
                scan(network, layers, checked=checked),
                f"equal loss needs a loss at a temperature, and {name_criterion(loss.criterion)} "
                "has none. CrossEntropyLoss, NLLLoss, BCELoss, BCEWithLogitsLoss and MSELoss have "
                "one. Leave at_loss out, or pass one of these as criterion",
            )
        own = scan(network, layers, recording.add, checked=checked)
        losses = loss_range(network, own.output_shape, own.link, recording.labels)
        temperature = recording.temperature(own.mean_loss, share, losses)
    if isinstance(temperature, str):
        return EqualLoss(network, own, temperature)
    return EqualLoss(replace(network, loss=replace(loss, temperature=temperature)), own)


def _loss_at(scored: Outcome, beta: float) -> np.ndarray:
    """Sum the loss of logits times beta, its slope in beta, and the divisors: (3,)."""
    logits, weight = scored.output, scored.weight
    loss = replace(scored.loss, temperature=1.0).to(logits.device, torch.float64)
    n, total, slope = len(logits), 0.0, 0.0
    size = max(1, _TOGETHER * n // max(1, logits.numel()))
    with torch.enable_grad():
        parts = (torch.split(array, size) for array in (logits, scored.target, weight))
        for part, target, shares in zip(*parts, strict=True):
            leaf = torch.tensor(beta, dtype=torch.float64, device="cpu", requires_grad=True)
            z = part.double().clamp_min(_MASKED) * leaf.to(logits.device)
            # the logistic loss has the target's precision
            labels = target.double() if target.is_floating_point() else target
            of_part = shares @ loss.losses(loss.from_logits(z), labels, each=True)
            slope += float(torch.autograd.grad(of_part, leaf)[0])
            total += float(of_part.detach())
    divisors = scored.loss.divisors(logits, scored.target).detach().double()
    return np.array([total, slope, float(weight @ divisors)])


class _Recording:
    """What a pass over the data leaves for the search of a temperature, while there is room."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.labels: list[tuple[Tensor, Tensor]] = []
        self._scored: list[Outcome] = []  # of logits
        self._largest = 0.0  # of all logits
        self._reason = ""  # why there is no temperature
        self._room = _MOST_STORED

    def add(self, forward: ForwardPass) -> None:
        if forward.target is None:
            raise ValueError("y is needed: at_loss measures at a given mean loss. Pass y.")
        self.labels.append((forward.target, forward.sample_weight))
        if not self.network.loss.divides_logits:
            return
        logits = forward.logits(self.network.loss)
        largest = logits.abs().where(logits > _MASKED, 0).amax()
        self._largest = max(self._largest, float(largest))
        self._reason = self._reason or self._why_not(forward, logits)
        self._room -= logits.numel()
        if self._room >= 0:
            loss, weight = self.network.loss, forward.sample_weight
            self._scored.append(Outcome(logits, forward.target, loss, weight, weighted=True))

    def _why_not(self, forward: ForwardPass, logits: Tensor) -> str:
        """Say why logits do not follow from the outputs, or are too large."""
        loss = self.network.loss
        assert loss.row is not None
        link = loss.row.link
        if link == "log_softmax" and are_no_logarithms(forward.output.detach()):
            return (
                f"{name_criterion(loss.criterion)} takes logarithms of probabilities, but the "
                "probabilities do not sum to 1. Let the network end in LogSoftmax"
            )
        if link == "sigmoid" and forward.link != link and bool(logits.isinf().any()):
            return (
                "it needs the network's logits, and its sigmoid rounded some to 0 or 1. Let it end "
                "in logits, with BCEWithLogitsLoss as its criterion, or measure the last layer"
            )
        if math.inf > self._largest > -_MASKED:
            return (
                f"it needs logits below {-_MASKED:g}, got {self._largest:.3g}. Rescale the last "
                "layer: the value does not depend on it"
            )
        return ""

    def temperature(self, mean: float, share: float, losses: LossRange) -> float | str:
        """Find the temperature of a share of a loss, or say why there is none."""
        lowest, constant = losses
        is_finite = math.isfinite(constant) and math.isfinite(self._largest)
        if self._reason or math.isnan(mean) or not is_finite:
            return self._reason
        if constant - lowest <= _ROUNDING * constant:
            return (
                f"the best constant prediction has a loss of {constant:.3g}, of which there is no "
                "share: all labels are the same"
            )
        target = lowest + share * (constant - lowest)
        if self.network.loss.divides_logits:
            return self._solve(target, losses)
        return mean / target or "the mean squared error is 0, and no variance can divide it"

    def _solve(self, target: float, losses: LossRange) -> float | str:
        """Find the smallest beta with a mean loss by Newton's iteration, see the module."""
        before = beta = first = 1e-6 / max(1e-30, self._largest)
        for _ in range(_MAX_STEPS):
            loss, slope = self._at(beta)
            if not math.isfinite(loss):
                return ""
            if abs(loss - target) <= _ROUNDING * target:
                break
            if slope >= 0:
                return self._why_not_reached(before, beta, target, losses)
            step = (target - loss) / slope
            if abs(step) <= _ROUNDING * beta:
                break
            before, beta = beta, max(beta + step, first)
            if before == beta:
                return (
                    f"the mean loss is below {target:.4g}, the share that at_loss asks for of "
                    f"the best constant prediction's {losses.constant:.4g}, at every temperature "
                    f"from {1 / beta:.3g} on"
                )
        return 1 / beta

    def _at(self, beta: float) -> tuple[float, float]:
        """Compute the mean loss of the logits times beta, and its slope in beta."""
        scored = self._scored if self._room >= 0 else self._run()
        sums = sum((_loss_at(part, beta) for part in scored), start=np.zeros(3))
        total, slope, divisor = sums.tolist()
        return total / divisor, slope / divisor

    def _run(self) -> Iterator[Outcome]:
        """Run the network again, where its logits do not fit."""
        with torch.no_grad():
            for outcome in outcomes(self.network):
                yield replace(outcome, output=outcome.loss.logits(outcome.output))

    def _why_not_reached(self, low: float, beta: float, target: float, losses: LossRange) -> str:
        """Say which loss is the lowest, between a falling one, if there is any, and another."""
        if low < beta:
            logs = math.log(low), math.log(beta)
            options = {"bounds": logs, "method": "bounded", "options": {"xatol": 1e-3}}
            beta = math.exp(minimize_scalar(lambda x: self._at(math.exp(x))[0], **options).x)
        loss, lowest = self._at(beta)[0], losses.lowest
        above, most = losses.constant - lowest, f"{losses.constant:.4g}"
        if lowest:
            most += f" above the {lowest:.4g} that smoothed labels permit"
        return (
            f"the lowest mean loss that the network reaches is {loss:.4g}, which is "
            f"{(loss - lowest) / above:.3g} of the best constant prediction's {most}, more than "
            f"the {(target - lowest) / above:.3g} that at_loss asks for. It has not fitted these "
            "data: train it longer, measure its training data, or compare at a larger share"
        )
