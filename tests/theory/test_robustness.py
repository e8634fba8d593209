"""Feature robustness by its definition, in the worst case (P19), of neurons, and by Theorem 5."""

from itertools import product

import numpy as np
import pytest
import torch
from scipy.stats import ortho_group
from sklearn.linear_model import LinearRegression
from torch import nn

from relflat_sk import (
    FlatnessWarning,
    feature_robustness,
    measure,
    neuron_robustness,
    relative_flatness,
    worst_feature_robustness,
)
from tests import oracles
from tests.cases import CASES, WEIGHTS
from tests.measures.nets import PROBLEMS
from tests.theory.problems import CE, network, plane_network, rise_by, rises_by, rotations

pytestmark = pytest.mark.filterwarnings("ignore:NLLLoss takes log:relflat_sk.FlatnessWarning")
of_any_norm = pytest.mark.filterwarnings("ignore:matrices have an oper:relflat_sk.FlatnessWarning")
EXACT = 1e-9  # float64, relative to the loss: both subtract losses of order 1
LAYERS = {-1: "2", 0: "0"}


def scaled(factor, d):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, d)).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(factor)
    return net


def problem(loss, where):
    """A network at a minimum, whose outputs are its targets, or elsewhere."""
    criterion, d = {"squared error": (nn.MSELoss(), 2), "cross-entropy": (CE["criterion"], 3)}[loss]
    net, X = scaled(2, d), torch.randn(100, 2).double()
    output = net(X).detach()
    if where == "anywhere":
        net, output = scaled(3, d), output + 0.5 * torch.randn(100, d).double()
    return criterion, net, X, output if d == 2 else output.softmax(dim=1)


at_problems = pytest.mark.parametrize(
    ("loss", "where"), [*product(("squared error", "cross-entropy"), ("minimum", "anywhere"))]
)


@at_problems
@pytest.mark.parametrize("delta", [1e-1, 1e-3])
@pytest.mark.parametrize("layer", LAYERS)
def test_theorem_5_over_haar_matrices(loss, where, layer, delta):
    criterion, *at = problem(loss, where)
    options = {"layer": layer, "criterion": criterion}
    kappa = relative_flatness(*at, **options)
    value, stderr = feature_robustness(*at, delta, n_draws=200, random_state=0, **options)
    expected = delta**2 / (2 * 2) * kappa
    assert abs(value - expected) < 4 * stderr + delta**4 * abs(kappa)
    assert stderr < 0.05 * abs(expected)  # also at delta = 1e-3: pairs cancel the first order
    if where == "minimum":
        rho = measure("neuron_flatness_sum", *at, **options)
        value, stderr = feature_robustness(*at, 1e-3, matrices="projection", **options)
        assert stderr == 0
        assert value == pytest.approx(1e-3**2 / (2 * 2) * rho, rel=0.02)


def size_of_input(net, name, X):
    sizes = []
    with net.get_submodule(name).register_forward_hook(
        lambda layer, inputs, output: sizes.append(inputs[0][0].numel())
    ):
        net(X)
    return sizes[0]


# a convolution's input is one vector, and the last layer of "gpt2" has a transposed weight
LAYERS_OF = [*product(CASES, [-1, 0, 1]), *product(["conv", "conv tanh"], [-1, 0]), ("gpt2", -1)]


@of_any_norm
@pytest.mark.parametrize(("case", "layer"), LAYERS_OF)
def test_given_matrices_agree_with_the_definition(case, layer):
    problem = PROBLEMS[case]()
    name, at = problem.all_layers()[layer], (problem.net, problem.X, problem.y)
    m = size_of_input(problem.net, name, problem.X)
    moves = torch.randn(3, m, m).double()
    options = {"layer": name, "criterion": problem.criterion, "batch_size": 11 if layer < 0 else 4}
    value, stderr = feature_robustness(*at, 0.1, matrices=moves.numpy(), **options)
    each = [rise_by(at[0], name, *at[1:], 0.1 * one, problem.criterion) for one in moves]
    assert value == pytest.approx(np.mean(each), rel=EXACT, abs=1e-13)
    assert stderr == 0


def test_single_features_without_replacement():
    net, X, y = network(n=9)
    options = {"matrices": "projection", **CE}
    each = [rise_by(net, "4", X, y, 0.5 * np.diag(row)) for row in np.eye(6)]
    value, stderr = feature_robustness(net, X, y, 0.5, n_draws=6, **options)
    assert stderr == 0
    assert value == pytest.approx(np.mean(each), rel=EXACT)
    pairs = {
        round(feature_robustness(net, X, y, 0.5, n_draws=2, random_state=seed, **options)[0], 12)
        for seed in range(60)
    }
    possible = {round((each[i] + each[j]) / 2, 12) for i in range(6) for j in range(i)}
    assert pairs <= possible
    assert len(pairs) > 10


@pytest.mark.parametrize(
    ("matrices", "layer"),
    [("orthogonal", -1), ("orthogonal", 0), ("truncated_normal", 0), ("projection", -1)],
)
def test_standard_errors_are_the_spread_over_seeds(matrices, layer):
    net = nn.Sequential(nn.Linear(15, 12), nn.Tanh(), nn.Linear(12, 3)).double()
    X, y = torch.randn(6, 15).double(), torch.arange(6) % 3
    options = {"layer": layer, "matrices": matrices, "n_draws": 8, "batch_size": 4, **CE}
    found = [feature_robustness(net, X, y, 0.5, random_state=seed, **options) for seed in range(60)]
    values, stderrs = np.array(found).T
    assert np.sqrt(np.mean(stderrs**2)) == pytest.approx(values.std(ddof=1), rel=0.2)


@pytest.mark.parametrize("layer", [-1, 0])
def test_float32_is_close_where_delta_is_large_and_at_the_last_layer(layer):
    net, X, y = network(n=9)
    options = {"layer": layer, "random_state": 0, **CE}
    expected = feature_robustness(net, X, y, 0.5, **options)
    net, X = net.float(), X.float()
    assert feature_robustness(net, X, y, 0.5, **options) == pytest.approx(expected, rel=1e-3)
    if layer == -1:
        small, large = (feature_robustness(net, X, y, at, **options)[0] for at in (1e-4, 1e-2))
        assert small == pytest.approx(1e-4 * large, rel=1e-3)


@pytest.mark.parametrize(
    ("value", "cause"),
    [(torch.nan, "'0.bias' of the network contains nan"), (1e30, "outputs are too large")],
)
def test_a_network_that_diverged_warns(value, cause):
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    nn.init.constant_(net[0].bias, value)
    X, y, options = torch.ones(4, 2), torch.ones(4, 1), {"layer": 0, "criterion": nn.MSELoss()}
    match = f"the feature robustness is nan or infinite, because .*{cause}"
    with pytest.warns(FlatnessWarning, match=match):
        robustness, _ = feature_robustness(net, X, y, 0.1, random_state=0, **options)
    with pytest.warns(FlatnessWarning, match=match):
        worst = worst_feature_robustness(net, X, y, 0.1, **options)
    assert not np.isfinite([robustness, worst.value, worst.rise, worst.flatness_bound]).any()


@pytest.mark.parametrize("layer", [0, -1])
def test_mean_magnitude_over_given_matrices(layer):
    net, X, y = plane_network()
    name, m = {0: ("0", 3), -1: ("2", 2)}[layer]
    # larger features, by the identity: more confidence
    matrices = np.concatenate([ortho_group(m, seed=0).rvs(7), np.eye(m)[None]])
    options = {"layer": layer, "matrices": matrices, "absolute": True, **CE}
    each = [rise_by(net, name, X, y, 0.4 * A) for A in matrices]
    assert min(each) < 0 < max(each)
    found = feature_robustness(net, X, y, 0.4, **options)
    assert found == pytest.approx((np.mean(np.abs(each)), 0), rel=1e-9)


@pytest.mark.parametrize("matrices", ["orthogonal", "projection"])
def test_mean_magnitude_over_drawn_matrices(matrices):
    net, X, y = plane_network()
    options = {"matrices": matrices, "absolute": True, "n_draws": 400, "random_state": 0, **CE}
    value, stderr = feature_robustness(net, X, y, 0.4, **options)
    drawn = [np.diag([1.0, 0.0]), np.diag([0.0, 1.0])]
    if matrices == "orthogonal":  # Haar's distribution: half rotations, half reflections
        turns = rotations(400).numpy()
        drawn = [*turns, *(turns @ np.diag([1.0, -1.0]))]
    exact = np.abs(rises_by(net, 2, X, y, [0.4 * A for A in drawn])).mean()
    assert value == pytest.approx(exact, abs=4 * stderr + 1e-9)
    assert 0 < stderr < 0.1 * value or matrices == "projection"


def sides(phi):
    return (phi.sum(axis=1) > 0).astype(int)


def test_labels_of_the_true_labelling_at_moved_features():
    net, X, y = plane_network()
    moves = np.array([[[0.0, -1.0], [1.0, 0.0]], [[0.5, 0.0], [0.0, -1.0]]])
    value, _ = feature_robustness(net, X, y, 0.7, matrices=moves, labelling=sides, **CE)
    phi, expected = net[:2](X).detach(), []
    for A in torch.from_numpy(moves):
        moved = phi + 0.7 * phi @ A.T
        labels = torch.from_numpy(sides(moved.numpy()))
        loss = CE["criterion"](net[2](moved), labels) - CE["criterion"](net(X), y)
        expected.append(loss.item())
    assert value == pytest.approx(np.mean(expected), rel=1e-9)
    plain, _ = feature_robustness(net, X, y, 0.7, matrices=moves, **CE)
    assert abs(value - plain) > 0.1


@pytest.mark.parametrize(
    "criterion", [nn.CrossEntropyLoss(WEIGHTS[:3]), nn.CrossEntropyLoss(ignore_index=1)]
)
def test_labels_of_other_class_weights_have_no_common_mean(criterion):
    net, X, y = plane_network()
    options = {"matrices": "projection", "criterion": criterion}
    with pytest.raises(ValueError, match="other class weights than the labels, or are ignored"):
        feature_robustness(net, X, y, 0.7, labelling=sides, **options)
    plain = feature_robustness(net, X, y, 0.7, **options)
    labelled = feature_robustness(net, X, y, 0.7, labelling=lambda phi: y.numpy(), **options)
    assert labelled == pytest.approx(plain, rel=1e-12)


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
    # one step from the identity or its negative does not get below the loss of the still one
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
    at = convolution()
    found = worst_feature_robustness(*at, 0.1, layer=0, n_steps=2, random_state=0, **CE)
    assert found.matrix.shape == (3, 3)
    assert np.isnan(found.flatness_bound)
    value, _ = feature_robustness(*at, 0.1, layer=0, matrices=found.matrix, **CE)
    assert abs(value) == pytest.approx(found.value, rel=1e-9)


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
