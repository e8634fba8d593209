"""Weights that a network uses a second time, by a function instead of a module."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune, weight_norm

from relflat_sk import flatness_report, relative_flatness
from relflat_sk.exceptions import FlatnessWarning
from relflat_sk.training import RelativeFlatnessPenalty

MSE = nn.MSELoss()
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).double()


class Tied(nn.Module):
    """An autoencoder, with the weight of one of its modules used by a function as well."""

    def __init__(self, use):
        super().__init__()
        torch.manual_seed(0)
        self.enc, self.mid, self.dec = nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 4)
        self.use = use
        self.double()

    def forward(self, x):
        if self.use == "before":
            return self.dec(self.mid(F.linear(x, self.dec.weight.T)).tanh())
        h = self.mid(self.enc(x).tanh()).tanh()
        return OUTPUTS[self.use](self, x, h)


def ask(net, x, h):
    """Ask for properties of the weight only."""
    weight = net.enc.weight
    zeros = torch.zeros_like(weight).sum() + x.new_zeros(weight.shape[1])
    return net.dec(h.type_as(weight)) + zeros.to(weight.dtype)


def log(read):
    """Keep a number that is computed from the weight."""

    def run(net, x, h):
        net.norm = read(net.enc.weight)
        return net.dec(h)

    return run


OUTPUTS = {
    "none": lambda net, x, h: net.dec(h),
    "function": lambda net, x, h: F.linear(h, net.enc.weight.T),
    "operator": lambda net, x, h: h @ net.enc.weight,
    "list": lambda net, x, h: torch.einsum("ni,ij->nj", [h, net.enc.weight]),
    # of a value that does not pass the layer
    "aside": lambda net, x, h: net.dec(h) + x @ net.enc.weight.T @ net.enc.weight,
    "like": ask,
    "in no_grad": log(torch.no_grad()(lambda weight: weight.norm())),
    "detach": log(lambda weight: weight.detach().norm()),
    "data": log(lambda weight: weight.data.norm()),
}
USES = {"function": "enc", "operator": "enc", "list": "enc", "aside": "enc", "before": "dec"}


@pytest.mark.parametrize("use", USES)
def test_layers_with_another_use_of_their_weight_are_refused(use):
    net, name = Tied(use), USES[use]
    message = f"uses the weight of layer '{name}' outside of the layer's call"
    with pytest.raises(ValueError, match=message):
        relative_flatness(net, X, X, layer=name, criterion=MSE)
    assert relative_flatness(net, X, X, layer="mid", criterion=MSE) > 0
    with pytest.warns(FlatnessWarning, match=f"'{name}' left out: the weight is used in several"):
        report = flatness_report(net, X, X, criterion=MSE, measures="relative_flatness")
    assert name not in set(report["layer"])
    assert "mid" in set(report["layer"])


@pytest.mark.parametrize("use", USES)
def test_penalties_refuse_them_in_the_first_step(use):
    net, name = Tied(use), USES[use]
    penalty = RelativeFlatnessPenalty(name)
    with penalty.capture(net):
        y_pred = net(X)
    with pytest.raises(ValueError, match=f"uses the weight of layer '{name}' outside"):
        penalty(MSE, y_pred, X)
    penalty = RelativeFlatnessPenalty("mid")
    with penalty.capture(net):
        y_pred = net(X)
    assert penalty(MSE, y_pred, X) > 0


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_frozen_weights_are_noticed_and_stay_frozen(frozen):
    net = Tied("function").requires_grad_(not frozen)
    with pytest.raises(ValueError, match="uses the weight of layer 'enc' outside"):
        relative_flatness(net, X, X, layer="enc", criterion=MSE)
    assert all(weight.requires_grad is not frozen for weight in net.parameters())
    assert all("forward" not in vars(module) for module in net.modules())


@pytest.mark.parametrize("use", USES)
def test_penalties_notice_other_uses_of_frozen_weights(use):
    net, name = Tied(use), USES[use]
    net.get_submodule(name).requires_grad_(False)
    penalty = RelativeFlatnessPenalty(name)
    with penalty.capture(net):
        y_pred = net(X)
    with pytest.raises(ValueError, match=f"uses the weight of layer '{name}' outside"):
        penalty(MSE, y_pred, X)
    assert "forward" not in vars(net)


def test_frozen_weights_may_be_read_beside_the_network():
    net = Tied("none")
    net.mid.requires_grad_(False)
    penalty = RelativeFlatnessPenalty("mid")
    with penalty.capture(net):
        y_pred = net(X)
        decay = sum(weight.square().sum() for weight in net.parameters())
        assert penalty(MSE, y_pred, X) + decay > 0


@pytest.mark.parametrize("use", ["in no_grad", "detach", "data"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_a_weight_may_be_read_without_a_gradient_as_for_a_log(use, frozen):
    net = Tied(use)
    net.enc.requires_grad_(not frozen)
    penalty = RelativeFlatnessPenalty("enc")
    with penalty.capture(net):
        y_pred = net(X)
    assert penalty(MSE, y_pred, X) > 0
    assert net.norm > 0


def test_properties_of_a_weight_are_no_use_of_it():
    for use in ("like", "none"):
        assert relative_flatness(Tied(use), X, X, layer="enc", criterion=MSE) == pytest.approx(
            relative_flatness(Tied("none"), X, X, layer="enc", criterion=MSE), rel=1e-12
        )
    penalty = RelativeFlatnessPenalty("enc")
    with penalty.capture(net := Tied("like")):
        y_pred = net(X)
    assert penalty(MSE, y_pred, X) > 0


def test_parametrised_weights_are_watched():
    net = Tied("function")
    parametrizations.weight_norm(net.enc)
    with pytest.raises(ValueError, match="uses the weight of layer 'enc' outside"):
        relative_flatness(net, X, X, layer="enc", criterion=MSE)
    net.use = "none"
    assert relative_flatness(net, X, X, layer="enc", criterion=MSE) > 0


@pytest.mark.parametrize(
    "compute",
    [
        pytest.param(weight_norm, marks=pytest.mark.filterwarnings("ignore::FutureWarning")),
        lambda layer: prune.random_unstructured(layer, "weight", 3),
    ],
    ids=["weight norm", "pruning"],
)
def test_weights_that_hooks_compute_are_watched(compute):
    net = Tied("function")
    compute(net.enc)
    with pytest.raises(ValueError, match="uses the weight of layer 'enc' outside"):
        relative_flatness(net, X, X, layer="enc", criterion=MSE)
    penalty = RelativeFlatnessPenalty("enc")
    with penalty.capture(net):
        y_pred = net(X)
    with pytest.raises(ValueError, match="uses the weight of layer 'enc' outside"):
        penalty(MSE, y_pred, X)
    net.use = "none"
    assert relative_flatness(net, X, X, layer="enc", criterion=MSE) > 0


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_penalties_take_the_weight_that_a_hook_computed_for_their_pass():
    slopes = []
    for again in (False, True):
        net = Tied("none")
        weight_norm(net.enc)
        penalty = RelativeFlatnessPenalty("enc")
        with penalty.capture(net):
            y_pred = net(X)
        if again:
            with torch.no_grad():
                net(X)
        torch.manual_seed(0)
        penalty(MSE, y_pred, X).backward()
        slopes.append(net.enc.weight_g.grad)
    assert torch.equal(*slopes)


class Reads(nn.Linear):
    """A layer that uses the weight of another one in its own call."""

    def forward(self, x):
        return super().forward(F.linear(x, self.other[0].weight))


def test_a_use_inside_of_another_layer_is_noticed():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Reads(4, 4)).double()
    net[2].other = [net[0]]  # in a list, so that it is no module of its own there
    with pytest.raises(ValueError, match="uses the weight of layer '0' outside"):
        relative_flatness(net, X, X, layer=0, criterion=MSE)


class Words(nn.Module):
    """A language model whose embedding is a function of the head's weight."""

    def __init__(self, tie):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(4, 5, bias=False).double()
        self.copy = self.head.weight.detach().clone()
        self.tie = tie

    def forward(self, tokens):
        tokens = tokens.long()
        return self.head(F.embedding(tokens, self.head.weight if self.tie else self.copy).mean(1))


def test_a_head_tied_to_an_embedding_counts_as_its_own_copy():
    tokens, y = torch.arange(8).reshape(4, 2) % 5, torch.arange(4)
    tied, own = (
        relative_flatness(Words(tie), tokens, y, criterion=nn.CrossEntropyLoss())
        for tie in (True, False)
    )
    assert tied == own
    penalty = RelativeFlatnessPenalty()
    with penalty.capture(net := Words(True)):
        y_pred = net(tokens)
    assert penalty(nn.CrossEntropyLoss(), y_pred, y) > 0
