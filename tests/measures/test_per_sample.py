"""The terms of single samples, whose mean is the measure."""

from functools import partial

import numpy as np
import pytest
import torch
from skorch import NeuralNetClassifier
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from relflat_sk import MLP, measure, relative_flatness
from relflat_sk.exceptions import FlatnessWarning
from relflat_sk.measures._layer_measures import TRACE_LIKE
from tests.measures.nets import CE, PROBLEMS, UNTRAINED, evaluate, make, reached

pytestmark = UNTRAINED
SUM = 1e-12  # float64, relative


# without weights, `test_layer_kinds` compares terms and values with dense Hessians
@pytest.mark.parametrize("kind", ["mlp relu", "conv", "transformer"])
@pytest.mark.parametrize("name", TRACE_LIKE)
def test_their_mean_is_the_value(kind, name):
    net, X, y = make(kind, n=11)
    counts = np.array([1, 0, 2, 1, 1, 3, 1, 1, 1, 0.5, 1])
    weights = {"weight": torch.tensor([0.3, 1.0, 2.5]).double(), "ignore_index": 1}
    criterion, labels = reached(name, nn.CrossEntropyLoss(**weights), X, y)
    options = {"criterion": criterion, "sample_weight": counts, "method": "exact"}
    for layer in (0, -1):
        value = measure(name, net, X, labels, layer=layer, batch_size=4, **options)
        terms = measure(name, net, X, labels, layer=layer, per_sample=True, **options)
        assert terms.shape == (11,)
        assert terms.mean() == pytest.approx(value, rel=SUM, abs=1e-14)
        assert terms[1] == 0  # a sample of weight 0


@pytest.mark.parametrize(
    "name", ["relative_flatness", "hessian_trace", "trace_flatness", "neuron_flatness_sum"]
)
def test_weight_decay_is_the_same_for_every_sample(name):
    net, X, y = make("mlp relu")
    call = partial(measure, name, net, X, y, layer="0", criterion=CE)
    with_decay = call(weight_decay=0.37, per_sample=True)
    assert np.ptp(with_decay - call(per_sample=True)) < 1e-12
    assert with_decay.mean() == pytest.approx(call(weight_decay=0.37), rel=SUM)


# networks, layers and measures: random probes are drawn in each of their ways, and summed in each
PROBED = {
    "flat": ("mlp tanh", 0, "relative_flatness"),
    "flat, normalised": ("mlp tanh", 0, "normalized_relative_flatness"),
    "a neuron": ("mlp tanh", 0, "neuron_flatness_max"),
    "tokens": ("transformer", "qkv", "hessian_trace"),
    "a weight with more columns": ("transformer", "up", "relative_flatness"),
    "kernels": ("squeeze and excitation", "stem", "neuron_flatness_sum"),
    "patches": ("computed weights", 0, "relative_flatness"),
    "groups": ("conv", 0, "relative_flatness"),
    "groups, normalised": ("conv", 0, "normalized_relative_flatness"),
}


@pytest.mark.parametrize("name", PROBED)
def test_repeats_of_a_sample_have_probes_of_their_own_and_honest_standard_errors(name):
    kind, layer, measured = PROBED[name]
    problem, n = PROBLEMS[kind](), 60
    weight = np.linspace(1, 9, len(problem.y))
    options = {"layer": layer, "criterion": CE, "per_sample": True}
    at = (measured, problem.net, problem.X, problem.y)
    exact = measure(*at, method="exact", sample_weight=weight, **options)
    X, y = (torch.cat([one] * n) for one in (problem.X, problem.y))
    options |= {"method": "hutchinson", "n_probes": 4, "random_state": 0}
    found = evaluate(measured, problem.net, X, y, sample_weight=np.tile(weight, n), **options)
    assert found.method == "hutchinson"
    assert found.terms.mean() == pytest.approx(found.value, rel=SUM)
    combined = np.linalg.norm(found.term_stderrs) / len(X)
    assert combined == pytest.approx(found.stderr, rel=1e-9)
    errors = found.terms.reshape(n, -1) - exact
    spread = errors.std(axis=0, ddof=1)
    assert (np.abs(errors.mean(axis=0)) < 5 * spread / n**0.5).all()
    assert 0.6 < (found.term_stderrs**2).mean() / (spread**2).mean() < 1.7


def test_the_tolerance_is_of_the_terms():
    net, X, y = make("conv tanh", n=40)
    options = {"method": "hutchinson", "max_passes": 10_000, "random_state": 0, "rtol": 0.2}
    call = partial(evaluate, "relative_flatness", net, X, y, layer="0", criterion=CE, **options)
    found = call(per_sample=True)
    typical = np.sqrt(np.mean(found.term_stderrs**2))
    assert 0.1 * found.value < typical < 0.21 * found.value
    # the mean alone needs far fewer probes
    assert call().stderr > 2 * found.stderr


def test_terms_are_exact_where_as_many_probes_would_cost_more_and_too_few_passes_warn():
    # 80 products, above what "auto" takes at once
    net = nn.Sequential(nn.Linear(90, 80), nn.Tanh(), nn.Linear(80, 3)).double()
    at = "relative_flatness", net, torch.randn(20, 90).double(), torch.arange(20) % 3
    options = {"layer": 0, "criterion": CE, "random_state": 0, "rtol": 0.15}
    found = evaluate(*at, per_sample=True, max_passes=10_000, **options)
    assert found.method == "exact"
    assert not found.term_stderrs.any()
    exact = evaluate(*at, method="exact", per_sample=True, **options)
    assert found.terms == pytest.approx(exact.terms, rel=1e-12)
    assert evaluate(*at, max_passes=10_000, **options).method == "hutchinson"
    message = "the terms of relative_flatness at layer '0' after 6 probes. .* error is typically"
    with pytest.warns(FlatnessWarning, match=message):
        evaluate(*at, per_sample=True, max_passes=8, method="hutchinson", **options)


def test_samples_that_a_loader_may_shuffle_have_no_terms():
    net, data, labels = make("mlp tanh", n=6)
    samples = TensorDataset(data, labels)
    options = {"criterion": CE, "batch_size": 4}
    expected = relative_flatness(net, data, labels, per_sample=True, **options)
    loaders = [
        DataLoader(samples, batch_size=4),
        DataLoader(samples, batch_size=4, sampler=range(6)),
        DataLoader(samples, batch_sampler=[[0, 1, 2, 3], [4, 5]]),
        DataLoader(TensorDataset(data[None], labels[None]), batch_size=None),
    ]
    for loader in loaders:
        found = relative_flatness(net, loader, per_sample=True, criterion=CE)
        assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-12)
    batches = BatchSampler(RandomSampler(samples), 4, drop_last=False)
    some = WeightedRandomSampler([1.0] * 6, 6)
    for order in ({"shuffle": True}, {"sampler": some}, {"batch_sampler": batches}):
        loader = DataLoader(samples, **order)
        with pytest.raises(ValueError, match="RandomSampler of the DataLoader may draw"):
            relative_flatness(net, loader, per_sample=True, criterion=CE)
        assert relative_flatness(net, loader, criterion=CE) > 0
    net = NeuralNetClassifier(MLP, module__n_features=4, module__n_outputs=3, max_epochs=1)
    with pytest.warns(UserWarning, match="iterator_valid__shuffle=True; this is most likely not"):
        net.set_params(criterion=nn.CrossEntropyLoss, iterator_valid__shuffle=True).initialize()
    with pytest.raises(ValueError, match="RandomSampler of the DataLoader may draw"):
        relative_flatness(net, data.float(), labels, per_sample=True)
