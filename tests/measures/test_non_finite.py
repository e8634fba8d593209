"""Networks whose weights are nan, infinite, or not there at all."""

import math
import warnings

import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris
from skorch import NeuralNetClassifier
from torch import nn

from relflat_sk import (
    MLP,
    FlatnessScorer,
    FlatnessWarning,
    RelativeFlatnessRegularizedClassifier,
    feature_robustness,
    flatness_report,
    measure,
    relative_flatness,
    reparameterize,
)
from relflat_sk.measures._names import number_names

CE = nn.CrossEntropyLoss()
X, y = torch.randn(20, 4), torch.arange(20) % 3


def make(value, parameter="hidden0.weight"):
    net = MLP(4, 3)
    with torch.no_grad():
        net.get_parameter(parameter).view(-1)[0] = value
    return net


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("parameter", ["hidden0.weight", "output.bias"])
@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("relative_flatness", 0),
        ("relative_flatness", -1),
        ("eigenvalue_flatness", 0),
        ("eigenvalue_flatness", -1),
        ("l2_norm", -1),
    ],
)
def test_measures_of_weights_that_are_not_finite_warn(value, parameter, name, layer):
    net = make(value, parameter)
    message = f"the value of {name} is nan or infinite, because '{parameter}' of the network cont"
    with pytest.warns(FlatnessWarning, match=message) as found:
        assert not math.isfinite(measure(name, net, X, y, layer=layer, criterion=CE))
    assert len(found) == 1


def test_relative_flatness_warns():
    with pytest.warns(FlatnessWarning, match="value of relative_flatness is nan .*'hidden0.weight"):
        assert math.isnan(relative_flatness(make(math.nan), X, y, criterion=CE))
    with pytest.warns(FlatnessWarning, match="of normalized_relative_flatness is nan"):
        relative_flatness(make(math.nan), X, y, criterion=CE, normalize=True)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_reports_warn_once(value):
    with pytest.warns(
        FlatnessWarning,
        match=rf"and {len(number_names()) - 1} more is nan or inf.*'hidden0.weight'",
    ) as found:
        report = flatness_report(make(value), X, y, criterion=CE)
    assert len(found) == 1
    assert set(report["measure"]) == set(number_names())
    assert not np.isfinite(report["value"]).any()


@pytest.mark.parametrize("aggregate", ["max", "sum"])
def test_aggregates_warn_once(aggregate):
    with pytest.warns(FlatnessWarning, match="value of hessian_trace is nan") as found:
        value = measure("hessian_trace", make(math.nan), X, y, criterion=CE, aggregate=aggregate)
    assert math.isnan(value)
    assert len(found) == 1


def test_overflowing_outputs_warn():
    net = MLP(4, 3)
    with torch.no_grad():
        net.hidden0.weight.mul_(1e30)
        net.output.weight.mul_(1e30)
    with pytest.warns(FlatnessWarning, match="the mean loss is nan: .* outputs are too large"):
        assert not math.isfinite(relative_flatness(net, X, y, criterion=CE))


def test_without_a_loss_there_is_no_curvature():
    # skorch takes the logarithm of what its classifiers put out, which logits do not survive
    net = NeuralNetClassifier(
        MLP, module__n_features=4, module__n_outputs=3, max_epochs=1, verbose=0
    )
    net.initialize()
    data, labels = X.numpy(), y.numpy()
    for layer in (0, -1):
        message = "because the mean loss is nan: .* such as logits in place of probabilities"
        with pytest.warns(FlatnessWarning, match=message):
            assert math.isnan(relative_flatness(net, data, labels, layer=layer))
    with pytest.warns(FlatnessWarning, match="because the mean loss is nan"):
        assert np.isnan(measure("neuron_flatness", net, data, labels)).all()
    with pytest.warns(FlatnessWarning, match="because the mean loss is nan"):
        terms, errors = relative_flatness(net, data, labels, per_sample=True, return_stderr=True)
    assert np.isnan(terms).all()
    assert np.isnan(errors).all()
    # the last layer's closed form needs no labels, and without them there is no loss to see
    assert math.isfinite(relative_flatness(MLP(4, 3), X, criterion=CE))


class NormalizedHead(nn.Module):
    """A network with unit features, as cosine heads have."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6, bias=False), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(nn.functional.normalize(self.first(x)))


def test_a_function_without_derivatives_is_named_as_the_cause():
    torch.manual_seed(0)
    net, data = NormalizedHead(), X.clone()
    data[0] = 0  # whose features the network divides by their norm of 0
    message = "derivative at some sample.* a norm or a square root at 0, .*normalize"
    with pytest.warns(FlatnessWarning, match=message) as found:
        assert math.isnan(relflat(net, data, layer=0))
    assert len(found) == 1
    with pytest.warns(FlatnessWarning, match=f"hessian_trace .*{message}"):
        report = flatness_report(net, data, y, criterion=CE, measures=["hessian_trace", "l2_norm"])
    assert report["value"].isna().sum() == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert relflat(net, data) > 0  # at the layer behind the function


def relflat(net, data, **arguments):
    return relative_flatness(net, data, y[: len(data)], criterion=CE, **arguments)


def test_the_scorer_says_it_in_its_own_words():
    net = RelativeFlatnessRegularizedClassifier(max_epochs=1, verbose=0)
    net.fit(*load_iris(return_X_y=True))
    with torch.no_grad():
        net.module_.hidden0.weight[0, 0] = math.nan
    for name in ("relative_flatness", "eigenvalue_flatness"):
        with pytest.warns(FlatnessWarning, match="its mean loss is nan") as found:
            assert math.isnan(FlatnessScorer(name)(net, *load_iris(return_X_y=True)))
        assert len(found) == 1


def test_finite_networks_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        relative_flatness(MLP(4, 3), X, y, criterion=CE)
        relative_flatness(MLP(4, 3), X, criterion=CE)  # without labels, the loss is nan


@pytest.mark.parametrize(
    "use",
    [
        lambda net: relative_flatness(net, X, y, criterion=CE),
        lambda net: flatness_report(net, X, y, criterion=CE),
        lambda net: feature_robustness(net, X, y, 0.1, criterion=CE),
        lambda net: reparameterize(net, [2.0, 0.5]),
    ],
    ids=["relative_flatness", "report", "robustness", "reparameterize"],
)
@pytest.mark.parametrize("part", ["all", "output"])
def test_networks_on_the_meta_device_are_refused(use, part):
    net = MLP(4, 3)
    (net if part == "all" else net.output).to("meta")
    with pytest.raises(ValueError, match="or a part of it, is on the meta device, where tensors"):
        use(net)
