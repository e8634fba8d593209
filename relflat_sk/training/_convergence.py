"""Callbacks that train until convergence, for any skorch net."""

from math import inf
from typing import Any

import numpy as np
import torch
from skorch import NeuralNet
from skorch.callbacks import Callback
from skorch.dataset import unpack_data
from skorch.utils import to_tensor
from torch import Tensor

from relflat_sk._losses import Loss
from relflat_sk._network import borrowed, mean_loss, primary_output
from relflat_sk.training._sample_weights import split_target, training_network

__all__ = ["StopAtGradientNorm", "StopAtLoss"]


class _StopWhenReached(Callback):
    """Stop training once a quantity, measured after an epoch, is small enough."""

    every: int

    def on_train_begin(self, net: NeuralNet, **kwargs: Any) -> None:
        """Nothing is reached yet."""
        if (
            isinstance(self.every, bool)
            or not isinstance(self.every, int | np.integer)
            or self.every < 1
        ):
            raise ValueError(f"every must be a positive integer, got {self.every!r}.")
        net.converged_ = False

    def on_epoch_end(self, net: NeuralNet, dataset_train: Any = None, **kwargs: Any) -> None:
        """Measure, and stop as skorch's own callbacks do."""
        if len(net.history) % self.every == 0 and self._reached(net, dataset_train):
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
    the history is a mean over an epoch during which the weights move, in training mode and
    over batches of any size; here it is that of the weights at the end of the epoch, in
    evaluation mode, over all training data and without penalty.

    Parameters
    ----------
    loss : float, default=0.01
        Mean training loss to reach.
    every : int, default=1
        Epochs between measurements, each of which takes a forward pass over the training
        data.

    Attributes
    ----------
    loss_ : float
        The training loss when it was last measured.

    Raises
    ------
    ValueError
        At the start of training, if `loss` or `every` is not positive.

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

    def __init__(self, loss: float = 0.01, every: int = 1) -> None:
        self.loss = loss
        self.every = every

    def on_train_begin(self, net: NeuralNet, **kwargs: Any) -> None:
        """Check the arguments."""
        _check_positive("loss", self.loss)
        super().on_train_begin(net, **kwargs)

    def _reached(self, net: NeuralNet, dataset: Any) -> bool:
        self.loss_ = mean_loss(training_network(net, dataset))
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
        _check_positive("tol", self.tol)
        super().on_train_begin(net, **kwargs)

    def _reached(self, net: NeuralNet, dataset: Any) -> bool:
        self.gradient_norm_ = gradient_norm(net, dataset)
        return self.gradient_norm_ <= self.tol

    def _goal(self) -> str:
        return f"a gradient norm of {self.tol:g}"


def gradient_norm(net: NeuralNet, dataset: Any) -> float:
    """Euclidean norm of the gradient of what a net minimises, over a whole data set.

    Parameters
    ----------
    net : NeuralNet
        Initialised. It is given back as it was: `.grad`, train/eval mode, random state.
    dataset : torch Dataset

    Returns
    -------
    float
        Of the mean over samples, also where the criterion sums.
    """
    parameters = [p for _, p in net.get_all_learnable_params() if p.requires_grad]
    sums = [torch.zeros_like(p) for p in parameters]
    loss = training_network(net, dataset).loss
    summed = getattr(net.criterion_, "reduction", "mean") == "sum"
    divisor = 0.0
    with borrowed(net.module_), torch.enable_grad():
        for X, y in map(unpack_data, net.get_iterator(dataset, training=False)):
            output = net.infer(X)
            objective = net.get_loss(output, y, X=X, training=True)
            # batches of means add up by what each mean divides by
            target, weight = split_target(y)
            target = to_tensor(target, device=net.device)
            share = _divisor(loss, primary_output(output), target, weight)
            grads = torch.autograd.grad(objective, parameters, allow_unused=True)
            for total, grad in zip(sums, grads, strict=True):
                if grad is not None:
                    total.add_(grad, alpha=1 if summed else share)
            divisor += share
    return float(torch.stack([(total / divisor).double().norm() for total in sums]).norm())


def _divisor(loss: Loss, output: Tensor, target: Tensor, weight: Tensor | None) -> float:
    """Sum what the mean over a batch divides by."""
    divisors = loss.divisors(output, loss.check_target(output, target))
    return float(divisors.sum() if weight is None else weight.to(divisors) @ divisors)


def _check_positive(name: str, value: Any) -> None:
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not (number and 0 < value < inf):
        raise ValueError(f"{name} must be a positive number, got {value!r}.")
