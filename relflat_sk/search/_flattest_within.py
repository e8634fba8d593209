"""Choose among the candidates of a scikit-learn search by score and flatness together."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relflat_sk._checks import is_number
from relflat_sk._warnings import warn

__all__ = ["flattest_within"]

ROUNDING = 1e-12  # relative; far above float64's epsilon, far below any real difference


def flattest_within(
    tolerance: float,
    score: str = "mean_test_score",
    flatness: str = "mean_test_flatness",
) -> "FlattestWithin":
    """Make a rule for ``GridSearchCV(refit=...)``: choose the flattest of the good candidates.

    A candidate is good if its score is at most `tolerance` below the best score. The rule works
    with every search of scikit-learn that takes a callable `refit` and several scorers, one of
    them a `FlatnessScorer`.

    Parameters
    ----------
    tolerance : float
        How far below the best score a candidate may be, in the unit of the score: 0.01 is
        one point of accuracy. With 0, flatness decides only between equal scores.
    score : str, default="mean_test_score"
        The column of ``cv_results_`` with the score; greater is better. With
        ``scoring={"accuracy": ...}`` its name is ``"mean_test_accuracy"``.
    flatness : str, default="mean_test_flatness"
        The column with the score of a `FlatnessScorer`, minus the flatness: greater is flatter.

    Returns
    -------
    FlattestWithin
        A callable from ``cv_results_`` to the index of the chosen candidate. It can be pickled,
        copied and compared.

    Raises
    ------
    TypeError
        If `tolerance` is not a real number.
    ValueError
        If `tolerance` is negative or not finite. The rule raises it during the search, if
        ``cv_results_`` lacks a column, or no candidate has both a score and a flatness.

    See Also
    --------
    FlatnessScorer : Scores candidates by their flatness.
    FlatMinimaSearch : Chooses by flatness alone, without holding data out.

    Notes
    -----
    A candidate without a finite score or flatness is never chosen. Among equally flat candidates
    the first is chosen. A good candidate has no flatness if it is not at a minimum. If that is
    so for all good candidates, the rule chooses the best score among the candidates with a
    flatness, and warns with `FlatnessWarning`.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklearn.linear_model import LogisticRegression
    >>> from sklearn.model_selection import GridSearchCV
    >>> from relflat_sk import FlatnessScorer
    >>> X, y = load_iris(return_X_y=True)
    >>> search = GridSearchCV(
    ...     LogisticRegression(max_iter=5000),
    ...     {"C": [0.1, 1, 10, 100]},
    ...     scoring={"score": "accuracy", "flatness": FlatnessScorer()},
    ...     refit=flattest_within(0.02),
    ... ).fit(X, y)
    >>> search.cv_results_["mean_test_score"].round(3).tolist()
    [0.947, 0.973, 0.973, 0.98]
    >>> search.best_params_  # as good as C=100 within the tolerance, and flatter
    {'C': 1}

    Other names of scorers give other names of columns:

    >>> rule = flattest_within(0.02, score="mean_test_accuracy", flatness="mean_test_kappa")
    >>> results = {
    ...     "mean_test_accuracy": [0.91, 0.95, 0.94],
    ...     "mean_test_kappa": [-1.0, -9.0, -4.0],
    ... }
    >>> rule(results)
    2
    """
    if not is_number(tolerance):
        raise TypeError(
            f"tolerance must be a number, got {tolerance!r}: how far below the best score a "
            "candidate may be, in the unit of the score."
        )
    if not 0 <= tolerance < np.inf:
        raise ValueError(
            f"tolerance must be finite and at least 0, got {tolerance!r}: how far below the "
            "best score a candidate may be, in the unit of the score."
        )
    return FlattestWithin(float(tolerance), score, flatness)


@dataclass(frozen=True)
class FlattestWithin:
    """The rule that `flattest_within` makes; see there for the parameters.

    Parameters
    ----------
    tolerance : float
        How far below the best score a candidate may be.
    score : str
        The column of ``cv_results_`` with the score.
    flatness : str
        The column with minus the flatness.
    """

    tolerance: float
    score: str
    flatness: str

    def __call__(self, cv_results: Mapping[str, Any]) -> int:
        """Return the index of the chosen candidate in ``cv_results_``."""
        scores, flatness = (self._column(cv_results, name) for name in (self.score, self.flatness))
        scored, measured = np.isfinite(scores), np.isfinite(flatness)
        known = scored & measured
        if not known.any():
            raise ValueError(
                f"No candidate has both a finite {self.score!r} ({scored.sum()} of "
                f"{len(scores)} have) and a finite {self.flatness!r} ({measured.sum()} have). "
                "A FlatnessScorer gives nan to models that are not at a minimum: train them "
                'longer, or score them with FlatnessScorer(at_minimum="warn").'
            )
        best = scores[scored].max()
        # in floating point, 0.98 - 0.96 is more than 0.02
        rounding = ROUNDING * (abs(best) + self.tolerance)
        good = known & (best - scores <= self.tolerance + rounding)
        if not good.any():
            chosen = _argmax(scores, known)
            warn(
                f"no candidate within {self.tolerance:g} of the best {self.score!r}, "
                f"{best:g}, has a finite {self.flatness!r}. The best candidate that has one is "
                f"chosen: candidate {chosen}, with {scores[chosen]:g}."
            )
            return chosen
        return _argmax(flatness, good)

    def _column(self, cv_results: Mapping[str, Any], name: str) -> NDArray[np.float64]:
        """Return a column of ``cv_results_``; refuse a name that it lacks."""
        if name not in cv_results:
            means = sorted(key for key in cv_results if key.startswith("mean_test_"))
            raise ValueError(
                f"cv_results_ has no column {name!r}; its columns of this kind are {means}. With "
                'scoring={"accuracy": "accuracy", "flatness": FlatnessScorer()}, for example, '
                'their names are "mean_test_accuracy" and "mean_test_flatness". Pass the names '
                "as score and flatness."
            )
        return np.asarray(cv_results[name], dtype=np.float64)


def _argmax(values: NDArray[np.float64], rows: NDArray[np.bool_]) -> int:
    """Return the index of the greatest value among some rows, the first of equal ones."""
    return int(np.argmax(np.where(rows, values, -np.inf)))
