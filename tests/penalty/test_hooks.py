"""Hooks of users are called once in a step, and sparse gradients have a norm."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from relflat_sk import RelativeFlatnessPenalty
from tests.penalty.every_draw import train
from tests.training.common import Classifier

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


# from a network and a list of calls to the handles of hooks that lengthen the list
HOOKS = {
    "parameters": lambda net, calls: [
        p.register_hook(lambda grad: calls.append(grad.clone())) for p in net.parameters()
    ],
    "modules": lambda net, calls: [
        part.register_full_backward_hook(lambda *args: calls.append(1)) for part in net
    ],
    "before modules": lambda net, calls: [
        part.register_full_backward_pre_hook(lambda *args: calls.append(1)) for part in net
    ],
    "outputs": lambda net, calls: [part.register_forward_hook(watch(calls)) for part in net],
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # at the first layer
@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("layer", [-1, 0, "all"])
def test_a_hook_is_called_once_in_a_step(kind, layer):
    net, calls, penalty = network(), [], RelativeFlatnessPenalty(layer, weight=1.0)
    handles, criterion, counts = HOOKS[kind](net, calls), nn.CrossEntropyLoss(), []
    count = lambda: counts.append(len(calls))  # noqa: E731
    train(penalty, net, criterion, X, Y, N_STEPS, lr=0.01, after_step=count)
    assert counts == [(step + 1) * len(handles) for step in range(N_STEPS)]
    if kind == "parameters":
        norms = [sorted(map(torch.norm, grads)) for grads in (calls[-6:], gradients(net))]
        torch.testing.assert_close(*norms)
    for handle in handles:
        handle.remove()
    criterion(net(X), Y).backward()
    assert len(calls) == N_STEPS * len(handles)
    copy.deepcopy(penalty)


def gradients(net):
    return [parameter.grad for parameter in net.parameters()]


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


class Divided(Classifier):
    def get_loss(self, y_pred, y_true, *args, **kwargs):
        return nn.functional.cross_entropy(y_pred, y_true) / 4


@pytest.mark.parametrize("kind", [Classifier, Divided])
def test_a_net_calls_hooks_once_in_a_step(kind):
    calls, module = [], nn.Sequential(Watched(), nn.Identity())
    HOOKS["outputs"](module, calls)
    net = kind(module, max_epochs=3, batch_size=8, verbose=0).initialize()
    net.module_[0].first.weight.register_hook(calls.append)
    net.partial_fit(X.numpy(), Y.numpy())
    assert len(calls) == 3 * 3 * 3
    assert len(net.module_[0].calls) == 3 * 3


@pytest.mark.parametrize("layer", [-1, "all"])
@pytest.mark.parametrize("clip", [0.5, None])
def test_sparse_gradients_train_as_dense_ones(layer, clip):
    tokens = np.random.default_rng(0).integers(0, 9, (60, 4))
    params = {"optimizer": torch.optim.SGD, "lr": 0.1, "max_epochs": 3, "random_state": 0}
    params |= {"flatness_layer": layer, "flatness_clip": clip, "flatness_weight": 1.0, "verbose": 0}
    states = []
    for sparse in (False, True):
        torch.manual_seed(0)
        words = nn.EmbeddingBag(9, 5, mode="mean", sparse=sparse)
        net = Classifier(nn.Sequential(words, nn.Tanh(), nn.Linear(5, 3)), **params)
        states.append(net.fit(tokens, tokens[:, 0] % 3).module_.state_dict())
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-5)
