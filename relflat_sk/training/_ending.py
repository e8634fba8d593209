"""Whether a module ends in logits or in probabilities, as its criterion takes them."""

from torch import Tensor, nn

from relflat_sk._losses import Loss, ProbabilityNLLLoss, explain_ending
from relflat_sk._network import find_ending

__all__ = ["check_ending"]

# what to pass for a module that is to keep its ending
_INSTEAD = {
    "softmax": "NLLLoss, which takes probabilities here, as in skorch's classifiers",
    "log_softmax": "CrossEntropyLoss, which takes them as they are",
    "sigmoid": "BCELoss, which takes probabilities",
}
# criteria of probabilities, and what is wrong with other outputs
_PROBABILITIES: dict[type, str] = {
    ProbabilityNLLLoss: (
        "NLLLoss takes probabilities here, as in skorch's classifiers: from 0 to 1, with the sum 1 "
        "over the classes. End the module with a softmax, or use CrossEntropyLoss, which takes "
        "logits or the output of LogSoftmax."
    ),
    nn.BCELoss: (
        "BCELoss takes probabilities, from 0 to 1. End the module with a sigmoid, or use "
        "BCEWithLogitsLoss, which takes logits."
    ),
}
_ROUNDING = 0.02  # of a sum of probabilities in bfloat16


def check_ending(loss: Loss, output: Tensor) -> None:
    """Refuse probabilities where the criterion takes logits, and the other way round."""
    kind = type(loss.criterion)
    ending = find_ending(output)
    problem = explain_ending(loss.criterion, ending)
    if ending is not None and problem is not None:
        raise ValueError(
            f"{problem}. Remove it from the module, or pass criterion=torch.nn.{_INSTEAD[ending]}."
        )
    if kind in _PROBABILITIES and not _are_probabilities(output.detach(), kind):
        low, high = output.detach().aminmax()
        raise ValueError(
            f"{_PROBABILITIES[kind]} The module returned values from {low:g} to {high:g}."
        )


def _are_probabilities(output: Tensor, kind: type) -> bool:
    """Return whether numbers are in the range that a criterion takes; nan passes."""
    outside = ((output < 0) | (output > 1)).any()
    if kind is ProbabilityNLLLoss:
        outside |= ((output.sum(dim=1) - 1).abs() > _ROUNDING).any()
    return not outside
