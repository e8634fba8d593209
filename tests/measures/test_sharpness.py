"""Measures of disturbed weights: formulas, error bars, and a network that stays as it was."""

import copy
import pickle
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier
from skorch import NeuralNetClassifier
from torch import nn

from relflat_sk import FlatnessScorer, flatness_report, measure
from relflat_sk._losses.loss import Loss
from relflat_sk._network.batches import make_batches
from relflat_sk._network.network import Network
from relflat_sk.measures import evaluate
from relflat_sk.measures._perturbation import draw_noise, weights_of
from relflat_sk.measures._sharpness import (
    SHARPNESS_MEASURES,
    adaptive_sharpness,
    expected_sharpness,
    keskar_sharpness,
    sharpness_curve,
)
from tests.cases import CASES
from tests.measures.test_fisher_rao import Recurrent
from tests.measures.test_layer_kinds import NETS
from tests.measures.test_layer_kinds import make as make_kind
from tests.measures.test_report import mlp, rescaled
from tests.network.test_network import prepared, same, state_of

CE, MSE = nn.CrossEntropyLoss(), nn.MSELoss()
pytestmark = pytest.mark.filterwarnings("ignore:NLLLoss takes log:relflat_sk.FlatnessWarning")
STOCHASTIC = {
    "pac_bayes_flatness": {"n_draws": 2, "target": 0.01, "risk": "loss"},
    "pac_bayes_magnitude_flatness": {"n_draws": 2, "target": 0.01, "risk": "loss"},
    "expected_sharpness": {"n_draws": 2},
    "keskar_sharpness": {"n_steps": 2, "n_restarts": 1},
    "adaptive_sharpness": {"kind": "average", "n_draws": 2},
}
QUICK = {
    "fisher_rao_norm": {},
    "joint_eigenvalue_flatness": {"random_state": 0},
    **{name: {**arguments, "random_state": 0} for name, arguments in STOCHASTIC.items()},
}


def network(net, criterion, X, y, **options):
    return Network(net, Loss(criterion), make_batches(X, y, **options))


def regression(seed=0):
    torch.manual_seed(seed)
    net = nn.Linear(3, 1).double()
    return net, torch.randn(12, 3).double(), torch.randn(12, 1).double()


def recurrent():
    torch.manual_seed(0)
    net = Recurrent().double()
    X = torch.randn(7, 6, 4).double()
    return net, X, net(X).argmax(dim=1)


def exact_rise(net, X, spread_of):
    """Noise of variance ``s_j^2`` on weight j raises the squared error by ``s_j^2 mean x_j^2``."""
    along = spread_of(net.weight[0]).square() @ X.square().mean(0)
    return (along + spread_of(net.bias).square().sum()).item()


# -- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.01, 0.3])
def test_expected_sharpness_of_a_linear_regression(alpha):
    net, X, y = regression()
    exact = exact_rise(net, X, lambda w: alpha * (10 * w.abs() + 1))
    found = expected_sharpness(
        network(net, MSE, X, y, batch_size=5), alpha=alpha, n_draws=300, random_state=0
    )
    assert abs(found.value - exact) < 4 * found.stderr
    assert found.stderr < 0.1 * exact
    assert found.method == "monte carlo"


def test_average_adaptive_sharpness_of_a_linear_regression():
    net, X, y = regression()
    exact = exact_rise(net, X, lambda w: 0.2 * w)
    at = network(net, MSE, X, y, batch_size=5)
    found = adaptive_sharpness(at, kind="average", rho=0.2, n_draws=300, random_state=0)
    assert abs(found.value - exact) < 4 * found.stderr
    assert found.stderr < 0.1 * exact


@pytest.mark.slow
@pytest.mark.parametrize("name", ["expected_sharpness", "adaptive_sharpness"])
def test_error_bars_are_right(name):
    net, X, y = regression()
    at = network(net, MSE, X, y)
    if name == "expected_sharpness":
        arguments, exact = {"alpha": 0.1}, exact_rise(net, X, lambda w: 0.1 * (10 * w.abs() + 1))
    else:
        arguments, exact = {"kind": "average", "rho": 0.5}, exact_rise(net, X, lambda w: 0.5 * w)
    found = [SHARPNESS_MEASURES[name](at, **arguments, random_state=seed) for seed in range(200)]
    errors = np.array([one.value - exact for one in found])
    stated = np.array([one.stderr for one in found])
    assert np.sqrt((stated**2).mean()) == pytest.approx(np.sqrt((errors**2).mean()), rel=0.2)
    assert abs(errors.mean()) < 4 * errors.std() / np.sqrt(len(errors))


def test_curve_trades_sharpness_for_norm():
    net, X, y = regression()
    at = network(net, MSE, X, y)
    alphas = [0.001, 0.1, 0.01]
    curve = sharpness_curve(at, alphas, n_draws=5, random_state=0)
    assert curve["alpha"].tolist() == alphas
    w = torch.cat([net.weight.flatten(), net.bias]).detach()
    for _, row in curve.iterrows():
        s = row["alpha"] * (10 * w.abs() + 1)
        posterior, prior = (torch.distributions.Normal(mean, s) for mean in (w, 0 * w))
        divergence = torch.distributions.kl_divergence(posterior, prior).sum().item()
        assert row["kl"] == pytest.approx(divergence)
        found = expected_sharpness(at, alpha=row["alpha"], n_draws=5, random_state=0)
        assert row["expected_sharpness"] == found.value
        assert row["stderr"] == found.stderr
    # the loss is quadratic, and the draws are shared: the curve has no noise of its own
    assert np.ptp(curve["expected_sharpness"] / curve["alpha"] ** 2) < 1e-6


def test_keskar_sharpness_is_relative_to_one_plus_the_loss():
    """One weight and a convex loss: the larger of the two ends of the interval."""
    X, y = torch.ones(4, 1).double(), torch.full((4, 1), 3.0).double()
    net = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        net.weight.fill_(2.0)
    found = keskar_sharpness(network(net, MSE, X, y), alpha=0.1)
    assert found.value == pytest.approx((1.3**2 - 1) / (1 + 1))
    assert (found.stderr, found.method) == (0.0, "ascent")
    with pytest.raises(ValueError, match="divides by 1 . loss, and the mean loss is -5"):
        keskar_sharpness(network(net, lambda z, y: (z - y).square().mean() - 6, X, y))


def test_adaptive_sharpness_moves_weights_by_a_share_of_themselves():
    X, y = torch.ones(4, 1).double(), torch.full((4, 1), 3.0).double()
    net = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        net.weight.fill_(2.0)
    for norm in ("linf", "l2"):
        found = adaptive_sharpness(network(net, MSE, X, y), rho=0.1, norm=norm)
        assert found.value == pytest.approx(1.2**2 - 1)


class UnitLogits(nn.Module):
    def forward(self, z):
        z = z - z.mean(1, keepdim=True)
        return z / z.norm(dim=1, keepdim=True)


@pytest.mark.parametrize("kind", ["worst", "average"])
@pytest.mark.parametrize("head", ["logits", "log-probabilities", "skorch"])
def test_normalised_logits(kind, head):
    net, X, y = make_kind("mlp tanh")
    expected = adaptive_sharpness(
        network(nn.Sequential(net, UnitLogits()), CE, X, y), kind=kind, random_state=0
    )
    arguments = {"kind": kind, "normalize_logits": True, "random_state": 0}
    if head == "skorch":
        net = nn.Sequential(net, nn.Softmax(dim=1))
        model = NeuralNetClassifier(net).initialize()
        found = measure("adaptive_sharpness", model, X, y, **arguments)
    else:
        criterion = CE
        if head == "log-probabilities":
            net, criterion = nn.Sequential(net, nn.LogSoftmax(dim=1)), nn.NLLLoss()
        found = measure("adaptive_sharpness", net, X, y, criterion=criterion, **arguments)
    assert found == pytest.approx(expected.value, rel=1e-6)


def test_logits_are_needed_to_normalise_them():
    net, X, y = regression()
    with pytest.raises(ValueError, match="normalize_logits needs a classifier .* got MSELoss"):
        adaptive_sharpness(network(net, MSE, X, y), normalize_logits=True)
    net = nn.Conv1d(2, 3, 1)
    X, y = torch.randn(5, 2, 4), torch.zeros(5, 4).long()
    with pytest.raises(ValueError, match="needs outputs of shape .n, n_classes., got .5, 3, 4."):
        adaptive_sharpness(network(net, CE, X, y), normalize_logits=True)


# -- invariances -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHARPNESS_MEASURES)
@pytest.mark.parametrize("case", ["cross-entropy class weights", "squared error", "a function"])
def test_batches_do_not_matter(name, case):
    make_net, make_criterion, make_target, _ = CASES[case]
    torch.manual_seed(1)
    net, criterion, X, y = (
        make_net(),
        make_criterion(),
        torch.randn(11, 5).double(),
        make_target(11),
    )
    one, two = (
        SHARPNESS_MEASURES[name](
            network(net, criterion, X, y, batch_size=size), **QUICK[name]
        ).value
        for size in (11, 4)
    )
    assert one == pytest.approx(two, rel=1e-6)


@pytest.mark.parametrize("name", SHARPNESS_MEASURES)
def test_sample_weights_count_samples(name):
    net, X, y = make_kind("mlp tanh")
    counts = torch.tensor([1, 3, 0, 2, 1, 1, 2])
    weighted = network(net, CE, X, y, sample_weight=counts.numpy())
    repeated = network(net, CE, X.repeat_interleave(counts, 0), y.repeat_interleave(counts, 0))
    one, two = (SHARPNESS_MEASURES[name](at, **QUICK[name]).value for at in (weighted, repeated))
    assert one == pytest.approx(two, rel=1e-6)


@pytest.mark.parametrize("name", SHARPNESS_MEASURES)
@pytest.mark.parametrize("kind", NETS)
def test_every_architecture(name, kind):
    net, X, y = make_kind(kind)
    found = evaluate(name, net, X, y, criterion=CE, **QUICK[name])
    assert np.isfinite(found.value)
    assert found.value != 0


@pytest.mark.parametrize("name", STOCHASTIC)
def test_random_states(name):
    net, X, y = make_kind("mlp tanh")
    at = network(net, CE, X, y)

    def value(random_state):
        return SHARPNESS_MEASURES[name](at, **STOCHASTIC[name], random_state=random_state).value

    assert value(0) == value(0) == value(np.int64(0))
    if name != "keskar_sharpness":  # two steps from a random point may find less than no step
        assert value(1) != value(0)
        state = np.random.RandomState(0)
        assert value(state) != value(state)
        assert len({value(None) for _ in range(10)}) > 1
    assert value(np.random.RandomState(0)) == value(np.random.RandomState(0))


def test_noise_is_the_same_in_every_precision_and_of_the_right_size():
    net = nn.Linear(300, 100)
    single, double = (
        draw_noise(weights_of(network(one, MSE, [[0.0]], [[0.0]])), 0)
        for one in (net, copy.deepcopy(net).double())
    )
    for name, value in single.items():
        torch.testing.assert_close(value.double(), double[name], rtol=1e-6, atol=1e-6)
        assert value.dtype == torch.float32
    assert single["weight"].std().item() == pytest.approx(1, rel=0.03)
    assert abs(single["weight"].mean().item()) < 0.03


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", ["conv", "recurrent"])
@pytest.mark.parametrize("name", SHARPNESS_MEASURES)
def test_devices_agree(name, kind):
    net, X, y = make_kind("conv") if kind == "conv" else recurrent()
    one, two = (
        measure(name, net, X, y, criterion=CE, device=device, **QUICK[name])
        for device in ("cpu", "cuda")
    )
    assert one == pytest.approx(two, rel=1e-4)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.floats(0.1, 10), min_size=6, max_size=6), st.integers(0, 10**6))
@pytest.mark.parametrize("change", ["layer", "feature neurons", "own neurons"])
def test_shares_of_weights_move_with_their_scale(change, factors, seed):
    X, y = torch.randn(12, 4).double(), torch.arange(12) % 3
    one, two = mlp(seed), rescaled(mlp(seed), change, factors)
    for arguments in (
        {"kind": "average", "rho": 0.1, "n_draws": 2, "random_state": 0},
        {"norm": "linf", "rho": 0.1, "n_steps": 5},
        {"norm": "l2", "rho": 0.1, "n_steps": 5, "n_restarts": 1, "random_state": 0},
    ):
        before, after = (
            measure("adaptive_sharpness", net, X, y, criterion=CE, **arguments)
            for net in (one, two)
        )
        assert after == pytest.approx(before, rel=1e-6, abs=1e-12)


# -- the network stays as it was ---------------------------------------------------------------


@pytest.mark.parametrize("name", SHARPNESS_MEASURES)
def test_the_network_stays_as_it_was(name):
    net, X, y = prepared()
    before = state_of(net)
    measure(name, net, X, y, criterion=CE, batch_size=4, **QUICK[name])
    same(before, state_of(net))


@pytest.mark.parametrize("name", SHARPNESS_MEASURES)
def test_the_network_stays_as_it_was_after_an_exception(name):
    net, X, y = prepared(fails=True)
    before = state_of(net)
    with pytest.raises(RuntimeError, match="in the middle"):
        SHARPNESS_MEASURES[name](network(net, CE, X, y, batch_size=4), **QUICK[name])
    same(before, state_of(net))


@pytest.mark.parametrize("name", SHARPNESS_MEASURES)
def test_recurrent_layers_keep_their_weights(name):
    """Recurrent layers hold a second list of their weights, beside the parameters."""
    net, X, y = recurrent()
    output, before = net(X), pickle.dumps(net)
    assert measure(name, net, X, y, criterion=CE, **QUICK[name]) > 0
    assert pickle.dumps(net) == before
    assert torch.equal(copy.deepcopy(net)(X), output)
    assert torch.equal(net(X), output)
    assert torch.backends.mkldnn.enabled


@pytest.mark.parametrize("name", SHARPNESS_MEASURES)
def test_memory_does_not_grow_with_the_data(name):
    """Each batch's graph and activations are freed before the next batch runs."""
    made, alive = [], []

    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden = nn.Linear(4, 50)
            self.out = nn.Linear(50, 3)

        def forward(self, x):
            alive.append(sum(ref() is not None for ref in made))
            h = torch.tanh(self.hidden(x))
            made.append(weakref.ref(h))
            return self.out(h)

    X, y = torch.randn(32, 4), torch.arange(32) % 3
    SHARPNESS_MEASURES[name](network(Watched(), CE, X, y, batch_size=8), **QUICK[name])
    assert len(alive) >= 4
    assert not any(alive)


def test_frozen_and_shared_weights_are_disturbed_like_others():
    net, X, y = regression()
    expected = expected_sharpness(network(net, MSE, X, y), random_state=0)
    net.requires_grad_(False)
    assert expected_sharpness(network(net, MSE, X, y), random_state=0) == expected

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(3, 3)
            self.two = nn.Linear(3, 3)
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.two(torch.tanh(self.one(x)))

    at = network(Shared().double(), MSE, X, X)
    assert list(weights_of(at)) == ["one.weight", "one.bias", "two.bias"]
    assert keskar_sharpness(at).value > 0


# -- by the measure's name ---------------------------------------------------------------------


def test_estimators_of_all_kinds_are_measured():
    X, y = torch.randn(30, 4).numpy(), np.array(["a", "b", "c"])[np.arange(30) % 3]
    for model in (
        LogisticRegression(),
        MLPClassifier((5,), max_iter=5000, random_state=0),
    ):
        model.fit(X, y)
        for name in SHARPNESS_MEASURES:
            assert np.isfinite(measure(name, model, X, y, **QUICK[name]))
    scorer = FlatnessScorer("keskar_sharpness", at_minimum="ignore", measure_params={"n_steps": 2})
    assert scorer(model, X, y) < 0


def test_report_has_one_row_for_the_whole_network():
    net, X, y = make_kind("mlp tanh")
    report = flatness_report(
        net, X, y, criterion=CE, measures=["fisher_rao_norm", "keskar_sharpness"], n_steps=3
    )
    assert report["layer"].tolist() == ["", ""]
    assert report["invariance"].tolist() == ["layer, feature neurons, own neurons", "none"]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("expected_sharpness", {"alpha": 0}, "alpha must be a finite positive number, got 0"),
        ("keskar_sharpness", {"alpha": -1.0}, "alpha must be a finite positive number, got -1.0"),
        ("adaptive_sharpness", {"rho": np.inf}, "rho must be a finite positive number, got inf"),
        ("adaptive_sharpness", {"kind": "best"}, "kind must be 'worst' or 'average', got 'best'"),
        ("expected_sharpness", {"n_draws": 1.0}, "n_draws must be an integer .*got 1.0"),
        ("adaptive_sharpness", {"kind": "average", "random_state": 0.5}, "random_state must be"),
    ],
)
def test_bad_arguments(name, arguments, message):
    net, X, y = regression()
    with pytest.raises(ValueError, match=message):
        measure(name, net, X, y, criterion=MSE, **arguments)


def test_networks_without_weights_are_refused():
    with pytest.raises(ValueError, match="Identity has no parameters whose disturbance"):
        keskar_sharpness(network(nn.Identity(), MSE, [[1.0]], [[1.0]]))
