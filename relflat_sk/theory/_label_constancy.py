"""Label constancy: how often neighbours in a layer's feature space have the same label."""

from dataclasses import replace
from typing import Any

import torch
from numpy.typing import NDArray
from sklearn.neighbors import NearestNeighbors
from sklearn.utils.multiclass import type_of_target
from torch import Tensor, nn

from relflat_sk._models.network_of import name_layer, open_model
from relflat_sk._network.borrowing import borrowed
from relflat_sk._network.layers import Layer, find_layer
from relflat_sk._network.network import Outcome, layer_names, outcome_of
from relflat_sk._network.recording import Recorder
from relflat_sk.theory._moves import counting, labels_of


def label_constancy(  # noqa: PLR0913
    model: Any,
    X: Any,
    y: Any,
    *,
    layer: Layer = -1,
    n_neighbors: int = 5,
    by: str = "labels",
    criterion: Any = None,
    batch_size: int = 1024,
    device: Any = None,
) -> float:
    """Measure how constant labels are around samples in a layer's feature space.

    The theory assumes that labels are locally constant in that space: features close to
    ``phi(x_i)`` have the label ``y_i``. Equal labels of neighbours are evidence for this, and so
    is a loss that hardly changes if a sample gets the label of a neighbour.

    Parameters
    ----------
    model : nn.Module or fitted estimator
        Any model that `relative_flatness` measures.
    X : array-like of n samples
        Inputs as the model takes them.
    y : array-like of shape (n,) or (n, ...)
        Labels. A Dataset as `X` holds its own; y is then None. Samples whose labels the
        criterion ignores (cross-entropy's `ignore_index`) are left out.
    layer : int, str or nn.Module, default=-1
        The layer, see `relative_flatness`. Neighbours are close in the features that the layer
        receives, flattened, by Euclidean distance.
    n_neighbors : int, default=5
        Nearest other samples that each sample is compared with.
    by : {"labels", "loss"}, default="labels"
        "labels" compares the labels, which must be classes. "loss" compares the losses of a
        prediction with the label of a neighbour and with its own label, also of regressions.
    criterion : torch loss, optional
        Says which labels do not count; an estimator knows its own. With ``by="loss"``, needed for
        a bare module.
    batch_size : int, default=1024
        Samples in one forward pass.
    device : str or torch.device, optional
        Where to run the model; where it is if None. Neighbours are found on the CPU.

    Returns
    -------
    float
        Share of pairs of a sample and its neighbour that have equal labels, between 0 and 1.
        For labels independent of the features, it is the sum of the classes' squared shares.
        With ``by="loss"``, the mean over pairs of ``loss(f(x_j), y_i) - loss(f(x_j), y_j)``,
        with j a neighbour of i, in the unit of the loss: 0 if labels are constant, and large if
        they change where the model is confident.

    Raises
    ------
    ValueError
        If y holds regression targets instead of classes, `n_neighbors` is not a positive
        integer below the number of samples, or `by` is neither "labels" nor "loss".
    LayerNotFoundError, TypeError
        If there is no such layer, or no network in the model.

    See Also
    --------
    representativeness : The part of the gap that constant labels make small.
    generalization_bound : The bound that assumes constant labels.

    Notes
    -----
    With a labelling function, P21's equation 4 can be computed directly: the difference of
    `feature_robustness` with and without `labelling` is the mean of ``loss(f, y(phi + A phi)) -
    loss(f, y)`` at moved features. Here, neighbours take the place of moved features.

    Examples
    --------
    The layer of a linear model receives X itself. Each sample has the label of its nearest
    neighbour, but not that of its second nearest.

    >>> from sklearn.linear_model import LogisticRegression
    >>> X, y = [[0.0], [0.1], [1.0], [1.1]], [0, 0, 1, 1]
    >>> model = LogisticRegression().fit(X, y)
    >>> label_constancy(model, X, y, n_neighbors=1), label_constancy(model, X, y, n_neighbors=2)
    (1.0, 0.5)

    By the loss, the label of the nearest neighbour changes nothing:

    >>> label_constancy(model, X, y, n_neighbors=1, by="loss")
    0.0
    """
    if by not in ("labels", "loss"):
        raise ValueError(f'by must be "labels" or "loss", got {by!r}.')
    if by == "labels" and criterion is None and isinstance(model, nn.Module):
        criterion = nn.CrossEntropyLoss()  # `open_model` needs one; it is not used here
    network = open_model(model, X, y, criterion=criterion, batch_size=batch_size, device=device)
    features: list[Tensor] = []
    labels: list[Tensor] = []
    outcomes: list[Outcome] = []
    with borrowed(network.module), torch.no_grad():
        name = find_layer(network.module, name_layer(model, layer), layer_names(network))
        module = network.module.get_submodule(name)
        for batch in network.batches():
            y_batch = labels_of(batch)
            with Recorder({name: module}) as recorder:
                output = network(batch.x)
            rows = torch.nonzero(counting(network, y_batch))[:, 0]
            features.append(recorder[name].check()[0].flatten(1)[rows].cpu())
            labels.append(y_batch[rows].cpu())
            if by == "loss":
                outcome = outcome_of(network, batch, output)
                output, target = outcome.output[rows], outcome.target[rows]
                outcomes.append(replace(outcome, output=output, target=target))
        search = NearestNeighbors(n_neighbors=n_neighbors).fit(torch.cat(features).numpy())
        near = search.kneighbors(return_distance=False)
        if by == "loss":
            return _rise_by_neighbours(outcomes, near)
    classes = torch.cat(labels).numpy()
    kind = type_of_target(classes)
    if kind.startswith(("continuous", "unknown")):
        raise ValueError(f"y must hold classes, got {kind} ones as {classes.flat[0].item()!r}.")
    columns = classes.reshape(len(classes), -1)
    return float((columns[near] == columns[:, None]).all(axis=2).mean())


def _rise_by_neighbours(outcomes: list[Outcome], near: NDArray[Any]) -> float:
    """Compute the mean rise of the loss where a neighbour gets the label of a sample."""
    loss = outcomes[0].loss
    output = torch.cat([outcome.output for outcome in outcomes])
    target = torch.cat([outcome.target for outcome in outcomes])
    losses, divisors = loss.terms(output, target, each=True)
    rises = []
    for neighbours in torch.from_numpy(near.T.copy()).to(output.device):
        losses_after, divisors_after = loss.terms(output[neighbours], target, each=True)
        # class weights of the neighbours' labels and of the samples' have different sums
        before = losses[neighbours].double().sum() / divisors[neighbours].double().sum()
        rises.append(losses_after.double().sum() / divisors_after.double().sum() - before)
    return float(torch.stack(rises).mean())
