"""Goals, averages of weights, copies and loggers, next to what is computed by hand."""

import copy
import io
import pickle
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from skorch import NeuralNetClassifier
from skorch.callbacks import Callback, EarlyStopping, EpochScoring, TensorBoard
from skorch.dataset import ValidSplit
from torch import nn
from torch.testing import assert_close

from relflat_sk import (
    FlatnessWarning,
    StopAtGradientNorm,
    StopAtLoss,
    WeightAverage,
    relative_flatness,
)
from relflat_sk.training._callbacks import gradient_norm
from relflat_sk.training._data import with_weights
from tests.rounding import FLOAT32
from tests.training import common
from tests.training.common import INDEX, NAMES, WEIGHTS, Classifier, X, same, weights_of

TARGETS = torch.tensor(INDEX)


def make(*callbacks, kind=Classifier, **params):
    callbacks = [(type(callback).__name__, callback) for callback in callbacks]
    return common.make(kind, callbacks=callbacks, **{"max_epochs": 200, **params})


def callback_of(net, kind):
    return dict(net.callbacks_)[kind.__name__]


class Dropping(nn.Sequential):
    def __init__(self, n_features=4, n_outputs=3, ending=nn.Identity):
        features = nn.Linear(n_features, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Dropout(0.6)
        super().__init__(*features, nn.Linear(40, n_outputs), ending())


# -- goals -------------------------------------------------------------------------------


class Losses(Callback):
    """The mean loss in evaluation mode after each epoch, computed by hand."""

    def on_epoch_end(self, net, **kwargs):
        with torch.no_grad():
            net.module_.eval()
            loss = nn.functional.cross_entropy(net.module_(torch.tensor(X)), TARGETS)
        net.losses_ = [*getattr(net, "losses_", []), loss.item()]


@pytest.mark.parametrize("weight", [0.0, 0.1], ids=["plain", "penalised"])
def test_stops_at_the_first_epoch_whose_true_loss_is_small_enough(weight):
    net = make(Losses(), StopAtLoss(0.35), module=Dropping, flatness_weight=weight).fit(X, NAMES)
    assert net.converged_ is True
    assert pickle.loads(pickle.dumps(net)).converged_ is True
    assert len(net.losses_) == len(net.history)
    assert net.losses_[-1] <= 0.35 < min(net.losses_[:-1])
    assert callback_of(net, StopAtLoss).loss_ == pytest.approx(net.losses_[-1], rel=FLOAT32)
    # by the recorded loss, which dropout changes, it would have stopped later
    assert net.history[-1, "train_loss"] > 0.35


def test_goals_do_not_change_training():
    module = {"module": Dropping, "max_epochs": 3}
    watched = make(StopAtLoss(1e-9), StopAtGradientNorm(1e-9), **module).fit(X, NAMES)
    same(watched, make(**module).fit(X, NAMES))


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["alike", "weighted"])
def test_the_loss_is_that_of_the_training_part(weights):
    split = ValidSplit(3)
    net = make(StopAtLoss(0.9), train_split=split).fit(X, NAMES, sample_weight=weights)
    rows = split(net.get_dataset(X, INDEX))[0].indices
    log_p = np.log(net.predict_proba(X))[rows, INDEX[rows]]
    loss = -np.average(log_p, weights=None if weights is None else weights[rows])
    assert callback_of(net, StopAtLoss).loss_ == pytest.approx(loss, rel=FLOAT32)


def test_says_once_that_it_did_not_converge_where_all_epochs_of_a_fit_were_trained(recwarn):
    make(StopAtLoss(1e-6), max_epochs=1).partial_fit(X, NAMES)
    make(StopAtLoss(1e-6), EarlyStopping("train_loss", threshold=10), max_epochs=9).fit(X, NAMES)
    make(StopAtLoss(1e-6), max_epochs=0).fit(X, NAMES)
    make(StopAtLoss(0.5)).fit(X, NAMES)
    assert not recwarn
    net = make(StopAtLoss(1e-6), StopAtGradientNorm(1e-9), max_epochs=2)
    goals = "loss of 1e-06 or a gradient norm of 1e-09 with max_epochs=2"
    with pytest.warns(ConvergenceWarning, match=goals) as caught:
        net.fit(X, NAMES)
    assert len(caught) == 1
    assert net.converged_ is False


HEAVY = torch.tensor([1.0, 5.0, 0.2])
CRITERIA = {
    "mean": {},
    "sum": {"criterion__reduction": "sum"},
    "class weights": {"criterion__weight": HEAVY},
}


@pytest.mark.parametrize("name", CRITERIA)
@pytest.mark.parametrize("sample_weight", [None, WEIGHTS], ids=["alike", "weighted"])
@pytest.mark.parametrize("weight", [0.0, 2.0], ids=["plain", "penalised"])
def test_gradient_norm_is_that_of_the_whole(name, sample_weight, weight):
    params = CRITERIA[name] | {"flatness_weight": weight, "flatness_clip": None}
    net = make(module=Dropping, max_epochs=2, flatness_every=4, **params).fit(X, NAMES)
    dataset = net.get_dataset(X, INDEX)  # batches of 16, 16 and 10
    share = HEAVY[TARGETS] if name == "class weights" else torch.ones(42)
    if sample_weight is not None:
        dataset = with_weights(dataset, sample_weight)
        share = share * torch.tensor(sample_weight)

    layers = nn.Sequential(*net.module_.eval())
    features, W = layers[:4](torch.tensor(X)), layers[4].weight
    logits = layers[4](features)
    p = logits.softmax(dim=1)
    spread = (p @ W.square() - (p @ W).square()).sum(dim=1) * features.square().sum(dim=1)
    losses = nn.functional.cross_entropy(logits, TARGETS, reduction="none")
    objective = share @ (losses + weight * spread / (2 * 40)) / share.sum()
    grads = torch.autograd.grad(objective, list(layers.parameters()))
    truth = nn.utils.get_total_norm(grads).item()
    assert gradient_norm(net, dataset) == pytest.approx(truth, rel=1e-4)


def test_gradient_norm_is_no_step_for_gradients_and_the_limit():
    net = make(module=Dropping, flatness_layer=0, max_epochs=1).fit(X, NAMES)
    for p in net.module_.parameters():
        p.grad = torch.full_like(p, 3.0)
    limit = net._penalty_limit().__getstate__()
    gradient_norm(net, net.get_dataset(X, np.zeros(42, dtype=np.int64)))
    np.testing.assert_equal(net._penalty_limit().__getstate__(), limit)  # which learns from steps
    assert all(bool((p.grad == 3).all()) for p in net.module_.parameters())


@pytest.mark.parametrize("split", [None, ValidSplit(5)], ids=["all", "split"])
def test_goals_on_stock_skorch_nets(split):
    goals = [StopAtLoss(0.3), StopAtGradientNorm(1e-9, every=5)]
    params = {"callbacks": goals, "verbose": 0, "max_epochs": 300, "train_split": split}
    params |= {"module__ending": partial(nn.Softmax, dim=1), "criterion": nn.NLLLoss}
    net = NeuralNetClassifier(Dropping, optimizer=torch.optim.Adam, **params).fit(X, INDEX)
    assert net.converged_
    assert callback_of(net, StopAtGradientNorm).gradient_norm_ > 0
    if split is None:
        loss = -np.log(net.predict_proba(X)[np.arange(42), INDEX]).mean()
        assert callback_of(net, StopAtLoss).loss_ == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize(
    ("goal", "name"), [(StopAtLoss(0.5, every=2), "loss"), (StopAtGradientNorm(0.5), "tol")]
)
def test_callbacks_have_parameters(goal, name):
    kind = type(goal).__name__
    fresh = clone(make(goal, WeightAverage(start=0)).fit(X, NAMES))
    assert not [key for key in vars(fresh.callbacks[0][1]) if key.endswith("_")]
    settings = {f"callbacks__{kind}__every": 3, f"callbacks__{kind}__{name}": 100.0}
    assert len(fresh.set_params(**settings).fit(X, NAMES).history) == 3


# -- averages of weights -----------------------------------------------------------------


class Record(Callback):
    """The weights after every epoch and step."""

    def on_train_begin(self, net, **kwargs):
        self.epochs, self.steps = [], []

    def on_batch_end(self, net, training=False, **kwargs):
        if training:
            self.steps.append(weights_of(net))

    def on_epoch_end(self, net, **kwargs):
        self.epochs.append(weights_of(net))


AVERAGED = {"max_epochs": 8, "lr": 0.03}  # of three steps each


def make_stock(*callbacks, **params):
    torch.manual_seed(0)
    params |= {"criterion": nn.CrossEntropyLoss, "train_split": None, "verbose": 0}
    callbacks = [(type(callback).__name__, callback) for callback in callbacks]
    return NeuralNetClassifier(callbacks=callbacks, batch_size=16, **params)


@pytest.mark.parametrize("make_net", [make_stock, make])
@pytest.mark.parametrize(("start", "first"), [(0.5, 4), (0, 0), (6, 6)])
def test_all_epochs_count_alike(make_net, start, first):
    net = make_net(WeightAverage(start), Record(), module=Dropping, **AVERAGED).fit(X, INDEX)
    assert callback_of(net, WeightAverage).n_averaged_ == 8 - first
    mean = torch.stack(callback_of(net, Record).epochs[first:]).mean(0)
    assert_close(weights_of(net), mean, rtol=1e-4, atol=1e-6)


def test_older_steps_count_less():
    net = make(WeightAverage(start=2, decay=0.9), Record(), **AVERAGED).fit(X, NAMES)
    mean, *later = callback_of(net, Record).steps[6:]
    for step in later:
        mean = 0.9 * mean + 0.1 * step
    assert callback_of(net, WeightAverage).n_averaged_ == 18
    assert_close(weights_of(net), mean, rtol=1e-4, atol=1e-6)


def test_batch_norms_have_the_statistics_of_the_average():
    net = make(WeightAverage(), module=Dropping, batch_size=-1, **AVERAGED).fit(X, NAMES)
    first, norm = copy.deepcopy(net.module_[0]).double(), net.module_[1]
    inputs = first(torch.tensor(X).double()).detach()
    assert_allclose(norm.running_mean, inputs.mean(0), rtol=1e-4, atol=1e-5)
    assert_allclose(norm.running_var, inputs.var(0), rtol=1e-4)
    assert norm.momentum == 0.1


def test_flatness_is_that_of_the_average():
    plain, averaged = make(**AVERAGED), make(WeightAverage(), **AVERAGED)
    for net in (plain, averaged):
        net.fit(X, NAMES)
    assert averaged.relative_flatness_ == pytest.approx(relative_flatness(averaged, X, NAMES))
    assert averaged.relative_flatness_ != pytest.approx(plain.relative_flatness_, rel=1e-3)
    # the training is the same
    assert averaged.history[-1, "train_loss"] == pytest.approx(plain.history[-1, "train_loss"])


def test_further_training_begins_at_the_average():
    net = make(WeightAverage(start=0, decay=0.5), max_epochs=2, lr=0.03).fit(X, NAMES)
    first = weights_of(net)
    net.set_params(lr=1e-9).partial_fit(X, NAMES)
    assert_close(weights_of(net), first, rtol=0, atol=1e-5)


def test_a_training_that_ends_before_the_start_keeps_its_weights():
    net = make(WeightAverage(start=0.9), StopAtLoss(1.0), Record(), **AVERAGED)
    with pytest.warns(FlatnessWarning, match="start"):
        net.fit(X, NAMES)
    assert len(net.history) < 8
    assert callback_of(net, WeightAverage).n_averaged_ == 0
    assert_close(weights_of(net), callback_of(net, Record).steps[-1])


# -- copies of nets and their callbacks, made at any time of a training ------------------


def through_torch(net):
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net)), through_torch]


class OwnLoss(Classifier):
    def get_loss(self, y_pred, y_true, X=None, training=False):
        return nn.functional.cross_entropy(y_pred, y_true) / 2


class CopyingEpochs(Callback):
    """Copies the net after each epoch, and compares what the copy predicts."""

    def on_epoch_end(self, net, *args, **kwargs):
        for way in WAYS:
            assert_array_equal(way(net).predict_proba(X), net.predict_proba(X))


class CopyingSteps(CopyingEpochs):
    on_batch_end = on_grad_computed = on_train_end = CopyingEpochs.on_epoch_end


@pytest.mark.parametrize("copying", [CopyingEpochs, CopyingSteps])
@pytest.mark.parametrize("kind", [Classifier, OwnLoss])
@pytest.mark.parametrize("decay", [None, 0.9])
def test_a_net_is_copied_at_any_time(kind, decay, copying):
    callbacks = copying(), WeightAverage(0, decay), StopAtLoss(1e-9), StopAtGradientNorm(1e-9)
    net = make(*callbacks, kind=kind, max_epochs=2, flatness_layer="all").fit(X, NAMES)
    before, further = weights_of(net), []
    for way in WAYS:
        other = way(net)
        assert other.relative_flatness_ == net.relative_flatness_
        further.append(weights_of(other.partial_fit(X, NAMES)))
    assert_close(weights_of(net), before, rtol=0, atol=0)
    net.partial_fit(X, NAMES)
    assert_close(further, [weights_of(net)] * 3, rtol=0, atol=0)


class WithoutTensors(pickle.Pickler):
    """Refuses what skops cannot store outside of the parts that skorch stores itself."""

    def reducer_override(self, value):
        assert not isinstance(value, torch.Tensor | torch.Generator | torch.dtype)
        return NotImplemented


def test_a_fitted_net_holds_no_tensors_beside_its_modules():
    net = make(WeightAverage(0), StopAtLoss(1e-9), max_epochs=2).fit(X, NAMES)
    WithoutTensors(io.BytesIO()).dump(net)


# -- skorch's loggers receive penalty and flatness of every epoch ------------------------


def test_loggers_receive_penalty_and_flatness():
    writer, names = Mock(), ("flatness_penalty", "relative_flatness")
    scoring = EpochScoring(relative_flatness, name="relative_flatness", on_train=True)
    net = make(scoring, TensorBoard(writer), max_epochs=3).fit(X, NAMES)
    assert net.history[-1, "relative_flatness"] == pytest.approx(net.relative_flatness_, rel=1e-6)
    logged = [call.kwargs for call in writer.add_scalar.call_args_list]
    for name in names:
        values = [each["scalar_value"] for each in logged if each["tag"] == name]
        assert values == net.history[:, name]
        assert min(values) > 0
