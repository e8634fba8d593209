"""The mean of several fitted estimators, as one of scikit-learn's."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from sklearn.base import is_classifier, is_regressor
from sklearn.ensemble import VotingClassifier, VotingRegressor
from sklearn.frozen import FrozenEstimator
from torch import Tensor, as_tensor

from relflat_sk._models.network_of import describe, final_estimator, last_prefix

# how many training inputs get noise, and how much of it, in standard deviations of each feature
N_NOISY, NOISE = 2000, 0.6


class _MeanRegressor(VotingRegressor):
    """Averages predictions of any shape; VotingRegressor takes those of one target."""

    def predict(self, X: Any) -> Any:
        """Average the predictions of the members."""
        return np.mean([member.predict(X) for member in self.estimators_], axis=0)


def has_mean(estimator: Any, y: Any = None) -> bool:
    """Return whether networks trained by an estimator predict what their mean predicts alone.

    A threshold of probabilities is no part of a mean, and several labels of a sample have none.
    """
    if is_regressor(estimator):
        return True
    if not (is_classifier(estimator) and hasattr(estimator, "predict_proba")):
        return False
    params = estimator.get_params()
    steps = last_prefix(estimator).split("__")
    prefixes = ["__".join([*steps[:i], ""]) for i in range(len(steps))]
    limits = {str(params.get(f"{prefix}threshold", "auto")) for prefix in prefixes}
    shape = y.shape if hasattr(y, "shape") else np.asarray(y).shape
    return limits <= {"auto", "0.5"} and (len(shape) < 2 or shape[1] < 2)


def average(estimators: Mapping[str, Any], y: Any) -> Any:
    """Return fitted estimators, with their names, as one that averages their predictions."""
    if not estimators:
        raise ValueError(
            "the networks of earlier sessions have no weights that can be read. Give the search "
            "an artifact_store before it trains."
        )
    members = [(name, FrozenEstimator(estimator)) for name, estimator in estimators.items()]
    for estimator in estimators.values():
        is_multilabel = getattr(final_estimator(estimator), "multilabel_", False)
        # a net that was fitted on a dataset or a loader has not seen which classes there are
        has_classes = is_regressor(estimator) or hasattr(estimator, "classes_")
        if is_multilabel or not (has_classes and has_mean(estimator, y)):
            raise ValueError(
                "an ensemble averages probabilities of single labels without a threshold, or "
                f"predictions of regressors, and {describe(estimator)} has none here."
            )
    first = next(iter(estimators.values()))
    if is_regressor(first):
        return _MeanRegressor(members).fit(None, [0.0])  # frozen members learn nothing
    ensemble = VotingClassifier(members, voting="soft").fit(None, first.classes_)
    classes = [estimator.classes_ for estimator in estimators.values()]
    if not all(np.array_equal(ensemble.classes_, of_member) for of_member in classes):
        raise ValueError(
            "an ensemble averages probabilities of the same sorted classes, and some candidates "
            "have others, or were trained on data that lack a class."
        )
    return ensemble


def check_nearest(estimator: Any, X: Any, y: Any) -> None:
    """Refuse what has no network that is nearest to the mean on noisy inputs."""
    if not has_mean(estimator, y):
        raise ValueError(
            "refit='nearest' needs probabilities of single labels without a threshold, or a "
            f"regressor, and got {describe(estimator)}. Set refit=True for the flattest."
        )
    if isinstance(X, Tensor):
        is_float = X.is_floating_point()
    elif isinstance(X, pd.DataFrame):
        is_float = all(map(pd.api.types.is_float_dtype, X.dtypes))
    else:
        is_float = isinstance(X, np.ndarray) and X.dtype.kind == "f"
    if not is_float:
        of_type = f" of {X.dtype}" if hasattr(X, "dtype") else ""
        raise ValueError(
            "refit='nearest' adds noise to X: it takes an array, a tensor or a data frame of "
            f"floats, got {type(X).__name__}{of_type}. Set refit='mean', or convert quantities."
        )


def add_noise(X: Any, seed: int) -> Any:
    """Draw rows of inputs with replacement, and add noise to them."""
    rng = np.random.default_rng(seed)
    rows = getattr(X, "iloc", X)[rng.integers(len(X), size=N_NOISY)]
    is_tensor = isinstance(rows, Tensor)
    values = rows.double().numpy(force=True) if is_tensor else np.asarray(rows, dtype=float)
    noise = NOISE * np.nanstd(values, axis=0) * rng.standard_normal(values.shape)
    if is_tensor:
        return rows + as_tensor(noise).to(rows)
    return (rows + noise).astype(rows.dtypes if hasattr(rows, "dtypes") else rows.dtype)


def nearest(mean: Any, X: Any) -> int:
    """Return the trial in a mean that predicts most like it; of equal ones, the first."""
    expected = mean.predict(X)

    def distance(name: str) -> Any:
        predicted = mean.named_estimators_[name].predict(X)
        if is_regressor(mean):
            return np.mean((predicted - expected) ** 2)
        return np.mean(predicted != expected)

    return int(min(mean.named_estimators_, key=distance).removeprefix("trial"))
