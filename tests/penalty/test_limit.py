"""The limit of the penalty: its formula in plain loops, and that it is harmless and effective."""

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.preprocessing import scale
from skorch.callbacks import Callback
from torch import nn
from torch.testing import assert_close

from relflat_sk import (
    FlatnessWarning,
    FleetTrainer,
    RelativeFlatnessPenalty,
    StopAtGradientNorm,
    StopAtLoss,
    relative_flatness,
)
from relflat_sk._penalty.limit import Measured, PenaltyLimit, constant_loss
from tests.training.common import Classifier

CRITERION = nn.CrossEntropyLoss()
HUGE = 1e4
LIMITED = pytest.mark.filterwarnings("ignore:.*was at its limit:relflat_sk.FlatnessWarning")


def make_net():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 3))
    return net.double()


def make_convolutional_net():
    torch.manual_seed(0)
    body = nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 2, 2), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*body, nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 3)).double()


def make_batch(n=20, seed=1):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, 5, generator=generator).double()
    return X, X[:, :3].argmax(dim=1)


def norm(value, parameters):
    gradients = torch.autograd.grad(value, parameters, retain_graph=True, materialize_grads=True)
    return torch.cat([gradient.flatten() for gradient in gradients]).norm().item()


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


@pytest.mark.parametrize(
    ("make_network", "layer"),
    [
        *((make_net, layer) for layer in (-1, 0, "all")),
        *((make_convolutional_net, layer) for layer in (-1, 0, 1, "all")),
    ],
)
@pytest.mark.parametrize(("weight", "clip"), [(1e-3, 0.5), (0.3, 0.5), (HUGE, 0.5), (HUGE, 0.02)])
def test_a_loop_with_the_limit_is_that_of_the_formula(make_network, layer, weight, clip):
    net = make_network()
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
        with free.capture(twin):
            output = twin(X)
        unlimited = free(CRITERION, output, y)
        loss, parameters = CRITERION(output, y), list(twin.parameters())
        of_constant = CRITERION(output.mean(dim=0).repeat(len(y), 1), y).item()
        norms = norm(loss, parameters), norm(unlimited, parameters)
        weights = nn.utils.parameters_to_vector(parameters).detach().numpy()
        share = plain(loss.item(), of_constant, unlimited.item(), norms, weights)
        assert term.item() == pytest.approx(share * unlimited.item(), rel=1e-6)
        shares.append(share)
        theirs.zero_grad()
        (loss + share * unlimited).backward()
        theirs.step()
        assert_close(list(net.parameters()), list(twin.parameters()))
    assert weight == 0.3 or (max(shares) < 0.95) == (weight == HUGE)


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


KINDS = ["numbers", "NumPy", "torch"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_overflows_is_left_out(kind):
    numbers, ones = (1, 9, 2), np.ones(4)
    shares = []
    for overflows in (False, True):
        share = limit_of_one(kind)
        share(numbers, (3, 3), 0 * ones)
        share(numbers, (3, 3), ones)
        if overflows:
            share(numbers, (np.inf, np.inf), ones * np.inf)
            share(numbers, (np.inf, np.inf), ones)
        shares.append(share(numbers))
    assert 0 < shares[0] == shares[1] < 1


@pytest.mark.parametrize("seed", range(20))
def test_numbers_and_arrays_have_the_same_limits_whatever_comes(seed):
    rng, limits = np.random.default_rng(seed), [limit_of_one(kind) for kind in KINDS]
    for _ in range(12):
        norms = rng.choice([0, 2, 1e-200, 1e200, np.inf, np.nan], 2)
        weights = rng.choice([0, 1, 1e200, np.inf], 4, p=[0.5, 0.4, 0.05, 0.05])
        numbers = rng.choice([0, 1, -3, 1e-200, 1e200, np.inf, np.nan], 3)
        share, *others = (limit(numbers, norms, weights) for limit in limits)
        assert others == pytest.approx([share] * 2, nan_ok=True)


@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 3, 4), (6, 3, 4, 2)])
@pytest.mark.parametrize("times", [None, [1, 2, 3, 1, 1, 2]])
def test_the_constant_is_the_mean_of_each_channel(shape, times):
    output, read = torch.randn(shape), []

    def loss(constant):
        read.append(constant)
        return constant.sum()

    weights = times if times is None else torch.tensor(times).float()
    assert not constant_loss(loss, output.requires_grad_(), weights).requires_grad
    rows = output.detach().repeat_interleave(torch.tensor(times or 1), 0)
    mean = rows.mean([axis for axis in range(len(shape)) if axis != 1], keepdim=True)
    assert_close(read[0], mean.expand(shape))


def digits(n):
    X, y = load_digits(return_X_y=True)
    return scale(X).astype(np.float32)[:n], y[:n]


def make_flat(layer, weight, **settings):
    params = {"lr": 0.01, "max_epochs": 20, "random_state": 0, "verbose": 0, **settings}
    return Classifier(flatness_layer=layer, flatness_weight=weight, **params)


@pytest.mark.filterwarnings("ignore::relflat_sk.FlatnessWarning")
@pytest.mark.parametrize("epochs", [[3], [1, 2]], ids=["fit", "in parts"])
def test_measurements_between_epochs_are_no_steps(epochs):
    X, y = digits(96)
    steps = []
    for callbacks in ([], [StopAtGradientNorm(1e-9)]):
        net = make_flat(-1, 1000, callbacks=callbacks, module__hidden_layer_sizes=(8,))
        for n in epochs:
            net.set_params(max_epochs=n).partial_fit(X, y)
        steps.append(net._limit.steps)
    assert steps == [9, 9]
    assert make_flat(-1, 1).fit(X, y).fit(X[:32], y[:32])._limit.steps == 20  # begins anew


class Exchange(Callback):
    """Exchanges hidden units, which changes no output and no norm of a gradient."""

    def on_train_end(self, net, **kwargs):
        first, last = [part for part in net.module_.modules() if isinstance(part, nn.Linear)]
        order = torch.arange(99, -1, -1)
        with torch.no_grad():
            for parameter in (first.weight, first.bias, last.weight.T):
                parameter.copy_(parameter[order])


def test_weights_that_are_replaced_after_a_training_have_not_moved_by_steps():
    settings = {"optimizer": torch.optim.SGD, "lr": 0.3, "max_epochs": 10}
    stays, changes = (
        make_flat(-1, 1.0, callbacks=callbacks, **settings)
        .fit(*digits(200))
        .partial_fit(*digits(200))
        for callbacks in ([], [Exchange()])
    )
    clipped = [net.history[-3:, "flatness_clipped"] for net in (stays, changes)]
    np.testing.assert_allclose(*clipped, rtol=0.2)


@pytest.mark.filterwarnings("ignore::relflat_sk.FlatnessWarning")
@pytest.mark.parametrize(
    ("weight", "clip", "taken"), [(0, 0.5, 0), (1e-3, 0.5, 0), (HUGE, 0.5, 1), (HUGE, None, 0)]
)
@pytest.mark.parametrize("layer", [-1, 0])
def test_the_history_tells_what_the_limit_took_away(weight, clip, taken, layer):
    net = make_flat(layer, weight, flatness_clip=clip, max_epochs=2, lr=0.003).fit(*digits(200))
    assert net.history[-1, "flatness_clipped"] == pytest.approx(taken, abs=0.01)
    assert all((added > 0) == (weight > 0) for added in net.history[:, "flatness_penalty"])


def test_a_weight_that_did_not_matter_is_told_also_without_callbacks():
    net = make_flat(-1, HUGE, callbacks="disable", max_epochs=30, lr=0.005)
    with pytest.warns(FlatnessWarning, match=r"flatness_weight=10000\.0 did not matter"):
        net.fit(*digits(400))


@LIMITED
@pytest.mark.parametrize(("layer", "n"), [(-1, 600), (0, 400)])
def test_no_weight_ruins_a_network_and_larger_weights_make_it_flatter(layer, n):
    X, y = digits(None)
    settings = {"module__hidden_layer_sizes": (50,), "lr": 0.005, "max_epochs": 25}
    accuracies, flatness = np.empty((2, 4, 2))
    for seed in range(2):
        order = np.random.default_rng(seed).permutation(len(y))
        ours, other = order[:n], order[1200:]
        for i, weight in enumerate((-0.3, 0, 1, 10)):
            callbacks = [StopAtLoss(0.02)]
            net = make_flat(layer, weight, callbacks=callbacks, random_state=seed, **settings)
            net.fit(X[ours], y[ours])
            accuracies[i, seed] = net.score(X[other], y[other])
            flatness[i, seed] = relative_flatness(net, X[ours], y[ours], layer=layer)
            assert all(np.sign(net.history[:, "flatness_penalty"]) == np.sign(weight))
    sharp, free, *limited = accuracies.mean(axis=1)
    assert sharp > free - 0.05
    assert min(limited) > free - 0.01
    ratios = flatness.mean(axis=1)[1:] / flatness.mean(axis=1)[:-1]
    assert (ratios < [0.8, 0.7, 0.8]).all()


def train_digits(weights, lr, max_epochs, *, wrong=0, seeds=5, sizes=(64, 64)):
    """Train on 600 digits, some of whose labels are wrong; return nets and their accuracies."""
    X, y = digits(None)
    rng, labels = np.random.default_rng(0), y[:600].copy()
    changed = rng.permutation(600)[:wrong]
    labels[changed] = (labels[changed] + rng.integers(1, 10, wrong)) % 10
    settings = {"lr": lr, "max_epochs": max_epochs, "module__hidden_layer_sizes": sizes}
    settings |= {"optimizer": torch.optim.SGD, "optimizer__momentum": 0.9}
    nets = [make_flat("all", w, random_state=i, **settings) for w in weights for i in range(seeds)]
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
