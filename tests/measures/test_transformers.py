"""Attention, language-model heads and outputs that are mappings."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from relflat_sk import flatness_report, measure, relative_flatness
from relflat_sk._network.borrowing import explicit_attention
from relflat_sk.measures import evaluate
from tests import oracles
from tests.measures.test_layer_kinds import CE


class Attends(nn.Module):
    def __init__(self, **arguments):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **arguments)
        self.head = nn.Linear(4, 3)

    def forward(self, x, **masks):
        h, _ = self.attention(x, x, x, **masks)
        return self.head(h.mean(1))


@pytest.mark.parametrize(
    "masks",
    [
        {},
        {"attn_mask": torch.triu(torch.ones(3, 3), 1).bool()},
        {"attn_mask": torch.randn(3, 3).double()},
        {"key_padding_mask": torch.tensor([[False, False, True]] * 5)},
        {"need_weights": False},
        {"average_attn_weights": False},
    ],
)
@pytest.mark.parametrize("batch_first", [True, False])
def test_explicit_attention_is_the_same_function(masks, batch_first):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(4, 2, batch_first=batch_first).double().eval()
    x = torch.randn(5, 3, 4).double()
    x = x if batch_first else x.transpose(0, 1)
    expected = attention(x, x, x, **masks)
    names = [name for name, _ in attention.named_modules()]
    with explicit_attention(attention):
        found = attention(x, x, x, **masks)
        assert "in_proj" in dict(attention.named_modules())
        other = attention(x, x + 1, x, **masks)
    assert_close(found, expected)
    assert_close(other, attention(x, x + 1, x, **masks))
    assert [name for name, _ in attention.named_modules()] == names
    assert "forward" not in attention.__dict__


class AttendsAcross(Attends):
    """Keys and values are other tokens than queries, and more of them."""

    def forward(self, x):
        memory = torch.cat([x.flip(1), x[:, :1]], dim=1)
        h, _ = self.attention(x, memory, memory if self.training else memory.sin())
        return self.head(h.mean(1))


@pytest.mark.parametrize("batch_first", [True, False])
def test_explicit_cross_attention_is_the_same_function(batch_first):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(4, 2, batch_first=batch_first).double().eval()
    x, memory = torch.randn(5, 3, 4).double(), torch.randn(5, 2, 4).double()
    if not batch_first:
        x, memory = x.transpose(0, 1), memory.transpose(0, 1)
    padding = torch.tensor([[False, True]] * 5)
    for arguments in (
        {"attn_mask": torch.randn(3, 2).double()},
        {"attn_mask": torch.zeros(10, 3, 2).bool(), "key_padding_mask": padding},
    ):
        expected = attention(x, memory, memory, **arguments)
        with explicit_attention(attention):
            assert_close(attention(x, memory, memory, **arguments), expected)


def test_explicit_attention_drops_out_in_training_as_torch_does():
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True).double()
    x = torch.randn(5, 3, 4).double()
    torch.manual_seed(1)
    expected = attention(x, x, x)
    torch.manual_seed(1)
    with explicit_attention(attention):
        assert_close(attention(x, x, x), expected)


@pytest.mark.parametrize("kind", [Attends, AttendsAcross])
def test_packed_projections_agree_with_the_dense_hessian(kind):
    torch.manual_seed(0)
    net, X, y = kind().double().eval(), torch.randn(6, 3, 4).double(), torch.arange(6) % 3

    def risk(weight):
        out = torch.func.functional_call(net, {"attention.in_proj_weight": weight}, (X,))
        return CE(out, y)

    W = net.attention.in_proj_weight.detach()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        H = torch.func.hessian(risk)(W).detach()
    for name, oracle in oracles.TABLE_1.items():
        value = measure(name, net, X, y, layer="attention.in_proj", criterion=CE, method="exact")
        assert value == pytest.approx(oracle(H, W), rel=1e-8)
    report = flatness_report(net, X, y, criterion=CE, measures=["hessian_trace"], method="exact")
    assert report["layer"].tolist() == ["attention.in_proj", "attention.out_proj", "head"]
    assert [name for name, _ in net.named_modules()] == [
        "", "attention", "attention.out_proj", "head",
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*is negative:relflat_sk.FlatnessWarning")
def test_fused_encoder_layers_are_taken_apart():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, activation="gelu").double()
    net = nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 3).double()).eval()
    X, y = torch.randn(6, 3, 4).double(), torch.arange(6) % 3
    fast = torch.backends.mha.get_fastpath_enabled()
    report = flatness_report(
        net, X, y, criterion=CE, measures=["relative_flatness"], rtol=0.2, random_state=0
    )
    assert len(report) == 5
    expected = oracles.relative_flatness(net, "0.linear2", CE, X, y)
    value = relative_flatness(net, X, y, layer="0.linear2", criterion=CE, method="exact")
    assert value == pytest.approx(expected, rel=1e-8)
    assert torch.backends.mha.get_fastpath_enabled() == fast


class LanguageModel(nn.Module):
    def __init__(self, classes_second=True):
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.body = nn.Linear(5, 4)
        self.head = nn.Linear(4, 6)
        self.classes_second = classes_second

    def forward(self, ids):
        logits = self.head(torch.tanh(self.body(self.embed(ids))))
        return logits.transpose(1, 2) if self.classes_second else {"logits": logits}


@pytest.mark.parametrize("classes_second", [True, False], ids=["torch", "hugging face"])
@pytest.mark.parametrize(
    "criterion", [CE, nn.CrossEntropyLoss(ignore_index=2, label_smoothing=0.1)]
)
def test_tokens_of_a_language_model_are_samples(classes_second, criterion):
    torch.manual_seed(0)
    net = LanguageModel(classes_second).double()
    X, y = torch.randint(0, 7, (5, 3)), torch.randint(0, 6, (5, 3))

    def loss(out, y):
        return criterion(out if classes_second else out["logits"].transpose(1, 2), y)

    for name in ("head", "body"):
        H, W = oracles.weight_hessian(net, name, loss, X, y)
        for measure_name, oracle in oracles.TABLE_1.items():
            found = evaluate(measure_name, net, X, y, layer=name, criterion=criterion,
                             batch_size=2, method="exact")  # fmt: skip
            assert found.value == pytest.approx(oracle(H, W), rel=1e-8)
            assert found.method == ("closed form" if name == "head" else "exact")
        value = measure("hessian_max_eigenvalue", net, X, y, layer=name, criterion=criterion,
                        rtol=1e-12)  # fmt: skip
        assert value == pytest.approx(oracles.largest(H), rel=1e-8)
        norm = measure("gradient_norm", net, X, y, layer=name, criterion=criterion)
        weight = net.get_submodule(name).weight
        (gradient,) = torch.autograd.grad(loss(net(X), y), weight)
        assert norm == pytest.approx(gradient.norm().item(), rel=1e-9)
    assert found.risk == pytest.approx(loss(net(X), y).item(), rel=1e-12)
    shares = torch.zeros(6, 1).double().expand(6, 3).requires_grad_(False)
    for _ in range(3000):  # the best constant, by plain gradient descent
        shares = shares[:, :1].clone().requires_grad_()
        risk = criterion(shares.expand(5, 6, 3), y)
        (slope,) = torch.autograd.grad(risk, shares)
        shares = (shares - 2 * slope).detach().expand(6, 3)
    assert found.constant_risk() == pytest.approx(risk.item(), rel=1e-3)


def test_a_regression_on_tokens():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)).double()
    X, y = torch.randn(6, 3, 4).double(), torch.randn(6, 3, 2).double()
    for name in ("0", "2"):
        expected = oracles.relative_flatness(net, name, nn.MSELoss(), X, y)
        value = relative_flatness(net, X, y, layer=name, criterion=nn.MSELoss(), method="exact")
        assert value == pytest.approx(expected, rel=1e-8)


def test_hugging_face_model():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12,
        vocab_size=20, max_position_embeddings=8, num_labels=3,
    )  # fmt: skip
    net = transformers.BertForSequenceClassification(config).double()
    X = {"input_ids": torch.randint(0, 20, (6, 4)), "attention_mask": torch.ones(6, 4).long()}
    y = torch.arange(6) % 3
    found = evaluate("relative_flatness", net, X, y, criterion=CE)
    features = []
    net.classifier.register_forward_hook(lambda m, args, out: features.append(args[0].detach()))
    net.eval()(**X)
    expected = oracles.relative_flatness(nn.Sequential(net.classifier), "0", CE, features[-1], y)
    assert found.value == pytest.approx(expected, rel=1e-9)
    assert found.method == "closed form"
