"""Sample weights of all measures: whole numbers have the effect of repeated samples."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.utils.data import TensorDataset

from relflat_sk import (
    RelativeFlatnessRegularizedClassifier,
    flatness_report,
    get_measure_names,
    measure,
    relative_flatness,
)
from relflat_sk.exceptions import FlatnessWarning
from relflat_sk.measures._layer_measures import LAYER_MEASURES

# networks with random weights are at no minimum
pytestmark = pytest.mark.filterwarnings("ignore::relflat_sk.exceptions.FlatnessWarning")

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


CE = nn.CrossEntropyLoss()
CASES = {
    "softmax": (lambda: perceptron(nn.ReLU), CE, CLASSES),
    "smooth": (lambda: perceptron(nn.Tanh), CE, CLASSES),
    "sum": (lambda: perceptron(nn.ReLU), nn.CrossEntropyLoss(reduction="sum"), CLASSES),
    "class weights": (
        lambda: perceptron(nn.ReLU),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)),
        CLASSES,
    ),
    "squares": (lambda: perceptron(nn.ReLU), nn.MSELoss(), VALUES),
    "huber": (lambda: perceptron(nn.Tanh), nn.HuberLoss(), VALUES),
    "convolutions": (convolutional, CE, CLASSES),
    "tokens": (tokens, CE, CLASSES),
}


def make(case):
    build, criterion, y = CASES[case]
    torch.manual_seed(1)
    return build().double(), criterion, y


@pytest.mark.parametrize("layer", [0, 1, -1])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalized"])
def test_relative_flatness(case, layer, normalize):
    net, criterion, y = make(case)
    arguments = {"layer": layer, "criterion": criterion, "normalize": normalize}
    weighted = relative_flatness(
        net, X, y, sample_weight=COUNTS, method="exact", batch_size=4, **arguments
    )
    repeated = relative_flatness(net, X[ROWS], y[ROWS], method="exact", **arguments)
    assert weighted == pytest.approx(repeated, rel=1e-10)
    plain = relative_flatness(net, X, y, method="exact", **arguments)
    assert weighted != pytest.approx(plain, rel=1e-3)
    tripled = relative_flatness(
        net, X, y, sample_weight=3 * COUNTS, method="exact", batch_size=4, **arguments
    )
    assert tripled == pytest.approx(weighted, rel=1e-10)  # a mean: the scale does not matter


@pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalized"])
def test_probes(normalize):
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


# a percentile of the samples' margins has no weights
MARGINS = {"inverse_margin", "log_robustness"}


@pytest.mark.parametrize("name", sorted(set(get_measure_names()) - MARGINS))
@pytest.mark.parametrize("case", ["softmax", "squares", "convolutions"])
def test_every_measure(case, name):
    net, criterion, y = make(case)
    arguments = {"criterion": criterion, "random_state": 0, "batch_size": 4}
    for layer in (0, -1) if name in LAYER_MEASURES else (-1,):
        weighted = measure(name, net, X, y, layer=layer, sample_weight=COUNTS, **arguments)
        repeated = measure(name, net, X[ROWS], y[ROWS], layer=layer, **arguments)
        assert weighted == pytest.approx(repeated, rel=1e-8)


def test_the_margin_refuses_weights():
    net, criterion, y = make("softmax")
    for name in MARGINS:
        with pytest.raises(ValueError, match="leave sample_weight out"):
            measure(name, net, X, y, criterion=criterion, sample_weight=COUNTS)
    with pytest.warns(FlatnessWarning, match="leave sample_weight out"):
        report = flatness_report(net, X, y, criterion=criterion, sample_weight=COUNTS)
    report = report.set_index("measure")["value"]
    assert report[sorted(MARGINS)].isna().all()


@pytest.mark.parametrize("weights", [COUNTS.tolist(), COUNTS.astype("f4"), torch.tensor(COUNTS)])
def test_weights_of_estimators(weights):
    labels = np.array(["a", "b", "c"])[CLASSES]
    for model in (
        LogisticRegression().fit(X, labels),
        RelativeFlatnessRegularizedClassifier(verbose=0, max_epochs=1, random_state=0).fit(
            X.numpy(), labels
        ),
    ):
        weighted = relative_flatness(model, X, labels, sample_weight=weights)
        assert weighted == pytest.approx(relative_flatness(model, X[ROWS], labels[ROWS]), rel=1e-6)


def test_refuses_weights():
    net, criterion, y = make("softmax")
    with pytest.raises(ValueError, match=r"must have shape \(14,\), one weight per sample"):
        relative_flatness(net, X, y, criterion=criterion, sample_weight=COUNTS[:3])
    with pytest.raises(ValueError, match="leave y and sample_weight out"):
        relative_flatness(net, TensorDataset(X, y), criterion=criterion, sample_weight=COUNTS)
