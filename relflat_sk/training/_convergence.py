"""Callbacks that stop training at convergence, for any skorch net.

Whether the loss on all training data has reached a goal takes three steps, each only if the one
before leaves it open:

1. The **running loss** of the epoch is far from the goal. The weights move while it is recorded,
   so the margin is wide. It is believed only if it is known to be the mean loss of the network
   as it is in evaluation: no dropout or batch norm, no code of others that asks for the mode,
   no criterion that sums, and no loss or step of the net's own.
2. The **hardest samples** of the last pass have losses whose sum is too large for the goal,
   however small all others are. This is certain, and takes a small batch.
3. A **pass** over all data computes the loss.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import isfunction
from statistics import median
from types import CodeType
from typing import Any

import torch
from skorch import NeuralNet
from skorch.callbacks import Callback
from skorch.dataset import unpack_data
from skorch.utils import to_tensor
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.data import IterableDataset

from relflat_sk._checks import check_integer, check_number
from relflat_sk._losses import Loss, ProbabilityNLLLoss
from relflat_sk._network import (
    Batch,
    Network,
    Outcome,
    best_constant_loss,
    borrowed,
    outcome_of,
    output_shape,
    primary_output,
)
from relflat_sk.training._epoch_trainer import OwnLoop
from relflat_sk.training._sample_weights import split_target, training_network

# In trainings without dropout and batch norm (5 data sets, Adam and SGD at three rates each,
# batches of 8 to 128; 5,357 epochs at which a goal could be reached), no epoch ended at a loss
# this much smaller than the running loss of `_are_above`. Two did at half of this margin, which
# was chosen on the same trainings.
FAR = 10.0
SHARE_OF_A_PROOF = 16  # a proof takes one of so many samples
FEWEST_FOR_A_PROOF = 256  # samples of a batch from which on a proof is cheaper than the batch
ROUNDING_OF_A_PROOF = 1e-4
_MAKE_LOSSES = ("get_loss", "train_step", "train_step_single", "run_single_epoch")
# criteria with losses that cannot be negative
_NOT_NEGATIVE = (
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.CrossEntropyLoss,
    nn.HuberLoss,
    nn.L1Loss,
    nn.MSELoss,
    nn.SmoothL1Loss,
    ProbabilityNLLLoss,
)


# -- the running loss ----------------------------------------------------------------------


def is_far(net: Any, goal: float) -> bool:
    """Return whether the running loss of a net's last epoch is far from a goal."""
    batches = net.history[-1]["batches"]
    losses = [batch["train_loss"] for batch in batches if "train_loss" in batch]
    return _are_above(losses, FAR * goal) and _records_mean(net) and acts_alike(net.module_)


def _records_mean(net: Any) -> bool:
    """Return whether the recorded loss is known to be the mean of the criterion, and no more."""
    spaces = [vars(net), *map(vars, type(net).__mro__)]
    written = [space[name] for space in spaces for name in _MAKE_LOSSES if name in space]
    known = all(_is_from(method, "skorch", "relflat_sk") for method in written)
    return known and getattr(net.criterion_, "reduction", None) == "mean"


def _is_from(definition: Any, *packages: str) -> bool:
    """Return whether a class or function is defined in one of some packages."""
    module = str(getattr(definition, "__module__", ""))
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


def _are_above(losses: Sequence[float], limit: float) -> bool:
    """Return whether the losses of an epoch are typically above a limit.

    Single batches may be outliers: the mean, the median, and the median of the last quarter must
    be above.
    """
    if not losses or not sum(losses) / len(losses) > limit:  # the mean may be nan
        return False
    last = losses[-max(1, len(losses) // 4) :]
    return median(losses) > limit and median(last) > limit


def acts_alike(module: nn.Module) -> bool:
    """Return whether a network is known to act in training as it does in evaluation."""
    return not any(map(_asks_for_mode, module.modules()))


def _asks_for_mode(part: nn.Module) -> bool:
    if isinstance(part, _DropoutNd | _NormBase | nn.RReLU) or getattr(part, "dropout", False):
        return True
    others = [
        kind
        for kind in type(part).__mro__
        if not _is_from(kind, "torch.nn", "relflat_sk", "builtins")
    ]
    if "forward" in vars(part) or any(_is_from(kind, "torch") for kind in others):
        return True  # compiled to something that cannot be read
    functions = [one for kind in others for one in vars(kind).values() if isfunction(one)]
    return any({"training", "dropout"} & _names_in(one.__code__) for one in functions)


def _names_in(code: CodeType) -> set[str]:
    """Return the names of attributes and functions in the code of a function."""
    inner = [_names_in(one) for one in code.co_consts if isinstance(one, CodeType)]
    return set(code.co_names).union(*inner)


# -- proofs --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Proof:
    """The samples that had the largest losses, and the divisor of the mean over all samples."""

    batches: tuple[Batch, ...]
    divisor: float


def is_above(network: Network, goal: float, proof: Proof | None) -> bool:
    """Return whether the loss on all data is certainly above a goal."""
    if proof is None:
        return False
    with borrowed(network.module), torch.no_grad():
        some = sum(
            float(outcome_of(network, batch, network(batch.x)).total()[0])
            for batch in proof.batches
        )
    return some > goal * proof.divisor * (1 + ROUNDING_OF_A_PROOF)


def mean_loss_with_proof(network: Network, goal: float) -> tuple[float, Proof | None]:
    """Compute the mean loss over the data, and what can tell that it stays above a goal."""
    total, divisor, hardest, above = 0.0, 0.0, [], 0.0
    provable = _is_provable(network)
    with borrowed(network.module), torch.no_grad():
        for batch in network.batches():
            outcome = outcome_of(network, batch, network(batch.x))
            loss, share = outcome.total()
            total += float(loss)
            divisor += share
            if provable and isinstance(batch.x, Tensor) and len(batch.x) >= FEWEST_FOR_A_PROOF:
                chosen, largest = _hardest(batch, outcome)
                hardest.append(chosen)
                above += largest
    proves = above > goal * divisor * (1 + ROUNDING_OF_A_PROOF)
    return total / divisor, Proof(tuple(hardest), divisor) if proves else None


def _is_provable(network: Network) -> bool:
    """Return whether no loss is negative, and none depends on which samples are in its batch."""
    return type(network.loss.criterion) in _NOT_NEGATIVE and not any(
        isinstance(part, _NormBase) and part.running_mean is None
        for part in network.module.modules()
    )


def _hardest(batch: Batch, outcome: Outcome) -> tuple[Batch, float]:
    """Choose the samples of a batch with the largest losses; return their sum as well."""
    losses = outcome.weight * outcome.each()[0].double()
    largest, rows = losses.topk(len(losses) // SHARE_OF_A_PROOF)
    rows = rows.to(batch.x.device)

    def take(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[rows.to(values.device)]

    return Batch(batch.x[rows], take(batch.y), take(batch.weight)), float(largest.sum())


class _StopWhenReached(Callback):
    """Stop training once a quantity, measured at the end of an epoch, is small enough."""

    every: int
    _is_required = True  # whether a training that misses the goal has failed

    def __repr__(self) -> str:
        goal, every = self.get_params().values()
        often = "" if every == 1 else f", every={every!r}"
        return f"{type(self).__name__}({goal!r}{often})"

    def on_train_begin(self, net: NeuralNet, **kwargs: Any) -> None:
        """Check the parameters, and mark the net as not converged."""
        check_integer("every", self.every, minimum=1)
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
        _refuse_used_up(self, net, dataset_train)
        if self._reached(net, dataset_train):
            net.converged_ = True
            if net.verbose:
                print(f"Stopping: {self._goal()} reached after {len(net.history)} epochs.")
            raise KeyboardInterrupt

    def _reached(self, net: NeuralNet, dataset: Any) -> bool:
        raise NotImplementedError

    def _goal(self) -> str:
        raise NotImplementedError


def missed_goal(net: NeuralNet, n_epochs: int) -> str:
    """Describe the goal that a net has not reached in all its epochs."""
    if getattr(net, "converged_", True) or not 0 < net.max_epochs <= n_epochs:
        return ""
    callbacks = [one for _, one in net.callbacks_ if isinstance(one, _StopWhenReached)]
    return " or ".join(one._goal() for one in callbacks if one._is_required)


def _refuse_used_up(callback: Callback, net: NeuralNet, dataset: Any) -> None:
    """Refuse a stream that the epoch has used up, so that nothing is left to measure."""
    if not isinstance(dataset, IterableDataset):
        return
    for _ in net.get_iterator(dataset, training=False):
        return
    raise ValueError(
        f"{callback!r} measures all training data after an epoch, but the stream "
        f"{type(dataset).__name__} can be read only once. Let its __iter__ return a new iterator "
        "each time. To stop by the running loss of a stream, write a callback that reads "
        'net.history[-1, "train_loss"].'
    )


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
    A check takes a forward pass over the training data only near the goal:

    - An epoch whose running training loss is more than 10 times the goal is not checked. This
      holds for networks that act in training as in evaluation, and not for those with dropout,
      batch norm, or code that asks for the mode; if the criterion takes the mean; and if the net
      has no `get_loss` or training step of its own. The loss could in theory fall that much
      within an epoch; training would then stop at the next epoch that is checked.
    - Otherwise, the samples with the largest losses are run first. If the sum of their losses
      shows that the goal is not reached, the others need not be run. This changes no result. It
      is done for criteria without negative losses.

    A net with a `get_loss` of its own may compute another loss than its criterion. The loss is
    then what its `get_loss` returns with ``training=False``, regularisers included. Let it add
    them only if `training` is true, to stop at the loss without them.

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

    _proof_: Proof | None = None

    def __init__(self, loss: float = 0.01, every: int = 1) -> None:
        self.loss = loss
        self.every = every

    def on_train_begin(self, net: NeuralNet, **kwargs: Any) -> None:
        """Check the parameters."""
        check_number("loss", self.loss)
        self.loss_, self._proof_ = math.nan, None
        super().on_train_begin(net, **kwargs)

    def on_train_end(self, net: NeuralNet, **kwargs: Any) -> None:
        """Forget the samples that prove that the goal is not reached."""
        self._proof_ = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_proof_": None}  # it holds training data

    def _reached(self, net: NeuralNet, dataset: Any) -> bool:
        if is_far(net, self.loss):
            return False
        trainer = getattr(net, "_epoch_trainer", OwnLoop)()  # nets of others have none
        found = trainer.training_loss(net, self.loss)
        if found is not None:
            self.loss_ = found if math.isfinite(found) else self.loss_
            return found <= self.loss
        network = training_network(net, dataset)
        if is_above(network, self.loss, self._proof_):
            return False
        self.loss_, self._proof_ = mean_loss_with_proof(network, self.loss)
        return self.loss_ <= self.loss

    def _goal(self) -> str:
        return f"a training loss of {self.loss:g}"


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

    Notes
    -----
    Nets that train together (`FleetTrainer`), and chains of linear layers, activations and
    dropout, take no pass over the training data while the mean gradient of the epoch's steps, and
    the gradient of the last step, are more than 100 times `tol`. This holds for the criteria and
    networks of the same rule for `StopAtLoss`, if the epoch leaves out no samples. The gradient
    could in theory fall that much within an epoch; training would then stop at the next epoch that
    is checked.

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
        """Check the parameters."""
        check_number("tol", self.tol)
        self.gradient_norm_ = math.nan
        super().on_train_begin(net, **kwargs)

    def _reached(self, net: NeuralNet, dataset: Any) -> bool:
        trainer = getattr(net, "_epoch_trainer", OwnLoop)()  # nets of others have none
        found = trainer.gradient_norm(net, self.tol)
        if found is None:
            found = gradient_norm(net, dataset)
        self.gradient_norm_ = found if math.isfinite(found) else self.gradient_norm_
        return found <= self.tol

    def _goal(self) -> str:
        return f"a gradient norm of {self.tol:g}"


def gradient_norm(net: NeuralNet, dataset: Any) -> float:
    """Compute the norm of the gradient of a net's objective on a whole data set."""
    parameters = [p for _, p in net.get_all_learnable_params() if p.requires_grad]
    sums = [torch.zeros_like(p) for p in parameters]
    loss = training_network(net, dataset).loss
    summed = getattr(net.criterion_, "reduction", "mean") == "sum"
    divisor = 0.0
    with borrowed(net.module_), torch.enable_grad():
        for X, y in map(unpack_data, net.get_iterator(dataset, training=False)):
            output = net.infer(X)
            objective = net.get_loss(output, y, X=X, training=True)
            # means of batches are weighted by their divisors
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
    """Compute the divisor of the mean over a batch."""
    divisors = loss.divisors(output, loss.check_target(output, target))
    return float(divisors.sum() if weight is None else weight.to(divisors) @ divisors)


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
