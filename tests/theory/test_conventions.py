"""What all functions of the theory promise: they change nothing, can be repeated, and refuse."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from relflat_sk import LayerNotFoundError, theory
from relflat_sk.theory import Smoothing
from tests.network.test_network import same, state_of
from tests.theory.problems import CE, network

# arguments of each function beside model, data and criterion
FUNCTIONS = {
    "feature_robustness": {"delta": 0.5, "n_draws": 2},
    "generalization_bound": {"n_splits": 2, "n_draws": 2},
    "label_constancy": {"by": "loss"},
    "neuron_robustness": {"delta": 0.5},
    "pac_bayes_bound": {"sigmas": [0.5], "n_draws": 5},
    "representativeness": {"n_splits": 2, "n_draws": 2},
    "sharpness_bound": {"sigma": 0.1},
    "worst_feature_robustness": {"delta": 0.5, "n_steps": 1},
}
RANDOM = sorted(FUNCTIONS.keys() - {"label_constancy", "sharpness_bound", "neuron_robustness"})
OF_LAYERS = sorted(FUNCTIONS.keys() - {"pac_bayes_bound", "sharpness_bound"})


class Counting(nn.Module):
    """A network in training mode that counts how often it runs, and fails at a given run."""

    def __init__(self, last=math.inf):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Dropout(), nn.Linear(6, 4))
        self.n_runs, self.last = 0, last

    def forward(self, x):
        self.n_runs += 1
        if self.n_runs > self.last:
            raise RuntimeError("as announced")
        return self.layers(x)


def run(name, net, X=None, y="labels", **arguments):
    X = torch.randn(40, 5, generator=torch.Generator().manual_seed(0)) if X is None else X
    y = torch.arange(40) % 4 if isinstance(y, str) else y
    if "layer" in arguments:
        if name not in OF_LAYERS:
            del arguments["layer"]
        elif name == "neuron_robustness":
            arguments["layers"] = arguments.pop("layer")
    return getattr(theory, name)(net, X, y, **{**CE, **FUNCTIONS[name], **arguments})


@pytest.mark.parametrize("layer", [-1, 0])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_network_and_random_states_stay_as_they_were_also_after_an_exception(name, layer):
    seed = {"random_state": 0} if name in RANDOM else {}  # as many runs in both calls
    net = Counting()
    before, numpy_state = state_of(net), np.random.get_state()[1].copy()  # noqa: NPY002
    run(name, net, layer=layer, **seed)
    same(before, state_of(net))
    assert (np.random.get_state()[1] == numpy_state).all()  # noqa: NPY002
    net.last, net.n_runs = net.n_runs - 1, 0
    with pytest.raises(RuntimeError, match="as announced"):
        run(name, net, layer=layer, **seed)
    same(before, state_of(net))


@pytest.mark.parametrize("name", RANDOM)
def test_random_states_decide_the_result(name):
    def found(random_state):
        return repr(run(name, Counting(), random_state=random_state))

    assert found(3) == found(3)
    if name != "worst_feature_robustness":  # here, the identity is the worst matrix
        assert found(3) != found(4)
        # an error takes few values: one draw in ten gives the commonest of pac_bayes_bound
        assert len({found(None) for _ in range(12)}) > 1
    assert found(np.random.RandomState(3)) == found(np.random.RandomState(3))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_all_need_labels_and_layers_that_there_are(name):
    with pytest.raises(ValueError, match="y is needed "):
        run(name, Counting(), y=None)
    if name in OF_LAYERS:
        with pytest.raises(LayerNotFoundError, match="there is no layer 7"):
            run(name, Counting(), layer=7)


def test_one_batch_is_run_to_find_the_layer():
    net = Counting()
    loader = DataLoader(TensorDataset(torch.randn(9, 5), torch.arange(9) % 4), batch_size=3)
    run("feature_robustness", net, loader, None)
    # The first batch runs once to find the layer and once, since the class is a user's, to find
    # other uses of its weight. Then three batches of the pass itself: moves at the last layer do
    # not run the network.
    assert net.n_runs == 2 + 3


NET, X, Y = network(activation=nn.ReLU)
SEQUENCES = {"model": nn.Linear(2, 2), "X": torch.randn(6, 4, 2), "y": torch.zeros(6, 4).long()}
FEW = {"X": torch.randn(7, 5).double(), "y": torch.zeros(7).long()}
WEIGHTED = nn.CrossEntropyLoss(weight=torch.ones(4).double())


def of_all_samples(output, y):
    return (output.sum(dim=1) - y).abs().mean()


def bce(**own):
    """A criterion with larger slopes than the mean without weights, and its targets."""
    return {"criterion": nn.BCEWithLogitsLoss(**own).double(), "y": torch.ones(40, 4).double()}


BANDWIDTH = Smoothing(bandwidth=0.1)
OF_SPLITS = [
    ({"delta": -1}, "delta must be a finite positive number, got -1"),
    ({"n_splits": 1}, "n_splits must be an integer of at least 2, got 1"),
    ({"n_draws": 1}, "n_draws must be an integer of at least 2, got 1"),
    ({"random_state": "x"}, "random_state must be an int, .* got 'x'"),
    ({"criterion": of_all_samples}, r"losses of shape \(\) for 40 samples"),
    ({"smoothing": BANDWIDTH, "delta": 0.1}, "bandwidth=0.1 is the same .* delta=0.1"),
    ({"smoothing": Smoothing(alphas=[1.0])}, r"alphas must be 40 .* got an array of shape \(1,\)"),
    ({"smoothing": Smoothing(alphas=-np.ones(40))}, "alphas must be 40"),
]
REFUSED = {
    "feature_robustness": [
        ({"delta": 0.0}, "delta must be a finite positive number, got 0.0"),
        ({"matrices": "haar"}, "one of .*'orthogonal'.* got 'haar'"),
        ({"matrices": np.eye(5)}, r"shape \(6, 6\) or \(k, 6, 6\).* got \(5, 5"),
        ({"n_draws": 1}, "n_draws must be an integer of at least 2, got 1"),
        ({"criterion": None}, "criterion is needed"),
        ({"matrices": "truncated_normal", "absolute": True}, "absolute=True, got 'truncated_norm"),
        ({"labelling": lambda phi: phi}, r"shape of the labels, \(40,\), got \(40, 6\)"),
    ],
    "worst_feature_robustness": [
        ({"n_steps": 0}, "n_steps must be a positive integer, got 0"),
        ({"n_restarts": -1}, "n_restarts must be .*, got -1"),
        ({"delta": 0}, "delta must be a finite positive number, got 0"),
        ({"matrices": np.eye(7)}, r"have shape \(6, 6\) or \(k, 6"),
    ],
    "Smoothing": [
        ({"kernel": "box"}, "kernel must be one of .*, got 'box'"),
        ({"sigma": 0}, "sigma must be a finite positive number, got 0"),
        ({"bandwidth": "best"}, "bandwidth must be .* number or None, got 'best'"),
        ({"bandwidth": 0.1, "kernel": "uniform"}, "bandwidth=0.1 .*, but kernel='uniform'"),
    ],
    "label_constancy": [
        ({"by": "size"}, 'by must be "labels" or "loss", got \'size\''),
        ({"y": np.linspace(0, 1, 40)}, "y must hold classes, got continuous .* 0.0"),
    ],
    "sharpness_conditions": [
        ({"detail": "C2", "deltas": [0.1, 0]}, "deltas must be a .*, got 0"),
        ({"detail": "C4"}, 'detail must be None, "C1" or "C2".* got \'C4\''),
        ({"detail": "C1", "initial": NET}, "detail must be .* None with initial; got 'C1'"),
        ({"initial": NET[:3]}, r"initial module has the layers \['0', '2'\]"),
    ],
    "sharpness_bound": [
        ({"delta": 1}, "delta must be a probability.* got 1"),
        ({"sigma": 0}, "sigma must be one positive finite number, .* got 0"),
        ({"sigma": [0.1, 0.1]}, r"one for each of the 3 layers, got \[0.1, 0.1\]"),
        ({"model": nn.Linear(5, 4).double()}, "needs a network of two layers"),
        ({"lipschitz": -1}, "lipschitz must be a finite positive number or None"),
        ({"criterion": WEIGHTED}, "CrossEntropyLoss.* is not known: pass lipschitz="),
        (bce(pos_weight=torch.full((4,), 100.0)), "constant of BCEWithLogitsLoss.* is not known"),
        (bce(reduction="sum"), "constant of BCEWithLogitsLoss.* is not known"),
    ],
    "pac_bayes_bound": [
        ({"initial": NET}, "the initial weights are those of the trained net"),
        (FEW, "needs 8 labelled samples or more, "),
        (SEQUENCES, "6 samples have 24 labels"),
        ({"delta": 0}, "delta must be a probability.* got 0"),
        ({"n_draws": 0}, "n_draws must be a positive integer, got 0"),
        ({"sigmas": []}, "sigmas must hold at least one standard deviation"),
        ({"sigmas": [0.1, -1]}, "sigmas must be a finite positive number, got -1"),
        ({"initial": nn.Linear(2, 2)}, "do not fit the network: 0.weight is missing"),
        ({"criterion": nn.MSELoss(), "y": torch.randn(40, 4)}, "needs a classifier"),
    ],
    "representativeness": OF_SPLITS,
    "generalization_bound": OF_SPLITS,
}
NEEDED = {
    "feature_robustness": {"delta": 0.1},
    "worst_feature_robustness": {"delta": 0.1},
    "sharpness_bound": {"sigma": 1},
}


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [(name, *row) for name, rows in REFUSED.items() for row in rows],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused(name, arguments, message):
    if name == "sharpness_conditions":
        arguments = {"model": NET, "X": X, **arguments}
    elif name != "Smoothing":
        arguments = {"model": NET, "X": X, "y": Y, **CE, **NEEDED.get(name, {}), **arguments}
    with pytest.raises(ValueError, match=message):
        getattr(theory, name)(**arguments)
