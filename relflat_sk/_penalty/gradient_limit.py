r"""Limit the penalty's gradient to a share of the loss's gradient.

A dead network is perfectly flat, so that the published objective ``loss + weight * penalty`` has
it as an attractor: with a large weight, training ends there. Under a limit ``c``, a step minimises

.. math:: L + s P, \qquad s = \min\Big(1, c \min_v \frac{\|\nabla_v L\|}{\|\nabla_v P\|}\Big)

with `s` a constant in the differentiation. The gradients are compared in several groups ``v`` of
variables, and the group with the least ratio decides: over all variables together, a large
gradient of the loss in one layer would allow the penalty to undo another layer.

For a penalty at the last layer, the groups need no pass through the network: the layer's weight,
and a shift and a gain of each feature, as if there were a batch norm's weight and bias before
the layer. The shift and the gain matter because they sum over the batch. The gradients of the
loss in the features of single samples point in many directions and cancel in the weights of the
network below, while those of the penalty all shrink the features and add up.

For a penalty at earlier layers, the groups are the parameters of the network.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from relflat_sk._losses import pull_back
from relflat_sk._network import LayerRecord, layer_map
from relflat_sk._numerics import full_precision

__all__ = ["GradientLimit", "ParameterLimit", "limit_at_last_layer"]

# from the gradient in a variable to the norms in its groups: (n_groups,)
Norms = Callable[[Tensor], Tensor]
Gradients = Sequence[Tensor | None]


class GradientLimit:
    """The limit of one training step: where the gradients of loss and penalty are compared.

    Parameters
    ----------
    limit : float
        Largest norm of the penalty's gradient as a share of the loss's gradient.
    variables : sequence of (Tensor, callable)
        Tensors in the graph of both, each with the function from a gradient in it to the norms
        in its groups, of shape (n_groups,).

    Attributes
    ----------
    share : Tensor of shape () or None
        The share of the penalty that the limit has left, from 0 to 1; None before it is known.
    """

    def __init__(self, limit: float, variables: Sequence[tuple[Tensor, Norms]]) -> None:
        self.limit = limit
        self.tensors = [tensor for tensor, _ in variables if tensor.requires_grad]
        self.norms = [norms for tensor, norms in variables if tensor.requires_grad]
        self.share: Tensor | None = None

    def scale(self, loss: Tensor, penalty: Tensor) -> Tensor:
        """Scale a penalty down to the limit.

        Parameters
        ----------
        loss : Tensor of shape ()
            The loss of the batch, with its graph.
        penalty : Tensor of shape ()
            The penalty of the batch times its weight, with its graph.

        Returns
        -------
        Tensor of shape ()
            The penalty times `share`, which is a constant in the differentiation.
        """
        if not (self.tensors and penalty.requires_grad):
            self.share = torch.ones_like(penalty)
            return penalty
        of_loss = pull_back([loss], self.tensors, create_graph=False)
        of_penalty = pull_back([penalty], self.tensors, create_graph=False)
        self.share = self.compare(of_loss, of_penalty).to(penalty.dtype)
        return self.share * penalty

    def objective(self, loss: Tensor, penalty: Tensor) -> Tensor:
        """Add a penalty within the limit to the loss.

        Parameters
        ----------
        loss : Tensor of shape ()
            The loss of the batch, with its graph.
        penalty : Tensor of shape ()
            The penalty of the batch times its weight, with its graph.

        Returns
        -------
        Tensor of shape ()
            To be differentiated by the network's parameters.
        """
        return loss + self.scale(loss, penalty)

    def compare(self, of_loss: Gradients, of_penalty: Gradients) -> Tensor:
        """Compute the share that the limit leaves of a penalty.

        Parameters
        ----------
        of_loss : sequence of Tensor or None
            Gradients of the loss in `tensors`.
        of_penalty : sequence of Tensor or None
            Gradients of the penalty in `tensors`.

        Returns
        -------
        Tensor of shape ()
            From 0 to 1; 1 if the penalty's gradients are within the limit.
        """
        ratios = [
            (torch.zeros_like(norms(b)) if a is None else norms(a)) / norms(b)
            for a, b, norms in zip(of_loss, of_penalty, self.norms, strict=True)
            if b is not None
        ]
        if not ratios:
            return torch.ones(())
        # 0/0 is nan: where the penalty has no gradient, there is nothing to limit
        least = torch.cat(ratios).nan_to_num(nan=torch.inf, posinf=torch.inf).amin()
        return (self.limit * least).clamp(max=1)


class ParameterLimit(GradientLimit):
    """The limit at the parameters of the network, by the gradients that training takes anyway.

    Parameters
    ----------
    limit : float
        Largest norm of the penalty's gradient as a share of the loss's gradient.
    parameters : iterable of nn.Parameter
        All parameters of the network.
    """

    def __init__(self, limit: float, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(limit, [(parameter, _norm) for parameter in parameters])

    def objective(self, loss: Tensor, penalty: Tensor) -> Tensor:
        """Add a penalty within the limit to the loss, for one backward pass each.

        Parameters
        ----------
        loss : Tensor of shape ()
            The loss of the batch, with its graph.
        penalty : Tensor of shape ()
            The penalty of the batch times its weight, with its graph.

        Returns
        -------
        Tensor of shape ()
            Its gradient in the parameters is that of the loss plus `share` times that of the
            penalty; `share` is known once it was differentiated.
        """
        if not (self.tensors and penalty.requires_grad):
            return super().objective(loss, penalty)
        total: Tensor = _TwoGradients.apply(self, [loss, penalty], *self.tensors)  # type: ignore[no-untyped-call]
        return total


class _TwoGradients(torch.autograd.Function):
    """A sum of loss and penalty whose gradients are combined when they are both known."""

    @staticmethod
    def forward(ctx: Any, limit: ParameterLimit, terms: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.limit, ctx.terms = limit, terms  # in a list, autograd does not follow their graphs
        loss, penalty = terms
        return loss.detach() + penalty.detach()

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        limit: ParameterLimit = ctx.limit
        of_loss, of_penalty = (
            pull_back([term], limit.tensors, [outer.to(term.dtype)], create_graph=False)
            for term in ctx.terms
        )
        limit.share = share = limit.compare(of_loss, of_penalty)
        return (
            None,
            None,
            *(_combine(a, b, share) for a, b in zip(of_loss, of_penalty, strict=True)),
        )


def _combine(of_loss: Tensor | None, of_penalty: Tensor | None, share: Tensor) -> Tensor | None:
    """Return the gradient of the loss plus a share of the penalty's."""
    if of_penalty is None:
        return of_loss
    scaled = share.to(of_penalty.dtype) * of_penalty
    return scaled if of_loss is None else of_loss + scaled


def limit_at_last_layer(limit: float, record: LayerRecord) -> GradientLimit:
    """Compare the gradients in the last layer's weight, and in a shift and a gain of features.

    Parameters
    ----------
    limit : float
        Largest norm of the penalty's gradient as a share of the loss's gradient.
    record : LayerRecord
        The last layer, with the features that it received in this step.

    Returns
    -------
    GradientLimit
        Groups that need no pass through the network.
    """
    features, layer = record.check()[0], layer_map(record.layer)
    rows = full_precision(layer.channels(features.detach()))

    def shift_and_gain(gradient: Tensor) -> Tensor:
        columns = full_precision(layer.channels(gradient))
        sums = torch.stack([columns.sum(dim=0), (columns * rows).sum(dim=0)])
        norms: Tensor = torch.linalg.vector_norm(sums, dim=1)
        return norms

    weight: Any = record.layer.weight
    return GradientLimit(limit, [(weight, _norm), (features, shift_and_gain)])


def _norm(gradient: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(full_precision(gradient))
    return norm.reshape(1)
