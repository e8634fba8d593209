"""The default network."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from relflat_sk import MLP


@pytest.mark.parametrize(
    ("hidden", "expected"),
    [(5, [(5, 7), (3, 5)]), ([4, 6], [(4, 7), (6, 4), (3, 6)]), ((), [(3, 7)])],
)
def test_sizes(hidden, expected):
    net = MLP(7, 3, hidden)
    linear = {name: m.weight.shape for name, m in net.named_modules() if isinstance(m, nn.Linear)}
    assert list(linear.values()) == expected
    assert [*linear] == [*(f"hidden{i}" for i in range(len(expected) - 1)), "output"]
    assert net(torch.zeros(2, 7)).shape == (2, 3)


def test_activations():
    kinds = {"relu": nn.ReLU, "tanh": nn.Tanh, "logistic": nn.Sigmoid, "gelu": nn.GELU}
    kinds |= {"leaky_relu": nn.LeakyReLU, "identity": nn.Identity}
    for name, kind in kinds.items():
        assert [type(m) for m in MLP(3, 2, (4, 5), name)][2::2] == [kind, kind]


UNIFORM, NORMAL = 1.8, 3  # kurtosis
INITS = {
    "xavier_uniform": (2 / 300, UNIFORM),
    "xavier_normal": (2 / 300, NORMAL),
    "kaiming_uniform": (2 / 100, UNIFORM),
    "kaiming_normal": (2 / 100, NORMAL),
    "uniform": (0.2**2 / 12, UNIFORM),
    "normal": (0.1, NORMAL),
}


@pytest.mark.parametrize("init", INITS)
def test_inits(init):
    variance, kurtosis = INITS[init]
    net = MLP(100, 3, (200,), init=init)
    drawn = net[1].weight
    # the variance of 20,000 draws is known to 1 %, their kurtosis to 0.04
    assert drawn.mean().item() == pytest.approx(0, abs=0.04 * variance**0.5)
    assert drawn.var().item() == pytest.approx(variance, rel=0.05)
    assert (drawn**4).mean().item() / variance**2 == pytest.approx(kurtosis, rel=0.1)
    assert not net[1].bias.any()


def test_default_init_is_torch_s():
    torch.manual_seed(0)
    layers = nn.Linear(3, 4), nn.Linear(4, 2)
    torch.manual_seed(0)
    net = MLP(3, 2, (4,))
    for own, usual in zip((net[1], net[3]), layers, strict=True):
        assert_close(own.state_dict(), usual.state_dict(), rtol=0, atol=0)
