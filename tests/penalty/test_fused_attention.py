"""The penalty at layers in front of `scaled_dot_product_attention`."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests import oracles
from tests.cases import Net, published_penalty
from tests.measures.nets import CE, HEADS, KINDS, allowed
from tests.measures.nets import make_fused as make
from tests.penalty.every_draw import assert_right_on_average, evaluate
from tests.penalty.test_penalty import assert_slope_is_that_of_differences

SEED = 7
# networks with random weights are at no minimum
pytestmark = pytest.mark.filterwarnings("ignore:.*is negative:relflat_sk.FlatnessWarning")


@pytest.mark.parametrize("layer", ["qkv", "out", "head"])
@pytest.mark.parametrize("kind", KINDS)
def test_right_on_average_in_training(kind, layer):
    net, written, X, y = make(kind)
    shape = (len(X), HEADS, X.shape[1], X.shape[1])
    torch.manual_seed(SEED)
    written.mask = F.dropout(torch.ones(shape).double(), net.dropout)
    torch.manual_seed(SEED)  # the same neurons are dropped in each pass
    torch.testing.assert_close(net(X), written(X))
    truth = oracles.penalty(written, layer, CE, X, y)
    assert_right_on_average(published_penalty(layer), net, CE, X, y, truth, seed=SEED)


@pytest.mark.parametrize("layer", ["qkv", "all"])
def test_slope(layer):
    net, _, X, y = make("causal")
    penalty = published_penalty(layer)
    assert_slope_is_that_of_differences(penalty, net, CE, X, y, step=1e-5)


def test_attention_stays_fused_where_no_second_derivative_is_needed():
    net, _, X, y = make("plain")
    before = allowed()
    for layer in (-1, 2, "head"):
        penalty = published_penalty(layer)
        for _ in range(3):
            evaluate(penalty, net, CE, X, y).backward()
        assert net.allowed[-2:] == [before] * 2  # the first step finds the layers
    assert net.allowed[:3] == [before] * 3
    penalty = published_penalty("qkv")
    for _ in range(3):
        with penalty.capture(net):
            output = net(X)
        assert allowed() == before
        penalty(CE, output, y).backward()
    assert net.allowed[-3:] == [(False, False, False, True)] * 3


def test_attention_with_added_keys():
    def attends(net, x):
        h = net.body(x)
        return net.head(net.attention(h, h, h, need_weights=False)[0].mean(1))

    attention = nn.MultiheadAttention(4, 2, add_bias_kv=True, batch_first=True)
    net = Net(attends, body=nn.Linear(4, 4), attention=attention, head=nn.Linear(4, 3))
    X, y = torch.randn(6, 3, 4), torch.arange(6) % 3
    penalty = published_penalty("body")
    for _ in range(2):
        evaluate(penalty, net, CE, X, y).backward()
    assert net.body.weight.grad.any()
