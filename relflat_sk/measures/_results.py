"""The result of a measurement: a value with its standard error, and the totals of its pass."""

import inspect
import math
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relflat_sk._network.network import LossRange, Network, loss_range
from relflat_sk._numerics import read_numbers


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
    parameters = [p for one in functions for p in inspect.signature(one).parameters.values()]
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

    compute: Callable[..., Any]
    same: tuple[str, ...] = ()
    of_loss: bool = field(default=False, kw_only=True)
    arguments: Set[str] = field(default=None, kw_only=True)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        """List the keyword arguments."""
        if self.arguments is None:
            self.arguments = keywords(self.compute)

    def __call__(self, network: Network, **arguments: Any) -> "Measured":
        measured: Measured = self.compute(network, **arguments)
        return measured


@dataclass
class Summary:
    """Totals of one pass over the data, beside the measures."""

    divisors: float | Tensor = 0.0
    losses: float | Tensor = 0.0
    n_samples: int = 0
    output_shape: torch.Size = field(default_factory=torch.Size)
    link: str | None = None
    has_labels: bool = False
    layer_weights: dict[str, Tensor] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)

    @cached_property
    def divisor(self) -> float:
        """What divides the summed loss in the mean loss; to be read after the pass.

        It is nan where the loss is: there is no curvature of it, which closed forms do not see.
        """
        return math.nan if self.has_labels and math.isnan(self.loss) else self._totals[0]

    @cached_property
    def loss(self) -> float:
        """Summed loss; nan without labels. To be read after the pass."""
        return self._totals[1]

    @property
    def mean_loss(self) -> float:
        """Mean loss; nan without labels."""
        return self.loss / self.divisor if self.divisor else math.nan

    @cached_property
    def _totals(self) -> list[float]:
        if isinstance(self.divisors, Tensor):
            return read_numbers(self.divisors, torch.as_tensor(self.losses))
        return [self.divisors, float(self.losses)]


@dataclass(frozen=True)
class Passes:
    """What the passes over the data have shown beside the values."""

    own: Summary = field(default_factory=Summary)  # of the network itself
    # at the temperature at which its logits reach the loss of `at_loss`, if there is one
    fitted: Summary | None = None
    at_loss: float | None = None  # the share of the best constant's loss that was asked for

    @property
    def n_samples(self) -> int:
        """Number of samples that were measured on."""
        return self.own.n_samples

    @property
    def risk(self) -> float:
        """Mean loss of the network itself on the data; nan without labels."""
        return self.own.mean_loss

    @property
    def compared_risk(self) -> float:
        """Mean loss to compare with a constant's: at equal loss, that of the tempered logits."""
        return (self.fitted or self.own).mean_loss


@dataclass(frozen=True)
class Measured:
    """A measured value, or the reason why there is none, which is then nan.

    The standard error is 0 for exact values, and the residual's norm for eigenvalues.
    """

    value: float
    stderr: float = 0.0
    method: str = "exact"  # as reports name it, such as "closed form" or "hutchinson"
    reason: str = ""
    passes: Passes = field(default_factory=Passes)
    terms: NDArray[np.float64] | None = None  # (n,), of the samples, whose mean is the value
    term_stderrs: NDArray[np.float64] | None = None  # (n,)
    neurons: NDArray[np.float64] | None = None  # (m,), of which the value is the largest

    @classmethod
    def without_value(cls, reason: str = "", passes: Passes | None = None) -> "Measured":
        """Make the result of a measure that has no value."""
        return cls(math.nan, math.nan, "none", reason, passes or Passes())


def range_of(network: Network, passes: Passes) -> LossRange:
    """Compute the losses of the best prediction and of the best constant one; nan without y."""
    return loss_range(network, passes.own.output_shape, passes.own.link)


# the name of a measure, or a function of model, X and y
Measure = str | Callable[..., Any]
Results = dict[tuple[str, str], Measured]  # by layer and name of the measure


def name_of(measure: Measure) -> str:
    """Return the name of a measure, or of a function of the user's, whichever kind it is."""
    if isinstance(measure, str):
        return measure
    return str(getattr(measure, "__name__", type(measure).__name__))
