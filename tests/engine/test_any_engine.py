"""Whatever network and settings are, every engine gives the result of a plain torch loop."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from torch import nn
from torch.optim import SGD, Adam, AdamW

from relflat_sk import (
    FleetTrainer,
    RelativeFlatnessPenalty,
    RelativeFlatnessRegularizedBinaryClassifier,
    RelativeFlatnessRegularizedClassifier,
    RelativeFlatnessRegularizedRegressor,
)
from relflat_sk._engine import chain
from tests.engine.compare import assert_same, curve, own_loop

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
    "amsgrad": {"optimizer": Adam, "optimizer__amsgrad": True, "optimizer__weight_decay": 0.1},
    "AdamW": {"optimizer": AdamW, "optimizer__weight_decay": 0.1},
}
ACTIVATIONS = [nn.ReLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.SiLU, nn.GELU, nn.Identity]


class Chain(nn.Sequential):
    """Linear layers of the given widths, in float64, with activations or the same one between."""

    def __init__(self, widths, activation, bias, same):
        layers, one = [], activation()
        for n_in, n_out in pairwise(widths):
            layers += [nn.Linear(n_in, n_out, bias=bias), one if same else activation()]
        super().__init__(*layers[:-1])
        self.double()


class NoChain(Chain):
    """The same, but nobody can know it."""

    def forward(self, x):
        return super().forward(x)


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


@pytest.mark.filterwarnings("ignore::relflat_sk.exceptions.FlatnessWarning")
@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    engine=st.sampled_from(["alone", "fleet", "vmap"]),
    arrays=st.sampled_from(["numpy", "torch"]),
    kind=st.sampled_from(sorted(NETS)),
    n=st.integers(6, 24),
    widths=st.lists(st.integers(1, 6), max_size=3),
    activation=st.sampled_from(ACTIVATIONS),
    bias=st.booleans(),
    same=st.booleans(),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    layer=st.sampled_from([-1, -1, 0, "all"]),
    weight=st.sampled_from([0.0, 0.1, 10.0, -0.5]),
    clip=st.sampled_from([None, 0.1, 2.0]),
    weighted=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.1]),
    batch_size=st.sampled_from([1, 7, 16, 64]),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    split=st.booleans(),
)
# a single layer, and a last batch of one sample: the limit has no gain to compare with
@example(
    engine="alone", arrays="numpy", kind="classes", n=15, widths=[], activation=nn.ReLU, bias=True,
    same=True, optimizer="SGD", layer=-1, weight=10.0, clip=0.1, weighted=False, smoothing=0.0,
    batch_size=7, shuffle=True, drop_last=False, split=False,
)  # fmt: skip
# an epoch without a batch
@example(
    engine="fleet", arrays="numpy", kind="classes", n=15, widths=[5], activation=nn.ReLU, bias=True,
    same=True, optimizer="SGD", layer=-1, weight=0.1, clip=None, weighted=True, smoothing=0.0,
    batch_size=64, shuffle=True, drop_last=True, split=False,
)  # fmt: skip
def test_every_engine_gives_the_result_of_the_nets_own_loop(
    engine, arrays, kind, n, widths, activation, bias, same, optimizer, layer, weight, clip,
    weighted, smoothing, batch_size, shuffle, drop_last, split,
):  # fmt: skip
    net = NETS[kind](
        NoChain if engine == "vmap" else Chain,
        module__widths=[4, *widths, N_OUTPUTS[kind]],
        module__activation=activation,
        module__bias=bias,
        module__same=same,
        lr=0.01,
        **OPTIMIZERS[optimizer],
        **({"criterion__label_smoothing": smoothing} if kind == "classes" else {}),
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
    X, y = task(kind, n)
    weights = {"sample_weight": np.arange(n) % 4 / 2} if weighted else {}
    with own_loop():
        expected = clone(net).fit(X, y, **weights)
    with pytest.MonkeyPatch.context() as patch:
        if arrays == "torch":
            patch.setattr(chain, "_MOST", -1)
        if engine == "alone":
            found = net.fit(X, y, **weights)
        else:
            other = clone(net).set_params(random_state=1, lr=0.02)
            found = FleetTrainer([net, other], fleet=2).fit(X, y, **weights).estimators_[0]
    assert_same(expected, found, atol=1e-7)


FREE = {"flatness_weight": 0.1, "flatness_clip": None}
LIMITED = {"flatness_weight": 10.0, "flatness_clip": 0.5}
LOOPS = [
    *((kind, "Adam", own) for kind in NETS for own in ({"flatness_weight": 0.0}, FREE, LIMITED)),
    *(("numbers", optimizer, LIMITED) for optimizer in OPTIMIZERS),
    *(("classes", "SGD", {**LIMITED, "flatness_layer": layer}) for layer in (0, [1, -1], "all")),
    ("classes", "SGD", {**FREE, "flatness_normalize": True}),
]


@pytest.mark.filterwarnings("ignore::relflat_sk.exceptions.FlatnessWarning")
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weights"])
@pytest.mark.parametrize(("kind", "optimizer", "own"), LOOPS)
def test_a_nets_own_loop_is_a_plain_torch_loop(kind, optimizer, own, weighted):
    widths = [4, 5, 5, N_OUTPUTS[kind]]
    sizes = {"widths": widths, "activation": nn.Tanh, "bias": True, "same": True}
    X, y = task(kind, 30)
    weights = np.arange(30) % 4 / 2 if weighted else None
    net = NETS[kind](
        Chain,
        **{f"module__{name}": value for name, value in sizes.items()},
        **OPTIMIZERS[optimizer],
        **own,
        lr=0.01,
        batch_size=7,
        iterator_train__shuffle=False,
        train_split=None,
        max_epochs=3,
        verbose=0,
    )
    torch.manual_seed(3)
    with own_loop():
        net.fit(X, y, sample_weight=weights)

    torch.manual_seed(3)
    module = Chain(**sizes)
    arguments = {
        name.removeprefix("optimizer__"): value
        for name, value in OPTIMIZERS[optimizer].items()
        if name != "optimizer"
    }
    stepper = OPTIMIZERS[optimizer]["optimizer"](module.parameters(), lr=0.01, **arguments)
    penalty = RelativeFlatnessPenalty(**{
        name.removeprefix("flatness_"): value for name, value in own.items()
    })
    labels = torch.from_numpy(y)[:, None] if kind == "two classes" else torch.from_numpy(y)
    batches = [torch.from_numpy(X).split(7), labels.split(7)]
    batches.append(torch.as_tensor(np.ones(30) if weights is None else weights).split(7))
    criterion, losses, terms = net.criterion_, [], []
    each_of = type(criterion)(reduction="none")
    for _ in range(3):
        torch.empty((), dtype=torch.int64).random_()  # the data loader's draw
        for x, target, weight in zip(*batches, strict=True):
            stepper.zero_grad()
            with penalty.capture(module):
                output = module(x)
            each = each_of(output, target).reshape(len(x), -1).mean(dim=1)
            loss = weight @ each / weight.sum()
            term = penalty(criterion, output, target, weight if weighted else None)
            (loss + term).backward()
            stepper.step()
            losses.append(loss.item())
            terms.append(term.item())
    np.testing.assert_allclose(curve(net), losses, rtol=1e-10)
    np.testing.assert_allclose(curve(net, "flatness_penalty"), terms, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        net.module_.state_dict(), module.state_dict(), rtol=1e-10, atol=1e-12
    )


class Ones(nn.Sequential):
    """Without dropout, its output is 2000 for all inputs of one."""

    def __init__(self):
        super().__init__(nn.Linear(1, 2000), nn.Dropout(0.3), nn.Linear(2000, 1))
        for layer in (self[0], self[2]):
            nn.init.ones_(layer.weight)
            nn.init.zeros_(layer.bias)


class NoChainOfOnes(Ones):
    def forward(self, x):
        return super().forward(x)


@pytest.mark.parametrize("engine", ["alone", "fleet", "vmap"])
def test_dropout_drops_its_share_keeps_the_mean_and_draws_anew_in_each_step(engine):
    nets = [
        RelativeFlatnessRegularizedRegressor(
            NoChainOfOnes if engine == "vmap" else Ones, flatness_weight=0, lr=0.0, max_epochs=2,
            batch_size=64, verbose=0, random_state=seed,
        )
        for seed in range(2)
    ]  # fmt: skip
    X = np.ones((128, 1), dtype=np.float32)

    def losses(target):
        y = np.full(128, target)
        if engine == "alone":
            return np.array([curve(net.fit(X, y)) for net in nets])
        return np.array([curve(net) for net in FleetTrainer(nets, fleet=2).fit(X, y).estimators_])

    # outputs have the mean 2000 and the variance 2000 * 3 / 7
    variances = losses(2000.0)
    assert variances.shape == (2, 4)
    assert ((variances > 400) & (variances < 1500)).all()
    assert len(np.unique(variances)) == 8
    assert (abs(losses(0.0) ** 0.5 - 2000) < 20).all()
