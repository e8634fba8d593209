"""Flatness as a scikit-learn scorer."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sklearn import get_config
from sklearn.base import BaseEstimator
from sklearn.utils.metadata_routing import UNCHANGED
from sklearn.utils.validation import check_is_fitted
from skorch import NeuralNet
from skorch.callbacks import EpochScoring

from relflat_sk._checks import warn
from relflat_sk._models.network_of import describe, final_estimator, open_model
from relflat_sk._network.layers import Layer
from relflat_sk._network.network import Network
from relflat_sk.measures._api import relative_flatness
from relflat_sk.measures._measure_network import (
    OF_DATA,
    check_arguments,
    check_layers,
    find_measure,
    measure_network,
    name_of,
)
from relflat_sk.measures._minimum import ConstantComparison, compare_with_constant, find_objection
from relflat_sk.measures._scan import Measured

DATA = ("given", "train")
NON_MINIMUM = ("accept", "reject", "warn")

# measures that nets record at the end of fit, with the `flatness_normalize` that each needs
RECORDED = {"normalized_relative_flatness": True, "relative_flatness": False}


class FlatnessScorer(BaseEstimator):
    r"""Score a fitted model by minus its flatness, so that greater is flatter.

    Pass an instance as ``scoring=`` to any of scikit-learn's tools, alone or in a dict of
    scorers: `cross_validate`, `GridSearchCV`, `permutation_importance` and so on. It scores all
    models that `relative_flatness` measures, pipelines included, on the data that scikit-learn
    passes: in cross-validation, on the held-out fold.

    Flatness is meaningful only at a minimum of the loss. A network that predicts the same for
    every input is perfectly flat, so flatness alone would prefer dead and untrained networks.
    Therefore the scorer rejects models that nothing shows to have learned, neither their training's
    record nor their predictions, and models without any curvature, such as saturated networks.

    Parameters
    ----------
    measure : str or callable, default="relative_flatness"
        The measure's name, one of `get_measure_names`, or a function of model, X and y that
        returns a number which is small for good minima; see `measure`.
    layer : int, str, nn.Module, a list of these, or "all", default=-1
        Where to measure: position among the layers with a weight matrix (-1 is the last one),
        dotted module name, or the module itself. The values of a list of layers, or of "all", are
        added, as in the penalty. Compare scores of the same `layer` only.
    data : {"given", "train"}, default="given"
        "given" measures on the data that the scorer is called with. "train" takes the value that
        a `RelativeFlatnessRegularizedNet` recorded on its training data at the end of `fit`. The
        net's `flatness_layer` has to be `layer`, or has to contain the last layer if `layer` is -1,
        as "all" does; `flatness_normalize` has to match `measure`. A net that recorded another
        layer or measure has the score nan, with a `FlatnessWarning`.
    non_minimum : {"reject", "warn", "accept"}, default="reject"
        What to do with a model that is not at a minimum, or has no curvature. "reject" warns, and
        returns nan, which scikit-learn's searches rank last. "warn" warns, and scores the model
        like any other. "accept" scores it without a check. The training's record decides where
        there is one, else the data that the scorer is called with, see Notes. The warnings are of
        class `FlatnessWarning`; in a search, there is one, of the first such model.
    measure_params : dict, default=None
        Further arguments of the measure, such as ``{"batch_size": 256}``.

    See Also
    --------
    relative_flatness : The measure itself, with its sign as in the papers.
    flattest_within : Select the flattest of the candidates that score close to the best.

    Notes
    -----
    A model whose training recorded that it succeeded is at a minimum, however it predicts the data
    that the scorer is called with: also a model that has learned noise. The record is the loss and
    the score on the training data of a `RelativeFlatnessRegularizedNet`, the history of another
    skorch net, the loss curve or the final loss of scikit-learn's MLPs. Without a record, or if it
    shows no progress, a model counts as not at a minimum if

    - its mean loss or its flatness is not finite, or
    - neither its mean loss nor its score is better than that of the best constant prediction. The
      score is the accuracy, which must be above the majority's share by two standard errors, or
      the area under the ROC curve, above one half by two, or R2, which must be positive; or
    - its mean loss is no lower than half of that of the best constant prediction, and its
      training made no progress. Random initial weights can beat a constant by luck, but hardly
      by half.

    A model has no curvature if its flatness is less than a millionth of the loss of the best
    constant prediction, or less than that loss while its own loss is less than a millionth of it.
    With cross-entropy, curvature vanishes together with the loss: a saturated network, whose loss
    rounds to zero, would be the flattest of all. Mean absolute errors and other piecewise linear
    criteria have none either. At equal loss (``measure="comparable_flatness"``, or
    ``measure_params={"at_loss": 0.05}``) saturated networks are scored, and a network that reaches
    that loss at some temperature of its logits is at a minimum. One that does not has the score
    nan, with a warning.

    Training made progress if it lowered its own loss by more than 2%, and by more than the noise of
    batches: over the epochs of a skorch net's history, over the batches of a single epoch if they
    are shuffled, over the loss curve of scikit-learn's MLPs. Or if the first epoch's loss is above
    those of the second half of the epochs by more than ten times their scatter. A net whose weights
    were loaded has an empty history, and is scored if its loss is low enough.

    Without labels there is no check, and the score comes with a `FlatnessWarning`.

    Examples
    --------
    Score a grid search by accuracy and by flatness at once:

    >>> from sklearn.datasets import load_iris
    >>> from sklearn.linear_model import LogisticRegression
    >>> from sklearn.model_selection import GridSearchCV
    >>> X, y = load_iris(return_X_y=True)
    >>> search = GridSearchCV(
    ...     LogisticRegression(max_iter=1000),
    ...     {"C": [0.01, 1.0]},
    ...     scoring={"accuracy": "accuracy", "flatness": FlatnessScorer()},
    ...     refit="accuracy",
    ... ).fit(X, y)
    >>> strong, weak = search.cv_results_["mean_test_flatness"]  # regularisation
    >>> bool(weak < strong < 0)
    True

    A scorer can also be called directly. Linear regression has the flatness ``2 mean(|x|^2)
    |w|^2``, and the score is minus that:

    >>> from sklearn.linear_model import LinearRegression
    >>> X, y = [[1.0], [2.0]], [2.0, 4.0]
    >>> FlatnessScorer()(LinearRegression(fit_intercept=False).fit(X, y), X, y)
    -20.0
    """

    def __init__(
        self,
        measure: Any = "relative_flatness",
        *,
        layer: Layer | Sequence[Layer] = -1,
        data: str = "given",
        non_minimum: str = "reject",
        measure_params: Mapping[str, Any] | None = None,
    ) -> None:
        self.measure = measure
        self.layer = layer
        self.data = data
        self.non_minimum = non_minimum
        self.measure_params = measure_params

    def __call__(self, estimator: Any, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Score a fitted model."""
        self._check_parameters()
        opened, comparison = None, None
        if self.data == "train":
            flatness, comparison, reason = self._read_recorded(estimator)
        else:
            opened = self._measure(estimator, X, y, sample_weight)
            flatness, reason = opened[1].value, opened[1].reason
        if reason:
            name = describe(final_estimator(estimator))
            self._warn(f"the {name} cannot be scored: {reason}. Its score is nan.")
            return math.nan
        score = 0.0 - flatness  # which is never -0.0
        if self.non_minimum == "accept":
            return score
        if comparison is None or not comparison.is_known:
            network, measured = opened or self._measure(estimator, X, y, sample_weight)
            comparison = compare_with_constant(network, measured.passes)
        is_good = self._check_minimum(final_estimator(estimator), flatness, comparison)
        return score if is_good or self.non_minimum == "warn" else math.nan

    def _measure(
        self, estimator: Any, X: Any, y: Any, sample_weight: Any
    ) -> tuple[Network, Measured]:
        """Open the model with the data that the scorer is called with, and measure it."""
        params = dict(self.measure_params or {})
        of_data = {key: params.pop(key) for key in OF_DATA & params.keys()}
        check_arguments([self.measure], params)
        network = open_model(estimator, X, y, **of_data, sample_weight=sample_weight)
        check_layers([self.measure], self.layer)
        results = measure_network(network, [self.measure], self.layer, **params)
        total = sum(measured.value for measured in results.values())
        return network, replace(next(iter(results.values())), value=total)

    def _check_minimum(self, model: Any, flatness: float, comparison: ConstantComparison) -> bool:
        """Warn if the flatness of a model is no score, or may be none; return False for none."""
        name = describe(model)
        objection = find_objection(model, name_of(self.measure), flatness, comparison)
        if objection is not None:
            outcome = "its score is nan" if self.non_minimum == "reject" else "it is scored anyway"
            self._warn(f"the {name} {objection}. With non_minimum={self.non_minimum!r}, {outcome}.")
            return False
        if not comparison.is_known:
            missing = "y" if math.isnan(comparison.loss) else "the loss of a constant prediction"
            self._warn(
                f"without {missing}, the scorer cannot check whether the {name} is at a minimum. "
                'Pass y, or non_minimum="accept" if you know that it is.'
            )
        return True

    def _warn(self, message: str) -> None:
        """Warn of a model, in a search of the first one only."""
        warn(message, said=self.__dict__.setdefault("_said", set()))

    def _check_parameters(self) -> None:
        """Refuse bad parameters when the scorer is called, as scikit-learn's estimators do."""
        find_measure(self.measure)
        for name, known in {"data": DATA, "non_minimum": NON_MINIMUM}.items():
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"{name}={value!r}, expected one of {', '.join(known)}.")
        if not isinstance(self.measure_params, Mapping | None):
            raise ValueError(
                f"measure_params={self.measure_params!r}, expected None or a dict of "
                'arguments, such as {"batch_size": 256}.'
            )
        if self.data == "train" and (self.measure not in RECORDED or self.measure_params):
            raise ValueError(
                f'data="train" takes what was recorded in fit, {" or ".join(RECORDED)}, without '
                f'measure_params, got {self.measure!r} and {self.measure_params!r}. Use "given".'
            )

    def _read_recorded(self, estimator: Any) -> tuple[float, ConstantComparison | None, str]:
        """Return what a net recorded in fit: flatness, loss and score; or why it did not."""
        net = final_estimator(estimator)
        check_is_fitted(net)
        try:
            found: float = net.relative_flatness_
        except AttributeError as error:
            raise ValueError(
                f'data="train" needs a net that records its flatness in fit; the '
                f'{type(net).__name__} did not, or not so: {error} Use data="given".'
            ) from None
        expected = {"layer": self.layer, "normalize": RECORDED[self.measure]}
        # the net's parameters may have other values since fit
        recorded = {"layer": net._record.layer, "normalize": net._record.normalize}
        if self.layer == -1 != net._record.layer and net._record.at_last is not None:
            found, recorded["layer"] = net._record.at_last, -1
        reason = ""
        if expected != recorded:
            reason = (
                f"it recorded its flatness with {_listed(recorded)}, but the scorer asks for "
                f'{_listed(expected)}. Give the same to both, or measure with data="given"'
            )
        return float(found), getattr(net, "constant_comparison_", None), reason

    # -- metadata routing ----------------------------------------------------------------
    # scikit-learn generates these methods for `score`, but not for `__call__`

    def set_score_request(self, *, sample_weight: Any = UNCHANGED) -> "FlatnessScorer":
        """Request sample weights, or refuse them, where metadata routing is enabled.

        Parameters
        ----------
        sample_weight : bool, None or str
            True: pass them if there are any. False: never pass them. None: raise an error if
            there are any. A name: pass the metadata that the user gives under that name.

        Returns
        -------
        FlatnessScorer
            The scorer itself.

        Raises
        ------
        RuntimeError
            If metadata routing is not enabled.
        """
        if not get_config()["enable_metadata_routing"]:
            raise RuntimeError("call sklearn.set_config(enable_metadata_routing=True) first.")
        requests = self._get_metadata_request()
        if sample_weight is not UNCHANGED:
            requests.score.add_request(param="sample_weight", alias=sample_weight)
        self._metadata_request = requests
        return self

    def _get_metadata_request(self) -> Any:
        requests = super()._get_metadata_request()
        if "sample_weight" not in requests.score.requests:
            requests.score.add_request(param="sample_weight", alias=None)
        return requests

    def _accept_sample_weight(self) -> bool:
        # scikit-learn asks scorers in a dict, where metadata routing is off
        return True


def read_measure(measure: Any) -> FlatnessScorer:
    """Return a measure of a table of minima, such as a name, as a scorer that holds arguments."""
    if not isinstance(measure, FlatnessScorer):
        return FlatnessScorer(measure)
    measure._check_parameters()
    if (measure.data, measure.non_minimum) != ("given", "reject"):
        raise ValueError(
            f"{measure!r} cannot be the measure of a table of minima, which has its own rule for "
            "what is a minimum, and measures on the training data. Leave data and non_minimum out."
        )
    return measure


def _listed(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


PENALTY = "flatness_penalty"


def flatness_columns(net: NeuralNet) -> dict[str, float]:
    """Return the columns of flatness in a net's history, with the sign that makes small flat."""
    signs = {PENALTY: 1.0}
    for _, callback in getattr(net, "callbacks_", []):
        if isinstance(callback, EpochScoring) and isinstance(callback.scoring, FlatnessScorer):
            signs[callback.name_] = -1.0
        elif isinstance(callback, EpochScoring) and callback.scoring is relative_flatness:
            signs[callback.name_] = 1.0
    names = dict.fromkeys(name for epoch in net.history for name in epoch)
    return {name: signs[name] for name in names if name in signs}
