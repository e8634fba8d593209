"""Nets shuffle their batches by default, and use torch's fused optimizers."""

import copy
import pickle

import numpy as np
import pytest
import scipy.sparse
import torch
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from skorch.callbacks import Callback, PassthroughScoring
from skorch.dataset import Dataset as SkorchDataset
from skorch.dataset import ValidSplit
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from relflat_sk import (
    FlatnessScorer,
    RelativeFlatnessRegularizedBinaryClassifier,
    RelativeFlatnessRegularizedClassifier,
    RelativeFlatnessRegularizedNet,
    RelativeFlatnessRegularizedRegressor,
    SharpnessAwareMixin,
    measure,
)
from relflat_sk.training import measured_later

NETS = [
    RelativeFlatnessRegularizedNet,
    RelativeFlatnessRegularizedClassifier,
    RelativeFlatnessRegularizedBinaryClassifier,
    RelativeFlatnessRegularizedRegressor,
]
N = 20
# each sample says its own number
X = np.stack([np.arange(N), np.ones(N)], axis=1).astype(np.float32)
Y = np.arange(N) % 2


class _Orders(Callback):
    """Record the numbers of the samples of each batch."""

    def initialize(self):
        self.batches = {True: [], False: []}

    def on_batch_begin(self, net, batch=None, training=False, **kwargs):
        self.batches[training].append(batch[0][:, 0].int().tolist())

    def epochs(self, training=True):
        flat = [i for batch in self.batches[training] for i in batch]
        n = len(flat) // 3
        return [flat[i : i + n] for i in range(0, len(flat), n)]


def _fit(kind=RelativeFlatnessRegularizedClassifier, data=(X, Y), **arguments):
    orders = _Orders()
    net = kind(max_epochs=3, batch_size=4, verbose=0, callbacks=[("orders", orders)], **arguments)
    return net.fit(*data), net.callbacks[0][1]


@pytest.mark.parametrize("kind", NETS)
def test_batches_are_shuffled_each_epoch(kind):
    _, orders = _fit(kind, random_state=0)
    epochs = orders.epochs()
    assert all(sorted(epoch) == list(range(N)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, range(N)]}) == 4


def test_order_is_kept_on_demand():
    _, orders = _fit(iterator_train__shuffle=False)
    assert orders.epochs() == [list(range(N))] * 3


def test_order_is_reproducible():
    first, second, third = (_fit(random_state=seed)[1].epochs() for seed in (0, 0, 1))
    assert first == second
    assert first != third


def test_validation_and_prediction_keep_the_order():
    split = ValidSplit(4)
    net, orders = _fit(train_split=split, random_state=0)
    held_out = split(SkorchDataset(X, Y), Y)[1].indices
    assert orders.epochs(training=False) == [list(held_out)] * 3
    batches = [batch[:, 0] for batch, _ in net.get_iterator(net.get_dataset(X))]
    assert torch.cat(batches).tolist() == list(range(N))


def test_shuffle_can_be_searched():
    net = RelativeFlatnessRegularizedClassifier(max_epochs=1, verbose=0)
    search = GridSearchCV(net, {"iterator_train__shuffle": [True, False]}, cv=2).fit(X, Y)
    assert len(search.cv_results_["params"]) == 2
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()


class _Stream(IterableDataset):
    def __iter__(self):
        return zip(X, Y, strict=True)

    def __len__(self):
        return N


class _OwnLoader:
    """A loader without the argument `shuffle`."""

    def __init__(self, dataset, batch_size):
        self.loader = DataLoader(dataset, batch_size=batch_size)

    def __iter__(self):
        return iter(self.loader)


def _loader_function(dataset, **arguments):
    return DataLoader(dataset, **arguments)


def _batches(dataset, **arguments):
    net = RelativeFlatnessRegularizedClassifier(batch_size=4, **arguments)
    return [i for x, _ in net.get_iterator(dataset, training=True) for i in x[:, 0].int().tolist()]


def test_samplers_streams_and_own_loaders_determine_the_order():
    dataset = SkorchDataset(X, Y)
    sampler = SequentialSampler(dataset)
    assert _batches(dataset, iterator_train__sampler=sampler) == list(range(N))
    assert _batches(_Stream()) == list(range(N))
    assert _batches(dataset, iterator_train=_OwnLoader) == list(range(N))
    assert _batches(dataset, iterator_train=_loader_function) != list(range(N))


# -- optimizers --------------------------------------------------------------------------


def _optimizer(optimizer, module=None, **arguments):
    module = module or nn.Linear(2, 2)
    net = RelativeFlatnessRegularizedClassifier(module, optimizer=optimizer, **arguments)
    return net.initialize().optimizer_


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_optimizers_are_fused(name):
    optimizer = _optimizer(getattr(torch.optim, name))
    assert type(optimizer) is getattr(torch.optim, name)
    assert all(group["fused"] for group in optimizer.param_groups)
    for choice in ({"fused": False}, {"foreach": True}, {"foreach": False}):
        arguments = {f"optimizer__{key}": value for key, value in choice.items()}
        group = _optimizer(getattr(torch.optim, name), **arguments).param_groups[0]
        assert not group["fused"]
        assert choice.items() <= group.items()


class _OwnAdam(torch.optim.Adam):
    pass


@pytest.mark.parametrize("optimizer", [torch.optim.RMSprop, torch.optim.NAdam, _OwnAdam])
def test_other_optimizers_are_left_alone(optimizer):
    assert not _optimizer(optimizer).defaults.get("fused")


def test_no_fused_optimizer_for_half_precision_and_sparse_gradients():
    half = _optimizer(torch.optim.SGD, nn.Linear(2, 2).bfloat16())
    sparse = _optimizer(torch.optim.SGD, nn.Embedding(3, 2, sparse=True))
    assert not half.param_groups[0]["fused"]
    assert not sparse.param_groups[0]["fused"]


def test_groups_of_parameters_are_fused():
    groups = [("bias", {"lr": 0.5})]
    optimizer = _optimizer(torch.optim.Adam, optimizer__param_groups=groups)
    assert [group["fused"] for group in optimizer.param_groups] == [True, True]
    assert optimizer.param_groups[0]["lr"] == 0.5


class _SharpnessAware(SharpnessAwareMixin, RelativeFlatnessRegularizedClassifier):
    pass


@pytest.mark.parametrize("kind", [RelativeFlatnessRegularizedClassifier, _SharpnessAware])
@pytest.mark.parametrize(
    "arguments",
    [
        {"optimizer": torch.optim.Adam},
        {"optimizer": torch.optim.AdamW, "optimizer__weight_decay": 0.1},
        {"optimizer": torch.optim.SGD, "optimizer__momentum": 0.9, "optimizer__nesterov": True},
    ],
    ids=["Adam", "AdamW", "SGD"],
)
def test_fused_steps_equal_others_up_to_rounding(kind, arguments):
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(60, 5))  # the network computes in float64
    labels = rng.integers(0, 3, 60)
    weights = []
    for choice in ({}, {"optimizer__fused": False, "optimizer__foreach": False}):
        net = kind(max_epochs=5, batch_size=8, random_state=0, verbose=0, **arguments, **choice)
        weights.append(nn.utils.parameters_to_vector(net.fit(inputs, labels).module_.parameters()))
    torch.testing.assert_close(*weights, rtol=1e-9, atol=1e-11)


# -- the loop ----------------------------------------------------------------------------


class _Counts(RelativeFlatnessRegularizedClassifier):
    """Count the calls of the functions that skorch's users override."""

    def _count(self, name, *args, **kwargs):
        counts = self.__dict__.setdefault("_counts", {})
        counts[name] = counts.get(name, 0) + 1
        return getattr(super(), name)(*args, **kwargs)

    def train_step(self, *args, **kwargs):
        return self._count("train_step", *args, **kwargs)

    def train_step_single(self, *args, **kwargs):
        return self._count("train_step_single", *args, **kwargs)

    def on_batch_end(self, *args, **kwargs):
        return self._count("on_batch_end", *args, **kwargs)

    def infer(self, *args, **kwargs):
        return self._count("infer", *args, **kwargs)

    def get_loss(self, *args, **kwargs):
        return self._count("get_loss", *args, **kwargs)


def test_functions_of_subclasses_are_called_once_a_step():
    net = _Counts(max_epochs=3, batch_size=5, verbose=0)
    with measured_later():
        net.fit(X, Y)
    names = ("train_step", "train_step_single", "on_batch_end", "get_loss", "infer")
    assert [net._counts[name] for name in names] == [12] * 5


# -- relative_flatness_ ------------------------------------------------------------------


@pytest.mark.parametrize("weights", [None, np.arange(N) + 1.0])
def test_partial_fit_measures_the_data_of_its_call(weights):
    data = X / N
    net = RelativeFlatnessRegularizedClassifier(
        max_epochs=1, flatness_layer=0, random_state=0, verbose=0, optimizer=torch.optim.SGD
    )
    state = torch.get_rng_state()
    for _ in range(2):
        net.partial_fit(data, Y, sample_weight=weights)
    assert torch.equal(state, torch.get_rng_state())
    expected = measure("relative_flatness", net, X / N, Y, layer=0, sample_weight=weights)
    data *= 100  # a buffer of the caller's, used again
    assert net.relative_flatness_ == pytest.approx(expected, rel=1e-6)
    assert np.isfinite(net.constant_comparison_.loss)


def _step(net, path):
    with torch.no_grad():
        net.module_.output.bias[-1] += 1  # the last number


def _load(net, path):
    net.save_params(f_params=path)
    _step(net, path)
    net.load_params(f_params=path)
    net.relative_flatness_  # noqa: B018  of the same weights as before
    other = clone(net).set_params(random_state=1).fit(X / N, Y)
    other.save_params(f_params=path)
    net.load_params(f_params=path)


@pytest.mark.parametrize(
    "change",
    [
        _load,
        _step,
        lambda net, path: net.initialize(),
        lambda net, path: net.set_params(module__activation="tanh"),
        lambda net, path: net.module_.load_state_dict({
            name: weights + 1 for name, weights in net.module_.state_dict().items()
        }),
    ],
    ids=["load_params", "in place", "initialize", "set_params", "load_state_dict"],
)
def test_what_was_measured_belongs_to_the_weights(change, tmp_path):
    net = RelativeFlatnessRegularizedClassifier(max_epochs=1, verbose=0, random_state=0)
    with pytest.raises(AttributeError, match="has no relative_flatness_ before fit"):
        net.relative_flatness_  # noqa: B018
    net.fit(X / N, Y)
    scorer = FlatnessScorer(data="train", at_minimum="ignore")
    assert scorer(net, X / N, Y) == -net.relative_flatness_
    change(net, tmp_path / "weights.pt")
    for name in ("relative_flatness_", "constant_comparison_"):
        assert not hasattr(net, name)
    with pytest.raises(ValueError, match="the weights have changed since"):
        scorer(net, X / N, Y)
    assert net.fit(X / N, Y).relative_flatness_ > 0


def test_parameters_of_the_measure_do_not_change_what_was_measured():
    net = RelativeFlatnessRegularizedClassifier(max_epochs=1, verbose=0).fit(X / N, Y)
    before = net.relative_flatness_
    net.set_params(flatness_layer=0, criterion__weight=torch.tensor([1.0, 5.0]))
    assert net.relative_flatness_ == before


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_hold_the_value_and_no_training_data(copied):
    net = RelativeFlatnessRegularizedClassifier(max_epochs=1, batch_size=256, verbose=0)
    assert not hasattr(copied(net), "relative_flatness_")
    many = np.random.default_rng(0).normal(size=(20_000, 2))
    net.partial_fit(many, many[:, 0] > 0)
    other = copied(net)
    assert other.relative_flatness_ == net.relative_flatness_
    assert len(pickle.dumps(other)) < many.nbytes / 5


# -- skorch's table of epochs ------------------------------------------------------------


def test_table_is_printed_unless_the_net_is_quiet(capsys):
    RelativeFlatnessRegularizedClassifier(max_epochs=2, verbose=0).fit(X, Y)
    assert not capsys.readouterr().out
    net = RelativeFlatnessRegularizedClassifier(max_epochs=2).fit(X, Y)
    header, _, *epochs = capsys.readouterr().out.splitlines()
    assert "flatness_penalty" in header
    assert len(epochs) == 2
    lines = []
    net.set_params(verbose=0, callbacks__print_log__sink=lines.append).fit(X, Y)
    assert len(lines) == 4


# -- batches of predictions ----------------------------------------------------------------


class _Sizes(nn.Module):
    """A linear network that notes the sizes of its batches in evaluation."""

    def __init__(self, part=None):
        super().__init__()
        self.last, self.part = nn.LazyLinear(2), part or nn.Identity()
        self.sizes = []

    def forward(self, X):
        if not self.training:
            self.sizes.append(len(X))
        return self.last(self.part(X.flatten(1)))


def _predicting(inputs, **arguments):
    """Fit a net, predict its data, and return both outputs and the sizes of the batches."""
    net = RelativeFlatnessRegularizedClassifier(
        _Sizes, max_epochs=1, batch_size=4, verbose=0, random_state=0, **arguments
    ).fit(inputs, np.arange(len(inputs)) % 2)
    net.module_.sizes.clear()
    return net.predict_proba(inputs), list(net.module_.sizes)


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((20, 2), [20]),
        ((1500, 3), [1024, 476]),
        ((14, 1, 300, 500), [6, 6, 2]),  # not more than 2**20 numbers
        ((7, 3, 400, 400), [4, 3]),  # nor fewer than `batch_size` samples
    ],
)
def test_predictions_are_made_in_large_batches(shape, sizes):
    inputs = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    assert _predicting(inputs)[1] == sizes


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        ({"iterator_valid__batch_size": 8}, [8, 8, 4]),
        ({"module__part": nn.BatchNorm1d(2, track_running_stats=False)}, [4] * 5),
        ({"module__part": nn.BatchNorm1d(2)}, [20]),
    ],
)
@pytest.mark.filterwarnings("ignore:batch norm without running statistics")
def test_batches_of_predictions_stay_where_the_size_matters(arguments, sizes):
    assert _predicting(X, **arguments)[1] == sizes


@pytest.mark.parametrize("kind", [np.asarray, scipy.sparse.csr_matrix], ids=["dense", "sparse"])
def test_predictions_do_not_depend_on_the_size_of_batches(kind):
    inputs = kind(np.random.default_rng(0).normal(size=(30, 3)))
    arguments = {"batch_size": 4, "max_epochs": 1, "verbose": 0, "random_state": 0}
    nets = [
        RelativeFlatnessRegularizedClassifier(**arguments, **one).fit(inputs, np.arange(30) % 3)
        for one in ({}, {"iterator_valid__batch_size": 4})
    ]
    np.testing.assert_allclose(*(net.predict_proba(inputs) for net in nets), rtol=0, atol=1e-12)
    assert [len(output) for output in nets[0].forward_iter(inputs, training=True)] == [4] * 7 + [2]


@pytest.mark.parametrize("split", [None, ValidSplit(4)])
def test_means_of_epochs_are_those_of_skorch(split):
    names = ["train_loss", "valid_loss"]
    theirs = {
        f"callbacks__{name}": PassthroughScoring(name=name, on_train=name == "train_loss")
        for name in names
    }
    histories = []
    for callbacks in ({}, theirs):
        net = RelativeFlatnessRegularizedClassifier(
            max_epochs=4, batch_size=6, verbose=0, random_state=0, train_split=split, **callbacks
        )
        history = net.fit(X / N, Y).history
        histories.append([{**epoch, "dur": 0, "batches": 0} for epoch in history])
    assert histories[0] == histories[1]
    assert ("valid_loss_best" in histories[0][0]) is (split is not None)
