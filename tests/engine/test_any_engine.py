"""Whatever network and settings are, every engine gives the result of a plain torch loop."""

import copy
from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from joblib import Parallel, delayed
from sklearn.base import clone
from skorch.dataset import ValidSplit
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.utils.data import DataLoader, TensorDataset

from relflat_sk import FleetTrainer, RelativeFlatnessPenalty, fleet_training
from relflat_sk._engine import chain
from relflat_sk._random import draw_seed
from tests.engine.compare import assert_same, curve, own_loop
from tests.training.common import Binary, Classifier, Regressor

KINDS = {"classes": Classifier, "two classes": Binary, "numbers": Regressor}
N_OUTPUTS = {"classes": 3, "two classes": 1, "numbers": 2}
MOMENTUM = {"optimizer": SGD, "optimizer__momentum": 0.9}
OPTIMIZERS = {
    "SGD": {"optimizer": SGD},
    "momentum": MOMENTUM | {"optimizer__dampening": 0.1, "optimizer__weight_decay": 0.01},
    "Nesterov": MOMENTUM | {"optimizer__nesterov": True},
    "Adam": {"optimizer": Adam, "optimizer__betas": (0.8, 0.99), "optimizer__eps": 1e-3},
    "amsgrad": {"optimizer": Adam, "optimizer__amsgrad": True, "optimizer__weight_decay": 0.1},
    "AdamW": {"optimizer": AdamW, "optimizer__weight_decay": 0.1},
}
ACTIVATIONS = [nn.ReLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.SiLU, nn.GELU, nn.Identity]


class Chain(nn.Sequential):
    """Linear layers of the given widths, in float64, with activations or the same one between."""

    def __init__(self, widths, activation, bias, same, frozen):
        layers, shared = [], activation()
        for n_in, n_out in pairwise(widths):
            layers += [nn.Linear(n_in, n_out, bias=bias), shared if same else activation()]
        super().__init__(*layers[:-1])
        if frozen is not None and len(self) > 1:
            self[frozen].requires_grad_(False)
        self.double()


class NoChain(Chain):
    """The same, but nobody can know it."""

    def forward(self, x):
        return super().forward(x)


def task(kind, n):
    rng = np.random.RandomState(n)
    X, numbers, index = rng.randn(n, 4), rng.randn(n, 2), np.arange(n)
    return X, {"classes": index % 3, "two classes": index % 2.0, "numbers": numbers}[kind]


def assert_trained_by_hand(net, X, y, weights):
    """Train the network of a trained net in plain torch, and compare."""
    torch.manual_seed(draw_seed(net.random_state))
    module = net.module(**net.get_params_for("module"))
    optimizer = net.optimizer(module.parameters(), lr=net.lr, **net.get_params_for("optimizer"))
    options = ("layer", "normalize", "probes", "clip", "every")
    penalty = RelativeFlatnessPenalty(**{one: getattr(net, f"flatness_{one}") for one in options})
    targets = torch.from_numpy(y.reshape(len(y), -1) if y.dtype == float else y)
    shares = torch.from_numpy(np.ones(len(X)) if weights is None else weights)
    data, valid = TensorDataset(torch.from_numpy(X), targets, shares), None
    if net.train_split is not None:
        data, valid = net.train_split(data)
    order = {"shuffle": net.iterator_train__shuffle, "drop_last": net.iterator_train__drop_last}
    loader = DataLoader(data, net.batch_size, **order)
    criterion = net.criterion_
    each_of, class_weight = copy.copy(criterion), getattr(criterion, "weight", None)
    each_of.reduction = "none"
    losses, terms = [], []
    start = net.flatness_start
    start = start * net.max_epochs if isinstance(start, float) else start
    for epoch in range(1, 1 + net.max_epochs):
        penalised = net.flatness_weight and epoch > start  # else probes would be drawn
        penalty.weight = net.flatness_weight * min(1, (epoch - start) / (net.flatness_warmup or 1))
        for x, target, weight in loader:
            optimizer.zero_grad()
            with penalty.capture(module) if penalised else nullcontext():
                output = module(x)
            each = each_of(output, target).reshape(len(x), -1).mean(dim=1)
            divisors = weight if class_weight is None else weight * class_weight[target]
            loss = weight @ each / divisors.sum()
            term = 0 * loss
            if penalised:
                term = penalty(criterion, output, target, None if weights is None else weight)
            (loss + term).backward()
            optimizer.step()
            losses.append(loss.item())
            terms.append(term.item())
        if valid is not None:
            list(DataLoader(valid, net.batch_size))  # draws from the random state
    np.testing.assert_allclose(curve(net), losses, rtol=1e-10)
    np.testing.assert_allclose(curve(net, "flatness_penalty"), terms, rtol=1e-10, atol=1e-12)
    close = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(net.module_.state_dict(), module.state_dict(), **close)
    states = (one.state_dict()["state"] for one in (net.optimizer_, optimizer))
    torch.testing.assert_close(*states, **close)


# what nets may differ in that are trained together
CHOICES = {
    "random_state": range(6),
    "lr": [0.01, 0.02],
    "optimizer": list(OPTIMIZERS),
    "module__widths": [[], [5], [1], [4, 3], [2, 6, 1]],
    "module__activation": ACTIVATIONS,
    "module__bias": [True, False],
    "module__same": [True, False],
    "module__frozen": [None, None, None, 0, -1],
    "flatness_layer": [-1, -1, 0, "all"],
    "flatness_weight": [10.0, 0.1, 0.0, -0.5],
    "flatness_clip": [0.1, 2.0, None],
    "flatness_warmup": [0, 3],
    "flatness_every": [1, 1, 2, 3],
    "flatness_start": [0, 0, 1, 0.5],
    "flatness_probes": [1, 2],
    "flatness_normalize": [False, False, False, True],
    "criterion__weight": [None, None, [0.2, 1.0, 3.0]],
    "batch_size": [7, 1, 16, 64],
    "iterator_train__shuffle": [True, False],
    "iterator_train__drop_last": [False, True],
    "train_split": [None, ValidSplit(3)],
}
EACH = {name: st.sampled_from(values) for name, values in CHOICES.items()}
FEW = st.lists(st.sampled_from(list(EACH)), max_size=2, unique=True)
PLAIN = {name: values[0] for name, values in CHOICES.items()}
NO_BATCH = {"module__widths": [5], "batch_size": 64, "iterator_train__drop_last": True}
HEAVY = {"criterion__weight": [0.2, 1.0, 3.0], "train_split": ValidSplit(3)}
PROBED = {"module__widths": [5], "module__activation": nn.Tanh, "flatness_layer": 0}


@pytest.mark.filterwarnings("ignore::relflat_sk.exceptions.FlatnessWarning")
# no shrinking, which takes minutes
@settings(max_examples=50, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(
    engine=st.sampled_from(["alone", "fleet", "vmap"]),
    arrays=st.sampled_from(["numpy", "torch"]),
    kind=st.sampled_from(sorted(KINDS)),
    n=st.integers(6, 24),
    weighted=st.sampled_from(["", "positive", "some zero"]),
    smoothing=st.sampled_from([0.0, 0.1]),
    first=st.fixed_dictionaries(EACH),
    # nets that differ in more are seldom trained as one stacked model
    second=FEW.flatmap(lambda names: st.fixed_dictionaries({name: EACH[name] for name in names})),
)
# a single layer, and a last batch of one sample: the limit has no gain to compare with
@example("alone", "numpy", "classes", 15, "", 0.0, PLAIN, {})
# an epoch without a batch
@example("fleet", "numpy", "classes", 15, "positive", 0.0, PLAIN | NO_BATCH, {"random_state": 1})
# weights of classes, of samples that are not the first ones
@example("fleet", "numpy", "classes", 15, "positive", 0.0, PLAIN | HEAVY, {"random_state": 1})
# smooth functions behind the penalised layer
@example("alone", "numpy", "classes", 15, "", 0.0, PLAIN | PROBED, {})
# numbers of probes that are each net's own
@example("vmap", "numpy", "classes", 15, "", 0.0, PLAIN | PROBED, {"flatness_probes": 2})
def test_every_engine_gives_the_result_of_a_plain_torch_loop(
    engine, arrays, kind, n, weighted, smoothing, first, second
):
    nets = []
    for each in (first, first | second):
        own = each | OPTIMIZERS[each["optimizer"]]
        own["module__widths"] = [4, *each["module__widths"], N_OUTPUTS[kind]]
        module = NoChain if engine == "vmap" else Chain
        class_weight = own.pop("criterion__weight")
        if kind == "classes":
            own |= {"criterion__label_smoothing": smoothing, "criterion__weight": class_weight}
        nets.append(KINDS[kind](module, max_epochs=2, verbose=0, **own))
    X, y = task(kind, n)
    weights = (np.arange(n) % 4 + (weighted == "positive")) / 2 if weighted else None
    with own_loop():
        expected = [clone(net).fit(X, y, sample_weight=weights) for net in nets]
    for net in expected if weighted != "some zero" else ():  # no penalty of a batch without weight
        assert_trained_by_hand(net, X, y, weights)
    with pytest.MonkeyPatch.context() as patch:
        if arrays == "torch":
            patch.setattr(chain, "_MOST", -1)
        if engine == "alone":
            found = [net.fit(X, y, sample_weight=weights) for net in nets]
        else:
            found = FleetTrainer(nets, fleet=2).fit(X, y, sample_weight=weights).estimators_
    for net, other in zip(expected, found, strict=True):
        assert_same(net, other, atol=1e-7)


@pytest.mark.parametrize("engine", ["own loop", "alone", "fleet", "vmap"])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_sample_that_alone_has_weight_is_penalised_as_a_batch_of_one(engine, kind):
    X, y = task(kind, 6)
    module = NoChain if engine == "vmap" else Chain
    shape = {"widths": [4, 5, N_OUTPUTS[kind]], "activation": nn.ReLU, "bias": True}
    params = {f"module__{name}": value for name, value in shape.items()}
    params |= {"module__same": False, "module__frozen": None, "max_epochs": 2, "verbose": 0}
    if kind != "numbers":
        params["classes"] = np.unique(y)
    nets = [KINDS[kind](module, random_state=seed, **params) for seed in range(2)]
    with own_loop() if engine == "own loop" else fleet_training(1 if engine == "alone" else 2):
        each = [(X, y, np.arange(6) == 3), (X[3:4], y[3:4])]
        among, single = (
            Parallel()(delayed(clone(net).fit)(*data) for net in nets) for data in each
        )
    for net, other in zip(among, single, strict=True):
        assert min(curve(other, "flatness_penalty")) > 0
        for name in ("train_loss", "flatness_penalty", "flatness_clipped"):
            np.testing.assert_allclose(curve(net, name), curve(other, name), rtol=1e-9)


class Ones(nn.Sequential):
    """Without dropout, its output is 2000 for all inputs of one."""

    def __init__(self):
        super().__init__(nn.Linear(1, 2000), nn.Dropout(0.3), nn.Linear(2000, 1))
        for parameter in self.parameters():
            nn.init.constant_(parameter, parameter.ndim - 1)


class NoChainOfOnes(Ones):
    def forward(self, x):
        return super().forward(x)


@pytest.mark.parametrize("engine", ["alone", "fleet", "vmap"])
def test_dropout_drops_its_share_keeps_the_mean_and_draws_anew_in_each_step(engine):
    module = NoChainOfOnes if engine == "vmap" else Ones
    params = {"flatness_weight": 0, "lr": 0.0, "max_epochs": 2, "batch_size": 64, "verbose": 0}
    nets = [Regressor(module, random_state=seed, **params) for seed in range(2)]
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
