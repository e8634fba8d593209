"""skorch nets that are trained to be flat, as scikit-learn estimators."""

from typing import Any

import torch
from torch import nn

from relflat_sk.training._estimator import EstimatorNet
from relflat_sk.training._mlp import MLP

__all__ = [
    "RelativeFlatnessRegularizedBinaryClassifier",
    "RelativeFlatnessRegularizedClassifier",
    "RelativeFlatnessRegularizedNet",
    "RelativeFlatnessRegularizedRegressor",
]


class RelativeFlatnessRegularizedNet(EstimatorNet):
    r"""A skorch net that minimises its loss plus the price of not being flat.

    Each training step minimises ``criterion + flatness_weight * kappa / (2 m)``, where
    :math:`\kappa` is the relative flatness of the batch at a layer with `m` inputs. At the
    last layer it costs little; there is no second forward pass.

    The criterion decides the task: with a classification loss the net is a scikit-learn
    classifier (labels of any type, `classes_`, `predict_proba`), with a regression loss a
    regressor, with a loss that `relflat_sk` does not know a plain skorch net.

    Parameters
    ----------
    module : type or nn.Module, default=MLP
        Class of the network. If its constructor has arguments `n_features` or `n_outputs`
        that are not given as `module__n_features`, they are set from the data. An instance
        is copied, so that every `fit` starts from its weights. `MLP`
        computes in float64 for float64 data on the CPU, as scikit-learn's networks do, and in
        float32 otherwise; other modules keep the dtype they are made with.
    criterion : type or nn.Module, default=torch.nn.CrossEntropyLoss
        The loss. As in skorch's classifiers, `NLLLoss` expects a module that puts out
        probabilities.
    flatness_weight : float, default=0.1
        Weight of the penalty; 0 trains as without it.
    flatness_layer : int, str, sequence of these, or "all", default=-1
        Where flatness is measured: position among the layers with a weight matrix in
        forward order, or dotted module name. The penalties of several layers add.
    flatness_normalize : bool, default=False
        Measure features in units of their standard deviation.
    flatness_probes : int, default=1
        Random probes per sample where there is no closed form, as at earlier layers.
    flatness_warmup : int, default=0
        Epochs over which the weight of the penalty grows linearly to `flatness_weight`: with
        k, the first has 1/k of it, and from epoch k on all of it counts. With large weights
        also clip gradients (``callbacks=[skorch.callbacks.GradientNormClipping(1.0)]``).
    random_state : int, RandomState or None, default=None
        Makes `fit` reproducible (initial weights, shuffling, dropout, probes) and leaves
        torch's global random state alone. With None, that global state is used.
    optimizer : type, default=torch.optim.Adam
    lr : float, default=0.01
    max_epochs : int, default=50
    batch_size : int, default=32
    train_split : callable or None, default=None
        Unlike in skorch, nothing is held out by default: flatness is a property of a
        minimum on all the data. Pass ``skorch.dataset.ValidSplit(5)`` for `valid_loss`.
    **skorch_arguments
        Any other argument of `skorch.NeuralNet`: `callbacks`, `device`, `verbose`,
        ``module__...``, ``optimizer__...``, ``criterion__...``.

    Attributes
    ----------
    relative_flatness_ : float
        Relative flatness on the training data at the end of `fit`, at `flatness_layer`
        (the sum over layers if there are several); normalised if `flatness_normalize`.
    history : skorch.history.History
        Per epoch: `train_loss` without the penalty, `flatness_penalty` as it was added to
        it, `valid_loss` (without penalty) where there is a `train_split`.
    classes_ : array of shape (n_classes,)
        Of a classifier.
    n_features_in_ : int
    module_ : nn.Module
        The trained network.
    converged_ : bool
        Whether a `StopAtLoss` or `StopAtGradientNorm` callback reached its goal.

    Raises
    ------
    ValueError
        From `fit`, if an argument is out of its range, the data do not fit the task, or the
        optimizer is LBFGS and there is a penalty, which is no fixed function.
    LayerNotFoundError
        From `fit`, if there is no such layer.

    References
    ----------
    .. [1] H. Petzka et al., "Relative Flatness and Generalization", NeurIPS 2021.
    .. [2] L. Adilova et al., "FAM: Relative Flatness Aware Minimization", TAG-ML 2023.

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
        random_state: Any = None,
        optimizer: Any = torch.optim.Adam,
        lr: float = 0.01,
        max_epochs: int = 50,
        batch_size: int = 32,
        train_split: Any = None,
        **skorch_arguments: Any,
    ) -> None:
        self.flatness_weight = flatness_weight
        self.flatness_layer = flatness_layer
        self.flatness_normalize = flatness_normalize
        self.flatness_probes = flatness_probes
        self.flatness_warmup = flatness_warmup
        self.random_state = random_state
        super().__init__(
            module,
            criterion,
            optimizer=optimizer,
            lr=lr,
            max_epochs=max_epochs,
            batch_size=batch_size,
            train_split=train_split,
            **skorch_arguments,
        )


class RelativeFlatnessRegularizedClassifier(RelativeFlatnessRegularizedNet):
    """A classifier with one output per class, trained to be flat.

    `RelativeFlatnessRegularizedNet` with the task fixed: see there for the parameters.
    A criterion that `relflat_sk` does not know is taken as a classification loss, with
    class indices as targets.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> net = RelativeFlatnessRegularizedClassifier(verbose=0, random_state=0).fit(X, y)
    >>> net.predict_proba(X).shape
    (150, 3)
    """

    _fixed_task = "classification"


class RelativeFlatnessRegularizedBinaryClassifier(RelativeFlatnessRegularizedNet):
    """A classifier with one logit for two classes, trained to be flat.

    `RelativeFlatnessRegularizedNet` with the task fixed: see there for the parameters.
    Labels may be of any type; with a 0/1 column per label it does multi-label tasks.

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

    def __init__(
        self, module: Any = MLP, *, criterion: Any = nn.BCEWithLogitsLoss, **arguments: Any
    ) -> None:
        super().__init__(module, criterion=criterion, **arguments)


class RelativeFlatnessRegularizedRegressor(RelativeFlatnessRegularizedNet):
    """A regressor of one or more outputs, trained to be flat.

    `RelativeFlatnessRegularizedNet` with the task fixed: see there for the parameters.

    Examples
    --------
    >>> import numpy as np
    >>> X = np.linspace(-1, 1, 200).reshape(-1, 1)
    >>> net = RelativeFlatnessRegularizedRegressor(verbose=0, random_state=0)
    >>> net.fit(X, X.ravel() ** 2).score(X, X.ravel() ** 2) > 0.9
    True
    """

    _fixed_task = "regression"

    def __init__(self, module: Any = MLP, *, criterion: Any = nn.MSELoss, **arguments: Any) -> None:
        super().__init__(module, criterion=criterion, **arguments)
