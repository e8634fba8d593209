"""A callback that averages the weights of a training, for any skorch net."""

from functools import partial
from typing import Any

import torch
from skorch import NeuralNet
from skorch.callbacks import Callback
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, update_bn

from relflat_sk._checks import check_probability, warn
from relflat_sk._network.batches import split_labels
from relflat_sk.training._skorch_net import check_start, epochs_before


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
        return {name: value for name, value in vars(self).items() if name != "_dataset"}

    def on_train_begin(self, net: NeuralNet, **kwargs: Any) -> None:
        """Check the parameters, and begin a new average."""
        check_start("start", self.start)
        if self.decay is not None:
            check_probability("decay", self.decay)
        self._first = len(net.history) + epochs_before(self.start, net.max_epochs)
        self.n_averaged_ = 0
        self._average: AveragedModel | None = None

    def on_batch_end(self, net: NeuralNet, training: bool = False, **kwargs: Any) -> None:
        """Average the weights after a step, if older ones count less."""
        # the history has the epoch of this step already
        if training and self.decay is not None and len(net.history) > self._first:
            self._update(net.module_)

    def on_epoch_begin(self, net: NeuralNet, dataset_train: Any = None, **kwargs: Any) -> None:
        """Keep the training data, which batch norms will need."""
        self._dataset = dataset_train

    def on_epoch_end(self, net: NeuralNet, **kwargs: Any) -> None:
        """Average the weights after an epoch, if all count alike."""
        if self.decay is None and len(net.history) > self._first:
            self._update(net.module_)

    def _update(self, module: nn.Module) -> None:
        """Add the weights of a network to the average."""
        if self._average is None:
            rule = None if self.decay is None else partial(_decay_average, self.decay)
            self._average = AveragedModel(module, avg_fn=rule)
        self._average.update_parameters(module)
        self.n_averaged_ += 1

    def on_train_end(self, net: NeuralNet, **kwargs: Any) -> None:
        """Give the net the average, with statistics of batch norms that suit it."""
        if self._average is None:
            warn(
                f"WeightAverage(start={self.start!r}) averaged no weights, because the training "
                f"ended after {len(net.history)} epochs. The net keeps its last weights. Choose "
                "an earlier start."
            )
            return
        averages = self._average.module.parameters()
        with torch.no_grad():
            for weight, average in zip(net.module_.parameters(), averages, strict=True):
                weight.copy_(average)
        update_bn(
            ([split_labels(batch)[0]] for batch in net.get_iterator(self._dataset)),
            _Inference(net),
        )
        del self._average, self._dataset


def _decay_average(decay: float, average: Tensor, weight: Tensor, n: Any) -> Tensor:
    """Add a weight to its average; torch's own function cannot be pickled."""
    return average.lerp(weight, 1 - decay)


class _Inference(nn.Module):
    """The network of a net, called as the net calls it, so that inputs may be dicts."""

    def __init__(self, net: NeuralNet) -> None:
        super().__init__()
        self.module = net.module_
        self._infer = net.infer

    def forward(self, X: Any) -> Any:
        """Run the net's module on a batch of inputs."""
        return self._infer(X)
