"""A callback that stops training at a depth: at a share of the best constant prediction's loss."""

import math
from typing import Any

from skorch import NeuralNet

from relflat_sk._checks import check_number
from relflat_sk._network import best_constant_loss, output_shape
from relflat_sk.training._convergence import StopAtLoss
from relflat_sk.training._sample_weights import training_network

__all__ = ["StopAtDepth"]


class StopAtDepth(StopAtLoss):
    """Stop training at a loss that is `depth` times smaller than a constant prediction's.

    The goal of a search for nets that bring none: it suits every criterion and every scale of
    the target. With cross-entropy, the best constant prediction has the entropy of the labels
    as its loss; with squared errors, the variance of the target.
    """

    _has_begun_ = False
    _is_required = False  # a search also takes a plateau for a minimum

    def __init__(self, depth: float = 20.0, every: int = 1) -> None:  # loss is a property
        self.depth = depth
        self.every = every

    def on_train_begin(self, net: NeuralNet, **kwargs: Any) -> None:
        """Check the parameters, and forget the goal of an earlier training."""
        check_number("depth", self.depth)
        self.goal_ = self.loss_ = math.nan
        self._proof_, self._has_begun_ = None, False
        super(StopAtLoss, self).on_train_begin(net, **kwargs)  # no loss is known to be checked

    def on_epoch_begin(self, net: NeuralNet, dataset_train: Any = None, **kwargs: Any) -> None:
        """Compute the loss to reach before the first epoch."""
        if self._has_begun_:
            return
        self._has_begun_ = True
        network = training_network(net, dataset_train)
        self.goal_ = best_constant_loss(network, output_shape(network), None) / self.depth

    @property
    def is_known(self) -> bool:
        """Whether there is a loss to reach."""
        return 0 < self.goal_ < math.inf

    @property
    def loss(self) -> float:  # type: ignore[override]
        """The training loss to reach."""
        return self.goal_

    def on_epoch_end(self, net: NeuralNet, dataset_train: Any = None, **kwargs: Any) -> None:
        """Measure every few epochs if there is a loss to reach, see `StopAtLoss`."""
        if self.is_known:
            super().on_epoch_end(net, dataset_train=dataset_train, **kwargs)
