"""Predicted and measured rises of the loss under rounding, against dense Hessians."""

import copy
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from relflat_sk import FlatnessWarning, layer_sensitivity
from relflat_sk.measures import _sensitivity
from tests import oracles
from tests.measures.nets import CE, LAYERS, NETS, dense, make
from tests.network.test_network import prepared, same, state_of

BITS = (12, 3)


def rounded(W, bits, per_channel):
    """Round each number by itself."""
    found, most = torch.zeros_like(W), 2 ** (bits - 1) - 1
    for s in range(len(W)):
        scale = float(W[s].abs().max() if per_channel else W.abs().max()) / most
        for j in range(W.shape[1]):
            found[s, j] = round(float(W[s, j]) / scale) * scale
    return found


def with_rounded(net, name, bits, per_channel):
    net = copy.deepcopy(net)
    layer = net.get_submodule(name)
    index, flat = oracles.row_index(layer), layer.weight.data.view(-1)
    flat[index] = rounded(flat[index], bits, per_channel)
    return net


def losses(net, X, y):
    return nn.functional.cross_entropy(net(X), y, reduction="none").detach().numpy()


@pytest.mark.parametrize(
    ("kind", "per_channel"),
    [*((kind, True) for kind in NETS), ("mlp relu", False), ("conv", False), ("gpt2", False)],
)
def test_agrees_with_the_dense_hessian(kind, per_channel):
    net, X, y = make(kind)
    options = {"criterion": CE, "batch_size": 3, "measured": True, "n_probes": None}
    table = layer_sensitivity(net, X, y, bits=BITS, per_channel=per_channel, **options)
    names = [name for name, layer in net.named_modules() if isinstance(layer, LAYERS)]
    assert table["layer"].tolist() == [name for name in names for _ in BITS]
    forms = {name: oracles.weight_hessians(net, name, CE, X, y) for name in names}
    n = len(X)

    def mean_and_stderr(each):
        return pytest.approx((np.mean(each), np.std(each, ddof=1) / n**0.5), rel=1e-8, abs=1e-12)

    for row in table.itertuples():
        layer = net.get_submodule(row.layer)
        H, W = dense(net, row.layer, X, y)
        D = rounded(W, row.bits, per_channel) - W
        firsts = np.zeros(n)
        for i in range(n):
            (G,) = torch.autograd.grad(CE(net(X[i : i + 1]), y[i : i + 1]), layer.weight)
            firsts[i] = (G.flatten()[oracles.row_index(layer)] * D).sum()
        seconds = torch.einsum("sj,nsjtk,tk->n", D, forms[row.layer], D).numpy() / 2
        assert row.first_order == pytest.approx(firsts.mean(), rel=1e-8, abs=1e-12)
        assert row.second_order == pytest.approx(seconds.mean(), rel=1e-8, abs=1e-12)
        assert (row.predicted, row.stderr) == mean_and_stderr(firsts + seconds)
        by_trace = float(torch.trace(oracles.flat_matrix(H)) * D.square().mean()) / 2
        assert row.by_trace == pytest.approx(by_trace, rel=1e-8)
        moved = losses(with_rounded(net, row.layer, row.bits, per_channel), X, y)
        rise = moved - losses(net, X, y)
        assert (row.measured, row.measured_stderr) == mean_and_stderr(rise)
    # what is left out vanishes with the rounding error, and faster than the rise does
    fine = table[table["bits"] == 12]
    assert np.abs(fine["predicted"] - fine["measured"]).max() < 0.02 * fine["measured"].abs().max()


@pytest.mark.parametrize("n_probes", [1, 2])
@pytest.mark.parametrize("kind", ["mlp relu", "conv"])
def test_probes_are_right_on_average(kind, n_probes):
    net, X, y = make(kind)
    n = 2000 // n_probes  # draws for each of the samples
    X, y = X.repeat(n, *[1] * (X.ndim - 1)), y.repeat(n)
    options = {"bits": 3, "criterion": CE, "random_state": 0}
    exact = layer_sensitivity(net, X, y, n_probes=None, **options)
    drawn = layer_sensitivity(net, X, y, n_probes=n_probes, **options)
    # the variance of a form of random signs is at most twice its squared mean
    for column in ("second_order", "by_trace"):
        np.testing.assert_allclose(drawn[column], exact[column], rtol=4 * np.sqrt(2 / 2000))
        assert (drawn[column][:-1] != exact[column][:-1]).all()  # the last has a closed form
    np.testing.assert_allclose(drawn["first_order"], exact["first_order"])


@pytest.mark.parametrize("of", ["samples", "classes", "counting samples", "one sample"])
def test_standard_errors_of_weighted_means(of):
    net, X, y = make("mlp tanh")
    weight = torch.tensor([0.1, 3.0, 0.5, 1.0, 4.0, 1.0, 2.0], dtype=torch.float64)
    weight[{"counting samples": [1, 5], "one sample": slice(1, None)}.get(of, [])] = 0
    weighted = {"criterion": CE, "sample_weight": weight.numpy()}
    if of == "classes":
        weighted = {"criterion": nn.CrossEntropyLoss(weight[:3])}
        weight = weight[y]
    options = {"bits": 3, "measured": True, "n_probes": None}
    table = layer_sensitivity(net, X, y, batch_size=4, **weighted, **options)
    share, n = (weight / weight.sum()).numpy(), int((weight > 0).sum())
    single = zip(X.split(1), y.split(1), strict=True)
    alone = [layer_sensitivity(net, *one, criterion=CE, **options) for one in single]
    names = {"predicted": "stderr", "by_trace": "by_trace_stderr", "measured": "measured_stderr"}
    for column, error in names.items():
        each = np.array([one[column] for one in alone])
        mean = share @ each
        scatter = share**2 @ (each - mean) ** 2
        np.testing.assert_allclose(table[column], mean, rtol=1e-9)
        expected = scatter * n / (n - 1) if n > 1 else np.full(len(mean), np.nan)
        np.testing.assert_allclose(table[error], np.sqrt(expected))


@pytest.mark.parametrize("names", [{"predicted", "stderr"}, {"measured", "measured_stderr"}])
def test_a_narrow_screen_shows_the_rise_and_its_error(names):
    net, X, y = make("mlp tanh")
    table = layer_sensitivity(net, X, y, criterion=CE, bits=[8, 6], measured="measured" in names)
    with pd.option_context("display.width", 80, "display.max_columns", 0):
        header = repr(table).splitlines()[0].split()
    assert names | {"predicted", "stderr"} <= {*header}


def test_weights_of_zeros_have_no_error_and_nan_no_prediction():
    net, X, y = make("mlp tanh")
    net[0].weight.data.zero_()
    table = layer_sensitivity(net, X, y, criterion=CE, layers=0, measured=True)
    assert (table[["predicted", "by_trace", "measured"]] == 0).all(axis=None)
    net[0].weight.data.fill_(np.nan)
    with pytest.warns(FlatnessWarning, match="predicted is nan or infinite, because '0.weight'"):
        table = layer_sensitivity(net, X, y, criterion=CE)
    assert table["predicted"].isna().all()


def test_the_network_is_given_back_also_after_a_failure(monkeypatch):
    net, X, y = prepared()
    before = state_of(net)
    # while a hook changes the layer
    monkeypatch.setattr(_sensitivity, "layer_map", Mock(side_effect=RuntimeError("full")))
    with pytest.raises(RuntimeError, match="full"):
        layer_sensitivity(net, X, y, criterion=CE, measured=True)
    same(before, state_of(net))
