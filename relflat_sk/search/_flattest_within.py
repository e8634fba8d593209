"""Choose among the candidates of a scikit-learn search by score and flatness together."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from relflat_sk._checks import check_number
from relflat_sk._warnings import warn

__all__ = ["FlattestWithin", "flattest_within"]

PREFIX = "mean_test_"  # of the columns of cv_results_ that hold scores
SCORE, FLATNESS = PREFIX + "score", PREFIX + "flatness"
ROUNDING = 1e-12  # relative; far above float64's epsilon, far below any real difference


def flattest_within(
    tolerance: float,
    score: str = SCORE,
    flatness: str = FLATNESS,
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
        The column of ``cv_results_`` with the score, or the name of its scorer; greater is better.
        With ``scoring={"accuracy": ...}`` these are ``"mean_test_accuracy"`` and ``"accuracy"``.
        The default also stands for the only column beside the one with the flatness.
    flatness : str, default="mean_test_flatness"
        The column with the score of a `FlatnessScorer`, minus the flatness, or the scorer's name.

    Returns
    -------
    FlattestWithin
        A callable from ``cv_results_`` to the index of the chosen candidate. It can be pickled,
        copied and compared.

    Raises
    ------
    ValueError
        If `tolerance` is no finite number of at least 0, or both columns are the same. At the end
        of the search, if ``cv_results_`` has no such columns, or no candidate has a finite score.

    Warns
    -----
    FlatnessWarning
        At the end of the search, if no good candidate has a flatness.

    See Also
    --------
    FlatnessScorer : Scores candidates by their flatness.
    FlatMinimaSearch : Chooses by flatness alone, without holding data out.

    Notes
    -----
    A candidate without a finite score is never chosen. Among equally flat candidates the first is
    chosen. A good candidate has no flatness if it is not at a minimum. If that is so for all good
    candidates, the rule chooses the best score among the candidates with a flatness; if there are
    none, among all.

    scikit-learn calls the rule when all candidates are fitted, so that names cannot be checked
    before.

    The halving searches of scikit-learn take one scorer only and do not ask `refit` for their
    choice, so that the rule has no effect there.

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
    ...     scoring={"accuracy": "accuracy", "flatness": FlatnessScorer()},
    ...     refit=flattest_within(0.02),
    ... ).fit(X, y)
    >>> search.cv_results_["mean_test_accuracy"].round(3).tolist()
    [0.947, 0.973, 0.973, 0.98]
    >>> search.best_params_  # as good as C=100 within the tolerance, and flatter
    {'C': 1}

    With more scorers, say which of them to use:

    >>> rule = flattest_within(0.02, score="accuracy", flatness="kappa")
    >>> results = {
    ...     "mean_test_accuracy": [0.91, 0.95, 0.94],
    ...     "mean_test_kappa": [-1.0, -9.0, -4.0],
    ... }
    >>> rule(results)
    2
    """
    reason = "how far below the best score a candidate may be, in the unit of the score"
    check_number("tolerance", tolerance, positive=False, reason=reason)
    columns = [PREFIX + name.removeprefix(PREFIX) for name in (score, flatness)]
    if columns[0] == columns[1]:
        raise ValueError(
            f"score and flatness are both {score!r}, expected two columns of cv_results_: one with "
            "the score, and one with the flatness."
        )
    return FlattestWithin(float(tolerance), *columns)


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
        score, column = self._columns(cv_results)
        scores = np.asarray(cv_results[score], dtype=np.float64)
        scored = np.isfinite(scores)
        if not scored.any():
            raise ValueError(
                f"No candidate has a finite {score!r} (0 of {len(scores)} have): there is none to "
                "choose. The search's own warnings say why."
            )
        flatness = np.asarray(cv_results[column], dtype=np.float64)
        known = scored & np.isfinite(flatness)
        best = scores[scored].max()
        # in floating point, 0.98 - 0.96 is more than 0.02
        rounding = ROUNDING * (abs(best) + self.tolerance)
        good = known & (best - scores <= self.tolerance + rounding)
        if good.any():
            return _best(flatness, good)
        chosen = _best(scores, known if known.any() else scored)
        warn(
            f"no candidate within {self.tolerance:g} of the best {score!r}, {best:g}, has a "
            f"finite {column!r}, and {known.sum()} of all {len(scores)} have both. Candidate "
            f"{chosen} is chosen, with {scores[chosen]:g}. A FlatnessScorer gives nan to models "
            'that are no minima, unless it has non_minimum="warn".'
        )
        return chosen

    def _columns(self, cv_results: Mapping[str, Any]) -> tuple[str, str]:
        """Find the columns of score and flatness; the default may stand for the only other one."""
        columns = [key for key in cv_results if key.startswith(PREFIX)]
        score, flatness = self.score, self.flatness
        if score == SCORE and score not in columns and flatness in columns and len(columns) == 2:
            (score,) = set(columns) - {flatness}
        missing = [column for column in (score, flatness) if column not in columns]
        if missing:
            raise ValueError(
                f"cv_results_ has no column {' and no column '.join(map(repr, missing))}; its "
                f"columns of this kind are {columns}. Pass the names of both scorers: "
                "flattest_within(..., score=..., flatness=...)."
            )
        return score, flatness


def _best(values: np.ndarray, among: np.ndarray) -> int:
    """Return the index of the first of the largest values among some candidates."""
    return int(np.argmax(np.where(among, values, -np.inf)))
