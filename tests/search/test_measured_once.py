"""A net of a search is measured once: by the search, or by itself where that is something else."""

import numpy as np
import optuna
import pytest
import torch
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from relflat_sk import FlatMinimaSearch, MinimaObjective, RelativeFlatnessRegularizedClassifier
from relflat_sk.training import _after_fit

RNG = np.random.RandomState(0)
X = RNG.randn(60, 5)
y = X[:, :3].argmax(axis=1)


def make_net(**arguments):
    arguments = {"max_epochs": 15, "verbose": 0, "lr": 0.03, "random_state": 0} | arguments
    return RelativeFlatnessRegularizedClassifier(module__hidden_layer_sizes=(8,), **arguments)


@pytest.fixture
def own(monkeypatch):
    """Counts the measurements that nets make themselves."""
    found, measure = [], _after_fit.measure_layers

    def note(*args, **kwargs):
        found.append(1)
        return measure(*args, **kwargs)

    monkeypatch.setattr(_after_fit, "measure_layers", note)
    return found


def trained(net, space=None, **arguments):
    """The net that a trial trains."""
    objective = MinimaObjective(net, X, y, space or {"batch_size": [16]}, goal=None, **arguments)
    return objective.run(optuna.create_study().ask())[1]


@pytest.mark.parametrize("normalize", [False, True])
def test_the_measure_of_the_search_is_the_nets(own, normalize):
    names = ["relative_flatness", "normalized_relative_flatness", "train_loss"]
    net = make_net(flatness_normalize=normalize)
    estimator = trained(make_pipeline(StandardScaler(), net), {"standardscaler": [StandardScaler()]}
                        , measures=names)  # fmt: skip
    assert not own
    alone = net.fit(StandardScaler().fit_transform(X), y)
    assert len(own) == 1
    assert estimator[-1].relative_flatness_ == pytest.approx(alone.relative_flatness_, rel=1e-12)
    for name in ("loss", "constant_loss"):
        found, expected = (
            getattr(one.constant_comparison_, name) for one in (estimator[-1], alone)
        )
        assert found == pytest.approx(expected, rel=1e-12)


OTHERS = {
    "another measure": {"measures": ["hessian_trace"]},
    "another layer": {"layer": 0},
    "other arguments": {"measure_params": {"weight_decay": 0.1}},
    "a confusion set": {"space": {"data__confusion_size": [10], "data__train_size": [40]}},
    "sample weights": {"fit_params": {"sample_weight": np.arange(60.0)}},
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_is_something_else_is_measured_by_the_net(own, case):
    estimator = trained(make_net(), **OTHERS[case])
    assert len(own) == 1
    assert estimator.relative_flatness_ > 0


@pytest.mark.parametrize("fleet", [None, 2])
def test_searches_measure_once(own, fleet):
    net = make_net(max_epochs=100)
    search = FlatMinimaSearch(net, {"lr": [0.02, 0.03]}, fleet=fleet, goal=0.3).fit(X, y)
    assert not own
    best = search.best_estimator_
    assert best.relative_flatness_ == search.minima_["relative_flatness"].iloc[0]


@pytest.mark.parametrize("measures", [["relative_flatness"], ["hessian_trace"]])
def test_warnings_of_how_training_ended_are_given_as_ever(measures):
    settings = {"optimizer": torch.optim.SGD, "lr": 1e30, "max_epochs": 2}
    with pytest.warns(match="has diverged: its loss is not finite"):
        trained(make_net(**settings), measures=measures)
    dead = {"flatness_weight": 1e4, "flatness_clip": None, "max_epochs": 10, "lr": 10.0}
    with pytest.warns(match="has probably died"):
        trained(make_net(**settings | dead), measures=measures)
