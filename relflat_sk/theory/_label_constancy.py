"""Label constancy: how often neighbours in a layer's feature space have the same label."""

from typing import Any

import torch
from numpy.typing import NDArray
from sklearn.neighbors import NearestNeighbors
from sklearn.utils.multiclass import type_of_target
from torch import Tensor, nn

from relflat_sk._checks import is_integer
from relflat_sk._models import DataOptions, name_layer, to_network
from relflat_sk._network import Layer, Recorder, borrowed, find_layer, layer_names

__all__ = ["label_constancy"]


def label_constancy(
    model: Any,
    X: Any,
    y: Any,
    *,
    layer: Layer = -1,
    n_neighbors: int = 5,
    batch_size: int = 1024,
    device: Any = None,
) -> float:
    """Measure how often neighbours in a layer's feature space have the same label.

    The theory assumes that labels are locally constant in that space: features close to
    ``phi(x_i)`` have the label ``y_i``. Equal labels of neighbours are evidence for this.

    Parameters
    ----------
    model : nn.Module or fitted estimator
        Any model that `relative_flatness` measures; a bare module needs no criterion.
    X : array-like of n samples
        Inputs as the model takes them.
    y : array-like of shape (n,) or (n, ...)
        Classes. A Dataset as `X` holds its own; y is then None.
    layer : int, str or nn.Module, default=-1
        The layer, see `relative_flatness`. Neighbours are close in the features that the layer
        receives, flattened, by Euclidean distance.
    n_neighbors : int, default=5
        Nearest other samples that each sample is compared with.
    batch_size : int, default=1024
        Samples in one forward pass.
    device : str or torch.device, optional
        Where to run the model; where it is if None. Neighbours are found on the CPU.

    Returns
    -------
    float
        Share of pairs of a sample and its neighbour that have equal labels, between 0 and 1.
        For labels independent of the features, it is the sum of the classes' squared shares.

    Raises
    ------
    ValueError
        If y holds regression targets instead of classes, or `n_neighbors` is not a positive
        integer below the number of samples.
    LayerNotFoundError
        If there is no such layer.
    TypeError
        If there is no network in the model.

    Examples
    --------
    The layer of a linear model receives X itself. Each sample has the label of its nearest
    neighbour, but not that of its second nearest.

    >>> from sklearn.linear_model import LogisticRegression
    >>> X, y = [[0.0], [0.1], [1.0], [1.1]], [0, 0, 1, 1]
    >>> model = LogisticRegression().fit(X, y)
    >>> label_constancy(model, X, y, n_neighbors=1), label_constancy(model, X, y, n_neighbors=2)
    (1.0, 0.5)
    """
    # `to_network` needs a criterion for a bare module; it is not used here
    criterion = nn.CrossEntropyLoss() if isinstance(model, nn.Module) else None
    features, labels = _features(model, X, y, layer, DataOptions(criterion, batch_size, device))
    n = len(labels)
    kind = type_of_target(labels)
    if kind.startswith(("continuous", "unknown")):
        raise ValueError(
            f"y must hold classes, got {kind} values such as {labels.flat[0].item()!r}, which are "
            "hardly ever equal. Pass class labels, or bin the values first."
        )
    if not (is_integer(n_neighbors) and 1 <= n_neighbors < n):
        raise ValueError(
            f"n_neighbors must be an integer between 1 and {n - 1}, one less than the number of "
            f"samples, got {n_neighbors!r}."
        )
    near = NearestNeighbors(n_neighbors=n_neighbors).fit(features).kneighbors(return_distance=False)
    rows = labels.reshape(n, -1)
    return float((rows[near] == rows[:, None]).all(axis=2).mean())


def _features(
    model: Any, X: Any, y: Any, layer: Layer, options: DataOptions
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Collect the flattened features that a layer receives, and the labels."""
    network = to_network(model, X, y, options)
    features: list[Tensor] = []
    labels: list[Tensor] = []
    with borrowed(network.module):
        name = find_layer(network.module, name_layer(model, layer), layer_names(network))
        module = network.module.get_submodule(name)
        for batch in network.batches():
            if batch.y is None:
                raise ValueError("y is needed for the labels to compare. Pass y.")
            with torch.no_grad(), Recorder({name: module}) as recorder:
                network(batch.x)
            features.append(recorder[name].check()[0].flatten(1).cpu())
            labels.append(batch.y.cpu())
    return torch.cat(features).numpy(), torch.cat(labels).numpy()
