"""The sharpness conditions, their parts and Theorem 1, sample by sample in NumPy."""

import math
from collections import OrderedDict, defaultdict
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

from relflat_sk import FlatnessWarning, sharpness_conditions
from relflat_sk.theory import sharpness_bound
from tests.cases import Net
from tests.measures.test_many_classes import Sizes

CE = nn.CrossEntropyLoss()


def network(activation=nn.ReLU, bias=True):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 9, bias=bias), activation(), nn.Linear(9, 8, bias=bias), activation(),
        nn.Linear(8, 3, bias=bias),
    ).double()  # fmt: skip


def data(n=9):
    return torch.randn(n, 4).double()


def linear_of(net):
    return [m for m in net if isinstance(m, nn.Linear)]


def products(net, x):
    """The matrices D_i W_i of a chain at x, with x as a column in front, and the outputs."""
    factors, outputs = [x.numpy()[:, None]], []
    linear = linear_of(net)
    for k, layer in enumerate(linear):
        z = layer(x)
        x = net[2 * k + 1](z) if k + 1 < len(linear) else z
        slopes = (x / z).detach().numpy()
        factors.append(np.diag(slopes) @ layer.weight.detach().numpy())
        outputs.append(z.detach().numpy())
    return factors, outputs


def norm_of(factors, a, b):
    product = np.eye(factors[a].shape[1])
    for i in range(a, b + 1):
        product = factors[i] @ product
    return np.sqrt((product**2).sum())


def factors_of(net, x):
    """Whole, after and before of every a < c < b at x, with mu in front."""
    matrices, _ = products(net, x)
    found = {}
    for a, c, b in combinations(range(len(matrices)), 3):
        ends = (a, b), (c + 1, b), (a, c)
        whole, after, before = (norm_of(matrices, *at) for at in ends)
        mu = math.sqrt(len(matrices[c])) * whole / (after * before)
        found[a, c, b] = (mu, whole, after, before)
    return found


def constants(net, X):
    """Compute mu, C_2 and C_3 of every sample, as the paper defines them."""
    found = defaultdict(list)
    for x in X:
        matrices, outputs = products(net, x)
        factors = factors_of(net, x)
        for c in range(1, len(outputs)):
            mu = min(values[0] for (_, at, _), values in factors.items() if at == c)
            found["C1", c].append(mu)
            # the share grows only where delta is the size of a unit
            sizes = np.abs(outputs[c - 1]) / np.linalg.norm(x.numpy())
            shares = [np.mean(sizes <= delta) / delta for delta in sizes]
            found["C2", c].append(max(shares))
        for i, layer in enumerate(linear_of(net), start=1):
            rows = np.linalg.norm(layer.weight.detach().numpy(), axis=1)
            ratio = math.sqrt(len(rows)) * rows.max() / np.linalg.norm(matrices[i])
            found["C3", i].append(ratio)
    return found


def value(table, condition, layer, column="worst"):
    rows = table[(table["condition"] == condition) & (table["layer"] == layer)]
    return rows[column].item()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.LeakyReLU])
def test_conditions_are_those_of_the_paper(activation, bias):
    net, X = network(activation, bias), data()
    table = sharpness_conditions(net, X, batch_size=4)
    expected = constants(net, X)
    assert len(table) == len(expected) == 7
    for (condition, at), values in expected.items():
        layer = str(2 * (at - 1))
        worst = min(values) if condition == "C1" else max(values)
        assert value(table, condition, layer) == pytest.approx(worst, rel=1e-12)
        assert value(table, condition, layer, "median") == pytest.approx(sorted(values)[4])
    assert set(table["constant"]) == {"mu", "C_2", "C_3"}
    first = table.iloc[0]
    assert f"{first['worst']:.3g}" in first["reading"]


def test_units_that_are_never_active_fail_the_third_condition():
    net, X = network(), data()
    with torch.no_grad():
        net[2].bias.fill_(-100)
    table = sharpness_conditions(net, X)
    # products of zero do not count as cancellation
    assert value(table, "C3", "2") == value(table, "C1", "2") == np.inf


def test_batch_norm_is_folded():
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Linear(6, 2))
    net(torch.randn(50, 4) * 3)
    net.double().eval()
    folded = nn.Sequential(nn.utils.fusion.fuse_linear_bn_eval(net[0], net[1]), nn.ReLU(), net[3])
    X = data()
    one, two = sharpness_conditions(net.train(), X), sharpness_conditions(folded, X)
    np.testing.assert_allclose(one["worst"], two["worst"])


def bent(x):
    return torch.maximum(x, 0.1 * x - 0.01)


RESIDUAL = {"one": nn.Linear(4, 4), "two": nn.Linear(4, 4)}
IMAGES = nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 3), nn.Flatten()


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (network(lambda: Net(lambda _, x: bent(x))), "behind '0' is not a ReLU or leaky ReLU of"),
        (Net(lambda net, x: net.two(x + net.one(x).relu()), **RESIDUAL), "behind 'one' is not a"),
        (nn.Sequential(*IMAGES), "layer '1' receives inputs of shape .1, 4."),
    ],
)
def test_networks_of_other_kinds_are_refused(net, message):
    with pytest.raises(ValueError, match=message):
        sharpness_conditions(net.double(), data(5))


@pytest.mark.parametrize("activation", [nn.Tanh, nn.GELU, nn.Softplus, lambda: nn.ELU(alpha=1e-9)])
def test_smooth_activations_do_not_pass_by_luck(activation):
    # one sample shows one slope, and ELU is the identity for positive numbers
    net = nn.Sequential(nn.Linear(2, 3), activation(), nn.Linear(3, 2))
    net[0].weight.data.abs_()
    net[0].bias.data.fill_(30.0)
    for X in (torch.rand(1, 2), -100 * torch.rand(1, 2), torch.rand(5, 2)):
        with pytest.raises(ValueError, match="not a ReLU or leaky ReLU of the output of '0'"):
            sharpness_conditions(net, X)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_leaky_slopes_may_be_rounded(dtype):
    hidden = nn.Linear(4, 9)
    net = nn.Sequential(hidden, nn.LeakyReLU(0.3), nn.Linear(9, 2)).to(dtype)
    assert len(sharpness_conditions(net, torch.randn(50, 4).to(dtype)))


@pytest.mark.parametrize("activation", [nn.ReLU, nn.LeakyReLU])
def test_the_factors_are_norms_of_products(activation):
    net, X = network(activation), data()
    table = sharpness_conditions(net, X, detail="C1", batch_size=4).set_index(["a", "c", "b"])
    found = [factors_of(net, x) for x in X]
    assert sorted(table.index) == sorted(found[0])
    for at in found[0]:
        mu, *norms = min(one[at] for one in found)
        row = table.loc[at]
        assert row["mu"] == pytest.approx(mu, rel=1e-9)
        assert row[["whole", "after", "before"]].tolist() == pytest.approx(norms, rel=1e-9)
        assert row["layer"] == str(2 * (at[1] - 1))
    worst = sharpness_conditions(net, X).query("condition == 'C1'")["worst"]
    assert worst.tolist() == pytest.approx(table.groupby("c")["mu"].min().tolist())


def test_the_curve_counts_units_that_a_disturbance_can_switch():
    net, X = network(), data()
    deltas = [0.01, 0.1, 0.5, 20]
    curve = sharpness_conditions(net, X, detail="C2", deltas=deltas, batch_size=4)
    assert curve["delta"].tolist() == deltas * 2
    for row in curve.itertuples():
        k = int(row.layer) // 2
        limits = row.delta * X.norm(dim=1).numpy()
        outputs = [products(net, x)[1][k] for x in X]
        shares = [np.mean(abs(z) <= at) for z, at in zip(outputs, limits, strict=True)]
        assert row.position == k
        assert row.mean_share == pytest.approx(np.mean(shares))
        assert row.largest_share == pytest.approx(max(shares))
        assert row.ratio == pytest.approx(max(shares) / row.delta)


@pytest.mark.parametrize("detail", [None, "C1", "C2"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_samples_of_zeros_have_no_unit_and_are_left_out(bias, detail):
    net, X = network(bias=bias), data()
    X[[2, 7]] = 0
    with pytest.warns(FlatnessWarning, match="2 of 9 samples are zero and left out"):
        table = sharpness_conditions(net, X, detail=detail, batch_size=3)
    rest = sharpness_conditions(net, X[[0, 1, 3, 4, 5, 6, 8]], detail=detail)
    pd.testing.assert_frame_equal(table, rest)
    with pytest.raises(ValueError, match="all samples in X are zero, but the cond"):
        sharpness_conditions(net, 0 * X, detail=detail)


def test_products_of_matrices_are_held_for_one_sample_at_once():
    with Sizes() as results:
        sharpness_conditions(network(), data())
    assert max(results.found) < 2 * (9 * 8 * 8)  # bytes; of all nine samples, they have nine times


def test_a_trained_network_is_compared_with_its_initial_weights_on_the_same_inputs():
    rng = np.random.default_rng(0)
    X, y = 100 + rng.normal(size=(30, 4)), np.arange(30) % 3
    pipe = make_pipeline(StandardScaler(), MLPClassifier((5,), max_iter=5000, random_state=0))
    pipe.fit(X, y)
    layers = {"hidden0": nn.Linear(4, 5), "relu": nn.ReLU(), "output": nn.Linear(5, 3)}
    initial = nn.Sequential(OrderedDict(layers)).double()
    both = sharpness_conditions(pipe, X, initial=initial)
    first = sharpness_conditions(initial, torch.tensor(pipe[0].transform(X)))
    names = ["initial_worst", "initial_median"]
    np.testing.assert_allclose(both[names], first[["worst", "median"]], rtol=1e-5)
    alone = sharpness_conditions(pipe, X)
    pd.testing.assert_frame_equal(both[alone.columns], alone)
    assert (both["initial_worst"] != both["worst"]).all()


def right_hand_side(net, X, y, sigmas, delta, slope):
    """The bound of Theorem 1, from constants and norms that are computed sample by sample."""
    found = constants(net, X).items()
    mu, c_2, c_3 = (
        extreme(np.concatenate([values for (name, _), values in found if name == condition]))
        for condition, extreme in (("C1", min), ("C2", max), ("C3", max))
    )
    W = [m.weight.detach().numpy() for m in linear_of(net)]
    sizes = [np.linalg.norm(w) for w in W]
    gammas = [s * math.sqrt(w.size) / (mu**2 * n) for s, w, n in zip(sigmas, W, sizes, strict=True)]
    spread, first, second = 1.0, 1.0, 1.0
    for g, w in zip(gammas, W, strict=True):
        c_delta = (1 + delta / len(W)) * math.sqrt(2 * math.log(w.shape[0]))
        spread *= 1 + g
        first *= 1 + g * c_2 * c_3
        second *= 1 + g * c_delta * c_2
    spread, flips = spread - 1, first * (second - 1)
    output = net(X).norm(dim=1).mean().item()
    inside = np.square(np.divide(sizes, sigmas)).sum() + math.log(1 / delta)
    loss = -net(X).log_softmax(1)[torch.arange(len(X)), y].mean().item()
    return loss, (spread + flips) * slope * output, math.sqrt(inside / len(X)), gammas


@pytest.mark.parametrize(("sigma", "n_ignored"), [(1e-3, 0), ((1e-3, 2e-3, 5e-4), 0), (1e-3, 5)])
def test_the_bound_is_the_sum_of_its_terms(sigma, n_ignored):
    net, X = network(), data()
    y = net(X).argmax(dim=1)
    sigmas = sigma if isinstance(sigma, tuple) else (sigma,) * 3
    inputs = torch.cat([3 * data(n_ignored), X])
    labels = torch.cat([torch.full((n_ignored,), -100), y])  # of which the loss takes none
    found = sharpness_bound(net, inputs, labels, sigma, delta=0.1, criterion=CE, batch_size=4)
    *terms, gammas = right_hand_side(net, X, y, sigmas, 0.1, 2**0.5)
    parts = [found.empirical_risk, found.sharpness, found.complexity, found.total]
    assert parts == pytest.approx([*terms, sum(terms)], rel=1e-9)
    assert found.gammas == pytest.approx(gammas, rel=1e-9)


def test_the_slope_of_the_binary_loss_is_one():
    net = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 1)).double()
    at = net, data(), torch.ones(9, 1).double(), 1e-3
    found = sharpness_bound(*at, criterion=nn.BCEWithLogitsLoss())
    assert found == sharpness_bound(*at, criterion=nn.BCEWithLogitsLoss(), lipschitz=1.0)


def test_a_layer_of_zeros_has_no_finite_bound():
    net, X, y = network(), data(20), torch.zeros(20).long()
    nn.init.zeros_(net[4].weight)
    found = sharpness_bound(net, X, y, 0.1, criterion=CE)
    assert all(map(math.isfinite, found.gammas[:2]))
    assert (found.gammas[2], found.sharpness, found.total) == (math.inf,) * 3
    for linear in (net[0], net[2]):
        nn.init.zeros_(linear.weight)
        nn.init.constant_(linear.bias, -1.0)
    # no unit is active: infinite norms of C1's products, times constants of C3 that are zero
    dead = sharpness_bound(net, X, y, 0.1, criterion=CE)
    assert (dead.sharpness, dead.total) == (math.inf, math.inf)
