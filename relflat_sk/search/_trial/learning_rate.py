"""The linear scaling rule: a learning rate in proportion to the batch size."""

from collections.abc import Mapping
from numbers import Real
from typing import Any

__all__ = ["LR_SCALINGS", "scale_lr"]

LR_SCALINGS = (None, "linear")
RATES = ("lr", "learning_rate_init")  # of skorch's nets and of scikit-learn's


def scale_lr(estimator: Any, params: Mapping[str, Any]) -> dict[str, float]:
    """Scale learning rates with the batch, as measured by the estimator's own batch size.

    Parameters
    ----------
    estimator : estimator
        Its `batch_size` is the one that learning rates are given for.
    params : dict
        What a candidate is to have.

    Returns
    -------
    dict of str to float
        The learning rates to set.

    Raises
    ------
    ValueError
        If a batch size is not a number, or there is no learning rate beside it.

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
        if rate is None or not _is_number(size) or not _is_number(before):
            raise ValueError(
                f"lr_scaling='linear' needs numbers for {name!r} and a learning rate beside it "
                f"({' or '.join(RATES)}), got {name}={size!r} and {before!r} in the estimator."
            )
        found[rate] = float(params.get(rate, own[rate]) * size / before)
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
