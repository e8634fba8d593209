"""The limit of the penalty: its formula in plain loops, and that it is harmless and effective."""

import copy
import pickle
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.preprocessing import scale
from torch import nn
from torch.testing import assert_close

from relflat_sk import (
    FlatnessWarning,
    FleetTrainer,
    RelativeFlatnessPenalty,
    RelativeFlatnessRegularizedClassifier,
    StopAtGradientNorm,
    StopAtLoss,
    relative_flatness,
)
from relflat_sk._penalty.limit import Measured, PenaltyLimit, constant_loss
from tests.cases import Net
from tests.penalty.every_draw import train

CRITERION = nn.CrossEntropyLoss()
HUGE = 1e4
LIMITED = pytest.mark.filterwarnings("ignore:.*was at its limit:relflat_sk.FlatnessWarning")


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
    """The formula, number by number, with all that was measured in lists."""

    def __init__(self, clip):
        self.clip, self.sizes = clip, []
        self.ratios, self.movements, self.gradients, self.last = [], [], [], None

    def __call__(self, loss, of_constant, penalty, norms, weights):
        """The share; `norms` are those of the gradients of loss and penalty."""
        step, (of_loss, of_penalty) = len(self.sizes), norms
        self.sizes.append(abs(penalty))
        is_measured = step < 8 or step % 8 == 0
        if is_measured:
            if penalty:
                self.ratios.append(of_penalty / abs(penalty))
            if self.last is not None:
                at, gradient, weights_then = self.last
                self.movements.append(np.sum((weights - weights_then) ** 2) / (step - at))
                self.gradients.append(gradient)
        share = self._share(loss, of_constant, penalty)
        if is_measured:
            self.last = step, of_loss**2 + (share * of_penalty) ** 2, weights
        return share

    def _share(self, loss, of_constant, penalty):
        if penalty == 0:
            return 1.0
        mean = sum(0.03 * 0.97**age * size for age, size in enumerate(self.sizes[::-1]))
        size = max(abs(penalty), mean)
        by_movement = 1.0
        if self.movements and self.ratios:
            rate = (recent(self.movements) / recent(self.gradients)) ** 0.5
            by_movement = 1 / (1 + rate * recent(self.ratios) ** 2 * size / self.clip)
        by_value = 0.5 * (of_constant - loss) / size
        return max(0.0, min(by_value, by_movement))


def recent(numbers):
    """The mean of numbers, of which each counts for 0.9 times as much as the next one."""
    return np.average(numbers, weights=[0.9**age for age in range(len(numbers))[::-1]])


def row(parameters):
    return torch.cat([parameter.detach().flatten() for parameter in parameters]).numpy()


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
    twin, plain = copy.deepcopy(net), PlainLimit(clip)
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
        share = plain(loss.item(), of_constant, unlimited.item(), norms, row(parameters))
        assert term.item() == pytest.approx(share * unlimited.item(), rel=1e-6)
        shares.append(share)
        theirs.zero_grad()
        (loss + share * unlimited).backward()
        theirs.step()
        assert_close(list(net.parameters()), list(twin.parameters()))
    assert weight == 0.3 or (max(shares) < 0.95) == (weight == HUGE)


@pytest.mark.parametrize("kind", ["NumPy", "torch"])
def test_several_nets_at_once_have_the_limits_of_each(kind):
    rng, clips, starts = np.random.default_rng(0), [0.5, 0.1, 3.0], [0, 5, 11]
    plain = [PlainLimit(clip) for clip in clips]
    alone = [PenaltyLimit() for _ in clips]
    weights = np.zeros((3, 7))

    def draw():
        # losses and penalties may be negative
        loss, of_constant, penalty = (rng.normal(m, s, 3) for m, s in ((0, 1), (1, 1), (0, 3)))
        penalty[rng.random(3) < 0.1] = 0
        of_constant[rng.random(3) < 0.1] = np.inf  # of a single sample
        norms = rng.lognormal(size=(2, 3))
        norms[1] *= np.abs(penalty)
        weights[:] = weights + rng.normal(size=weights.shape)
        return loss, of_constant, penalty, norms

    def expected(j, *numbers):
        return plain[j](*(number[..., j] for number in numbers), weights[j].copy())

    for j, n_steps in enumerate(starts):  # the nets have made different numbers of steps
        for _ in range(n_steps):
            numbers = draw()
            *losses, norms = (number[..., j] for number in numbers)
            measured = Measured(*torch.tensor(norms), torch.tensor(weights[j]))
            share = alone[j].share(*map(torch.tensor, losses), clips[j], measured).item()
            assert share == pytest.approx(expected(j, *numbers), rel=1e-12)
    to_kind = np.asarray if kind == "NumPy" else torch.as_tensor
    together = PenaltyLimit.stack(alone, to_kind(np.zeros(3)))
    for step in range(30):
        *numbers, norms = draw()
        needed = together.needs_measurement
        assert needed or step not in (0, 5, 8)
        measured = Measured(*(to_kind(x) for x in (*norms, weights.copy()))) if needed else None
        with np.errstate(all="ignore"):
            shares = together.share(*map(to_kind, (*numbers, np.array(clips))), measured)
        for j in range(3):
            assert shares[j].item() == pytest.approx(expected(j, *numbers, norms), rel=1e-12)
    together.unstack(alone)
    assert [one.steps for one in alone] == [n + 30 for n in starts]
    again = pickle.loads(pickle.dumps(alone[0]))
    numbers = torch.tensor([1.0, 2.0, 2.0, 3.0, 4.0]).double()
    measured = Measured(*numbers[3:], torch.zeros(7).double())
    shares = [limit.share(*numbers[:3], 0.5, measured) for limit in (again, alone[0])]
    assert shares[0] == shares[1]


def test_steps_without_a_penalty_move_the_weights_as_well():
    """A random walk has the same rate, measured in all steps or in every third."""
    shares = []
    for every in (1, 3):
        limit, weights, axis = PenaltyLimit(), torch.zeros(60).double(), 0
        for _ in range(6):
            while not limit.begin_step(every):
                weights[axis], axis = 1.0, axis + 1
            measured = Measured(*torch.tensor([3.0, 4.0]), weights.clone())
            share = limit.share(*torch.tensor([1.0, 9.0, 2.0]).double(), 0.5, measured).item()
            weights[axis], axis = 1.0, axis + 1
        assert axis == 5 * every + 1
        shares.append(share)
    assert 0 < shares[0] < 1
    assert shares[1] == pytest.approx(shares[0], rel=1e-12)


def limit_of_one(kind):
    """A limit that computes with plain numbers, or with arrays, as that of several nets."""
    limit, to_kind = PenaltyLimit(), np.asarray if kind == "NumPy" else torch.as_tensor
    if kind != "numbers":
        limit = PenaltyLimit.stack([limit], to_kind(np.zeros(1)))

    def share(numbers, norms=None, weights=None):
        measured = None
        if norms is not None:
            norms = (to_kind(np.array([norm], dtype=float)) for norm in norms)
            measured = Measured(*norms, to_kind(np.array([weights], dtype=float)))
        numbers = (to_kind(np.array([number], dtype=float)) for number in numbers)
        with np.errstate(all="ignore"):
            return limit.share(*numbers, 0.5, measured).item()

    return share


@pytest.mark.parametrize("kind", ["numbers", "NumPy", "torch"])
def test_what_overflows_is_left_out(kind):
    numbers, zeros, ones = (1, 9, 2), np.zeros(4), np.ones(4)
    shares = []
    for overflows in (False, True):
        share = limit_of_one(kind)
        share(numbers, (3, 3), zeros)
        share(numbers, (3, 3), ones)
        if overflows:
            share(numbers, (np.inf, np.inf), ones * np.inf)
            share(numbers, (np.inf, np.inf), ones)
        shares.append(share(numbers))
    assert 0 < shares[0] == shares[1] < 1


@pytest.mark.parametrize("seed", range(20))
def test_numbers_and_arrays_have_the_same_limits_whatever_comes(seed):
    rng, limits = (
        np.random.default_rng(seed),
        [limit_of_one(k) for k in ("numbers", "NumPy", "torch")],
    )
    for _ in range(12):
        norms = rng.choice([0, 2, 1e-200, 1e200, np.inf, np.nan], 2)
        weights = rng.choice([0, 1, 1e200, np.inf], 4, p=[0.5, 0.4, 0.05, 0.05])
        numbers = rng.choice([0, 1, -3, 1e-200, 1e200, np.inf, np.nan], 3)
        share, *others = (limit(numbers, norms, weights) for limit in limits)
        assert others == pytest.approx([share] * 2, nan_ok=True)


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


def test_a_head_that_is_not_used_changes_no_step():
    X, y = make_batch()
    own, unused = make_net(), nn.Linear(5, 2).double()
    with_head = Net(lambda net, X: (net.head(X), net.net(X))[1], net=make_net(), head=unused)
    for module in (own, with_head):
        torch.manual_seed(0)
        # at first, there is no gain that a penalty may take a share of
        train(RelativeFlatnessPenalty("all", weight=HUGE), module, CRITERION, X, y, 100, lr=0.3)
    for ours, expected in zip(with_head.net.parameters(), own.parameters(), strict=True):
        assert_close(ours, expected)


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
    ("weight", "clip", "taken"), [(0, 0.5, 0), (1e-3, 0.5, 0), (HUGE, 0.5, 1), (HUGE, None, 0)]
)
@pytest.mark.parametrize("layer", [-1, 0])
def test_the_history_tells_what_the_limit_took_away(weight, clip, taken, layer):
    net = make(layer, weight, flatness_clip=clip, max_epochs=2, lr=0.003)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net.fit(*digits(200))
    assert net.history[-1, "flatness_clipped"] == pytest.approx(taken, abs=0.01)
    added = np.array(net.history[:, "flatness_penalty"])
    assert (added == 0).all() if weight == 0 else (added > 0).all()


def test_a_weight_that_did_not_matter_is_told_also_without_callbacks():
    net = make(-1, HUGE, callbacks="disable", max_epochs=30, lr=0.005)
    with pytest.warns(FlatnessWarning, match=r"flatness_weight=10000\.0 did not matter"):
        net.fit(*digits(400))


@LIMITED
@pytest.mark.parametrize(("layer", "n"), [(-1, 600), (0, 400)])
def test_no_weight_ruins_a_network_and_larger_weights_make_it_flatter(layer, n):
    X, y = digits(None)
    settings = {"module__hidden_layer_sizes": (50,), "lr": 0.005, "max_epochs": 25}
    accuracies, flatness = np.empty((2, 3, 2))
    for seed in range(2):
        order = np.random.default_rng(seed).permutation(len(y))
        ours, other = order[:n], order[1200:]
        for i, weight in enumerate((0, 1, 10)):
            net = make(layer, weight, callbacks=[StopAtLoss(0.02)], random_state=seed, **settings)
            net.fit(X[ours], y[ours])
            accuracies[i, seed] = net.score(X[other], y[other])
            flatness[i, seed] = relative_flatness(net, X[ours], y[ours], layer=layer)
    free, *limited = accuracies.mean(axis=1)
    assert min(limited) > free - 0.01
    free, *limited = flatness.mean(axis=1)
    assert limited[0] < 0.7 * free
    assert limited[1] < 0.8 * limited[0]


def train_digits(weights, lr, max_epochs, *, wrong=0, seeds=5, sizes=(64, 64)):
    """Train on 600 digits, some of whose labels are wrong; return nets and their accuracies."""
    X, y = digits(None)
    rng, labels = np.random.default_rng(0), y[:600].copy()
    changed = rng.permutation(600)[:wrong]
    labels[changed] = (labels[changed] + rng.integers(1, 10, wrong)) % 10
    settings = {"lr": lr, "max_epochs": max_epochs, "module__hidden_layer_sizes": sizes}
    settings |= {"optimizer": torch.optim.SGD, "optimizer__momentum": 0.9}
    nets = [make("all", w, random_state=seed, **settings) for w in weights for seed in range(seeds)]
    nets = FleetTrainer(nets, fleet=len(nets)).fit(X[:600], labels).estimators_
    accuracies = [net.score(X[600:], y[600:]) for net in nets]
    return nets, np.reshape(accuracies, (len(weights), seeds))


@LIMITED
def test_a_penalty_is_stable_at_a_rate_at_which_plain_training_is():
    _, accuracies = train_digits((1, 30), 0.1, 25)
    assert accuracies.min() > 0.8


def test_weights_up_to_ten_keep_a_network_from_wrong_labels():
    nets, accuracies = train_digits((0, 0.3, 1, 3, 10), 0.02, 40, wrong=120, seeds=1)
    plain, *penalised = accuracies[:, 0]
    assert min(penalised) > plain + 0.05
    assert max(penalised) > plain + 0.1
    losses = [net.history[-1, "train_loss"] for net in nets]
    assert all(after > 1.2 * before for before, after in pairwise(losses))


@LIMITED
def test_larger_weights_do_more_also_at_a_rate_at_the_edge():
    _, accuracies = train_digits((0.1, 3), 0.1, 25, wrong=120, sizes=(128, 64))
    small, large = accuracies.mean(axis=1)
    assert large > small + 0.07


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
