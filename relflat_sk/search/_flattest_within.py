"""Choose among the candidates of a scikit-learn search by score and flatness together."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relflat_sk.exceptions import FlatnessWarning

__all__ = ["flattest_within"]

ROUNDING = 1e-12  # relative; far above float64's, far below any difference of scores


def flattest_within(
    tolerance: float,
    score: str = "mean_test_score",
    flatness: str = "mean_test_flatness",
) -> "FlattestWithin":
    """Make a rule for ``GridSearchCV(refit=...)``: the flattest of the good candidates.

    Candidates whose score is at most `tolerance` below the best one are as good as the best;
    of these the flattest is chosen. Works with every search of scikit-learn that takes a
    callable `refit` and has several scorers, a `FlatnessScorer` among them.

    Parameters
    ----------
    tolerance : float
        How far below the best score a candidate may be, in the unit of the score: 0.01 is
        one point of accuracy. With 0, flatness decides between equal scores only.
    score : str, default="mean_test_score"
        The column of ``cv_results_`` with the score, greater is better. With
        ``scoring={"accuracy": ...}`` it is called ``"mean_test_accuracy"``.
    flatness : str, default="mean_test_flatness"
        The column with the score of a `FlatnessScorer`, which is minus the flatness: greater
        is flatter.

    Returns
    -------
    FlattestWithin
        A callable from ``cv_results_`` to the index of the chosen candidate, which can be
        pickled, copied and compared.

    Raises
    ------
    TypeError
        If `tolerance` is no real number.
    ValueError
        If `tolerance` is negative or not finite. From the search, if ``cv_results_`` lacks a
        column, or no candidate has both a score and a flatness.

    See Also
    --------
    FlatnessScorer : Scores candidates by their flatness.
    FlatMinimaSearch : Chooses by flatness alone, with no data held out.

    Notes
    -----
    A candidate without a finite score or flatness is never chosen, and among equally flat
    ones the first is. If no candidate within the tolerance has a flatness, because all of
    them are at no minimum, the one with the best score of those that have is chosen, with a
    `FlatnessWarning`.

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

    Scorers of other names give columns of other names:

    >>> rule = flattest_within(0.02, score="mean_test_accuracy", flatness="mean_test_kappa")
    >>> results = {
    ...     "mean_test_accuracy": [0.91, 0.95, 0.94],
    ...     "mean_test_kappa": [-1.0, -9.0, -4.0],
    ... }
    >>> rule(results)
    2
    """
    if not isinstance(tolerance, Real) or isinstance(tolerance, bool):
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
    """The rule that `flattest_within` makes; see there."""

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
                "A FlatnessScorer gives nan to models that are at no minimum: train them "
                'longer, or score them with FlatnessScorer(at_minimum="warn").'
            )
        best = scores[scored].max()
        # means over folds carry rounding: 0.98 - 0.96 is more than 0.02
        rounding = ROUNDING * (abs(best) + self.tolerance)
        good = known & (best - scores <= self.tolerance + rounding)
        if not good.any():
            chosen = _argmax(scores, known)
            warnings.warn(
                f"no candidate within {self.tolerance:g} of the best {self.score!r}, "
                f"{best:g}, has a finite {self.flatness!r}; the best that has one, candidate "
                f"{chosen} with {scores[chosen]:g}, is taken.",
                FlatnessWarning,
                stacklevel=2,
            )
            return chosen
        return _argmax(flatness, good)

    def _column(self, cv_results: Mapping[str, Any], name: str) -> NDArray[np.float64]:
        if name not in cv_results:
            means = sorted(key for key in cv_results if key.startswith("mean_test_"))
            raise ValueError(
                f"cv_results_ has no column {name!r}; of its kind there are {means}. With "
                'scoring={"accuracy": "accuracy", "flatness": FlatnessScorer()} they are '
                'called "mean_test_accuracy" and "mean_test_flatness": pass such names as '
                "score and flatness."
            )
        return np.asarray(cv_results[name], dtype=np.float64)


def _argmax(values: NDArray[np.float64], rows: NDArray[np.bool_]) -> int:
    """Return the index of the greatest value among some rows, the first of equal ones."""
    return int(np.argmax(np.where(rows, values, -np.inf)))
