"""Callbacks for any skorch net: training to convergence, and the average of its weights."""

import copy
import math
from typing import Any, ClassVar

import torch
from skorch import NeuralNet
from skorch.callbacks import Callback
from skorch.utils import to_tensor
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from relflat_sk._checks import check_integer, check_number, check_probability, warn
from relflat_sk._network.batches import split_labels, split_target
from relflat_sk._network.borrowing import borrowed, changed
from relflat_sk._network.network import loss_range, mean_loss, output_shape, primary_output
from relflat_sk.training._data import training_network
from relflat_sk.training._skorch_net import check_start, epochs_before


class _StopWhenReached(Callback):
    """Stop training once a quantity, measured at the end of an epoch, is small enough."""

    every: int
    _is_required = True  # whether a training that misses the goal has failed
    # names of the parameter, of the quantity, and of the attribute with its last finite value
    _parameter: ClassVar[str]
    _quantity: ClassVar[str]
    _attribute: ClassVar[str]

    def __repr__(self) -> str:
        often = "" if self.every == 1 else f", every={self.every!r}"
        return f"{type(self).__name__}({getattr(self, self._parameter)!r}{often})"

    @property
    def _goal(self) -> float:
        goal: float = getattr(self, self._parameter)
        return goal

    def _describe(self) -> str:
        """Describe the goal."""
        return f"{self._quantity} of {self._goal:g}"

    def on_train_begin(self, net: NeuralNet, **kwargs: Any) -> None:
        """Check the parameters, and mark the net as not converged."""
        check_number(self._parameter, getattr(self, self._parameter))
        check_integer("every", self.every, minimum=1)
        setattr(self, self._attribute, math.nan)
        net.converged_ = False

    def on_epoch_end(self, net: NeuralNet, dataset_train: Any = None, **kwargs: Any) -> None:
        """Measure every few epochs, and stop training as skorch's own callbacks do.

        Parameters
        ----------
        net : NeuralNet
            The net in training.
        dataset_train : torch Dataset
            Its training data.
        **kwargs
            Not used.

        Raises
        ------
        KeyboardInterrupt
            If the goal is reached. skorch catches it and ends the training.
        ValueError
            If the data are a stream that can be read only once.
        """
        if len(net.history) % self.every:
            return
        found = self._measure(net, dataset_train)
        if math.isfinite(found):
            setattr(self, self._attribute, found)
        if found <= self._goal:
            net.converged_ = True
            if net.verbose:
                print(f"Stopping: {self._describe()} reached after {len(net.history)} epochs.")
            raise KeyboardInterrupt

    def _measure(self, net: NeuralNet, dataset: Any) -> float:
        raise NotImplementedError


def required_goals(net: NeuralNet) -> str:
    """Describe the goals without which a net's training has failed."""
    callbacks = [one for _, one in net.callbacks_ if isinstance(one, _StopWhenReached)]
    return " or ".join(one._describe() for one in callbacks if one._is_required)


class StopAtLoss(_StopWhenReached):
    """Stop training once the loss on the training data is small enough.

    Minima can be compared only if they are equally deep. The loss is that at the end of an
    epoch: in evaluation mode, on all training data, without penalty. The `train_loss` in
    skorch's history is another number. It is a mean over an epoch during which the weights move,
    it is in training mode, and it counts small batches like large ones.

    Parameters
    ----------
    loss : float, default=0.01
        Mean training loss to reach.
    every : int, default=1
        Number of epochs between checks.

    Attributes
    ----------
    loss_ : float
        The training loss of the last measurement on all data: that of the trained network if the
        goal was reached. nan before the first one.

    Raises
    ------
    ValueError
        At the start of training, if `loss` or `every` is not positive. In training, if the data
        are a stream that can be read only once.

    Warns
    -----
    sklearn.exceptions.ConvergenceWarning
        At the end of `fit`, if the net is one of `relflat_sk` and has not reached the loss in
        `max_epochs` epochs. The attribute `converged_` of any net tells.

    See Also
    --------
    StopAtGradientNorm : Stop training at a stationary point.

    Notes
    -----
    A net with a `get_loss` of its own may compute another loss than its criterion. The loss is
    then what its `get_loss` returns with ``training=False``, regularisers included, but without a
    constant factor of the criterion, such as one over the number of accumulated batches. Let it
    add regularisers only if `training` is true, to stop at the loss without them.

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

    _parameter, _quantity, _attribute = "loss", "a training loss", "loss_"

    def __init__(self, loss: float = 0.01, every: int = 1) -> None:
        self.loss = loss
        self.every = every

    def _measure(self, net: NeuralNet, dataset: Any) -> float:
        return mean_loss(training_network(net, dataset))


class StopAtGradientNorm(_StopWhenReached):
    """Stop training once the gradient on the training data is small enough.

    The net is then at a stationary point of its objective, flatness penalty included. The
    gradient is measured at the end of an epoch, in evaluation mode (without dropout, batch norm
    with its running statistics), on all training data.

    Parameters
    ----------
    tol : float, default=1e-5
        Euclidean norm to reach, of the gradient of the mean loss in all parameters.
    every : int, default=1
        Number of epochs between measurements. Each takes a forward and a backward pass over the
        training data.

    Attributes
    ----------
    gradient_norm_ : float
        The norm of the last measurement on all data. nan before the first one.

    Raises
    ------
    ValueError
        At the start of training, if `tol` or `every` is not positive.

    Warns
    -----
    sklearn.exceptions.ConvergenceWarning
        At the end of `fit`, as with `StopAtLoss`.

    See Also
    --------
    StopAtLoss : Stop training at a training loss.

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

    _parameter, _quantity, _attribute = "tol", "a gradient norm", "gradient_norm_"

    def __init__(self, tol: float = 1e-5, every: int = 1) -> None:
        self.tol = tol
        self.every = every

    def _measure(self, net: NeuralNet, dataset: Any) -> float:
        return gradient_norm(net, dataset)


def gradient_norm(net: NeuralNet, dataset: Any) -> float:
    """Compute the norm of the gradient of a net's objective on a whole data set."""
    parameters = [p for _, p in net.get_all_learnable_params() if p.requires_grad]
    sums = [torch.zeros_like(p) for p in parameters]
    loss = training_network(net, dataset).loss
    summed = getattr(net.criterion_, "reduction", "mean") == "sum"
    divisor, limit = 0.0, getattr(net, "_limit", None)
    penalised = [] if limit is None else [net]  # nets of others have no limit
    with (
        borrowed(net.module_),
        torch.enable_grad(),
        # these are no steps of the training: each is penalised, and the limit learns nothing
        changed(penalised, "flatness_every", 1),
        changed(penalised, "_limit", copy.copy(limit)),
    ):
        for X, y in map(split_labels, net.get_iterator(dataset, training=False)):
            output = net.infer(X)
            objective = net.get_loss(output, y, X=X, training=True)
            # means of batches are weighted by their divisors
            target, weight = split_target(y)
            output = primary_output(output)
            target = loss.read_target(output, to_tensor(target, device=net.device))
            divisors = loss.divisors(output, target.relevant)
            share = float(divisors.sum() if weight is None else weight.to(divisors) @ divisors)
            grads = torch.autograd.grad(objective, parameters, materialize_grads=True)
            for total, grad in zip(sums, grads, strict=True):
                total.add_(grad, alpha=1 if summed else share)
            divisor += share
    if not divisor:
        raise ValueError(
            f"the {type(dataset).__name__} gives no samples after an epoch, to take the gradient "
            "on: let its __iter__ return a new iterator each time."
        )
    return float(torch.stack([(total / divisor).double().norm() for total in sums]).norm())


class StopAtDepth(StopAtLoss):
    """Stop training at a loss that is `depth` times smaller than a constant prediction's.

    Both are counted from the loss that no prediction is below: above 0 with label smoothing.

    The goal of a search for nets that bring none: it suits every criterion and every scale of
    the target. With cross-entropy, the best constant prediction has the entropy of the labels
    as its loss; with squared errors, the variance of the target.
    """

    _parameter = "depth"
    _is_required = False  # a search also takes a plateau for a minimum

    every = 1

    def __init__(self, depth: float = 20.0) -> None:  # loss is a property
        self.depth = depth

    def on_train_begin(self, net: NeuralNet, **kwargs: Any) -> None:
        """Check the parameters, and forget the goal of an earlier training."""
        super().on_train_begin(net, **kwargs)
        self.goal_: float | None = None

    def on_epoch_begin(self, net: NeuralNet, dataset_train: Any = None, **kwargs: Any) -> None:
        """Compute the loss to reach before the first epoch."""
        if self.goal_ is None:
            network = training_network(net, dataset_train)
            lowest, constant = loss_range(network, output_shape(network), None)
            self.goal_ = lowest + (constant - lowest) / self.depth

    @property
    def loss(self) -> float:  # type: ignore[override]
        """The training loss to reach."""
        return math.nan if self.goal_ is None else self.goal_

    _goal = loss

    @property
    def is_known(self) -> bool:
        """Whether there is a loss to reach."""
        return 0 < self.loss < math.inf

    def on_epoch_end(self, net: NeuralNet, dataset_train: Any = None, **kwargs: Any) -> None:
        """Measure every few epochs if there is a loss to reach, see `StopAtLoss`."""
        if self.is_known:
            super().on_epoch_end(net, dataset_train=dataset_train, **kwargs)


class WeightAverage(Callback):
    """Give a net the average of the weights that its training goes through.

    The average of the weights along a training lies in a wider region of small loss than the last
    ones [1]_. The training itself does not change. The net has the average from its end on: for
    `relative_flatness_`, in predictions, and in a search. Statistics of batch norms are renewed
    for the average, by one pass over the training data.

    Parameters
    ----------
    start : int or float, default=0.5
        The epoch after which averaging begins, or the share of `max_epochs` if a float.
    decay : float, optional
        None averages the weights after each epoch alike [1]_. A number averages those after each
        step, where the older ones count `decay` times as much with each step.

    Attributes
    ----------
    n_averaged_ : int
        Number of weights in the average of the last training.

    Raises
    ------
    ValueError, TypeError
        At the start of training, if `start` is negative, a share above 1 or no number, or if
        `decay` is not between 0 and 1.

    Warns
    -----
    FlatnessWarning
        If the training ends before the first average, for instance by `StopAtLoss`. The net keeps
        its last weights.

    See Also
    --------
    torch.optim.swa_utils.AveragedModel : The average.
    FlatMinimaSearch : Averages the predictions of several networks.

    Notes
    -----
    `history`, validation and callbacks such as `StopAtLoss` see the weights in training. Further
    training, by `partial_fit` or ``warm_start``, goes on from the average, and begins a new one.
    With a `decay`, nets are trained one by one in a fleet.

    References
    ----------
    .. [1] Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization",
       UAI 2018.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from relflat_sk import RelativeFlatnessRegularizedClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> average = WeightAverage(start=10)
    >>> net = RelativeFlatnessRegularizedClassifier(
    ...     max_epochs=30, callbacks=[("average", average)], verbose=0, random_state=0
    ... )
    >>> net.fit(X, y).score(X, y) > 0.9
    True
    >>> dict(net.callbacks_)["average"].n_averaged_
    20
    """

    def __init__(self, start: float = 0.5, decay: float | None = None) -> None:
        self.start = start
        self.decay = decay

    @property
    def step_every(self) -> str:
        """How often weights are averaged, in the words of skorch's LRScheduler."""
        return "epoch" if self.decay is None else "batch"

    def __getstate__(self) -> dict[str, Any]:
        # a copy that is made in training holds no data; the next epoch brings them
        return {name: value for name, value in vars(self).items() if name != "_dataset_"}

    def on_train_begin(self, net: NeuralNet, **kwargs: Any) -> None:
        """Check the parameters, and begin a new average."""
        check_start("start", self.start)
        if self.decay is not None:
            check_probability("decay", self.decay)
        # skorch takes attributes for parameters unless they end in an underscore
        self._first_ = len(net.history) + epochs_before(self.start, net.max_epochs)
        self.n_averaged_ = 0
        self._average_: list[Tensor] = []

    def on_batch_end(self, net: NeuralNet, training: bool = False, **kwargs: Any) -> None:
        """Average the weights after a step, if older ones count less."""
        # the history has the epoch of this step already
        if training and self.decay is not None and len(net.history) > self._first_:
            self._update(net.module_)

    def on_epoch_begin(self, net: NeuralNet, dataset_train: Any = None, **kwargs: Any) -> None:
        """Keep the training data, which batch norms will need."""
        self._dataset_ = dataset_train

    def on_epoch_end(self, net: NeuralNet, **kwargs: Any) -> None:
        """Average the weights after an epoch, if all count alike."""
        if self.decay is None and len(net.history) > self._first_:
            self._update(net.module_)

    def _update(self, module: nn.Module) -> None:
        """Add the weights of a network to the average."""
        weights = [weight.detach() for weight in module.parameters()]
        self._average_ = self._average_ or [weight.clone() for weight in weights]
        self.n_averaged_ += 1
        share = 1 / self.n_averaged_ if self.decay is None else 1 - self.decay
        for average, weight in zip(self._average_, weights, strict=True):
            average.lerp_(weight, share)

    def on_train_end(self, net: NeuralNet, **kwargs: Any) -> None:
        """Give the net the average, with statistics of batch norms that suit it."""
        averages, dataset = self._average_, self.__dict__.pop("_dataset_", None)
        del self._average_
        if not self.n_averaged_:
            warn(
                f"WeightAverage(start={self.start!r}) averaged no weights in {len(net.history)} "
                "epochs: the net keeps its last weights. Choose an earlier start."
            )
            return
        with torch.no_grad():
            for weight, average in zip(net.module_.parameters(), averages, strict=True):
                weight.copy_(average)
        inputs = ([split_labels(batch)[0]] for batch in net.get_iterator(dataset))
        update_bn(inputs, _Inference(net))


class _Inference(nn.Module):
    """The network of a net, called as the net calls it, so that inputs may be dicts."""

    def __init__(self, net: NeuralNet) -> None:
        super().__init__()
        self.module = net.module_
        self._infer = net.infer

    def forward(self, X: Any) -> Any:
        """Run the net's module on a batch of inputs."""
        return self._infer(X)
