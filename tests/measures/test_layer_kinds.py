"""Every measure at every kind of layer and head, against the dense Hessian."""

import copy
import itertools
import math
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from scipy.linalg import hadamard
from torch import nn

from relflat_sk import _random as random
from relflat_sk import measure
from relflat_sk.measures import _quantities
from relflat_sk.measures._layer_measures import TRACE_LIKE, measure_layers
from relflat_sk.measures._measure_network import NETWORK_WIDE, measure_network
from tests import oracles
from tests.cases import published_penalty
from tests.hugging_face import LoraLayer, conv1d
from tests.measures.nets import (
    BEFORE_A_HEAD,
    CE,
    HEADS_OF_CLASSES,
    NETS,
    OF_CRITERIA,
    PROBLEMS,
    UNTRAINED,
    allowed,
    count_runs,
    dense,
    evaluate,
    make,
    measure_all,
    network,
    of_layer,
    reached,
)
from tests.penalty.every_draw import assert_right_on_average

pytestmark = UNTRAINED
EXACT = 1e-8


def layers_of(name):
    """All layers, but of a criterion the first and the last."""
    layers = PROBLEMS[name]().all_layers()
    return (layers[0], layers[-1]) if name in OF_CRITERIA else layers


CASES = [(name, layer) for name in PROBLEMS for layer in layers_of(name)]


def assert_measures(problem, layer, every_term=False, top=True):
    """Compare all measures of a layer, and their terms, with the dense Hessian."""
    X, y, rtol = problem.X, problem.y, problem.rtol
    H, W = problem.hessian(layer)
    options = {"criterion": problem.criterion, "batch_size": (len(y) + 1) // 2}
    closed = problem.all_layers()[-1:] if problem.closed is None else problem.closed
    method = "closed form" if layer in closed else "exact"
    before = allowed()
    found = measure_all(problem.net, X, y, layer, "gradient_norm", **options)
    for name, oracle in oracles.TABLE_1.items():
        assert found.value[name] == pytest.approx(oracle(H, W), rel=rtol, abs=1e-12), name
        assert (found.stderr[name], found.method[name]) == (0, method)
    gradient = problem.gradient_norm(layer)
    assert found.value["gradient_norm"] == pytest.approx(gradient, rel=rtol, abs=1e-14)
    name, options["layer"] = "eigenvalue_flatness" if top else "relative_flatness", layer
    one = evaluate(name, problem.net, X, y, rtol=1e-12, random_state=0, **options)
    if top:
        expected = W.square().sum().item() * oracles.largest(H)
        assert one.value == pytest.approx(expected, rel=rtol, abs=1e-12)
        assert one.method == "lanczos"
    assert one.passes.n_samples == len(y)
    assert one.passes.risk == pytest.approx(problem.risk().item(), rel=max(rtol, 1e-12))
    assert allowed() == before
    if problem.is_mean:
        names = oracles.TABLE_1 if every_term else ["relative_flatness", "neuron_flatness_max"]
        neuron = int(np.argmax(oracles.rho(H, W)))
        assert_terms(problem, layer, W, neuron, names, {**options, "method": "exact"})


def assert_terms(problem, layer, W, neuron, names, options):
    each = problem.hessian(layer, oracles.weight_hessians)
    table = {**oracles.TABLE_1, "neuron_flatness_max": lambda H, W: oracles.rho(H, W)[neuron]}
    for name in names:
        terms = measure(name, problem.net, problem.X, problem.y, per_sample=True, **options)
        expected = np.array([table[name](H, W) for H in each])
        assert terms == pytest.approx(expected, rel=problem.rtol, abs=1e-11), name
        assert terms.dtype == np.float64


@pytest.mark.parametrize(("name", "layer"), CASES, ids=["-".join(case) for case in CASES])
def test_every_measure_agrees_with_the_dense_hessian(name, layer):
    problem = PROBLEMS[name]()
    last = layer == problem.all_layers()[-1]
    assert_measures(problem, layer, every_term=name in NETS, top=last or name not in OF_CRITERIA)


def penalty_at(problem, layer):
    H, W = problem.hessian(layer)
    return oracles.kappa_of(H, W) / (2 * W.shape[1])


def divide_channels(layer, units):
    """Divide the numbers that a layer multiplies its input channels with."""
    weight = layer.weight.data
    if getattr(layer, "transposed", False):
        weight /= units.reshape(-1, *[1] * (weight.ndim - 1))
    else:
        groups = getattr(layer, "groups", 1)
        rows = weight.reshape(groups, -1, len(units) // groups, weight[0, 0].numel())
        layer.weight.data = (rows / units.reshape(groups, 1, -1, 1)).reshape(weight.shape)


@pytest.mark.parametrize("kind", BEFORE_A_HEAD)
def test_every_kind_of_layer_before_a_head(kind):
    problem = of_layer(kind)
    net, X, y = problem.net, problem.X, problem.y
    assert_measures(problem, "0")
    assert_right_on_average(published_penalty(0), net, CE, X, y, penalty_at(problem, "0"))
    # the units of the channels do not matter where they are normalised
    options = {"layer": 0, "criterion": CE, "method": "exact"}
    before = measure("normalized_relative_flatness", net, X, y, **options)
    is_linear = isinstance(net[0], nn.Linear)
    units = torch.rand(X.shape[-1 if is_linear else 1]).double() + 0.5
    divide_channels(net[0], units)
    X = X * (units if is_linear else units.reshape(-1, *[1] * (X.ndim - 2)))
    after = measure("normalized_relative_flatness", net, X, y, **options)
    assert after == pytest.approx(before, rel=EXACT)


# chunks of classes depend on the criterion, and on whether there is a closed form
IN_CHUNKS = [name for name in HEADS_OF_CLASSES if not name.endswith(("4 labels", "an axis"))]


@pytest.mark.parametrize(
    ("name", "many"),
    [*((name, False) for name in HEADS_OF_CLASSES), *((name, True) for name in IN_CHUNKS)],
)
def test_heads_of_few_and_of_many_classes(name, many, few_are_many):
    if many:
        few_are_many()
    problem = HEADS_OF_CLASSES[name]()
    assert_measures(problem, problem.layers[0], top=many)


# the last of these has a closed form
PROBED = [("conv", "0"), ("conv tanh", "0"), ("mlp relu", "0"), ("mlp tanh", "0"),
          ("transformer", "qkv"), ("mlp relu", "4")]  # fmt: skip
PLAIN = ["relative_flatness", "neuron_flatness_sum", "neuron_flatness_max"]
CURVED = [("conv tanh", "0"), ("grouped conv", "0"), ("mlp tanh", "0"), ("transformer", "qkv")]
DEFLATED = ["relative_flatness", "normalized_relative_flatness", "comparable_flatness"]


@pytest.mark.parametrize(
    ("kind", "name", "measure_name", "n_directions"),
    [
        *((*at, one, 0) for at in PROBED for one in PLAIN),
        *((*at, one, 2) for at in CURVED for one in DEFLATED),
    ],
)
def test_probes_average_to_the_exact_value(kind, name, measure_name, n_directions, monkeypatch):
    """Signs of which any two average to zero together have the mean of random ones.

    So they have where a trace is deflated, in directions that do not depend on them.
    """
    net, X, y = make(kind)
    criterion, y = reached(measure_name, CE, X, y)
    arguments = {"layer": name, "criterion": criterion}
    exact = measure(measure_name, net, X, y, method="exact", **arguments)
    signs, calls, own = hadamard(128), itertools.count(), []
    draw, deflated = _quantities.Trace.draw, []

    def rademacher(shape, like, generator):
        if own:  # of the two signs of each sample, after the matrix that all samples share
            own.pop()
            return like.new_ones(shape)
        shared = shape[0] != len(X)
        drawn = torch.as_tensor(signs[: math.prod(shape[1 - shared :]), next(calls)]).to(like)
        own.extend(2 * [1] if shared else [])
        return drawn.expand(1 if shared else shape[0], -1).reshape(shape)

    def deflate_and_draw(trace, layer, generator):
        if not deflated:  # of the only batch
            with monkeypatch.context() as patch:
                patch.setattr(_quantities, "rademacher", random.rademacher)
                patch.setattr(_quantities, "N_DIRECTIONS", n_directions)
                deflated.append(trace.deflated(layer, generator))
        return draw(deflated[0], layer, generator)

    monkeypatch.setattr(_quantities, "rademacher", rademacher)
    if n_directions:
        monkeypatch.setattr(_quantities.Trace, "draw", deflate_and_draw)
    found = evaluate(measure_name, net, X, y, method="hutchinson", n_probes=128, rtol=1e-9,
                     **arguments)  # fmt: skip
    assert next(calls) == 128
    assert found.value == pytest.approx(exact, rel=EXACT)
    assert found.stderr > 0


def test_weight_decay_counts_into_the_loss():
    net, X, y = make("mlp relu")
    name, wd = "2", 0.37
    H, W = dense(net, name, X, y)
    H = H + wd * torch.eye(W.numel()).double().reshape(H.shape)
    table = {**oracles.TABLE_1, "hessian_max_eigenvalue": lambda H, W: oracles.largest(H)}
    options = {"layer": name, "criterion": CE, "weight_decay": wd}
    for measure_name, oracle in table.items():
        value = measure(measure_name, net, X, y, rtol=1e-12, **options)
        assert value == pytest.approx(oracle(H, W), rel=EXACT)
    (gradient,) = torch.autograd.grad(CE(net(X), y), net[2].weight)
    expected = (gradient + wd * W).norm().item()
    assert measure("gradient_norm", net, X, y, **options) == pytest.approx(expected, rel=EXACT)


def test_all_layers_share_one_backward_pass_for_each_output(monkeypatch):
    net, X, y = make("conv")
    counted = Mock(side_effect=torch.autograd.grad)
    monkeypatch.setattr(torch.autograd, "grad", counted)
    found = measure_layers(network(net, CE, X, y), list(TRACE_LIKE), "all")
    assert len(found) == 3 * len(TRACE_LIKE)
    # three classes, and the check of the rows in the first pass, that for the features' spread
    assert counted.call_count == 3 + 1


@pytest.mark.parametrize("transposed", [False, True], ids=["linear", "gpt2"])
def test_an_adapted_layer_has_the_merged_weight_and_its_factors_their_own(transposed):
    layer = conv1d if transposed else nn.Linear
    adapted = nn.Sequential(
        LoraLayer(layer(4, 5), 4, 5), nn.Tanh(), LoraLayer(layer(5, 3), 5, 3)
    ).double()
    merged = copy.deepcopy(adapted)
    for i in (0, 2):
        base, change = merged[i].base_layer, merged[i].get_delta_weight("default")
        base.weight.data += change.detach()
        merged[i] = base
    X, y = torch.randn(9, 4).double(), torch.arange(9) % 3
    torch.testing.assert_close(adapted(X), merged(X))
    parts = ("base_layer", "lora_A.default", "lora_B.default")
    factors = {f"{i}.{part}": (adapted, f"{i}.{part}") for i in (0, 2) for part in parts}
    for name, where in {"0": (merged, "0"), "2": (merged, "2"), **factors}.items():
        H, W = oracles.weight_hessian(*where, CE, X, y)
        for measured, oracle in oracles.TABLE_1.items():
            options = {"layer": name, "criterion": CE, "method": "exact"}
            found = measure(measured, adapted, X, y, **options)
            assert found == pytest.approx(oracle(H, W), rel=EXACT), (name, measured)
    assert evaluate("hessian_trace", adapted, X, y, criterion=CE).method == "closed form"
    adapted[2].merged = True  # claims another weight than it computes with
    with pytest.raises(ValueError, match="layer '2' does not compute W x"):
        measure("hessian_trace", adapted, X, y, layer="2", criterion=CE)


TRACES = [name for name, measure in TRACE_LIKE.items() if not measure.normalized]
NORMALIZED = ["normalized_relative_flatness"]


def runs(kind, call):
    """How often the network runs on one of three batches."""
    net, X, y = make(kind, n=12)
    at = network(net.eval(), CE, X, y, batch_size=4)
    return count_runs(at.module, lambda: call(at))


@pytest.mark.parametrize(
    ("kind", "names", "layers", "n_passes"),
    [
        *[(kind, TRACES, [-1], 1) for kind in ("mlp relu", "mlp tanh", "conv", "transformer")],
        ("mlp relu", [*TRACES, "gradient_norm"], "all", 1),
        ("mlp relu", [*TRACES, "eigenvalue_flatness", "hessian_max_eigenvalue"], [-1], 1),
        # the first pass is for the features' spread
        ("mlp relu", [*TRACES, "gradient_norm", *NORMALIZED], "all", 2),
    ],
)
def test_measures_share_passes(kind, names, layers, n_passes):
    # the hook that counts may use a weight elsewhere: the first batch runs once more
    assert runs(kind, lambda at: measure_network(at, names, layers)) == 3 * n_passes + 1


@pytest.mark.filterwarnings("ignore:the margin is .*not positive:relflat_sk.FlatnessWarning")
@pytest.mark.parametrize("name", ["l2_norm", "fisher_rao_norm", "frobenius_product"])
def test_measures_of_the_whole_network_need_no_pass_beside_their_own(name):
    own = runs("mlp relu", lambda at: NETWORK_WIDE[name].compute(at))
    both = runs("mlp relu", lambda at: measure_network(at, [name, *TRACES], [-1]))
    assert both == own + 3 + 1
