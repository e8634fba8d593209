"""Nets that are trained as one stacked model are those that are trained one by one."""

import logging
import pickle
import re

import numpy as np
import pytest
import torch
from skorch.callbacks import Callback, EarlyStopping, GradientNormClipping, LRScheduler
from torch import nn
from torch.utils.data import TensorDataset

from relflat_sk import (
    MLP,
    FleetTrainer,
    RelativeFlatnessRegularizedClassifier,
    SharpnessAwareMixin,
    StopAtGradientNorm,
    StopAtLoss,
)
from tests.engine.compare import assert_same, compare, curve, data
from tests.engine.test_any_engine import OPTIMIZERS
from tests.training.common import Double

# steps of 16 samples, the last one of fewer
STEPS = {"batch_size": 16, "max_epochs": 5, "verbose": 0}


def make_each(settings, kind=RelativeFlatnessRegularizedClassifier):
    """Nets with these settings, and seeds and learning rates of their own."""
    return [
        kind(**{"lr": 0.003 * (1 + seed), "random_state": seed, **STEPS, **one})
        for seed, one in enumerate(settings)
    ]


def classifiers(n=5, **arguments):
    """Nets that differ in seeds and learning rates."""
    return make_each([arguments] * n)


@pytest.fixture(autouse=True)
def stacked(caplog):
    """Fail if nets are trained one by one, unless the test expects it."""
    caplog.set_level(logging.INFO, logger="relflat_sk")
    yield
    messages = [record.getMessage() for record in caplog.get_records("call")]
    for message, reason in zip(messages, getattr(caplog, "reasons", []), strict=True):
        assert message.startswith("trained one by one: ")
        assert reason in message


class Layers(nn.Module):
    """Two layers in float64, with parts of subclasses between them."""

    def __init__(self, n_features, n_outputs, width=8):
        super().__init__()
        self.first, self.last = nn.Linear(n_features, width), nn.Linear(width, n_outputs)
        self.double()

    def between(self, h):
        return torch.tanh(h)

    def forward(self, x):
        return self.last(self.between(self.first(x)))


class BatchNorm(Layers):
    # a bias in front of the norm has no gradient but rounding errors, of which Adam makes steps
    def __init__(self, n_features, n_outputs, bias=False, dtype=torch.float64):
        super().__init__(n_features, n_outputs)
        self.first, self.norm = nn.Linear(n_features, 8, bias), nn.BatchNorm1d(8)
        self.to(dtype)

    def between(self, h):
        return torch.relu(self.norm(h))


class Convolution(Layers):
    def __init__(self, n_outputs):
        super().__init__(1, n_outputs, 12)
        self.first, self.pool = nn.Conv2d(1, 3, 3), nn.MaxPool2d(2)
        self.double()

    def between(self, h):
        return self.pool(torch.relu(h)).flatten(1)


class Configured(MLP):
    """Has attributes that change its function."""

    def __init__(self, n_features, n_outputs, scales=(1.0,), act=torch.tanh):
        super().__init__(n_features, n_outputs)
        self._scales, self.act = [*scales], act
        self.double()

    def forward(self, x):
        return super().forward(self.act(x * self._scales[0]))


class Mapped(Double):
    """Returns its logits in a mapping."""

    def forward(self, x):
        return {"logits": super().forward(x), "other": x}


class Ordered(nn.Sequential):
    """Uses one of two activations twice."""

    def __init__(self, n_features, n_outputs, kind=nn.Tanh):
        found = {nn.Tanh: nn.Tanh(), nn.Sigmoid: nn.Sigmoid()}
        activations = found[nn.Tanh], found[nn.Sigmoid], found[kind]
        layers = [part for one in activations for part in (nn.Linear(n_features, n_features), one)]
        super().__init__(*layers, nn.Linear(n_features, n_outputs))
        self.double()


class Focal(nn.CrossEntropyLoss):
    def __init__(self, gamma):
        super().__init__()
        self._gamma = gamma

    def forward(self, output, target):
        each = nn.functional.cross_entropy(output, target, reduction="none")
        return (each * (1 - (-each).exp()) ** self._gamma).mean()


class Shared(Layers):
    """Uses weights or rows in several places, or holds results of its forward pass."""

    def __init__(self, n_features, n_outputs, kind):
        super().__init__(n_features, n_outputs)
        self.kind = kind

    def between(self, h):
        h = torch.tanh(h)
        if self.kind == "weight":
            return h + nn.functional.linear(h, self.last.weight).sum(1, keepdim=True)
        if self.kind == "rows":
            return h + h.mean(0)
        if self.kind == "calls":
            return h + self.last(h).sum(1, keepdim=True)
        self.norm = self.last.weight.square().sum()
        return h


IMAGES, LABELS = data(n_features=36)
IMAGES = IMAGES.reshape(-1, 1, 6, 6)
X, Y = data()
IGNORED = torch.from_numpy(np.where(np.arange(50) % 7, Y, -100))  # 8, fewer than a batch has
WEIGHTS = np.where(Y == 0, 0.0, 1.0 + X[:, 0] ** 2)
OWN_DATA = [
    (X, Y), (X, 2 - Y), (X[::-1].copy(), Y), (X[:20], Y[:20]), (X[:20], Y[-20:]), (X, Y, WEIGHTS)
]  # fmt: skip
SIZES = {"module__n_features": 6, "module__n_outputs": 3}
PLAIN = {"flatness_weight": 0, "max_epochs": 3}
HEAVY_CLASS = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
EARLY = [
    EarlyStopping("train_loss", patience=1, threshold=0.05),
    LRScheduler("StepLR", step_size=2, gamma=0.3),
]
# settings of each net, and arguments of `compare`
ALIKE = {
    "batch norm": ([{"module": BatchNorm, "optimizer": torch.optim.SGD}] * 3, {}),
    "convolutions": ([{"module": Convolution}] * 3, {"X": IMAGES, "y": LABELS}),
    "weights of classes": ([PLAIN | {"criterion__weight": HEAVY_CLASS}] * 3, {}),
    "weights of classes in any network": (
        [
            {"module": BatchNorm, "optimizer": torch.optim.SGD, "criterion__weight": [1.0, w, 1.0]}
            for w in (1.0, 5.0)
        ],
        {},
    ),
    "callbacks of epochs": ([{"callbacks": EARLY, "lr": 0.05}] * 5, {"fleet": 3}),
    "data of each": ([{}] * 6, {"each": OWN_DATA}),
    "results of the forward pass": ([{"module": Shared, "module__kind": "results"}] * 2, {}),
    # nets of several groups, side by side
    "activations in other places": (
        [PLAIN | {"module": Ordered, "module__kind": kind} for kind in [nn.Tanh, nn.Sigmoid] * 2],
        {},
    ),
    "other attributes": (
        [
            PLAIN | {"module": Configured, "module__scales": (scale,), "module__act": act}
            for act in (torch.tanh, torch.sin)
            for scale in (1.0, 2.0, 1.0)
        ],
        {"fleet": 6},
    ),
    "other weights of classes": (
        [PLAIN | {"criterion__weight": [1.0, heavy, 1.0]} for heavy in [1.0, 5.0] * 2],
        {},
    ),
    "mappings": ([{"module": Mapped}, {"module": Mapped, "flatness_weight": 1.0}], {}),
}


@pytest.mark.parametrize("case", ALIKE)
def test_a_fleet_trains_each_net_as_by_itself(case):
    settings, arguments = ALIKE[case]
    compare(make_each(settings), **arguments)


@pytest.mark.parametrize(
    ("settings", "y"),
    [
        (PLAIN | SIZES | {"module": Double, "iterator_train__drop_last": True}, IGNORED),
        (PLAIN | SIZES | {"module": Double, "criterion": Focal, "criterion__gamma": 2.0}, Y),
    ],
    ids=["labels that are ignored", "a user's criterion"],
)
def test_criteria_without_formulas_are_trained_one_by_one(settings, y, caplog):
    dataset = TensorDataset(torch.from_numpy(X), torch.as_tensor(y))
    compare(make_each([settings] * 2), each=[(dataset, None)] * 2)
    caplog.reasons = ["there is no formula for"]


class Dropping(nn.Sequential):
    def __init__(self, n_features, n_outputs):
        super().__init__(
            nn.Linear(n_features, 9), nn.Tanh(), nn.Dropout(0.3), nn.Linear(9, n_outputs)
        )
        self.double()


class Wrapped(Dropping):
    def forward(self, x):
        return super().forward(x)


@pytest.mark.parametrize(
    "settings",
    [
        {"module": Dropping, "flatness_weight": 0},
        {"module": Wrapped, "flatness_weight": 0},
        {"module": Wrapped},
    ],
    ids=["chain", "module", "penalised"],
)
def test_dropout_has_a_stream_that_depends_on_the_seed_alone(settings):
    nets = classifiers(3, **settings)
    together = FleetTrainer(nets, fleet=3).fit(*data()).estimators_
    assert_same(together[2], FleetTrainer(nets[1:], fleet=2).fit(*data()).estimators_[1])


class HooksInSecondEpoch(Callback):
    """Lets a net train its second epoch by itself."""

    def on_epoch_begin(self, net, **kwargs):
        if len(net.history) == 2:
            self.hook_ = net.module_.register_forward_hook(lambda *args: None)

    def on_epoch_end(self, net, **kwargs):
        if len(net.history) == 2:
            self.hook_.remove()


EQUAL = {"optimizer": torch.optim.SGD, "optimizer__momentum": 0.9, "lr": 0.02}


@pytest.mark.parametrize("optimizer", [{}, EQUAL], ids=["Adam", "equal SGD"])
def test_members_leave_at_their_goals_and_others_take_their_places(optimizer):
    """A net that begins has no state of its optimizer beside others of the same settings."""
    goals = [StopAtLoss(0.9), StopAtGradientNorm(0.5), StopAtLoss(0.5)] * 2
    nets = classifiers(6, max_epochs=16, **optimizer)
    nets = [net.set_params(callbacks=[goal]) for net, goal in zip(nets, goals, strict=True)]
    trained = compare(nets, fleet=3)
    lengths = {len(net.history) for net in trained}
    assert len(lengths) > 2
    assert any(net.converged_ for net in trained)


def test_a_net_that_diverges_harms_no_other():
    nets = classifiers(4, optimizer=torch.optim.SGD)
    nets[1].set_params(lr=1e30)
    with pytest.warns(match="has diverged"):
        trained = FleetTrainer(nets, fleet=4).fit(*data()).estimators_
    with pytest.warns(match="has diverged"):
        singles = [net.fit(*data()) for net in nets]
    for one, other in zip(singles, trained, strict=True):
        np.testing.assert_allclose(curve(one), curve(other), atol=1e-8)


class Change(Callback):
    """Changes the training data of a net in place, before its third epoch."""

    def __init__(self, inputs=None, label=None):
        self.inputs, self.label = inputs, label

    def on_epoch_begin(self, net, dataset_train=None, **kwargs):
        if len(net.history) == 3:
            if self.inputs is not None:
                dataset_train.X[:] += self.inputs
                dataset_train.y[:] = dataset_train.y[::-1].copy()
            if self.label is not None:
                dataset_train.y[7] = self.label


def test_data_that_callbacks_change_are_each_members_own():
    X, y = data()
    nets = classifiers(4, train_split=None, max_epochs=5)
    for net, inputs in zip(nets, [None, 1.0, 2.0, None], strict=True):
        net.set_params(callbacks=[Change(inputs)])
    compare(nets, X=X.tolist(), y=y)  # each fit makes an array of its own


def test_a_trained_net_holds_its_own_tensors_only():
    trained = FleetTrainer(classifiers(8), fleet=8).fit(*data()).estimators_
    alone = classifiers(1)[0].fit(*data())
    assert len(pickle.dumps(trained[0])) < 1.1 * len(pickle.dumps(alone))
    again = trained[0].partial_fit(*data())
    assert len(again.history) == 2 * STEPS["max_epochs"]


def test_seeds_and_torchs_random_state_stay_apart():
    net = RelativeFlatnessRegularizedClassifier(max_epochs=2, verbose=0)
    curves = []
    for _ in range(2):
        torch.manual_seed(0)
        trained = FleetTrainer([net] * 3, fleet=2).fit(*data()).estimators_
        curves.append([curve(one) for one in trained])
    assert curves[0] == curves[1]
    assert curves[0][0] != curves[0][1]
    before = torch.get_rng_state()
    FleetTrainer([net.set_params(random_state=1)], fleet=None).fit(*data())
    assert torch.equal(before, torch.get_rng_state())


class PartlyUsed(Layers):
    """Has a layer that is not used, and one behind which no gradient goes back."""

    def __init__(self, n_features, n_outputs):
        super().__init__(n_features, n_outputs)
        self.unused, self.fixed = nn.Linear(2, 3), nn.Linear(n_features, n_features)
        self.double()

    def forward(self, x):
        return super().forward(x + self.fixed(x).detach())


class Scaled(nn.Sequential):
    """A chain of layers with a parameter that is none of theirs."""

    def __init__(self, n_features, n_outputs):
        super().__init__(nn.Linear(n_features, 5), nn.ReLU(), nn.Linear(5, n_outputs))
        self.scale = nn.Parameter(torch.ones(2))
        self.double()


UNUSED = {
    PartlyUsed: {"unused.weight", "unused.bias", "fixed.weight", "fixed.bias"},
    Scaled: {"scale"},
}


@pytest.mark.parametrize(
    ("module", "optimizer"), [(PartlyUsed, "Nesterov"), (PartlyUsed, "Adam"), (Scaled, "AdamW")]
)
def test_parameters_without_gradient_stay_as_they_are(module, optimizer, caplog):
    settings = OPTIMIZERS[optimizer]
    for net in compare(classifiers(2, module=module, max_epochs=2, **settings)):
        named = dict(net.module_.named_parameters())
        assert {name for name, one in named.items() if one.grad is None} == UNUSED[module]
        kept = [named[name] for name in UNUSED[module]]
        assert not any(net.optimizer_.state.get(one) for one in kept)
    caplog.reasons = ["does not depend on"]


@pytest.mark.parametrize(
    ("kind", "layer", "text"),
    [
        ("weight", -1, "the weight of layer 'last' outside of the layer's call"),
        ("rows", 0, "depend on other rows"),
        ("calls", -1, "layer 'last' was called 2 times"),
    ],
)
def test_a_penalty_that_a_net_refuses_is_refused_in_a_fleet(kind, layer, text, caplog):
    nets = classifiers(2, module=Shared, module__kind=kind, flatness_layer=layer)
    with pytest.raises(ValueError, match=re.escape(text)):
        nets[0].fit(*data())
    with pytest.raises(ValueError, match=re.escape(text)):
        FleetTrainer(nets, fleet=2).fit(*data())
    caplog.reasons = [text]


class DropsTwice(Layers):
    def __init__(self, n_features, n_outputs):
        super().__init__(n_features, n_outputs)
        self.dropout = nn.Dropout(0.5)

    def between(self, h):
        return self.dropout(self.dropout(h))


class Noisy(MLP):
    def forward(self, x):
        return super().forward(x + 0.1 * torch.randn_like(x))


class Counting(MLP):
    def forward(self, x):
        return super().forward(x if x.mean() > 0 else -x)


class Anneals(MLP):
    """A network that counts its passes in Python, and becomes quieter with each."""

    def __init__(self, n_features, n_outputs):
        super().__init__(n_features, n_outputs)
        self.passes = 0

    def forward(self, X):
        self.passes += self.training
        return super().forward(X) / (1 + 1 / (1 + self.passes))


class Triples(Callback):
    """Make the criterion larger by a hook."""

    def on_train_begin(self, net, **kwargs):
        net.criterion_.register_forward_hook(lambda criterion, args, loss: 3 * loss)


class Hooked(nn.Sequential):
    """A chain with code or weights that no formula knows."""

    def __init__(self, n_features, n_outputs, kind):
        super().__init__(nn.Linear(n_features, 5), nn.ReLU(), nn.Linear(5, n_outputs))
        self.double()
        first = self[0]
        if kind == "module":
            first.register_forward_hook(lambda module, inputs, output: 2 * output)
        elif kind == "parameter":
            first.weight.register_hook(lambda gradient: 2 * gradient)
        elif kind == "forward":
            first.forward = lambda x: 2 * nn.functional.linear(x, first.weight, first.bias)
        elif kind == "tied":
            self.insert(2, nn.Linear(5, 5).double())
            self.insert(2, self[2])
        elif kind == "half":
            self.bfloat16()


class Freezes(Callback):
    """Freeze the first layer in the second epoch."""

    def on_epoch_begin(self, net, **kwargs):
        net.module_.hidden0.requires_grad_(len(net.history) != 2)


class SAM(SharpnessAwareMixin, RelativeFlatnessRegularizedClassifier):
    pass


def own(name):
    """A class of nets with a method of its own, which does what it did."""
    inherited = getattr(RelativeFlatnessRegularizedClassifier, name)

    def method(self, *args, **kwargs):
        return inherited(self, *args, **kwargs)

    return type("Own", (RelativeFlatnessRegularizedClassifier,), {name: method})


FREE, FIRST = {"flatness_weight": 0}, {"flatness_layer": 0}
LARGE_BIAS = {"module": BatchNorm, "module__bias": True, "module__dtype": torch.float32}
HOOKS = [("hooks", HooksInSecondEpoch()), StopAtLoss(0.5)]
# parts of the reasons that are logged, and the settings
REASONS = [
    (["callback GradientNormClipping"], {"callbacks": [GradientNormClipping(1.0)]}),
    (["at earlier layers"], FIRST | {"module": BatchNorm}),
    # without float64, its bias in front of batch norm would take other steps
    (["rounding errors of first.bias"], FREE | LARGE_BIAS),
    (["flatness_normalize=True"], {"flatness_normalize": True}),
    (["CrossEntropyLoss (reduction='sum'"], {"criterion__reduction": "sum", "lr": 1e-4}),
    (["groups of parameters"], {"optimizer__param_groups": [("hidden*", {"lr": 0.001})]}),
    (["RMSprop"], {"optimizer": torch.optim.RMSprop}),
    (["frozen", "fewer steps"], {"callbacks": [("freezes", Freezes())], "max_epochs": 4}),
    # in the second epoch; the others are trained together
    (["its network has hooks"], {"callbacks": HOOKS, "max_epochs": 4}),
    *(
        (["its network has hooks"], {"module": Hooked, "module__kind": kind})
        for kind in ("module", "parameter", "forward")
    ),
    (["parameter twice"], {"module": Hooked, "module__kind": "tied"}),
    (["each layer of dropout once"], {"module": DropsTwice}),
    (["bfloat16"], {"module": Hooked, "module__kind": "half"}),
    (["its criterion has hooks"], FREE | {"callbacks": [("triples", Triples())]}),
    (["attribute passes"], {"module": Anneals}),
    (["vmap: called random"], FREE | {"module": Noisy}),
    (["torch.func cannot"], FREE | {"module": Counting}),
    (["SAM has its own"], {"kind": SAM}),
    *(
        ([f"Own has its own {name}"], {"kind": own(name)})
        for name in ("on_batch_end", "on_grad_computed", "_step_optimizer", "notify")
    ),
]


@pytest.mark.parametrize(
    ("reasons", "settings"),
    REASONS,
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_cannot_be_stacked_is_trained_one_by_one_with_the_reason_logged_once(
    reasons, settings, caplog
):
    kind = settings.get("kind", RelativeFlatnessRegularizedClassifier)
    settings = {name: value for name, value in settings.items() if name != "kind"}
    compare(make_each([{"max_epochs": 2, **settings}] * 3, kind))
    caplog.reasons = reasons


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Convolution, "convolutions are faster one by one"),
        (MLP, "more than 10 weights"),
    ],
)
def test_auto_trains_nets_one_by_one_that_are_about_as_fast_so(module, reason, caplog, monkeypatch):
    monkeypatch.setattr("relflat_sk.fleet._fleet._MANY_NUMBERS", 10 if module is MLP else 10**6)
    X, y = data(n_features=36)
    X = X if module is MLP else X.reshape(-1, 1, 6, 6)
    nets = classifiers(2, module=module, flatness_weight=0, max_epochs=1)
    FleetTrainer(nets, fleet="auto").fit(X, y)
    caplog.reasons = [reason]


def test_penalties_of_many_classes_are_trained_one_by_one(monkeypatch, caplog):
    monkeypatch.setattr("relflat_sk._network.tail.MANY", 2)
    monkeypatch.setattr("relflat_sk._engine.job.MANY", 2)
    compare(classifiers(2, max_epochs=2))
    caplog.reasons = ["too many classes"]


def test_arguments_of_the_network_are_passed_on(caplog):
    class Scaled(Double):
        def forward(self, X, scale=1.0):
            return super().forward(X * scale)

    nets = classifiers(2, module=Scaled, **SIZES, flatness_weight=0)
    trained = FleetTrainer(nets).fit(*data(), scale=2.0).estimators_
    for one, other in zip(nets, trained, strict=True):
        assert_same(one.fit(*data(), scale=2.0), other)
    caplog.reasons = ["['scale']"]


class TooLarge(Double):
    """Needs more memory than there is, but for one network alone."""

    def forward(self, X):
        try:
            self.output.weight.data_ptr()
        except RuntimeError as error:  # there is none inside of torch.func.vmap
            raise torch.OutOfMemoryError("CUDA out of memory") from error
        return super().forward(X).sin()


def test_a_stack_that_does_not_fit_into_memory_is_not_trained_one_by_one():
    with pytest.raises(torch.OutOfMemoryError):
        FleetTrainer(classifiers(2, module=TooLarge, flatness_weight=0)).fit(*data())


def test_errors_end_all_trainings(same_threads):
    nets = classifiers(3)
    nets[2].set_params(flatness_layer="nowhere")
    with pytest.raises(Exception, match="nowhere"):
        FleetTrainer(nets, fleet=3).fit(*data())


@pytest.mark.parametrize(
    ("estimators", "error", "match"),
    [
        ([], ValueError, "at least one estimator"),
        (RelativeFlatnessRegularizedClassifier(), TypeError, "must be a list, got a Rel"),
    ],
)
def test_estimators_are_a_list_of_at_least_one(estimators, error, match):
    with pytest.raises(error, match=match):
        FleetTrainer(estimators).fit(*data())
