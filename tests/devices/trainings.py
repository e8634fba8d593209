"""Training on another device gives the CPU's values."""

import copy
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from joblib import Parallel, delayed
from skorch.dataset import ValidSplit

from relflat_sk import (
    FlatMinimaSearch,
    FlatnessWarning,
    FleetTrainer,
    RelativeFlatnessPenalty,
    StopAtGradientNorm,
    StopAtLoss,
    fleet_training,
)
from tests.devices.networks import CRITERION, NETWORKS, make_data, make_mlp, trained
from tests.devices.place import DEVICE, IS_SIMULATED, other_device
from tests.training.common import Classifier, Sam, make


@pytest.fixture(autouse=True)
def device():
    with other_device(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FlatnessWarning)  # of half-trained networks
        yield


TRAININGS = {
    "last layer": {},
    "first layer": {"flatness_layer": 0, "flatness_weight": 1.0},
    "all layers": {"flatness_layer": "all", "flatness_weight": 1.0},
    "no limit": {"flatness_clip": None},
    "no penalty": {"flatness_weight": 0},
    "normalised": {"flatness_normalize": True},
    "SAM": {"sharpness_radius": 0.05},
    "goal": {"callbacks": [StopAtLoss(1.05)], "max_epochs": 20},
    "stationary": {"callbacks": [StopAtGradientNorm(0.3)], "max_epochs": 6},
    "validation": {"train_split": ValidSplit(3)},
    "sample weights": {},
}


def make_net(network, name, device, **params):
    params = {"max_epochs": 2, "device": device, **TRAININGS[name], **params}
    kind = Sam if name == "SAM" else Classifier
    return make(kind, module=lambda: NETWORKS[network]().double(), **params)


def fit_params(name):
    return {"sample_weight": np.arange(40) % 3 if name == "sample weights" else None}


def assert_trained_alike(net, expected, X):
    assert len(net.history) == len(expected.history)
    for column in ("train_loss", "flatness_penalty"):
        found, wanted = net.history[:, column], expected.history[:, column]
        assert found == pytest.approx(wanted, rel=1e-3, abs=1e-6)
    assert net.relative_flatness_ == pytest.approx(expected.relative_flatness_, rel=1e-6)
    np.testing.assert_allclose(net.predict_proba(X), expected.predict_proba(X), rtol=1e-6)


# the ways to a curvature depend on the network, all else does not
CASES = [("relu", name) for name in TRAININGS]
CASES += [(net, name) for net in ("tanh", "convolution") for name in ("last layer", "all layers")]


@pytest.mark.parametrize(("network", "name"), CASES)
def test_trainings(network, name):
    X, y = make_data()
    expected, net = (
        make_net(network, name, device).fit(X, y, **fit_params(name)) for device in ("cpu", DEVICE)
    )
    assert_trained_alike(net, expected, X)


# it does not index tensors as scikit-learn does for a split
THERE = ["last layer", "goal", "sample weights"] + ([] if IS_SIMULATED else ["validation"])


@pytest.mark.parametrize("name", THERE)
def test_trainings_with_data_on_the_device(name):
    X, y = make_data()
    expected = make_net("relu", name, "cpu").fit(X, y, **fit_params(name))
    net = make_net("relu", name, DEVICE).fit(X.to(DEVICE), y.to(DEVICE), **fit_params(name))
    assert_trained_alike(net, expected, X)


@pytest.mark.parametrize("layer", [-1, 0, "all"])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("weighted", [False, True])
def test_plain_loops(layer, clip, weighted):
    X, y = make_data()
    results = []
    for device in ("cpu", DEVICE):
        net = trained().to(device)
        penalty = RelativeFlatnessPenalty(layer, weight=0.5, clip=clip)
        torch.manual_seed(0)
        with penalty.capture(net):
            output = net(X.to(device))
        weight = torch.arange(40.0).to(device) if weighted else None
        loss = CRITERION(output, y.to(device))
        net.zero_grad()
        (loss + penalty(CRITERION, output, y.to(device), weight)).backward()
        results.append([loss.item(), *(p.grad.norm().item() for p in net.parameters())])
    assert results[1] == pytest.approx(results[0], rel=1e-4, abs=1e-7)


STACKED = ["last layer", "all layers", "goal", "sample weights"]


@pytest.mark.parametrize(
    ("network", "name"), [("convolution", "last layer"), *(("relu", name) for name in STACKED)]
)
def test_fleets(network, name, caplog):
    caplog.set_level("DEBUG", "relflat_sk")
    X, y = (tensor.numpy() for tensor in make_data())
    fleets = []
    for device in ("cpu", DEVICE):
        # as on CUDA, where nets choose it themselves
        nets = [make_net(network, name, device, lr=r, optimizer__fused=True) for r in (0.01, 0.02)]
        fleets.append(FleetTrainer(nets, fleet=2).fit(X, y, **fit_params(name)).estimators_)
    assert "one by one" not in caplog.text
    for expected, net in zip(*fleets, strict=True):
        assert_trained_alike(net, expected, X)


def test_a_copied_net_goes_on_in_a_fleet_with_others(caplog):
    caplog.set_level("DEBUG", "relflat_sk")
    X, y = (tensor.numpy() for tensor in make_data())
    make = partial(make_net, "relu", "last layer", DEVICE)
    expected, nets = ([make(lr=lr).fit(X, y) for lr in (0.01, 0.02)] for _ in range(2))
    # a simulated device copies no whole nets
    nets[0]._limit = copy.deepcopy(nets[0]._limit)
    with fleet_training(2):
        nets = Parallel(2)(delayed(net.partial_fit)(X, y) for net in nets)
    assert "one by one" not in caplog.text
    expected = [net.partial_fit(X, y) for net in expected]
    for net, alone in zip(nets, expected, strict=True):
        assert_trained_alike(net, alone, X)


@pytest.mark.parametrize("fleet", [None, 2])
def test_searches(fleet):
    X, y = (tensor.numpy() for tensor in make_data())
    tables = []
    for device in ("cpu", DEVICE):
        net = make(module=make_mlp, max_epochs=30, callbacks=[StopAtLoss(0.9)], device=device)
        search = FlatMinimaSearch(net, {"lr": [0.05, 0.1]}, fleet=fleet, random_state=0)
        search.fit(X, y, X_test=X, y_test=y)
        tables.append(search.minima_[["relative_flatness", "train_loss", "test_loss"]])
    np.testing.assert_allclose(tables[1], tables[0], rtol=1e-3)
