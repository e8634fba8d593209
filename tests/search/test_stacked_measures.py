"""Nets of a fleet that end together are measured in one stacked pass, as each is by itself."""

import numpy as np
import optuna
import pytest
import torch
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from skorch.dataset import Dataset
from torch import nn

from relflat_sk import (
    FlatMinimaSearch,
    FlatnessWarning,
    MinimaObjective,
    RelativeFlatnessRegularizedBinaryClassifier,
    RelativeFlatnessRegularizedClassifier,
    RelativeFlatnessRegularizedRegressor,
    optimize_study,
)
from relflat_sk.fleet import _measuring
from relflat_sk.search._measure import Measuring

RNG = np.random.RandomState(0)
X = RNG.randn(300, 6)  # more than run at once
y = X[:, :3].argmax(axis=1)
TRACES = ["hessian_trace", "trace_flatness", "neuron_flatness_sum", "neuron_flatness_max"]
COLUMNS = ["train_loss", "train_score", "depth", "relative_flatness"]


class Convolutions(nn.Module):
    """Is no chain, and acts otherwise in evaluation."""

    def __init__(self, n_outputs):
        super().__init__()
        self.first, self.norm = nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4)
        self.dropout, self.last = nn.Dropout(0.3), nn.Linear(4, n_outputs)
        self.double()

    def forward(self, x):
        h = torch.relu(self.norm(self.first(x[:, None])))
        return self.last(self.dropout(h.mean(2) + h.amax(2)))


class BatchwiseNorm(nn.Sequential):
    """Its outputs depend on the other samples of a batch."""

    def __init__(self, n_features, n_outputs):
        norm = nn.BatchNorm1d(n_features, track_running_stats=False)
        super().__init__(norm, nn.Linear(n_features, n_outputs))
        self.double()


class Centred(nn.Sequential):
    """The same, without a layer that says so."""

    def __init__(self, n_features, n_outputs):
        super().__init__(nn.Linear(n_features, n_outputs))
        self.double()

    def forward(self, x):
        return super().forward(x + x.mean(0))


class Own(RelativeFlatnessRegularizedClassifier):
    def predict(self, X):
        return super().predict(X)[::-1]


class Doubled(Dataset):
    def transform(self, X, y):
        X, y = super().transform(X, y)
        return 2 * X, y


@pytest.fixture
def passes(monkeypatch):
    """Notes how many nets each stacked pass has measured."""
    found, measure = [], _measuring._measure_all

    def note(networks, **settings):
        measured = measure(networks, **settings)
        found.append(len([one for one in measured if one is not None]))
        return measured

    monkeypatch.setattr(_measuring, "_measure_all", note)
    return found


def make_net(kind=RelativeFlatnessRegularizedClassifier, **settings):
    return kind(**{"max_epochs": 2, "verbose": 0, "lr": 0.01, **settings})


def search(net, y=y, space=None, fit_params=None, **settings):
    """The table of minima of three nets, and the names of its numbers."""
    space = {"random_state": [0, 1, 2]} if space is None else space
    settings = {"goal": None, "fleet": 3, "refit": False, "random_state": 0, **settings}
    table = FlatMinimaSearch(net, space, **settings).fit(X, y, **(fit_params or {})).minima_
    return table.sort_index()


def search_alone(monkeypatch, *args, **kwargs):
    with monkeypatch.context() as patch:
        patch.setattr(Measuring, "with_others", lambda *args: ({}, None))
        return search(*args, **kwargs)


WEIGHTS = {"sample_weight": np.arange(300) % 3}
STACKED = {
    "all measures": (make_net(), {"measure": ["relative_flatness", *TRACES]}),
    "convolutions": (make_net(module=Convolutions, module__n_outputs=3), {}),
    "smoothing": (make_net(criterion__label_smoothing=0.1), {}),
    "weights": (make_net(), {"fit_params": WEIGHTS}),
    "numbers": (make_net(RelativeFlatnessRegularizedRegressor), {"y": X[:, :2]}),
    "two classes": (make_net(RelativeFlatnessRegularizedBinaryClassifier), {"y": X[:, 0] > 0}),
}


@pytest.mark.filterwarnings("ignore", category=FlatnessWarning)
@pytest.mark.parametrize("name", STACKED)
def test_values_are_those_of_each_net_by_itself(name, passes, monkeypatch):
    net, settings = STACKED[name]
    alone = search_alone(monkeypatch, net, **settings)
    assert not passes
    together = search(net, **settings)
    assert passes == [3]
    measures = settings.get("measure", ["relative_flatness"])
    for column in {*COLUMNS, *measures}:
        np.testing.assert_allclose(together[column], alone[column], rtol=1e-10, atol=1e-12)
    assert len(set(together["relative_flatness"])) == 3
    assert list(together["reason"]) == list(alone["reason"])


ALONE = {
    "another score": (make_net(Own), {}),
    "a pipeline": (make_pipeline(StandardScaler(), make_net()),
                   {"space": {"relativeflatnessregularizedclassifier__random_state": [0, 1]}}),
    "a normalised measure": (make_net(), {"measure": "normalized_relative_flatness"}),
    "random probes": (make_net(), {"measure_params": {"method": "hutchinson", "n_probes": 4}}),
    "an earlier layer": (make_net(), {"layer": 0}),
    "other weights of classes": (make_net(flatness_weight=0), {"space": {"criterion__weight": [
        [1.0, 1.0, 1.0], [1.0, 2.0, 9.0]]}}),
    "other data": (make_net(), {"space": {"data__train_size": [100, 200]}}),
    "a loader of one's own": (make_net(iterator_valid__num_workers=0), {}),
    "a data set of one's own": (make_net(dataset=Doubled), {}),
    "norms of a batch": (make_net(module=BatchwiseNorm), {}),
    "means of a batch": (make_net(module=Centred), {}),
    "one net": (make_net(), {"fleet": 1}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore", category=FlatnessWarning)
@pytest.mark.filterwarnings("ignore:batch norm without running statistics")
@pytest.mark.parametrize("name", ALONE)
def test_whatever_might_differ_is_measured_by_itself(name, passes, monkeypatch):
    net, settings = ALONE[name]
    together, alone = search(net, **settings), search_alone(monkeypatch, net, **settings)
    assert sum(passes) == 0
    measure = settings.get("measure", "relative_flatness")
    for column in ("train_loss", "train_score", measure):
        np.testing.assert_array_equal(together[column], alone[column])


@pytest.mark.filterwarnings("ignore", category=FlatnessWarning)
def test_an_error_in_the_stacked_pass_leaves_the_measures_to_each_net(monkeypatch):
    def fail(*args):
        raise RuntimeError("vmap: no batching rule")

    monkeypatch.setattr(_measuring, "plan_stacked_pass", fail)
    together, alone = search(make_net()), search_alone(monkeypatch, make_net())
    np.testing.assert_array_equal(together["relative_flatness"], alone["relative_flatness"])


@pytest.mark.filterwarnings("ignore", category=FlatnessWarning)
def test_a_net_that_diverged_fails_alone(passes):
    table = search(make_net(optimizer=torch.optim.SGD), space={"lr": [0.01, 0.1, 1e200]})
    assert passes == [3]
    failed = table["param_lr"] == 1e200
    assert table[failed]["reason"].item() == "the training loss is not finite"
    assert np.isfinite(table[~failed]["relative_flatness"]).all()


def test_a_net_predicts_by_its_network_after_the_search(passes):
    objective = MinimaObjective(make_net(), X, y, {"random_state": [0, 1]}, goal=None)
    trained, run = [], objective.run
    objective.run = lambda trial: trained.append(run(trial)) or trained[-1]
    optimize_study(optuna.create_study(), objective, n_trials=2, fleet=2)
    assert passes == [2]
    for _, net in trained:
        assert len(net.predict(X[:7])) == 7
        assert np.isclose(net.score(X[:50], y[:50]), np.mean(net.predict(X[:50]) == y[:50]))
