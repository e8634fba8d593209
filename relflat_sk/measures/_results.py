"""The result of a measurement: a value with its standard error, and the totals of its pass."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relflat_sk._network.network import Network, best_constant_loss
from relflat_sk._numerics import read_numbers


class NotApplicableError(ValueError):
    """A network has no value of a measure, whatever the arguments of the call."""


@dataclass(frozen=True)
class Estimate:
    """A measured value, its standard error, and the method that gave it.

    Parameters
    ----------
    value : float
        The measure.
    stderr : float, default=0.0
        Standard error; 0 for exact values.
    method : str, default="exact"
        How the value was computed, as reports name it.
    """

    value: float
    stderr: float = 0.0
    method: str = "exact"


# changes of the weights that leave the network's function as it is
REPARAMETERIZATIONS: dict[str, str] = {
    "layer": "scale moves from one layer to another (positively homogeneous networks)",
    "feature neurons": "each neuron that feeds the layer by a factor of its own",
    "own neurons": "each output neuron of the layer by a factor of its own, undone behind it",
    "feature mixing": "any invertible matrix in front of the layer, undone by it",
}
EVERY_CHANGE = tuple(REPARAMETERIZATIONS)
RESCALINGS = EVERY_CHANGE[:3]


class NetworkMeasure:
    """A measure of a network as a whole.

    Parameters
    ----------
    compute : callable
        From a `Network` to an `Estimate`; its keyword arguments become arguments of `measure`.
    same : tuple of str, default=()
        The changes of the weights under which the measure is invariant, of `REPARAMETERIZATIONS`.
    """

    def __init__(self, compute: Callable[..., Any], same: tuple[str, ...] = ()) -> None:
        self.compute = compute
        self.same = same
        parameters = inspect.signature(compute).parameters.values()
        self.arguments = {one.name for one in parameters if one.kind is one.KEYWORD_ONLY}

    def __call__(self, network: Network, **arguments: Any) -> Estimate:
        found: Estimate = self.compute(network, **arguments)
        return found


@dataclass
class Summary:
    """Totals of one pass over the data, beside the measures. Shapes: `layer_weights` (d, m)."""

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

    @cached_property
    def _totals(self) -> list[float]:
        if isinstance(self.divisors, Tensor):
            return read_numbers(self.divisors, torch.as_tensor(self.losses))
        return [self.divisors, float(self.losses)]


@dataclass
class Flatness:
    """A flatness value, with the loss, sample count and layer weights from the same pass.

    Parameters
    ----------
    value : float
        The measure.
    stderr : float
        Standard error; 0 for exact values, and the residual's norm for eigenvalues.
    method : str
        How the value was computed, such as "closed form" or "hutchinson".
    network : Network
        The network, with its loss and data.
    summary : Summary
        Totals of the pass over the data.
    terms : ndarray of shape (n,), optional
        The samples' terms, whose mean is the value; None if not asked for.
    term_stderrs : ndarray of shape (n,), optional
        Standard errors of the terms.
    neurons : ndarray of shape (m,), optional
        The numbers of the input neurons, of which the value is the largest.
    neuron_stderrs : ndarray of shape (m,), optional
        Standard errors of these.
    own : Summary, optional
        Totals of the network itself, if the value is that of the network at a temperature.
    reason : str
        Why the network has no value at the loss of `at_loss`; empty if it has one.
    lowest : float
        The smallest `at_loss` at which it has one, if it has none at this; else nan.
    error : Exception, optional
        Why there is no value, which is nan then.

    Examples
    --------
    >>> from sklearn.linear_model import LinearRegression
    >>> from relflat_sk.measures._api import evaluate
    >>> X, y = [[1.0], [2.0]], [2.0, 5.0]
    >>> model = LinearRegression(fit_intercept=False).fit(X, y)
    >>> found = evaluate("relative_flatness", model, X, y)
    >>> round(found.value, 3), round(found.risk, 3), found.method, found.n_samples
    (28.8, 0.1, 'closed form', 2)
    """

    value: float
    stderr: float
    method: str
    network: Network
    summary: Summary
    terms: NDArray[np.float64] | None = None
    term_stderrs: NDArray[np.float64] | None = None
    neurons: NDArray[np.float64] | None = None
    neuron_stderrs: NDArray[np.float64] | None = None
    own: Summary | None = None
    reason: str = ""
    lowest: float = math.nan
    error: Exception | None = None

    @property
    def risk(self) -> float:
        """Mean loss of the network itself on the data; nan without labels."""
        own = self.own or self.summary
        return own.loss / own.divisor

    @property
    def has_fitted(self) -> bool:
        """Whether the network reaches the loss of `at_loss` by the temperature of its logits."""
        at_loss = self.own is not None and not self.reason
        return at_loss and self.network.loss.divides_logits

    @property
    def compared_risk(self) -> float:
        """Mean loss to compare with a constant's: at equal loss, that of the tempered logits."""
        return self.summary.loss / self.summary.divisor if self.has_fitted else self.risk

    @property
    def n_samples(self) -> int:
        """Number of samples that were measured on."""
        return self.summary.n_samples

    def constant_risk(self) -> float:
        """Compute the mean loss of the best constant prediction on the same data.

        The labels are read again, the network is not run.

        Returns
        -------
        float
            In the unit of the loss; nan without labels.
        """
        shape, link = self.summary.output_shape, self.summary.link
        return best_constant_loss(self.network, shape, link)


Found = dict[tuple[str, str], Flatness]  # by layer and name of the measure
