"""Group norms, Lipschitz products, robustness and the parameter count against loops in NumPy."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from relflat_sk import FlatnessWarning, flatness_report, measure
from relflat_sk._network.tail import find_faster_step
from relflat_sk.measures._api import evaluate
from tests.measures.test_norms import value

CE = nn.CrossEntropyLoss()


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))


def matrices(net):
    """The weights of a chain of linear layers, as nested lists of Python floats."""
    return [layer.weight.double().tolist() for layer in net if isinstance(layer, nn.Linear)]


def data(net, n=40):
    X = torch.randn(n, 3).double()
    return X, net.double()(X).argmax(dim=1)


# ---- group norms and Lipschitz products


def p_norm(values, p):
    values = [abs(v) for v in values]
    return max(values) if p == math.inf else sum(v**p for v in values) ** (1 / p)


@pytest.mark.parametrize(("p", "q"), [(1, math.inf), (2, 2), (3, 1.5), (math.inf, 1), (1, 1)])
def test_group_norms_are_norms_of_norms(p, q):
    net = mlp()
    X, y = data(net)
    expected = math.prod(p_norm([p_norm(row, p) for row in W], q) ** 2 for W in matrices(net))
    found = measure("group_norm_product", net, X, y, criterion=CE, p=p, q=q)
    assert found == pytest.approx(expected, rel=1e-12)
    if p == q == 2:
        assert found == pytest.approx(measure("frobenius_product", net, X, y, criterion=CE))


def test_the_default_group_norm_is_the_largest_sum_of_incoming_weights():
    net = mlp()
    X, y = data(net)
    sums = [max(sum(abs(w) for w in row) for row in W) for W in matrices(net)]
    found = measure("group_norm_product", net, X, y, criterion=CE)
    assert found == pytest.approx(math.prod(sums) ** 2, rel=1e-12)
    lipschitz = measure("linf_lipschitz_product", net, X, y, criterion=CE)
    assert lipschitz == pytest.approx(math.prod(sums), rel=1e-12)


@pytest.mark.parametrize(("name", "order"), [("linf", np.inf), ("l2", 2)])
def test_lipschitz_products_bound_the_slope_of_a_chain(name, order):
    net = mlp()
    X, y = data(net, 200)
    constant = measure(f"{name}_lipschitz_product", net, X, y, criterion=CE)
    expected = math.prod(np.linalg.norm(W, order) for W in map(np.array, matrices(net)))
    assert constant == pytest.approx(expected, rel=1e-12)
    z = net(X).detach().numpy()
    slopes = np.linalg.norm(z[1:] - z[:-1], order, axis=1) / np.linalg.norm(
        (X[1:] - X[:-1]).numpy(), order, axis=1
    )
    assert 0 < slopes.max() <= constant


def test_iterated_spectral_norms_state_their_tolerance(monkeypatch):
    monkeypatch.setattr("relflat_sk.measures._norms._DENSE", 0)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)).double()
    X = torch.randn(30, 1, 3, 3).double()
    y = net(X).argmax(dim=1)
    product = evaluate("l2_lipschitz_product", net, X, y, criterion=CE, rtol=1e-3)
    assert (product.method, product.stderr) == ("lanczos", pytest.approx(5e-4 * product.value))
    cells = evaluate("log_robustness", net, X, y, criterion=CE, norm="l2", rtol=1e-3)
    # nine inputs, each cut into a number of cells that is known to half of rtol
    assert (cells.method, cells.stderr) == ("lanczos", pytest.approx(9 * 5e-4))


# ---- robustness


def cells_per_axis(X, side):
    return [max(1, math.ceil((max(column) - min(column)) / side)) for column in X.T.tolist()]


@pytest.mark.parametrize(("norm", "order"), [("linf", np.inf), ("l2", 2)])
def test_robustness_counts_the_cells_of_a_grid(norm, order):
    net = mlp()
    X, y = data(net)
    lipschitz = math.prod(np.linalg.norm(W, order) for W in map(np.array, matrices(net)))
    z = net(X).tolist()
    margins = [z[i][c] - max(z[i][k] for k in range(3) if k != c) for i, c in enumerate(y.tolist())]
    side = np.percentile(margins, 30) / (2 * lipschitz) / (math.sqrt(3) if norm == "l2" else 1)
    found = measure("log_robustness", net, X, y, criterion=CE, norm=norm, percentile=30)
    assert found == pytest.approx(math.log(math.prod(cells_per_axis(X, side))), rel=1e-9)


def test_classes_do_not_change_within_a_cell_of_the_hard_margin():
    net = mlp()
    X, y = data(net)
    margin = measure("inverse_margin", net, X, y, criterion=CE, percentile=0) ** -0.5
    lipschitz = measure("linf_lipschitz_product", net, X, y, criterion=CE)
    side = margin / (2 * lipschitz)
    k = math.prod(cells_per_axis(X, side))
    assert measure("log_robustness", net, X, y, criterion=CE, percentile=0) == pytest.approx(
        math.log(k)
    )
    moved = X + side * (2 * torch.rand(500, *X.shape).double() - 1)
    assert (net(moved).argmax(dim=-1) == y).all()


def test_a_constant_feature_takes_one_cell_and_very_many_cells_are_counted():
    net = nn.Linear(2, 2, bias=False).double()
    net.weight.data = torch.tensor([[1e30, 0.0], [0.0, 0.0]], dtype=torch.double)
    X = torch.tensor([[1e-20, 3.0], [3.2e-20, 3.0]], dtype=torch.double)
    y = torch.zeros(2).long()
    # the smallest margin is 1e10, so a cell is 1e10 / 2e30 wide; the other feature is constant
    found = measure("log_robustness", net, X, y, criterion=CE, percentile=0)
    assert found == pytest.approx(math.log(5), rel=1e-9)
    X[1, 0] = 3.0
    found = measure("log_robustness", net, X, y, criterion=CE, percentile=0)
    assert found == pytest.approx(math.log(6) + 20 * math.log(10), rel=1e-12)


# ---- margins and parameters


def test_the_percentile_of_the_margin_is_an_argument():
    net = nn.Linear(1, 2, bias=False)
    net.weight.data = torch.tensor([[0.0], [1.0]])
    X = torch.arange(1.0, 102.0)[torch.randperm(101)][:, None]  # its margins are 1, 2, ..., 101
    y = torch.ones(101).long()
    for percentile, margin in [(0, 1), (5, 6), (10, 11), (100, 101)]:
        own = {"criterion": CE, "percentile": percentile}
        assert measure("inverse_margin", net, X, y, **own) == pytest.approx(margin**-2)
        found = measure("l2_norm", net, X, y, over_margin=True, **own)
        assert found == pytest.approx(1 / margin)
        for name in ("frobenius_product", "l2_path_norm", "l1_path_norm", "group_norm_product"):
            found = measure(name, net, X, y, over_margin=True, **own)
            assert found == pytest.approx(margin**-2)
        found = measure("spectral_product", net, X, y, over_margin=True, **own)
        assert found == pytest.approx(2 * margin**-2)
        for name in ("linf_lipschitz_product", "l2_lipschitz_product"):
            found = measure(name, net, X, y, over_margin=True, **own)
            assert found == pytest.approx(1 / margin)


def test_parameters_are_counted_once():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
    X, y = torch.randn(5, 3), torch.arange(5) % 3
    count = 3 * 4 + 4 + 2 * 4 + 4 * 3 + 3
    assert measure("parameter_count", net, X, y, criterion=CE) == count
    assert measure("parameter_count", net, X, y, criterion=CE, times_depth=True) == 2 * count
    shared = nn.Linear(3, 3)
    twice = nn.Sequential(shared, nn.ReLU(), shared)
    assert value("parameter_count", twice, X) == 12


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 2)

    def forward(self, words):
        return self.out(words.float())


def test_robustness_needs_inputs_with_distances():
    with pytest.raises(ValueError, match=r"but the network takes inputs of torch.int64"):
        measure("log_robustness", Words(), torch.ones(3, 4).long(), torch.zeros(3).long(),
                criterion=CE)  # fmt: skip
    with pytest.raises(ValueError, match=r"but the network takes inputs dict"):
        measure("log_robustness", Words(), {"words": torch.ones(3, 4)}, torch.zeros(3).long(),
                criterion=CE)  # fmt: skip


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.out(x + self.hidden(x).relu())


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(3, 3)
        self.register_buffer("matrix", 10 * torch.eye(3))

    def forward(self, x):
        return self.out(x @ self.matrix)


NO_CHAINS = {
    "residual": (Residual(), "linf", "AddBackward0 joins 2 branches"),
    "GELU": (nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.Linear(3, 3)), "linf", "GeluBackward0"),
    "steep": (nn.Sequential(nn.Linear(3, 3), nn.LeakyReLU(-2.0)), "linf", "LeakyReluBackward0"),
    "matrix": (Scaled(), "linf", "outside of layers"),
    "windows": (nn.Sequential(nn.Unflatten(1, (1, 3)), nn.MaxPool1d(2, 1), nn.Flatten(),
                              nn.Linear(2, 3)), "l2", "MaxPool2DWithIndicesBackward0"),
    "sums": (nn.Sequential(nn.Unflatten(1, (1, 1, 3)), nn.AvgPool2d((1, 2), divisor_override=1),
                           nn.Flatten(), nn.Linear(1, 3)), "linf", "AvgPool2DBackward0"),
    "border": (nn.Sequential(nn.Unflatten(1, (1, 3)),
                             nn.AvgPool1d(2, 1, 1, count_include_pad=False), nn.Flatten(),
                             nn.Linear(4, 3)), "l2", "AvgPool2DBackward0"),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_CHAINS)
def test_robustness_needs_a_chain(name):
    net, norm, message = NO_CHAINS[name]
    X, y = torch.randn(8, 3), torch.arange(8) % 3
    with pytest.raises(ValueError, match=f"needs a Lipschitz constant.*{message}"):
        measure("log_robustness", net, X, y, criterion=CE, norm=norm, percentile=50)


def test_robustness_of_a_chain_of_all_kinds():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.LeakyReLU(), nn.MaxPool2d(2),
        nn.Dropout(), nn.Conv2d(3, 4, 2), nn.Hardtanh(), nn.AvgPool2d(2, 1), nn.Flatten(),
        nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Identity(),
    )  # fmt: skip
    X = torch.randn(20, 1, 6, 6)
    y = net.eval()(X).argmax(dim=1)
    for norm in ("linf", "l2"):
        found = measure("log_robustness", net, X, y, criterion=CE, norm=norm, percentile=0)
        assert 0 < found < math.inf


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("include", [True, False])
def test_average_pooling_that_passes_is_no_faster_than_its_input(norm, include):
    pool = nn.AvgPool1d(2, 1, 1, count_include_pad=include)
    net = nn.Sequential(nn.Unflatten(1, (1, 3)), pool, nn.Flatten(), nn.Linear(4, 3))
    matrix = pool(torch.eye(3)[:, None])[:, 0].T
    largest = torch.linalg.matrix_norm(matrix, math.inf if norm == "linf" else 2)
    X = torch.randn(1, 3, requires_grad=True)
    refused = find_faster_step(net(X), X, 1, euclidean=norm == "l2") is not None
    assert refused == bool(largest > 1 + 1e-6)


def test_the_standard_error_of_an_infinite_product_is_zero():
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(20)))
    for layer in net:
        layer.weight.data = 1e20 * torch.eye(4)
    with pytest.warns(FlatnessWarning, match="too large for a float"):
        report = flatness_report(net, torch.randn(5, 4), torch.randn(5, 4), criterion=nn.MSELoss(),
                                 measures=["spectral_product", "l2_lipschitz_product"])  # fmt: skip
    assert report["value"].tolist() == [math.inf, math.inf]
    assert report["stderr"].tolist() == [0.0, 0.0]
