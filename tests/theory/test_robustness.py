"""Feature robustness against its definition, and Theorem 5 at a minimum and away from one."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import minimize
from scipy.stats import ortho_group
from sklearn.linear_model import LinearRegression
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from skorch import NeuralNetClassifier
from torch import nn
from torch.func import functional_call, hessian
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, TensorDataset

from relflat_sk import (
    FlatnessWarning,
    LayerNotFoundError,
    feature_robustness,
    measure,
    relative_flatness,
    reparameterize,
    representativeness,
    worst_feature_robustness,
)
from tests import oracles
from tests.cases import CASES, mlp
from tests.hugging_face import conv1d

pytestmark = [
    pytest.mark.filterwarnings("ignore:NLLLoss takes log:relflat_sk.FlatnessWarning"),
    pytest.mark.filterwarnings("ignore:matrices have an operator norm:relflat_sk.FlatnessWarning"),
]
EXACT = 1e-9  # float64, relative to the loss: both subtract losses of order 1
LAYERS = {-1: "2", 0: "0"}


def names_of(net):
    return [name for name, m in net.named_modules() if isinstance(m, nn.Linear)]


def by_definition(net, name, criterion, X, y, move):
    """Compute the mean loss with the weight ``W (I + move)``, minus that with ``W``."""
    weight = net.get_submodule(name).weight.detach()
    moved = functional_call(net, {f"{name}.weight": weight + weight @ move}, (X,))
    return (criterion(moved, y) - criterion(net(X), y)).item()


def gradient(net, name, criterion, X, y):
    loss = criterion(net(X), y)
    return torch.autograd.grad(loss, net.get_submodule(name).weight)[0]


def train(net, criterion, X, y):
    """Find a minimum, with a gradient norm below 1e-6, by Newton's method."""
    parameters = list(net.parameters())
    named = dict(net.named_parameters())

    def risk(flat):
        pieces = flat.split([p.numel() for p in parameters])
        given = {
            name: part.reshape(p.shape)
            for (name, p), part in zip(named.items(), pieces, strict=True)
        }
        return criterion(functional_call(net, given, (X,)), y)

    def slope(flat):
        flat = torch.tensor(flat, requires_grad=True)
        (found,) = torch.autograd.grad(risk(flat), flat)
        return found.numpy()

    found = minimize(
        lambda flat: risk(torch.tensor(flat)).item(),
        parameters_to_vector(parameters).detach().numpy(),
        jac=slope,
        hess=lambda flat: hessian(risk)(torch.tensor(flat)).detach().numpy(),
        method="trust-exact",
        options={"gtol": 1e-8, "maxiter": 2000},
    )
    with torch.no_grad():
        vector_to_parameters(torch.tensor(found.x), parameters)
    loss = criterion(net(X), y)
    norm = parameters_to_vector(torch.autograd.grad(loss, parameters)).norm()
    assert norm < 1e-6
    return net


def teacher(d):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, d)).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(2)
    return net


def noisy(kind, d, n=100):
    """Make targets near a small network's output, so that the minimum has moderate weights."""
    output = teacher(d)(X := torch.randn(n, 2).double()).detach()
    output = output + 0.5 * torch.randn(n, d).double()
    return X, output if kind == "squared error" else output.softmax(dim=1)


PROBLEMS = {
    "squared error": (nn.MSELoss(), 2),
    "cross-entropy": (nn.CrossEntropyLoss(), 3),
}


@pytest.fixture(scope="module", params=PROBLEMS)
def problem(request):
    criterion, d = PROBLEMS[request.param]
    return criterion, d, *noisy(request.param, d)


@pytest.fixture(scope="module")
def minimum(problem):
    criterion, d, X, y = problem
    return train(teacher(d), criterion, X, y), criterion, X, y


@pytest.fixture(scope="module")
def anywhere(problem):
    criterion, d, X, y = problem
    net = teacher(d)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.5)
    return net, criterion, X, y


def rotations(n):
    angles = 2 * torch.pi * torch.arange(n).double() / n
    rows = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], dim=1)
    return rows.reshape(n, 2, 2)


# Theorem 5


@pytest.mark.parametrize("delta", [1e-1, 1e-2, 1e-3])
@pytest.mark.parametrize("layer", LAYERS)
def test_theorem_5_over_haar_matrices_at_a_minimum(minimum, layer, delta):
    net, criterion, X, y = minimum
    kappa = relative_flatness(net, X, y, layer=layer, criterion=criterion)
    value, stderr = feature_robustness(
        net, X, y, delta, layer=layer, criterion=criterion, n_draws=200, random_state=0
    )
    expected = delta**2 / (2 * 2) * kappa
    assert abs(value - expected) < 4 * stderr + delta**4 * kappa
    assert stderr < 0.05 * expected  # also at delta = 1e-3: pairs cancel the first order


def remainders(net, criterion, X, y, layer, deltas):
    """Compute the remainder of Theorem 5; in the plane, O runs over a circle."""
    kappa = relative_flatness(net, X, y, layer=layer, criterion=criterion)
    found = []
    for delta in deltas:
        value, stderr = feature_robustness(
            net, X, y, delta, layer=layer, matrices=rotations(64), criterion=criterion
        )
        assert stderr == 0
        found.append(abs(value - delta**2 / (2 * 2) * kappa))
    return np.array(found)


@pytest.mark.parametrize("where", ["minimum", "anywhere"])
@pytest.mark.parametrize("layer", LAYERS)
def test_remainder_of_theorem_5_is_of_fourth_order_over_two_decades(
    minimum, anywhere, layer, where
):
    net, criterion, X, y = {"minimum": minimum, "anywhere": anywhere}[where]
    if where == "anywhere":  # the mean over O needs no vanishing gradient
        assert gradient(net, LAYERS[layer], criterion, X, y).norm() > 0.02
    deltas = np.geomspace(1e-3, 1e-1, 5)
    found = remainders(net, criterion, X, y, layer, deltas)
    if layer == -1 and isinstance(criterion, nn.MSELoss):
        assert found.max() < 1e-15  # quadratic: there is no remainder
        return
    slopes = np.diff(np.log(found)) / np.diff(np.log(deltas))
    assert slopes.min() > 3  # of the theorem
    assert np.median(slopes) == pytest.approx(4, abs=0.1)  # by symmetry


@pytest.mark.parametrize("layer", LAYERS)
def test_for_a_single_matrix_the_gradient_has_to_vanish(minimum, anywhere, layer):
    move = torch.tensor([[0.3, 1.0], [-0.5, 0.2]]).double()
    name = LAYERS[layer]
    for net, criterion, X, y in (minimum, anywhere):
        slope = gradient(net, name, criterion, X, y)
        H, W = oracles.layer_hessian(net, name, lambda run: criterion(run(X), y))  # noqa: B023
        first = float((slope * (W @ move)).sum())
        second = torch.einsum("sj,sjtk,tk->", W @ move, H, W @ move) / 2
        for delta in (1e-2, 1e-3):
            value, _ = feature_robustness(
                net, X, y, delta, layer=layer, matrices=move, criterion=criterion
            )
            expected = delta * first + delta**2 * second
            assert value == pytest.approx(float(expected), abs=20 * delta**3)
    assert abs(first) > 1e-3  # of the last model, which is not at a minimum
    slope = gradient(minimum[0], name, *minimum[1:])
    assert slope.norm() < 1e-6


@pytest.mark.parametrize("layer", LAYERS)
def test_moving_single_features_at_a_minimum_gives_the_sum_of_neuron_flatness(minimum, layer):
    net, criterion, X, y = minimum
    rho = measure("neuron_flatness_sum", net, X, y, layer=layer, criterion=criterion)
    value, stderr = feature_robustness(
        net, X, y, 1e-3, layer=layer, matrices="projection", criterion=criterion
    )
    assert stderr == 0
    assert value == pytest.approx(1e-3**2 / (2 * 2) * rho, rel=0.02)


# the definition


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layer", [-1, 0, 1])
@pytest.mark.parametrize("batch_size", [11, 4], ids=["one batch", "uneven batches"])
def test_given_matrices_agree_with_the_definition(case, layer, batch_size):
    network, make_criterion, target, _ = CASES[case]
    torch.manual_seed(1)
    net, criterion = network(), make_criterion()
    X, y = torch.randn(11, 5).double(), target(11)
    name = names_of(net)[layer]
    m = net.get_submodule(name).in_features
    moves = torch.randn(3, m, m).double()
    value, stderr = feature_robustness(
        net,
        X,
        y,
        0.1,
        layer=layer,
        matrices=moves.numpy(),
        criterion=criterion,
        batch_size=batch_size,
    )
    expected = np.mean([by_definition(net, name, criterion, X, y, 0.1 * one) for one in moves])
    assert value == pytest.approx(expected, rel=EXACT, abs=1e-13)
    assert stderr == 0


def test_one_matrix_needs_no_axis_for_draws():
    torch.manual_seed(0)
    net, X, y = mlp(4), torch.randn(9, 5).double(), torch.arange(9) % 4
    move = torch.randn(6, 6).double()
    options = {"criterion": nn.CrossEntropyLoss()}
    assert feature_robustness(net, X, y, 0.3, matrices=move, **options) == feature_robustness(
        net, X, y, 0.3, matrices=move[None], **options
    )


@pytest.mark.parametrize("layer", [-1, 0])
def test_haar_matrices_agree_with_scipys(layer):
    torch.manual_seed(0)
    net, X, y = mlp(4), torch.randn(9, 5).double(), torch.arange(9) % 4
    criterion, m = nn.CrossEntropyLoss(), {-1: 6, 0: 5}[layer]
    name = names_of(net)[layer]
    pairs = [
        np.mean([
            by_definition(net, name, criterion, X, y, move) for move in (0.9 * one, -0.9 * one)
        ])
        for one in torch.from_numpy(ortho_group(m, seed=0).rvs(400))
    ]
    value, stderr = feature_robustness(
        net, X, y, 0.9, layer=layer, criterion=criterion, n_draws=400, random_state=0
    )
    both = np.hypot(stderr, np.std(pairs, ddof=1) / np.sqrt(400))
    assert value == pytest.approx(np.mean(pairs), abs=4 * both)
    assert both < 0.25 * abs(value)


@pytest.mark.parametrize("m", [1, 3, 20])
def test_truncated_normal_has_the_second_moment_of_its_density(m):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(50, m))
    model = LinearRegression().fit(X, X @ rng.normal(size=m) + rng.normal(size=50))
    y = model.predict(X)

    def density(r):
        return r ** (m - 1) * np.exp(-(r**2) / 2)

    moment = quad(lambda r: r**2 * density(r), 0, 1)[0] / quad(density, 0, 1)[0]
    value, stderr = feature_robustness(
        model, X, y, 0.5, matrices="truncated_normal", n_draws=500, random_state=0
    )
    # squared error: there are no higher orders
    expected = moment * 0.5**2 / (2 * m) * relative_flatness(model, X)
    assert value == pytest.approx(expected, abs=4 * stderr)
    assert 0 < stderr < 0.02 * value


def test_single_features_without_replacement():
    torch.manual_seed(0)
    net, X, y = mlp(4), torch.randn(9, 5).double(), torch.arange(9) % 4
    criterion = nn.CrossEntropyLoss()
    options = {"matrices": "projection", "criterion": criterion}
    each = []
    for j in range(6):
        move = torch.zeros(6, 6).double()
        move[j, j] = 0.5
        each.append(by_definition(net, "4", criterion, X, y, move))
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


@pytest.mark.parametrize("layer", ["conv", "head"])
def test_the_input_of_a_convolution_is_one_vector(layer):
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, 3, 2)
            self.head = nn.Linear(12, 3)

        def forward(self, x):
            return self.head(torch.tanh(self.conv(x)).flatten(1))

    torch.manual_seed(0)
    net, criterion = Small().double(), nn.CrossEntropyLoss()
    X, y = torch.randn(6, 2, 3, 3).double(), torch.arange(6) % 3
    features, tail = X, net
    if layer == "head":
        features, tail = torch.tanh(net.conv(X)).flatten(1).detach(), net.head
    expected, m = 0.0, features[0].numel()
    for phi, label in zip(features, y, strict=True):

        def loss(flat, phi=phi, label=label):
            return criterion(tail(flat.reshape(1, *phi.shape)), label[None])

        trace = torch.trace(hessian(loss)(phi.flatten()))
        expected += 1e-2**2 / (2 * m) * (phi.square().sum() * trace).item() / len(X)
    value, stderr = feature_robustness(
        net, X, y, 1e-2, layer=layer, criterion=criterion, n_draws=200, random_state=0
    )
    assert value == pytest.approx(expected, abs=4 * stderr)
    assert 0 < stderr < 0.1 * abs(value)


# standard errors


@pytest.mark.parametrize("layer", [-1, 0])
@pytest.mark.parametrize("matrices", ["orthogonal", "truncated_normal", "projection"])
def test_standard_errors_are_the_spread_over_seeds(matrices, layer):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(15, 12), nn.Tanh(), nn.Linear(12, 3)).double()
    X, y = torch.randn(6, 15).double(), torch.arange(6) % 3
    found = [
        feature_robustness(
            net,
            X,
            y,
            0.5,
            layer=layer,
            matrices=matrices,
            n_draws=8,
            criterion=nn.CrossEntropyLoss(),
            batch_size=4,
            random_state=seed,
        )
        for seed in range(100)
    ]
    values, stderrs = np.array(found).T
    spread = values.std(ddof=1)
    assert np.sqrt(np.mean(stderrs**2)) == pytest.approx(spread, rel=0.2)


def test_a_criterion_that_computes_means_only_has_the_same_standard_error():
    torch.manual_seed(0)
    net, X, y = mlp(4), torch.randn(9, 5).double(), torch.arange(9) % 4
    builtin = nn.CrossEntropyLoss()
    one, other = (
        feature_robustness(net, X, y, 0.5, criterion=criterion, random_state=0)
        for criterion in (builtin, lambda output, target: builtin(output, target))
    )
    assert one == pytest.approx(other, rel=1e-12)


# invariances


@settings(deadline=None, max_examples=20)
@given(a=st.floats(0.05, 20), b=st.floats(0.05, 20), layer=st.sampled_from([0, 1, 2]))
def test_the_scale_of_layers_does_not_matter(a, b, layer):
    torch.manual_seed(0)
    net, X, y = mlp(4, activation=nn.ReLU), torch.randn(9, 5).double(), torch.arange(9) % 4
    options = {"layer": layer, "criterion": nn.CrossEntropyLoss(), "random_state": 0}
    same = reparameterize(net, [a, b, 1 / (a * b)])
    assert feature_robustness(same, X, y, 0.3, **options) == pytest.approx(
        feature_robustness(net, X, y, 0.3, **options), rel=1e-8
    )


@pytest.mark.parametrize("layer", [-1, 0])
def test_float32_is_close_where_delta_is_large(layer):
    torch.manual_seed(0)
    net, X, y = mlp(4), torch.randn(9, 5).double(), torch.arange(9) % 4
    options = {"layer": layer, "criterion": nn.CrossEntropyLoss(), "random_state": 0}
    expected = feature_robustness(net, X, y, 0.5, **options)
    found = feature_robustness(net.float(), X.float(), y, 0.5, **options)
    assert found == pytest.approx(expected, rel=1e-3)


def test_small_deltas_are_resolved_at_the_last_layer_of_a_float32_network():
    torch.manual_seed(0)
    net, X, y = mlp(4).float(), torch.randn(9, 5), torch.arange(9) % 4
    options = {"criterion": nn.CrossEntropyLoss(), "random_state": 0}
    small, large = (feature_robustness(net, X, y, delta, **options)[0] for delta in (1e-4, 1e-2))
    assert small == pytest.approx(1e-4 * large, rel=1e-3)


# models


@pytest.mark.parametrize(
    ("value", "cause"),
    [(torch.nan, "'0.bias' of the network contains nan"), (1e30, "a loss is too large")],
)
def test_a_network_that_diverged_warns(value, cause):
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    nn.init.constant_(net[0].bias, value)
    with pytest.warns(FlatnessWarning, match=cause):
        robustness, _ = feature_robustness(
            net,
            torch.ones(4, 2),
            torch.ones(4, 1),
            0.1,
            layer=0,
            criterion=nn.MSELoss(),
            random_state=0,
        )
    assert not math.isfinite(robustness)


def test_estimators_pipelines_and_string_labels():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 3))
    y = np.where(X[:, 0] > 0, "yes", "no")
    classifier = MLPClassifier((4,), max_iter=20, random_state=0)
    with pytest.warns(UserWarning, match="Maximum iterations"):
        pipeline = make_pipeline(StandardScaler(), classifier).fit(X, y)
    value, stderr = feature_robustness(pipeline, X, y, 0.01, n_draws=100, random_state=0)
    kappa = relative_flatness(pipeline, X, y)
    assert value == pytest.approx(0.01**2 / (2 * 4) * kappa, abs=4 * stderr)
    scaled = pipeline[0].transform(X)
    assert feature_robustness(pipeline[-1], scaled, y, 0.01, n_draws=100, random_state=0) == (
        value,
        stderr,
    )


def test_skorch_nets_of_probabilities():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2), nn.Softmax(dim=1))
    X, y = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32), np.arange(20) % 2
    net = NeuralNetClassifier(module, train_split=None, max_epochs=1, verbose=0).fit(X, y)
    kappa = relative_flatness(net, X, y)
    value, stderr = feature_robustness(net, X, y, 0.01, n_draws=100, random_state=0)
    assert value == pytest.approx(0.01**2 / (2 * 5) * kappa, abs=4 * stderr)
    kappa = relative_flatness(net, X, y, layer=0)
    value, stderr = feature_robustness(net, X, y, 0.3, layer=0, n_draws=100, random_state=0)
    assert value == pytest.approx(0.3**2 / (2 * 3) * kappa, rel=0.2)


class ByKeyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.second(input=torch.tanh(self.first(input=x))))


def test_layers_called_by_keyword():
    torch.manual_seed(0)
    net, X, y = ByKeyword().double(), torch.randn(9, 5).double(), torch.arange(9) % 4
    move, criterion = torch.randn(4, 4).double(), nn.CrossEntropyLoss()
    value, _ = feature_robustness(net, X, y, 0.5, matrices=move, criterion=criterion)
    weight = net.second.weight.detach()
    hidden = torch.tanh(net.first(X))
    moved = torch.tanh(hidden @ (weight + 0.5 * weight @ move).T + net.second.bias)
    assert value == pytest.approx((criterion(moved, y) - criterion(net(X), y)).item(), rel=EXACT)


@pytest.mark.parametrize("n_classes", [3, 4])  # 4 makes the weight a square
def test_a_head_with_a_transposed_weight_is_that_linear_layer(n_classes):
    torch.manual_seed(0)
    head, linear = conv1d(4, n_classes).double(), nn.Linear(4, n_classes).double()
    linear.load_state_dict({"weight": head.weight.detach().T, "bias": head.bias.detach()})
    first = nn.Linear(5, 4).double()
    transposed, usual = (nn.Sequential(first, nn.ReLU(), last) for last in (head, linear))
    X, y = torch.randn(30, 5).double(), torch.arange(30) % n_classes
    options = {"delta": 0.1, "criterion": nn.CrossEntropyLoss(), "random_state": 0}
    for function in (feature_robustness, representativeness):
        assert function(transposed, X, y, **options) == pytest.approx(
            function(usual, X, y, **options)
        )
    worst = (worst_feature_robustness(net, X, y, **options).rise for net in (transposed, usual))
    assert next(worst) == pytest.approx(next(worst))


def test_layer_by_position_name_and_module():
    torch.manual_seed(0)
    net, X, y = mlp(4), torch.randn(9, 5).double(), torch.arange(9) % 4
    found = {
        feature_robustness(
            net,
            X,
            y,
            0.5,
            layer=layer,
            criterion=nn.CrossEntropyLoss(),
            device="cpu",
            random_state=0,
        )
        for layer in (1, np.int64(-2), "2", net[2])
    }
    assert len(found) == 1


class Counting(nn.Module):
    """A network that counts how often it runs."""

    def __init__(self):
        super().__init__()
        self.layers, self.n_runs = mlp(4), 0

    def forward(self, x):
        self.n_runs += 1
        return self.layers(x)


class CountingLoader(DataLoader):
    """A data loader that counts the batches it hands out."""

    n_batches = 0

    def __iter__(self):
        for batch in super().__iter__():
            self.n_batches += 1
            yield batch


def test_one_batch_is_run_to_find_the_layer():
    net, X, y = Counting().double(), torch.randn(9, 5).double(), torch.arange(9) % 4
    loader = CountingLoader(TensorDataset(X, y), batch_size=3)
    options = {"criterion": nn.CrossEntropyLoss(), "random_state": 0}
    feature_robustness(net, loader, None, 0.1, n_draws=2, **options)
    # three batches of the pass itself; moves at the last layer do not run the network
    assert net.n_runs == 1 + 3
    assert loader.n_batches == 1 + 3


# state and random numbers


@pytest.mark.parametrize("layer", [-1, 0])
def test_the_network_and_the_random_states_stay_as_they_were(layer):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4)).double()
    X, y = torch.randn(9, 5).double(), torch.arange(9) % 4
    net.train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    states = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    feature_robustness(net, X, y, 0.1, layer=layer, criterion=nn.CrossEntropyLoss())
    assert all(m.training for m in net.modules())
    assert all(not m._forward_pre_hooks and not m._forward_hooks for m in net.modules())
    assert not any("forward" in vars(m) for m in net.modules())
    assert all(p.grad is None and p.requires_grad for p in net.parameters())
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()  # noqa: NPY002


def test_hooks_are_removed_after_an_exception():
    class Fails(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls > 5:
                raise RuntimeError("as announced")
            return torch.tanh(x)

    net = nn.Sequential(nn.Linear(5, 4), Fails(), nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match="as announced"):
        feature_robustness(
            net,
            torch.randn(9, 5),
            torch.arange(9) % 4,
            0.1,
            layer=0,
            criterion=nn.CrossEntropyLoss(),
        )
    assert all(not m._forward_pre_hooks and not m._forward_hooks for m in net.modules())
    assert not any("forward" in vars(m) for m in net.modules())
    assert net.training


def test_random_states():
    torch.manual_seed(0)
    net, X, y = mlp(4), torch.randn(9, 5).double(), torch.arange(9) % 4

    def run(random_state):
        return feature_robustness(
            net, X, y, 0.5, criterion=nn.CrossEntropyLoss(), random_state=random_state
        )

    assert run(3) == run(3)
    assert run(3) != run(4)
    assert run(None) != run(None)
    state = np.random.RandomState(3)
    assert run(state) != run(state)
    assert run(np.random.RandomState(3)) == run(np.random.RandomState(3))


# errors

BAD = {
    "delta zero": ({"delta": 0.0}, ValueError, "delta must be a finite positive number, got 0.0"),
    "delta nan": ({"delta": float("nan")}, ValueError, "delta must be .* got nan"),
    "delta text": ({"delta": "much"}, ValueError, "delta must be .* got 'much'"),
    "no scheme": ({"matrices": "haar"}, ValueError, "one of .*'orthogonal'.* got 'haar'"),
    "shape": (
        {"matrices": np.eye(5)},
        ValueError,
        r"shape \(6, 6\) or \(k, 6, 6\).* got \(5, 5\)",
    ),
    "no matrix": ({"matrices": np.zeros((0, 6, 6))}, ValueError, r"got \(0, 6, 6\)"),
    "vector": ({"matrices": np.ones(6)}, ValueError, r"matrices must have shape .* got \(6,\)"),
    "one draw": ({"n_draws": 1}, ValueError, "n_draws must be an integer of at least 2, got 1"),
    "draws": ({"n_draws": 2.5}, ValueError, "n_draws must be an integer of at least 2, got 2.5"),
    "labels": ({"y": None}, ValueError, "y is needed to compute a loss"),
    "criterion": ({"criterion": None}, ValueError, "criterion is needed"),
    "random state": ({"random_state": "x"}, ValueError, "random_state must be .* got 'x'"),
    "layer": ({"layer": 7}, LayerNotFoundError, "there is no layer 7"),
}


@pytest.mark.parametrize("bad", BAD)
def test_says_what_is_wrong(bad):
    torch.manual_seed(0)
    arguments, error, message = BAD[bad]
    usual = {"y": torch.arange(9) % 4, "delta": 0.1, "criterion": nn.CrossEntropyLoss()}
    with pytest.raises(error, match=message):
        feature_robustness(mlp(4), torch.randn(9, 5).double(), **{**usual, **arguments})
