"""P19: robustness in the worst case, and towards single neurons."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression
from torch import nn

from relflat_sk import (
    FlatnessWarning,
    feature_robustness,
    neuron_robustness,
    worst_feature_robustness,
)
from tests import oracles
from tests.network.test_network import same, state_of
from tests.theory.problems import CE, plane_network, rise_by, rises_by, rotations


def plane_matrices(k):
    """Matrices of the plane with operator norm at most 1, by rotations and singular values."""
    for left in rotations(k).numpy():
        for right in rotations(k).numpy():
            for values in ((1, 1), (1, -1), (1, 0), (0.5, -0.5)):
                yield left @ np.diag(values) @ right


def convolution():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(4, 2)).double()
    return net, torch.randn(8, 1, 3).double(), torch.arange(8) % 2


@pytest.mark.parametrize(("delta", "batch_size"), [(0.05, 7), (0.6, 30)])
def test_the_worst_case_is_that_of_a_grid_over_the_plane(delta, batch_size):
    net, X, y = plane_network()
    found = worst_feature_robustness(net, X, y, delta, batch_size=batch_size, random_state=0, **CE)
    changes = rises_by(net, 2, X, y, [delta * A for A in plane_matrices(16)])
    assert found.rise >= 0.999 * max(changes)
    assert found.fall >= -0.999 * min(0.0, *changes)
    assert found.value == max(found.rise, found.fall)
    assert np.linalg.norm(found.matrix, 2) <= 1 + 1e-9
    attained = abs(rise_by(net, "2", X, y, delta * found.matrix))
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
    net, X, y = plane_network()
    name, m = {0: ("0", 3), -1: ("2", 2)}[layer]
    matrices = [np.diag([1.0, -1.0, 0.5][:m]), np.eye(m)[::-1] * 0.9]
    found, steps = [], np.linspace(-3, 3, 601)
    for A in matrices:
        worst = worst_feature_robustness(net, X, y, 3.0, layer=layer, matrices=A, **CE)
        changes = rises_by(net, int(name), X, y, [step * A for step in steps])
        # no less than on a fine grid, and little more
        assert max(0, *changes) <= worst.rise + 1e-12 <= max(0, *changes) * 1.004 + 4e-6
        assert max(0, *-changes) <= worst.fall + 1e-6 <= max(0, *-changes) * 1.004 + 4e-6
        share = (worst.matrix * A).sum() / (A**2).sum()
        np.testing.assert_allclose(worst.matrix, share * A, atol=1e-12)
        attained = abs(rise_by(net, name, X, y, 3.0 * worst.matrix))
        assert attained == pytest.approx(worst.value, rel=1e-9)
        found.append(worst)
    both = worst_feature_robustness(net, X, y, 3.0, layer=layer, matrices=np.stack(matrices), **CE)
    assert both.rise == max(one.rise for one in found)
    assert both.fall == max(one.fall for one in found)


def on_a_line(y, **options):
    """The squared error of one sample whose prediction is 2 (1 + share)."""
    model = LinearRegression(fit_intercept=False).fit([[1.0]], [2.0])
    return worst_feature_robustness(model, [[1.0]], [y], 1.0, random_state=0, **options)


def test_the_worst_change_may_be_inside():
    found = on_a_line(3.0, matrices=[[1.0]])
    assert found.fall == pytest.approx(1.0, abs=1e-9)  # 2 (1 + 0.5) = 3
    assert found.matrix == pytest.approx(-1.0)  # but it rises more the other way
    assert found.rise == pytest.approx(9.0 - 1.0, rel=1e-12)


def test_the_loss_may_fall_most_near_the_features_as_they_are():
    """One step from the identity or its negative does not get below the loss of the still one."""
    found = on_a_line(2.08, n_steps=1, n_restarts=0)
    assert found.fall == pytest.approx(0.08**2 - 0.02**2, rel=1e-9)  # by a share of 0.03
    # the negative of the identity raises the loss most, which no step from the identity finds
    found = on_a_line(3.0, n_steps=1, n_restarts=0)
    assert found.rise == pytest.approx(3.0**2 - 1.0**2, rel=1e-9)


def test_an_ascent_ends_where_there_is_no_slope():
    net = nn.Linear(1, 1, bias=False).double()
    net.weight.data.fill_(2.0)
    X, y = torch.ones(2, 1).double(), torch.full((2, 1), 2.0).double()
    options = {"criterion": lambda output, y: (output - y).abs().sqrt().mean(), "random_state": 0}
    found = worst_feature_robustness(net, X, y, 0.5, **options)  # infinite slope at the features
    assert (found.rise, found.fall) == pytest.approx((1.0, 0.0))


def test_convolutions_have_no_bound():
    net, X, y = convolution()
    before = state_of(net)
    found = worst_feature_robustness(net, X, y, 0.1, layer=0, n_steps=2, random_state=0, **CE)
    same(before, state_of(net))
    assert found.matrix.shape == (3, 3)
    assert np.isnan(found.flatness_bound)
    value, _ = feature_robustness(net, X, y, 0.1, layer=0, matrices=found.matrix, **CE)
    assert abs(value) == pytest.approx(found.value, rel=1e-9)


def test_a_network_that_diverged_has_no_worst_case():
    net, X, y = plane_network()
    with torch.no_grad():
        net[0].weight[0, 0] = torch.nan
    with pytest.warns(FlatnessWarning, match="the feature robustness is nan or infinite, because"):
        found = worst_feature_robustness(net, X, y, 0.1, **CE)
    assert np.isnan([found.value, found.rise, found.fall, found.flatness_bound]).all()


def test_matrices_of_a_larger_norm_warn():
    net, X, y = plane_network()
    with pytest.warns(FlatnessWarning, match="operator norm of up to 1.5; feature robustness"):
        feature_robustness(net, X, y, 0.1, matrices=1.5 * np.eye(2), **CE)
    feature_robustness(net, X, y, 0.1, matrices=-np.eye(2), **CE)  # warnings are errors


def test_every_neuron_of_every_layer():
    net, X, y = plane_network()
    delta = 0.2
    table = neuron_robustness(net, X, y, delta, **CE)
    assert table[["layer", "neuron"]].to_numpy().tolist() == [
        ["0", 0], ["0", 1], ["0", 2], ["2", 0], ["2", 1],
    ]  # fmt: skip
    for row in table.itertuples():
        A = np.diag(np.eye({"0": 3, "2": 2}[row.layer])[row.neuron])
        assert row.robustness == pytest.approx(rise_by(net, row.layer, X, y, delta * A), rel=1e-9)
        H, W = oracles.weight_hessian(net, row.layer, CE["criterion"], X, y)
        rho = oracles.rho(H, W)[row.neuron]
        assert row.flatness_term == pytest.approx(delta**2 / 2 * rho, rel=1e-9)
    for layers in (-1, [-1, "2"]):
        last = neuron_robustness(net, X, y, delta, layers=layers, **CE)
        assert last["robustness"].tolist() == table["robustness"].tolist()[3:]


def test_layers_without_single_neurons():
    net, X, y = convolution()
    with pytest.warns(FlatnessWarning, match="'0' left out: layers that receive more than one"):
        table = neuron_robustness(net, X, y, 0.1, **CE)
    assert set(table["layer"]) == {"3"}
    with pytest.raises(ValueError, match=r"layer '0' receives \(1, 3\) for each sample; single"):
        neuron_robustness(net, X, y, 0.1, layers=[0], **CE)
