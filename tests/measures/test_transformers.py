"""Attention, and Hugging Face's models: their layers, tied heads and own losses."""

from contextlib import ExitStack

import numpy as np
import pytest
import torch
from torch import nn
from torch.backends import cuda
from torch.testing import assert_close

from relflat_sk import (
    FlatnessWarning,
    RelativeFlatnessPenalty,
    flatness_report,
    measure,
    relative_flatness,
)
from relflat_sk._models.network_of import DataOptions, to_network
from relflat_sk._network.borrowing import MathAttention, explicit_attention
from relflat_sk.measures._sharpness import fisher_rao_norm
from tests.cases import Net, published_penalty
from tests.hugging_face import Conv1D, GPT2LMHeadModel
from tests.measures.nets import (
    CE,
    IDS,
    INPUTS,
    PROBLEMS,
    UNTRAINED,
    FusedAttention,
    allowed,
    make_fused,
    own_loss,
)
from tests.measures.test_layer_kinds import assert_measures
from tests.penalty.every_draw import evaluate as penalise

pytestmark = UNTRAINED


PADDING = torch.tensor([[False, False, True]] * 5)


@pytest.mark.parametrize(
    ("n_keys", "masks"),
    [
        (3, {}),
        (3, {"attn_mask": torch.triu(torch.ones(3, 3), 1).bool()}),
        (3, {"attn_mask": torch.randn(3, 3).double()}),
        (3, {"key_padding_mask": PADDING}),
        (3, {"need_weights": False}),
        (3, {"average_attn_weights": False}),
        (2, {"attn_mask": torch.randn(3, 2).double()}),
        (2, {"attn_mask": torch.zeros(10, 3, 2).bool(), "key_padding_mask": PADDING[:, 1:]}),
    ],
)
@pytest.mark.parametrize("batch_first", [True, False])
def test_explicit_attention_is_the_same_function(n_keys, masks, batch_first):
    attention = nn.MultiheadAttention(4, 2, batch_first=batch_first).double().eval()
    x, keys = torch.randn(5, 3, 4).double(), torch.randn(5, n_keys, 4).double()
    x, keys = (one if batch_first else one.transpose(0, 1) for one in (x, keys))
    cases = [(x, keys, keys), (x, keys + 1, keys), *([(x, x, x)] if n_keys == 3 else [])]
    expected = [attention(*case, **masks) for case in cases]
    names = [name for name, _ in attention.named_modules()]
    with explicit_attention(attention):
        assert "in_proj" in dict(attention.named_modules())
        assert_close([attention(*case, **masks) for case in cases], expected)
    assert [name for name, _ in attention.named_modules()] == names
    assert "forward" not in attention.__dict__


def test_fused_encoder_layers_are_taken_apart_for_a_while():
    problem = PROBLEMS["encoder"]()
    names = [name for name, _ in problem.net.named_modules()]
    fast = torch.backends.mha.get_fastpath_enabled()
    at, measured = (problem.net, problem.X, problem.y), {"measures": "hessian_trace"}
    report = flatness_report(*at, criterion=CE, method="exact", **measured)
    layers = "self_attn.in_proj", "self_attn.out_proj", "linear1", "linear2"
    assert report["layer"].tolist() == [*(f"0.{layer}" for layer in layers), "2"]
    assert [name for name, _ in problem.net.named_modules()] == names
    assert torch.backends.mha.get_fastpath_enabled() == fast


def test_attention_before_the_measured_layer_stays_fused():
    net, _, X, y = make_fused("plain")
    before = allowed()
    for layer in (-1, "out", "head"):
        relative_flatness(net, X, y, layer=layer, criterion=CE, batch_size=3)
    assert set(net.allowed) == {before}
    net.allowed.clear()
    relative_flatness(net, X, y, layer=0, criterion=CE, batch_size=3)
    # each batch is differentiated once; a pass that looks for other uses of the weight is fused
    assert sorted(net.allowed) == [(False, False, False, True)] * 2 + [before]


class Fails(FusedAttention):
    def attend(self, q, k, v):
        super().attend(q, k, v)
        raise ZeroDivisionError


@pytest.mark.parametrize("flash", [True, False])
def test_kernels_are_allowed_as_before_also_after_an_exception(flash):
    net, X, y = Fails(), torch.randn(6, 3, 4), torch.arange(6) % 3
    cuda.enable_flash_sdp(flash)
    try:
        before = allowed()
        with pytest.raises(ZeroDivisionError):
            relative_flatness(net, X, y, layer=0, criterion=CE)
        with pytest.raises(ZeroDivisionError):
            fisher_rao_norm(to_network(net, X, y, DataOptions(CE)))
        for _ in range(2):
            with pytest.raises(ZeroDivisionError), published_penalty(0).capture(net):
                net(X)
        assert len(net.allowed) == 4
        looked, *others = net.allowed
        assert looked == before  # for other uses of a weight, which takes no derivatives
        assert set(others) == {(False, False, False, True)}
        assert allowed() == before
    finally:
        cuda.enable_flash_sdp(True)


def test_the_last_of_several_contexts_restores_the_kernels():
    """As of two threads, of which the first to begin ends first."""
    before, first, second = allowed(), ExitStack(), ExitStack()
    for context in (first, second):
        context.enter_context(MathAttention())
    first.close()
    assert allowed() == (False, False, False, True)
    second.close()
    assert allowed() == before


def test_report_leaves_out_layers_that_share_a_weight():
    """Layers `first` and `second` share a weight, and `again` is called twice."""

    def run(net, x):
        h = net.second(net.first(x).tanh()).tanh()
        return net.head(net.again(net.again(h).tanh()).tanh())

    square = {name: nn.Linear(4, 4) for name in ("first", "second", "again")}
    net, X, y = Net(run, **square, head=nn.Linear(4, 3)), torch.randn(6, 4), torch.arange(6) % 3
    net.second.weight = net.first.weight
    at, options = (net, X, y), {"criterion": CE, "measures": ["relative_flatness"]}
    message = "'first', 'second', 'again' left out: the weight"
    with pytest.warns(FlatnessWarning, match=message) as caught:
        report = flatness_report(*at, **options, batch_size=2)
    assert len(caught) == 1
    assert report[["layer", "position"]].to_numpy().tolist() == [["head", 3]]
    with pytest.raises(ValueError, match=r"'first' is shared by the modules \['first', 'second'\]"):
        flatness_report(*at, layers=["first"], **options)
    net.head = nn.Identity()
    with pytest.raises(ValueError, match=r"'first' is shared by|'again' was called 2 times"):
        flatness_report(*at, **options)


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D], ids=["as that of DoRA", "conv1d"])
def test_report_leaves_out_layers_that_compute_more_than_a_product(kind):
    scaled = type("Scaled", (kind,), {"forward": lambda layer, x: 2 * kind.forward(layer, x)})
    net, X, y = nn.Sequential(scaled(4, 4), nn.Linear(4, 3)), torch.randn(6, 4), torch.arange(6) % 3
    with pytest.warns(FlatnessWarning, match=r"^'0' left out: .* not compute W x \+ b"):
        report = flatness_report(net, X, y, criterion=CE, measures=["relative_flatness"])
    assert report["layer"].tolist() == ["1"]
    with pytest.raises(ValueError, match=r"'0' does not compute W x \+ b with its own weight"):
        flatness_report(net[:1], X, y, criterion=CE)


@pytest.mark.parametrize("labels", [None, torch.zeros(3)], ids=["none", "one for each sample"])
def test_labels_are_needed_for_each_token(labels):
    with pytest.raises(ValueError, match=r"labels of shape \(samples, tokens\) as y, got"):
        measure("relative_flatness", GPT2LMHeadModel(), INPUTS, labels, layer="lm_head")


def test_a_language_model_may_read_as_many_tokens_as_it_has_classes():
    """Later tokens change nothing in a causal model: those that do not count are left out."""
    net, ids = GPT2LMHeadModel(vocabulary=4).double(), torch.randint(0, 4, (3, 4))
    longer, labels = nn.functional.pad(ids, (0, 1)), nn.functional.pad(ids, (0, 1), value=-100)

    def value(name, x, y, **options):
        return measure(name, net, {"input_ids": x}, y, layer="lm_head", **options)

    for name in ("relative_flatness", "gradient_norm"):
        assert value(name, ids, ids) == pytest.approx(value(name, longer, labels), rel=1e-9)
    expected = value("relative_flatness", ids, labels[:, 1:], criterion=CE)
    assert value("relative_flatness", ids, ids) == pytest.approx(expected, rel=1e-12)


BLOCK = {
    "GPT2LMHeadModel": [
        f"transformer.h.0.{name}"
        for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ],
    "LlamaForCausalLM": [
        *(f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"),
        *(f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")),
    ],
}


@pytest.mark.parametrize("kind", BLOCK)
def test_models_of_transformers(kind):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 7, "max_position_embeddings": 8}
    if kind == "GPT2LMHeadModel":
        config = transformers.GPT2Config(
            n_layer=1, n_head=2, n_embd=4, bos_token_id=0, eos_token_id=0, **sizes
        )
    else:
        sizes |= {"hidden_size": 4, "intermediate_size": 6}
        config = transformers.LlamaConfig(num_hidden_layers=1, num_attention_heads=2, **sizes)
    net = getattr(transformers, kind)(config).double().eval()
    assert_measures(own_loss(net), "lm_head")
    report = flatness_report(net, IDS, IDS, criterion=CE, measures="hessian_trace", rtol=0.5)
    assert report["layer"].tolist() == [*BLOCK[kind], "lm_head"]
    assert np.isfinite(report["value"]).all()
    penalty = RelativeFlatnessPenalty("all", weight=1.0)
    for _ in range(2):
        penalise(penalty, net, CE, IDS, IDS).backward()
