"""Nets that are trained to be flat: what a step minimises, and how they live in scikit-learn."""

import copy
import pickle
import warnings
from itertools import product
from threading import Thread

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone, is_classifier, is_regressor
from sklearn.datasets import make_friedman1
from sklearn.preprocessing import scale
from skorch import NeuralNetClassifier
from skorch.callbacks import Callback, Checkpoint, EpochScoring
from skorch.dataset import ValidSplit
from torch import nn
from torch.testing import assert_close

from relflat_sk import (
    MLP,
    FlatnessWarning,
    SharpnessAwareMixin,
    relative_flatness,
)
from tests.rounding import FLOAT32, rounding
from tests.training.common import (
    INDEX,
    LABELS,
    NAMES,
    SIZES,
    VALUES,
    WEIGHTS,
    Binary,
    Classifier,
    Net,
    Quartic,
    Regressor,
    X,
    criterion_of,
    dataset,
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
    torch.manual_seed(5)
    stock = NeuralNetClassifier(MLP, criterion=nn.CrossEntropyLoss, **params, **SIZES)
    stock.fit(X, INDEX)
    torch.manual_seed(5)
    net = Net(MLP, flatness_weight=0, **params).fit(X, INDEX)
    same(net, stock, **rounding(9))
    losses = [one.history[:, "train_loss"] for one in (net, stock)]
    np.testing.assert_allclose(*losses, **rounding(9))
    assert net.history[:, "flatness_penalty"] == [0.0] * 3
    # measuring at the end of fit took no random number that training would have
    after = torch.rand(3)
    torch.manual_seed(5)
    stock.fit(X, INDEX)
    assert_close(after, torch.rand(3))


def test_history_has_loss_and_penalty_apart_and_validation_without_penalty():
    split = ValidSplit(5)
    net = make(**STILL, max_epochs=1, flatness_weight=3.0, train_split=split).fit(X, NAMES)
    rows = [part.indices for part in split(net.get_dataset(X, INDEX))]
    for name, part in zip(("train_loss", "valid_loss"), rows, strict=True):
        with torch.no_grad():
            output = net.module_(torch.tensor(X[part]))
        loss = nn.functional.cross_entropy(output, torch.tensor(INDEX[part]))
        assert net.history[0, name] == pytest.approx(loss.item(), rel=FLOAT32)
    assert net.history[0, "valid_acc"] == net.score(X[rows[1]], NAMES[rows[1]])
    kappa = relative_flatness(net, X[rows[0]], NAMES[rows[0]])
    assert net.history[0, "flatness_penalty"] == pytest.approx(3 * kappa / 200, rel=FLOAT32)


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


def test_a_training_that_ends_before_its_penalty_begins_warns():
    with pytest.warns(FlatnessWarning, match="before its penalty began"):
        make(flatness_start=3).fit(X, NAMES)


class Sam(SharpnessAwareMixin, Classifier):
    pass


class WithLoss(Classifier):
    def get_loss(self, y_pred, y_true, *args, **kwargs):
        return self.criterion_(y_pred, torch.as_tensor(y_true))


class WithHalfTheLoss(Classifier):
    def get_loss(self, *args, **kwargs):
        return super().get_loss(*args, **kwargs) / 2


@pytest.mark.parametrize("kind", [Classifier, Sam, WithLoss, WithHalfTheLoss])
def test_the_penalty_rests_in_whole_steps_also_between_epochs_and_trainings(kind):
    params = {**STILL, "max_epochs": 2, "flatness_weight": 0.5, "flatness_every": 4, "verbose": 0}
    net = make(kind, batch_size=16, **{**params, "optimizer": torch.optim.SGD, "lr": 1e-30})
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
    inputs = scale(inputs).astype(np.float32)
    scores = []
    for weight in (0.1, 0.0):
        net = Regressor(flatness_weight=weight, verbose=0, random_state=0)
        net.fit(inputs[:300], unit * y[:300])
        scores.append(net.score(inputs[300:], unit * y[300:]))
    assert scores[0] > scores[1] - 0.01
    assert scores[1] > 0.7


@pytest.mark.parametrize(
    ("layer", "layers"),
    [(-1, [1]), ("hidden0", [0]), (["hidden0", -1], [0, 1]), ("all", [0, 1])],
    ids=str,
)
@pytest.mark.parametrize("normalize", [False, True])
def test_records_the_flatness_of_the_training_data(layer, layers, normalize):
    net = make(flatness_layer=layer, flatness_normalize=normalize).fit(X, NAMES)
    truth = sum(
        relative_flatness(net, X, NAMES, layer=k, normalize=normalize, random_state=0)
        for k in layers
    )
    assert net.relative_flatness_ == pytest.approx(truth, rel=1e-9)


@pytest.mark.parametrize(
    ("kind", "inputs", "y", "expected", "shape"),
    [
        (Net, X, NAMES, (4, 3), (42,)),
        (Classifier, X.reshape(42, 1, 2, 2), NAMES, (4, 3), (42,)),
        (Binary, X, INDEX > 0, (4, 1), (42,)),
        (Binary, X, LABELS, (4, 3), (42, 3)),
        (Regressor, X, VALUES, (4, 1), (42,)),
        (Regressor, X, VALUES[:, None], (4, 1), (42, 1)),
        (Regressor, X, X[:, :2], (4, 2), (42, 2)),
    ],
    ids=["classes", "images", "binary", "multi-label", "1-d", "column", "multi-output"],
)
def test_default_network_is_sized_from_the_data(kind, inputs, y, expected, shape):
    net = make(kind, max_epochs=15, lr=0.03).fit(inputs, y)
    linear = [m for m in net.module_ if isinstance(m, nn.Linear)]
    assert (linear[0].in_features, linear[-1].out_features) == expected
    assert net.predict(inputs).shape == shape
    assert net.score(inputs, y) > 0.6
    assert net.relative_flatness_ == pytest.approx(relative_flatness(net, inputs, y), rel=1e-9)


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


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((Classifier, name) for name in LABELLED),
        *((Binary, name) for name in ("text", "floats", "tensor of booleans")),
    ],
)
def test_labels_of_any_kind(kind, name):
    keep = INDEX < 2 if kind is Binary else INDEX < 3
    inputs, y = X[keep], LABELLED[name](INDEX[keep])
    net = make(kind, max_epochs=12, lr=0.03).fit(inputs, y)
    classes, index = np.unique(np.asarray(y), return_inverse=True)
    assert net.classes_.tolist() == classes.tolist()
    assert set(net.predict(inputs).tolist()) <= set(classes.tolist())
    assert net.score(inputs, y) > 0.85
    assert net.predict_proba(inputs).shape == (keep.sum(), len(classes))
    assert net.predict_proba(inputs).sum(axis=1) == pytest.approx(np.ones(keep.sum()), rel=1e-5)
    # the same numbers as with indices: only the names differ
    same(make(kind, max_epochs=12, lr=0.03).fit(inputs, index), net)


def read_only(array):
    array = array.copy()
    array.setflags(write=False)
    return array


@pytest.mark.parametrize(
    "convert",
    [
        lambda a: a.astype(np.float64),
        lambda a: a.tolist(),
        pd.DataFrame,
        torch.tensor,
        lambda a: a[:, ::-1].copy()[:, ::-1],
        read_only,
        lambda a: (10 * a).astype(int),
    ],
    ids=["float64", "list", "frame", "tensor", "reversed", "read-only", "whole numbers"],
)
def test_inputs_of_any_kind(convert):
    inputs = convert(X)
    net = make().fit(inputs, NAMES)
    double = np.asarray(inputs).dtype == np.float64
    assert next(net.module_.parameters()).dtype == (torch.float64 if double else torch.float32)
    array = np.asarray(inputs).astype(np.float64 if double else np.float32)
    same(net, make().fit(array.copy(), NAMES))
    assert net.n_features_in_ == 4
    assert net.predict(inputs).tolist() == net.predict(array).tolist()


@pytest.mark.parametrize(
    ("criterion", "y", "kind"),
    [
        (nn.CrossEntropyLoss(label_smoothing=0.1), INDEX, "classifier"),
        (nn.BCEWithLogitsLoss, INDEX > 0, "classifier"),
        (nn.MSELoss, VALUES, "regressor"),
        (nn.L1Loss, VALUES, "regressor"),
        (nn.PoissonNLLLoss, INDEX, "regressor"),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_the_criterion_decides_the_task(criterion, y, kind):
    weight = 0.0 if criterion is nn.L1Loss else 0.1  # which has no curvature
    net = make(Net, criterion=criterion, max_epochs=20, lr=0.03, flatness_weight=weight)
    assert is_classifier(net) == (kind == "classifier")
    assert is_regressor(net) == (kind == "regressor")
    for name in ("predict_proba", "predict_log_proba"):
        assert hasattr(net, name) == (kind == "classifier")
    assert net.fit(X, y).score(X, y) > 0.5


def test_a_poisson_regressor_predicts_counts():
    net = make(Net, criterion=nn.PoissonNLLLoss).fit(X, INDEX)
    with torch.no_grad():
        rates = net.module_(torch.tensor(X)).exp()
    assert net.predict(X) == pytest.approx(rates[:, 0].double().numpy(), rel=FLOAT32)


def test_an_unknown_criterion_makes_a_plain_net_unless_the_task_is_fixed():
    params = {"module": nn.Linear, "module__in_features": 4, "module__out_features": 4}
    net = make(Net, criterion=Quartic, flatness_clip=None, **params).fit(X, X)
    assert not is_classifier(net)
    assert not is_regressor(net)
    assert not hasattr(net, "score")
    assert net.history[-1, "flatness_penalty"] != 0
    assert net.relative_flatness_ == pytest.approx(relative_flatness(net, X, X), rel=1e-9)
    net = make(Regressor, criterion=Quartic, max_epochs=30, lr=0.03).fit(X, VALUES)
    assert net.score(X, VALUES) > 0.5


@pytest.mark.parametrize("own", [False, True], ids=["chain", "module"])
@pytest.mark.parametrize("double", [False, True], ids=["float32", "float64"])
def test_targets_keep_the_digits_that_the_network_has(double, own):
    y = VALUES.astype(np.float64) + 1e-9 * np.arange(42)
    inputs = X.astype(np.float64) if double else X

    class Own(MLP):
        def forward(self, x):
            return super().forward(x) + 0.0

    module = {"module": Own(4, 1).double() if double else Own(4, 1)} if own else {}
    net = make(Regressor, lr=0.0, max_epochs=1, **module).fit(inputs, y)
    z = net.predict(inputs)
    dtype = torch.float64 if double else torch.float32
    loss = pytest.approx(np.mean((z - y) ** 2), rel=rounding(1, dtype)["rtol"])
    assert net.history[-1, "train_loss"] == loss
    assert net.partial_fit(inputs, y).history[-1, "train_loss"] == loss


def test_squeezed_outputs_are_not_broadcast():
    class Squeezed(MLP):
        def forward(self, x):
            return super().forward(x).squeeze(1)

    for y in (VALUES, VALUES[:, None]):
        net = make(Regressor, module=Squeezed).fit(X, y)
        same(net, make(Regressor).fit(X, y), rtol=1e-4, atol=1e-6)  # by formulas


def test_a_function_may_make_the_criterion():
    def smooth(smoothing=0.0):
        return nn.CrossEntropyLoss(label_smoothing=smoothing)

    net = make(criterion=smooth, criterion__smoothing=0.1, module=nn.Linear(4, 3))
    assert net.fit(X, INDEX).criterion_.label_smoothing == 0.1


def test_clone_forgets_and_pickle_remembers():
    net = make(flatness_layer=[0, "output"], module__activation="tanh", train_split=ValidSplit(5))
    net.fit(X, NAMES)
    net.infer(torch.tensor(X))  # with a graph that no loss takes
    fresh = clone(net)
    assert not hasattr(fresh, "module_")
    assert fresh.get_params(deep=False).keys() == net.get_params(deep=False).keys()
    assert fresh.flatness_layer == [0, "output"]
    same(fresh.fit(X, NAMES), net)
    further = copy.deepcopy(net).partial_fit(X, NAMES)
    for copied in (pickle.loads(pickle.dumps(net)), copy.deepcopy(net)):
        assert copied.predict_proba(X).tolist() == net.predict_proba(X).tolist()
        assert copied.relative_flatness_ == net.relative_flatness_
        same(copied.partial_fit(X, NAMES), further)


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
    def train(**params):
        torch.manual_seed(3)
        module = nn.Sequential(nn.Linear(4, 9), nn.Dropout(), nn.Linear(9, 3))
        return make(module=module, **params).fit(X, NAMES)

    other, params = train(random_state=1), {"random_state": random_state}
    todo = {
        "fit": lambda: make(random_state=2).fit(X, NAMES),
        "fit without a seed": lambda: make(random_state=None).fit(X, NAMES),
        "measure": lambda: relative_flatness(other, X, NAMES),
        "predict": lambda: other.predict(X),
    }
    waits = what != "predict"  # for the random state
    meanwhile = Meanwhile(todo[what], 0.3 if waits else 60)
    net = train(callbacks=[meanwhile], **params)
    meanwhile.thread.join()
    same(net, train(**params))
    assert meanwhile.has_waited == waits


def test_partial_fit_takes_all_classes_first_also_after_initialize():
    for net in (make(), make(**SIZES).initialize()):
        net.partial_fit(X[INDEX < 2], NAMES[INDEX < 2], classes=["x", "y", "z"])
        assert net.classes_.tolist() == ["x", "y", "z"]
        assert net.n_features_in_ == 4
        net.partial_fit(X[INDEX == 2], NAMES[INDEX == 2])
        assert net.predict_proba(X).shape == (42, 3)
        with pytest.raises(ValueError, match=r"not seen when the net was fitted: \['w'\]"):
            net.partial_fit(X[:2], ["w", "x"])


def test_refitting_forgets_the_last_task():
    net = make(Net).fit(X, NAMES)
    net.set_params(criterion=nn.MSELoss).fit(X[:, :2], VALUES)
    assert not hasattr(net, "classes_")
    assert net.n_features_in_ == 2
    net.set_params(criterion=nn.CrossEntropyLoss, **SIZES).fit(dataset())
    assert net.predict(X).dtype.kind == "i"


BAD_DATA = [
    (X * np.nan, NAMES, None, "NaN"),
    (X[:, :2], NAMES[:5], None, "X has 42 samples, y has 5 labels"),
    (X[:, :2], INDEX, np.ones(41), r"sample_weight must have shape \(42,\)"),
    (X[:, :2], INDEX, np.zeros(42), "sample_weight must be finite"),
]


def test_a_failed_fit_leaves_the_net_as_it_was():
    net = make().fit(X, NAMES)
    before = net.predict(X).tolist()
    for inputs, labels, weights, message in BAD_DATA:
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
        (Classifier, NAMES, ["accuracy"], WEIGHTS),
        (Binary, NAMES == "x", ["accuracy", "roc_auc"], None),
        (Regressor, VALUES, ["r2"], WEIGHTS),
    ],
)
def test_epoch_scoring_of_labels_of_any_kind(kind, y, scoring, weights):
    callbacks = [
        (name, EpochScoring(score, name=name, on_train=train, use_caching=caching))
        for score, train, caching in product(scoring, (False, True), (False, True))
        for name in [f"{score} {train} {caching}"]
    ]
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
    copied.partial_fit(X, NAMES)
    assert copied.score(X, NAMES) > 0.3


class Dead(MLP):
    def __init__(self, n_features, n_outputs):
        super().__init__(n_features, n_outputs)
        with torch.no_grad():
            self[1].bias.fill_(-100.0)


class Absolute(nn.L1Loss):
    """A criterion that no table knows."""


class SetWeights(Callback):
    """Multiply the last layer's weights by a number in an epoch, by default in the last one."""

    def __init__(self, factor, epoch=-1):
        self.factor, self.epoch = factor, epoch

    def on_epoch_begin(self, net, **kwargs):
        if len(net.history) == self.epoch % net.max_epochs + 1:
            with torch.no_grad():
                for parameter in net.module_[-1].parameters():
                    parameter.mul_(self.factor)


def trained(factor, callbacks=(), epoch=-1, **params):
    changed = SetWeights(factor, epoch)
    return make(callbacks=[changed, *callbacks], **{"max_epochs": 40, **params}).fit(X, NAMES)


BAD_ENDINGS = {
    "dead": (Classifier, {"module": Dead, "flatness_weight": 0.3}, r"died.*below 0\.3"),
    "dead in front": (Classifier, {"module": Dead, "flatness_layer": 0}, "died"),
    "dead without limit": (
        Classifier,
        {"module": Dead, "flatness_clip": None},
        r"died .*flatness_clip=1\.0",
    ),
    "in vain": (Regressor, {"criterion": nn.L1Loss}, "no effect: L1Loss"),
    "own, in vain": (Regressor, {"criterion": Absolute}, "no effect: Absolute"),
    "outweighed": (
        Classifier,
        {"flatness_weight": 10_000, "flatness_clip": None, "max_epochs": 20},
        r"flatness_weight=10000.* training loss is 1\.\d+, .* has 1\.\d+\. .*flatness_clip=1\.0",
    ),
    "diverged": (
        Classifier,
        {"optimizer": torch.optim.SGD, "lr": 1e38},
        r"Classifier\(.*lr=1e\+38.*\) has diverged",
    ),
    "diverged at once": (
        Regressor,
        {"optimizer": torch.optim.SGD, "lr": 1e8, "max_epochs": 1},
        r"Regressor\(.*\) has diverged",
    ),
    "not measured": (
        Classifier,
        {"flatness_weight": 0, "flatness_layer": "nope"},
        "could not be measured: .*'nope'",
    ),
}


@pytest.mark.parametrize("name", BAD_ENDINGS)
def test_warns_once_of_a_training_that_ended_badly(name):
    kind, params, message = BAD_ENDINGS[name]
    with pytest.warns(FlatnessWarning, match=message) as caught:
        net = make(kind, **params).fit(X, VALUES if kind is Regressor else NAMES)
    assert len(caught) == 1
    if name in ("dead", "dead in front", "in vain", "own, in vain"):
        assert net.relative_flatness_ == 0
    else:
        assert (net.relative_flatness_ > 0) == (name == "outweighed")


@pytest.mark.parametrize("action", ["default", "always"])
def test_seeds_that_end_alike_are_told_once_at_a_line(action):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter(action)
        for seed in range(3):
            make(module=Dead, random_state=seed).fit(X, NAMES)
        assert len(said) == (1 if action == "default" else 3)
        make(module=Dead).fit(X, NAMES)  # at another line
    assert len(said) == (2 if action == "default" else 4)


def test_warns_of_a_negative_flatness_as_the_function_does():
    down = criterion_of(lambda z, y: -(z - y).square().mean())
    params = {"criterion": down, "flatness_weight": 0, "module__n_outputs": 1}
    match = r"relative_flatness at layer .* is negative \(-"
    with pytest.warns(FlatnessWarning, match=match) as caught:
        net = make(Net, **params, **STILL).fit(X, VALUES[:, None])
    assert len(caught) == 1  # without a penalty, nothing is said of one
    with pytest.warns(FlatnessWarning, match=match):
        value = relative_flatness(net, X, VALUES[:, None])
    assert net.relative_flatness_ == pytest.approx(value, rel=FLOAT32)
    assert value < 0


@pytest.mark.parametrize("weight", [0.0, 0.1])
def test_warns_of_a_net_that_ends_much_worse_than_it_was(weight):
    message = (
        r"Classifier\(.*lr=0\.02.*\) ended much worse .* in epoch 39 .* has 1\.\d+\. .*Checkpoint"
    )
    with pytest.warns(FlatnessWarning, match=message) as caught:
        net = trained(-1.0, lr=0.02, flatness_weight=weight)
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
    labels = np.roll(NAMES, 1)
    make(flatness_clip=None, max_epochs=1, lr=1e-5).fit(X, labels)  # hardly trained
    make(flatness_weight=10_000, max_epochs=1, lr=1e-5).fit(X, labels)
    learned = make(flatness_weight=60, flatness_clip=None, max_epochs=60).fit(X, NAMES)
    epochs = learned.history[:, ("flatness_penalty", "train_loss")]
    assert any(penalty > loss for penalty, loss in epochs)


def test_is_silent_if_the_net_recovers_or_its_best_weights_are_back(tmp_path):
    trained(-1.0, epoch=5)
    # of the weights, and not of the history
    files = {"dirname": tmp_path, "f_history": None}
    best = Checkpoint(monitor="train_loss_best", load_best=True, **files)
    assert trained(-1.0, callbacks=[best], lr=0.02).constant_comparison_.loss < 0.6
    trained(1.3)  # noise
    # a warm start is compared with itself
    net = make(max_epochs=40, warm_start=True).fit(X, NAMES)
    net.set_params(max_epochs=1).fit(X, np.roll(NAMES, 1))


@pytest.mark.parametrize("layer", [-1, "all"])
def test_a_default_net_is_measured_by_one_pass_over_its_data(monkeypatch, layer):
    runs, forward = [], nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda *args: runs.append(1) or forward(*args))
    make(flatness_layer=layer, flatness_weight=0.0).fit(X, NAMES)  # steps take formulas
    assert len(runs) == 2  # its layers
