"""Data that nets take or refuse: streams, data loaders, devices."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from skorch import NeuralNetClassifier
from skorch.helper import predefined_split
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from relflat_sk import (
    FlatnessScorer,
    RelativeFlatnessRegularizedClassifier,
    StopAtGradientNorm,
    StopAtLoss,
    feature_robustness,
    flatness_report,
    measure,
    relative_flatness,
)
from relflat_sk.exceptions import FlatnessWarning

N = 90
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 4)).astype(np.float32)
Y = X[:, :3].argmax(axis=1)
PAIRS = list(zip(torch.from_numpy(X), torch.from_numpy(Y), strict=True))


class Stream(IterableDataset):
    """Starts anew each time that it is iterated."""

    def __iter__(self):
        return iter(PAIRS)


class Once(IterableDataset):
    """Can be read once, like a socket."""

    def __init__(self):
        self.pairs = iter(PAIRS)

    def __iter__(self):
        return self.pairs


class Sized(Stream):
    def __len__(self):
        return N


def make(**params):
    sizes = {"module__n_features": 4, "module__n_outputs": 3}
    settings = {"max_epochs": 3, "lr": 0.01, "verbose": 0, "random_state": 0, **sizes}
    return RelativeFlatnessRegularizedClassifier(**{**settings, **params})


# -- streams -------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [Stream, Sized])
@pytest.mark.parametrize("layer", [-1, "all"])
@pytest.mark.usefixtures("own_loop")
def test_a_stream_is_trained_and_measured_like_arrays(stream, layer):
    streamed = make(flatness_layer=layer).fit(stream())
    fitted = make(flatness_layer=layer, iterator_train__shuffle=False).fit(X, Y)
    assert streamed.history[:, "train_loss"] == fitted.history[:, "train_loss"]
    assert_allclose(streamed.relative_flatness_, fitted.relative_flatness_, rtol=1e-6)
    assert_allclose(streamed.constant_comparison_.loss, fitted.constant_comparison_.loss, rtol=1e-6)
    assert streamed.predict(stream()).tolist() == fitted.predict(X).tolist()
    assert streamed.score(stream(), Y) == fitted.score(X, Y)


def test_a_stream_is_measured():
    net = make().fit(X, Y)
    assert_allclose(relative_flatness(net, Stream()), relative_flatness(net, X, Y))
    assert_allclose(FlatnessScorer()(net, Stream()), FlatnessScorer()(net, X, Y))
    report = flatness_report(net, Stream(), None, measures=["relative_flatness", "l2_norm"])
    assert (report["n_samples"] == N).all()


def test_partial_fit_on_a_stream():
    net = make().partial_fit(Stream())
    assert_allclose(net.relative_flatness_, relative_flatness(net, X, Y), rtol=1e-6)


@pytest.mark.parametrize("callback", [StopAtLoss(0.6), StopAtGradientNorm(0.5)], ids=type)
def test_callbacks_of_convergence_read_the_stream_again(callback):
    streamed, fitted = (
        make(max_epochs=60, callbacks=[callback], iterator_train__shuffle=False).fit(*data)
        for data in [(Stream(),), (X, Y)]
    )
    assert streamed.converged_
    assert len(streamed.history) == len(fitted.history) < 60


def test_validation_on_another_stream():
    net = make(train_split=predefined_split(Stream())).fit(Stream())
    assert len(net.history[:, "valid_loss"]) == 3


def test_a_stream_that_is_read_once_is_trained_and_not_measured():
    net = make(max_epochs=1)
    with pytest.warns(FlatnessWarning, match="X is a stream .* let its __iter__ return a new"):
        net.fit(Once())
    assert np.isnan(net.relative_flatness_)
    fitted = make(max_epochs=1, iterator_train__shuffle=False).fit(X, Y)
    for name in ("train_loss", "flatness_penalty", "flatness_clipped"):  # recorded on the way
        assert net.history[-1, name] == pytest.approx(fitted.history[-1, name], rel=1e-6)
    assert net.history[-1, "flatness_penalty"] > 0


# -- data loaders --------------------------------------------------------------------------


def _loader(**arguments):
    pairs = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    return DataLoader(pairs, **{"batch_size": 30, **arguments})


@pytest.mark.usefixtures("own_loop")
def test_a_data_loader_makes_the_batches():
    net = make().fit(_loader())
    fitted = make(batch_size=30, iterator_train__shuffle=False).fit(X, Y)
    assert net.history[:, "train_loss"] == fitted.history[:, "train_loss"]
    assert_allclose(net.relative_flatness_, fitted.relative_flatness_, rtol=1e-6)
    assert net.predict(_loader()).tolist() == fitted.predict(X).tolist()
    assert net.score(_loader(), Y) == fitted.score(X, Y)
    assert_allclose(relative_flatness(net, _loader(shuffle=True)), relative_flatness(net, X, Y))
    assert_allclose(FlatnessScorer()(net, _loader()), FlatnessScorer()(net, X, Y))


def test_a_plain_net_of_skorch_is_measured_on_a_data_loader():
    net = NeuralNetClassifier(nn.Linear, module__in_features=4, module__out_features=3)
    net.set_params(criterion=nn.CrossEntropyLoss, verbose=0, train_split=None).fit(X, Y)
    assert_allclose(relative_flatness(net, _loader()), relative_flatness(net, X, Y), rtol=1e-6)


def test_no_prediction_in_random_order():
    with pytest.raises(ValueError, match="nobody knows which prediction is whose"):
        make().fit(X, Y).predict(_loader(shuffle=True))


# -- devices -------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_refuses_a_device_that_is_not_there():
    message = "device='cuda' cannot be used here: .* Pass device='cpu'"
    net = make(device="cuda")
    with pytest.raises(ValueError, match=message):
        net.fit(X, Y)
    assert not net.initialized_
    fitted = make().fit(X, Y)
    criterion = nn.CrossEntropyLoss()
    for call in [
        lambda: net.partial_fit(X, Y),
        lambda: relative_flatness(fitted, X, Y, device="cuda"),
        lambda: relative_flatness(fitted.module_, X, Y, criterion=criterion, device="cuda"),
        lambda: measure("hessian_trace", fitted, X, Y, device="cuda"),
        lambda: flatness_report(fitted, X, Y, device="cuda"),
        lambda: FlatnessScorer(measure_params={"device": "cuda"})(fitted, X, Y),
        lambda: feature_robustness(fitted, X, Y, 0.1, device="cuda"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
