"""What holds for every measure: of batches, precision, sample weights and the network."""

import weakref
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from relflat_sk import get_measure_names, measure
from relflat_sk.measures._layer_measures import LAYER_MEASURES
from relflat_sk.measures._measure_network import NETWORK_WIDE
from tests.measures.nets import CE, OF_CRITERIA, PROBLEMS, constant_loss, evaluate, make, reached
from tests.network.test_network import prepared, same, state_of

# networks with random weights are at no minimum
pytestmark = pytest.mark.filterwarnings("ignore::relflat_sk.exceptions.FlatnessWarning")
NAMES = get_measure_names()
QUICK = {"random_state": 0, "n_draws": 2, "n_steps": 2, "target": 0.01}
CHAINS = {"l1_path_norm", "l2_path_norm", "log_robustness"}  # need one
MARGINS = {"inverse_margin", "log_robustness"}  # a percentile has no weights
OF_CRITERION = {"adaptive_sharpness", "fisher_rao_norm", "joint_eigenvalue_flatness"}
OF_CRITERION |= {"pac_bayes_flatness"}


def value(name, net, X, y, **options):
    if "criterion" in options:
        options["criterion"], y = reached(name, options["criterion"], X, y)
    return measure(name, net, X, y, **few(name), **options)


def few(name):
    takes = NETWORK_WIDE[name].arguments if name in NETWORK_WIDE else {"random_state"}
    own = {key: one for key, one in QUICK.items() if key in takes or key == "random_state"}
    return own | {"risk": "loss"} if name.startswith("pac_bayes") else own


@pytest.mark.parametrize("fails", [False, True], ids=["measures", "fails"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in sorted(set(NAMES) - {"parameter_count"})),
        *((name, {"layer": 0}) for name in LAYER_MEASURES),
        ("relative_flatness", {"layer": 0, "method": "hutchinson", "n_probes": 2}),
    ],
)
def test_the_network_is_given_back(name, options, fails):
    net, X, y = prepared(fails=fails)
    with torch.autocast("cpu", dtype=torch.float16):
        before = state_of(net)
        with pytest.raises((RuntimeError, ValueError)) if fails else nullcontext():
            value(name, net, X, y, criterion=CE, batch_size=4, **options)
        same(before, state_of(net))


def chain():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(),
        nn.Linear(3 * 3 * 3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3),
    )  # fmt: skip
    X = torch.randn(7, 2, 5, 5)
    net(X)  # statistics
    return net, X, net.eval()(X).argmax(dim=1)


@pytest.mark.parametrize("name", NAMES)
def test_batches_precision_and_frozen_weights_do_not_matter(name):
    net, X, y = chain()
    expected = value(name, net.double(), X.double(), y, criterion=CE)
    before = {key: one.clone() for key, one in net.state_dict().items()}
    net.requires_grad_(False)
    found = value(name, net, X.double(), y, criterion=CE, batch_size=3)
    assert found == pytest.approx(expected, rel=1e-6)
    assert all(torch.equal(one, before[key]) for key, one in net.state_dict().items())
    if "sharpness" not in name:  # a difference of losses
        assert value(name, net.float(), X, y, criterion=CE) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", sorted(OF_CRITERION))
def test_batches_do_not_matter_for_a_criterion_without_losses_of_samples(name):
    problem = PROBLEMS["a function"]()
    at = problem.net, problem.X, problem.y
    one, two = (value(name, *at, batch_size=n, criterion=problem.criterion) for n in (11, 4))
    assert one == pytest.approx(two, rel=1e-6)


class Watched(nn.Module):
    """A network that counts, whenever it runs, how many of its hidden activations are alive."""

    def __init__(self, registered=("hidden", "out")):
        super().__init__()
        layers = {"hidden": nn.Linear(4, 50), "out": nn.Linear(50, 3)}
        for name in registered:
            self.add_module(name, layers[name])
        self.made, self.alive = [], []

    def forward(self, x):
        self.alive.append(sum(ref() is not None for ref in self.made))
        h = torch.tanh(self.hidden(x))
        self.made.append(weakref.ref(h))
        return self.out(h)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in sorted(set(NAMES) - CHAINS - {"network_flatness"})),
        ("relative_flatness", {"method": "hutchinson", "n_probes": 2}),
    ],
)
@pytest.mark.parametrize("registered", [("hidden", "out"), ("out", "hidden")])
def test_each_batch_is_freed_before_the_next_pass(name, options, registered):
    """The first batch runs again if layers are not called in the order of their registration."""
    inputs, labels = torch.randn(32, 4), torch.arange(32) % 3
    for layer in (0, -1) if name in LAYER_MEASURES else (-1,):
        net = Watched(registered)
        value(name, net, inputs, labels, layer=layer, criterion=CE, batch_size=8, **options)
        assert len(net.alive) >= 4
        assert not any(net.alive)


# the first of the batches of 3 has no weight at all
COUNTS = np.array([0, 0, 0, 1, 4, 1, 2, 0, 1, 3, 1])
MEANS = {"a function", "kl divergence"}  # have no losses of single samples
LAYERS = ["mlp relu", "conv", "conv tanh", "regression on tokens", "huber",
          "language model, smoothed, classes second", "cross-entropy smoothed"]  # fmt: skip
WEIGHTED = [
    *((case, -1) for case in sorted({*OF_CRITERIA, *LAYERS} - MEANS)),
    *((case, 0) for case in LAYERS),
]


WEIGHTABLE = set(NAMES) - CHAINS - MARGINS - {"comparable_flatness"}


def weighted_and_repeated(case):
    """A problem, and data of which each sample counts several times in one way or the other."""
    problem = PROBLEMS[case]()
    X, y = problem.X, problem.y
    counts = COUNTS[: len(y)]
    rows = np.repeat(np.arange(len(y)), counts)
    return problem, (X, y, counts), (X[rows], y[rows])


@pytest.mark.parametrize(("case", "layer"), WEIGHTED)
def test_weights_of_relative_flatness(case, layer):
    problem, (X, y, counts), repeated = weighted_and_repeated(case)
    net, of_data = problem.net, {"criterion": problem.criterion, "batch_size": 3}
    options = {"layer": layer, "method": "exact", **of_data}
    for name in ("relative_flatness", "normalized_relative_flatness"):
        weighted = evaluate(name, net, X, y, sample_weight=counts, **options)
        expected = evaluate(name, net, *repeated, **options)
        assert weighted.value == pytest.approx(expected.value, rel=1e-10)
    assert weighted.passes.risk == pytest.approx(expected.passes.risk, rel=1e-12)
    constant = constant_loss(net, X, y, sample_weight=counts, **of_data)
    assert constant == pytest.approx(constant_loss(net, *repeated, **of_data), rel=1e-9)
    plain = evaluate(name, net, X, y, **options)
    assert weighted.value != pytest.approx(plain.value, rel=1e-3)
    # a mean: the scale does not matter
    tripled = evaluate(name, net, X, y, sample_weight=3 * counts, **options)
    assert tripled.value == pytest.approx(weighted.value, rel=1e-10)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        *(("cross-entropy class weights", name) for name in sorted(WEIGHTABLE)),
        *(("conv", name) for name in sorted(LAYER_MEASURES)),
    ],
)
def test_weights_of_every_measure(case, name):
    problem, (X, y, counts), repeated = weighted_and_repeated(case)
    options = {"criterion": problem.criterion, "batch_size": 3}
    for layer in (0, -1) if name in LAYER_MEASURES else (-1,):
        weighted = value(name, problem.net, X, y, layer=layer, sample_weight=counts, **options)
        expected = value(name, problem.net, *repeated, layer=layer, **options)
        assert weighted == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"log_robustness"}))  # of all inputs' box
def test_samples_with_ignored_labels_are_left_out(name):
    net, X, _ = make("mlp relu", n=12)
    y = net(X).argmax(dim=1)  # so that every loss is reached
    kept = torch.arange(12) % 3 > 0
    options = {"criterion": CE, "batch_size": 5, **few(name)}
    found = measure(name, net, X, y.where(kept, -100), **options)
    assert found == pytest.approx(measure(name, net, X[kept], y[kept], **options), rel=1e-8)


@pytest.mark.parametrize("name", sorted(LAYER_MEASURES))
def test_tokens_with_ignored_labels_are_left_out(name):
    net, X = nn.Linear(4, 5).double(), torch.randn(4, 6, 4).double()
    X[:, 4:] *= 9  # such as padding
    y, kept = net(X).argmax(dim=2), torch.arange(6).expand(4, 6) < 4
    padded = measure(name, net, X, y.where(kept, -100), criterion=CE, batch_size=3)
    expected = measure(name, net, X[kept], y[kept], criterion=CE)
    assert padded == pytest.approx(expected, rel=1e-8)
