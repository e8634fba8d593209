"""Functions in which networks end, and whether they fit the criterion."""

from typing import Any

from torch import nn

from relflat_sk._warnings import warn

__all__ = ["explain_ending", "warn_of_ending"]

# criteria that apply a function to logits, with functions that must not have made the logits
_ON_LOGITS: dict[type, tuple[str, set[str]]] = {
    nn.CrossEntropyLoss: ("softmax", {"softmax", "sigmoid"}),
    nn.BCEWithLogitsLoss: ("sigmoid", {"softmax", "log_softmax", "sigmoid"}),
}


# what networks with these endings are usually trained with
_TRAINED_WITH = {
    "softmax": "criterion=lambda p, y: torch.nn.functional.nll_loss(p.log(), y)",
    "log_softmax": "criterion=torch.nn.NLLLoss()",
    "sigmoid": "criterion=torch.nn.BCELoss()",
}


def explain_ending(criterion: Any, ending: str | None) -> str | None:
    """Explain why the function that a network ends in does not fit a criterion."""
    kind = type(criterion)
    own, wrong = _ON_LOGITS.get(kind, ("", set[str]()))
    if ending not in wrong:
        return None
    return (
        f"{kind.__name__} takes logits, to which it applies a {own}, but the network ends in a "
        f"{ending} already"
    )


def warn_of_ending(criterion: Any, ending: str | None) -> None:
    """Warn if probabilities reach a criterion that takes logits, or logarithms of them.

    Measures are then still those of the loss that torch computes.
    """
    if type(criterion) is nn.NLLLoss and ending == "softmax":
        warn(
            "NLLLoss takes log-probabilities, but the network ends in a softmax: its loss "
            "is -p, not -log p. For skorch's convention, pass the skorch net; otherwise let "
            "the network end in LogSoftmax, or in logits with CrossEntropyLoss."
        )
    problem = explain_ending(criterion, ending)
    if problem is not None:
        warn(
            f"{problem}. So the loss is not the usual one. If the network was trained with this "
            f"criterion, remove the {ending} from the module, and train again. Otherwise pass the "
            f"criterion that it was trained with, such as {_TRAINED_WITH[str(ending)]}."
        )
