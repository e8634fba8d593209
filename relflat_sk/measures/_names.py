"""The names of all measures, and which of them are invariant under which change of weights.

The changes leave the network's function as it is. The tests check this table, `flatness_report`
shows it, and the documentation prints it.
"""

from collections.abc import Callable, Iterable
from typing import Any

from sklearn.base import BaseEstimator

from relflat_sk._checks import did_you_mean
from relflat_sk.measures._layer_measures import LAYER_MEASURES
from relflat_sk.measures._measure_network import NETWORK_WIDE
from relflat_sk.measures._own import OwnMeasure
from relflat_sk.measures._results import REPARAMETERIZATIONS
from relflat_sk.minima._table import column_of, is_reserved

SAME: dict[str, tuple[str, ...]] = {
    **LAYER_MEASURES,
    **{name: measure.same for name, measure in NETWORK_WIDE.items()},
}


def describe_invariance(measure: str) -> str:
    """List the changes of weights under which a measure is invariant, for a cell of a report."""
    if isinstance(measure, OwnMeasure):
        return measure.invariance
    return ", ".join(SAME[measure]) or "none"


# the name of an array of measures, one for each neuron, which is no name of a single number
NEURONS = "neuron_flatness"

_REGISTERED: dict[str, OwnMeasure] = {}


def register_measure(
    name: str,
    function: Callable[..., Any] | None,
    *,
    invariance: Iterable[str] | None = None,
) -> None:
    """Give a name to a measure of your own, which all functions take from then on.

    Functions that take the name of a measure also take a function itself, without registration:
    its column in tables then has the function's ``__name__``. Functions without such a name
    (lambdas, `functools.partial`, other objects that can be called) need a name in tables only.

    Parameters
    ----------
    name : str
        The name, as of a column.
    function : callable or None
        ``f(model, X, y)``, which returns a number, small where the minimum is good, or a pair of
        a number and its standard error. It gets the model and the data as they were passed; a
        torch module is in evaluation mode, and the model is restored afterwards. Further
        arguments of the function become arguments of the measure, as in
        ``measure(name, model, X, y, radius=0.1)``. Those named `sample_weight` and
        `random_state` get the weights and the seed of the call. None forgets the name.
    invariance : iterable of str, optional
        Changes of the weights that change neither the network's function nor the measure:
        "layer", "feature neurons", "own neurons", "feature mixing", see docs/definitions.md.
        Reports show them.

    Raises
    ------
    TypeError
        If the function cannot be called with model, X and y.
    ValueError
        If the name is that of another column or of another function, an argument of the function
        is named like one that is not passed on, such as `layer`, or there is no such change of
        the weights.

    See Also
    --------
    get_measure_names : Lists the names, registered ones included.

    Notes
    -----
    Weight decay cannot be counted into such a measure, and it belongs to the network as a whole:
    it has no layer.

    A function that is defined again, as in a notebook, replaces its earlier definition.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.linear_model import LinearRegression
    >>> from relflat_sk import measure, register_measure
    >>> def coefficient_norm(model, X, y, order=2):
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
    _refuse_scorer(function)
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
    before = _REGISTERED.get(name)
    if before is not None and function != before.function and not _same_place(before, function):
        raise ValueError(
            f"{name!r} is the name of {before.function!r} already. Choose another name for "
            f"{function!r}, or free this one by register_measure({name!r}, None)."
        )
    _REGISTERED[name] = OwnMeasure(name, function, verdict or "none")


def _same_place(before: OwnMeasure, function: Any) -> bool:
    """Return whether a function is a later definition of an earlier one, as in a notebook."""
    places = [
        (getattr(f, "__module__", None), getattr(f, "__qualname__", "<"))
        for f in (before.function, function)
    ]
    return places[0] == places[1] and "<" not in places[0][1]


def get_measure_names() -> list[str]:
    """List the names that `measure` and `flatness_report` take.

    Returns
    -------
    list of str
        The names in alphabetical order, those of `register_measure` included. Each is that of a
        number, which scorers and searches take as well, but for "neuron_flatness", an array.

    Examples
    --------
    >>> "relative_flatness" in get_measure_names()
    True
    """
    return sorted([*number_names(), NEURONS])


def number_names() -> list[str]:
    """List the names of the measures that are numbers."""
    return sorted([*SAME, *map(str, _REGISTERED)])


def find_measure(measure: Any) -> str:
    """Find a measure by its name, or by the user's own function, which needs no name."""
    measure = hold_functions(measure)
    if isinstance(measure, OwnMeasure):
        return measure
    if isinstance(measure, str) and measure in SAME:
        return measure
    if isinstance(measure, str) and measure == NEURONS:
        raise ValueError(
            f"{NEURONS} is an array, not a number: only measure() and flatness_report take it. Use "
            "neuron_flatness_max or neuron_flatness_sum."
        )
    if not callable(measure):
        names = number_names()
        question = did_you_mean(measure, names) if isinstance(measure, str) else ""
        raise ValueError(
            f"there is no measure {measure!r}.{question} Choose from {names}, or pass a "
            "function of model, X and y. Only the process that called register_measure knows the "
            "name: where workers take it from a grid of parameters, put the function there."
        )
    _refuse_scorer(measure)
    name = getattr(measure, "__name__", type(measure).__name__)
    _check_free(name)
    return OwnMeasure(name, measure)


def _refuse_scorer(function: Any) -> None:
    """Refuse a scorer as a measure: its values have the other sign."""
    if isinstance(function, BaseEstimator):
        raise TypeError(
            f"{function!r} is greater for flatter models, and a measure is smaller. Pass the name "
            "of its measure; only searches and rank_models take scorers, for their arguments."
        )


def find_measures(measures: Any, *, neurons: bool = False) -> list[str]:
    """Find the measures of a table, after a check of each of them."""
    if callable(measures):
        measures = [measures]
    if not isinstance(measures, Iterable):
        raise TypeError(
            "measures must be a name or a list of names, as listed by get_measure_names(), got "
            f"{measures!r} of type {type(measures).__name__}."
        )
    given = [measures] if isinstance(measures, str) else list(measures)
    if not given:
        raise ValueError(
            f"measures must name at least one measure, got {measures!r}. Pass names of "
            "get_measure_names(), or leave it out for the default."
        )
    names, functions = [], dict[str, Any]()
    for measure in given:
        is_array = neurons and isinstance(measure, str) and measure == NEURONS
        name = NEURONS if is_array else find_measure(measure)
        column_of(measure)  # refuses a function without a name
        function = getattr(name, "function", None)
        if functions.setdefault(name, function) != function:
            raise ValueError(
                f"two measures have the name {str(name)!r}, which is that of one column: "
                f"{functions[name]!r} and {function!r}. Give one of them another name by "
                "register_measure(name, function), and pass that name."
            )
        names.append(name)
    return names


def hold_functions(measures: Any) -> Any:
    """Let the registered names among measures hold their functions, for other processes."""
    if isinstance(measures, OwnMeasure):
        return measures
    if isinstance(measures, str):
        return _REGISTERED.get(measures, measures)
    if isinstance(measures, list | tuple):
        held = map(hold_functions, measures)
        return tuple(held) if isinstance(measures, tuple) else list(held)  # a namedtuple, too
    return measures


def _check_free(name: str) -> None:
    """Refuse the name of a measure of this library, or of another column of a table of minima."""
    if name in SAME or name == NEURONS or is_reserved(name):
        raise ValueError(
            f"{name!r} is a measure or a column of relflat_sk: choose another name for yours, by "
            "register_measure(name, function) for example."
        )
