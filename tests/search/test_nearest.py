"""Tests of ``FlatMinimaSearch(refit="nearest")``: the network nearest to the mean, by NumPy."""

import copy
import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.linear_model import Ridge

from relflat_sk import FlatnessWarning
from tests.search.examples import (
    LABELS,
    NO_MINIMA,
    TARGET,
    X,
    logistic,
    make_net,
    make_regressor,
    make_search,
    piped,
)

SEED = 3
INPUTS = X * np.float32([1, 100, 0.01, 1])
SPACE = {"net__random_state": [0, 1, 2, 3, 4], "net__lr": [0.05, 1e-5]}  # the second learns nothing
NETS = {
    "names of classes": (make_net(), LABELS),
    "values": (make_regressor(), TARGET[:, None]),
    "two outputs": (make_regressor(), X[:, :2]),
}


def noisy(inputs, share=0.6):
    """The inputs on which networks are compared, by the rule that is documented."""
    rng = np.random.default_rng(np.random.RandomState(SEED).randint(2**31 - 1))
    rows = np.asarray(inputs)[rng.integers(len(inputs), size=2000)].astype(float)
    spread = np.sqrt(((rows - rows.mean(axis=0)) ** 2).mean(axis=0))
    return (rows + share * spread * rng.normal(size=rows.shape)).astype(np.float32)


def distances(nets, inputs):
    """How far each net is from the mean of all: classes, or squares."""
    if hasattr(nets[0], "predict_proba"):
        outputs = np.array([net.predict_proba(inputs) for net in nets])
        classes = outputs.mean(axis=0).argmax(axis=1)
        return [(output.argmax(axis=1) != classes).sum() for output in outputs]
    outputs = np.array([net.predict(inputs) for net in nets])
    return ((outputs - outputs.mean(axis=0)) ** 2).mean(axis=(1, 2)).tolist()


@NO_MINIMA
@pytest.mark.filterwarnings("ignore:no candidate converged", "ignore:.*left out of the ranking")
@pytest.mark.parametrize("kind", NETS)
def test_the_network_nearest_to_the_mean_predicts(kind, kept, end_training):
    estimator, targets = NETS[kind]
    search = make_search(piped(estimator), SPACE, refit="nearest", random_state=SEED, **kept)
    search.fit(INPUTS, targets)
    end_training()  # nothing is trained from here on
    trials = search.minima_["trial"][search.minima_["param_lr"] == 0.05].tolist()
    nets = [search.get_estimator(number) for number in trials]
    of_nets = distances(nets, noisy(INPUTS))
    nearest = trials[int(np.argmin(of_nets))]
    # another noise, all candidates, and flatness choose another one
    assert sorted(of_nets)[0] < sorted(of_nets)[1]
    assert nearest != search.minima_["trial"][0]
    again = clone(search).fit(INPUTS, targets)  # resumed, from weights
    for found in (search, again, pickle.loads(pickle.dumps(search)), copy.deepcopy(search)):
        row = search.minima_.set_index("trial").loc[nearest]
        assert found.best_params_["net__random_state"] == row["param_random_state"]
        assert found.best_params_ == found.cv_results_["params"][found.best_index_]
        assert found.best_score_ == pytest.approx(-row["relative_flatness"], nan_ok=True)
        assert found.get_estimator(nearest) is found.best_estimator_
        assert not hasattr(found, "ensemble_")
        expected = nets[trials.index(nearest)].predict(INPUTS)
        np.testing.assert_array_equal(found.predict(INPUTS), expected)
        assert found.score(INPUTS, targets) == found.best_estimator_.score(INPUTS, targets)
    assert f"The search predicts with trial {nearest}." in search.report()


def test_networks_of_earlier_sessions_need_weights(stored, trained):
    logistic(n_trials=2, **stored).fit(X, LABELS)
    with pytest.warns(FlatnessWarning, match="nearest to the mean of 1 of 3 networks"):
        second = logistic(refit="nearest", **stored).fit(X, LABELS)
    assert len(trained) == 3
    assert second.get_estimator(2) is second.best_estimator_
    with pytest.warns(FlatnessWarning, match="the flattest minimum only: .*artifact_store"):
        third = logistic(refit="nearest", **stored).fit(X, LABELS)
    assert len(trained) == 4
    assert third.get_estimator(third.minima_["trial"][0]) is third.best_estimator_


def as_memmap(values, folder):
    on_disk = np.memmap(folder / "X", dtype=values.dtype, mode="w+", shape=values.shape)
    on_disk[:] = values
    return on_disk


class Remembers(Ridge):
    """Remembers the last inputs that it predicted for."""

    def predict(self, X):
        Remembers.inputs = X
        return super().predict(X)


KINDS = {
    "array": lambda values, folder: values,
    "in float64": lambda values, folder: values.astype(float),
    "on disk": as_memmap,
    "frame": lambda values, folder: pd.DataFrame(values, columns=list("abcd")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_noise_is_drawn_by_the_documented_rule_and_keeps_the_kind_of_inputs(kind, tmp_path):
    inputs = KINDS[kind](INPUTS, tmp_path)
    space = {"alpha": [1.0, 1.1, 1.2]}
    make_search(Remembers(), space, refit="nearest", random_state=SEED).fit(inputs, TARGET)
    np.testing.assert_allclose(Remembers.inputs, noisy(INPUTS), rtol=1e-4, atol=1e-4)
    if kind == "frame":
        assert Remembers.inputs.dtypes.equals(inputs.dtypes)
    else:
        assert Remembers.inputs.dtype == inputs.dtype


def test_tensors_and_images():
    images = torch.as_tensor(X).reshape(-1, 1, 2, 2)
    found = [
        make_search(make_net(), {"random_state": [0, 1, 2]}, refit="nearest", random_state=SEED)
        .fit(inputs, LABELS)
        .best_params_
        for inputs in (X, torch.as_tensor(X), images)
    ]
    assert found[0] == found[1] == found[2]
