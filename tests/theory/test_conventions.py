"""What all functions of the theory promise: they change nothing, and can be repeated."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from relflat_sk import LayerNotFoundError, theory
from tests.network.test_network import same, state_of
from tests.theory.problems import CE

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
