"""Measures of the user's own, which everything that takes the name of a measure takes, too."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from torch import Tensor

from relflat_sk._minima_table import is_reserved
from relflat_sk._network import Network, borrowed
from relflat_sk.measures._estimate import Estimate
from relflat_sk.measures._registry import INVARIANCES, REPARAMETERIZATIONS

__all__ = [
    "NEURONS",
    "OwnMeasure",
    "find_measure",
    "find_measures",
    "get_measure_names",
    "register_measure",
]

# the name of an array of measures, one for each neuron, which is no name of a single number
NEURONS = "neuron_flatness"

_REGISTERED: dict[str, "OwnMeasure"] = {}


class OwnMeasure(str):
    """The name of a measure of the user's own, which holds the function.

    As a string it can be the key of a table or a study as any other name. As it holds its
    function, it works in processes in which nothing was registered.

    Parameters
    ----------
    name : str
        Its name in tables.
    function : callable
        ``f(model, X, y)``, perhaps with keyword-only arguments.
    invariance : str, default="unknown"
        The cell of reports.
    """

    function: Callable[..., Any]
    invariance: str

    def __new__(
        cls, name: str, function: Callable[..., Any], invariance: str = "unknown"
    ) -> "OwnMeasure":
        """Make a name that holds a function."""
        own = super().__new__(cls, name)
        own.function = function
        own.invariance = invariance
        return own

    def __getnewargs__(self) -> tuple[Any, ...]:
        return str(self), self.function, self.invariance

    @property
    def arguments(self) -> set[str]:
        """Names of the function's keyword-only arguments."""
        parameters = inspect.signature(self.function).parameters.values()
        return {one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY}

    def measure(self, network: Network, **params: Any) -> Estimate:
        """Measure a model.

        Parameters
        ----------
        network : Network
            The network that was made of the model; the function gets the model itself.
        **params : dict
            Arguments of the function.

        Returns
        -------
        Estimate
            What the function returns.

        Raises
        ------
        TypeError
            If the function returns anything but one number or two.
        ValueError
            If there are sample weights, which the function does not take.
        """
        source = network.source
        assert source is not None
        if source.sample_weight is not None:
            if "sample_weight" not in self.arguments:
                raise ValueError(
                    f"the measure {str(self)!r} does not take sample weights: measure without "
                    "sample_weight, or give its function a keyword-only argument sample_weight."
                )
            params["sample_weight"] = source.sample_weight
        with borrowed(network.module):
            result = self.function(source.model, source.X, source.y, **params)
        both = result if isinstance(result, tuple) and len(result) == 2 else (result, 0.0)
        pair = [one.detach() if isinstance(one, Tensor) else one for one in both]
        if any(isinstance(one, str) or np.ndim(one) for one in pair):
            raise self._no_number(result)
        try:
            value, stderr = map(float, pair)
        except (TypeError, ValueError):
            raise self._no_number(result) from None
        if stderr < 0:
            raise ValueError(f"the measure {str(self)!r} returned a standard error of {stderr}.")
        return Estimate(value, stderr, "own")

    def _no_number(self, result: Any) -> TypeError:
        return TypeError(
            f"the measure {str(self)!r} must return a number, or a pair of a number and its "
            f"standard error, got {result!r} of type {type(result).__name__}."
        )


def register_measure(
    name: str,
    function: Callable[..., Any] | None,
    *,
    invariance: Iterable[str] | None = None,
) -> None:
    """Give a name to a measure of your own, which all functions take from then on.

    Functions that take the name of a measure also take a function itself, without registration:
    its column in tables then has the function's ``__name__``.

    Parameters
    ----------
    name : str
        The name, as of a column. A name that was registered before gets the new function.
    function : callable or None
        ``f(model, X, y)``, which returns a number, small where the minimum is good, or a pair of
        a number and its standard error. It gets the model and the data as they were passed; a
        torch module is in evaluation mode. Its keyword-only arguments become arguments of the
        measure, as in ``measure(name, model, X, y, radius=0.1)``. Those named `sample_weight`
        and `random_state` get the weights and the seed of the call. None forgets the name.
    invariance : iterable of str, optional
        Changes of the weights that change neither the network's function nor the measure:
        "layer", "feature neurons", "own neurons", see docs/measures.md. Reports show them.

    Raises
    ------
    TypeError
        If the function cannot be called.
    ValueError
        If the name is that of another column, or there is no such change of the weights.

    See Also
    --------
    get_measure_names : Lists the names, registered ones included.

    Notes
    -----
    Weight decay cannot be counted into such a measure, and it belongs to the network as a whole:
    it is the same at every layer.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.linear_model import LinearRegression
    >>> from relflat_sk import measure, register_measure
    >>> def coefficient_norm(model, X, y, *, order=2):
    ...     return np.linalg.norm(model.coef_, ord=order)
    >>> model = LinearRegression().fit([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]], [0.0, 3.0, 4.0])
    >>> round(measure(coefficient_norm, model, [[1.0, 1.0]], [7.0]), 4)
    5.0
    >>> register_measure("coefficients", coefficient_norm)
    >>> round(measure("coefficients", model, [[1.0, 1.0]], [7.0], order=1), 4)
    7.0
    >>> register_measure("coefficients", None)
    """
    if function is None:
        _REGISTERED.pop(name, None)
        return
    if not callable(function):
        raise TypeError(f"function must be a function of model, X and y, got {function!r}.")
    if not isinstance(name, str) or not name:
        raise ValueError(f"name must be a text, got {name!r}.")
    _check_free(name)
    verdict = "unknown"
    if invariance is not None:
        changes = [invariance] if isinstance(invariance, str) else list(invariance)
        unknown = [change for change in changes if change not in REPARAMETERIZATIONS]
        if unknown:
            raise ValueError(
                f"invariance must name some of {list(REPARAMETERIZATIONS)}, got {unknown[0]!r}."
            )
        verdict = ", ".join(change for change in REPARAMETERIZATIONS if change in changes)
    _REGISTERED[name] = OwnMeasure(name, function, verdict or "none")


def get_measure_names() -> list[str]:
    """List the names that `measure` and `FlatnessScorer` take.

    Returns
    -------
    list of str
        The names in alphabetical order, those of `register_measure` included.

    Examples
    --------
    >>> "relative_flatness" in get_measure_names()
    True
    """
    return sorted([*INVARIANCES, *map(str, _REGISTERED)])


def find_measure(measure: Any) -> str:
    """Find a measure by its name, or by the user's own function.

    Parameters
    ----------
    measure : str or callable
        As the user gave it.

    Returns
    -------
    str
        The name; an `OwnMeasure` if it is the user's own.

    Raises
    ------
    ValueError
        If there is no such measure, with a list of the measures; or if the function has no name,
        or that of another column.
    """
    if isinstance(measure, OwnMeasure):
        return measure
    if isinstance(measure, str) and measure in _REGISTERED:
        return _REGISTERED[measure]
    if isinstance(measure, str) and measure in INVARIANCES:
        return measure
    if isinstance(measure, str) and measure == NEURONS:
        raise ValueError(
            f"{NEURONS} is an array, not a number: only measure() and flatness_report take it. Use "
            "neuron_flatness_max or neuron_flatness_sum."
        )
    if not callable(measure):
        raise ValueError(
            f"there is no measure {measure!r}; choose from {get_measure_names()}, or pass a "
            "function of model, X and y."
        )
    name = getattr(measure, "__name__", "<lambda>")
    if name == "<lambda>":
        raise ValueError(
            f"the measure {measure!r} has no name for its column: define it by def, or name it by "
            "register_measure(name, function)."
        )
    _check_free(name)
    return OwnMeasure(name, measure)


def find_measures(measures: Any, *, neurons: bool = False) -> list[str]:
    """Find one or several measures, after a check of each of them.

    Parameters
    ----------
    measures : str, callable or iterable of these
        As the user gave them.
    neurons : bool, default=False
        Whether `NEURONS` may be one of the names.

    Returns
    -------
    list of str
        At least one name, see `find_measure`.

    Raises
    ------
    TypeError
        If it is neither a measure nor a list of measures.
    ValueError
        If there is none, or no measure of one of the names.
    """
    if callable(measures):
        measures = [measures]
    if not isinstance(measures, Iterable):
        raise TypeError(
            "measures must be a name or a list of names, as listed by get_measure_names(), got "
            f"{measures!r} of type {type(measures).__name__}."
        )
    given = [measures] if isinstance(measures, str) else measures
    names = [
        one if neurons and isinstance(one, str) and one == NEURONS else find_measure(one)
        for one in given
    ]
    if not names:
        raise ValueError(
            f"measures must name at least one measure, got {measures!r}. Leave it out to compute "
            "all measures."
        )
    return names


def _check_free(name: str) -> None:
    """Refuse the name of a measure of this library, or of another column of a table of minima."""
    if name in INVARIANCES or name == NEURONS or is_reserved(name):
        raise ValueError(
            f"{name!r} is a measure or a column of relflat_sk: choose another name for yours, by "
            "register_measure(name, function) for example."
        )
