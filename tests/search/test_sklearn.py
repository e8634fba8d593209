"""A search passes scikit-learn's own checks of estimators."""

import optuna
import pytest
from sklearn import config_context
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.utils.estimator_checks import SkipTest, estimator_checks_generator

from relflat_sk import FlatMinimaSearch, RelativeFlatnessRegularizedClassifier

# the checks have data on which no network is a minimum
NET = RelativeFlatnessRegularizedClassifier(max_epochs=15, verbose=0)
SEARCHES = {
    "classifier": FlatMinimaSearch(LogisticRegression(max_iter=1000), {"C": [0.1, 1.0]}),
    "regressor": FlatMinimaSearch(Ridge(), {"alpha": [1.0]}),
    "our classifier": FlatMinimaSearch(NET, {"batch_size": [32]}, random_state=0),
}


def checks():
    for name, search in SEARCHES.items():
        for one, check in estimator_checks_generator(search):
            marks = [pytest.mark.scale] if name.startswith("our") else []
            yield pytest.param(one, check, id=f"{name}-{check.func.__name__}", marks=marks)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("search", "check"), list(checks()))
def test_check_of_scikit_learn(search, check):
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        check(search)
    except SkipTest as reason:
        pytest.skip(str(reason))


def test_a_notebook_shows_the_flattest_minima_of_a_fitted_search():
    search = FlatMinimaSearch(LogisticRegression(max_iter=1000), {"C": [0.1, 1.0]})
    plain = search._repr_mimebundle_()["text/html"]
    assert "trial 0" not in plain
    search.fit(*load_iris(return_X_y=True))
    shown = search._repr_mimebundle_()["text/html"]
    assert "The flattest is trial 0, with C = 0.1" in shown
    for name in ("relative_flatness", "train_loss", "converged"):
        assert f"<th>{name}</th>" in shown
    search.set_params(measure="hessian_trace")
    assert "<th>hessian_trace</th>" in search._repr_mimebundle_()["text/html"]
    with config_context(display="text"):
        assert list(search._repr_mimebundle_()) == ["text/plain"]
