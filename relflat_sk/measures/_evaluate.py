"""Measure any model, with the totals of the same pass over the data."""

from typing import Any

from relflat_sk._models import DataOptions, joined, name_layer
from relflat_sk._network import Layer
from relflat_sk.measures._flatness import Flatness
from relflat_sk.measures._measure_network import check_layers, measure_network
from relflat_sk.measures._names import find_measure

__all__ = ["evaluate"]


def evaluate(  # noqa: PLR0913
    name: Any,
    model: Any,
    X: Any,
    y: Any = None,
    *,
    layer: Layer = -1,
    criterion: Any = None,
    batch_size: int = 1024,
    device: Any = None,
    sample_weight: Any = None,
    per_sample: bool = False,
    process_group: Any = None,
    **params: Any,
) -> Flatness:
    """Measure a model, and return the value with the mean loss from the same pass over the data.

    Parameters
    ----------
    name : str or callable
        One of `get_measure_names`, or a function of model, X and y; see `register_measure`.
    model : nn.Module or fitted estimator
        The trained model; see `relative_flatness`.
    X : array, data frame, tensor, dict or Dataset of n samples
        The inputs, as the model takes them.
    y : array of shape (n, ...), optional
        Labels, as in training; may be left out where they do not matter.
    layer : int, str or nn.Module, default=-1
        Position among the layers with a weight matrix, in forward order, dotted name, or the
        module itself.
    criterion : torch loss, optional
        The loss; needed for a bare module only.
    batch_size : int, default=1024
        Samples in one forward pass.
    device : str or torch.device, optional
        Where to compute; where the model is if None.
    sample_weight : array of shape (n,), optional
        Weight of each sample in the mean loss; one if None.
    per_sample : bool, default=False
        Whether to return the samples' terms, too, see `relative_flatness`.
    process_group : torch.distributed.ProcessGroup or "world", optional
        The processes that hold the data, see `relative_flatness`.
    **params : dict
        Further arguments of the measure, such as `method` or `n_probes`.

    Returns
    -------
    Flatness
        With attributes `value`, `stderr`, `risk` (the mean loss), `n_samples` and `method`, and
        the method `constant_risk`; with `per_sample` also `terms` and `term_stderrs`.

    Raises
    ------
    TypeError
        If there are several layers.
    ValueError
        If there is no measure of that name, or one of the whole network is to have a `layer`.

    Examples
    --------
    >>> from sklearn.linear_model import LinearRegression
    >>> X, y = [[0.0], [1.0], [2.0]], [0.0, 1.0, 3.0]
    >>> found = evaluate("relative_flatness", LinearRegression().fit(X, y), X, y)
    >>> round(found.risk, 4), round(found.constant_risk(), 4)
    (0.0556, 1.5556)
    """
    name = find_measure(name)
    if "layers" in params:
        raise TypeError(
            f"layers={params['layers']!r}: a measure takes one layer=..., flatness_report several."
        )
    check_layers([name], layer)
    options = DataOptions(criterion, batch_size, device, sample_weight, in_order=per_sample)
    params["per_sample"] = per_sample
    with joined(model, X, y, options, process_group) as network:
        (found,) = measure_network(network, [name], [name_layer(model, layer)], **params).values()
    return found
