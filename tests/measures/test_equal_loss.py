"""Flatness at equal loss, against the dense Hessian of the tempered loss (MATH.md, section 14)."""

import copy
from functools import cache

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.nn import functional as F

from relflat_sk import FlatnessScorer, flatness_report, measure, relative_flatness
from relflat_sk.exceptions import FlatnessWarning
from tests import oracles
from tests.measures.nets import best_constant, count_runs, evaluate, measure_all

RNG = torch.Generator().manual_seed(0)
X = torch.randn(30, 4, generator=RNG, dtype=torch.float64)
THREE = (X[:, 0] > 0).long() + (X[:, 1] > 0.5)
LABELS = (X[:, :2] > 0.3).double()
VALUES = torch.sin(X[:, :2]) + 0.1
WEIGHTS = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
SOFT = 0.85 * F.one_hot(THREE, 3).double() + 0.05
IGNORED = torch.where(torch.arange(30)[:, None] % 4 < torch.tensor([4, 2]), THREE[:, None], -100)
POSITIVE = torch.tensor([2.0, 0.5], dtype=torch.float64)


def mlp(n_outputs, *tail):
    layers = nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, n_outputs)
    return nn.Sequential(*layers, *tail).double()


CE, BCE, MSE = nn.CrossEntropyLoss, nn.BCEWithLogitsLoss, nn.MSELoss
SMOOTHED = CE(WEIGHTS, label_smoothing=1e-3)
SEVERAL = BCE(WEIGHTS[:2], pos_weight=POSITIVE)
# the sizes and the tail of a network, criterion, targets, and the criterion of its logits
CASES = {
    "softmax": ((3,), CE(), THREE, CE()),
    "class weights, smoothed": ((3,), SMOOTHED, THREE, SMOOTHED),
    "probabilities as labels": ((3,), CE(WEIGHTS), SOFT, CE(WEIGHTS)),
    "smoothed tokens, some ignored": (
        (6, nn.Unflatten(1, (3, 2))), CE(label_smoothing=0.1), IGNORED, CE(label_smoothing=0.1),
    ),
    "soft labels, binary": ((2,), SEVERAL, 0.8 * LABELS + 0.1, SEVERAL),
    "log-probabilities": ((3, nn.LogSoftmax(1)), nn.NLLLoss(), THREE, CE()),
    "binary": ((1,), BCE(), LABELS[:, :1], BCE()),
    "several labels": ((2,), BCE(pos_weight=POSITIVE), LABELS, BCE(pos_weight=POSITIVE)),
    "probabilities": ((2, nn.Sigmoid()), nn.BCELoss(), LABELS, BCE()),
    "squares": ((2,), MSE(), VALUES, MSE()),
}  # fmt: skip


@cache
def train(case, n_steps=200):
    sizes, criterion, y, of_logits = CASES[case]
    torch.manual_seed(1)
    net = mlp(*sizes)
    optimizer = torch.optim.Adam(net.parameters(), 0.03)
    for _ in range(n_steps):
        optimizer.zero_grad()
        criterion(net(X), y).backward()
        optimizer.step()

    def loss(output, y, T):
        """The loss of a batch's outputs at temperature T."""
        if case == "squares":
            return of_logits(output, y) / T
        return of_logits((output.logit() if case == "probabilities" else output) / T, y)

    return net.requires_grad_(False), criterion, y, loss


def temperature(net, y, loss, share):
    """The largest temperature at which the loss is a share of a constant output's, by halving."""
    output = net(X)
    to_output = {"LogSoftmax": lambda z: z.log_softmax(0), "Sigmoid": torch.sigmoid}
    last = to_output.get(type(net[-1]).__name__, lambda z: z)
    shape = output.shape[1], *(1 for _ in output.shape[2:])
    constant = best_constant(lambda z: loss(last(z).expand_as(output), y, 1.0), *shape)
    lowest = 0.0
    if y is not VALUES and last(output) is output:  # of outputs that are free
        lowest = best_constant(lambda z: loss(z, y, 1.0), *output.shape)
    target = lowest + share * (constant - lowest)
    if y is VALUES:  # the temperature divides the loss
        return loss(output, y, 1.0).item() / target
    high = 1e9
    while loss(output, y, high / 1.1) > target:
        high /= 1.1
    return brentq(lambda T: float(loss(output, y, T)) - target, high / 1.2, high, xtol=1e-15)


@pytest.mark.parametrize(("layer", "share"), [(0, 0.1), (-1, 0.05)])
@pytest.mark.parametrize("case", CASES)
def test_every_measure_is_that_of_the_tempered_loss(case, share, layer):
    net, criterion, y, loss = train(case)
    T = temperature(net, y, loss, share)
    at = net, X, y
    options = {"layer": layer, "criterion": criterion, "at_loss": share, "batch_size": 16}
    name = [name for name, m in net.named_modules() if hasattr(m, "weight")][layer]
    H, W = oracles.weight_hessian(net, name, lambda out, y: loss(out, y, T), X, y)
    rel = 1e-5 if case == "probabilities" else 1e-8  # the oracle undoes a sigmoid
    values = measure_all(*at, **options).value
    for name_, oracle in oracles.TABLE_1.items():
        assert values[name_] == pytest.approx(oracle(H, W), rel=rel), name_
    top = evaluate("eigenvalue_flatness", *at, rtol=1e-12, random_state=0, **options)
    assert top.passes.risk == pytest.approx(criterion(net(X), y).item(), rel=1e-9)
    assert top.value == pytest.approx(W.square().sum().item() * oracles.largest(H), rel=rel)
    found = measure("comparable_flatness", *at, method="exact", **options)
    terms = measure("comparable_flatness", *at, method="exact", per_sample=True, **options)
    assert terms.mean() == pytest.approx(found, rel=1e-9)
    if "weights" not in case and "ignored" not in case:  # the samples' own losses have another mean
        of_one = lambda out, y: loss(out, y, T)  # noqa: E731
        expected = oracles.comparable_flatness(net, name, of_one, X, y)
        assert found == pytest.approx(expected, rel=rel)
    options |= {"method": "hutchinson", "n_probes": 40, "random_state": 0}
    probed = evaluate("comparable_flatness", *at, **options)
    assert abs(probed.value - found) <= 5 * probed.stderr + 1e-12


@pytest.mark.parametrize("case", ["softmax", "soft labels, binary", "probabilities", "squares"])
def test_networks_of_single_precision(case):
    net, criterion, y, _ = train(case)
    options = {"at_loss": 0.1}
    expected = relative_flatness(net, X, y, criterion=criterion, **options)
    y = y.float() if y.is_floating_point() else y
    single, criterion = copy.deepcopy(net).float(), copy.deepcopy(criterion).float()
    found = relative_flatness(single, X.float(), y, criterion=criterion, **options)
    assert found == pytest.approx(expected, rel=1e-4)


OF_NETWORK = {
    "fisher_rao_norm": {}, "network_flatness": {"rtol": 1e-10},
    "joint_eigenvalue_flatness": {"rtol": 1e-10}, "expected_sharpness": {"n_draws": 2},
    "keskar_sharpness": {"n_steps": 2}, "adaptive_sharpness": {"n_steps": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", OF_NETWORK)
@pytest.mark.parametrize("case", ["softmax", "squares"])
def test_measures_of_the_whole_network(case, name):
    net, criterion, y, loss = train(case)
    T = temperature(net, y, loss, 0.1)
    options = {"random_state": 0, "batch_size": 16, **OF_NETWORK[name]}
    found = measure(name, net, X, y, criterion=criterion, at_loss=0.1, **options)
    tempered = measure(name, net, X, y, criterion=lambda out, y: loss(out, y, T), **options)
    assert found == pytest.approx(tempered, rel=1e-6)


@pytest.mark.parametrize("layer", [0, -1])
@pytest.mark.parametrize("case", ["softmax", "binary", "several labels"])
def test_the_scale_of_the_logits_does_not_matter(case, layer):
    net, criterion, y, _ = train(case)

    def values(net):
        options = {"layer": layer, "criterion": criterion, "method": "exact"}
        other = measure("comparable_flatness", net, X, y, **options)
        return relative_flatness(net, X, y, at_loss=0.05, **options), other

    for factor in (1e-3, 1e3):
        scaled = copy.deepcopy(net)
        for parameter in scaled[-1].parameters():
            parameter.mul_(factor)
        assert values(scaled) == pytest.approx(values(net), rel=1e-9)


@pytest.mark.parametrize("layer", [0, -1])
@pytest.mark.parametrize("name", ["relative_flatness", "comparable_flatness"])
@pytest.mark.parametrize("case", ["softmax", "several labels", "squares"])
def test_sample_weights(case, name, layer):
    net, criterion, y, _ = train(case)
    counts = np.arange(len(X)) % 3
    rows = np.repeat(np.arange(len(X)), counts)
    options = {"layer": layer, "criterion": criterion, "at_loss": 0.2, "method": "exact"}
    weighted = measure(name, net, X, y, sample_weight=counts, batch_size=4, **options)
    assert weighted == pytest.approx(measure(name, net, X[rows], y[rows], **options), rel=1e-8)


def test_equal_loss_takes_one_pass_more():
    net, criterion, y, _ = train("softmax")

    def count(name, layer, **options):
        options |= {"layer": layer, "criterion": criterion, "batch_size": 10}
        return count_runs(net, lambda: measure(name, net, X, y, **options))

    for name in ("relative_flatness", "normalized_relative_flatness"):
        for layer in (-1, 0):  # of three batches, and the checks of the first
            assert count(name, layer, at_loss=0.1) <= count(name, layer) + 3 + 2


@pytest.mark.parametrize("room", [60, 0])
def test_logits_that_do_not_fit_in_memory(room, monkeypatch):
    net, criterion, y, _ = train("softmax")
    options = {"criterion": criterion, "batch_size": 7}
    expected = measure("comparable_flatness", net, X, y, **options)
    monkeypatch.setattr("relflat_sk.measures._equal_loss._MOST_STORED", room)
    assert measure("comparable_flatness", net, X, y, **options) == pytest.approx(expected, rel=1e-9)
    with pytest.raises(ValueError, match=UNFITTED):
        measure("comparable_flatness", net, X, y.flip(0), **options)


UNFITTED = r"lowest mean loss that the network reaches is .*, which is [\d.]+ of the best constant"


def test_a_network_that_has_not_fitted_has_no_value():
    net, criterion, _, _ = train("softmax", n_steps=0)
    y, options = torch.arange(30) % 3, {"criterion": criterion, "at_loss": 0.05}
    with pytest.raises(ValueError, match=UNFITTED):
        relative_flatness(net, X, y, **options)
    with pytest.warns(FlatnessWarning, match="is nan: no temperature gives the loss"):
        report = flatness_report(net, X, y, **options)
    assert report["value"].isna().all()
    assert "hessian_trace" in set(report["measure"])
    assert "l2_norm" not in set(report["measure"])  # which has no loss
    scorer = FlatnessScorer("comparable_flatness", measure_params={"criterion": criterion})
    with pytest.warns(FlatnessWarning, match=f"cannot be scored: .*{UNFITTED}"):
        assert np.isnan(scorer(net, X, y))


ROUNDED = nn.Sequential(nn.Linear(4, 2), nn.Hardtanh(-1e6, 1e6), nn.Sigmoid()).double()
with torch.no_grad():
    ROUNDED[0].weight.copy_(1e5 * torch.eye(2, 4))
    ROUNDED[0].bias.zero_()
HUGE = mlp(3).requires_grad_(False)
HUGE[-1].weight.mul_(1e35)


@pytest.mark.parametrize(
    ("net", "criterion", "y", "message"),
    [
        (mlp(3), nn.CrossEntropyLoss(), 0 * THREE, "all labels are the same"),
        (mlp(3), nn.NLLLoss(), THREE, "the probabilities do not sum to 1"),
        (ROUNDED, nn.BCELoss(), (X[:, :2] > 0).double(), "sigmoid rounded some to 0 or 1"),
        (nn.Linear(4, 2).double(), nn.MSELoss(), None, "mean squared error is 0"),
        (HUGE, nn.CrossEntropyLoss(), THREE, r"needs logits below 1e\+30, got \S+e\+3\d\."),
    ],
)
def test_refused(net, criterion, y, message):
    y = net(X).detach() if y is None else y
    with pytest.raises(ValueError, match=message):
        relative_flatness(net, X, y, criterion=criterion, layer=0, at_loss=0.1)
    names = ["comparable_flatness", "l2_norm"]
    with pytest.warns(FlatnessWarning, match=f"^comparable_flatness is nan: .*{message}"):
        report = flatness_report(net, X, y, criterion=criterion, layers=[0], measures=names)
    assert report["value"].isna().tolist() == [True, False]


def test_saturated_networks_are_scored():
    y = (X[:, 0] > X[:, 1]).numpy()
    model = LogisticRegression(C=1e4, max_iter=10_000).fit(X, y)
    before = measure("comparable_flatness", model, X, y)
    model.coef_ *= 1e6
    model.intercept_ *= 1e6
    with pytest.warns(FlatnessWarning, match="at_loss"):
        assert np.isnan(FlatnessScorer()(model, X, y))
    for name, options in {"comparable_flatness": None, "hessian_trace": {"at_loss": 0.05}}.items():
        assert -np.inf < FlatnessScorer(name, measure_params=options)(model, X, y) < 0
    assert measure("comparable_flatness", model, X, y) == pytest.approx(before, rel=1e-9)
