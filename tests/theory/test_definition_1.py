"""P19: robustness in the worst case, on average of magnitudes, and towards single neurons."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression
from torch import nn
from torch.func import functional_call

from relflat_sk import (
    FlatnessWarning,
    feature_robustness,
    measure,
    neuron_robustness,
    worst_feature_robustness,
)
from relflat_sk.theory._directions import haar_matrices

CE = {"criterion": nn.CrossEntropyLoss()}


def network(n=30):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 3)).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(2)
    X = torch.randn(n, 3).double()
    return net, X, net(X).argmax(dim=1)


def rise_by(net, name, X, y, delta, A, criterion=CE["criterion"]):
    """Equation 2, by the weight ``W + delta W A`` of equation 3."""
    W = net.get_submodule(name).weight.detach()
    A = torch.as_tensor(A).double()
    moved = functional_call(net, {f"{name}.weight": W + delta * W @ A}, (X,))
    return float((criterion(moved, y) - criterion(net(X), y)).detach())


def plane_matrices(k):
    """Matrices of the plane with operator norm at most 1, by rotations and singular values."""
    angles = 2 * np.pi * np.arange(k) / k
    turns = [np.array([[np.cos(t), -np.sin(t)], [np.sin(t), np.cos(t)]]) for t in angles]
    for left in turns:
        for right in turns:
            for values in ((1, 1), (1, -1), (1, 0), (0.5, -0.5)):
                yield left @ np.diag(values) @ right


@pytest.mark.parametrize("delta", [0.05, 0.6])
@pytest.mark.parametrize("batch_size", [30, 7])
def test_the_worst_case_is_that_of_a_grid_over_the_plane(delta, batch_size):
    net, X, y = network()
    found = worst_feature_robustness(net, X, y, delta, batch_size=batch_size, random_state=0, **CE)
    changes = [rise_by(net, "2", X, y, delta, A) for A in plane_matrices(24)]
    assert found.rise >= 0.999 * max(changes)
    assert found.fall >= -0.999 * min(0.0, *changes)
    assert found.value == max(found.rise, found.fall)
    assert np.linalg.norm(found.matrix, 2) <= 1 + 1e-9
    attained = abs(rise_by(net, "2", X, y, delta, found.matrix))
    assert attained == pytest.approx(found.value, rel=1e-9)


def test_earlier_layers_of_three_features():
    net, X, y = network()
    found = worst_feature_robustness(net, X, y, 0.3, layer=0, random_state=0, **CE)
    rng = np.random.default_rng(0)
    tried = []
    for _ in range(500):
        q, _r = np.linalg.qr(rng.normal(size=(3, 3)))
        tried.append(rise_by(net, "0", X, y, 0.3, q))
    assert found.rise > max(tried)
    assert found.fall > -min(tried)
    attained = abs(rise_by(net, "0", X, y, 0.3, found.matrix))
    assert attained == pytest.approx(found.value, rel=1e-9)


def test_with_one_output_linear_regression_attains_the_bound_of_equation_6():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(50, 4)) * [1, 2, 0.5, 1]
    y = X @ [1.0, -1.0, 2.0, 0.5] + rng.normal(size=50)
    model = LinearRegression(fit_intercept=False).fit(X, y)
    for delta in (0.1, 1.0):
        found = worst_feature_robustness(model, X, y, delta, random_state=0)
        second_moments = X.T @ X / 50
        expected = delta**2 * (model.coef_**2).sum() * np.linalg.eigvalsh(second_moments)[-1]
        assert found.flatness_bound == pytest.approx(expected, rel=1e-5)
        assert found.rise == pytest.approx(expected, rel=1e-5)
        assert found.fall == pytest.approx(0, abs=1e-12)  # at a minimum of a convex loss


@pytest.mark.parametrize("layer", [0, -1])
def test_the_largest_change_by_multiples_of_given_matrices(layer):
    """Definition 1 for one matrix: all delta' up to delta, of either sign."""
    net, X, y = network()
    name, m = {0: ("0", 3), -1: ("2", 2)}[layer]
    matrices = [np.diag([1.0, -1.0, 0.5][:m]), np.eye(m)[::-1] * 0.9]
    found, steps = [], np.linspace(-3, 3, 1201)
    for A in matrices:
        worst = worst_feature_robustness(net, X, y, 3.0, layer=layer, matrices=A, **CE)
        changes = np.array([rise_by(net, name, X, y, step, A) for step in steps])
        # no less than on a fine grid, and little more
        assert max(0, *changes) <= worst.rise + 1e-12 <= max(0, *changes) * 1.001 + 1e-6
        assert max(0, *-changes) <= worst.fall + 1e-6 <= max(0, *-changes) * 1.001 + 2e-6
        share = (worst.matrix * A).sum() / (A**2).sum()
        np.testing.assert_allclose(worst.matrix, share * A, atol=1e-12)
        attained = abs(rise_by(net, name, X, y, 3.0, worst.matrix))
        assert attained == pytest.approx(worst.value, rel=1e-9)
        found.append(worst)
    both = worst_feature_robustness(net, X, y, 3.0, layer=layer, matrices=np.stack(matrices), **CE)
    assert both.rise == max(one.rise for one in found)
    assert both.fall == max(one.fall for one in found)
    with pytest.raises(ValueError, match=rf"matrices must have shape \({m}, {m}\) or \(k, {m}"):
        worst_feature_robustness(net, X, y, 3.0, layer=layer, matrices=np.eye(7), **CE)


def test_the_worst_change_may_be_inside():
    """The loss of one sample is lowest where the squared error vanishes, before delta."""
    model = LinearRegression(fit_intercept=False).fit([[1.0]], [2.0])
    found = worst_feature_robustness(model, [[1.0]], [3.0], 1.0, matrices=[[1.0]])
    assert found.fall == pytest.approx(1.0, abs=1e-9)  # 2 (1 + 0.5) = 3
    assert found.matrix == pytest.approx(-1.0)  # but it rises more the other way
    assert found.rise == pytest.approx(9.0 - 1.0, rel=1e-12)


def test_convolutions_have_no_bound():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(4, 2)).double()
    X, y = torch.randn(8, 1, 3).double(), torch.arange(8) % 2
    before = [p.detach().clone() for p in net.parameters()]
    found = worst_feature_robustness(net, X, y, 0.1, layer=0, n_steps=2, random_state=0, **CE)
    assert found.matrix.shape == (3, 3)
    assert np.isnan(found.flatness_bound)
    value, _ = feature_robustness(net, X, y, 0.1, layer=0, matrices=found.matrix, **CE)
    assert abs(value) == pytest.approx(found.value, rel=1e-9)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_steps": 0}, "n_steps must be a positive integer, got 0"),
        ({"n_restarts": -1}, "n_restarts must be .*, got -1"),
        ({"delta": 0}, "delta must be a finite positive number, got 0"),
    ],
    ids=["steps", "restarts", "delta"],
)
def test_worst_case_says_what_is_wrong(arguments, message):
    net, X, y = network()
    with pytest.raises(ValueError, match=message):
        worst_feature_robustness(net, X, y, **{"delta": 0.1, **CE, **arguments})


def test_a_network_that_diverged_has_no_worst_case():
    net, X, y = network()
    with torch.no_grad():
        net[0].weight[0, 0] = torch.nan
    with pytest.warns(FlatnessWarning, match="the feature robustness is nan or infinite, because"):
        found = worst_feature_robustness(net, X, y, 0.1, **CE)
    assert np.isnan([found.value, found.rise, found.fall, found.flatness_bound]).all()


# E|F|


@pytest.mark.parametrize("layer", [0, -1])
def test_mean_magnitude_over_given_matrices(layer):
    net, X, y = network()
    name, m = {0: ("0", 3), -1: ("2", 2)}[layer]
    matrices = haar_matrices(m, 7, torch.Generator().manual_seed(0))
    identity = torch.eye(m).double()
    torch.testing.assert_close(matrices @ matrices.mT, identity.expand(7, m, m))
    matrices = torch.cat([matrices, identity[None]])  # larger features: more confidence
    value, stderr = feature_robustness(
        net, X, y, 0.4, layer=layer, matrices=matrices, absolute=True, **CE
    )
    each = [rise_by(net, name, X, y, 0.4, A) for A in matrices]
    assert min(each) < 0 < max(each)
    assert value == pytest.approx(np.mean(np.abs(each)), rel=1e-9)
    assert stderr == 0


def test_mean_magnitude_over_haar_matrices_that_samples_share():
    net, X, y = network()
    options = {"absolute": True, "n_draws": 400, **CE}
    value, stderr = feature_robustness(net, X, y, 0.4, random_state=0, **options)
    # Haar's distribution of the plane: half rotations, half reflections
    angles = 2 * np.pi * np.arange(400) / 400
    turns = [np.array([[np.cos(t), -np.sin(t)], [np.sin(t), np.cos(t)]]) for t in angles]
    matrices = turns + [turn @ np.diag([1.0, -1.0]) for turn in turns]
    exact = np.mean([abs(rise_by(net, "2", X, y, 0.4, A)) for A in matrices])
    assert value == pytest.approx(exact, abs=4 * stderr)
    assert 0 < stderr < 0.1 * value


def test_what_moves_samples_on_their_own_has_no_mean_magnitude():
    net, X, y = network()
    with pytest.raises(ValueError, match="absolute=True needs matrices that all samples share"):
        feature_robustness(net, X, y, 0.1, matrices="truncated_normal", absolute=True, **CE)
    one = feature_robustness(net, X, y, 0.1, matrices="projection", absolute=True, **CE)
    each = [abs(rise_by(net, "2", X, y, 0.1, np.diag(row))) for row in np.eye(2)]
    assert one[0] == pytest.approx(np.mean(each), rel=1e-9)


def test_matrices_of_a_larger_norm_warn():
    net, X, y = network()
    with pytest.warns(FlatnessWarning, match="operator norm of up to 1.5; feature robustness"):
        feature_robustness(net, X, y, 0.1, matrices=1.5 * np.eye(2), **CE)
    feature_robustness(net, X, y, 0.1, matrices=-np.eye(2), **CE)  # warnings are errors


# single neurons


def test_every_neuron_of_every_layer():
    net, X, y = network()
    delta = 0.2
    table = neuron_robustness(net, X, y, delta, **CE)
    assert table[["layer", "neuron"]].to_numpy().tolist() == [
        ["0", 0], ["0", 1], ["0", 2], ["2", 0], ["2", 1],
    ]  # fmt: skip
    for row in table.itertuples():
        m = {"0": 3, "2": 2}[row.layer]
        A = np.zeros((m, m))
        A[row.neuron, row.neuron] = 1
        assert row.robustness == pytest.approx(rise_by(net, row.layer, X, y, delta, A), rel=1e-9)
        rho = measure("neuron_flatness", net, X, y, layer=row.layer, **CE)[row.neuron]
        assert row.flatness_term == pytest.approx(delta**2 / 2 * rho, rel=1e-9)
    last = neuron_robustness(net, X, y, delta, layers=-1, **CE)
    assert last["robustness"].tolist() == table["robustness"].tolist()[3:]


def test_layers_without_single_neurons():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(4, 2)).double()
    X, y = torch.randn(8, 1, 3).double(), torch.arange(8) % 2
    with pytest.warns(FlatnessWarning, match="'0' left out: layers that receive more than one"):
        table = neuron_robustness(net, X, y, 0.1, **CE)
    assert set(table["layer"]) == {"3"}
    with pytest.raises(ValueError, match=r"layer '0' receives \(1, 3\) for each sample; single"):
        neuron_robustness(net, X, y, 0.1, layers=[0], **CE)


# the labels of moved features (P21, equation 4)


def test_labels_of_the_true_labelling_at_moved_features():
    net, X, y = network()
    moves = np.array([[[0.0, -1.0], [1.0, 0.0]], [[0.5, 0.0], [0.0, -1.0]]])
    seen = []

    def labelling(features):
        seen.append(features)
        return (features.sum(axis=1) > 0).astype(int)

    value, _ = feature_robustness(net, X, y, 0.7, matrices=moves, labelling=labelling, **CE)
    phi = net[:2](X).detach()
    expected = []
    for A in torch.from_numpy(moves):
        moved = phi + 0.7 * phi @ A.T
        labels = (moved.sum(dim=1) > 0).long()
        loss = CE["criterion"](net[2](moved), labels) - CE["criterion"](net(X), y)
        expected.append(float(loss.detach()))
    assert value == pytest.approx(np.mean(expected), rel=1e-9)
    assert seen[0].shape == (30, 2)
    plain, _ = feature_robustness(net, X, y, 0.7, matrices=moves, **CE)
    assert abs(value - plain) > 0.1
    message = r"labels of moved features must have the shape of the labels, \(30,\), got \(30, 2\)"
    with pytest.raises(ValueError, match=message):
        feature_robustness(net, X, y, 0.7, matrices=moves, labelling=lambda phi: phi, **CE)


@pytest.mark.parametrize(
    "criterion",
    [
        nn.CrossEntropyLoss(torch.tensor([1.0, 5.0, 2.0], dtype=torch.float64)),
        nn.CrossEntropyLoss(ignore_index=1),
    ],
)
def test_labels_of_other_class_weights_have_no_common_mean(criterion):
    net, X, y = network()
    with pytest.raises(
        ValueError, match="other class weights than the labels, or are ignored where"
    ):
        feature_robustness(
            net, X, y, 0.7, matrices="projection", criterion=criterion,
            labelling=lambda phi: (phi.sum(axis=1) > 0).astype(int),
        )  # fmt: skip
    same = {"matrices": "projection", "criterion": criterion}
    plain = feature_robustness(net, X, y, 0.7, **same)
    assert feature_robustness(net, X, y, 0.7, labelling=lambda phi: y.numpy(), **same) == plain
