"""Nets that are trained to be flat: what a step minimises, and how they live in scikit-learn."""

import copy
import warnings
from itertools import product
from threading import Thread

import numpy as np
import pandas as pd
import pytest
import sklearn
import torch
from sklearn.base import clone, is_classifier, is_regressor
from sklearn.datasets import make_friedman1
from sklearn.preprocessing import scale
from sklearn.utils.estimator_checks import SkipTest, estimator_checks_generator
from sklearn.utils.fixes import parse_version
from skorch import NeuralNetClassifier
from skorch.callbacks import Callback, Checkpoint, EpochScoring
from skorch.dataset import ValidSplit
from torch import nn
from torch.testing import assert_close

from relflat_sk import MLP, FlatnessWarning, measure, relative_flatness
from tests.engine.compare import AtEpoch
from tests.rounding import FLOAT32, rounding
from tests.training import common
from tests.training.common import (
    INDEX,
    LABELS,
    NAMES,
    SIZES,
    VALUES,
    Binary,
    Classifier,
    Net,
    Regressor,
    Sam,
    X,
    make,
    same,
)

# no step moves the weights, so that each batch has the loss and the penalty of the start
STILL = {"optimizer": torch.optim.SGD, "lr": 1e-30, "flatness_clip": None}


@pytest.mark.usefixtures("own_loop")
def test_weight_zero_is_stock_skorch():
    params = {"optimizer": torch.optim.Adam, "lr": 0.01, "max_epochs": 3, "batch_size": 16}
    params |= {"iterator_train__shuffle": True, "verbose": 0, "train_split": None}
    params |= {"optimizer__fused": True}  # as by default
    nets = [
        NeuralNetClassifier(MLP, criterion=nn.CrossEntropyLoss, **params, **SIZES),
        Net(MLP, flatness_weight=0, **params),
    ]
    after = []
    for net in nets:
        torch.manual_seed(5)
        net.fit(X, INDEX)
        after.append(torch.rand(3))  # measuring took no random number that training would have
    assert_close(*after)
    same(*nets, **rounding(9))
    np.testing.assert_allclose(*(net.history[:, "train_loss"] for net in nets), **rounding(9))
    assert nets[1].history[:, "flatness_penalty"] == [0.0] * 3


BEGINNINGS = [  # settings, and shares of the weight in the epochs of two trainings
    ({"flatness_warmup": 6}, [1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1, 1, 1]),
    ({"flatness_start": 2, "flatness_warmup": 2}, [0, 0, 1 / 2, 1, 1, 1, 1, 1]),
    ({"flatness_start": 0.5}, [0, 0, 1, 1, 1, 1, 1, 1]),
    ({"flatness_start": 1.0}, [0, 0, 0, 0, 1, 1, 1, 1]),
]


@pytest.mark.filterwarnings("ignore:.*before its penalty began")
@pytest.mark.parametrize(("settings", "shares"), BEGINNINGS)
def test_the_penalty_begins_late_and_anew_with_a_new_training(settings, shares):
    params = {**STILL, "max_epochs": 4, "flatness_weight": 2.0}
    full = make(**params).fit(X, NAMES).history[:, "flatness_penalty"]
    net = make(**params, **settings).fit(X, NAMES).partial_fit(X, NAMES)
    expected = np.multiply([*full, *full], shares)
    assert net.history[:, "flatness_penalty"] == pytest.approx(expected, rel=FLOAT32)
    net.fit(X, NAMES)
    assert net.history[:, "flatness_penalty"] == pytest.approx(expected[:4], rel=FLOAT32)


class WithLoss(Classifier):
    def get_loss(self, y_pred, y_true, *args, **kwargs):
        return self.criterion_(y_pred, torch.as_tensor(y_true))


class WithHalfTheLoss(Classifier):
    def get_loss(self, *args, **kwargs):
        return super().get_loss(*args, **kwargs) / 2


@pytest.mark.parametrize("kind", [Classifier, Sam, WithLoss, WithHalfTheLoss])
def test_the_penalty_rests_in_whole_steps_also_between_epochs_and_trainings(kind):
    net = make(kind, **STILL, max_epochs=2, flatness_weight=0.5, flatness_every=4)
    net.fit(X, NAMES).partial_fit(X, NAMES)  # three steps in each of four epochs
    batches = [b["flatness_penalty"] > 0 for epoch in net.history for b in epoch["batches"]]
    assert batches == [True, False, False, False] * 3


def test_lbfgs_trains_without_penalty_only():
    params = {"optimizer": torch.optim.LBFGS, "lr": 0.5, "batch_size": -1}
    net = make(flatness_weight=0, **params).fit(X, NAMES)
    assert net.history[-1, "train_loss"] < 0.2
    with pytest.raises(ValueError, match="LBFGS"):
        net.set_params(flatness_weight=0.1).fit(X, NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("unit", [0.01, 10.0])
def test_the_default_penalty_does_not_cost_r2_in_any_unit(unit):
    inputs, y = make_friedman1(400, noise=0.1, random_state=0)
    inputs, y = scale(inputs).astype(np.float32), unit * y
    penalised, plain = (
        Regressor(flatness_weight=weight, verbose=0, random_state=0)
        .fit(inputs[:300], y[:300])
        .score(inputs[300:], y[300:])
        for weight in (0.1, 0.0)
    )
    assert penalised > plain - 0.01
    assert plain > 0.7


# kind, inputs, targets; numbers of inputs and outputs, and what follows the rows in predictions
SHAPES = {
    "classes": (Net, X, NAMES, (4, 3), ()),
    "images": (Classifier, X.reshape(42, 1, 2, 2), NAMES, (4, 3), ()),
    "binary": (Binary, X, INDEX > 0, (4, 1), ()),
    "multi-label": (Binary, X, LABELS, (4, 3), (3,)),
    "1-d": (Regressor, X, VALUES, (4, 1), ()),
    "column": (Regressor, X, VALUES[:, None], (4, 1), (1,)),
    "multi-output": (Regressor, X, X[:, :2], (4, 2), (2,)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_default_network_is_sized_from_the_data(name):
    kind, inputs, y, sizes, shape = SHAPES[name]
    net = make(kind, max_epochs=15, lr=0.03).fit(inputs, y)
    linear = [m for m in net.module_ if isinstance(m, nn.Linear)]
    assert (linear[0].in_features, linear[-1].out_features) == sizes
    assert net.predict(inputs).shape == (42, *shape)
    assert net.score(inputs, y) > 0.6
    assert net.relative_flatness_ == pytest.approx(relative_flatness(net, inputs, y), rel=1e-9)


def read_only(array):
    array = array.copy()
    array.setflags(write=False)
    return array


TEXT = np.array(["x", "y", "z"])
LABELLED = {
    "text": lambda y: TEXT[y],
    "objects": lambda y: TEXT[y].astype(object),
    "floats": lambda y: y * 10.0 - 7,
    "list": lambda y: TEXT[y].tolist(),
    "series": lambda y: pd.Series(TEXT[y]),
    "categories": lambda y: pd.Categorical(TEXT[y]),
    "tensor": torch.tensor,
    "tensor of booleans": lambda y: torch.tensor(y > 0),
}
CONVERTED = {
    "float64": lambda a: a.astype(np.float64),
    "lists": lambda a: a.tolist(),
    "frame": pd.DataFrame,
    "tensor": torch.tensor,
    "reversed": lambda a: a[:, ::-1].copy()[:, ::-1],
    "read-only": read_only,
    "whole numbers": lambda a: (10 * a).astype(int),
}
OF_ANY_KIND = [
    *product([Classifier], ["reversed"], LABELLED),
    *product([Binary], ["tensor"], ["text", "floats", "tensor of booleans"]),
    *product([Classifier], CONVERTED, ["text"]),
]


@pytest.mark.parametrize(("kind", "inputs", "labels"), OF_ANY_KIND)
def test_data_of_any_kind(kind, inputs, labels):
    keep = INDEX < 2 if kind is Binary else INDEX < 3
    inputs, y = CONVERTED[inputs](X[keep]), LABELLED[labels](INDEX[keep])
    net = make(kind, max_epochs=12, lr=0.03).fit(inputs, y)
    is_double = np.asarray(inputs).dtype == np.float64
    assert next(net.module_.parameters()).dtype == (torch.float64 if is_double else torch.float32)
    # the same numbers as with a plain array and indices: only the names differ
    array = np.asarray(inputs).astype(np.float64 if is_double else np.float32)
    classes, index = np.unique(np.asarray(y), return_inverse=True)
    same(net, make(kind, max_epochs=12, lr=0.03).fit(array.copy(), index))
    assert net.classes_.tolist() == classes.tolist()
    assert net.n_features_in_ == 4
    assert net.predict(inputs).tolist() == net.predict(array).tolist()
    assert set(net.predict(inputs).tolist()) <= set(classes.tolist())
    assert net.score(inputs, y) > 0.85
    shares = net.predict_proba(inputs)
    assert shares.shape == (keep.sum(), len(classes))
    assert shares.sum(axis=1) == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize(
    ("criterion", "y", "has_classes"),
    [
        (nn.CrossEntropyLoss(label_smoothing=0.1), INDEX, True),
        (nn.BCEWithLogitsLoss, INDEX > 0, True),
        (nn.MSELoss, VALUES, False),
        (nn.L1Loss, VALUES, False),
        (nn.PoissonNLLLoss, INDEX, False),
    ],
    ids=str,
)
def test_the_criterion_decides_the_task(criterion, y, has_classes):
    weight = 0.0 if criterion is nn.L1Loss else 0.1  # which has no curvature
    net = make(Net, criterion=criterion, max_epochs=20, lr=0.03, flatness_weight=weight)
    assert is_classifier(net) == has_classes != is_regressor(net)
    for name in ("predict_proba", "predict_log_proba"):
        assert hasattr(net, name) == has_classes
    assert net.fit(X, y).score(X, y) > 0.5
    if criterion is nn.PoissonNLLLoss:
        with torch.no_grad():
            rates = net.module_(torch.tensor(X)).exp()
        assert net.predict(X) == pytest.approx(rates[:, 0].double().numpy(), rel=FLOAT32)


def test_an_unknown_criterion_makes_a_plain_net_unless_the_task_is_fixed():
    params = {"module": nn.Linear, "module__in_features": 4, "module__out_features": 4}
    net = make(Net, criterion=common.Quartic, flatness_clip=None, **params).fit(X, X)
    assert not is_classifier(net)
    assert not is_regressor(net)
    assert not hasattr(net, "score")
    assert net.history[-1, "flatness_penalty"] != 0
    assert net.relative_flatness_ == pytest.approx(relative_flatness(net, X, X), rel=1e-9)
    net = make(Regressor, criterion=common.Quartic, max_epochs=30, lr=0.03).fit(X, VALUES)
    assert net.score(X, VALUES) > 0.5


class NoChain(MLP):
    def forward(self, x):
        return super().forward(x) + 0.0


@pytest.mark.parametrize("module", [MLP, NoChain])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_targets_keep_the_digits_that_the_network_has(dtype, module):
    y = VALUES.astype(np.float64) + 1e-9 * np.arange(42)
    inputs = torch.tensor(X).to(dtype).numpy()
    module = MLP if module is MLP else NoChain(4, 1).to(dtype)
    net = make(Regressor, lr=0.0, max_epochs=1, module=module).fit(inputs, y)
    squares = (net.predict(inputs) - y) ** 2
    loss = pytest.approx(squares.mean(), rel=rounding(1, dtype)["rtol"])
    assert net.history[-1, "train_loss"] == loss
    assert net.partial_fit(inputs, y).history[-1, "train_loss"] == loss


class Squeezed(MLP):
    def forward(self, x):
        return super().forward(x).squeeze(1)


def test_squeezed_outputs_are_not_broadcast():
    for y in (VALUES, VALUES[:, None]):
        net = make(Regressor, module=Squeezed).fit(X, y)
        same(net, make(Regressor).fit(X, y), rtol=1e-4, atol=1e-6)  # by formulas


def test_a_function_may_make_the_criterion():
    def smooth(smoothing=0.0):
        return nn.CrossEntropyLoss(label_smoothing=smoothing)

    net = make(criterion=smooth, criterion__smoothing=0.1, module=nn.Linear(4, 3))
    assert net.fit(X, INDEX).criterion_.label_smoothing == 0.1


class Meanwhile(Callback):
    """Does something in another thread, while training waits for its end, or for some seconds."""

    def __init__(self, function, seconds):
        self.thread, self.seconds = Thread(target=function), seconds

    def __deepcopy__(self, memo):
        return self

    def on_batch_end(self, net, training=False, **kwargs):
        if self.thread.ident is None:
            self.thread.start()
            self.thread.join(self.seconds)
            self.has_waited = self.thread.is_alive()


@pytest.mark.usefixtures("own_loop")  # as with a callback after each batch
@pytest.mark.parametrize(
    ("what", "random_state"),
    [("fit", 0), ("fit", None), ("fit without a seed", 0), ("measure", 0), ("predict", 0)],
)
def test_threads_do_not_draw_from_the_random_state_that_another_trains_with(what, random_state):
    def train(random_state, **params):
        torch.manual_seed(3)
        module = nn.Sequential(nn.Linear(4, 9), nn.Dropout(), nn.Linear(9, 3))
        return make(module=module, random_state=random_state, **params).fit(X, NAMES)

    other = train(1)
    functions = {
        "fit": lambda: make(random_state=2).fit(X, NAMES),
        "fit without a seed": lambda: make(random_state=None).fit(X, NAMES),
        "measure": lambda: relative_flatness(other, X, NAMES),
        "predict": lambda: other.predict(X),
    }
    waits = what != "predict"  # for the random state
    meanwhile = Meanwhile(functions[what], 0.3 if waits else 60)
    net = train(random_state, callbacks=[meanwhile])
    meanwhile.thread.join()
    same(net, train(random_state))
    assert meanwhile.has_waited == waits


def test_partial_fit_takes_all_classes_first_also_after_initialize():
    for net in (make(), make(**SIZES).initialize()):
        net.partial_fit(X[INDEX < 2], NAMES[INDEX < 2], classes=["x", "y", "z"])
        assert net.classes_.tolist() == ["x", "y", "z"]
        assert net.n_features_in_ == 4
        net.partial_fit(X[INDEX == 2], NAMES[INDEX == 2], classes=["z", "y", "x"])
        assert net.predict_proba(X).shape == (42, 3)
        with pytest.raises(ValueError, match=r"not seen when the net was fitted: \['w'\]"):
            net.partial_fit(X[:2], ["w", "x"])
        for classes in (["x", "y"], ["w", "x", "y", "z"], [0, 1, 2]):
            with pytest.raises(ValueError, match="not the same as on last call to partial_fit"):
                net.partial_fit(X, NAMES, classes=classes)
    with pytest.raises(ValueError, match="not the same as"):
        make(classes=["x", "y", "z"]).partial_fit(X, NAMES, classes=["x", "y"])


def test_refitting_forgets_the_last_task():
    net = make(Net).fit(X, NAMES)
    net.set_params(criterion=nn.MSELoss).fit(X[:, :2], VALUES)
    assert not hasattr(net, "classes_")
    assert net.n_features_in_ == 2
    net.set_params(criterion=nn.CrossEntropyLoss, **SIZES).fit(common.dataset())
    assert net.predict(X).dtype.kind == "i"


def test_a_failed_fit_leaves_the_net_as_it_was():
    net = make().fit(X, NAMES)
    before = net.predict(X).tolist()
    for inputs, labels, weights, message in [
        (X * np.nan, NAMES, None, "NaN"),
        (X[:, :2], NAMES[:5], None, "X has 42 samples, y has 5 labels"),
        (X[:, :2], INDEX, np.ones(41), r"sample_weight must have shape \(42,\)"),
        (X[:, :2], INDEX, np.zeros(42), "sample_weight must be finite"),
    ]:
        with pytest.raises(ValueError, match=message):
            net.fit(inputs, labels, sample_weight=weights)
    with pytest.raises(ValueError, match="sample_weight"):
        net.partial_fit(X, NAMES, sample_weight=np.zeros(42))
    assert net.predict(X).tolist() == before


def test_a_module_instance_is_not_trained_itself():
    module = MLP(4, 3)
    before = copy.deepcopy(module.state_dict())
    net = make(module=module).fit(X, NAMES)
    assert_close(module.state_dict(), before, rtol=0, atol=0)
    assert not [name for name, m in module.named_modules() if m._forward_hooks]
    same(clone(net).fit(X, NAMES), net)
    same(net.fit(X, NAMES), clone(net).fit(X, NAMES))


@pytest.mark.parametrize(
    ("kind", "y", "scoring", "weights"),
    [
        (Classifier, NAMES, ["accuracy", "neg_log_loss"], None),
        (Classifier, NAMES, ["accuracy"], common.WEIGHTS),
        (Binary, NAMES == "x", ["accuracy", "roc_auc"], None),
        (Regressor, VALUES, ["r2"], common.WEIGHTS),
    ],
)
def test_epoch_scoring_of_labels_of_any_kind(kind, y, scoring, weights):
    callbacks = []
    for score, on_train, caching in product(scoring, (False, True), (False, True)):
        name = f"{score} {on_train} {caching}"
        callback = EpochScoring(score, name=name, on_train=on_train, use_caching=caching)
        callbacks.append((name, callback))
    net = make(kind, callbacks=callbacks, train_split=ValidSplit(4))
    net.fit(X, y, sample_weight=weights)
    assert all(np.isfinite(net.history[:, name]).all() for name, _ in callbacks)
    if kind is not Regressor:
        rows = ValidSplit(4)(net.get_dataset(X, y))[1].indices
        for name in ("accuracy False False", "accuracy False True", "valid_acc"):
            assert net.history[-1, name] == net.score(X[rows], y[rows])


def interrupting(method):
    """Make a callback that interrupts the second epoch, or the beginning of the first."""

    def interrupt(self, net, **kwargs):
        if method == "on_epoch_begin" or len(net.history) == 2:
            raise KeyboardInterrupt

    return type("Interrupt", (Callback,), {method: interrupt})()


@pytest.mark.parametrize("method", ["on_batch_end", "on_epoch_begin", "on_grad_computed"])
def test_ctrl_c_leaves_a_usable_net(method):
    net = make(callbacks=[interrupting(method)], train_split=ValidSplit(5), max_epochs=50)
    net.fit(X, NAMES)
    assert len(net.history) < 3
    assert set(net.predict(X)) <= {"x", "y", "z"}
    assert np.isfinite(net.relative_flatness_)
    copied = copy.deepcopy(net).set_params(callbacks=None, max_epochs=2)
    assert copied.partial_fit(X, NAMES).score(X, NAMES) > 0.3


# -- how a training ended ----------------------------------------------------------------


class Dead(MLP):
    def __init__(self, n_features, n_outputs):
        super().__init__(n_features, n_outputs)
        self[1].bias.data.fill_(-100.0)


class Absolute(nn.L1Loss):
    """A criterion that no table knows."""


def fit_with_change(factor, epoch=40, callbacks=(), **params):
    """Train a net whose last layer's weights are multiplied by a number before an epoch."""

    def multiply(net, dataset):
        for parameter in net.module_[-1].parameters():
            parameter.data.mul_(factor)

    changed = AtEpoch(epoch, multiply)
    return make(callbacks=[changed, *callbacks], max_epochs=40, **params).fit(X, NAMES)


UNLIMITED = {"flatness_clip": None}
SGD = {"optimizer": torch.optim.SGD}
# parameters, the warning, and the flatness: none, positive or not known
BAD_ENDINGS = {
    "dead": ({"module": Dead, "flatness_weight": 0.3}, r"died.*below 0\.3", 0),
    "dead in front": ({"module": Dead, "flatness_layer": 0}, "died", 0),
    "dead without limit": ({"module": Dead, **UNLIMITED}, r"died .*flatness_clip=1\.0", 0),
    "in vain": ({"kind": Regressor, "criterion": nn.L1Loss}, "no effect: L1Loss", 0),
    "own, in vain": ({"kind": Regressor, "criterion": Absolute}, "no effect: Absolute", 0),
    "outweighed": (
        {"flatness_weight": 10_000, "max_epochs": 20, **UNLIMITED},
        r"flatness_weight=10000.* training loss is 1\.\d+, .* has 1\.\d+\. .*flatness_clip=1\.0",
        1,
    ),
    "diverged": ({"lr": 1e38, **SGD}, r"Classifier\(.*lr=1e\+38.*\) has diverged", np.nan),
    "diverged at once": (
        {"kind": Regressor, "lr": 1e8, "max_epochs": 1, **SGD},
        r"Regressor\(.*\) has diverged",
        np.nan,
    ),
    "not measured": (
        {"flatness_weight": 0, "flatness_layer": "nope"},
        "could not be measured: .*'nope'",
        np.nan,
    ),
    "no batch": ({"batch_size": 99, "iterator_train__drop_last": True}, "no batch", 1),
    "not begun": ({"flatness_start": 3}, "before its penalty began", 1),
}


@pytest.mark.parametrize("name", BAD_ENDINGS)
def test_warns_once_of_a_training_that_ended_badly(name):
    params, message, sign = BAD_ENDINGS[name]
    with pytest.warns(FlatnessWarning, match=message) as caught:
        net = make(**params).fit(X, VALUES if "kind" in params else NAMES)
    assert len(caught) == 1
    assert np.sign(net.relative_flatness_) == pytest.approx(sign, nan_ok=True)


@pytest.mark.parametrize("action", ["default", "always"])
def test_seeds_that_end_alike_are_told_once_at_a_line(action):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action)
        for seed in range(3):
            make(module=Dead, random_state=seed).fit(X, NAMES)
        assert len(caught) == (1 if action == "default" else 3)
        make(module=Dead).fit(X, NAMES)  # at another line
    assert len(caught) == (2 if action == "default" else 4)


def test_warns_of_a_negative_flatness_as_the_function_does():
    down = common.criterion_of(lambda z, y: -(z - y).square().mean())
    params = {"criterion": down, "flatness_weight": 0, "module__n_outputs": 1}
    match = r"relative_flatness at layer .* is negative \(-"
    with pytest.warns(FlatnessWarning, match=match) as caught:
        net = make(Net, **params, **STILL).fit(X, VALUES[:, None])
    assert len(caught) == 1  # without a penalty, nothing is said of one
    with pytest.warns(FlatnessWarning, match=match):
        value = relative_flatness(net, X, VALUES[:, None])
    assert net.relative_flatness_ == pytest.approx(value, rel=FLOAT32)
    assert value < 0
    with pytest.warns(FlatnessWarning, match="hessian_trace at .* negative .* curves down"):
        assert measure("hessian_trace", net, X, VALUES[:, None]) < 0


@pytest.mark.parametrize("weight", [0.0, 0.1])
def test_warns_of_a_net_that_ends_much_worse_than_it_was(weight):
    message = r"Classifier\(.*lr=0\.02.*\) ended much worse .* in epoch 39 .* has 1\..*Checkpoint"
    with pytest.warns(FlatnessWarning, match=message) as caught:
        net = fit_with_change(-1.0, lr=0.02, flatness_weight=weight)
    losses = net.history[:, "train_loss"]
    assert f"was {min(losses):.3g} in" in str(caught[0].message)
    assert f"and {losses[-1]:.3g} in the last" in str(caught[0].message)


class Saturated(MLP):
    """Predicts a class with probability 1 for each sample, so that nothing curves the loss."""

    def forward(self, x):
        return super().forward(x) * 1e5


def test_is_silent_if_the_penalty_did_not_keep_the_net_from_learning():
    accurate = make(module=Saturated, max_epochs=60).fit(X, NAMES)  # warnings are errors
    assert accurate.relative_flatness_ == 0
    assert accurate.score(X, NAMES) > 0.8
    make(Regressor, criterion=nn.L1Loss, flatness_weight=0).fit(X, VALUES)
    hardly_trained = {"max_epochs": 1, "lr": 1e-5}
    make(**UNLIMITED, **hardly_trained).fit(X, np.roll(NAMES, 1))
    make(flatness_weight=10_000, **hardly_trained).fit(X, np.roll(NAMES, 1))
    learned = make(flatness_weight=60, max_epochs=60, **UNLIMITED).fit(X, NAMES)
    epochs = learned.history[:, ("flatness_penalty", "train_loss")]
    assert any(penalty > loss for penalty, loss in epochs)


def test_is_silent_if_the_net_recovers_or_its_best_weights_are_back(tmp_path):
    fit_with_change(-1.0, epoch=6)
    # of the weights, and not of the history
    files = {"dirname": tmp_path, "f_history": None}
    best = Checkpoint(monitor="train_loss_best", load_best=True, **files)
    assert fit_with_change(-1.0, callbacks=[best], lr=0.02).constant_comparison_.loss < 0.6
    fit_with_change(1.3)  # noise
    # a warm start is compared with itself
    net = make(max_epochs=40, warm_start=True).fit(X, NAMES)
    net.set_params(max_epochs=1).fit(X, np.roll(NAMES, 1))


@pytest.mark.parametrize("layer", [-1, "all"])
def test_a_default_net_is_measured_by_one_pass_over_its_data(monkeypatch, layer):
    runs, forward = [], nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda *args: runs.append(1) or forward(*args))
    make(flatness_layer=layer, flatness_weight=0.0).fit(X, NAMES)  # steps take formulas
    assert len(runs) == 2  # its layers


# scikit-learn skips it unless SCIPY_ARRAY_API is set, for every estimator
NOT_ASKED_FOR = {"check_array_api_input"}


SKLEARN_1_6 = parse_version(sklearn.__version__) < parse_version("1.7")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "epochs", "weight"), [(Classifier, 3, 0.1), (Binary, 3, 0), (Regressor, 4, 0.1)]
)
def test_sklearn_contract(kind, epochs, weight):
    if kind is Binary and SKLEARN_1_6:  # it makes two classes of three by the first label, which
        pytest.skip("weighted and repeated data differ")  # a shuffle changes
    net = kind(verbose=0, random_state=0, lr=0.03, max_epochs=epochs, flatness_weight=weight)
    passed = set()
    for estimator, check in estimator_checks_generator(net):
        name = check.func.__name__
        try:
            check(estimator)
            passed.add(name)
        except SkipTest:
            assert name in NOT_ASKED_FOR
    assert "check_sample_weight_equivalence_on_dense_data" in passed
    assert len(passed) > 50
