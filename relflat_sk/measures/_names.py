"""The names of all measures, and which of them are invariant under which change of weights.

The changes leave the network's function as it is. The tests check this table, `flatness_report`
shows it, and the documentation prints it.
"""

from collections.abc import Iterable
from typing import Any

from relflat_sk.measures._measure_network import SAME, find_measure
from relflat_sk.measures._results import Measure
from relflat_sk.minima._table import column_of


def describe_invariance(measure: str) -> str:
    """List the changes of weights under which a measure is invariant, for a cell of a report."""
    return (", ".join(SAME[measure]) or "none") if measure in SAME else "unknown"


def get_measure_names() -> list[str]:
    """List the names that `measure` and `flatness_report` take.

    Returns
    -------
    list of str
        The names in alphabetical order.

    See Also
    --------
    measure : Measure a model by one of these names.
    flatness_report : Several of them at all layers.

    Examples
    --------
    >>> "relative_flatness" in get_measure_names()
    True
    """
    return sorted(SAME)


def find_measures(measures: Any) -> dict[str, Measure]:
    """Check the measures of a table, and return them by the names of their columns.

    A measure is what `measure_network` takes: a name of this library, or the user's function
    itself. Columns, records of trials and results of `measure_network` have the name only.
    """
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
    columns: dict[str, Measure] = {}
    for measure in given:
        checked = find_measure(measure)
        name = column_of(measure)  # refuses a function without a name
        if columns.setdefault(name, checked) != checked:
            raise ValueError(
                f"two measures have the name {name!r}, which is that of one column: "
                f"{columns[name]!r} and {checked!r}. Give one of the functions another name."
            )
    return columns
