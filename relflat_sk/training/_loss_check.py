"""Tell whether the loss on all training data has reached a goal, mostly without computing it.

Three steps, each taken only if the one before leaves it open:

1. The **running loss** of the epoch is far from the goal. The weights move while it is recorded,
   so the margin is wide. It is believed only if it is known to be the mean loss of the network
   as it is in evaluation: no dropout or batch norm, no code of others that asks for the mode,
   no criterion that sums, and no loss or step of the net's own.
2. The **hardest samples** of the last pass have losses whose sum is too large for the goal,
   however small all others are. This is certain, and takes a small batch.
3. A **pass** over all data computes the loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import isfunction
from statistics import median
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from relflat_sk._losses import ProbabilityNLLLoss
from relflat_sk._network import Batch, Network, Outcome, borrowed, outcome_of

__all__ = [
    "FEWEST_FOR_A_PROOF",
    "ROUNDING_OF_A_PROOF",
    "SHARE_OF_A_PROOF",
    "Proof",
    "acts_alike",
    "is_above",
    "is_far",
    "mean_loss_with_proof",
]

# In trainings without dropout and batch norm (5 data sets, Adam and SGD at three rates each,
# batches of 8 to 128; 5,357 epochs at which a goal could be reached), no epoch ended at a loss
# this much smaller than the running loss of `_are_above`. Two did at half of this margin, which
# was chosen on the same trainings.
FAR = 10.0
SHARE_OF_A_PROOF = 16  # a proof takes one of so many samples
FEWEST_FOR_A_PROOF = 256  # samples of a batch from which on a proof is cheaper than the batch
ROUNDING_OF_A_PROOF = 1e-4
_MAKE_LOSSES = ("get_loss", "train_step", "train_step_single", "run_single_epoch")
# criteria with losses that cannot be negative
_NOT_NEGATIVE = (
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.CrossEntropyLoss,
    nn.HuberLoss,
    nn.L1Loss,
    nn.MSELoss,
    nn.SmoothL1Loss,
    ProbabilityNLLLoss,
)


# -- the running loss ----------------------------------------------------------------------


def is_far(net: Any, goal: float) -> bool:
    """Return whether the running loss of a net's last epoch is far from a goal."""
    batches = net.history[-1]["batches"]
    losses = [batch["train_loss"] for batch in batches if "train_loss" in batch]
    return _are_above(losses, FAR * goal) and _records_mean(net) and acts_alike(net.module_)


def _records_mean(net: Any) -> bool:
    """Return whether the recorded loss is known to be the mean of the criterion, and no more."""
    spaces = [vars(net), *map(vars, type(net).__mro__)]
    written = [space[name] for space in spaces for name in _MAKE_LOSSES if name in space]
    known = all(_is_from(method, "skorch", "relflat_sk") for method in written)
    return known and getattr(net.criterion_, "reduction", None) == "mean"


def _is_from(definition: Any, *packages: str) -> bool:
    """Return whether a class or function is defined in one of some packages."""
    module = str(getattr(definition, "__module__", ""))
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


def _are_above(losses: Sequence[float], limit: float) -> bool:
    """Return whether the losses of an epoch are typically above a limit.

    Single batches may be outliers: the mean, the median, and the median of the last quarter must
    be above.
    """
    if not losses or not sum(losses) / len(losses) > limit:  # the mean may be nan
        return False
    last = losses[-max(1, len(losses) // 4) :]
    return median(losses) > limit and median(last) > limit


def acts_alike(module: nn.Module) -> bool:
    """Return whether a network is known to act in training as it does in evaluation."""
    return not any(map(_asks_for_mode, module.modules()))


def _asks_for_mode(part: nn.Module) -> bool:
    if isinstance(part, _DropoutNd | _NormBase | nn.RReLU) or getattr(part, "dropout", False):
        return True
    others = [
        kind
        for kind in type(part).__mro__
        if not _is_from(kind, "torch.nn", "relflat_sk", "builtins")
    ]
    if "forward" in vars(part) or any(_is_from(kind, "torch") for kind in others):
        return True  # compiled to something that cannot be read
    functions = [one for kind in others for one in vars(kind).values() if isfunction(one)]
    return any({"training", "dropout"} & _names_in(one.__code__) for one in functions)


def _names_in(code: CodeType) -> set[str]:
    """Return the names of attributes and functions in the code of a function."""
    inner = [_names_in(one) for one in code.co_consts if isinstance(one, CodeType)]
    return set(code.co_names).union(*inner)


# -- proofs --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Proof:
    """The samples that had the largest losses, and the divisor of the mean over all samples."""

    batches: tuple[Batch, ...]
    divisor: float


def is_above(network: Network, goal: float, proof: Proof | None) -> bool:
    """Return whether the loss on all data is certainly above a goal."""
    if proof is None:
        return False
    with borrowed(network.module), torch.no_grad():
        some = sum(
            float(outcome_of(network, batch, network(batch.x)).total()[0])
            for batch in proof.batches
        )
    return some > goal * proof.divisor * (1 + ROUNDING_OF_A_PROOF)


def mean_loss_with_proof(network: Network, goal: float) -> tuple[float, Proof | None]:
    """Compute the mean loss over the data, and what can tell that it stays above a goal."""
    total, divisor, hardest, above = 0.0, 0.0, [], 0.0
    provable = _is_provable(network)
    with borrowed(network.module), torch.no_grad():
        for batch in network.batches():
            outcome = outcome_of(network, batch, network(batch.x))
            loss, share = outcome.total()
            total += float(loss)
            divisor += share
            if provable and isinstance(batch.x, Tensor) and len(batch.x) >= FEWEST_FOR_A_PROOF:
                chosen, largest = _hardest(batch, outcome)
                hardest.append(chosen)
                above += largest
    proves = above > goal * divisor * (1 + ROUNDING_OF_A_PROOF)
    return total / divisor, Proof(tuple(hardest), divisor) if proves else None


def _is_provable(network: Network) -> bool:
    """Return whether no loss is negative, and none depends on which samples are in its batch."""
    return type(network.loss.criterion) in _NOT_NEGATIVE and not any(
        isinstance(part, _NormBase) and part.running_mean is None
        for part in network.module.modules()
    )


def _hardest(batch: Batch, outcome: Outcome) -> tuple[Batch, float]:
    """Choose the samples of a batch with the largest losses; return their sum as well."""
    losses = outcome.weight * outcome.each()[0].double()
    largest, rows = losses.topk(len(losses) // SHARE_OF_A_PROOF)
    rows = rows.to(batch.x.device)

    def take(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[rows.to(values.device)]

    return Batch(batch.x[rows], take(batch.y), take(batch.weight)), float(largest.sum())
