"""The names of all measures, and which of them are invariant under which change of weights.

The changes leave the network's function as it is. The tests check this table, `flatness_report`
shows it, and the documentation prints it.
"""

from typing import Literal

import pandas as pd

__all__ = [
    "INVARIANCES",
    "REPARAMETERIZATIONS",
    "describe_invariance",
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
    "joint_eigenvalue_flatness": _row("different", "different", "different"),
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


def invariance_table() -> pd.DataFrame:
    """Return the table, one row per measure and one column per reparameterisation."""
    return pd.DataFrame.from_dict(INVARIANCES, orient="index")


def describe_invariance(measure: str) -> str:
    """List the changes of weights under which a measure is invariant, for a cell of a report."""
    same = [change for change, verdict in INVARIANCES[measure].items() if verdict == "same"]
    return ", ".join(same) or "none"
