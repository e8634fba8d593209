"""One of two processes with uneven shards of the data."""

import os
import pickle
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from relflat_sk import FlatnessScorer, flatness_report, measure, relative_flatness

CE = nn.CrossEntropyLoss()
N, CUT = 50, 37
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 6))
Y = (X[:, :3] + 0.3 * RNG.normal(size=(N, 3))).argmax(axis=1)
WEIGHTS = RNG.uniform(size=N)
SHARDS = [slice(0, CUT), slice(CUT, N)]
PARAMS = {"random_state": 3, "n_draws": 2, "n_steps": 3, "batch_size": 8, "percentile": 60}


def network(kind):
    torch.manual_seed(0)
    activation = {"tanh": nn.Tanh, "relu": nn.ReLU}[kind]()
    net = nn.Sequential(nn.Linear(6, 5), activation, nn.Linear(5, 3)).double()
    with torch.no_grad():
        net[2].weight.copy_(2 * net[2].weight)
    return net


def report(kind, rows, **params):
    """Measure everything at all layers; what does not apply to the network is nan."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return flatness_report(network(kind), X[rows], Y[rows], criterion=CE, **PARAMS, **params)


def weighted(rows, **params):
    names = ["relative_flatness", "normalized_relative_flatness", "fisher_rao_norm"]
    params |= {"measures": names, "criterion": CE, "sample_weight": WEIGHTS[rows]}
    return flatness_report(network("relu"), X[rows], Y[rows], **params)


def at_equal_loss(rows, **params):
    """Measure on the labels that the network predicts, whose loss it reaches."""
    net = network("relu")
    labels = net(torch.from_numpy(X)).argmax(dim=1)[rows]
    names = ["relative_flatness", "comparable_flatness"]
    return flatness_report(
        net, X[rows], labels, measures=names, criterion=CE, at_loss=0.2, **params
    )


def score(labels, rows, **params):
    """Score a network that beats the best constant, or one that does not."""
    scorer = FlatnessScorer(measure_params={"criterion": CE, **params}, non_minimum="warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value = scorer(network("relu"), X[rows], labels[rows])
    return value, [str(one.message) for one in caught]


def drawn(rows, seed, **params):
    """Estimate flatness and its standard error with four probes for each sample."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the large standard error
        params |= {"method": "hutchinson", "n_probes": 4, "rtol": 1e-9, "random_state": seed}
        options = {"layer": 0, "criterion": CE, "return_stderr": True}
        return relative_flatness(network("tanh"), X[rows], Y[rows], **options, **params)


def loader(rows):
    pairs = TensorDataset(torch.from_numpy(X[rows]), torch.from_numpy(Y[rows]))
    return DataLoader(pairs, batch_size=5)


def error(call):
    try:
        call()
    except (Exception, KeyboardInterrupt) as caught:
        return f"{type(caught).__name__}: {caught}"
    return "none"


def errors(rank):
    rows, world = SHARDS[rank], {"process_group": "world", "criterion": CE}
    broken = np.where((rank if rank else 9) == Y, np.nan, Y)[rows]  # in the second process only
    other, permuted = network("relu"), network("relu")
    normed = nn.Sequential(network("relu"), nn.BatchNorm1d(3).double(), nn.Linear(3, 3).double())
    numbers = torch.arange(30.0).reshape(5, 6)
    with torch.no_grad():
        other[0].bias += rank
        permuted[0].weight.copy_(numbers.flip(0) if rank else numbers)
        for parameter in normed.parameters():
            parameter.fill_(0.5)
        normed[1].running_mean += rank  # as data parallelism leaves it
    none = slice(0, 0) if rank else rows
    part = dist.new_group([0])
    net, data, name = network("relu"), (X[rows], Y[rows]), ["l2_norm", "fisher_rao_norm"][rank]
    calls = {
        "one process": lambda: relative_flatness(net, X[rows], broken, **world),
        "weights": lambda: relative_flatness(other, *data, **world),
        "permuted": lambda: relative_flatness(permuted, *data, **world),
        "buffers": lambda: relative_flatness(normed, *data, **world),
        "empty": lambda: relative_flatness(net, X[none], Y[none], **world),
        "terms": lambda: relative_flatness(net, *data, per_sample=True, **world),
        "own": lambda: measure(own_measure, net, *data, **world),
        "order": lambda: measure(name, net, *data, **world),
        "ctrl-c": lambda: relative_flatness(Interrupted(rank), *data, layer="last", **world),
        "kind": lambda: relative_flatness(net, X, Y, process_group=3),
        "outside": lambda: relative_flatness(net, X, Y, process_group=part),
    }
    found = {what: error(call) for what, call in calls.items()}
    return {**found, "afterwards": relative_flatness(net, *data, **world)}


class Interrupted(nn.Module):
    """Ctrl-C comes while the second process runs its network."""

    def __init__(self, rank):
        super().__init__()
        self.last = nn.Linear(6, 3).double()
        self.rank = rank

    def forward(self, x):
        if self.rank:
            raise KeyboardInterrupt
        return self.last(x)


def own_measure(model, X, y):
    return 0.0


def main(rank, folder):
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2)
    rows, world, net = SHARDS[rank], {"process_group": "world"}, network("relu")
    found = {
        "tanh": report("tanh", rows, **world),
        "relu": report("relu", rows, **world),
        "weighted": weighted(rows, **world),
        "equal loss": at_equal_loss(rows, **world),
        "scores": score(Y, rows, **world),
        "no minimum": score(RNG.permutation(Y), rows, **world),
        "drawn": drawn(rows, 5, **world),
        "unseeded": measure(
            "expected_sharpness", net, X[rows], Y[rows], criterion=CE, n_draws=2, **world
        ),
        "group": relative_flatness(
            nn.parallel.DistributedDataParallel(network("relu")),
            X[rows],
            Y[rows],
            criterion=CE,
            process_group=dist.group.WORLD,
        ),
        "loader": relative_flatness(net, loader(rows), criterion=CE, **world),
        "errors": errors(rank),
    }
    Path(folder, f"{rank}.pkl").write_bytes(pickle.dumps(found))
    os._exit(0)  # threads of gloo can abort a process that ends under load
