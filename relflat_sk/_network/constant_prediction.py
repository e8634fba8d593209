"""The loss of the best constant prediction on a network's data."""

import math

import torch
from torch import Tensor

from relflat_sk._losses import constant_risk
from relflat_sk._network.batch_losses import outcome_of, sample_weight
from relflat_sk._network.borrowing import borrowed
from relflat_sk._network.network import Network

__all__ = ["best_constant_loss", "output_shape"]


def output_shape(network: Network) -> torch.Size:
    """Return the shape of a network's output for one sample, by running one batch."""
    batch = next(iter(network.batches()))
    with borrowed(network.module), torch.no_grad():
        return outcome_of(network, batch, network(batch.x)).output.shape[1:]


def best_constant_loss(network: Network, shape: torch.Size, link: str | None) -> float:
    """Compute the mean loss of the best constant prediction on a network's data.

    The labels are read, the network is not run.
    """
    targets, weights = [], []
    for batch in network.batches():
        if batch.y is None:
            return math.nan
        n, device = len(batch.y), batch.y.device
        output = torch.empty((n, *shape), dtype=torch.float64, device=device)
        target, weight = network.loss.check_target(output, batch.y), sample_weight(batch, n, device)
        if network.loss.row is not None and target.ndim == 1 and not target.is_floating_point():
            target, weight = _merge_equal(target, weight)
        targets.append(target)
        weights.append(weight)
    labels, counts = network.processes.join_rows(torch.cat(targets), torch.cat(weights))
    return constant_risk(network.loss, labels, counts, shape, link)


def _merge_equal(labels: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the weights of samples of one class: losses are computed for all classes of a label."""
    classes, positions = torch.unique(labels, return_inverse=True)
    return classes, weight.new_zeros(len(classes)).index_add_(0, positions, weight)
