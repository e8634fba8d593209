"""The limit of the penalty, against its definition by separate gradients and losses."""

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
from relflat_sk._penalty import constant_loss
from relflat_sk._penalty.limit import EarlierLayerLimit, LastLayerLimit
from relflat_sk.fleet._limit import share_left
from relflat_sk.fleet._small.step import _share_left

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


def gradient_ratio(net, X, y, penalty):
    """The least ratio of the norms at the last layer, with the shift and gain written out."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.below, self.head = copy.deepcopy(net[:-1]), copy.deepcopy(net[-1])
            self.shift = nn.Parameter(torch.zeros(7, dtype=torch.float64))
            self.gain = nn.Parameter(torch.ones(7, dtype=torch.float64))

        def forward(self, X):
            return self.head(self.below(X) * self.gain + self.shift)

    twin = Net()
    torch.manual_seed(3)
    with penalty.capture(twin):
        output = twin(X)
    groups = [twin.head.weight, twin.shift, twin.gain]
    of_loss = gradients(CRITERION(output, y), groups)
    of_penalty = gradients(penalty(CRITERION, output, y), groups)
    return min((a.norm() / b.norm()).item() for a, b in zip(of_loss, of_penalty, strict=True))


def gain_over_constant(output, y):
    """The loss of the mean output for all samples, minus the loss."""
    constant = CRITERION(output.mean(dim=0).repeat(len(y), 1), y)
    return (constant - CRITERION(output, y)).item()


def train_a_little(net, X, y, steps):
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        CRITERION(net(X), y).backward()
        optimizer.step()


@pytest.mark.parametrize("weight", [1e-4, 0.3, HUGE])
@pytest.mark.parametrize("clip", [0.5, 50.0])
def test_the_last_layer_is_limited_by_gradients_and_gain(weight, clip):
    net, (X, y) = make_net(), make_batch()
    train_a_little(net, X, y, 40)
    values = []
    for limit in (None, clip):
        penalty = RelativeFlatnessPenalty(weight=weight, clip=limit)
        torch.manual_seed(3)  # the same probes
        with penalty.capture(net):
            output = net(X)
        values.append(penalty(CRITERION, output, y))
    free = RelativeFlatnessPenalty(weight=weight)
    of_gradients = gradient_ratio(net, X, y, free)
    of_values = gain_over_constant(output, y) / values[0].item() / 5
    share = min(1.0, clip * of_gradients, clip * of_values)
    assert values[1].item() == pytest.approx(share * values[0].item(), rel=1e-9)
    assert share < 1 or weight < HUGE
    parameters = list(net.parameters())
    for unlimited, scaled in zip(*(gradients(v, parameters) for v in values), strict=True):
        assert_close(scaled, share * unlimited)


CASES = {  # name -> (what is changed in the network, whether the closed form is used)
    "linear": (lambda net: None, True),
    "frozen body": (lambda net: net[:-1].requires_grad_(False), True),
    "frozen weight": (lambda net: net[-1].weight.requires_grad_(False), True),
    "many outputs": (
        lambda net: net.extend([nn.Linear(3, 90).double(), nn.Linear(90, 80).double()]),
        True,
    ),
    "more outputs than features": (lambda net: net.append(nn.Linear(3, 9).double()), False),
    "half precision": (lambda net: net.bfloat16(), False),
    "normalised": (lambda net: None, False),
    "scaled weight": (lambda net: nn.utils.parametrizations.weight_norm(net[-1]), False),
}


@pytest.mark.parametrize("name", CASES)
def test_the_closed_form_of_the_gradients_is_that_of_autograd(name, monkeypatch):
    change, uses_closed_form = CASES[name]
    net, (X, y) = make_net(), make_batch()
    train_a_little(net, X, y, 40)
    change(net)
    if "outputs" in name:  # it has new layers
        train_a_little(net, X, y, 40)
    X = X.to(next(net.parameters()).dtype)
    compare = LastLayerLimit._gradients_by_autograd
    found = []
    for closed_form in (True, False):
        calls = []
        with monkeypatch.context() as patch:
            if not closed_form:
                patch.setattr(LastLayerLimit, "_own_slopes", lambda *_: None)
            patch.setattr(
                LastLayerLimit,
                "_gradients_by_autograd",
                lambda *args, calls=calls: calls.append(args) or compare(*args),
            )
            penalty = RelativeFlatnessPenalty(weight=HUGE, clip=0.5, normalize=name == "normalised")
            with penalty.capture(net):
                output = net(X)
            value = penalty(CRITERION, output, y)
        assert bool(calls) == (not closed_form or not uses_closed_form)
        trained = [p for p in net.parameters() if p.requires_grad]
        found.append((value.detach(), *gradients(CRITERION(output, y) + value, trained)))
    assert found[0][0] > 0
    for one, other in zip(*found, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("layer", [0, 1, "all"])
@pytest.mark.parametrize("weight", [1e-6, HUGE])
@pytest.mark.parametrize("steps", [2, 100])
def test_earlier_layers_are_limited_by_loss_and_gain(layer, weight, steps):
    net, (X, y) = make_net(), make_batch()
    train_a_little(net, X, y, steps)
    values = []
    for limit in (None, 0.5):
        penalty = RelativeFlatnessPenalty(layer, weight=weight, clip=limit)
        torch.manual_seed(3)  # the same probes
        with penalty.capture(net):
            output = net(X)
        values.append(penalty(CRITERION, output, y))
    loss, gain = CRITERION(output, y).item(), gain_over_constant(output, y)
    assert (loss < gain) == (steps == 100)  # both decide in one case
    room = 0.5 * min(loss, gain) / 50
    assert values[1].item() == pytest.approx(min(values[0].item(), room), rel=1e-9)
    share = values[1].item() / values[0].item()
    assert (share < 1) == (weight == HUGE)
    parameters = list(net.parameters())
    for unlimited, scaled in zip(*(gradients(v, parameters) for v in values), strict=True):
        assert_close(scaled, share * unlimited)


def test_losses_of_bfloat16_outputs_are_compared_in_float32():
    net, (X, y) = make_net(), make_batch()
    train_a_little(net, X, y, 40)
    net.bfloat16()
    penalty = RelativeFlatnessPenalty(0, weight=HUGE, clip=0.5)
    with penalty.capture(net):
        output = net(X.bfloat16())
    value = penalty(CRITERION, output, y)
    z = output.double()
    room = min(CRITERION(z, y).item(), gain_over_constant(z, y))
    assert value.item() == pytest.approx(0.5 * room / 50, rel=1e-5)


def test_a_network_that_distinguishes_no_samples_has_no_penalty():
    net, (X, y) = make_net(), make_batch()
    with torch.no_grad():
        net[0].weight.zero_()
    penalty = RelativeFlatnessPenalty(weight=HUGE, clip=0.5)
    with penalty.capture(net):
        output = net(X)
    value = penalty(CRITERION, output, y)
    assert value.item() == 0
    assert not any(g.any() for g in gradients(value, list(net.parameters())))


@pytest.mark.parametrize(("penalty", "share"), [(0.0, 1.0), (1e-9, 0.0)])
@pytest.mark.parametrize("gain", [-1.0, 0.0])
def test_a_penalty_of_zero_is_not_limited(penalty, share, gain):
    penalty, loss = torch.tensor([penalty, 2.0]).unbind()
    assert EarlierLayerLimit(0.5).share(penalty, loss, loss + gain) == share
    stacked = torch.tensor([[gain]]), penalty.view(1, 1)
    assert share_left(torch.tensor([0.5]), *stacked) == share
    with np.errstate(all="ignore"):
        assert _share_left(0.5, (gain, penalty.item()), []) == share


def test_a_single_sample_is_limited_by_gradients_alone():
    net, (X, y) = make_net(), make_batch()
    free, limited = (RelativeFlatnessPenalty(weight=HUGE, clip=clip) for clip in (None, 0.5))
    values = []
    for penalty in (free, limited):
        with penalty.capture(net):
            output = net(X[:1])
        values.append(penalty(CRITERION, output, y[:1]).item())
    share = 0.5 * gradient_ratio(net, X[:1], y[:1], free)
    assert values[1] == pytest.approx(share * values[0], rel=1e-9)


def test_a_single_sample_is_limited_by_its_loss_at_earlier_layers():
    net, (X, y) = make_net(), make_batch()
    penalty = RelativeFlatnessPenalty(0, weight=HUGE, clip=0.5)
    with penalty.capture(net):
        output = net(X[:1])
    expected = 0.5 * CRITERION(output, y[:1]).item() / 50
    assert penalty(CRITERION, output, y[:1]).item() == pytest.approx(expected, rel=1e-9)


def test_a_negative_loss_is_limited_by_the_gain():
    def criterion(output, target):
        return (output - target).square().mean() - 10  # a mean, without per-sample losses

    net, (X, _) = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)).double(), make_batch()
    with torch.no_grad():
        for layer in net:
            layer.weight.copy_(0.9 * torch.eye(5))
    penalty = RelativeFlatnessPenalty(0, weight=HUGE, clip=0.5)
    with penalty.capture(net):
        output = net(X)
    constant = criterion(output.mean(dim=0).expand_as(output), X)
    gain = (constant - criterion(output, X)).item()
    assert gain > 0
    assert penalty(criterion, output, X).item() == pytest.approx(0.5 * gain / 50, rel=1e-9)


@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 3, 4), (6, 3, 4, 2)])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_constant_is_the_mean_of_each_channel(shape, weighted):
    generator = torch.Generator().manual_seed(0)
    output = torch.randn(shape, generator=generator)
    times = torch.tensor([1, 2, 3, 1, 1, 2]) if weighted else torch.ones(6, dtype=torch.int64)
    rows = np.repeat(output.numpy(), times, axis=0)
    channels = np.moveaxis(rows, 1, -1) if rows.ndim > 1 else rows[:, None]
    expected = channels.reshape(-1, channels.shape[-1]).mean(axis=0)
    found = []

    def loss(constant):
        found.append(constant)
        return constant.sum()

    value = constant_loss(loss, output.requires_grad_(), times.float() if weighted else None)
    assert not value.requires_grad
    constant = found[0]
    assert constant.shape == shape
    constant = constant.movedim(1, -1).reshape(-1, 3) if len(shape) > 1 else constant[:, None]
    np.testing.assert_allclose(constant, np.tile(expected, (len(constant), 1)), rtol=1e-5)


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
        flatness_weight=weight, flatness_clip=clip, flatness_layer=layer, max_epochs=2,
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
@pytest.mark.parametrize("weight", [0.1, 1000])
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
