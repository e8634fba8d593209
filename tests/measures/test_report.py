"""flatness_report, eigenvalues, aggregates, saddles and the table of invariances."""

import copy
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from relflat_sk import FlatnessWarning, flatness_report, get_measure_names, measure
from relflat_sk.measures._layer_measures import LAYER_MEASURES
from relflat_sk.measures._measure_network import NETWORK_WIDE, SAME
from relflat_sk.measures._network_measure import REPARAMETERIZATIONS
from tests import oracles
from tests.measures.nets import CE, UNTRAINED, dense, evaluate, make, reached

pytestmark = UNTRAINED


@pytest.mark.parametrize(("seed", "random_state"), [(1, 0), (16, 2), (49, 1)])
def test_the_second_eigenvalue_is_not_taken_for_the_largest(seed, random_state):
    torch.manual_seed(seed)
    X, y = torch.randn(40, 5), torch.randn(40, 2)
    net, criterion = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2)), nn.MSELoss()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(30):
        optimizer.zero_grad()
        criterion(net(X), y).backward()
        optimizer.step()
    report = flatness_report(
        net, X, y, measures="hessian_max_eigenvalue", layers=0, criterion=criterion,
        random_state=random_state,
    )  # fmt: skip

    hessian, _ = dense(net.double(), "0", X.double(), y.double(), criterion)
    assert report["value"].item() == pytest.approx(oracles.largest(hessian), 0.01)


@pytest.mark.parametrize("seed", [179, 272])
def test_the_second_eigenvalue_is_not_taken_for_the_largest_that_is_close(seed):
    rng, n = np.random.default_rng(seed), 40
    vectors = np.linalg.qr(rng.normal(size=(n, n)))[0]
    values = rng.random(n) * 0.05
    values[:2] = 1, 0.9
    # the Hessian of the squared error is 2 X^T X / n
    X = torch.from_numpy(np.sqrt(n * values / 2)[:, None] * vectors)
    found = measure(
        "hessian_max_eigenvalue", nn.Linear(n, 1, bias=False).double(), X,
        torch.zeros(n, 1).double(), criterion=nn.MSELoss(), random_state=seed,
    )  # fmt: skip
    assert found == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize("name", ["network_flatness", "joint_eigenvalue_flatness"])
@pytest.mark.parametrize("kind", ["conv", "conv tanh"])
def test_eigenvalues_on_one_batch_take_few_forward_passes(kind, name):
    net, X, y = make(kind)
    outputs: list[torch.Tensor] = []
    net.register_forward_hook(lambda net, x, output: outputs.append(output))
    options = {"criterion": CE, "random_state": 0}
    kept = measure(name, net, X, y, **options)
    assert len(outputs) <= 4
    batched = measure(name, net, X, y, batch_size=4, **options)
    assert kept == pytest.approx(batched, rel=1e-9)


def test_eigenvalue_error_bounds_hold_and_those_that_do_not_converge_warn(monkeypatch):
    net, X, y = make("conv")
    eigenvalues = np.linalg.eigvalsh(dense(net, "0", X, y)[0].reshape(36, 36))
    find = partial(evaluate, "hessian_max_eigenvalue", net, X, y, layer=0, criterion=CE)
    found = find(rtol=0.1)
    assert abs(found.value - eigenvalues[-1]) <= found.stderr + 1e-12
    monkeypatch.setattr("relflat_sk.measures._eigenvalues._MAX_PRODUCTS", 2)
    with pytest.warns(FlatnessWarning, match="did not converge to a relative tolerance of 0.01"):
        found = find()
    assert np.abs(eigenvalues - found.value).min() <= found.stderr  # of one that is not the largest


# networks with random weights; tanh has no paths
@pytest.mark.filterwarnings("ignore:the margin is .*not positive:relflat_sk.FlatnessWarning")
@pytest.mark.filterwarnings("ignore:.*path_norm.* is nan:relflat_sk.FlatnessWarning")
@pytest.mark.filterwarnings("ignore:comparable_flatness is nan:relflat_sk.FlatnessWarning")
@pytest.mark.parametrize("kind", ["conv", "mlp tanh"])
def test_report_has_every_layer_and_measure(kind):
    net, X, y = make(kind)
    options = {"criterion": CE, "random_state": 0, "rtol": 1e-6}
    report = flatness_report(net, X, y, batch_size=4, n_draws=2, n_steps=2, **options)
    assert list(report.columns) == [
        "measure", "layer", "position", "method", "invariance", "n_samples", "value", "stderr",
    ]  # fmt: skip
    layers = [name for name, m in net.named_modules() if hasattr(m, "weight")]
    per_layer = [name for name in get_measure_names() if name not in NETWORK_WIDE]
    assert len(report) == len(layers) * len(per_layer) + len(NETWORK_WIDE)
    assert set(report.loc[report["layer"] == "", "measure"]) == set(NETWORK_WIDE)
    assert (report["n_samples"] == 7).all()
    with_decay = flatness_report(net, X, y, criterion=CE, weight_decay=0.1, layers=0)
    assert "normalized_relative_flatness" not in set(with_decay["measure"])
    unreached = report["measure"] == "comparable_flatness"
    assert report.loc[unreached, "value"].isna().all()
    for _, row in report[(report["layer"] != "") & ~unreached].iterrows():
        value = measure(row["measure"], net, X, y, layer=row["position"], **options)
        assert row["value"] == pytest.approx(value, rel=1e-9)
    table = report.pivot_table(index="layer", columns="measure", values="value", sort=False)
    assert list(table.index[: len(layers)]) == layers
    top = report.loc[report["measure"] == "network_flatness", "value"].item()
    assert top == pytest.approx(table["eigenvalue_flatness"].max(), rel=1e-6)
    for name in ("relative_flatness", "neuron_flatness_max"):
        found = [measure(name, net, X, y, criterion=CE, aggregate=how) for how in ("max", "sum")]
        assert found == pytest.approx(table[name].agg(["max", "sum"]).tolist())


def test_report_of_some_layers_and_measures():
    net, X, y = make("conv")
    report = partial(flatness_report, net, X, y, criterion=CE)
    found = report(layers=[-1, "0"], measures=["hessian_trace"])
    assert found["layer"].tolist() == ["0", "6"]
    assert found["position"].tolist() == [0, 2]  # among all layers, also those left out
    assert report(measures=["l2_norm"])["position"].isna().all()
    expected = report(layers=["3"], measures=["hessian_trace"])
    for layers in (1, np.int64(1), -2, net[3], np.array([1]), (1,)):
        pd.testing.assert_frame_equal(report(layers=layers, measures="hessian_trace"), expected)


def test_a_named_measure_that_does_not_apply_is_nan_beside_the_others():
    net, X, y = make("mlp tanh")
    names = ["relative_flatness", "l1_path_norm", "pac_bayes_flatness"]
    with pytest.warns(FlatnessWarning, match="l1_path_norm is nan: .*no path norm") as caught:
        report = flatness_report(net, X, y, criterion=CE, measures=names, layers=-1, n_draws=2)
    values = report.set_index("measure")["value"]
    assert values.isna().tolist() == [False, True, False]
    assert caught[0].filename == __file__
    with pytest.raises(ValueError, match="no path norm"):
        measure("l1_path_norm", net, X, y, criterion=CE)
    # an argument that is not valid is an error of the call
    with pytest.raises(ValueError, match="risk must be"):
        flatness_report(net, X, y, criterion=CE, measures=names, layers=-1, risk="all")


def test_the_table_covers_every_measure():
    assert sorted(SAME) == get_measure_names()
    assert all(set(same) <= set(REPARAMETERIZATIONS) for same in SAME.values())


def scale(layer, rows=None, columns=None):
    """Multiply rows of a layer, with its bias, and columns of its weight."""
    with torch.no_grad():
        if rows is not None:
            layer.weight *= rows[:, None] if rows.ndim else rows
            layer.bias *= rows
        if columns is not None:
            layer.weight *= columns


def rescaled(net, change, factors):
    """Change an MLP (Linear, ReLU, Linear, ReLU, Linear), measured at its middle layer."""
    factors = torch.tensor(factors).double()
    first, middle, last = net[0], net[2], net[4]
    if change == "layer":
        scale(first, factors[0])
        scale(middle, factors[0] * factors[1], 1 / factors[0])
        scale(last, None, 1 / (factors[0] * factors[1]))
    elif change == "feature neurons":
        scale(first, factors)
        scale(middle, None, 1 / factors)
    else:
        scale(middle, factors[:5])
        scale(last, None, 1 / factors[:5])
    return net


def changed(seed, change, factors):
    """Make a network, a changed one of the same function, and the layer to measure at."""
    if change != "feature mixing":
        return mlp(seed), rescaled(mlp(seed), change, factors), 1
    net = mlp(seed)
    del net[3]  # what the last layer receives can be mixed
    matrix = torch.randn(5, 5).double() + 4 * torch.eye(5).double()
    matrix *= torch.tensor(factors[:5]).double().sqrt()[:, None]
    other = copy.deepcopy(net)
    with torch.no_grad():
        other[2].weight.copy_(matrix @ net[2].weight)
        other[2].bias.copy_(matrix @ net[2].bias)
        other[3].weight.copy_(net[3].weight @ torch.linalg.inv(matrix))
    return net, other, -1


def mlp(seed):
    torch.manual_seed(seed)
    layers = nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)
    return nn.Sequential(*layers).double()


def before_and_after(factors, seed, same):
    """Calls of measures before and after a change that leaves their values the same, or not."""
    X = torch.randn(12, 4).double()
    for change in REPARAMETERIZATIONS:
        *nets, layer = changed(seed, change, factors)
        y = nets[0](X).argmax(dim=1)  # some measures need a margin, or an accuracy to lose
        torch.testing.assert_close(nets[0](X), nets[1](X))
        # network_flatness is the largest eigenvalue flatness of all layers
        for name in sorted(SAME.keys() - {"network_flatness"}):
            if (change in SAME[name]) == same:
                criterion, labels = reached(name, CE, X, y)
                at = {"layer": layer} if name in LAYER_MEASURES else {}
                call = partial(measure, name, X=X, y=labels, criterion=criterion, **at)
                yield name, change, [partial(call, model=net) for net in nets]


# the same examples on every machine
@settings(max_examples=3, deadline=None, derandomize=True)
@given(st.lists(st.floats(0.1, 25), min_size=6, max_size=6), st.integers(0, 10**6))
def test_measures_are_invariant_where_the_table_says_same(factors, seed):
    for name, change, calls in before_and_after(factors, seed, same=True):
        before, after = (call(rtol=1e-10) for call in calls)
        assert after == pytest.approx(before, rel=1e-6, abs=1e-12), (name, change)


# enough noise on small weights to tell it from noise on the others
PARAMS = {
    "adaptive_sharpness": {"n_steps": 3},
    "keskar_sharpness": {"n_steps": 3},
    "pac_bayes_flatness": {"n_draws": 2},
    "pac_bayes_magnitude_flatness": {"eps": 0.05, "risk": "loss", "n_draws": 5},
}


def test_measures_change_where_the_table_says_different():
    factors = [0.3, 9.0, 2.0, 0.1, 25.0, 5.0]
    for name, change, calls in before_and_after(factors, 0, same=False):
        options = {"random_state": 0, "rtol": 1e-8, **PARAMS.get(name, {})}
        before, after = (call(**options) for call in calls)
        assert after != pytest.approx(before, rel=0.05), (name, change)
