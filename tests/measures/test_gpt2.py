"""Hugging Face's GPT-2: its own kind of linear layer, and a head tied to the embedding."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from relflat_sk import (
    FlatnessWarning,
    RelativeFlatnessPenalty,
    flatness_report,
    measure,
    reparameterize,
)
from relflat_sk._network import weight_layers
from relflat_sk.measures import evaluate
from tests import oracles
from tests.hugging_face import GPT2, Conv1D, conv1d
from tests.measures.test_layer_kinds import CE

# networks with random weights are at no minimum
pytestmark = pytest.mark.filterwarnings("ignore:.*is negative:relflat_sk.FlatnessWarning")
LAYERS = ["c_attn", "c_proj", "c_fc", "c_out", "lm_head"]


def loss(out, y):
    return CE(out["logits"].transpose(1, 2), y)


def make(tie=True):
    torch.manual_seed(0)
    net = GPT2(tie=tie).double()
    return net, torch.randint(0, 7, (5, 3)), torch.randint(0, 7, (5, 3))


def untied(net):
    """The same network, whose head has a copy of the weight."""
    net = copy.deepcopy(net)
    net.lm_head.weight = nn.Parameter(net.lm_head.weight.detach().clone())
    return net


@pytest.mark.parametrize("layer", LAYERS)
def test_measures_agree_with_the_dense_hessian(layer):
    net, X, y = make()
    with sdpa_kernel(SDPBackend.MATH):
        H, W = oracles.weight_hessian(untied(net), layer, loss, X, y)
    for name, oracle in oracles.TABLE_1.items():
        found = evaluate(name, net, X, y, layer=layer, criterion=CE, method="exact", batch_size=2)
        assert found.value == pytest.approx(oracle(H, W), rel=1e-8)
    assert found.method == ("closed form" if layer == "lm_head" else "exact")


def test_report_has_all_layers():
    net, X, y = make()
    arguments = {"criterion": CE, "measures": ["relative_flatness"], "method": "exact"}
    report = flatness_report(net, X, y, **arguments)
    assert report["layer"].tolist() == LAYERS
    assert report["position"].tolist() == [0, 1, 2, 3, 4]
    expected = flatness_report(untied(net), X, y, **arguments)
    assert report["value"].tolist() == pytest.approx(expected["value"].tolist(), rel=1e-9)


def test_penalty_at_the_tied_head():
    net, X, y = make()
    truth = evaluate("relative_flatness", net, X, y, layer="lm_head", criterion=CE).value / (2 * 4)
    penalty = RelativeFlatnessPenalty()
    for _ in range(3):
        with penalty.capture(net):
            out = net(X)
        assert penalty(CE, out, y).item() == pytest.approx(truth, rel=1e-9)


@pytest.mark.parametrize("layer", [-1, "c_attn", "all"])
def test_training_with_a_limited_penalty(layer):
    net, X, _ = make()
    y = X.roll(1, dims=1)
    penalty = RelativeFlatnessPenalty(layer, weight=10.0, clip=0.5)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    losses, shares = [], []
    for _ in range(60):
        with penalty.capture(net):
            out = net(X)
            losses.append(loss(out, y))
            total = losses[-1] + penalty(CE, out, y)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        shares.append((total - losses[-1]).item())
    assert losses[-1] < 0.5 * losses[0]
    assert any(share != 0 for share in shares)
    assert all(parameter.isfinite().all() for parameter in net.parameters())


class Twice(nn.Module):
    """Layers `first` and `second` share a weight, and `again` is called twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.again, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        h = self.second(self.first(x).tanh()).tanh()
        return self.head(self.again(self.again(h).tanh()).tanh())


def test_report_leaves_out_layers_that_share_a_weight():
    net, X, y = Twice(), torch.randn(6, 4), torch.arange(6) % 3
    arguments = {"criterion": CE, "measures": ["relative_flatness"]}
    with pytest.warns(
        FlatnessWarning, match="'first', 'second', 'again' left out: the weight"
    ) as w:
        report = flatness_report(net, X, y, **arguments, batch_size=2)
    assert len(w) == 1
    assert report["layer"].tolist() == ["head"]
    assert report["position"].tolist() == [3]
    with pytest.raises(ValueError, match=r"'first' is shared by the modules \['first', 'second'\]"):
        flatness_report(net, X, y, layers=["first"], **arguments)
    net.head = nn.Identity()
    with pytest.raises(ValueError, match=r"'first' is shared by|'again' was called 2 times"):
        flatness_report(net, X, y, **arguments)


def test_norms_and_rescalings_of_transposed_weights():
    torch.manual_seed(0)
    net = nn.Sequential(conv1d(4, 6), nn.ReLU(), conv1d(6, 5), nn.ReLU(), conv1d(5, 3)).double()
    linear = nn.Sequential(
        nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)
    ).double()
    with torch.no_grad():
        for ours, theirs in zip(net[::2], linear[::2], strict=True):
            theirs.weight.copy_(ours.weight.T)
            theirs.bias.copy_(ours.bias)
    X = torch.randn(8, 4).double()
    for name in ("l2_norm", "frobenius_product", "spectral_product", "l1_path_norm"):
        found, expected = (
            measure(name, one, X, net(X).argmax(1), criterion=CE) for one in (net, linear)
        )
        assert found == pytest.approx(expected, rel=1e-9)
    columns = np.arange(1, 7) / 3
    for change in ({"factors": [2, 5, 0.1]}, {"factors": {0: columns}, "kind": "neuron"}):
        rescaled, as_linear = (reparameterize(one, **change) for one in (net, linear))
        torch.testing.assert_close(rescaled(X), net(X))
        for ours, theirs in zip(rescaled[::2], as_linear[::2], strict=True):
            torch.testing.assert_close(ours.weight.T, theirs.weight)
            torch.testing.assert_close(ours.bias, theirs.bias)


class Convolution(nn.Module):
    """A user's own module, which happens to have that name."""

    def __init__(self):
        super().__init__()
        self.nf = 3
        self.inner = nn.Linear(4, 3)

    def forward(self, x):
        return self.inner(x)


def test_other_classes_of_that_name_are_no_layers():
    Convolution.__name__ = "Conv1D"
    assert list(weight_layers(nn.Sequential(Convolution()))) == ["0.inner"]


def test_a_class_of_the_same_name_that_computes_something_else_is_refused():
    class Scaled(Conv1D):
        def forward(self, x):
            return 2 * super().forward(x)

    net = nn.Sequential(Scaled(3, 4)).double()
    nn.init.normal_(net[0].weight)
    with pytest.raises(ValueError, match="layer '0' does not compute W x"):
        measure("relative_flatness", net, torch.randn(6, 4).double(), torch.arange(6) % 3,
                criterion=CE)  # fmt: skip


def test_hugging_face_gpt2():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    net = transformers.GPT2LMHeadModel(config).double().eval()
    assert net.lm_head.weight is net.transformer.wte.weight
    X, y = torch.randint(0, 11, (5, 4)), torch.randint(0, 11, (5, 4))
    report = flatness_report(
        net, X, y, criterion=CE, measures=["relative_flatness", "hessian_trace"], method="exact"
    )
    block = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
    names = [f"transformer.h.{i}.{name}" for i in range(2) for name in block]
    assert report["layer"].unique().tolist() == [*names, "lm_head"]
    assert np.isfinite(report["value"]).all()
    for name in ("transformer.h.1.mlp.c_fc", "lm_head"):
        with sdpa_kernel(SDPBackend.MATH):
            H, W = oracles.weight_hessian(untied(net), name, loss, X, y)
        rows = report[report["layer"] == name].set_index("measure")["value"]
        for one in rows.index:
            assert rows[one] == pytest.approx(oracles.TABLE_1[one](H, W), rel=1e-7)
    penalty = RelativeFlatnessPenalty("all", clip=0.5)
    for _ in range(2):
        with penalty.capture(net):
            out = net(X)
        penalty(CE, out, y).backward()
