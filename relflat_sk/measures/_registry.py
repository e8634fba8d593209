"""The names of all measures, and which of them are invariant under which change of weights.

The changes leave the network's function as it is. The tests check this table, `flatness_report`
shows it, and the documentation prints it.
"""

from collections.abc import Iterable
from typing import Literal

import pandas as pd

__all__ = [
    "INVARIANCES",
    "REPARAMETERIZATIONS",
    "check_name",
    "describe_invariance",
    "get_measure_names",
    "invariance_table",
]

Verdict = Literal["same", "different"]

REPARAMETERIZATIONS: dict[str, str] = {
    "layer": "scale moves from one layer to another (positively homogeneous networks)",
    "feature neurons": "each neuron that feeds the layer by a factor of its own",
    "own neurons": "each output neuron of the layer by a factor of its own, undone behind it",
}


def _row(layer: Verdict, features: Verdict, own: Verdict) -> dict[str, Verdict]:
    return {"layer": layer, "feature neurons": features, "own neurons": own}


INVARIANCES: dict[str, dict[str, Verdict]] = {
    "relative_flatness": _row("same", "different", "same"),
    "normalized_relative_flatness": _row("same", "same", "same"),
    "trace_flatness": _row("same", "different", "different"),
    "eigenvalue_flatness": _row("same", "different", "different"),
    "network_flatness": _row("same", "different", "different"),
    "neuron_flatness_max": _row("same", "same", "same"),
    "neuron_flatness_sum": _row("same", "same", "same"),
    "hessian_trace": _row("different", "different", "different"),
    "hessian_max_eigenvalue": _row("different", "different", "different"),
    "gradient_norm": _row("different", "different", "different"),
    "parameter_count": _row("same", "same", "same"),
    "l2_norm": _row("different", "different", "different"),
    "frobenius_product": _row("same", "different", "different"),
    "group_norm_product": _row("same", "different", "different"),
    "spectral_product": _row("same", "different", "different"),
    "l1_path_norm": _row("same", "same", "same"),
    "l2_path_norm": _row("same", "same", "same"),
    "inverse_margin": _row("same", "same", "same"),
    "linf_lipschitz_product": _row("same", "different", "different"),
    "l2_lipschitz_product": _row("same", "different", "different"),
    "log_robustness": _row("same", "different", "different"),
    "fisher_rao_norm": _row("same", "same", "same"),
    "pac_bayes_flatness": _row("different", "different", "different"),
    # different as far as `eps` is not small next to the weights
    "pac_bayes_magnitude_flatness": _row("different", "different", "different"),
    "expected_sharpness": _row("different", "different", "different"),
    "keskar_sharpness": _row("different", "different", "different"),
    "adaptive_sharpness": _row("same", "same", "same"),
}


def get_measure_names() -> list[str]:
    """List the names that `measure` and `FlatnessScorer` take.

    Returns
    -------
    list of str
        The names in alphabetical order.

    Examples
    --------
    >>> "relative_flatness" in get_measure_names()
    True
    """
    return sorted(INVARIANCES)


def check_name(name: str) -> None:
    """Refuse a name that is no measure's.

    Parameters
    ----------
    name : str
        A name, as the user gave it.

    Raises
    ------
    ValueError
        If there is no such measure; the message lists the measures.
    """
    if not isinstance(name, str) or name not in INVARIANCES:
        raise ValueError(f"there is no measure {name!r}; choose from {get_measure_names()}.")


def check_names(measures: str | Iterable[str]) -> list[str]:
    """Return names of measures as a list, after a check of each of them.

    Parameters
    ----------
    measures : str or iterable of str
        A name, or some, as the user gave them.

    Returns
    -------
    list of str
        At least one name.

    Raises
    ------
    TypeError
        If it is neither a name nor a list of names.
    ValueError
        If there is no name, or no measure of one of the names.
    """
    if not isinstance(measures, Iterable):
        raise TypeError(
            "measures must be a name or a list of names, as listed by get_measure_names(), got "
            f"{measures!r} of type {type(measures).__name__}."
        )
    names = [measures] if isinstance(measures, str) else list(measures)
    for name in names:
        check_name(name)
    if not names:
        raise ValueError(
            f"measures must name at least one measure, got {measures!r}. Leave it out to compute "
            "all measures."
        )
    return names


def invariance_table() -> pd.DataFrame:
    """Return the table, one row per measure and one column per reparameterisation.

    Returns
    -------
    DataFrame
        "same" where a change of weights does not change the measure, "different" elsewhere.

    Examples
    --------
    >>> invariance_table().loc["relative_flatness", "layer"]
    'same'
    """
    return pd.DataFrame.from_dict(INVARIANCES, orient="index")


def describe_invariance(measure: str) -> str:
    """List the changes of weights under which a measure is invariant, for a cell of a report.

    Parameters
    ----------
    measure : str
        One of `get_measure_names`.

    Returns
    -------
    str
        Keys of `REPARAMETERIZATIONS`, or "none".

    Examples
    --------
    >>> describe_invariance("relative_flatness")
    'layer, own neurons'
    >>> describe_invariance("hessian_trace")
    'none'
    """
    same = [change for change, verdict in INVARIANCES[measure].items() if verdict == "same"]
    return ", ".join(same) or "none"
