"""Losses of a network with its data, and that the network is given back as it was."""

from functools import partial
from itertools import product

import pytest
import torch
from joblib import Parallel, delayed
from torch import nn
from torch.nn import functional as F

from relflat_sk import (
    feature_robustness,
    flatness_report,
    label_constancy,
    layer_sensitivity,
    measure,
    relative_flatness,
)
from relflat_sk._losses.loss import Loss
from relflat_sk._network.batches import make_batches
from relflat_sk._network.network import Network, mean_loss
from tests import oracles
from tests.cases import Net

CE = nn.CrossEntropyLoss()
LAYER_WISE = ["normalized_relative_flatness", "neuron_flatness_max", "gradient_norm"]


class Rude(nn.Module):
    """Counts its calls in a buffer, replaces another, and uses up random numbers."""

    def __init__(self, fails=False):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))
        self.out = nn.Linear(6, 3)
        self.fails = fails
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()))
        self.register_buffer("nothing", None)
        sparse = torch.eye(3).to_sparse()  # cannot be compared
        self.register_buffer("graph", sparse, persistent=False)

    def forward(self, x):
        self.calls += 1
        self.last = torch.rand(())
        z = self.out(self.body(x))
        if self.fails and self.calls > 1:
            raise RuntimeError("in the middle")
        return z


def state_of(net):
    tensors = {
        **net.state_dict(),
        "random numbers": torch.get_rng_state(),
        **{f"gradient of {name}": p.grad for name, p in net.named_parameters()},
    }
    others = [
        [m.training for m in net.modules()],
        [p.requires_grad for p in net.parameters()],
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules()],
        ["forward" in vars(m) for m in net.modules()],
        torch.is_grad_enabled(),
        (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        [id(buffer) for buffer in net.buffers()],
    ]
    return {name: None if one is None else one.clone() for name, one in tensors.items()}, others


def same(one, two):
    assert one[1] == two[1]
    assert one[0].keys() == two[0].keys()
    for name, expected in one[0].items():
        found = two[0][name]
        assert found is expected is None or torch.equal(found, expected), name


def prepared(fails=False):
    torch.manual_seed(0)
    net = Rude(fails)
    X, y = torch.randn(10, 4), torch.arange(10) % 3
    net.train()
    net.body[2].eval()  # a mixture of modes
    net.body[0].weight.requires_grad_(False)
    if not fails:
        CE(net(X), y).backward()
    return net, X, y


def square_of_outputs(model, X, y):
    return model(X).square().sum().item()


@pytest.mark.parametrize(
    "compute",
    [
        lambda *data, **settings: flatness_report(*data, measures=LAYER_WISE, **settings).to_dict(),
        partial(measure, "fisher_rao_norm"),
        partial(measure, "expected_sharpness", random_state=0),
        partial(measure, "inverse_margin", percentile=100),
        partial(measure, square_of_outputs),
        partial(feature_robustness, delta=0.1, random_state=0),
        label_constancy,
        partial(layer_sensitivity, random_state=0),
    ],
    ids=["report", "slopes", "noise", "margin", "own", "features", "labels", "sensitivity"],
)
def test_the_caller_s_settings_do_not_reach_measures(compute):
    net, X, y = prepared()
    expected = compute(net, X, y, criterion=CE)
    with torch.device("meta"):  # a default device that is not the network's
        assert repr(compute(net, X, y, criterion=CE)) == repr(expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert repr(compute(net, X, y, criterion=CE)) == repr(expected)
        assert net(X).dtype == torch.bfloat16


def test_the_user_s_criterion_is_not_moved():
    net, X, y = prepared()
    criterion = nn.CrossEntropyLoss(weight=torch.ones(3))
    weight = criterion.weight
    relative_flatness(net.double(), X.double(), y, criterion=criterion)
    assert criterion.weight is weight
    assert weight.dtype == torch.float32


def test_a_criterion_keeps_its_reduction():
    def loss(output, target):
        return nn.functional.mse_loss(output, target, reduction="none")

    loss.reduction = "mean"
    X, weight = torch.randn(4, 3).double(), torch.tensor([1.0, 2.0, 0.0, 1.0])
    y = torch.rand(4, 3).double().softmax(dim=1)
    net = nn.Sequential(nn.Linear(3, 3), nn.LogSoftmax(dim=1)).double()
    divergence = nn.KLDivLoss(reduction="batchmean")
    for criterion, each in (
        (divergence, nn.functional.kl_div(net(X).detach(), y, reduction="none").sum(dim=1)),
        (loss, loss(net(X).detach(), y).mean(dim=1)),
    ):
        network = Network(net, Loss(criterion), make_batches(X, y, sample_weight=weight))
        assert mean_loss(network) == pytest.approx(float(weight.double() @ each / weight.sum()))
    assert (divergence.reduction, loss.reduction) == ("batchmean", "mean")


def test_threads_may_measure_networks_with_a_part_in_common():
    torch.manual_seed(0)
    common, X, y = nn.Linear(6, 4), torch.randn(50, 6), torch.arange(50) % 3
    heads = [nn.Sequential(nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)) for _ in range(2)]
    nets = [nn.Sequential(common, head) for head in heads]

    def value(net, name):
        return measure(name, net, X, y, criterion=CE, random_state=0)

    names = ["relative_flatness", "expected_sharpness", "fisher_rao_norm"]
    jobs = [(net, name) for name in names for net in [*nets, *nets]]
    in_order = [value(*job) for job in jobs]
    assert Parallel(4, backend="threading")(delayed(value)(*job) for job in jobs) == in_order
    assert all(net.training for net in nets)


class LowRank(nn.Linear):
    """Adds B A to its weight in evaluation mode, as loralib does."""

    def __init__(self, n_in, n_out, replaces=False):
        super().__init__(n_in, n_out)
        self.A, self.B = nn.Parameter(torch.randn(2, n_in)), nn.Parameter(torch.randn(n_out, 2))
        self.merged, self.replaces = False, replaces

    def merge(self, weight):
        if self.replaces:
            self.weight = nn.Parameter(weight)
        else:
            self.weight.data += (weight - self.weight).detach()

    def train(self, mode=True):
        super().train(mode)
        if mode == self.merged:
            self.merge(self.weight + (-1 if mode else 1) * (self.B @ self.A))
            self.merged = not mode
        return self

    def forward(self, x):
        z = F.linear(x, self.weight, self.bias)
        return z if self.merged else z + x @ self.A.T @ self.B.T


class OtherMemory(LowRank):
    """Merges into memory of its own."""

    def merge(self, weight):
        self.weight.data = weight.detach()


class Adapters(nn.Module):
    """Switches the layer inside it, whose own class does not switch."""

    def __init__(self):
        super().__init__()
        self.base, self.A = nn.Linear(5, 6), nn.Parameter(torch.randn(6, 5))

    def train(self, mode=True):
        if mode != self.training:
            self.base.weight.data.add_(self.A.data, alpha=-1 if mode else 1)
        return super().train(mode)

    def forward(self, x):
        return self.base(x) + (x @ self.A.T if self.training else 0)


class FrozenNorm(nn.Sequential):
    def train(self, mode=True):
        super().train(mode)
        self[1].eval()
        return self


class BufferOfEval(nn.Linear):
    """Counts its switches, and caches its weight."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("cache", torch.zeros(6, 5))
        self.register_buffer("switches", torch.zeros(()))

    def eval(self):
        self.switches += 1
        self.cache = self.weight.detach().clone()
        return super().eval()


class Renormalised(nn.Module):
    """Limits norms in the forward pass, which changes the weight."""

    def __init__(self, **options):
        super().__init__()
        self.embedding = nn.Embedding(9, 6, max_norm=0.5, **options)

    def forward(self, x):
        return self.embedding((9 * x.sigmoid()).long()).mean(dim=1)


KINDS = {
    "merged": lambda: LowRank(5, 6),
    "merged into new parameters": lambda: LowRank(5, 6, replaces=True),
    "merged into other memory": lambda: OtherMemory(5, 6),
    "switches a child": Adapters,
    "merged, inside": lambda: nn.Sequential(nn.Dropout(0.5), LowRank(5, 6)),
    "eval alone": lambda: BufferOfEval(5, 6),
    "frozen norm": lambda: FrozenNorm(nn.Linear(5, 6), nn.BatchNorm1d(6)),
    "batch norm": lambda: nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.2)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(5, 6)),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(5, 6)),
    "renormalised": lambda: Renormalised(sparse=False),
    "renormalised, sparse": lambda: Renormalised(sparse=True),
    # holds a second list of its weights, beside the parameters
    "recurrent": lambda: Net(lambda net, x: net.body(x[:, None])[0][:, 0], body=nn.LSTM(5, 6)),
}


def with_head(layer):
    dtype = next(layer.parameters()).dtype
    return nn.Sequential(layer, nn.ReLU(), nn.Linear(6, 3, dtype=dtype)).train()


def data():
    return torch.randn(8, 5), torch.arange(8) % 3


def named_tensors(net):
    named = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    return {
        name: (tensor, tensor._version, tensor.data_ptr(), tensor.detach().clone())
        for name, tensor in named.items()
    }


@pytest.mark.parametrize("modes", ["training", "head in evaluation", "first in evaluation"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *product(KINDS, ["relative_flatness", "expected_sharpness"]),
        ("recurrent", "fisher_rao_norm"),
    ],
)
def test_every_kind_of_module_comes_back_as_it_was(kind, modes, name):
    net, (X, y) = with_head(KINDS[kind]()), data()
    if modes != "training":
        net[0 if modes.startswith("first") else 2].eval()
    before, of_parts = named_tensors(net), [part.training for part in net.modules()]
    measure(name, net, X, y, criterion=CE)
    after = named_tensors(net)
    assert torch.backends.mkldnn.enabled
    assert list(after) == list(before)
    assert [part.training for part in net.modules()] == of_parts
    for key, (tensor, version, memory, numbers) in before.items():
        assert after[key][0] is tensor, key
        assert after[key][2] == memory, key
        assert torch.equal(after[key][3], numbers), key
        # eval() counts in place, and a pass limits norms in place
        assert after[key][1] == version or key in {"0.switches", "0.embedding.weight"}, key
    CE(net(X), y).backward()
    switches = modes != "first in evaluation"
    for key, parameter in net.named_parameters():
        is_factor = key.rpartition(".")[2] in {"A", "B"}
        assert parameter.grad is not None or (is_factor and not switches), key


def test_the_weight_of_evaluation_mode_is_measured():
    net, merged = (with_head(layer(5, 6).double()) for layer in (LowRank, nn.Linear))
    merged.load_state_dict(net.state_dict(), strict=False)
    merged[0].weight.data += (net[0].B @ net[0].A).detach()
    X, y = torch.randn(8, 5).double(), torch.arange(8) % 3
    expected = oracles.relative_flatness(merged, "0", CE, X, y)
    found = relative_flatness(net, X, y, criterion=CE, layer=0)
    assert found == pytest.approx(expected, rel=1e-9)
    for name in ("fisher_rao_norm", "joint_eigenvalue_flatness", "keskar_sharpness"):
        options = {"criterion": CE, "random_state": 0}
        found, expected = (measure(name, net.train(m), X, y, **options) for m in (True, False))
        assert found == pytest.approx(expected, rel=1e-6)


def test_modules_that_switch_come_back_after_an_exception():
    torch.manual_seed(0)
    net, (X, y) = LowRank(5, 3).train(), data()
    before = net.weight.detach().clone()
    with pytest.raises(RuntimeError, match="shapes"):
        relative_flatness(net, X[:, :4], y, criterion=CE)
    assert (net.training, net.merged) == (True, False)
    assert torch.equal(net.weight, before)
