"""Whatever the network and the settings are, formulas train as skorch's loop and autograd do."""

from itertools import pairwise

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from torch import nn
from torch.optim import SGD, Adam, AdamW

from relflat_sk import (
    RelativeFlatnessRegularizedBinaryClassifier,
    RelativeFlatnessRegularizedClassifier,
    RelativeFlatnessRegularizedRegressor,
)
from tests.fleet.compare import assert_same, own_loop

NETS = {
    "classes": RelativeFlatnessRegularizedClassifier,
    "two classes": RelativeFlatnessRegularizedBinaryClassifier,
    "numbers": RelativeFlatnessRegularizedRegressor,
}
N_OUTPUTS = {"classes": 3, "two classes": 1, "numbers": 2}
OPTIMIZERS = {
    "SGD": {"optimizer": SGD},
    "momentum": {"optimizer": SGD, "optimizer__momentum": 0.9, "optimizer__weight_decay": 0.01},
    "Nesterov": {"optimizer": SGD, "optimizer__momentum": 0.9, "optimizer__nesterov": True},
    "Adam": {"optimizer": Adam},
    "AdamW": {"optimizer": AdamW, "optimizer__weight_decay": 0.1},
}


class Chain(nn.Sequential):
    """Linear layers of the given widths, in float64, with activations or the same one between."""

    def __init__(self, widths, activation, bias, same):
        layers, one = [], activation()
        for n_in, n_out in pairwise(widths):
            layers += [nn.Linear(n_in, n_out, bias=bias), one if same else activation()]
        super().__init__(*layers[:-1])
        self.double()


def task(kind, n):
    """Inputs and labels."""
    rng = np.random.RandomState(n)
    X = rng.randn(n, 4)
    labels = {
        "classes": np.arange(n) % 3,
        "two classes": (np.arange(n) % 2).astype(float),
        "numbers": rng.randn(n, 2),
    }
    return X, labels[kind]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(sorted(NETS)),
    n=st.integers(6, 40),
    widths=st.lists(st.integers(1, 6), max_size=3),
    activation=st.sampled_from([nn.ReLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.GELU, nn.Identity]),
    bias=st.booleans(),
    same=st.booleans(),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    layer=st.sampled_from([-1, 0, "all"]),
    weight=st.sampled_from([0.0, 0.1, 10.0]),
    clip=st.sampled_from([None, 0.1, 2.0]),
    batch_size=st.sampled_from([1, 7, 16, 64]),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    split=st.booleans(),
)
# a single layer, and a last batch of one sample: the limit has no features to compare
@example(
    kind="classes", n=15, widths=[], activation=nn.ReLU, bias=True, same=True, optimizer="SGD",
    layer=-1, weight=10.0, clip=0.1, batch_size=7, shuffle=True, drop_last=False, split=False,
)  # fmt: skip
# an epoch without a batch
@example(
    kind="classes", n=15, widths=[5], activation=nn.ReLU, bias=True, same=True, optimizer="SGD",
    layer=-1, weight=0.1, clip=None, batch_size=64, shuffle=True, drop_last=True, split=False,
)  # fmt: skip
def test_formulas_train_as_autograd_does(
    kind, n, widths, activation, bias, same, optimizer, layer, weight, clip, batch_size, shuffle,
    drop_last, split,
):  # fmt: skip
    net = NETS[kind](
        Chain,
        module__widths=[4, *widths, N_OUTPUTS[kind]],
        module__activation=activation,
        module__bias=bias,
        module__same=same,
        lr=0.01,
        **OPTIMIZERS[optimizer],
        flatness_layer=layer,
        flatness_weight=weight,
        flatness_clip=clip,
        batch_size=batch_size,
        iterator_train__shuffle=shuffle,
        iterator_train__drop_last=drop_last,
        max_epochs=2,
        random_state=0,
        verbose=0,
        **({} if split and n >= 20 else {"train_split": None}),
    )
    data = task(kind, n)
    with own_loop():
        expected = clone(net).fit(*data)
    assert_same(expected, net.fit(*data), atol=1e-7)
