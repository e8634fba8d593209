"""What holds for every measure: of batches, precision, sample weights and the network."""

import weakref
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier
from torch import nn

from relflat_sk import (
    flatness_report,
    measure,
    relative_flatness,
)
from relflat_sk.exceptions import FlatnessWarning
from relflat_sk.measures._api import evaluate
from relflat_sk.measures._layer_measures import LAYER_MEASURES
from relflat_sk.measures._measure_network import NETWORK_WIDE
from relflat_sk.measures._names import number_names
from tests.cases import CASES as CRITERIA
from tests.measures.nets import CE, reached
from tests.network.test_network import prepared, same, state_of

# networks with random weights are at no minimum
pytestmark = pytest.mark.filterwarnings("ignore::relflat_sk.exceptions.FlatnessWarning")
# a power law needs a layer of at least ten inputs and outputs
NAMES = sorted(set(number_names()) - {"spectral_exponent"})
QUICK = {"random_state": 0, "n_draws": 2, "n_steps": 2, "target": 0.01}
CHAINS = {"l1_path_norm", "l2_path_norm", "log_robustness"}  # need one
MARGINS = {"inverse_margin", "log_robustness"}  # a percentile has no weights
OF_CRITERION = {"adaptive_sharpness", "fisher_rao_norm", "joint_eigenvalue_flatness"}
OF_CRITERION |= {"pac_bayes_flatness", "takeuchi_criterion"}
WHOLE = set(NAMES) & set(NETWORK_WIDE) - CHAINS
CLASSIFIERS = MARGINS | {"inverse_confidence", "predictive_entropy", "calibration_error"}


def value(name, net, X, y, **options):
    """Measure, with few draws and steps."""
    takes = NETWORK_WIDE[name].arguments if name in NETWORK_WIDE else {"random_state"}
    own = {key: one for key, one in QUICK.items() if key in takes or key == "random_state"}
    if name.startswith("pac_bayes"):
        own["risk"] = "loss"
    if "criterion" in options:
        options["criterion"], y = reached(name, options["criterion"], X, y)
    return measure(name, net, X, y, **own, **options)


# -- the network, and its batches -----------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("case", "name"),
    [
        *(("cross-entropy class weights", name) for name in sorted(WHOLE)),
        *(("squared error", name) for name in sorted(WHOLE - CLASSIFIERS)),
        *(("a function", name) for name in sorted(OF_CRITERION)),
    ],
)
def test_batches_do_not_matter_for_any_criterion(name, case):
    make_net, make_criterion, make_target, _ = CRITERIA[case]
    torch.manual_seed(1)
    net, criterion = make_net(), make_criterion()
    data, target = torch.randn(11, 5).double(), make_target(11)
    one, two = (
        value(name, net, data, target, criterion=criterion, batch_size=size) for size in (11, 4)
    )
    assert one == pytest.approx(two, rel=1e-6, nan_ok=True)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in sorted(set(NAMES) - CHAINS - {"network_flatness"})),
        ("relative_flatness", {"method": "hutchinson", "n_probes": 2}),
    ],
)
def test_memory_does_not_grow_with_the_data(name, options):
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

    inputs, labels = torch.randn(32, 4), torch.arange(32) % 3
    for layer in (0, -1) if name in LAYER_MEASURES else (-1,):
        value(name, Watched(), inputs, labels, layer=layer, criterion=CE, batch_size=8, **options)
    assert len(alive) >= 4
    assert not any(alive)


def test_estimators_of_all_kinds_are_measured():
    inputs = np.random.default_rng(0).normal(size=(30, 4))
    labels = np.array(["a", "b", "c"])[inputs[:, :3].argmax(axis=1)]
    for model in (
        LogisticRegression(C=100),
        MLPClassifier((5,), max_iter=5000, random_state=0, solver="lbfgs"),
    ):
        model.fit(inputs, labels)
        for name in NAMES:
            assert np.isfinite(value(name, model, inputs, labels))


# -- sample weights: whole numbers have the effect of repeated samples ----------------------------

N = 14

# the first of the batches of 4 has no weight at all
COUNTS = np.array([0, 0, 0, 0, 1, 0, 4, 1, 2, 1, 1, 3, 0, 2])

ROWS = np.repeat(np.arange(N), COUNTS)

RNG = torch.Generator().manual_seed(0)

X = torch.randn(N, 6, generator=RNG, dtype=torch.float64)

CLASSES = torch.randint(0, 3, (N,), generator=RNG)

VALUES = torch.randn(N, 3, generator=RNG, dtype=torch.float64)


def perceptron(activation):
    return nn.Sequential(
        nn.Linear(6, 5), activation(), nn.Linear(5, 4), activation(), nn.Linear(4, 3)
    )


def convolutional():
    convolutions = nn.Conv1d(1, 3, 2), nn.ReLU(), nn.Conv1d(3, 2, 2)
    return nn.Sequential(
        nn.Unflatten(1, (1, 6)), *convolutions, nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
    )


def tokens():
    """A layer that is applied to each of three positions."""
    return nn.Sequential(
        nn.Unflatten(1, (3, 2)), nn.Linear(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)
    )


class ClassesSecond(nn.Module):
    def forward(self, z):
        return z.transpose(1, 2)


def labelled_tokens():
    """A label for each of two positions."""
    layers = nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), ClassesSecond()
    return nn.Sequential(nn.Unflatten(1, (2, 3)), *layers)


CASES = {
    "softmax": (lambda: perceptron(nn.ReLU), CE, CLASSES),
    "smooth": (lambda: perceptron(nn.Tanh), CE, CLASSES),
    "sum": (lambda: perceptron(nn.ReLU), nn.CrossEntropyLoss(reduction="sum"), CLASSES),
    "class weights": (
        lambda: perceptron(nn.ReLU),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)),
        CLASSES,
    ),
    "smoothed, ignoring": (
        lambda: perceptron(nn.ReLU),
        nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=2),
        CLASSES,
    ),
    "probabilities": (
        lambda: nn.Sequential(*perceptron(nn.ReLU), nn.Sigmoid()),
        nn.BCELoss(torch.tensor([1.0, 3.0, 0.2], dtype=torch.float64)),
        (VALUES > 0).double(),
    ),
    "squares": (lambda: perceptron(nn.ReLU), nn.MSELoss(), VALUES),
    "huber": (lambda: perceptron(nn.Tanh), nn.HuberLoss(), VALUES),
    "soft margin": (lambda: perceptron(nn.Tanh), nn.SoftMarginLoss(), VALUES.sign()),
    "convolutions": (convolutional, CE, CLASSES),
    "tokens": (tokens, CE, CLASSES),
    "labelled tokens": (labelled_tokens, CE, torch.stack([CLASSES, CLASSES.roll(1)], dim=1)),
}


def make(case):
    build, criterion, y = CASES[case]
    torch.manual_seed(1)
    return build().double(), criterion, y


@pytest.mark.parametrize("layer", [0, -1])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["relative_flatness", "normalized_relative_flatness"])
def test_weights_of_relative_flatness(case, layer, name):
    net, criterion, y = make(case)
    options = {"layer": layer, "criterion": criterion, "method": "exact", "batch_size": 4}
    weighted, tripled = (
        evaluate(name, net, X, y, sample_weight=times * COUNTS, **options) for times in (1, 3)
    )
    repeated = evaluate(name, net, X[ROWS], y[ROWS], **options)
    assert weighted.value == pytest.approx(repeated.value, rel=1e-10)
    assert weighted.risk == pytest.approx(repeated.risk, rel=1e-12)
    assert weighted.constant_risk() == pytest.approx(repeated.constant_risk(), rel=1e-9)
    assert weighted.value != pytest.approx(evaluate(name, net, X, y, **options).value, rel=1e-3)
    # a mean: the scale does not matter
    assert tripled.value == pytest.approx(weighted.value, rel=1e-10)


@pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalized"])
def test_weights_of_probes(normalize):
    net, criterion, y = make("smooth")
    arguments = {"layer": 1, "criterion": criterion, "normalize": normalize}
    estimate, stderr = relative_flatness(
        net,
        X,
        y,
        sample_weight=COUNTS,
        method="hutchinson",
        n_probes=400,
        random_state=0,
        return_stderr=True,
        **arguments,
    )
    exact = relative_flatness(net, X[ROWS], y[ROWS], method="exact", **arguments)
    assert stderr < 0.1 * exact
    assert abs(estimate - exact) < 4 * stderr


@pytest.mark.parametrize(
    ("case", "name"),
    [
        *(("softmax", name) for name in sorted(set(NAMES) - MARGINS)),
        *(("squares", name) for name in sorted(set(NAMES) - CLASSIFIERS - {"network_flatness"})),
        *(("convolutions", name) for name in sorted({*LAYER_MEASURES, "takeuchi_criterion"})),
    ],
)
def test_weights_of_every_measure(case, name):
    net, criterion, y = make(case)
    arguments = {"criterion": criterion, "batch_size": 4}
    for layer in (0, -1) if name in LAYER_MEASURES else (-1,):
        weighted = value(name, net, X, y, layer=layer, sample_weight=COUNTS, **arguments)
        repeated = value(name, net, X[ROWS], y[ROWS], layer=layer, **arguments)
        assert weighted == pytest.approx(repeated, rel=1e-8)


@pytest.mark.filterwarnings("ignore:spectral_exponent does not apply:relflat_sk.FlatnessWarning")
def test_the_margin_refuses_weights():
    net, criterion, y = make("softmax")
    for name in MARGINS:
        with pytest.raises(ValueError, match="leave sample_weight out"):
            measure(name, net, X, y, criterion=criterion, sample_weight=COUNTS)
    with pytest.warns(FlatnessWarning, match="leave sample_weight out"):
        report = flatness_report(net, X, y, criterion=criterion, sample_weight=COUNTS)
    report = report.set_index("measure")["value"]
    assert report[sorted(MARGINS)].isna().all()
