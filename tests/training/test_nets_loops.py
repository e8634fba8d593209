"""The regularised net in other training steps than skorch's plain one."""

import io
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from sklearn.base import clone
from skorch.callbacks import (
    Checkpoint,
    EpochScoring,
    TrainEndCheckpoint,
)
from skorch.dataset import ValidSplit
from torch import nn
from torch.testing import assert_close

from relflat_sk import FlatnessScorer, FlatnessWarning, relative_flatness
from tests.rounding import FLOAT32, rounding
from tests.training.common import (
    INDEX,
    NAMES,
    AccumulatingMixin,
    Classifier,
    Net,
    Recording,
    Regressor,
    X,
    criterion_of,
    in_bfloat16,
    make,
    same,
)

BF16 = 0.02  # bfloat16 has eight bits; the network's outputs are off by about 0.4%


def penalties(net):
    return np.array(net.history[:, "flatness_penalty"])


@pytest.mark.parametrize("layer", ["all", -1])
@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about its own insides
def test_compiled(layer):
    params = {"flatness_layer": layer, "flatness_weight": 1.0}
    net = make(compile=True, compile__backend="eager", **params).fit(X, NAMES)
    plain = make(**params).fit(X, NAMES)
    assert penalties(net) == pytest.approx(penalties(plain), rel=1e-4)
    assert net.predict_proba(X) == pytest.approx(plain.predict_proba(X), abs=1e-5)
    assert net.relative_flatness_ == pytest.approx(plain.relative_flatness_, rel=1e-4)
    found, truth = (relative_flatness(one, X, NAMES) for one in (net, plain))
    assert found == pytest.approx(truth, rel=1e-4)
    assert clone(net).fit(X, NAMES).predict(X).tolist() == net.predict(X).tolist()


class Own(nn.Module):
    """Not a container: code of this class is compiled once for all its instances."""

    def __init__(self, n_features, n_outputs):
        super().__init__()
        self.first, self.last = nn.Linear(n_features, 8), nn.Linear(8, n_outputs)

    def forward(self, x):
        return self.last(self.first(x).relu())


@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about its own insides
def test_a_penalty_that_starts_after_compilation():
    params = {"module": Own, "flatness_weight": 0, "optimizer": torch.optim.SGD}
    nets = [make(compile=True, compile__backend="eager", **params), make(**params)]
    for net in nets:
        net.fit(X, NAMES).set_params(flatness_weight=5.0).partial_fit(X, NAMES)
    assert (penalties(nets[0])[:3] == 0).all()
    assert penalties(nets[0])[3:] == pytest.approx(penalties(nets[1])[3:], rel=1e-4)


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
        x, y = batch
        with torch.autocast("cuda", dtype=torch.float16):
            y_pred = self.infer(x, **fit_params)
            loss = self.get_loss(y_pred, y, X=x, training=True)
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


def test_dropout_has_one_mask_for_loss_and_penalty():
    params = {"module": Recording, "max_epochs": 1, "optimizer": torch.optim.SGD, "lr": 1e-30}
    params |= {"flatness_clip": None, "iterator_train__shuffle": False}
    net = make(**params, flatness_weight=2.0).fit(X, NAMES)
    weight = net.module_.last.weight.detach()
    batches = list(net.history[0, "batches", :, ("train_loss", "flatness_penalty")])
    assert len(net.module_.seen) == len(batches) == 3
    for (loss, term), (features, logits, _), rows in zip(
        batches, net.module_.seen, torch.arange(42).split(16), strict=True
    ):
        p, targets = logits.softmax(dim=1), torch.tensor(INDEX)[rows]
        assert loss == pytest.approx(nn.functional.cross_entropy(logits, targets).item(), rel=1e-5)
        spread = (p @ weight.square() - (p @ weight).square()).sum(dim=1)
        kappa = (features.square().sum(dim=1) * spread).mean().item()
        assert term == pytest.approx(2.0 * kappa / (2 * 12), rel=1e-5)


@pytest.mark.parametrize("layer", [-1, 0])
def test_batch_norm_counts_each_step_once(layer):
    params = {"module": Recording, "optimizer": torch.optim.SGD, "lr": 1e-30}
    # the penalty's random probes would change the order of the next epoch
    params |= {"iterator_train__shuffle": False}
    net = make(**params, flatness_layer=layer).fit(X, NAMES)
    plain = make(**params, flatness_weight=0).fit(X, NAMES)
    assert net.module_.norm.num_batches_tracked == 9
    # the weights hardly move, so that the penalty could change nothing else
    for buffer, expected in zip(net.module_.buffers(), plain.module_.buffers(), strict=True):
        assert_close(buffer, expected, **rounding(9))


@pytest.mark.parametrize("split", [None, ValidSplit(3)], ids=["all", "split"])
@pytest.mark.parametrize("caching", [True, False])
def test_flatness_scorer_as_epoch_scoring(split, caching):
    scorer = FlatnessScorer(non_minimum="accept")
    flatness = EpochScoring(
        scorer, name="flatness", on_train=split is None, lower_is_better=False, use_caching=caching
    )
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
    """Labels that are not one array."""

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
    losses = net.history[:, "train_loss"]
    assert losses[-1] < losses[0]
    assert (penalties(net) > 0).all() == (weight > 0)
    assert np.isnan(net.relative_flatness_)
