"""Nets that scikit-learn fits inside of `fleet_training` are those that it fits outside."""

import warnings

import numpy as np
import pytest
from joblib import Parallel, delayed
from sklearn.model_selection import GridSearchCV, cross_validate
from skorch.callbacks import Callback

from relflat_sk import RelativeFlatnessRegularizedClassifier, fleet_training
from tests.engine.compare import assert_same, data

pytestmark = pytest.mark.usefixtures("same_threads")


def make_net(**arguments):
    arguments = {"batch_size": 16, "max_epochs": 4, "verbose": 0, "random_state": 0} | arguments
    return RelativeFlatnessRegularizedClassifier(**arguments)


@pytest.mark.parametrize("fleet", [4, "auto"])
def test_a_grid_search_finds_the_same(sizes, fleet):
    grid = {"lr": [0.003, 0.03], "random_state": [0, 1]}
    searches = [GridSearchCV(make_net(), grid, cv=3) for _ in range(2)]
    alone = searches[0].fit(*data(48))  # folds of the same size
    with fleet_training(fleet):
        together = searches[1].fit(*data(48))
    assert max(sizes) == (4 if fleet == 4 else 12)
    for key, values in alone.cv_results_.items():
        if "time" not in key:
            np.testing.assert_array_equal(together.cv_results_[key], values)
    assert_same(together.best_estimator_, alone.best_estimator_)


def test_a_search_inside_of_a_fit_runs_in_order(sizes):
    search = GridSearchCV(make_net(max_epochs=1), {"lr": [0.003, 0.03]}, cv=2)
    alone = cross_validate(search, *data(), cv=3)["test_score"]
    with fleet_training():
        found = cross_validate(search, *data(), cv=3)["test_score"]
    np.testing.assert_array_equal(found, alone)
    assert max(sizes) == 3


def test_as_many_functions_as_one_likes_in_their_order():
    def score(lr):
        return make_net(lr=lr, max_epochs=1).fit(*data()).lr

    rates = np.linspace(0.001, 0.01, 20).tolist()
    with fleet_training(2):
        assert Parallel()(delayed(score)(lr) for lr in rates) == rates
        with Parallel() as parallel:
            for some in (rates[:3], rates[3:5]):
                assert parallel(delayed(score)(lr) for lr in some) == some
    assert Parallel()(delayed(abs)(i) for i in range(3)) == [0, 1, 2]


class Fails(Callback):
    """Raises in the training of one net."""

    def on_epoch_end(self, net, **kwargs):
        if net.lr == 0.01 and len(net.history) == 2:
            raise RuntimeError("no luck")


@pytest.mark.filterwarnings("ignore:.* test scores are non-finite")
def test_errors_are_those_of_scikit_learn():
    grid = {"lr": [0.003, 0.01, 0.03]}
    search = GridSearchCV(make_net(callbacks=[Fails()]), grid, cv=2, refit=False)
    with fleet_training(4), pytest.warns(match="2 fits failed out of a total of 6"):
        search.fit(*data())
    assert np.isnan(search.cv_results_["mean_test_score"]).tolist() == [False, True, False]
    with fleet_training(4), pytest.raises(RuntimeError, match="no luck"):
        search.set_params(error_score="raise").fit(*data())


def test_what_ends_the_program_ends_all_fits():
    class Interrupts(Callback):
        def on_epoch_begin(self, net, **kwargs):
            if net.lr == 0.01 and len(net.history) == 2:
                raise SystemExit("enough")

    search = GridSearchCV(make_net(callbacks=[Interrupts()]), {"lr": [0.003, 0.01]}, cv=2)
    with fleet_training(4), pytest.raises(SystemExit, match="enough"):
        search.fit(*data())


def test_filters_of_warnings_are_given_back():
    def fit(lr):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=f"rate {lr}")
            make_net(lr=lr, max_epochs=int(1000 * lr)).fit(*data())

    before = list(warnings.filters)
    with fleet_training(4):
        Parallel()(delayed(fit)(lr) for lr in (0.003, 0.01, 0.004))
    assert warnings.filters == before


@pytest.mark.parametrize("n", [1, 4, 5, 9])
def test_the_last_functions_end_the_call_also_if_they_train_no_net(n):
    """joblib hands out four functions at first; the next ones wait until it knows of an end."""
    with fleet_training(2):
        assert Parallel()(delayed(abs)(-i) for i in range(n)) == list(range(n))


@pytest.mark.parametrize("fleet", [None, 0, 1.5, "all"])
def test_the_size_is_checked(fleet):
    with pytest.raises(ValueError, match="fleet must be"), fleet_training(fleet):
        pass
