"""skorch nets that are trained to be flat, as scikit-learn estimators."""

import re
from collections.abc import Callable
from inspect import cleandoc, signature
from typing import Any, TypeVar

import torch
from torch import nn

from relflat_sk.training._flat_net import FlatNet
from relflat_sk.training._mlp import MLP


class RelativeFlatnessRegularizedNet(FlatNet):
    r"""Train a network to a flat minimum: a skorch net with a flatness penalty.

    Each training step minimises

    .. math:: L + \lambda \, \frac{\kappa}{2 m}

    on its batch, where :math:`L` is the criterion, :math:`\lambda` the `flatness_weight`, and
    :math:`\kappa` the relative flatness at a layer with :math:`m` inputs ([1]_, Definition 3;
    [2]_). There is no second forward pass. A penalty at the last layer costs little; one at an
    earlier layer also differentiates the network behind that layer once more.

    The net follows the conventions of scikit-learn, and its criterion determines the task. With
    a classification loss it is a classifier (labels of any type, `classes_`, `predict_proba`),
    with a regression loss a regressor, and with a loss that `relflat_sk` does not know a plain
    skorch net.

    Parameters
    ----------
    module : type or nn.Module, default=MLP
        The class of the network. If its constructor has the arguments `n_features` or
        `n_outputs`, they are set from the data, unless you pass ``module__n_features``. An
        instance is copied, and every `fit` starts from its weights. `MLP` computes in float64
        for float64 data on the CPU, as scikit-learn's networks do, and in float32 otherwise.
        Other modules keep their dtype. Of a tuple, the criterion gets the first entry, of a
        mapping, such as an output of Hugging Face's models, the entry "logits". A criterion of
        your own that takes the whole mapping trains with ``flatness_weight=0``.
    criterion : type or nn.Module, default=torch.nn.CrossEntropyLoss
        The loss. `NLLLoss` takes probabilities from the module, as in skorch's classifiers.
    flatness_weight : float, default=0.1
        Weight of the penalty. With 0, training is that of a plain skorch net. A negative weight
        makes the network sharper, for studies; `flatness_clip` limits it alike. At an earlier
        layer, take a limit of 0.25 or less then: the network gets so sharp with the default that
        its loss may stay high.
    flatness_layer : int, str, sequence of these, or "all", default=-1
        The penalised layer: its position among the layers with a weight matrix, in the order
        of the forward pass, or its dotted name in the module. The penalties of several layers
        are added.
    flatness_normalize : bool, default=False
        Whether to measure features in units of their standard deviations.
    flatness_probes : int, default=1
        Number of random probes per sample for layers without a closed form, such as hidden
        layers.
    flatness_warmup : int, default=0
        Number of epochs in which the weight of the penalty grows linearly: with k, it is 1/k of
        `flatness_weight` in the first epoch after `flatness_start`, and all of it k - 1 later.
    flatness_clip : float or None, default=1.0
        Limit of the penalty in each step: the share of it that no step removes by the penalty's own
        gradient, whatever weight and learning rate. The penalty is also at most half of what the
        network has gained over a constant output; the notes of `RelativeFlatnessRegularizedNet`
        have the formula. It is scaled down, so that a large weight or learning rate does not end in
        a dead network, which is perfectly flat. None: no limit, as published.
    flatness_every : int, default=1
        Steps from one penalty to the next. With k, every k-th step has the penalty, k times as
        heavy, which is the same in the mean and takes less time.
    flatness_start : int or float, default=0
        The epoch after which the penalty begins, or the share of `max_epochs` if a float.
    random_state : int, RandomState or None, default=None
        Makes `fit` reproducible (initial weights, shuffling, dropout, probes), without changing
        torch's global random state. If None, `fit` draws from that global state. All threads of a
        process share torch's state, so nets that are fitted or measured in several threads wait
        for each other, but for those of a fleet; processes work at the same time.
    optimizer : type, default=torch.optim.Adam
        Class of the torch optimizer; any but LBFGS. Arguments are passed as ``optimizer__...``.
        Adam, AdamW and SGD get ``fused=True`` for weights in float32 or float64, unless you pass
        ``optimizer__fused=False`` or another choice of implementation, such as ``foreach``.
    lr : float, default=0.003
        Learning rate.
    max_epochs : int, default=30
        Number of passes over the training data; callbacks such as `StopAtLoss` may stop before.
    batch_size : int, default=32
        Number of samples per training step; -1 for all samples.
    iterator_train__shuffle : bool, default=True
        Whether to put the training samples into a new random order in each epoch, as
        scikit-learn's networks do and skorch does not. A sampler of your own, a stream, or a
        loader without such an argument determines the order itself. Validation and prediction
        keep the order.
    train_split : callable or None, default=None
        How to hold out validation data. Unlike in skorch, nothing is held out by default,
        because flatness is a property of a minimum on all data. Pass
        ``skorch.dataset.ValidSplit(5)`` to record `valid_loss`.
    classes : array-like of shape (n_classes,), optional
        All labels of a classifier, in the order of the outputs, as in skorch's classifiers: for
        data in a Dataset or loader, whose labels are positions in this list, and for a y that lacks
        some. By default, the sorted labels in y. scikit-learn's scores of probabilities need sorted
        classes; a `FlatnessWarning` tells if they are not.
    **skorch_arguments
        Any other argument of `skorch.NeuralNet`: `callbacks`, `device`, `verbose`,
        ``module__...``, ``optimizer__...``, ``criterion__...``.

    Attributes
    ----------
    relative_flatness_ : float
        Relative flatness on the training data at the end of `fit`, at `flatness_layer`: the sum
        over several layers, the normalised one if `flatness_normalize`. nan, with a warning, if
        it cannot be measured. It belongs to the weights at that time: once they change, for
        instance by `load_params`, reading it raises an AttributeError.
    constant_comparison_ : ConstantComparison
        Mean loss on the training data at the end of `fit`, with that of the best constant
        prediction; accuracy or R2 as well if the loss is no better. `FlatnessScorer` reads it.
    history : skorch.history.History
        Per epoch: `train_loss` (without penalty), `flatness_penalty` (as it was added),
        `flatness_clipped` (the mean share of the penalty that the limit took away), and with a
        `train_split` also `valid_loss` (without penalty).
    classes_ : ndarray of shape (n_classes,)
        The class labels of a classifier. After training on a Dataset, whose labels are class
        indices, the indices of the outputs: 0 and 1 for one logit. In callbacks, the net's data
        sets hold positions in it, and its methods and measures take and return these as well.
    n_features_in_ : int
        Number of input features.
    module_ : nn.Module
        The trained network.
    converged_ : bool
        Whether a callback `StopAtLoss` or `StopAtGradientNorm` reached its goal.

    Raises
    ------
    ValueError
        From `fit`, if a parameter is out of its range, the data do not fit the task, or the
        optimizer is LBFGS, which needs an objective that does not change between evaluations.
    LayerNotFoundError
        From `fit`, if `flatness_layer` names no layer.

    Warns
    -----
    FlatnessWarning
        From `fit`, if training made no step, diverged or lost most of what it had gained; if the
        criterion has no curvature, so that the penalty has no effect; if the net is perfectly flat
        and no better than a constant; or if the penalty kept it from learning: its loss is less
        than 5% below the best constant prediction's, the penalty was larger than the loss in some
        epoch, and `flatness_clip` is None.

    See Also
    --------
    RelativeFlatnessPenalty : The penalty alone, for plain torch loops.
    RelativeFlatnessPenaltyCV : Chooses layer and weight of the penalty by cross-validation.
    SharpnessAwareMixin : SAM and ASAM, alone or together with the penalty.
    StopAtLoss : Train until the training loss is small enough.
    WeightAverage : The average of the weights of a training.

    Notes
    -----
    With the limit `flatness_clip`, the penalty :math:`P = \lambda \sum \kappa / (2 m)` of the
    layers `flatness_layer` is multiplied in each step by

    .. math:: \min\Bigl(\frac{L_0 - L}{2 R},\; \frac{1}{1 + r \rho^2 R / c}\Bigr) ,
        \qquad R = \max(|P|, \overline{|P|}) ,

    where :math:`c` is `flatness_clip`, :math:`L_0` the loss of the network's mean output in the
    batch, :math:`r` the rate at which training moves the weights per norm of the gradient, and
    :math:`\rho` the mean of :math:`\|\nabla P\| / |P|`. A network that has learned nothing gets no
    penalty. No step removes more than the share :math:`c` of the penalty, to first order, which is
    :math:`c` times Polyak's step; a larger weight always removes more, and at low learning rates,
    this is no limit. :math:`R` is at least the moving average of the penalty over about 30 steps,
    so that batches with a small penalty are not scaled up. Norms are those over all parameters.
    They take two backward passes, in the first 8 steps and in every 8th step; the last ten
    measurements or so count. The criterion is called
    once more in each step, for the mean output.

    References
    ----------
    .. [1] Petzka et al., "Relative Flatness and Generalization", NeurIPS 2021.
    .. [2] Adilova et al., "FAM: Relative Flatness Aware Minimization", TAG-ML 2023.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> net = RelativeFlatnessRegularizedNet(flatness_weight=1.0, verbose=0, random_state=0)
    >>> net.fit(X, y).score(X, y) > 0.9
    True
    """

    def __init__(  # noqa: PLR0913
        self,
        module: Any = MLP,
        *,
        criterion: Any = nn.CrossEntropyLoss,
        flatness_weight: float = 0.1,
        flatness_layer: Any = -1,
        flatness_normalize: bool = False,
        flatness_probes: int = 1,
        flatness_warmup: int = 0,
        flatness_clip: float | None = 1.0,
        flatness_every: int = 1,
        flatness_start: float = 0,
        random_state: Any = None,
        optimizer: Any = torch.optim.Adam,
        lr: float = 0.003,
        max_epochs: int = 30,
        batch_size: int = 32,
        iterator_train__shuffle: bool = True,
        train_split: Any = None,
        classes: Any = None,
        **skorch_arguments: Any,
    ) -> None:
        self.flatness_weight = flatness_weight
        self.flatness_layer = flatness_layer
        self.flatness_normalize = flatness_normalize
        self.flatness_probes = flatness_probes
        self.flatness_warmup = flatness_warmup
        self.flatness_clip = flatness_clip
        self.flatness_every = flatness_every
        self.flatness_start = flatness_start
        self.random_state = random_state
        self.classes = classes
        super().__init__(
            module,
            criterion,
            optimizer=optimizer,
            lr=lr,
            max_epochs=max_epochs,
            batch_size=batch_size,
            iterator_train__shuffle=iterator_train__shuffle,
            train_split=train_split,
            **skorch_arguments,
        )


_Net = TypeVar("_Net", bound=type[RelativeFlatnessRegularizedNet])


def _with_defaults(**defaults: Any) -> Callable[..., None]:
    """Make a constructor of the net with other defaults, which its signature shows."""
    base = signature(RelativeFlatnessRegularizedNet.__init__)

    def init(self: Any, module: Any = MLP, **arguments: Any) -> None:
        RelativeFlatnessRegularizedNet.__init__(self, module, **(defaults | arguments))

    shown = [p.replace(default=defaults.get(p.name, p.default)) for p in base.parameters.values()]
    vars(init).update(__signature__=base.replace(parameters=shown))
    return init


def _entries(doc: str, title: str) -> dict[str, str]:
    """Split a section of a docstring into its entries by their names."""
    section = re.search(rf"^{title}\n-+\n(.*?)(?=\n\n|\Z)", doc, re.DOTALL | re.MULTILINE)
    entries = re.split(r"\n(?=\S)", section[1]) if section else []
    return {re.split(r"\s", entry)[0]: entry for entry in entries}


def _documented(net: _Net) -> _Net:
    """Add the parameters and attributes of the net that a docstring does not list itself."""
    if net.__doc__ is None or RelativeFlatnessRegularizedNet.__doc__ is None:
        return net  # under python -OO
    doc, of_base = cleandoc(net.__doc__), cleandoc(RelativeFlatnessRegularizedNet.__doc__)
    start, end = doc.index("Parameters\n"), doc.index("See Also\n")
    sections = []
    for title in ("Parameters", "Attributes"):
        entries = _entries(of_base, title) | _entries(doc, title)
        if net._fixed_task == "regression":
            entries = {name: text for name, text in entries.items() if name != "classes_"}
        sections.append("\n".join([title, "-" * len(title), *entries.values()]))
    net.__doc__ = doc[:start] + "\n\n".join(sections) + "\n\n" + doc[end:]
    return net


@_documented
class RelativeFlatnessRegularizedClassifier(RelativeFlatnessRegularizedNet):
    """Train a classifier with one output per class to a flat minimum.

    A skorch net and a classifier of scikit-learn, whose loss includes the relative flatness of its
    last layer. It is `RelativeFlatnessRegularizedNet` with its task fixed to classification. A
    criterion that `relflat_sk` does not know gets class indices as targets.

    Parameters
    ----------
    module : type or nn.Module, default=MLP
        The network's class, or an instance to copy. Ends in logits, one per class.
    criterion : type or nn.Module, default=torch.nn.CrossEntropyLoss
        A classification loss.

    See Also
    --------
    RelativeFlatnessRegularizedNet : The net whose criterion determines the task.
    RelativeFlatnessRegularizedBinaryClassifier : One logit for two classes; multi-label tasks.
    RelativeFlatnessPenaltyCV : Chooses layer and weight of the penalty by cross-validation.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> net = RelativeFlatnessRegularizedClassifier(verbose=0, random_state=0).fit(X, y)
    >>> net.predict_proba(X).shape
    (150, 3)
    """

    _fixed_task = "classification"


@_documented
class RelativeFlatnessRegularizedBinaryClassifier(RelativeFlatnessRegularizedNet):
    """Train a classifier with one logit for two classes to a flat minimum.

    A skorch net and a classifier of scikit-learn, whose loss includes the relative flatness of its
    last layer. It is `RelativeFlatnessRegularizedNet` with its task fixed to binary classification.
    Labels may be of any type. With one 0/1 column of y per label, it solves multi-label tasks.

    Parameters
    ----------
    module : type or nn.Module, default=MLP
        The network's class, or an instance to copy. Ends in one logit, or one per label.
    criterion : type or nn.Module, default=torch.nn.BCEWithLogitsLoss
        A loss for two classes.

    See Also
    --------
    RelativeFlatnessRegularizedNet : The net whose criterion determines the task.
    RelativeFlatnessRegularizedClassifier : One output per class.
    RelativeFlatnessPenaltyCV : Chooses layer and weight of the penalty by cross-validation.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.datasets import load_breast_cancer
    >>> from sklearn.preprocessing import scale
    >>> X, y = load_breast_cancer(return_X_y=True)
    >>> labels = np.array(["malignant", "benign"])[y]
    >>> net = RelativeFlatnessRegularizedBinaryClassifier(verbose=0, random_state=0)
    >>> net.fit(scale(X), labels).predict(scale(X)[:2]).tolist()
    ['malignant', 'malignant']
    """

    _fixed_task = "binary"
    __init__ = _with_defaults(criterion=nn.BCEWithLogitsLoss)


@_documented
class RelativeFlatnessRegularizedRegressor(RelativeFlatnessRegularizedNet):
    """Train a regressor with one or more outputs to a flat minimum.

    A skorch net and a regressor of scikit-learn, whose loss includes the relative flatness of its
    last layer. It is `RelativeFlatnessRegularizedNet` with its task fixed to regression. Scale the
    target, for loss and flatness are in its squared unit.

    Parameters
    ----------
    module : type or nn.Module, default=MLP
        The network's class, or an instance to copy. Ends in one output per column of y.
    criterion : type or nn.Module, default=torch.nn.MSELoss
        A regression loss.
    lr : float, default=0.01
        Learning rate. Numbers take larger steps and more epochs to fit than classes.
    max_epochs : int, default=50
        Number of passes over the training data.

    See Also
    --------
    RelativeFlatnessRegularizedNet : The net whose criterion determines the task.
    RelativeFlatnessPenaltyCV : Chooses layer and weight of the penalty by cross-validation.
    sklearn.compose.TransformedTargetRegressor : Scales the target.

    Examples
    --------
    >>> import numpy as np
    >>> X = np.linspace(-1, 1, 200).reshape(-1, 1)
    >>> net = RelativeFlatnessRegularizedRegressor(verbose=0, random_state=0)
    >>> net.fit(X, X.ravel() ** 2).score(X, X.ravel() ** 2) > 0.9
    True
    """

    _fixed_task = "regression"
    __init__ = _with_defaults(criterion=nn.MSELoss, lr=0.01, max_epochs=50)
