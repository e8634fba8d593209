"""Normalisation, probes and their budget, labels, and the best constant."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

import relflat_sk
from relflat_sk import RelativeFlatnessPenalty, relative_flatness
from relflat_sk.measures._quantities import LayerPass
from tests import oracles
from tests.cases import CASES
from tests.measures.nets import CE, UNTRAINED, best_constant, constant_loss, evaluate
from tests.penalty.every_draw import evaluate as penalty_of
from tests.penalty.test_penalty import EXACT, make

pytestmark = UNTRAINED


# tests/measures/test_layer_kinds.py compares all measures with the full Hessian in float64
@pytest.mark.parametrize("case", CASES)
def test_float32_is_close(case):
    net, criterion, X, y = make(case)
    expected = relative_flatness(net, X, y, criterion=criterion)
    y = y.float() if y.is_floating_point() else y
    criterion = criterion.float() if isinstance(criterion, nn.Module) else criterion
    value = relative_flatness(net.float(), X.float(), y, criterion=criterion)
    assert value == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("case", ["cross-entropy", "bce multi-label, pos_weight and weight"])
def test_normalized_agrees_with_theorem_4(case):
    net, criterion, X, y = make(case, n=40)
    net[2].weight.data[3] = 0  # a feature that never varies: tanh(bias)
    features, weight = net[:4](X).detach(), net[4].weight.detach()
    spread = features.std(dim=0, correction=0)
    spread[3] = 0
    constant = features[:, 3:4] @ weight[:, 3:4].T + net[4].bias.detach()

    def by_theorem_4(rows):
        loss = lambda z: criterion(z + constant[rows], y[rows])  # noqa: E731
        return oracles.normalized_relative_flatness(features[rows], weight, loss, spread)

    options = {"criterion": criterion, "normalize": True, "batch_size": 7}
    value = relative_flatness(net, X, y, **options)
    assert value == pytest.approx(by_theorem_4(slice(None)), rel=EXACT)
    terms, stderrs = relative_flatness(net, X, y, per_sample=True, return_stderr=True, **options)
    expected = [by_theorem_4(slice(i, i + 1)) for i in range(40)]
    assert terms == pytest.approx(np.array(expected), rel=EXACT)
    assert not stderrs.any()


def test_the_budget_is_kept(monkeypatch):
    net = nn.Sequential(nn.Linear(80, 80), nn.Tanh(), nn.Linear(80, 3)).double()
    X, y = torch.randn(30, 80).double(), torch.arange(30) % 3
    product, calls, forwards, stderrs = LayerPass.product, [], [], []
    monkeypatch.setattr(LayerPass, "product", lambda *args: calls.append(1) or product(*args))
    net.register_forward_hook(lambda *_: forwards.append(1))
    options = {"layer": 0, "criterion": CE, "random_state": 0, "return_stderr": True}
    # passes over the data; deflation takes 16 products in each of the last two of three
    for most, n_passes, n_probes in ((3, 1, "2 "), (20, 2, "18 "), (60, 3, "22 deflated ")):
        calls.clear()
        forwards.clear()
        with pytest.warns(relflat_sk.FlatnessWarning) as caught:
            value, stderr = relative_flatness(net, X, y, rtol=1e-6, max_passes=most, **options)
        assert most - n_passes - 1 <= len(calls) <= most - n_passes
        assert len(forwards) <= n_passes + 2  # and those that check the first batch
        (message,) = [str(warning.message) for warning in caught]
        for said in (
            f"max_passes={most} ended the estimate of relative_flatness at layer '0'",
            f"after {n_probes}probes. Its standard error is {stderr:.3g} on a value of {value:.3g}",
            "more than rtol=1e-06 and atol=0 allow",
            "method='exact', which takes 80 passes",
        ):
            assert said in message
        stderrs.append(stderr)
    assert stderrs[0] > stderrs[1] > stderrs[2]


def test_few_passes_are_enough_where_samples_have_hessians_of_low_rank():
    net = nn.Sequential(nn.Linear(90, 90), nn.Tanh(), nn.Linear(90, 3)).double()
    X = torch.randn(20, 90).double()
    options = {"layer": 0, "criterion": nn.MSELoss(), "random_state": 0}
    at_minimum = net, X, net(X).detach()  # without residuals, a sample's Hessian has rank 3
    found = evaluate("relative_flatness", *at_minimum, rtol=1e-4, max_passes=60, **options)
    exact = relative_flatness(*at_minimum, method="exact", **options)
    assert (found.method, found.stderr <= 1e-4 * exact) == ("hutchinson", True)
    assert found.value == pytest.approx(exact, rel=1e-6)
    half = net.half(), X.half(), at_minimum[2].half()
    with pytest.warns(relflat_sk.FlatnessWarning, match="after 58 probes"):  # plain ones
        relative_flatness(*half, rtol=1e-4, max_passes=60, **options)


@pytest.mark.parametrize("name", ["relative_flatness", "trace_flatness", "neuron_flatness_max"])
def test_atol_is_in_the_unit_of_the_measure(name):
    net, criterion, X, y = make("cross-entropy")
    options = {"layer": 0, "criterion": criterion, "method": "hutchinson", "random_state": 0}
    first = evaluate(name, net, X, y, n_probes=2, **options)
    atol = first.stderr / 3
    found = evaluate(name, net, X, y, rtol=1e-9, atol=atol, max_passes=1000, **options)
    assert 0 < found.stderr <= atol
    assert found.stderr > atol / 3  # not many more probes than needed


def test_probes_are_reproducible_and_a_bar_shows_them_on_request(capsys):
    net, criterion, X, y = make("cross-entropy")
    options = {"layer": 0, "criterion": criterion, "method": "hutchinson", "rtol": 0.2}
    value = relative_flatness(net, X, y, random_state=0, **options)
    assert not capsys.readouterr().err
    assert relative_flatness(net, X, y, random_state=0, verbose=1, **options) == value
    assert "probes of batches: 100%" in capsys.readouterr().err
    relative_flatness(net, X, y, criterion=criterion, verbose=1)  # exact: without probes
    assert not capsys.readouterr().err
    assert relative_flatness(net, X, y, random_state=1, **options) != value


@pytest.mark.parametrize(
    ("criterion", "message"),
    [
        (nn.NLLLoss(), "takes log-probabilities, but the network"),
        (CE, "takes logits, .* ends in a softmax"),
    ],
)
@pytest.mark.parametrize("layer", [0, -1])
def test_probabilities_in_place_of_logits_are_doubtful(criterion, message, layer):
    net = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3), nn.Softmax(dim=1))
    X, y = torch.randn(6, 5), torch.arange(6) % 3
    with pytest.warns(relflat_sk.FlatnessWarning, match=message):
        relative_flatness(net, X, y, layer=layer, criterion=criterion)
    with pytest.warns(relflat_sk.FlatnessWarning, match=message):
        penalty_of(RelativeFlatnessPenalty(layer), net, criterion, X, y)


@pytest.mark.parametrize(("k", "criterion"), [(1, nn.MSELoss()), (3, CE)])
def test_a_lone_last_sample_squeezed_away(k, criterion):
    net, X = nn.Sequential(nn.Linear(5, k)).double(), torch.randn(7, 5).double()
    net.register_forward_hook(lambda module, args, output: output.squeeze())
    y = torch.randn(7).double() if k == 1 else torch.arange(7) % 3
    found = partial(evaluate, "relative_flatness", net, X, y, criterion=criterion)
    whole, parts = found(batch_size=7), found(batch_size=3)
    assert parts.method == "closed form"
    assert parts.value == pytest.approx(whole.value, rel=1e-12)
    assert parts.passes.risk == pytest.approx(whole.passes.risk, rel=1e-12)


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][3]])
def test_labels_may_be_left_out_where_they_do_not_matter(case):
    net, criterion, X, y = make(case)
    value, moved = (relative_flatness(net, X, to, criterion=criterion) for to in (y, y.roll(1, 0)))
    if moved == pytest.approx(value, rel=1e-12):
        assert relative_flatness(net, X, criterion=criterion) == pytest.approx(value, rel=1e-12)
    else:
        with pytest.raises(ValueError, match="y is needed: the curvature of"):
            relative_flatness(net, X, criterion=criterion)


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 3)])
@pytest.mark.parametrize("name", ["weight", "pos_weight"])
def test_weights_of_outputs_whose_axes_have_moved(name, shape):
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    net.register_forward_hook(lambda module, args, output: output.transpose(1, 2))
    X, y = torch.randn(6, 3, 2).double(), torch.rand(6, 3, 3).double().round()
    criterion = nn.BCEWithLogitsLoss(**{name: torch.rand(shape).double() + 0.1})
    found = relative_flatness(net, X, y, criterion=criterion)
    truth = oracles.relative_flatness(net, "2", criterion, X, y)
    assert found == pytest.approx(truth, rel=1e-9)
    expected = best_constant(lambda z: criterion(z.expand(6, 3, 3), y), 3, 3)
    assert constant_loss(net, X, y, criterion=criterion) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_constant_risk_is_the_best_a_constant_can_do(case):
    net, criterion, X, y = make(case)
    tail = net[5] if isinstance(net, nn.Sequential) and len(net) > 5 else nn.Identity()
    shape = net(X[:1]).shape[1:]
    if isinstance(tail, nn.Softsign | nn.Softplus | nn.Hardtanh):
        tail = nn.Identity()  # the best constant output, whether the network can reach it or not
    expected = best_constant(lambda z: criterion(tail(z.expand(11, *shape)), y), *shape)
    # of -p_y the best constant is a one-hot p, at infinity: found up to a tolerance
    tolerance = 1e-4 if "nll of softmax" in case else 1e-6
    assert constant_loss(net, X, y, criterion=criterion) == pytest.approx(expected, rel=tolerance)


def test_inference_mode_and_no_grad_around_the_call():
    net, criterion, X, y = make("cross-entropy")
    expected = relative_flatness(net, X, y, layer=0, criterion=criterion)
    with torch.no_grad():
        assert relative_flatness(net, X, y, layer=0, criterion=criterion) == expected
    with torch.inference_mode():
        inputs = X + 0
        assert relative_flatness(net, inputs, y, layer=0, criterion=criterion) == expected
        assert_close(relative_flatness(net, inputs, y, criterion=criterion) > 0, True)
        for name in ("joint_eigenvalue_flatness", "keskar_sharpness", "fisher_rao_norm"):
            assert relflat_sk.measure(name, net, inputs, y, criterion=criterion) > 0


class UnderAutocast(nn.Sequential):
    """Runs in bfloat16; its first layer receives float32 all the same."""

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)


def test_a_network_that_runs_under_autocast_itself():
    parts = nn.Conv1d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(40, 10)
    X, y = torch.randn(64, 3, 12), torch.arange(64) % 10
    names, options = ["relative_flatness", "normalized_relative_flatness"], {"random_state": 0}
    mixed, full = (
        relflat_sk.flatness_report(net, X, y, measures=names, layers=0, criterion=CE, **options)
        for net in (UnderAutocast(*parts), nn.Sequential(*parts))
    )
    assert mixed["value"].tolist() == pytest.approx(full["value"].tolist(), rel=0.02)
