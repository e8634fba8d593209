r"""Limit the penalty of a training step by the loss and by what the network has learned.

A dead network is perfectly flat, so that the published objective ``loss + weight * penalty`` has
it as an attractor: with a large weight, training ends there. Under a limit ``c``, a step minimises
:math:`L + s P` with `s` a constant in the differentiation, for a penalty at the last layer

.. math:: s = \min\Bigl(1,\; \frac{c}{5} \frac{L_0 - L}{|P|},\;
    c \min_v \frac{\|\nabla_v L\|}{\|\nabla_v P\|}\Bigr)

and for penalties at earlier layers

.. math:: s = \min\Bigl(1,\; \frac{c}{50} \frac{\min(L, L_0 - L)}{|P|}\Bigr).

**Values.** :math:`L_0` is the loss of the network's mean output, the same for all samples of the
batch. A network that has not learned to distinguish samples has gained nothing over it, and gets
no penalty. So a penalty cannot stop training before it has begun, as it can at the first layer of
a convolutional network, and a dead network is no attractor. The share is small for earlier
layers: where the network has many positions, a flat first layer costs test accuracy long before
it costs training loss.

**Gradients.** Training must still reach a loss near zero. At the last layer, the gradients of loss
and penalty are compared in three groups ``v`` of variables that need no pass through the network:
the layer's weight, and a shift and a gain of each feature, as if there were a batch norm's weight
and bias before the layer. The group with the least ratio decides. The shift and the gain matter
because they sum over the batch. The gradients of the loss in the features of single samples point
in many directions and cancel in the weights of the network below, while those of the penalty all
shrink the features and add up. At earlier layers, gradients would need another pass through the
network, and the small share of the loss does as well.

At a linear layer, the gradients follow from those in its output, which take no pass through the
layer: for the loss by its own backward pass, for the penalty from its closed form.

Each step computes the limit anew. Where one limit was held for four or eight steps, networks that
were trained at high rates lost accuracy.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from relflat_sk._losses import TotalSlopes, pull_back, total_slopes
from relflat_sk._network import LayerRecord
from relflat_sk._numerics import constant, full_precision, or_one, without_autocast
from relflat_sk._penalty.head_gradients import gradients_at_head

__all__ = [
    "AT_EARLIER_LAYERS",
    "AT_LAST_LAYER",
    "EarlierLayerLimit",
    "LastLayerLimit",
    "PenaltyLimit",
    "constant_loss",
]

# The largest penalty, for a limit of 1, as a share of what the network has gained over a constant
# output: benchmarks.worth.stability shows what it does.
AT_LAST_LAYER = 1 / 5
AT_EARLIER_LAYERS = 1 / 50


class PenaltyLimit(ABC):
    """The limit of one training step."""

    def __init__(self, limit: float) -> None:
        self.limit = limit

    def share(self, penalty: Tensor, loss: Tensor, of_constant: Tensor) -> Tensor:
        """Compute the share of a penalty that the limit leaves."""
        gain = of_constant - loss.detach()
        with without_autocast(penalty):
            of_loss, of_penalty = self._compared(loss, penalty, gain)
            ratios = _ratio(of_loss, of_penalty, self.limit)
            # 0/0 is nan: where there is no penalty, there is nothing to limit
            least = ratios.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=torch.inf).amin()
        # a network that has gained less than nothing gets no penalty
        return least.clamp(0, 1).to(penalty.dtype)

    @abstractmethod
    def _compared(self, loss: Tensor, penalty: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
        """Compute numbers of the loss and the penalty, whose least ratio counts: (r,)."""


class EarlierLayerLimit(PenaltyLimit):
    """The limit of a penalty at any layers: a share of loss and gain."""

    def _compared(self, loss: Tensor, penalty: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
        loss = loss.detach()
        # a loss that can be negative does not tell how much is left to learn
        room = torch.where(loss > 0, torch.minimum(gain, loss), gain)
        return AT_EARLIER_LAYERS * room, penalty.detach().abs()


class LastLayerLimit(PenaltyLimit):
    """The limit of a penalty at the last layer alone: a share of the gain, and of gradients."""

    def __init__(self, limit: float, last: LayerRecord, *, tied: bool) -> None:
        super().__init__(limit)
        self._features = last.check()[0]
        self._last = last
        self._weight = last.map.kernel
        self._compares_weight = not tied and self._weight.requires_grad

    def _compared(self, loss: Tensor, penalty: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
        parts = [part for pair in self._gradients(loss, penalty) for part in pair.unbind()]
        # the norm of so many copies has the factor of the gain
        copies = penalty.detach().expand(round(AT_LAST_LAYER**-2))
        value, *norms = torch._foreach_norm([copies, *parts])
        compared = torch.stack([gain, *norms[::2], value, *norms[1::2]]).view(2, -1)
        return compared[0], compared[1]

    def _gradients(self, loss: Tensor, penalty: Tensor) -> list[Tensor]:
        """Compute the gradients in each group of variables, of loss and penalty: (2, ...)."""
        if not (self._compares_weight or self._features.requires_grad):
            return []
        if not penalty.requires_grad:
            return []
        head = self._last.head
        if head is not None and getattr(penalty.grad_fn, "slot", None) is head.slot:
            of_loss, weight = self._of_loss(loss), self._last.map.matrix
            return gradients_at_head(
                of_loss, head.slot, self._features, weight, in_weight=self._compares_weight
            )
        slopes = self._own_slopes(penalty)
        if slopes is not None:
            return self._gradients_at_linear(loss, slopes)
        return self._gradients_by_autograd(loss, penalty)

    def _own_slopes(self, penalty: Tensor) -> TotalSlopes | None:
        """Return the slopes of a penalty in output, features and weight of a linear layer."""
        slopes, node = total_slopes(penalty), penalty.grad_fn
        if slopes is None or node is None or type(self._last.layer) is not nn.Linear:
            return None
        # the graph shows whether the slopes are in these or in something computed from them
        of_output, of_features, of_weight = (source for source, _ in node.next_functions[:3])
        weight = self._weight if self._weight.requires_grad else None
        is_own = (
            of_output is self._last.node
            and of_features is self._features.grad_fn
            and getattr(of_weight, "variable", None) is weight
        )
        return slopes if is_own else None

    def _of_loss(self, loss: Tensor) -> Tensor | None:
        """Compute the gradient of the loss in the layer's output."""
        edge = GradientEdge(self._last.node, self._last.output_nr)
        return pull_back([loss], [edge], [constant(1.0, loss)], create_graph=False)[0]

    def _gradients_at_linear(self, loss: Tensor, slopes: TotalSlopes) -> list[Tensor]:
        """Compute the gradients from those in the layer's output."""
        features, weight = full_precision(self._features.detach()), self._weight.detach()
        of_loss = self._of_loss(loss)
        pair = torch.stack([torch.zeros_like(slopes.z) if of_loss is None else of_loss, slopes.z])
        found: list[Tensor] = []
        if self._features.requires_grad:
            # gradients in the features, and these times the features
            both = features.new_empty(2, *pair.shape[:2], features.shape[1])
            both[0].flatten(0, 1).addmm_(pair.flatten(0, 1), full_precision(weight), beta=0)
            both[0, 1].addcmul_(features, slopes.along[:, None], value=2)
            torch.mul(both[0], features, out=both[1])
            found += both.sum(dim=2)  # the gradients in shift and gain
        if self._compares_weight:
            in_weight = pair.transpose(1, 2) @ features
            # the penalty depends on features and weight not only by the output
            in_weight[1].add_(slopes.factor)
            found.append(in_weight)
        return found

    def _gradients_by_autograd(self, loss: Tensor, penalty: Tensor) -> list[Tensor]:
        """Compute the gradients at a layer of any kind."""
        variables = [(self._features, self._in_channels)]
        variables += [(self._weight, lambda pair: [pair])] if self._compares_weight else []
        variables = [(tensor, groups) for tensor, groups in variables if tensor.requires_grad]
        tensors = [tensor for tensor, _ in variables]
        of_loss = pull_back([loss], tensors, create_graph=False)
        of_penalty = pull_back([penalty], tensors, create_graph=False)
        found = []
        for a, b, (_, groups) in zip(of_loss, of_penalty, variables, strict=True):
            if b is not None:
                pair = torch.stack([torch.zeros_like(b) if a is None else a, b])
                found += groups(full_precision(pair))
        return found

    def _in_channels(self, pair: Tensor) -> list[Tensor]:
        """Compute the gradients in a shift and a gain of the features from those in them."""
        layer = self._last.map
        features = full_precision(layer.channels(self._features.detach()))
        columns = layer.channels(pair.flatten(0, 1)).reshape(2, *features.shape)
        return list(torch.stack([columns, columns * features]).sum(dim=2))


def _ratio(numerator: Tensor, denominator: Tensor, factor: float) -> Tensor:
    """Compute a ratio times a factor in a single operation."""
    return torch.addcdiv(constant(0.0, denominator), numerator, denominator, value=factor)


def constant_loss(
    loss: Callable[[Tensor], Tensor], output: Tensor, sample_weight: Tensor | None = None
) -> Tensor:
    """Compute the loss of the mean output, the same for all samples and positions.

    Shapes: `sample_weight` (n,).
    """
    axes = [axis for axis in range(output.ndim) if axis != 1]
    if output.numel() == (output.shape[1] if output.ndim > 1 else 1):
        return output.new_full((), torch.inf)
    with torch.no_grad():
        if sample_weight is None:
            mean = output.mean(dim=axes, keepdim=True)
        else:
            share = sample_weight / or_one(sample_weight.mean())
            share = share.reshape(-1, *[1] * (output.ndim - 1))
            mean = (share * output).mean(dim=axes, keepdim=True)
        return loss(mean.expand_as(output))
