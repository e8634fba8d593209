"""Labels of neighbours in a layer's feature space."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.neighbors import NearestNeighbors
from sklearn.utils.multiclass import type_of_target
from torch import Tensor, nn

from relflat_sk._models import DataOptions, name_layer, to_network
from relflat_sk._network import Layer, borrowed, find_layer, layer_names, record_tail

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

    The theory assumes that labels are locally constant there: that what lies close to
    ``phi(x_i)`` deserves the label ``y_i``. Neighbours of the same label are what one can see of
    that.

    Parameters
    ----------
    model, X, y, batch_size, device
        See `relative_flatness`; y holds classes, also where X is a Dataset. A bare module needs
        no criterion here.
    layer : int, str or nn.Module, default=-1
        See `relative_flatness`; the neighbours are those in what this layer receives,
        flattened, by Euclidean distance.
    n_neighbors : int, default=5
        Nearest other samples that each sample is compared with.

    Returns
    -------
    float
        Share of pairs of a sample and its neighbour with equal labels, between 0 and 1. With
        labels that have nothing to do with the features it is the sum of the squared shares
        of the classes.

    Raises
    ------
    ValueError
        If y holds numbers to be predicted instead of classes, or `n_neighbors` is no positive
        integer below the number of samples.
    LayerNotFoundError, TypeError
        See `relative_flatness`.

    Examples
    --------
    The layer of a linear model receives X itself. Each sample's nearest neighbour has its label,
    its second nearest has the other one.

    >>> from sklearn.linear_model import LogisticRegression
    >>> X, y = [[0.0], [0.1], [1.0], [1.1]], [0, 0, 1, 1]
    >>> model = LogisticRegression().fit(X, y)
    >>> label_constancy(model, X, y, n_neighbors=1), label_constancy(model, X, y, n_neighbors=2)
    (1.0, 0.5)
    """
    # a bare module has to come with a loss, which is not used here
    criterion = nn.CrossEntropyLoss() if isinstance(model, nn.Module) else None
    features, labels = _features(model, X, y, layer, DataOptions(criterion, batch_size, device))
    n = len(labels)
    kind = type_of_target(labels)
    if kind.startswith(("continuous", "unknown")):
        raise ValueError(
            f"y must hold classes, got {kind} values such as {labels.flat[0].item()!r}: neighbours "
            "are not expected to have exactly the same number."
        )
    if (
        isinstance(n_neighbors, bool)
        or not isinstance(n_neighbors, int | np.integer)
        or not 1 <= n_neighbors < n
    ):
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
    """Collect what a layer receives, flattened, and the labels."""
    network = to_network(model, X, y, options)
    features: list[Tensor] = []
    labels: list[Tensor] = []
    with borrowed(network.module):
        name = find_layer(network.module, name_layer(model, layer), layer_names(network))
        for batch in network.batches():
            if batch.y is None:
                raise ValueError("y is needed: the labels to compare. Pass y.")
            with torch.no_grad(), record_tail(network.module, name) as recorder:
                network(batch.x)
            features.append(recorder[name].check()[0].flatten(1).cpu())
            labels.append(batch.y.cpu())
    return torch.cat(features).numpy(), torch.cat(labels).numpy()
