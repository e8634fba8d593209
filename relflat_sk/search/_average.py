"""The mean of several fitted estimators, as one of scikit-learn's."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from sklearn.base import is_classifier, is_regressor
from sklearn.ensemble import VotingClassifier, VotingRegressor
from sklearn.frozen import FrozenEstimator

from relflat_sk._models.network_of import describe, final_estimator, last_prefix


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
