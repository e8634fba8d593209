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

    Parameters
    ----------
    depth : float, default=20
        Loss of the best constant prediction over the training loss to reach.
    every : int, default=1
        Number of epochs between measurements.

    Attributes
    ----------
    goal_ : float
        The training loss to reach, known once the first epoch begins; nan before. The constant's
        loss is that on the training data, without those that `train_split` holds out, and with
        sample weights. If the best constant prediction has no positive loss, there is none, and
        training goes on for all epochs.

    Raises
    ------
    ValueError
        At the start of training, if `depth` or `every` is not positive.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from relflat_sk import RelativeFlatnessRegularizedClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> net = RelativeFlatnessRegularizedClassifier(
    ...     max_epochs=100, callbacks=[("goal", StopAtDepth(5))], verbose=0, random_state=0
    ... ).fit(X, y)
    >>> net.converged_, round(dict(net.callbacks_)["goal"].goal_, 3)  # log(3) / 5
    (True, 0.22)
    """

    _has_begun_ = False
    _is_required = False  # a search also takes a plateau for a minimum

    def __init__(self, depth: float = 20.0, every: int = 1) -> None:  # loss is a property
        self.depth = depth
        self.every = every

    def on_train_begin(self, net: NeuralNet, **kwargs: Any) -> None:
        """Check the parameters, and forget the goal of an earlier training.

        Parameters
        ----------
        net : NeuralNet
            The net in training.
        **kwargs
            Passed on to skorch.
        """
        check_number("depth", self.depth)
        self.goal_ = self.loss_ = math.nan
        self._proof_, self._has_begun_ = None, False
        super(StopAtLoss, self).on_train_begin(net, **kwargs)  # no loss is known to be checked

    def on_epoch_begin(self, net: NeuralNet, dataset_train: Any = None, **kwargs: Any) -> None:
        """Compute the loss to reach before the first epoch.

        Parameters
        ----------
        net : NeuralNet
            The net in training.
        dataset_train : torch Dataset
            Its training data.
        **kwargs
            Not used.
        """
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
        """Measure every few epochs if there is a loss to reach, see `StopAtLoss`.

        Parameters
        ----------
        net : NeuralNet
            The net in training.
        dataset_train : torch Dataset
            Its training data.
        **kwargs
            Passed on to `StopAtLoss`.
        """
        if self.is_known:
            super().on_epoch_end(net, dataset_train=dataset_train, **kwargs)
