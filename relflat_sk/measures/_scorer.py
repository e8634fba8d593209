"""Flatness as a scikit-learn scorer."""

import math
import warnings
from collections.abc import Mapping
from typing import Any

from sklearn import get_config
from sklearn.base import BaseEstimator
from sklearn.utils.metadata_routing import UNCHANGED
from sklearn.utils.validation import check_is_fitted
from skorch import NeuralNet

from relflat_sk._models import final_estimator
from relflat_sk._network import Layer
from relflat_sk.exceptions import FlatnessWarning
from relflat_sk.measures._api import evaluate, get_measure_names

__all__ = ["FlatnessScorer"]

DATA = ("given", "train")
AT_MINIMUM = ("ignore", "reject", "warn")

# Measures that nets record at the end of fit -> their `flatness_normalize` then
RECORDED = {"normalized_relative_flatness": True, "relative_flatness": False}

# How far below the best constant prediction's loss a model's has to be, as a share of it:
# by more than float32 rounding (a constant network that knows the class frequencies is
# equal to the best constant but for that). Random initial weights get up to 15 % below by
# luck, in one case of four on small data sets; nobody gets to half by luck.
_ROUNDING = 1e-5
_LUCK = 0.5
# Least share by which training has to lower its own loss, to be more than rounding.
_PROGRESS = 1e-3


class FlatnessScorer(BaseEstimator):
    r"""Score a fitted model by minus its flatness: greater is flatter.

    Takes the place of ``scoring=`` wherever scikit-learn has one, alone or in a dict of
    scorers, for all models that `relative_flatness` takes. The scorer sees the data that
    scikit-learn hands it, which in cross-validation is the held-out fold.

    A flatness says something about a model at a minimum of its loss. A network that
    predicts a constant is perfectly flat, so that flatness alone would prefer dead and
    untrained networks; therefore models whose loss is no better than a constant
    prediction's are not scored.

    Parameters
    ----------
    measure : str, default="relative_flatness"
        One of `get_measure_names`.
    layer : int, str or nn.Module, default=-1
        Where to measure, see `relative_flatness`.
    data : {"given", "train"}, default="given"
        "given" measures on the data handed in. "train" takes the value that a
        `RelativeFlatnessRegularizedNet` recorded on its own training data at the end of
        `fit`; its `flatness_layer` has to be `layer`.
    at_minimum : {"reject", "warn", "ignore"}, default="reject"
        What to do with a model that is at no minimum: score it nan with a
        `FlatnessWarning`, which ranks it last in scikit-learn's searches, score it all the
        same with a `FlatnessWarning`, or without any check. With `data="train"` too, the
        check is made on the data handed in.
    measure_params : dict, default=None
        Further arguments of the measure, such as ``{"batch_size": 256}``.

    See Also
    --------
    relative_flatness : The measure itself, with its sign as in the papers.

    Notes
    -----
    A model counts as at no minimum if its mean loss on the data handed in

    - is not finite, or
    - is no better than that of the best constant prediction on the same data, or
    - is no better than half of it, and the model is a skorch net that made no progress: its
      history is empty, or its last epoch's training loss is no lower than its first's.
      Initial weights are better than a constant by luck, but not by so much.

    Without labels nothing can be checked: the score comes with a `FlatnessWarning`.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklearn.linear_model import LogisticRegression
    >>> from sklearn.model_selection import cross_val_score
    >>> X, y = load_iris(return_X_y=True)
    >>> scores = cross_val_score(LogisticRegression(max_iter=500), X, y, scoring=FlatnessScorer())
    >>> [bool(score < 0) for score in scores]
    [True, True, True, True, True]

    Linear regression has the flatness ``2 mean(|x|^2) |w|^2``:

    >>> from sklearn.linear_model import LinearRegression
    >>> X, y = [[1.0], [2.0]], [2.0, 4.0]
    >>> FlatnessScorer()(LinearRegression(fit_intercept=False).fit(X, y), X, y)
    -20.0
    """

    def __init__(
        self,
        measure: str = "relative_flatness",
        *,
        layer: Layer = -1,
        data: str = "given",
        at_minimum: str = "reject",
        measure_params: Mapping[str, Any] | None = None,
    ) -> None:
        self.measure = measure
        self.layer = layer
        self.data = data
        self.at_minimum = at_minimum
        self.measure_params = measure_params

    def __call__(self, estimator: Any, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Score a fitted model.

        Parameters
        ----------
        estimator : fitted estimator
            See `relative_flatness` for what works.
        X : array-like of shape (n, ...)
            As the estimator takes it.
        y : array-like of shape (n, ...), default=None
            Labels or targets, as in fit.
        sample_weight : array-like of shape (n,), default=None
            Weight of each sample in the mean loss whose flatness is measured; with
            `data="train"` it weighs only in the check.

        Returns
        -------
        float
            Minus the flatness, in the unit of the loss; nan for a rejected model.

        Raises
        ------
        ValueError
            If an argument of the scorer or the data are not as expected, or there is no
            recorded value of that measure and layer.
        TypeError
            If there is no network in the estimator.
        sklearn.exceptions.NotFittedError
            If the estimator is not fitted.
        """
        self._check_parameters()
        recorded = self._recorded(estimator) if self.data == "train" else None
        checked = self.at_minimum != "ignore"
        if recorded is not None and not checked:
            return 0.0 - recorded
        found = evaluate(
            self.measure,
            estimator,
            X,
            y,
            layer=self.layer,
            sample_weight=sample_weight,
            **(self.measure_params or {}),
        )
        value = found.value if recorded is None else recorded
        if not checked:
            return 0.0 - value
        model = final_estimator(estimator)
        constant_risk = found.constant_risk()
        if math.isnan(constant_risk):
            _warn(
                f"without y nobody can tell whether the {type(model).__name__} is at a minimum "
                'of its loss. Pass y, or at_minimum="ignore" if you know that it is.'
            )
            return 0.0 - value
        objection = _objection(value, found.risk, constant_risk, _made_no_progress(model))
        if objection is None:
            return 0.0 - value
        outcome = "its score is nan" if self.at_minimum == "reject" else "it is scored anyway"
        _warn(
            f"the {type(model).__name__} is at no minimum of its loss, where flatness would "
            f"mean something: {objection}. With at_minimum={self.at_minimum!r}, {outcome}."
        )
        return math.nan if self.at_minimum == "reject" else 0.0 - value

    def _check_parameters(self) -> None:
        choices = {
            "measure": get_measure_names(),
            "data": DATA,
            "at_minimum": AT_MINIMUM,
        }
        for name, known in choices.items():
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
                'data="train" takes the value recorded in fit, which is that of one of '
                f"{', '.join(RECORDED)}, without measure_params; got {self.measure!r} and "
                f'{self.measure_params!r}. Use data="given" with the training data.'
            )

    def _recorded(self, estimator: Any) -> float:
        """Take the value a net recorded in fit, if it is what is asked for."""
        net = final_estimator(estimator)
        check_is_fitted(net)
        if not hasattr(net, "relative_flatness_"):
            raise ValueError(
                f'data="train" needs a net that records its flatness in fit, such as '
                f"RelativeFlatnessRegularizedNet; the {type(net).__name__} did not. Use "
                'data="given".'
            )
        asked = {"layer": self.layer, "normalize": RECORDED[self.measure]}
        there = {"layer": net.flatness_layer, "normalize": net.flatness_normalize}
        if asked != there:
            raise ValueError(
                f"the {type(net).__name__} recorded its flatness with {_listed(there)}, but "
                f"the scorer asks for {_listed(asked)}. Give the same layer and measure to "
                "both."
            )
        return float(net.relative_flatness_)

    # -- metadata routing ----------------------------------------------------------------
    # scikit-learn generates these for methods named score, not for __call__

    def set_score_request(self, *, sample_weight: Any = UNCHANGED) -> "FlatnessScorer":
        """Say whether the scorer wants sample weights, where metadata routing is enabled.

        Parameters
        ----------
        sample_weight : bool, None or str
            True: pass them if there are any; False: never; None: raise if there are any;
            a name: pass what the user gives under that name.

        Returns
        -------
        self

        Raises
        ------
        RuntimeError
            If metadata routing is not enabled.
        """
        if not get_config()["enable_metadata_routing"]:
            raise RuntimeError(
                "set_score_request takes effect with metadata routing only: call "
                "sklearn.set_config(enable_metadata_routing=True) first."
            )
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
        # asked by scikit-learn of scorers in a dict, where metadata routing is off
        return True


def _objection(
    value: float, risk: float, constant_risk: float, made_no_progress: bool
) -> str | None:
    """Say why a model's flatness means nothing, None if it does."""
    if not (math.isfinite(risk) and math.isfinite(value)):
        return f"its mean loss is {risk:.3g}, its flatness {value:.3g}; has training diverged?"
    loss = f"its mean loss of {risk:.6g}"
    constant = f"the best constant prediction's, {constant_risk:.6g}"
    if risk >= constant_risk - _ROUNDING * abs(constant_risk):
        return f"{loss} is no better than {constant}"
    if made_no_progress and risk >= constant_risk - _LUCK * abs(constant_risk):
        return f"its training made no progress, and {loss} is little better than {constant}"
    return None


def _made_no_progress(model: Any) -> bool:
    """Whether a model's own record shows that training has not lowered its loss."""
    if not isinstance(model, NeuralNet):
        return False
    epochs = [epoch["train_loss"] for epoch in model.history if "train_loss" in epoch]
    if len(epochs) < 2:  # one epoch shows no progress, nor the lack of it
        return not model.history
    return not epochs[-1] < epochs[0] - _PROGRESS * abs(epochs[0])


def _listed(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def _warn(message: str) -> None:
    warnings.warn(message, FlatnessWarning, stacklevel=3)
