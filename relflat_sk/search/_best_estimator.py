"""Predict with the best estimator of a search."""

from typing import Any

from sklearn.utils import get_tags
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted

__all__ = ["BestEstimatorMixin"]


def _if_estimator_has(method: str) -> Any:
    """Make a method available if the search refits and its estimator has the method."""

    def _check(search: Any) -> bool:
        if not search.refit:
            raise AttributeError(
                f"{method} is not available in a search with refit=False, which keeps no "
                "estimator. Set refit=True and fit again."
            )
        getattr(getattr(search, "best_estimator_", search.estimator), method)
        return True

    return available_if(_check)


class BestEstimatorMixin:
    """Methods and attributes that a fitted search takes from its best estimator."""

    estimator: Any
    best_estimator_: Any

    def _best(self) -> Any:
        check_is_fitted(self, "best_estimator_")
        return self.best_estimator_

    def _from_best(self, name: str) -> Any:
        if not hasattr(self, "best_estimator_"):
            raise AttributeError(
                f"{type(self).__name__} has no {name} before it is fitted with refit=True."
            )
        return getattr(self.best_estimator_, name)

    @property
    def classes_(self) -> Any:
        """Class labels, of a classifier."""
        return self._from_best("classes_")

    @property
    def n_features_in_(self) -> int:
        """Number of features in the data that `fit` was given."""
        return int(self._from_best("n_features_in_"))

    @property
    def feature_names_in_(self) -> Any:
        """Names of the features in the data frame that `fit` was given."""
        return self._from_best("feature_names_in_")

    @_if_estimator_has("predict")  # type: ignore[untyped-decorator]
    def predict(self, X: Any) -> Any:
        """Predict with the flattest minimum.

        Parameters
        ----------
        X : array-like of shape (n, n_features)
            Samples, as the estimator takes them.

        Returns
        -------
        ndarray of shape (n,) or (n, n_outputs)
            Predicted labels or values.
        """
        return self._best().predict(X)

    @_if_estimator_has("predict_proba")  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any) -> Any:
        """Predict class probabilities with the flattest minimum.

        Parameters
        ----------
        X : array-like of shape (n, n_features)
            Samples, as the estimator takes them.

        Returns
        -------
        ndarray of shape (n, n_classes)
            Probabilities, in the order of `classes_`.
        """
        return self._best().predict_proba(X)

    @_if_estimator_has("predict_log_proba")  # type: ignore[untyped-decorator]
    def predict_log_proba(self, X: Any) -> Any:
        """Predict logarithms of class probabilities with the flattest minimum.

        Parameters
        ----------
        X : array-like of shape (n, n_features)
            Samples, as the estimator takes them.

        Returns
        -------
        ndarray of shape (n, n_classes)
            Natural logarithms of the probabilities, in the order of `classes_`.
        """
        return self._best().predict_log_proba(X)

    @_if_estimator_has("decision_function")  # type: ignore[untyped-decorator]
    def decision_function(self, X: Any) -> Any:
        """Compute the decision function of the flattest minimum.

        Parameters
        ----------
        X : array-like of shape (n, n_features)
            Samples, as the estimator takes them.

        Returns
        -------
        ndarray of shape (n,) or (n, n_classes)
            The estimator's decision function.
        """
        return self._best().decision_function(X)

    @_if_estimator_has("score")  # type: ignore[untyped-decorator]
    def score(self, X: Any, y: Any = None) -> float:
        """Score the flattest minimum with the estimator's own `score`.

        Parameters
        ----------
        X : array-like of shape (n, n_features)
            Samples, as the estimator takes them.
        y : array-like of shape (n,) or (n, n_outputs), optional
            True labels or values.

        Returns
        -------
        float
            Accuracy for classifiers, R2 for regressors, unless the estimator has another score.
        """
        return float(self._best().score(X, y))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()  # type: ignore[misc]
        inner = get_tags(self.estimator)
        tags.estimator_type = inner.estimator_type
        tags.classifier_tags = inner.classifier_tags
        tags.regressor_tags = inner.regressor_tags
        tags.target_tags = inner.target_tags
        tags.input_tags = inner.input_tags
        return tags
