"""Where nets differ from skorch's: order, optimizers, prediction; what they measure after fit."""

import warnings

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from skorch.callbacks import Callback
from skorch.dataset import Dataset as SkorchDataset
from skorch.dataset import ValidSplit
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler

from relflat_sk import FlatnessScorer, flatness_report, measure, relative_flatness
from relflat_sk.training._after_fit import measured_later
from tests.rounding import FLOAT32
from tests.training.common import INDEX, Classifier, X, make

N = 20
# each sample says its own number
NUMBERED = np.stack([np.arange(N), np.ones(N)], axis=1).astype(np.float32)
HALVES = np.arange(N) % 2


class _Orders(Callback):
    """Record the numbers of the samples of each epoch."""

    def initialize(self):
        self.epochs = {True: [], False: []}

    def on_epoch_begin(self, net, **kwargs):
        for epochs in self.epochs.values():
            epochs.append([])

    def on_batch_begin(self, net, batch=None, training=False, **kwargs):
        self.epochs[training][-1] += batch[0][:, 0].int().tolist()


def _orders(**arguments):
    orders = _Orders()
    make(batch_size=4, callbacks=[orders], **arguments).fit(NUMBERED, HALVES)
    return orders.epochs


def test_batches_are_shuffled_each_epoch():
    epochs = _orders()[True]
    assert all(sorted(epoch) == list(range(N)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, range(N)]}) == 4
    assert _orders()[True] == epochs
    assert _orders(random_state=1)[True] != epochs


def test_order_is_kept_on_demand_in_validation_and_prediction():
    assert _orders(iterator_train__shuffle=False)[True] == [list(range(N))] * 3
    split = ValidSplit(4)
    held_out = split(SkorchDataset(NUMBERED, HALVES), HALVES)[1].indices
    assert _orders(train_split=split)[False] == [list(held_out)] * 3
    net = make()
    batches = [batch[:, 0] for batch, _ in net.get_iterator(net.get_dataset(NUMBERED))]
    assert torch.cat(batches).tolist() == list(range(N))
    search = GridSearchCV(net, {"iterator_train__shuffle": [True, False]}, cv=2)
    assert np.isfinite(search.fit(NUMBERED, HALVES).cv_results_["mean_test_score"]).all()


class _OwnLoader(DataLoader):
    """A loader without the argument `shuffle`."""

    def __init__(self, dataset, batch_size):
        super().__init__(dataset, batch_size=batch_size)


@pytest.mark.parametrize(
    "arguments",
    [
        {"iterator_train__sampler": SequentialSampler(range(N))},
        {"iterator_train": _OwnLoader},
    ],
)
def test_samplers_and_own_loaders_determine_the_order(arguments):
    assert _orders(**arguments)[True] == [list(range(N))] * 3


def _optimizer(optimizer, module=None, **arguments):
    return make(module=module or nn.Linear(2, 2), optimizer=optimizer, **arguments).initialize()


class _OwnAdam(torch.optim.Adam):
    pass


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_optimizers_are_fused_unless_another_implementation_is_chosen(name):
    groups = {"optimizer__param_groups": [("bias", {"lr": 0.5})]}
    optimizer = _optimizer(getattr(torch.optim, name), **groups).optimizer_
    assert type(optimizer) is getattr(torch.optim, name)
    assert [group["fused"] for group in optimizer.param_groups] == [True, True]
    assert optimizer.param_groups[0]["lr"] == 0.5
    for choice in ({"fused": False}, {"foreach": True}, {"foreach": False}):
        arguments = {f"optimizer__{key}": value for key, value in choice.items()}
        group = _optimizer(getattr(torch.optim, name), **arguments).optimizer_.param_groups[0]
        assert not group["fused"]
        assert choice.items() <= group.items()


@pytest.mark.parametrize(
    ("optimizer", "module"),
    [
        (torch.optim.RMSprop, None),
        (torch.optim.NAdam, None),
        (_OwnAdam, None),
        (torch.optim.SGD, nn.Linear(2, 2).bfloat16()),
        (torch.optim.SGD, nn.Embedding(3, 2, sparse=True)),
    ],
    ids=["RMSprop", "NAdam", "own", "half precision", "sparse gradients"],
)
def test_other_optimizers_are_left_alone(optimizer, module):
    assert not _optimizer(optimizer, module).optimizer_.param_groups[0].get("fused")


def test_functions_of_subclasses_are_called_once_a_step():
    names = ("train_step", "train_step_single", "on_batch_end", "get_loss", "infer")
    calls = dict.fromkeys(names, 0)

    def counting(name):
        def method(self, *args, **kwargs):
            calls[name] += 1
            return getattr(Classifier, name)(self, *args, **kwargs)

        return method

    kind = type("Counts", (Classifier,), {name: counting(name) for name in names})
    with measured_later():
        make(kind, batch_size=5).fit(NUMBERED, HALVES)
    assert list(calls.values()) == [12] * 5


@pytest.mark.parametrize("weights", [None, np.arange(42) + 1.0])
def test_partial_fit_measures_the_data_of_its_call(weights):
    data = X.copy()
    net = make(flatness_layer=0, optimizer=torch.optim.SGD)
    state = torch.get_rng_state()
    for _ in range(2):
        net.partial_fit(data, INDEX, sample_weight=weights)
    assert torch.equal(state, torch.get_rng_state())
    expected = measure("relative_flatness", net, X, INDEX, layer=0, sample_weight=weights)
    data *= 100  # a buffer of the caller's, used again
    assert net.relative_flatness_ == pytest.approx(expected, rel=FLOAT32)
    assert np.isfinite(net.constant_comparison_.loss)


def _step(net, path):
    with torch.no_grad():
        net.module_.output.bias[-1] += 1  # the last number


def _load(net, path):
    net.save_params(f_params=path)
    _step(net, path)
    net.load_params(f_params=path)
    net.relative_flatness_  # noqa: B018  of the same weights as before
    clone(net).set_params(random_state=1).fit(X, INDEX).save_params(f_params=path)
    net.load_params(f_params=path)


CHANGES = {
    "load_params": _load,
    "in place": _step,
    "initialize": lambda net, path: net.initialize(),
    "set_params": lambda net, path: net.set_params(module__activation="tanh"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_measured_belongs_to_the_weights(change, tmp_path):
    net = make(max_epochs=1)
    with pytest.raises(AttributeError, match="has no relative_flatness_ before fit"):
        net.relative_flatness_  # noqa: B018
    before = net.fit(X, INDEX).relative_flatness_
    net.set_params(flatness_layer=0, criterion__weight=torch.tensor([1.0, 5.0, 1.0]))
    assert net.relative_flatness_ == before  # parameters of the measure change nothing
    net.set_params(flatness_layer=-1, criterion__weight=None)
    scorer = FlatnessScorer(data="train", non_minimum="accept")
    assert scorer(net, X, INDEX) == -before
    CHANGES[change](net, tmp_path / "weights.pt")
    for name in ("relative_flatness_", "constant_comparison_"):
        assert not hasattr(net, name)
    with pytest.raises(ValueError, match="the weights have changed since"):
        scorer(net, X, INDEX)
    assert net.fit(X, INDEX).relative_flatness_ > 0


@pytest.mark.parametrize("change", CHANGES)
def test_a_network_that_was_made_after_fit_is_measured_with_a_warning(change, tmp_path):
    net = make(max_epochs=1).fit(X, INDEX)
    CHANGES[change](net, tmp_path / "weights.pt")
    for measured in (relative_flatness, flatness_report):
        for ours in (net, make_pipeline("passthrough", net)):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                measured(ours, X, INDEX)
            made_again = any("initialised again" in str(warning.message) for warning in caught)
            assert made_again == (change in {"initialize", "set_params"})
    net.partial_fit(X, INDEX)
    relative_flatness(net, X, INDEX)


class _BatchSizes(nn.Module):
    """A linear network that notes the sizes of its batches."""

    def __init__(self, part=None):
        super().__init__()
        self.last, self.part = nn.LazyLinear(2), part or nn.Identity()
        self.sizes = []

    def forward(self, X):
        self.sizes.append(len(X))
        return self.last(self.part(X.flatten(1)))


@pytest.mark.parametrize(
    ("shape", "arguments", "sizes"),
    [
        ((20, 2), {}, [20]),
        ((1500, 3), {}, [1024, 476]),
        ((14, 1, 300, 500), {}, [6, 6, 2]),  # not more than 2**20 numbers
        ((7, 3, 400, 400), {}, [4, 3]),  # nor fewer than `batch_size` samples
        ((20, 2), {"iterator_valid__batch_size": 8}, [8, 8, 4]),
        ((20, 2), {"module__part": nn.BatchNorm1d(2, track_running_stats=False)}, [4] * 5),
        ((20, 2), {"module__part": nn.BatchNorm1d(2)}, [20]),
    ],
)
@pytest.mark.filterwarnings("ignore:batch norm without running statistics")
def test_predictions_are_made_in_large_batches_where_the_size_does_not_matter(
    shape, arguments, sizes
):
    inputs = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    net = make(module=_BatchSizes, max_epochs=0, batch_size=4, **arguments)
    net.fit(inputs, np.arange(len(inputs)) % 2).module_.sizes.clear()
    net.predict_proba(inputs)
    assert net.module_.sizes == sizes
    assert max(map(len, net.forward_iter(inputs, training=True))) == 4


@pytest.mark.parametrize("quantity", ["train_loss", "valid_loss", "flatness_penalty"])
def test_a_mean_over_an_epoch_is_that_over_its_samples(quantity):
    net = make(batch_size=4, max_epochs=2, train_split=ValidSplit(3)).fit(NUMBERED, HALVES)
    size = "valid_batch_size" if quantity == "valid_loss" else "train_batch_size"
    for epoch in net.history:
        batches = [batch for batch in epoch["batches"] if quantity in batch]
        columns = [[batch[name] for batch in batches] for name in (quantity, size)]
        assert len(set(columns[1])) == 2
        assert epoch[quantity] == pytest.approx(np.average(columns[0], weights=columns[1]))
