"""Names of columns and layers, as they stand on the axes of a display."""

from relflat_sk.minima import plain_name

__all__ = ["label_of", "shorten"]

# columns in the unit of the loss
IN_LOSS_UNITS = {
    "relative_flatness": "relative flatness κ",
    "normalized_relative_flatness": "normalized relative flatness κ",
    "trace_flatness": "trace flatness",
    "eigenvalue_flatness": "eigenvalue flatness",
    "network_flatness": "network flatness",
    "neuron_flatness_max": "neuron flatness, max",
    "neuron_flatness_sum": "neuron flatness, sum",
    "expected_sharpness": "expected sharpness",
    "fisher_rao_norm": "Fisher-Rao norm",
    "generalization_gap": "test loss − training loss",  # noqa: RUF001 (a minus sign)
    "test_loss": "test loss",
    "train_loss": "training loss",
    "valid_loss": "validation loss",
}
# columns with other units or none; the name of any other column becomes its label
WITHOUT_UNIT = {
    "test_score": "held-out score",
    "train_score": "training score",
    "random_labels": "share of random labels",
    "hessian_trace": "Hessian trace",
    "hessian_max_eigenvalue": "largest Hessian eigenvalue",
    "frobenius_product": "Frobenius product",
    "keskar_sharpness": "Keskar sharpness",
    "l1_path_norm": "L1 path norm",
    "l2_lipschitz_product": "L2 Lipschitz product",
    "l2_norm": "L2 norm",
    "l2_path_norm": "L2 path norm",
    "linf_lipschitz_product": "L∞ Lipschitz product",
    "log_robustness": "log of robustness K",
    "pac_bayes_flatness": "PAC-Bayes flatness",
    "pac_bayes_magnitude_flatness": "PAC-Bayes magnitude flatness",
}
MAX_LETTERS = 44  # of a name on an axis


def label_of(name: str, loss_unit: str) -> str:
    """Return the axis label of a column, with its unit."""
    if name in IN_LOSS_UNITS:
        return f"{IN_LOSS_UNITS[name]} ({loss_unit})" if loss_unit else IN_LOSS_UNITS[name]
    parameter = plain_name(name).rpartition("__")[2]
    return WITHOUT_UNIT.get(parameter, parameter.replace("_", " "))


def shorten(name: str) -> str:
    """Return a name that fits beside an axis."""
    half = (MAX_LETTERS - 1) // 2
    return name if len(name) <= MAX_LETTERS else f"{name[:half]}…{name[-half:]}"
