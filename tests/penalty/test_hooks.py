"""Hooks of users are called once in a step, and sparse gradients have a norm."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from relflat_sk import RelativeFlatnessPenalty, RelativeFlatnessRegularizedClassifier
from tests.penalty.every_draw import train

X, Y = torch.randn(24, 4, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3
N_STEPS = 12


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def watch(calls):
    """A forward hook that registers a hook on what a module puts out."""

    def hook(part, inputs, output):
        if output.requires_grad:
            output.register_hook(calls.append)

    return hook


def of_parameters(net, calls):
    return [p.register_hook(lambda grad: calls.append(grad.clone())) for p in net.parameters()]


def of_modules(net, calls):
    return [part.register_full_backward_hook(lambda *args: calls.append(1)) for part in net]


def of_modules_before(net, calls):
    return [part.register_full_backward_pre_hook(lambda *args: calls.append(1)) for part in net]


def of_outputs(net, calls):
    return [part.register_forward_hook(watch(calls)) for part in net]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # at the first layer
@pytest.mark.parametrize("register", [of_parameters, of_modules, of_modules_before, of_outputs])
@pytest.mark.parametrize("layer", [-1, 0, "all"])
def test_a_hook_is_called_once_in_a_step(register, layer):
    net, calls, penalty = network(), [], RelativeFlatnessPenalty(layer, weight=1.0)
    handles, criterion, counts = register(net, calls), nn.CrossEntropyLoss(), []
    count = lambda: counts.append(len(calls))  # noqa: E731
    train(penalty, net, criterion, X, Y, N_STEPS, lr=0.01, after_step=count)
    assert counts == [(step + 1) * len(handles) for step in range(N_STEPS)]
    if register is of_parameters:
        grads = [p.grad for p in net.parameters()][::-1]
        torch.testing.assert_close(
            sorted(map(torch.norm, calls[-6:])), sorted(map(torch.norm, grads))
        )
    for handle in handles:
        handle.remove()
    criterion(net(X), Y).backward()
    assert len(calls) == N_STEPS * len(handles)
    copy.deepcopy(penalty)


class Watched(nn.Module):
    """Registers a hook on an activation in its own forward method, and retains its gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.out = nn.Linear(4, 6), nn.Linear(6, 3)
        self.calls = []

    def forward(self, x):
        self.features = torch.tanh(self.first(x))
        if self.features.requires_grad:
            self.features.register_hook(self.calls.append)
            self.features.retain_grad()
        return self.out(self.features)


@pytest.mark.parametrize("clip", [0.5, None])
@pytest.mark.parametrize("layer", [-1, 0, "all"])
def test_activations_get_their_gradient_once_in_a_step(layer, clip):
    net, penalty = Watched(), RelativeFlatnessPenalty(layer, weight=1.0, clip=clip)

    def check():
        torch.testing.assert_close(net.features.grad, net.calls[-1])

    train(penalty, net, nn.CrossEntropyLoss(), X, Y, N_STEPS, after_step=check)
    assert len(net.calls) == N_STEPS
    pickle.loads(pickle.dumps(penalty))


class Divided(RelativeFlatnessRegularizedClassifier):
    def get_loss(self, y_pred, y_true, *args, **kwargs):
        return nn.functional.cross_entropy(y_pred, y_true) / 4


@pytest.mark.parametrize("kind", [RelativeFlatnessRegularizedClassifier, Divided])
def test_a_net_calls_hooks_once_in_a_step(kind):
    calls, module = [], nn.Sequential(Watched(), nn.Identity())
    of_outputs(module, calls)
    net = kind(module, max_epochs=3, batch_size=8, verbose=0).initialize()
    net.module_[0].first.weight.register_hook(calls.append)
    net.partial_fit(X.numpy(), Y.numpy())
    assert len(calls) == 3 * 3 * 3
    assert len(net.module_[0].calls) == 3 * 3


class Words(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.out = nn.Embedding(9, 5, sparse=sparse), nn.Linear(5, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.words(x).mean(dim=1)))


@pytest.mark.parametrize("layer", [-1, "all"])
@pytest.mark.parametrize("clip", [0.5, None])
def test_sparse_gradients_train_as_dense_ones(layer, clip):
    tokens = np.random.default_rng(0).integers(0, 9, (60, 4))
    labels, trained = tokens[:, 0] % 3, []
    for sparse in (False, True):
        net = RelativeFlatnessRegularizedClassifier(
            Words(sparse), optimizer=torch.optim.SGD, lr=0.1, flatness_weight=1.0, verbose=0,
            flatness_layer=layer, flatness_clip=clip, max_epochs=3, random_state=0,
        )  # fmt: skip
        trained.append(net.fit(tokens, labels))
    dense, sparse = (net.module_.state_dict() for net in trained)
    torch.testing.assert_close(sparse, dense, rtol=1e-4, atol=1e-5)
