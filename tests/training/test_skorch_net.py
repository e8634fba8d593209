"""Nets in skorch's loop and in other training steps: order, optimizers, precision, measures."""

import io
import os
import pickle
import subprocess
import sys
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from skorch.callbacks import Callback, Checkpoint, EpochScoring, TrainEndCheckpoint
from skorch.dataset import Dataset as SkorchDataset
from skorch.dataset import ValidSplit
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, SequentialSampler

from relflat_sk import (
    MLP,
    FlatnessScorer,
    FlatnessWarning,
    flatness_report,
    measure,
    relative_flatness,
)
from relflat_sk.training._after_fit import measured_later
from tests.rounding import FLOAT32, rounding
from tests.training.common import (
    INDEX,
    NAMES,
    AccumulatingMixin,
    Classifier,
    Net,
    Regressor,
    X,
    criterion_of,
    in_bfloat16,
    make,
    results_of,
    same,
)

N = 20
# each sample says its own number
NUMBERED = np.stack([np.arange(N), np.ones(N)], axis=1).astype(np.float32)
HALVES = np.arange(N) % 2


class Orders(Callback):
    """Record the numbers of the samples of each epoch."""

    def initialize(self):
        self.epochs = {True: [], False: []}

    def on_epoch_begin(self, net, **kwargs):
        for epochs in self.epochs.values():
            epochs.append([])

    def on_batch_begin(self, net, batch=None, training=False, **kwargs):
        self.epochs[training][-1] += batch[0][:, 0].int().tolist()


def orders_of(**arguments):
    orders = Orders()
    make(batch_size=4, callbacks=[orders], **arguments).fit(NUMBERED, HALVES)
    return orders.epochs


def test_batches_are_shuffled_each_epoch():
    epochs = orders_of()[True]
    assert all(sorted(epoch) == list(range(N)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, range(N)]}) == 4
    assert orders_of()[True] == epochs
    assert orders_of(random_state=1)[True] != epochs


def test_order_is_kept_in_validation_and_prediction():
    split = ValidSplit(4)
    held_out = split(SkorchDataset(NUMBERED, HALVES), HALVES)[1].indices
    assert orders_of(train_split=split)[False] == [list(held_out)] * 3
    net = make()
    batches = [batch[:, 0] for batch, _ in net.get_iterator(net.get_dataset(NUMBERED))]
    assert torch.cat(batches).tolist() == list(range(N))
    search = GridSearchCV(net, {"iterator_train__shuffle": [True, False]}, cv=2)
    assert np.isfinite(search.fit(NUMBERED, HALVES).cv_results_["mean_test_score"]).all()


class OwnLoader(DataLoader):
    def __init__(self, dataset, batch_size):
        super().__init__(dataset, batch_size=batch_size)


IN_ORDER = [
    {"iterator_train__shuffle": False},
    {"iterator_train__sampler": SequentialSampler(range(N))},
    {"iterator_train": OwnLoader},
]


@pytest.mark.parametrize("arguments", IN_ORDER)
def test_order_is_kept_on_demand(arguments):
    assert orders_of(**arguments)[True] == [list(range(N))] * 3


def optimizer_of(optimizer, module=None, **arguments):
    return make(module=module or nn.Linear(2, 2), optimizer=optimizer, **arguments).initialize()


class OwnAdam(torch.optim.Adam):
    pass


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_optimizers_are_fused_unless_another_implementation_is_chosen(name):
    groups = {"optimizer__param_groups": [("bias", {"lr": 0.5})]}
    optimizer = optimizer_of(getattr(torch.optim, name), **groups).optimizer_
    assert type(optimizer) is getattr(torch.optim, name)
    assert [group["fused"] for group in optimizer.param_groups] == [True, True]
    assert optimizer.param_groups[0]["lr"] == 0.5
    for choice in ({"fused": False}, {"foreach": True}, {"foreach": False}):
        arguments = {f"optimizer__{key}": value for key, value in choice.items()}
        group = optimizer_of(getattr(torch.optim, name), **arguments).optimizer_.param_groups[0]
        assert not group["fused"]
        assert choice.items() <= group.items()


OTHER_OPTIMIZERS = {
    "RMSprop": (torch.optim.RMSprop, None),
    "NAdam": (torch.optim.NAdam, None),
    "own": (OwnAdam, None),
    "half precision": (torch.optim.SGD, nn.Linear(2, 2).bfloat16()),
    "sparse gradients": (torch.optim.SGD, nn.Embedding(3, 2, sparse=True)),
}


@pytest.mark.parametrize("name", OTHER_OPTIMIZERS)
def test_other_optimizers_are_left_alone(name):
    assert not optimizer_of(*OTHER_OPTIMIZERS[name]).optimizer_.param_groups[0].get("fused")


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


def _load(net, path):
    net.save_params(f_params=path)
    net.module_.output.bias.data += 1
    net.load_params(f_params=path)
    net.relative_flatness_  # noqa: B018  of the same weights as before
    clone(net).set_params(random_state=1).fit(X, INDEX).save_params(f_params=path)
    net.load_params(f_params=path)


CHANGES = {
    "load_params": _load,
    "in place": lambda net, path: net.module_.output.bias[-1].data.add_(1),  # the last number
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
@pytest.mark.parametrize("measured", [relative_flatness, flatness_report])
@pytest.mark.parametrize("wrap", [lambda net: net, partial(make_pipeline, "passthrough")])
def test_a_network_made_after_fit_is_measured_with_a_warning(change, measured, wrap, tmp_path):
    net = make(max_epochs=1).fit(X, INDEX)
    CHANGES[change](net, tmp_path / "weights.pt")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        measured(wrap(net), X, INDEX)
    made_again = any("initialised again" in str(warning.message) for warning in caught)
    assert made_again == (change in {"initialize", "set_params"})
    net.partial_fit(X, INDEX)
    relative_flatness(net, X, INDEX)  # warnings are errors


class BatchSizes(nn.Module):
    def __init__(self, part=None):
        super().__init__()
        self.last, self.part = nn.LazyLinear(2), part or nn.Identity()
        self.sizes = []

    def forward(self, X):
        self.sizes.append(len(X))
        return self.last(self.part(X.flatten(1)))


BATCHES = [  # shapes of data, and of the batches
    ((20, 2), {}, [20]),
    ((1500, 3), {}, [1024, 476]),
    ((14, 1, 300, 500), {}, [6, 6, 2]),  # not more than 2**20 numbers
    ((7, 3, 400, 400), {}, [4, 3]),  # nor fewer than `batch_size` samples
    ((20, 2), {"iterator_valid__batch_size": 8}, [8, 8, 4]),
    ((20, 2), {"module__part": nn.BatchNorm1d(2, track_running_stats=False)}, [4] * 5),
    ((20, 2), {"module__part": nn.BatchNorm1d(2)}, [20]),
]


@pytest.mark.parametrize(("shape", "arguments", "sizes"), BATCHES)
@pytest.mark.filterwarnings("ignore:batch norm without running statistics")
def test_predictions_are_made_in_large_batches_where_they_may_be(shape, arguments, sizes):
    inputs = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    net = make(module=BatchSizes, max_epochs=0, batch_size=4, **arguments)
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


BF16 = 0.02  # bfloat16 has eight bits; the network's outputs are off by about 0.4%


def penalties(net):
    return np.array(net.history[:, "flatness_penalty"])


class Own(nn.Module):
    """Not a container: code of this class is compiled once for all its instances."""

    def __init__(self, n_features, n_outputs):
        super().__init__()
        self.first, self.last = nn.Linear(n_features, 8), nn.Linear(8, n_outputs)

    def forward(self, x):
        return self.last(self.first(x).relu())


@pytest.mark.parametrize("module", [MLP, Own])
@pytest.mark.parametrize("layer", ["all", -1])
@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about its own insides
def test_compiled_also_with_a_penalty_that_starts_later(module, layer):
    params = {"module": module, "flatness_layer": layer, "flatness_weight": 0}
    compiled = clone(make(compile=True, compile__backend="eager", **params))
    nets = compiled, make(**params)
    for net in nets:
        net.fit(X, NAMES).set_params(flatness_weight=1.0).partial_fit(X, NAMES)
    assert_close(*map(results_of, nets), rtol=1e-4, atol=1e-5)
    measured = [relative_flatness(net, X, NAMES) for net in nets]
    assert measured[0] == pytest.approx(measured[1], rel=1e-4)
    assert (penalties(compiled)[3:] > 0).all()


class GraphLog:
    """A backend of torch.compile that notes for each graph and run whether gradients are on."""

    def __init__(self):
        self.graphs, self.runs = [], []

    def __call__(self, graph, inputs):
        if "linear" not in graph.code:  # the criterion's
            return graph.forward
        self.graphs.append(torch.is_grad_enabled())

        def run(*args):
            self.runs.append(torch.is_grad_enabled())
            return graph.forward(*args)

        return run


@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about its own insides
def test_predictions_and_steps_without_a_penalty_are_compiled():
    torch._dynamo.reset()
    backend = GraphLog()
    params = {"flatness_weight": 1.0, "batch_size": 14, "max_epochs": 2}
    net = make(module=Own, compile=True, compile__backend=backend, **params).fit(X, NAMES)
    assert len(X) == 3 * 14
    assert backend.runs.count(True) == 0
    net.predict(X)
    assert backend.runs.count(False) > 0
    net.set_params(flatness_weight=0).partial_fit(X, NAMES)
    assert backend.runs.count(True) >= 3


# the step under autocast, as in skorch's accelerate mixin, and the forward pass alone, as torch
# recommends
CAST = [in_bfloat16(Classifier, method) for method in ("train_step_single", "infer")]


@pytest.mark.parametrize("layer", [-1, "hidden0"])
@pytest.mark.parametrize("kind", CAST, ids=["step", "forward"])
def test_bfloat16(kind, layer, device):
    params = {"flatness_layer": layer, "flatness_weight": 1.0, "lr": 1e-3, "device": device}
    net, plain = make(kind, **params).fit(X, NAMES), make(**params).fit(X, NAMES)
    assert penalties(net) == pytest.approx(penalties(plain), rel=3 * BF16)
    assert net.history[-1, "train_loss"] == pytest.approx(plain.history[-1, "train_loss"], rel=BF16)
    assert net.relative_flatness_ == pytest.approx(plain.relative_flatness_, rel=3 * BF16)
    assert net.predict_proba(X) == pytest.approx(plain.predict_proba(X), abs=BF16)
    assert net.predict_proba(X).dtype == np.float32


def test_bfloat16_targets_keep_their_digits():
    y = 1000 + np.arange(42, dtype=np.float32) / 16  # steps of 1/16 need 14 bits
    net = make(in_bfloat16(Regressor, "infer"), max_epochs=0).fit(X, y)
    inputs, targets = torch.tensor(X), torch.tensor(y)[:, None]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        output = net.module_(inputs)
    assert output.dtype == torch.bfloat16
    expected = (output.float() - targets).square().mean().item()
    for given in (output, net.infer(inputs)):
        assert net.get_loss(given, targets).item() == pytest.approx(expected, rel=FLOAT32)


class Scaled(Classifier):
    """Float16 with a gradient scaler, by hand."""

    def train_step(self, batch, **fit_params):
        self._zero_grad_optimizer()
        self._set_training(True)
        with torch.autocast("cuda", dtype=torch.float16):
            y_pred = self.infer(batch[0], **fit_params)
            loss = self.get_loss(y_pred, batch[1], X=batch[0], training=True)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer_)
        self.scaler.update()
        return {"loss": loss, "y_pred": y_pred}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("layer", [-1, "hidden0"])
def test_float16_with_a_scaler(layer):
    Scaled.scaler = torch.amp.GradScaler("cuda", init_scale=1024)
    params = {"flatness_layer": layer, "flatness_weight": 1.0, "lr": 1e-3, "device": "cuda"}
    net, plain = make(Scaled, **params).fit(X, NAMES), make(**params).fit(X, NAMES)
    assert penalties(net) == pytest.approx(penalties(plain), rel=BF16)
    assert net.predict_proba(X) == pytest.approx(plain.predict_proba(X), abs=BF16)


class Accumulating(AccumulatingMixin, Classifier):
    pass


@pytest.mark.parametrize("weights", [None, np.full(42, 2.0)], ids=["plain", "weighted"])
# a get_loss of the user's own tells no samples apart, as measuring with weights would need
@pytest.mark.filterwarnings("ignore:relative_flatness_ could not be measured")
def test_gradients_that_accumulate_are_those_of_a_larger_batch(weights):
    params = {"max_epochs": 4, "optimizer": torch.optim.SGD, "lr": 0.1, "flatness_weight": 1.0}
    params["flatness_clip"] = None  # the limit is that of each batch
    net = make(Accumulating, batch_size=14, **params).fit(X, NAMES, sample_weight=weights)
    whole = make(batch_size=42, **params).fit(X, NAMES)
    same(net, whole, rtol=1e-4, atol=1e-6)
    assert penalties(net) == pytest.approx(penalties(whole), rel=1e-4)
    # the loss of a step is a third, but what is recorded is the loss
    assert net.history[0, "train_loss"] == pytest.approx(whole.history[0, "train_loss"], rel=1e-4)


@pytest.mark.parametrize("split", [None, ValidSplit(3)], ids=["all", "split"])
@pytest.mark.parametrize("caching", [True, False])
def test_flatness_scorer_as_epoch_scoring(split, caching):
    scorer = FlatnessScorer(non_minimum="accept")
    options = {"on_train": split is None, "lower_is_better": False, "use_caching": caching}
    flatness = EpochScoring(scorer, name="flatness", **options)
    net = make(callbacks=[flatness], train_split=split).fit(X, NAMES)
    rows = np.arange(42) if split is None else split(net.get_dataset(X, INDEX))[1].indices
    truth = relative_flatness(net, X[rows], NAMES[rows])
    assert net.history[-1, "flatness"] == pytest.approx(-truth, rel=FLOAT32)
    assert len(net.history[:, "flatness"]) == 3


def test_checkpoints_come_back(tmp_path):
    split = ValidSplit(3)
    best = Checkpoint(dirname=tmp_path, monitor="valid_loss_best", load_best=True)
    end = TrainEndCheckpoint(dirname=tmp_path, fn_prefix="end_")
    params = {"train_split": split, "max_epochs": 12, "lr": 0.3}
    net = make(callbacks=[best, end], **params).fit(X, NAMES)
    losses = net.history[:, "valid_loss"]
    chosen = make(**{**params, "max_epochs": int(np.argmin(losses)) + 1}).fit(X, NAMES)
    same(net, chosen)
    # measured on what is given back, not on the last epoch
    assert net.relative_flatness_ == pytest.approx(chosen.relative_flatness_, rel=1e-9)

    loaded = make(**{**params, "max_epochs": 0}).fit(X, NAMES)
    loaded.load_params(f_params=tmp_path / "end_params.pt")
    same(loaded, net)


def test_training_goes_on_from_saved_parameters():
    params = {"optimizer__betas": (0.5, 0.9), "flatness_layer": "hidden0"}
    files = {name: io.BytesIO() for name in ("f_params", "f_optimizer", "f_criterion")}
    net = make(**params).fit(X, NAMES)
    net.save_params(**files)
    for file in files.values():
        file.seek(0)
    other = make(**params, max_epochs=0).fit(X, NAMES)
    other.load_params(**files)
    assert other.predict_proba(X).tolist() == net.predict_proba(X).tolist()
    # the limit of the penalty knows the steps before
    states = [one._penalty_limit().__getstate__() for one in (other, net)]
    assert_close(*states, rtol=0, atol=0, equal_nan=True)
    assert net._penalty_limit().steps == 9
    state = torch.get_rng_state()
    for trained in (net, other):
        torch.manual_seed(1)
        trained.set_params(max_epochs=2, random_state=None).partial_fit(X, NAMES)
    torch.set_rng_state(state)
    same(net, other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_what_cuda_trained_the_cpu_loads(tmp_path):
    net = make(device="cuda", flatness_layer="hidden0").fit(X, NAMES, sample_weight=np.arange(42.0))
    file = tmp_path / "net"
    file.write_bytes(pickle.dumps([net, X, NAMES, net.predict_proba(X)]))
    code = (
        "import pickle, sys, warnings, numpy as np, torch\n"
        "from relflat_sk import relative_flatness\n"
        "warnings.simplefilter('ignore')\n"
        "assert not torch.cuda.is_available()\n"
        "net, X, y, expected = pickle.load(open(sys.argv[1], 'rb'))\n"
        "np.testing.assert_allclose(net.predict_proba(X), expected, atol=1e-5)\n"
        "assert relative_flatness(net, X, y) > 0\n"
        "net.set_params(max_epochs=1).partial_fit(X, y)\n"
    )
    without_cuda = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", code, str(file)], env=without_cuda, check=True)


@pytest.mark.parametrize(
    ("layer", "weights", "precision"),
    [(-1, None, "no"), ("hidden0", np.arange(42), "no"), (-1, None, "bf16")],
)
def test_accelerate(accelerated, layer, weights, precision):
    params = {"flatness_layer": layer, "flatness_weight": 1.0, "lr": 1e-3}
    net = accelerated(mixed_precision=precision, **params).fit(X, NAMES, sample_weight=weights)
    plain = make(**params).fit(X, NAMES, sample_weight=weights)
    if precision == "no":
        same(net, plain, **rounding(9))
    assert penalties(net) == pytest.approx(penalties(plain), rel=3 * BF16)
    assert net.predict_proba(X) == pytest.approx(plain.predict_proba(X), abs=BF16)


class Parts(torch.utils.data.Dataset):
    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        return X[i], {"half": X[i, :1] / 2, "rest": X[i, 1:2]}


PartsLoss = criterion_of(lambda z, y: (z - y["half"] - y["rest"]).square().mean())


@pytest.mark.parametrize("weight", [0.0, 0.1])
def test_labels_of_a_criterion_of_ones_own_may_be_anything(weight):
    params = {"criterion": PartsLoss, "flatness_weight": weight, "flatness_clip": None}
    net = make(Net, module=nn.Linear(4, 1), max_epochs=5, **params)
    with pytest.warns(FlatnessWarning) as caught:
        net.fit(Parts())
    *unchecked, unmeasured = (str(warning.message) for warning in caught)
    assert "must form one array, got a dict" in unmeasured
    assert len(unchecked) == bool(weight)
    assert all("could not be checked that Own" in message for message in unchecked)
    assert net.history[-1, "train_loss"] < net.history[0, "train_loss"]
    assert (penalties(net) > 0).all() == (weight > 0)
    assert np.isnan(net.relative_flatness_)
