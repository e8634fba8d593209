"""The limit of the penalty's gradient, against its definition by separate gradients."""

import copy
import warnings

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.testing import assert_close

from relflat_sk import RelativeFlatnessPenalty, RelativeFlatnessRegularizedClassifier

CRITERION = nn.CrossEntropyLoss()
HUGE = 1e4


def make_net(seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 3))
    return net.double()


def make_batch(n=20):
    generator = torch.Generator().manual_seed(1)
    X = torch.randn(n, 5, generator=generator).double()
    return X, torch.randint(3, (n,), generator=generator)


def gradients(value, tensors):
    found = torch.autograd.grad(value, tensors, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, tensors, strict=True)]


def last_layer_ratios(net, X, y, weight):
    """The ratios of the norms at the last layer, with the shift and gain written out."""
    head = copy.deepcopy(net[-1])
    features = net[:-1](X).detach()
    shift = torch.zeros(7, dtype=torch.float64, requires_grad=True)
    gain = torch.ones(7, dtype=torch.float64, requires_grad=True)
    with (penalty := RelativeFlatnessPenalty()).capture(head):
        output = head(features * gain + shift)
    groups = [head.weight, shift, gain]
    of_loss = gradients(CRITERION(output, y), groups)
    of_penalty = gradients(weight * penalty(CRITERION, output, y), groups)
    return [(a.norm() / b.norm()).item() for a, b in zip(of_loss, of_penalty, strict=True)]


@pytest.mark.parametrize("weight", [0.01, HUGE])
def test_the_last_layer_is_limited_in_weight_shift_and_gain(weight):
    net, (X, y) = make_net(), make_batch()
    expected = min(1.0, 0.5 * min(last_layer_ratios(net, X, y, weight)))
    free, limited = (RelativeFlatnessPenalty(weight=weight, clip=clip) for clip in (None, 0.5))
    values = []
    for penalty in (free, limited):
        with penalty.capture(net):
            output = net(X)
        values.append(penalty(CRITERION, output, y))
    assert values[1].item() == pytest.approx(expected * values[0].item(), rel=1e-10)
    grads = [gradients(value, list(net.parameters())) for value in values]
    for unlimited, scaled in zip(*grads, strict=True):
        assert_close(scaled, expected * unlimited)
    assert (expected < 1) == (weight == HUGE)  # the limit is active in one case only


@pytest.mark.parametrize("layer", [0, 1, "all"])
@pytest.mark.parametrize("weight", [1e-4, HUGE])
def test_earlier_layers_are_limited_in_each_parameter(layer, weight):
    net, (X, y) = make_net(), make_batch()
    parameters = list(net.parameters())
    penalty = RelativeFlatnessPenalty(layer, weight=weight, clip=0.5)
    torch.manual_seed(3)
    with penalty.capture(net):
        output = net(X)
    scaled = gradients(penalty(CRITERION, output, y), parameters)
    penalty.clip = None
    torch.manual_seed(3)  # the same probes
    with penalty.capture(net):
        output = net(X)
    of_loss = gradients(CRITERION(output, y), parameters)
    of_penalty = gradients(penalty(CRITERION, output, y), parameters)
    ratios = [0.5 * a.norm() / b.norm() for a, b in zip(of_loss, of_penalty, strict=True)]
    share = min(1.0, min(ratios).item())
    assert (share < 1) == (weight == HUGE)
    for expected, found in zip(of_penalty, scaled, strict=True):
        assert_close(found, share * expected)


@pytest.mark.parametrize("layer", [-1, 0, [0, -1], "all"])
@pytest.mark.parametrize("weight", [0.01, HUGE])
def test_nets_take_the_same_step_as_plain_loops(layer, weight):
    X, y = make_batch()
    options = {"flatness_layer": layer, "flatness_weight": weight, "random_state": 0}
    net = RelativeFlatnessRegularizedClassifier(make_net, **options, verbose=0)
    net.initialize()
    twin = copy.deepcopy(net.module_)
    torch.manual_seed(3)
    net.train_step_single((X, y))
    penalty = RelativeFlatnessPenalty(layer, weight=weight, clip=0.5)
    torch.manual_seed(3)
    with penalty.capture(twin):
        output = twin(X)
        loss = CRITERION(output, y) + penalty(CRITERION, output, y)  # inside the context
    loss.backward()
    for ours, expected in zip(net.module_.parameters(), twin.parameters(), strict=True):
        assert_close(ours.grad, expected.grad)


@pytest.mark.parametrize("layer", [0, "all"])
def test_a_step_descends_the_loss_whatever_the_weight(layer):
    X, y = make_batch()
    net = RelativeFlatnessRegularizedClassifier(
        make_net, flatness_layer=layer, flatness_weight=1e12, verbose=0
    ).initialize()
    parameters = list(net.module_.parameters())
    of_loss = gradients(CRITERION(net.module_(X), y), parameters)
    net.train_step_single((X, y))
    for a, parameter in zip(of_loss, parameters, strict=True):
        assert (a * parameter.grad).sum() > 0.4 * a.square().sum()


def test_a_layer_with_frozen_features_or_weight_is_limited_where_it_learns():
    X, y = make_batch()
    for frozen in (slice(None, -1), slice(-1, None)):
        net = make_net()
        net[frozen].requires_grad_(False)
        penalty = RelativeFlatnessPenalty(weight=HUGE, clip=0.5)
        with penalty.capture(net):
            output = net(X)
        value = penalty(CRITERION, output, y)
        assert 0 < value.item() < HUGE
        value.backward()


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"clip": 0}, r"clip must be a finite positive number or None, got 0\."),
        ({"clip": "half"}, r"clip must be a finite positive number or None, got 'half'\."),
        ({"weight": -1}, r"weight must be a finite number of at least 0, got -1\."),
    ],
)
def test_parameters_are_checked(parameters, message):
    with pytest.raises(ValueError, match=message):
        RelativeFlatnessPenalty(**parameters)


def test_the_net_checks_its_clip():
    X, y = load_digits(return_X_y=True)
    net = RelativeFlatnessRegularizedClassifier(flatness_clip=-1, verbose=0)
    with pytest.raises(ValueError, match="flatness_clip must be a finite positive number or None"):
        net.fit(X[:50], y[:50])


@pytest.mark.parametrize(
    ("weight", "clip", "share"), [(0, 0.5, 0.0), (HUGE, 0.5, 1.0), (HUGE, None, 0.0)]
)
@pytest.mark.parametrize("layer", [-1, 0])
def test_the_history_tells_how_often_the_limit_was_active(weight, clip, share, layer):
    X, y = load_digits(return_X_y=True)
    net = RelativeFlatnessRegularizedClassifier(
        flatness_weight=weight, flatness_clip=clip, flatness_layer=layer, max_epochs=2, lr=1e-4,
        random_state=0, verbose=0,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net.fit(X[:200] / 16, y[:200])
    assert net.history[:, "flatness_clipped"] == [share, share]
    added = np.array(net.history[:, "flatness_penalty"])
    assert (added == 0).all() if weight == 0 else (added > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("layer", [-1, 0, "all"])
@pytest.mark.parametrize("weight", [0.1, 10, 1000])
def test_no_weight_ruins_a_network(layer, weight):
    X, y = load_digits(return_X_y=True)
    X, X_test, y, y_test = train_test_split(X, y, stratify=y, random_state=0)
    scaler = StandardScaler().fit(X)
    net = RelativeFlatnessRegularizedClassifier(
        flatness_layer=layer, flatness_weight=weight, lr=0.02, max_epochs=20, random_state=0,
        verbose=0,
    )  # fmt: skip
    net.fit(scaler.transform(X).astype(np.float32), y)
    assert net.score(scaler.transform(X_test), y_test) > 0.94
