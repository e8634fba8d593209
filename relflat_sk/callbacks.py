"""Callbacks that train until convergence, for any skorch net."""

from typing import Any

import torch
from skorch import NeuralNet
from skorch.callbacks import Callback
from skorch.dataset import unpack_data

from relflat_sk._estimators import DataOptions, skorch_network
from relflat_sk.batches import make_batches
from relflat_sk.network import mean_loss

__all__ = ["StopAtGradientNorm", "StopAtLoss"]


class _StopWhenReached(Callback):
    """Stop training once a quantity, measured after an epoch, is small enough."""

    def on_train_begin(self, net: NeuralNet, **kwargs: Any) -> None:
        """Nothing is reached yet."""
        net.converged_ = False

    def on_epoch_end(self, net: NeuralNet, dataset_train: Any = None, **kwargs: Any) -> None:
        """Measure, and stop as skorch's own callbacks do."""
        if self._reached(net, dataset_train):
            net.converged_ = True
            if net.verbose:
                print(f"Stopping: {self._goal()} reached after {len(net.history)} epochs.")
            raise KeyboardInterrupt

    def _reached(self, net: NeuralNet, dataset: Any) -> bool:
        raise NotImplementedError

    def _goal(self) -> str:
        raise NotImplementedError


class StopAtLoss(_StopWhenReached):
    """Stop once the loss on the training data is small enough.

    Minima are comparable only when they are equally deep. The loss that skorch records in
    the history is a mean over an epoch during which the weights move, which overstates the
    loss of a net that makes few steps per epoch; here it is measured with the weights as
    they are at the end of the epoch, in evaluation mode and without penalty, as soon as
    the recorded loss comes near the goal.

    Parameters
    ----------
    loss : float, default=0.01
        Mean training loss to reach.

    Attributes
    ----------
    loss_ : float
        The training loss when it was last measured.

    Raises
    ------
    ValueError
        At the start of training, if `loss` is not a positive number.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from relflat_sk import RelativeFlatnessRegularizedClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> net = RelativeFlatnessRegularizedClassifier(
    ...     max_epochs=500, callbacks=[StopAtLoss(0.1)], verbose=0, random_state=0
    ... )
    >>> net.fit(X, y).converged_
    True
    """

    # the loss of moving weights is seldom more than this many times that of the last ones
    _NEAR = 4

    def __init__(self, loss: float = 0.01) -> None:
        self.loss = loss

    def on_train_begin(self, net: NeuralNet, **kwargs: Any) -> None:
        """Check the goal."""
        if isinstance(self.loss, bool) or not self.loss > 0:
            raise ValueError(f"loss must be a positive number, got {self.loss!r}.")
        super().on_train_begin(net, **kwargs)

    def _reached(self, net: NeuralNet, dataset: Any) -> bool:
        if not net.history[-1, "train_loss"] <= self._NEAR * self.loss:
            return False
        options = DataOptions()
        batches = make_batches(net.get_iterator(dataset, training=False))
        self.loss_ = mean_loss(skorch_network(net, batches, options))
        return self.loss_ <= self.loss

    def _goal(self) -> str:
        return f"a training loss of {self.loss:g}"


class StopAtGradientNorm(_StopWhenReached):
    """Stop once the gradient over all training data is small enough: a stationary point.

    The gradient is that of what is minimised, a flatness penalty included, in evaluation
    mode (dropout off, batch norm with its running statistics), at the end of an epoch.

    Parameters
    ----------
    tol : float, default=1e-5
        Euclidean norm of the gradient, over all parameters, of the mean loss.
    every : int, default=1
        Epochs between measurements, each of which takes a pass over the training data.

    Attributes
    ----------
    gradient_norm_ : float
        The norm when it was last measured.

    Raises
    ------
    ValueError
        At the start of training, if `tol` or `every` is not positive.

    Examples
    --------
    >>> import numpy as np, torch
    >>> from relflat_sk import RelativeFlatnessRegularizedRegressor
    >>> X = np.array([[-1.0], [1.0]])
    >>> net = RelativeFlatnessRegularizedRegressor(
    ...     module__hidden_layer_sizes=(), optimizer=torch.optim.SGD, lr=0.1, max_epochs=500,
    ...     callbacks=[StopAtGradientNorm(1e-4)], verbose=0, random_state=0,
    ... )
    >>> net.fit(X, X.ravel()).converged_
    True
    """

    def __init__(self, tol: float = 1e-5, every: int = 1) -> None:
        self.tol = tol
        self.every = every

    def on_train_begin(self, net: NeuralNet, **kwargs: Any) -> None:
        """Check the arguments."""
        if isinstance(self.tol, bool) or not self.tol > 0:
            raise ValueError(f"tol must be a positive number, got {self.tol!r}.")
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"every must be a positive integer, got {self.every!r}.")
        super().on_train_begin(net, **kwargs)

    def _reached(self, net: NeuralNet, dataset: Any) -> bool:
        if len(net.history) % self.every:
            return False
        self.gradient_norm_ = gradient_norm(net, dataset)
        return self.gradient_norm_ <= self.tol

    def _goal(self) -> str:
        return f"a gradient norm of {self.tol:g}"


def gradient_norm(net: NeuralNet, dataset: Any) -> float:
    """Euclidean norm of the gradient of what a net minimises, over a whole data set.

    Parameters
    ----------
    net : NeuralNet
        Initialised. Its parameters' `.grad` and its train/eval mode are left as they are.
    dataset : torch Dataset

    Returns
    -------
    float
    """
    parameters = [p for _, p in net.get_all_learnable_params() if p.requires_grad]
    sums = [torch.zeros_like(p) for p in parameters]
    modes = [(m, m.training) for m in net.module_.modules()]
    summed = getattr(net.criterion_, "reduction", "mean") == "sum"
    n = 0
    try:
        for batch in net.get_iterator(dataset, training=False):
            X, y = unpack_data(batch)
            net.module_.eval()
            objective = net.get_loss(net.infer(X), y, X=X, training=True)
            grads = torch.autograd.grad(objective, parameters, allow_unused=True)
            for total, grad in zip(sums, grads, strict=True):
                if grad is not None:
                    total.add_(grad, alpha=1 if summed else len(y))
            n += len(y)
    finally:
        for module, mode in modes:
            module.training = mode
    return float(torch.stack([(total / n).double().norm() for total in sums]).norm())
