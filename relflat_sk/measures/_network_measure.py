"""What a measure of a network as a whole is, and changes of weights that may leave it the same."""

import inspect
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any

from relflat_sk.measures._scan import Measured


class NotApplicableError(ValueError):
    """A network has no value of a measure, whatever the arguments of the call."""


# changes of the weights that leave the network's function as it is
REPARAMETERIZATIONS: dict[str, str] = {
    "layer": "scale moves from one layer to another (positively homogeneous networks)",
    "feature neurons": "each neuron that feeds the layer by a factor of its own",
    "own neurons": "each output neuron of the layer by a factor of its own, undone behind it",
    "feature mixing": "any invertible matrix in front of the layer, undone by it",
}
EVERY_CHANGE = tuple(REPARAMETERIZATIONS)
RESCALINGS = EVERY_CHANGE[:3]


def keywords(*functions: Callable[..., Any]) -> set[str]:
    """List the keyword-only arguments of some functions."""
    signatures = map(inspect.signature, functions)
    parameters = [p for signature in signatures for p in signature.parameters.values()]
    return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}


@dataclass
class NetworkMeasure:
    """A measure of a network as a whole.

    Parameters
    ----------
    compute : callable
        From a `Network` to a `Measured`.
    same : tuple of str, default=()
        The changes of the weights under which the measure is invariant, of `REPARAMETERIZATIONS`.
    of_loss : bool, default=False
        Whether it depends on the loss, and so on its temperature: it can be taken at equal loss.
    arguments : set of str, optional
        The arguments that it takes from `measure`: the keyword arguments of `compute` if None.
    """

    compute: Callable[..., Measured]
    same: tuple[str, ...] = ()
    of_loss: bool = field(default=False, kw_only=True)
    arguments: Set[str] = field(default=None, kw_only=True)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        """List the keyword arguments."""
        if self.arguments is None:
            self.arguments = keywords(self.compute)
