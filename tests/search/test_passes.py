"""A trial measures all its measures in one pass over the data, and so does `remeasure`."""

import numpy as np
import optuna
import pytest
import torch
from numpy.testing import assert_allclose
from sklearn.datasets import load_iris
from sklearn.preprocessing import scale
from skorch import NeuralNet, NeuralNetClassifier
from torch import nn

from relflat_sk import MLP, FlatMinimaSearch, MinimaObjective, measure
from relflat_sk.minima._table import attributes_of
from relflat_sk.search import _measure

X, Y = load_iris(return_X_y=True)
X = scale(X).astype(np.float32)
TRACES = [
    "relative_flatness",
    "hessian_trace",
    "trace_flatness",
    "neuron_flatness_sum",
    "neuron_flatness_max",
]
N_EPOCHS = 3


class Counting(MLP):
    """Counts the samples that pass it, in training and in evaluation."""

    n_samples = 0

    def forward(self, x):
        Counting.n_samples += len(x)
        return super().forward(x)


@pytest.fixture(autouse=True)
def _nothing_counted():
    Counting.n_samples = 0


def make_net(kind=NeuralNet, **parameters):
    return kind(
        Counting,
        criterion=nn.CrossEntropyLoss,
        module__n_features=4,
        module__n_outputs=3,
        module__hidden_layer_sizes=(8, 8),
        max_epochs=N_EPOCHS,
        lr=0.5,
        batch_size=10,
        verbose=0,
        **parameters,
    )


def run(net, **parameters):
    """Run a trial; return its attributes, the net and the samples that passed the module."""
    parameters = {"measures": TRACES, "goal": None, "random_state": 0, **parameters}
    objective = MinimaObjective(net, X, Y, {"batch_size": [10]}, **parameters)
    trial = optuna.create_study(directions=["minimize"] * len(objective.names)).ask()
    fitted = objective._run(trial)[1]
    return attributes_of(trial), fitted, Counting.n_samples


def test_five_measures_take_one_pass_more_than_the_training(tmp_path):
    attrs, fitted, n_samples = run(make_net(), artifact_store=tmp_path)
    assert n_samples == (N_EPOCHS + 1) * len(X)
    assert attrs["artifact_id"]
    for name in TRACES:
        assert_allclose(attrs[name], measure(name, fitted, X, Y), rtol=1e-6)
    outputs = fitted.forward(X).double()
    loss = nn.CrossEntropyLoss()(outputs, torch.from_numpy(Y))
    assert_allclose(attrs["train_loss"], float(loss), rtol=1e-6)


def test_scores_and_held_out_data_take_passes_of_their_own():
    """Two for held-out data, whose loss is recorded, and one for the training score."""
    net = make_net(NeuralNetClassifier)
    attrs, _, n_samples = run(net, X_test=X[:7], y_test=Y[:7])
    assert n_samples == (N_EPOCHS + 2) * len(X) + 2 * 7
    assert {"train_score", "test_score", "test_loss"} <= set(attrs)


@pytest.mark.parametrize("names", [TRACES[:1], [*TRACES, "gradient_norm"]])
def test_other_measures_take_one_pass_too(names):
    assert run(make_net(), measures=names)[2] == (N_EPOCHS + 1) * len(X)


def test_remeasuring_takes_one_pass(tmp_path):
    search = FlatMinimaSearch(
        make_net(),
        {"batch_size": [10]},
        measure="l2_norm",
        goal=1.0,
        artifact_store=tmp_path,
        random_state=0,
    ).fit(X, Y)
    Counting.n_samples = 0
    table = search.remeasure(TRACES)
    assert Counting.n_samples == len(X)
    assert np.isfinite(table[TRACES].to_numpy()).all()


@pytest.mark.parametrize("lr", [0.0, 1e37], ids=["untrained", "diverging"])
def test_a_network_that_failed_is_recorded_with_its_loss(lr):
    attrs = run(make_net().set_params(lr=lr), measures=[*TRACES, "pac_bayes_flatness"])[0]
    assert attrs["converged"] is False
    assert attrs["reason"].startswith("the training loss is ")
    assert np.isfinite(attrs["train_loss"]) == (lr == 0.0)


def test_the_loss_is_recorded_also_if_a_measure_fails(monkeypatch, tmp_path):
    def fails(*args, **kwargs):
        raise RuntimeError("cannot be measured")

    monkeypatch.setattr(_measure, "measure_network", fails)
    objective = MinimaObjective(make_net(), X, Y, {"batch_size": [10]}, artifact_store=tmp_path)
    trial = optuna.create_study().ask()
    with pytest.raises(RuntimeError, match="cannot be measured"):
        objective._run(trial)
    attrs = attributes_of(trial)
    assert attrs["reason"] == "RuntimeError: cannot be measured"
    assert attrs["train_loss"] > 0
    assert (attrs["converged"], attrs["failed"]) == (False, True)
    assert "relative_flatness" not in attrs
    assert "artifact_id" not in attrs
