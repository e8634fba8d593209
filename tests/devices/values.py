"""Everything that computes gives the CPU's values on another device."""

import copy
import warnings
from functools import partial
from inspect import signature
from itertools import product

import numpy as np
import pytest
import torch
from pandas.testing import assert_frame_equal
from torch import nn
from torch.testing import assert_close

from relflat_sk import (
    FlatnessWarning,
    RelativeFlatnessRegularizedClassifier,
    feature_robustness,
    generalization_bound,
    get_measure_names,
    label_constancy,
    layer_sensitivity,
    measure,
    neuron_robustness,
    pac_bayes_bound,
    rank_models,
    relative_flatness,
    reparameterize,
    representativeness,
    sharpness_conditions,
    worst_feature_robustness,
)
from relflat_sk.measures._layer_measures import LAYER_MEASURES
from relflat_sk.theory import Smoothing, sharpness_bound
from tests.devices.networks import CRITERION, NETWORKS, make_data, make_mlp, trained
from tests.devices.place import DEVICE, IS_SIMULATED, other_device

# where the model and the data are, and whether `device` names the device
PLACES = {
    "model": (True, False, {}),
    "data": (False, True, {}),
    "model and data": (True, True, {}),
    "device": (False, False, {"device": DEVICE}),
}


@pytest.fixture(autouse=True)
def device():
    with other_device(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FlatnessWarning)  # of half-trained networks
        yield


def assert_same_everywhere(compute, net, rtol=1e-4, atol=1e-6, places=tuple(PLACES)):
    """Compare ``compute(model, X, y, **options)`` in these places with the CPU's value."""
    X, y = make_data()
    X = X.to(next(net.parameters()).dtype)
    expected = np.asarray(compute(copy.deepcopy(net), X, y), dtype=float)
    assert np.isfinite(expected).any()
    for place in places:
        model_there, data_there, options = PLACES[place]
        model = copy.deepcopy(net).to(DEVICE if model_there else "cpu")
        arrays = (X.to(DEVICE), y.to(DEVICE)) if data_there else (X, y)
        found = np.asarray(compute(model, *arrays, **options), dtype=float)
        np.testing.assert_allclose(found, expected, rtol=rtol, atol=atol, err_msg=place)
        if model_there:  # it stays where it was
            assert {p.device for p in model.parameters()} == {DEVICE}


# a power law needs a larger layer than there are here
MEASURES = get_measure_names()
if IS_SIMULATED:  # it has no forward-mode derivatives
    MEASURES.remove("fisher_rao_norm")


SEED = {"random_state": 0}
# few draws and steps: what runs for one runs for all
ARGUMENTS = {
    "adaptive_sharpness": {"n_steps": 3},
    "keskar_sharpness": {"n_steps": 3},
    "pac_bayes_flatness": {"n_draws": 2},
    "pac_bayes_magnitude_flatness": {"n_draws": 2},
}


AT_LAYERS = [name for name in MEASURES if name in LAYER_MEASURES]
LAYERS = [*product(AT_LAYERS, [0]), *product(MEASURES, [-1])]


@pytest.mark.parametrize(("name", "layer"), LAYERS)
def test_measures(name, layer):
    def compute(model, X, y, **where):
        options = SEED | ARGUMENTS.get(name, {}) | where
        return measure(name, model, X, y, criterion=CRITERION, layer=layer, **options)

    # what is moved is the same for each of them: `test_relative_flatness` has all places
    assert_same_everywhere(compute, trained(), places=("model and data",))


OPTIONS = {
    "plain": {},
    "normalised": {"normalize": True},
    "weighted": {"sample_weight": np.arange(40) % 3},
    "probes": {"n_probes": 3, **SEED},
}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("layer", [0, -1])
@pytest.mark.parametrize("options", OPTIONS)
def test_relative_flatness(network, layer, options):
    def compute(model, X, y, **where):
        where |= {"layer": layer, "criterion": CRITERION, **OPTIONS[options]}
        return relative_flatness(model, X, y, **where)

    assert_same_everywhere(compute, trained(network))


@pytest.mark.parametrize("holds", ["models", "weights"])
def test_models_on_different_devices_are_ranked_alike(holds):
    X, y = make_data()
    nets = [trained(), make_mlp()]
    options = {"criterion": CRITERION, "measure": "relative_flatness", **SEED}
    expected = rank_models(nets, X, y, **options)
    there = [nets[0], copy.deepcopy(nets[1]).to(DEVICE)]
    if holds == "weights":
        there = [net.state_dict() for net in there]
        options["module"] = make_mlp().to(DEVICE)
    found = rank_models(there, X, y, X_test=X, y_test=y, **options)
    columns = ["model", "relative_flatness", "train_loss", "depth"]
    assert_frame_equal(found[columns], expected[columns], rtol=1e-5)


PERMUTED = Smoothing(bandwidth=0.3, label_noise=lambda labels, rng: rng.permutation(labels))
NORMAL = Smoothing(kernel="normal")
ALPHAS = Smoothing(sigma=0.2, alphas=np.arange(40.0))
MOVES = {"delta": 0.1, "n_draws": 4}
OF_LOSS = {"criterion": CRITERION, **SEED}
PER_SAMPLE = {"layer": 0, "per_sample": True, "criterion": CRITERION}
SPLITS = {"n_splits": 2}


def labelling(phi):
    return phi[:, :3].argmax(axis=1)


def distances(model, X, y, **options):
    initial = copy.deepcopy(model)
    return sharpness_conditions(model, X, initial=initial, **options)[["worst", "initial_worst"]]


def rises(*args, **options):
    return layer_sensitivity(*args, **options).drop(columns="layer").to_numpy()


WORST = {"delta": 0.1, "layer": 0, "n_steps": 3, "n_restarts": 1}
BOUND = {"delta": 0.1, "smoothing": ALPHAS, "n_splits": 2}
# a function, its arguments, and which part of the result is compared
THEORY = {
    "feature_robustness": (feature_robustness, {**MOVES, "layer": 0}, None),
    "last layer": (feature_robustness, MOVES, None),
    "shared matrices": (feature_robustness, {**MOVES, "absolute": True}, None),
    "labelling": (feature_robustness, {**MOVES, "labelling": labelling}, None),
    "worst_feature_robustness": (worst_feature_robustness, WORST, "value"),
    "neuron_robustness": (neuron_robustness, {"delta": 0.1}, ["robustness", "flatness_term"]),
    "representativeness": (representativeness, {"delta": 0.1, **SPLITS, "smoothing": NORMAL}, None),
    "bandwidth": (representativeness, {**SPLITS, "smoothing": PERMUTED}, None),
    "bound": (generalization_bound, BOUND, "total"),
    "pac_bayes_bound": (pac_bayes_bound, {"sigmas": [0.01, 0.1], "n_draws": 5}, "bound"),
    "sharpness_bound": (sharpness_bound, {"sigma": 1e-3}, "total"),
    "sharpness_conditions": (distances, {}, None),
    "norms of C1": (sharpness_conditions, {"detail": "C1"}, ["mu"]),
    "curve of C2": (sharpness_conditions, {"detail": "C2"}, ["mean_share"]),
    "label_constancy": (label_constancy, {}, None),
    "label_constancy by loss": (label_constancy, {"by": "loss"}, None),
    "per_sample": (partial(measure, "normalized_relative_flatness"), PER_SAMPLE, None),
    "layer_sensitivity": (rises, {"bits": (8, 3), "measured": True, **OF_LOSS}, None),
}


@pytest.mark.parametrize("name", THEORY)
def test_theory(name):
    function, arguments, part = THEORY[name]
    known = signature(function).parameters
    arguments |= {key: value for key, value in OF_LOSS.items() if key in known}

    def compute(model, X, y, **where):
        found = function(model, X, y, **arguments, **where)
        return found[part] if isinstance(part, list) else getattr(found, part or "", found)

    # in float32, the disturbances of condition C2 are as small as rounding
    assert_same_everywhere(compute, trained().double(), rtol=1e-3, places=("model", "device"))


@pytest.mark.parametrize("factors", [[2.0, 0.5, 1.0], torch.tensor([4.0, 0.5, 0.5])], ids=str)
def test_reparameterized_networks_compute_the_same(factors):
    net, (X, _) = trained(), make_data()
    twin = reparameterize(copy.deepcopy(net).to(DEVICE), factors, X=X)
    assert_close(twin(X.to(DEVICE)).cpu(), net(X), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name",
    ["relative_flatness", "normalized_relative_flatness", "hessian_trace", "neuron_flatness_sum"],
)
def test_measures_of_very_many_classes(name, few_are_many):
    few_are_many()
    assert_same_everywhere(partial(measure, name, criterion=CRITERION), trained())


def test_devices_that_are_mixed_are_refused():
    """Otherwise the tests above would say nothing."""
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(2).to(DEVICE) + torch.ones(2)


# -- checks of what is on the device ---------------------------------------------------------

Z = torch.randn(4, 6)
REFUSED = {
    "class": (CRITERION, Z, torch.tensor([0, 1, 7, 2]), "indices from 0 to 2, .*from 2 to 7"),
    "fraction": (CRITERION, Z, torch.tensor([0.0, 1, 0.5, 2]), "got fractions such as 0.5"),
    "share": (nn.BCEWithLogitsLoss(), Z, torch.tensor([[0.0, 1, 3]] * 4), "got values from 0 to 3"),
    "nan": (CRITERION, Z.sub(Z.max()).log(), torch.tensor([0, 1, 2, 0]), "X contains NaN"),
    "inf": (CRITERION, Z / 0, torch.tensor([0, 1, 2, 0]), "X contains NaN"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_measures_refuse_data_on_the_device(case):
    criterion, X, y, message = REFUSED[case]
    data = X.to(DEVICE), y.to(DEVICE)
    with pytest.raises(ValueError, match=message):
        relative_flatness(make_mlp().to(DEVICE), *data, batch_size=2, criterion=criterion)


def test_labels_to_ignore_on_the_device():
    def compute(model, X, y, **where):
        y = y.clone()
        y[2] = -100
        return relative_flatness(model, X, y, criterion=CRITERION, batch_size=3, **where)

    assert_same_everywhere(compute, make_mlp())


@pytest.mark.parametrize("wrong", [7, -1])
def test_an_epoch_refuses_labels_on_the_device(wrong):
    X, y = (tensor.to(DEVICE) for tensor in make_data())
    net = RelativeFlatnessRegularizedClassifier(make_mlp, device=DEVICE, verbose=0).initialize()
    net.history.new_epoch()
    y[3] = wrong
    with pytest.raises(ValueError, match=f"y must hold class indices from 0 to 2.* {wrong}"):
        net.run_single_epoch([(X, y)] * 2, training=True, prefix="train", step_fn=net.train_step)
