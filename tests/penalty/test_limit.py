"""The limit of the penalty: its formula in plain loops, and that it is harmless and effective."""

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.preprocessing import scale
from torch import nn
from torch.testing import assert_close

from relflat_sk import (
    FlatnessWarning,
    RelativeFlatnessPenalty,
    RelativeFlatnessRegularizedClassifier,
    StopAtGradientNorm,
    StopAtLoss,
    relative_flatness,
)
from relflat_sk._penalty.limit import PenaltyLimit, constant_loss
from tests.cases import Net
from tests.penalty.every_draw import evaluate

CRITERION = nn.CrossEntropyLoss()
HUGE = 1e4


def make_net(seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 3))
    return net.double()


def make_convolutional_net(seed=0):
    torch.manual_seed(seed)
    body = nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 2, 2), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*body, nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 3)).double()


def confident_net():
    net = make_net()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(4)
    return net


def make_batch(n=20, seed=1):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, 5, generator=generator).double()
    return X, X[:, :3].argmax(dim=1)


def norm(value, parameters):
    found = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
    return sum(g.square().sum().item() for g in found if g is not None) ** 0.5


class PlainLimit:
    """The formula, number by number, with all norms that were taken in a list."""

    def __init__(self, clip, n_layers=1, at_convolution=False):
        self.n_layers, self.longest = n_layers, 0.5 if at_convolution else 2
        self.clip, self.norms, self.ratios, self.sizes = clip, [], [], []

    def __call__(self, loss, of_constant, penalty, norms):
        """The share; `norms` are those of the gradients of loss and penalty."""
        step = len(self.sizes)
        if step < 8 or step % 8 == 0:
            of_loss, of_penalty = norms
            self.norms.append(of_loss)
            if penalty:
                self.ratios.append(of_penalty / abs(penalty))
        self.sizes.append(abs(penalty))
        if penalty == 0:
            return 1.0
        ages = range(len(self.norms))[::-1]
        typical = np.average(self.norms, weights=[0.999**age for age in ages])
        mean = sum(0.03 * 0.97**age * size for age, size in enumerate(self.sizes[::-1]))
        size = max(abs(penalty), mean)
        by_gradient = np.inf
        if self.ratios:
            weights = [0.9**age for age in range(len(self.ratios))[::-1]]
            ratio = np.average(np.square(self.ratios), weights=weights) ** 0.5
            by_gradient = self.longest * self.clip * typical / (ratio * size)
        learned = min(1, abs((of_constant - loss) / of_constant)) if of_constant < np.inf else 1
        by_value = self.n_layers * self.clip / 5 * learned * (of_constant - loss) / size
        return min(1.0, max(0.0, min(by_value, by_gradient)))


def last_layer_penalty(net, X, weight):
    """The penalty at the last layer, as the variance of the rows of its weight."""
    phi, w = net[:-1](X), net[-1].weight
    p = net[-1](phi).softmax(dim=1)
    variances = (p @ w.square() - (p @ w).square()).sum(dim=1)
    return weight * (phi.square().sum(dim=1) * variances).mean() / (2 * w.shape[1])


@pytest.mark.parametrize(
    ("make", "layer"),
    [
        *((make_net, layer) for layer in (-1, 0, "all")),
        *((make_convolutional_net, layer) for layer in (-1, 0, 1, "all")),
    ],
)
@pytest.mark.parametrize(("weight", "clip"), [(1e-3, 0.5), (0.3, 0.5), (HUGE, 0.5), (HUGE, 0.02)])
def test_a_loop_with_the_limit_is_that_of_the_formula(make, layer, weight, clip):
    net = make()
    at_convolution = make is make_convolutional_net and layer == 0
    twin, plain = copy.deepcopy(net), PlainLimit(clip, 3 if layer == "all" else 1, at_convolution)
    penalty = RelativeFlatnessPenalty(layer, weight=weight, clip=clip)
    free = RelativeFlatnessPenalty(layer, weight=weight, clip=None)
    ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (net, twin))
    shares = []
    for step in range(20):
        X, y = make_batch(seed=step)
        torch.manual_seed(step)  # the same probes
        with penalty.capture(net):
            output = net(X)
            term = penalty(CRITERION, output, y)  # inside the context
        ours.zero_grad()
        (CRITERION(output, y) + term).backward()
        ours.step()

        torch.manual_seed(step)
        if layer == -1:
            output, unlimited = twin(X), last_layer_penalty(twin, X, weight)
        else:
            with free.capture(twin):
                output = twin(X)
            unlimited = free(CRITERION, output, y)
        loss, parameters = CRITERION(output, y), list(twin.parameters())
        of_constant = CRITERION(output.mean(dim=0).repeat(len(y), 1), y).item()
        norms = norm(loss, parameters), norm(unlimited, parameters)
        share = plain(loss.item(), of_constant, unlimited.item(), norms)
        assert term.item() == pytest.approx(share * unlimited.item(), rel=1e-8)
        shares.append(share)
        theirs.zero_grad()
        (loss + share * unlimited).backward()
        theirs.step()
        assert_close(list(net.parameters()), list(twin.parameters()))
    assert weight == 0.3 or (max(shares) < 1) == (weight == HUGE)


@pytest.mark.parametrize("kind", ["NumPy", "torch"])
def test_several_nets_at_once_have_the_limits_of_each(kind):
    rng, clips, starts = np.random.default_rng(0), [0.5, 0.1, 3.0], [0, 5, 11]
    plain = [PlainLimit(clip) for clip in clips]
    alone = [PenaltyLimit() for _ in clips]

    def draw():
        # losses and penalties may be negative
        loss, of_constant, penalty = (rng.normal(m, s, 3) for m, s in ((0, 1), (1, 1), (0, 3)))
        penalty[rng.random(3) < 0.1] = 0
        of_constant[rng.random(3) < 0.1] = np.inf  # of a single sample
        norms = rng.lognormal(size=(2, 3))
        norms[1] *= np.abs(penalty)
        return loss, of_constant, penalty, norms

    def expected(j, *numbers):
        return plain[j](*(one[..., j] for one in numbers))

    for j, n_steps in enumerate(starts):  # the nets have made different numbers of steps
        for _ in range(n_steps):
            numbers = draw()
            *given, norms = (one[..., j] for one in numbers)
            with np.errstate(all="ignore"):
                found = alone[j].share(*given, clips[j], norms)
            assert found == pytest.approx(expected(j, *numbers), rel=1e-12)
    to_kind = np.asarray if kind == "NumPy" else torch.as_tensor
    together = PenaltyLimit.stack(alone, to_kind(np.zeros(3)))
    for step in range(30):
        *numbers, norms = draw()
        needed = together.needs_norms
        assert needed or step not in (0, 5, 8)
        given = tuple(to_kind(one) for one in norms) if needed else None
        with np.errstate(all="ignore"):
            shares = together.share(*map(to_kind, (*numbers, np.array(clips))), given)
        for j in range(3):
            assert shares[j].item() == pytest.approx(expected(j, *numbers, norms), rel=1e-12)
    together.unstack(alone)
    assert [one.steps for one in alone] == [n + 30 for n in starts]
    again = pickle.loads(pickle.dumps(alone[0]))
    numbers = np.array([1.0, 2.0, 2.0, 3.0, 4.0])
    shares = [one.share(*numbers[:3], 0.5, numbers[3:]) for one in (again, alone[0])]
    assert shares[0] == shares[1]


def test_norms_that_overflow_are_left_out():
    limit, other = PenaltyLimit(), PenaltyLimit()
    numbers = torch.tensor([1.0, np.inf, 100.0, 2.0, 3.0]).unbind()
    for norms in (numbers[3:], (numbers[1], numbers[1])):
        share = limit.share(*numbers[:3], 0.5, norms)
    other.share(*numbers[:3], 0.5, numbers[3:])
    assert share == other.share(*numbers[:3], 0.5, numbers[3:])


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


@pytest.mark.parametrize("layer", [-1, 0, "all"])
@pytest.mark.parametrize("frozen", [slice(None, -1), slice(-1, None)])
def test_nets_with_frozen_layers_take_the_same_steps_as_plain_loops(layer, frozen):
    X, _ = make_batch()
    y = confident_net()(X).argmax(dim=1)  # so much is learned that there is room for a penalty
    options = {"flatness_layer": layer, "flatness_weight": HUGE, "random_state": 0}
    net = RelativeFlatnessRegularizedClassifier(confident_net, **options, verbose=0).initialize()
    net.module_[frozen].requires_grad_(False)
    twin = copy.deepcopy(net.module_)
    penalty = RelativeFlatnessPenalty(layer, weight=HUGE, clip=0.5)
    for step in range(10):
        torch.manual_seed(step)
        net.optimizer_.zero_grad()
        net.train_step_single((X, y))
        torch.manual_seed(step)
        twin.zero_grad()
        with penalty.capture(twin):
            output = twin(X)
        term = penalty(CRITERION, output, y)
        assert term > 0
        (CRITERION(output, y) + term).backward()
        for ours, expected in zip(net.module_.parameters(), twin.parameters(), strict=True):
            assert_close(ours.grad, expected.grad)


class WithHead(nn.Module):
    """A network that calls another head on its way, whose output nobody uses."""

    def __init__(self, net, width):
        super().__init__()
        self.net, self.head = net, nn.Linear(width, 2).double()

    def forward(self, X):
        self.head(X)
        return self.net(X)


def test_a_head_that_is_not_used_changes_no_step():
    X, y = make_batch()
    own, with_head = make_net(), WithHead(make_net(), X.shape[1])
    for module in (own, with_head):
        penalty = RelativeFlatnessPenalty("all", weight=HUGE)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
        torch.manual_seed(0)
        for _ in range(100):  # at first, there is no gain that a penalty may take a share of
            optimizer.zero_grad()
            with penalty.capture(module):
                output = module(X)
            (CRITERION(output, y) + penalty(CRITERION, output, y)).backward()
            optimizer.step()
    for ours, expected in zip(with_head.net.parameters(), own.parameters(), strict=True):
        assert_close(ours, expected)


def test_a_layer_that_is_called_again_beside_the_output_is_refused():
    def again(net, X):
        features = torch.relu(net.first(X))
        net.first(features)
        return net.last(features)

    net = Net(again, first=nn.Linear(5, 5), last=nn.Linear(5, 3)).double()
    with pytest.raises(ValueError, match="'first'.* called"):
        evaluate(RelativeFlatnessPenalty("all"), net, CRITERION, *make_batch())


def digits(n):
    X, y = load_digits(return_X_y=True)
    return scale(X).astype(np.float32)[:n], y[:n]


def make(layer, weight, **settings):
    options = {"lr": 0.01, "max_epochs": 20, "random_state": 0, "verbose": 0} | settings
    return RelativeFlatnessRegularizedClassifier(
        flatness_layer=layer, flatness_weight=weight, **options
    )


@pytest.mark.parametrize("epochs", [[3], [1, 2]], ids=["fit", "in parts"])
def test_measurements_between_epochs_are_no_steps(epochs):
    X, y = digits(96)
    steps = []
    for callbacks in ([], [StopAtGradientNorm(1e-9)]):
        net = make(-1, 1000, callbacks=callbacks, module__hidden_layer_sizes=(8,))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for n in epochs:
                net.set_params(max_epochs=n).partial_fit(X, y)
        steps.append(net._limit.steps)
    assert steps == [9, 9]
    assert make(-1, 1).fit(X, y).fit(X[:32], y[:32])._limit.steps == 20  # begins anew


@pytest.mark.parametrize(
    ("weight", "clip", "share"), [(0, 0.5, 0.0), (HUGE, 0.5, 1.0), (HUGE, None, 0.0)]
)
@pytest.mark.parametrize("layer", [-1, 0])
def test_the_history_tells_how_often_the_limit_was_active(weight, clip, share, layer):
    net = make(layer, weight, flatness_clip=clip, max_epochs=2, lr=0.003)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net.fit(*digits(200))
    assert net.history[:, "flatness_clipped"] == [share, share]
    added = np.array(net.history[:, "flatness_penalty"])
    assert (added == 0).all() if weight == 0 else (added > 0).all()


def test_a_weight_that_did_not_matter_is_told_also_without_callbacks():
    net = make(-1, 1000, callbacks="disable", max_epochs=30, lr=0.005)
    with pytest.warns(FlatnessWarning, match="flatness_weight=1000 did not matter"):
        net.fit(*digits(400))


@pytest.mark.parametrize(("layer", "n"), [(-1, 600), (0, 400)])
def test_no_weight_ruins_a_network_and_larger_weights_make_it_flatter(layer, n):
    X, y = digits(None)
    settings = {"module__hidden_layer_sizes": (50,), "lr": 0.005, "max_epochs": 25}
    accuracies, flatness = np.empty((2, 3, 2))
    for seed in range(2):
        order = np.random.default_rng(seed).permutation(len(y))
        ours, other = order[:n], order[1200:]
        for i, weight in enumerate((0, 1, 1000)):
            net = make(layer, weight, callbacks=[StopAtLoss(0.003)], random_state=seed, **settings)
            if weight == 1000:
                with pytest.warns(FlatnessWarning, match="flatness_weight=1000 did not matter"):
                    net.fit(X[ours], y[ours])
            else:
                net.fit(X[ours], y[ours])
            accuracies[i, seed] = net.score(X[other], y[other])
            flatness[i, seed] = relative_flatness(net, X[ours], y[ours], layer=layer)
    free, *limited = accuracies.mean(axis=1)
    assert min(limited) > free - 0.01
    free, *limited = flatness.mean(axis=1)
    assert limited[0] < 0.6 * free
    # at the first layer, the limit decides from a weight of about 1 on
    assert limited[1] < (0.8 if layer == -1 else 1.1) * limited[0]


@pytest.mark.parametrize(("layer", "clip"), [(-1, 0.5), (0, 0.25)])
def test_a_negative_weight_makes_a_network_sharper_and_is_limited_alike(layer, clip):
    X, y = digits(600)
    options = {"flatness_clip": clip, "lr": 0.003, "max_epochs": 40}
    nets = [
        make(layer, weight, callbacks=[StopAtLoss(0.02)], **options).fit(X, y)
        for weight in (-0.3, 0)
    ]
    sharp, plain = (relative_flatness(net, X, y, layer=layer) for net in nets)
    assert sharp > 1.2 * plain
    assert nets[0].converged_
    assert max(nets[0].history[:, "flatness_penalty"]) < 0
