"""The scorer in scikit-learn's own callbacks, which came with version 1.9."""

import pytest
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression

from relflat_sk import FlatnessScorer, relative_flatness

callback = pytest.importorskip("sklearn.callback", reason="scikit-learn has callbacks from 1.9 on")


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_a_monitor_records_the_flatness_of_each_iteration():
    X, y = load_iris(return_X_y=True)
    monitor = callback.ScoringMonitor(scoring={"flatness": FlatnessScorer(non_minimum="accept")})
    LogisticRegression(max_iter=6).set_callbacks(monitor).fit(X, y)
    rows = [row for row in monitor.get_logs().data if row["task_name"] == "lbfgs-iter"]
    assert len(rows) == 6
    for n_iterations in (2, 6):
        model = LogisticRegression(max_iter=n_iterations).fit(X, y)
        expected = -relative_flatness(model, X, y)
        assert rows[n_iterations - 1]["flatness"] == pytest.approx(expected, rel=1e-6)
