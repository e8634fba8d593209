"""Whether a criterion has any curvature at the outputs of a network."""

import torch
from torch import nn

from relflat_sk._losses.curvature import product_curvature, pull_back
from relflat_sk._network.batches import Batch
from relflat_sk._network.borrowing import borrowed
from relflat_sk._network.network import Network, outcome_of
from relflat_sk._random import make_generator, rademacher
from relflat_sk.measures._equal_loss import are_no_logarithms


def criterion_has_curvature(network: Network) -> bool:
    """Return whether the criterion is curved in the network's outputs, on some batch of the data.

    Where it is not, every flatness is zero behind a network that is linear or piecewise linear.
    The 0-1 loss, a detached loss and the mean absolute error are such criteria.
    """
    with borrowed(network.module):
        # by its formula, also where outputs are too large to show it in float32
        curved = network.loss.is_curved and not _takes_logits_as_logarithms(network)
        return curved or any(_is_curved(network, batch) for batch in network.batches())


def _takes_logits_as_logarithms(network: Network) -> bool:
    """Return whether `NLLLoss`, which is linear, receives outputs that are no log-probabilities."""
    if type(network.loss.criterion) is not nn.NLLLoss:
        return False
    with torch.no_grad():
        output = network(next(iter(network.batches())).x)
    return are_no_logarithms(output)


def _is_curved(network: Network, batch: Batch) -> bool:
    """Return whether a product with the Hessian in the outputs of a batch is not zero."""
    if batch.y is None:
        return True
    with torch.no_grad():
        output = network(batch.x)
    with torch.enable_grad():
        output = output.detach().requires_grad_()
        loss, _ = outcome_of(network, batch, output).total()
        if not loss.requires_grad:
            return False
        (gradient,) = pull_back([loss], [output], create_graph=False)
        if gradient is None:
            return False
        if not bool(gradient.any()):
            return True
        # random signs do not cancel, as ones would in a softmax
        signs = rademacher(output.shape, output, make_generator(0, output.device))
        product = product_curvature(loss, output).product(signs)
    return bool(product.any())
