"""Hugging Face's causal language models, measured with their own loss."""

import copy

import pytest
import torch
from torch import nn

from relflat_sk import flatness_report, measure
from relflat_sk.measures import evaluate
from tests import oracles
from tests.hugging_face import GPT2LMHeadModel
from tests.measures.test_layer_kinds import CE

IDS = torch.tensor([[3, 1, 4, 1], [5, 2, 6, 0], [2, 5, 0, 0]])
LENGTHS = torch.tensor([4, 3, 2])
MASK = (torch.arange(4) < LENGTHS[:, None]).long()
LABELS = IDS.where(MASK.bool(), -100)
INPUTS = {"input_ids": IDS, "attention_mask": MASK}


class OwnLoss(nn.Module):
    """A model whose output is its own loss, with a head that shares no weight."""

    def __init__(self, net):
        super().__init__()
        self.net = copy.deepcopy(net)
        self.net.lm_head.weight = nn.Parameter(net.lm_head.weight.detach().clone())

    def forward(self, inputs):
        return self.net(**inputs, labels=LABELS)["loss"]


def assert_own_loss(net):
    """Compare the measures at the head with the dense Hessian of the model's own loss."""
    own = OwnLoss(net)
    H, W = oracles.weight_hessian(own, "net.lm_head", lambda loss, _: loss, INPUTS, None)
    for name, oracle in oracles.TABLE_1.items():
        found = evaluate(name, net, INPUTS, LABELS, layer="lm_head", batch_size=2)
        assert found.value == pytest.approx(oracle(H, W), rel=1e-6)
        assert found.method == "closed form"
    # the loss is computed in float32
    assert found.risk == pytest.approx(own(INPUTS).item(), rel=1e-6)


@pytest.fixture(params=["few classes", "many classes"])
def classes(request, monkeypatch):
    if request.param == "many classes":
        monkeypatch.setattr("relflat_sk._network.tail.MANY", 2)
        monkeypatch.setattr("relflat_sk._losses.curvature._ROWS", {False: 3, True: 3})


@pytest.mark.usefixtures("classes")
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_measured_with_its_own_loss(tie):
    torch.manual_seed(0)
    assert_own_loss(GPT2LMHeadModel(tie=tie).double())


@pytest.mark.usefixtures("classes")
def test_padding_does_not_count():
    torch.manual_seed(0)
    net = GPT2LMHeadModel().double()
    value = measure("relative_flatness", net, INPUTS, LABELS, layer="lm_head")
    other = {**INPUTS, "input_ids": IDS.where(MASK.bool(), 6)}
    assert measure("relative_flatness", net, other, LABELS, layer="lm_head") == pytest.approx(
        value, rel=1e-12
    )
    assert measure("relative_flatness", net, INPUTS, IDS, layer="lm_head") != pytest.approx(
        value, rel=1e-3
    )


def test_a_report_and_a_criterion_of_ones_own():
    torch.manual_seed(0)
    net = GPT2LMHeadModel().double()
    report = flatness_report(net, INPUTS, LABELS, layers="lm_head", measures="relative_flatness")
    shifted = torch.cat([LABELS[:, 1:], torch.full((3, 1), -100)], dim=1)
    value = measure("relative_flatness", net, INPUTS, shifted, layer="lm_head", criterion=CE)
    assert report["value"].item() == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("labels", [None, torch.zeros(3)], ids=["none", "one for each sample"])
def test_labels_are_needed_for_each_token(labels):
    with pytest.raises(ValueError, match=r"labels of shape \(samples, tokens\) as y, got"):
        measure("relative_flatness", GPT2LMHeadModel(), INPUTS, labels, layer="lm_head")


def test_a_model_with_another_loss_needs_a_criterion():
    net = GPT2LMHeadModel()
    net.loss_function = nn.functional.mse_loss
    with pytest.raises(ValueError, match="criterion is needed"):
        measure("relative_flatness", net, INPUTS, LABELS, layer="lm_head")


@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_models_of_transformers(kind):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "GPT2LMHeadModel":
        config = transformers.GPT2Config(
            n_layer=1, n_head=2, n_embd=4, vocab_size=7, n_positions=8, bos_token_id=0,
            eos_token_id=0,
        )  # fmt: skip
    else:
        config = transformers.LlamaConfig(
            hidden_size=4, intermediate_size=6, num_hidden_layers=1, num_attention_heads=2,
            vocab_size=7, max_position_embeddings=8,
        )  # fmt: skip
    assert_own_loss(getattr(transformers, kind)(config).double().eval())
