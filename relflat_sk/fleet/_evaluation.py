"""The losses of many networks on all their training data, as `StopAtLoss` computes one.

As there, the samples that had the largest losses are run first: if the sum of their losses shows
that a network is above its goal, the others need not be run.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from relflat_sk.fleet._criterion import Criterion
from relflat_sk.fleet._data import Data
from relflat_sk.fleet._stack import Stack

__all__ = ["losses_on_all"]

SHARE_OF_A_PROOF = 16  # a proof takes one of so many samples
FEWEST_FOR_A_PROOF = 256  # samples of a batch from which on a proof is cheaper than the batch
ROUNDING_OF_A_PROOF = 1e-4
_AT_ONCE = 256  # samples of each network in one pass


def losses_on_all(
    body: Any,
    criterion: Criterion,
    stack: Stack,
    data: Data,
    positions: Sequence[int],
    goals: Sequence[float],
) -> list[float]:
    """Compute the mean losses of some networks on their training data, in evaluation mode."""
    divisors = [data.total_weights[k] for k in positions]
    limits = [
        goal * divisor * (1 + ROUNDING_OF_A_PROOF)
        for goal, divisor in zip(goals, divisors, strict=True)
    ]
    found = [math.inf] * len(positions)
    hardest = [stack.members[k].hardest for k in positions]
    tried = [i for i, rows in enumerate(hardest) if rows is not None]
    left = set(range(len(positions)))
    if tried:
        rows = torch.stack([hardest[i] for i in tried])  # type: ignore[misc]
        each = _losses(body, criterion, stack, data, [positions[i] for i in tried], rows)
        sums = each.sum(1).cpu().tolist()
        left -= {i for i, total in zip(tried, sums, strict=True) if total > limits[i]}
    if left:
        rest = sorted(left)
        each = _losses(body, criterion, stack, data, [positions[i] for i in rest], None)
        for i, of_samples, total in zip(rest, each, each.sum(1).cpu().tolist(), strict=True):
            found[i] = total / divisors[i]
            stack.members[positions[i]].hardest = _hardest(of_samples, limits[i])
    return found


def _hardest(losses: Tensor, limit: float) -> Tensor | None:
    """Return the samples with the largest losses, if the sum of these is above a limit."""
    if len(losses) < FEWEST_FOR_A_PROOF:
        return None
    largest, rows = losses.topk(len(losses) // SHARE_OF_A_PROOF)
    return rows if float(largest.sum()) > limit else None


def _losses(
    body: Any,
    criterion: Criterion,
    stack: Stack,
    data: Data,
    positions: Sequence[int],
    rows: Tensor | None,
) -> Tensor:
    """Compute weighted losses of samples in float64: of all samples if `rows` is None."""
    weights, buffers = stack.of(positions)
    body.bind(weights, weights, buffers)
    with torch.no_grad():
        parts = [
            criterion.each(body.evaluate(batch.inputs), batch.targets).double() * batch.weights
            for batch in data.in_order(positions, rows, _AT_ONCE)
        ]
    return torch.cat(parts, 1)
