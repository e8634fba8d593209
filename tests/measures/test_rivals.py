"""Predictions, Takeuchi's criterion and spectra of weights against their definitions, by loops."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from relflat_sk import measure
from tests import oracles
from tests.cases import CASES
from tests.measures.nets import PROBLEMS, make

CE = nn.CrossEntropyLoss()
CLASSIFIERS = [name for name in CASES if name.startswith(("cross-entropy", "nll of log", "bce"))]


def prepare(case):
    problem = PROBLEMS[case]()
    for parameter in problem.net.parameters():
        parameter.data *= 2  # some confidence
    return problem.net, problem.X, problem.y, problem.criterion


def predicted(net, X, y, criterion):
    """List (probabilities, label) of all predictions that count."""
    z = net(X).detach()
    if isinstance(criterion, nn.BCEWithLogitsLoss | nn.BCELoss):
        p = z if isinstance(criterion, nn.BCELoss) else 1 / (1 + (-z).exp())
        pairs = zip(p.flatten().tolist(), y.flatten().tolist(), strict=True)
        return [([1 - one, one], int(label > 0.5)) for one, label in pairs]
    found = []
    for row, given in zip(z, y, strict=True):
        label = int(given.argmax() if y.is_floating_point() else given)
        if label != criterion.ignore_index:
            total = sum(math.exp(v) for v in row.tolist())
            found.append(([math.exp(v) / total for v in row.tolist()], label))
    return found


def calibration_error(pairs, n_bins):
    error = 0.0
    for b in range(n_bins):
        within = [(p, y) for p, y in pairs if b / n_bins < max(p) <= (b + 1) / n_bins]
        if within:
            accuracy = np.mean([np.argmax(p) == y for p, y in within])
            confidence = np.mean([max(p) for p, _ in within])
            error += len(within) / len(pairs) * abs(accuracy - confidence)
    return error


@pytest.mark.parametrize("case", CLASSIFIERS)
def test_predictions_by_loops(case):
    net, X, y, criterion = prepare(case)
    pairs = predicted(net, X, y, criterion)
    expected = {
        "inverse_confidence": 1 / np.mean([max(p) for p, _ in pairs]),
        "predictive_entropy": np.mean([-sum(v * math.log(v) for v in p) for p, _ in pairs]),
        "calibration_error": calibration_error(pairs, 15),
    }
    for name, one in expected.items():
        found = measure(name, net, X, y, criterion=criterion, batch_size=4)
        assert found == pytest.approx(one, rel=1e-10), name
    found = measure("calibration_error", net, X, y, criterion=criterion, n_bins=3)
    assert found == pytest.approx(calibration_error(pairs, 3), rel=1e-10)


def test_confidence_and_entropy_need_no_labels():
    net, X, y, _ = prepare("cross-entropy")
    for name in ("inverse_confidence", "predictive_entropy"):
        unlabelled = measure(name, net, X, criterion=CE)
        assert unlabelled == measure(name, net, X, y, criterion=CE)


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(ignore_index=0)])
def test_tokens_are_predictions(criterion):
    net, X, y = nn.Linear(4, 5).double(), torch.randn(3, 6, 4).double(), torch.arange(18) % 5
    flat = net, X.flatten(0, 1), y
    for name in ("inverse_confidence", "predictive_entropy", "calibration_error"):
        found = measure(name, net, X, y.reshape(3, 6), criterion=criterion)
        assert found == pytest.approx(measure(name, *flat, criterion=criterion))


def test_saturated_outputs_have_an_entropy_of_zero():
    net = nn.Linear(1, 3, bias=False).double()
    net.weight.data = torch.tensor([[1e4], [0.0], [-1e4]]).double()
    X, y = torch.ones(4, 1).double(), torch.tensor([0, 0, 0, 1])
    expected = {"predictive_entropy": 0, "inverse_confidence": 1, "calibration_error": 0.25}
    for name, one in expected.items():
        assert measure(name, net, X, y, criterion=CE) == one


# -- Takeuchi's criterion -------------------------------------------------------------------------


def takeuchi(net, name, each, X, y, ridge):
    """Invert the dense Hessian of the mean of the samples' losses, with a ridge."""
    H = oracles.weight_hessian(net, name, lambda z, y: each(z, y).mean(), X, y)[0]
    H, layer = oracles.flat_matrix(H).numpy(), net.get_submodule(name)
    gradients = [
        torch.autograd.grad(each(net(X), y)[i], layer.weight)[0].flatten().numpy()
        for i in range(len(X))
    ]
    C = np.mean([np.outer(g, g) for g in gradients], axis=0)
    curved = np.diag(H) > 0
    H, C = H[curved][:, curved], C[curved][:, curved]
    return np.trace(np.linalg.inv(H + ridge * np.diag(np.diag(H))) @ C) / len(X)


CLASS_WEIGHTS = torch.tensor([1.0, 3.0, 0.5]).double()
TAKEUCHI = {
    "softmax": (CE, lambda z, y: nn.functional.cross_entropy(z, y, reduction="none")),
    "class weights": (
        nn.CrossEntropyLoss(weight=CLASS_WEIGHTS),
        lambda z, y: (
            nn.functional.cross_entropy(z, y, CLASS_WEIGHTS, reduction="none")
            * (len(y) / CLASS_WEIGHTS[y].sum())
        ),
    ),
    "squares": (
        nn.MSELoss(),
        lambda z, y: (z - nn.functional.one_hot(y, 3)).square().mean(dim=1),
    ),
    "no closed form": (
        nn.HuberLoss(delta=100.0),
        lambda z, y: (z - nn.functional.one_hot(y, 3)).square().mean(dim=1) / 2,
    ),
}


@pytest.mark.parametrize("ridge", [1e-3, 0.1])
@pytest.mark.parametrize("kind", ["mlp relu", "mlp tanh", "conv tanh"])
@pytest.mark.parametrize("case", TAKEUCHI)
def test_takeuchi_by_the_dense_hessian(case, kind, ridge):
    net, X, y = make(kind, n=30)
    criterion, each = TAKEUCHI[case]
    if kind == "mlp relu":
        net[2].bias.data[0] = -100.0
        net[3] = nn.ReLU()  # a dead neuron: its weights have no curvature
    labels = (
        y if isinstance(criterion, nn.CrossEntropyLoss) else nn.functional.one_hot(y, 3).double()
    )
    found = measure(
        "takeuchi_criterion", net, X, labels, criterion=criterion, batch_size=8, ridge=ridge
    )
    last = list(dict(net.named_children()))[-1]
    assert found == pytest.approx(takeuchi(net, last, each, X, y, ridge), rel=1e-8)


# -- spectra --------------------------------------------------------------------------------------


def soft_rank(squares, larger, smaller):
    """Leave out one eigenvalue at a time while the largest is above the edge of the others."""
    rest = sorted(squares)
    while True:
        edge = sum(rest) / (larger * len(rest)) * (larger**0.5 + smaller**0.5) ** 2
        if len(rest) == 1 or sum(value > edge for value in squares) <= len(squares) - len(rest):
            return edge / max(squares)
        rest = rest[: len(squares) - sum(value > edge for value in squares)]


def exponent(squares):
    """Fit Pareto's law to all tails by scipy, and take the one with the least distance."""
    fits = []
    for n in range(2, len(squares) + 1):
        tail = sorted(squares)[-n:]
        shape, _, scale = stats.pareto.fit(tail, floc=0, fscale=tail[0])
        distance = stats.kstest(tail, stats.pareto(shape, scale=scale).cdf).statistic
        fits.append((distance, 1 + shape))
    return min(fits)[1]


def spectra(net):
    weights = [m.weight.detach().flatten(1) for m in net.modules() if hasattr(m, "in_channels")
               or isinstance(m, nn.Linear)]  # fmt: skip
    return [(np.linalg.svd(W.numpy())[1] ** 2, max(W.shape), min(W.shape)) for W in weights]


def wide():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 25), nn.Tanh(), nn.Linear(25, 3)
    )
    for at, layer in enumerate(net[::2]):
        layer.weight.data += at * torch.outer(torch.randn(len(layer.weight)),
                                              torch.randn(layer.in_features))  # fmt: skip
    return net.double(), torch.randn(5, 30).double(), torch.arange(5) % 3


@pytest.mark.parametrize("kind", ["wide", "residual", "transformer"])
def test_spectra_by_singular_values(kind):
    net, X, y = wide() if kind == "wide" else make(kind)
    found = {name: measure(name, net, X, y, criterion=CE) for name in ("stable_rank", "soft_rank")}
    of = spectra(net)
    assert found["stable_rank"] == pytest.approx(np.mean([s.sum() / s[0] for s, _, _ in of]))
    assert found["soft_rank"] == pytest.approx(np.mean([soft_rank(*one) for one in of]))
    long = [s for s, _, smaller in of if smaller >= 10]
    if long:
        found = measure("spectral_exponent", net, X, y, criterion=CE)
        assert found == pytest.approx(np.mean([exponent(s) for s in long]), rel=1e-6)
