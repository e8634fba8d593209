"""The measures of P19 for the whole network and for every neuron, against dense Hessians."""

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import ArpackError
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from torch.func import functional_call, hessian

from relflat_sk import FlatnessScorer, flatness_report, measure, register_measure
from relflat_sk.measures import evaluate
from relflat_sk.measures._eigenvalues import largest_eigenvalue
from tests import oracles
from tests.measures.test_layer_kinds import CE, dense, make

# networks with random weights are at no minimum
pytestmark = pytest.mark.filterwarnings("ignore:.*is negative:relflat_sk.FlatnessWarning")


def joint(net, criterion, X, y):
    """P19, Table 1: |w|^2 lambda_max of the dense Hessian in all weight matrices together."""
    names = [name for name, p in net.named_parameters() if p.ndim >= 2]
    shapes = [net.get_parameter(name).shape for name in names]
    flat = torch.cat([net.get_parameter(name).detach().flatten() for name in names])

    def risk(vector):
        parts = vector.split([shape.numel() for shape in shapes])
        weights = {n: p.reshape(s) for n, p, s in zip(names, parts, shapes, strict=True)}
        return criterion(functional_call(net, weights, (X,)), y)

    H = hessian(risk)(flat).detach()
    return float(flat.square().sum() * torch.linalg.eigvalsh(H)[-1])


@pytest.mark.parametrize("kind", ["mlp relu", "mlp tanh", "conv tanh", "transformer"])
def test_joint_eigenvalue_flatness_is_that_of_the_dense_hessian(kind):
    net, X, y = make(kind)
    expected = joint(net, CE, X, y)
    options = {"criterion": CE, "batch_size": 4, "rtol": 1e-9, "random_state": 0}
    found = evaluate("joint_eigenvalue_flatness", net, X, y, **options)
    assert found.value == pytest.approx(expected, rel=1e-7)
    assert found.stderr < 1e-6 * found.value
    assert found.method == "lanczos"
    # a block of the Hessian has no larger eigenvalue, and no weight is larger than all of them
    assert found.value > measure("network_flatness", net, X, y, **options)


def test_a_single_layer_without_a_hidden_one_is_its_eigenvalue_flatness():
    X, y = load_iris(return_X_y=True)
    model = LogisticRegression(max_iter=1000).fit(X, y)
    options = {"rtol": 1e-10, "random_state": 0}
    one = measure("joint_eigenvalue_flatness", model, X, y, **options)
    assert one == pytest.approx(measure("eigenvalue_flatness", model, X, y, **options), rel=1e-8)


def test_weights_of_samples_count():
    net, X, y = make("mlp relu")
    counts = np.array([1, 0, 2, 1, 3, 1, 1])
    rows = np.repeat(np.arange(7), counts)
    options = {"criterion": CE, "rtol": 1e-9}
    one = measure("joint_eigenvalue_flatness", net, X, y, sample_weight=counts, **options)
    two = measure("joint_eigenvalue_flatness", net, X[rows], y[rows], **options)
    assert one == pytest.approx(two, rel=1e-7)


@pytest.mark.parametrize("size", [8, 60])
def test_a_matrix_of_zeros_has_the_eigenvalue_zero(size):
    found = largest_eigenvalue(
        np.zeros_like, size, rtol=0.01, random_state=0, where="in a dead layer"
    )
    assert found == (0.0, 0.0)


def test_other_errors_of_the_iteration_are_raised(monkeypatch):
    def fails(*args, **kwargs):
        raise ArpackError(-9999)

    monkeypatch.setattr("relflat_sk.measures._eigenvalues.eigsh", fails)
    with pytest.raises(ArpackError):
        largest_eigenvalue(lambda v: v, 60, rtol=0.01, random_state=0, where="here")


@pytest.mark.parametrize(("kind", "layer"), [("mlp relu", "0"), ("mlp tanh", "2"), ("conv", "3")])
def test_every_neuron_has_the_form_of_the_hessian_in_its_column(kind, layer):
    net, X, y = make(kind)
    H, W = dense(net, layer, X, y)
    options = {"layer": layer, "criterion": CE, "method": "exact"}
    found = measure("neuron_flatness", net, X, y, **options)
    assert found == pytest.approx(np.array(oracles.rho(H, W)), rel=1e-8, abs=1e-12)
    assert found.shape == (W.shape[1],)
    assert found.max() == measure("neuron_flatness_max", net, X, y, **options)
    assert found.sum() == pytest.approx(measure("neuron_flatness_sum", net, X, y, **options))


def test_a_report_has_a_row_for_every_neuron_on_request():
    net, X, y = make("mlp relu")
    names = ["relative_flatness", "neuron_flatness", "neuron_flatness_max"]
    report = flatness_report(net, X, y, measures=names, criterion=CE)
    rows = report[report["measure"] == "neuron_flatness"]
    assert rows.groupby("layer")["neuron"].apply(list).to_dict() == {
        "0": [0, 1, 2, 3],
        "2": [0, 1, 2, 3, 4, 5],
        "4": [0, 1, 2, 3, 4],
    }
    for layer in ("0", "2", "4"):
        values = rows.loc[rows["layer"] == layer, "value"].to_numpy()
        assert values == pytest.approx(
            measure("neuron_flatness", net, X, y, layer=layer, criterion=CE), rel=1e-12
        )
    assert set(rows["invariance"]) == {"layer, feature neurons, own neurons"}
    assert report.loc[report["measure"] != "neuron_flatness", "neuron"].isna().all()
    assert "neuron" not in flatness_report(net, X, y, measures=names[0], criterion=CE)
    alone = flatness_report(net, X, y, measures="neuron_flatness", layers=0, criterion=CE)
    assert alone["measure"].tolist() == ["neuron_flatness"] * 4


def test_an_array_is_no_score():
    X, y = load_iris(return_X_y=True)
    model = LogisticRegression(max_iter=1000).fit(X, y)
    with pytest.raises(ValueError, match="neuron_flatness is an array, not a number"):
        evaluate("neuron_flatness", model, X, y)
    with pytest.raises(ValueError, match="neuron_flatness is an array, not a number"):
        FlatnessScorer("neuron_flatness")(model, X, y)
    for argument in ({"aggregate": "max"}, {"per_sample": True}):
        with pytest.raises(ValueError, match="takes neither aggregate nor per_sample"):
            measure("neuron_flatness", model, X, y, **argument)
    with pytest.raises(ValueError, match="'neuron_flatness' is a measure or a column"):
        register_measure("neuron_flatness", lambda model, X, y: 1.0)
