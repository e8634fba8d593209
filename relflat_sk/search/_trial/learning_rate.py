"""Scale learning rates in proportion to the batch size: the linear scaling rule."""

from collections.abc import Mapping
from typing import Any

from relflat_sk._checks import is_number

__all__ = ["check_lr_scaling", "scale_lr"]

LR_SCALINGS = (None, "linear")
RATES = ("lr", "learning_rate_init")  # in skorch nets, in scikit-learn's MLPs


def check_lr_scaling(lr_scaling: Any) -> None:
    """Refuse a rule of scaling that there is not.

    Parameters
    ----------
    lr_scaling : "linear" or None
        The rule.

    Raises
    ------
    ValueError
        If it is another one.
    """
    if lr_scaling not in LR_SCALINGS:
        raise ValueError(f"lr_scaling must be one of {list(LR_SCALINGS)}, got {lr_scaling!r}.")


def scale_lr(estimator: Any, params: Mapping[str, Any]) -> dict[str, float]:
    """Scale learning rates with the batch size, relative to the estimator's own batch size.

    Parameters
    ----------
    estimator : estimator
        The learning rates are given for its `batch_size`.
    params : dict
        The parameters of a candidate.

    Returns
    -------
    dict of str to float
        The learning rates to set, by parameter name; empty if no batch size varies.

    Raises
    ------
    ValueError
        If a batch size is not a number, or the estimator has no learning rate next to it.

    References
    ----------
    Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 2.1.

    Examples
    --------
    >>> from sklearn.neural_network import MLPClassifier
    >>> net = MLPClassifier(batch_size=32, learning_rate_init=0.1)
    >>> scale_lr(net, {"batch_size": 64})
    {'learning_rate_init': 0.2}
    """
    own = estimator.get_params()
    found = {}
    for name, size in params.items():
        prefix, _, last = name.rpartition("batch_size")
        if last or not (prefix == "" or prefix.endswith("__")) or "batch_size" not in name:
            continue
        rate = next((prefix + one for one in RATES if prefix + one in own), None)
        before = own.get(name)
        if rate is None or not is_number(size) or not is_number(before):
            raise ValueError(
                f"lr_scaling='linear' needs numbers for {name!r} and a learning rate beside it "
                f"({' or '.join(RATES)}), got {name}={size!r} in the candidate and {before!r} in "
                "the estimator. Give both as numbers, or leave lr_scaling out."
            )
        found[rate] = float(params.get(rate, own[rate]) * size / before)
    return found
