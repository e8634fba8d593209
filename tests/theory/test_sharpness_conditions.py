"""sharpness_conditions against products of matrices, sample by sample."""

import numpy as np
import pytest
import torch
from sklearn.neural_network import MLPClassifier
from torch import nn

from relflat_sk import sharpness_conditions
from tests.network.test_network import same, state_of


def network(activation=nn.ReLU, bias=True):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 9, bias=bias), activation(), nn.Linear(9, 8, bias=bias), activation(),
        nn.Linear(8, 3, bias=bias),
    ).double()  # fmt: skip


def value(table, condition, layer, column="worst"):
    rows = table[(table["condition"] == condition) & (table["layer"] == layer)]
    return rows[column].item()


def constants(net, X):
    """Compute mu, C_2 and C_3 of every sample, as the paper defines them."""
    linear = [m for m in net if isinstance(m, nn.Linear)]
    W = [m.weight.detach().numpy() for m in linear]
    d = len(W)
    found = {}
    for x in X:
        D, Z, h = [], [], x
        for k, m in enumerate(linear):
            z = m(h)
            Z.append(z.detach().numpy())
            h = net[2 * k + 1](z) if k < d - 1 else z
            slope = h.detach().numpy() / Z[-1]
            D.append(np.diag(slope))

        def P(a, b):
            product = D[b - 1] @ W[b - 1] if b else x.numpy()[:, None]  # noqa: B023
            for i in range(b - 1, a - 1, -1):
                factor = D[i - 1] @ W[i - 1] if i else x.numpy()[:, None]  # noqa: B023
                product = product @ factor
            return np.linalg.norm(product)

        for c in range(1, d):
            width = len(W[c - 1])
            ratios = [
                np.sqrt(width) * P(a, b) / (P(c + 1, b) * P(a, c))
                for a in range(c)
                for b in range(c + 1, d + 1)
            ]
            found.setdefault(("C1", c), []).append(min(ratios))
            # the share grows only where delta is the size of a unit
            sizes = np.abs(Z[c - 1]) / np.linalg.norm(x.numpy())
            shares = [np.mean(sizes <= delta) / delta for delta in sizes]
            found.setdefault(("C2", c), []).append(max(shares))
        for i in range(1, d + 1):
            largest = max(np.linalg.norm(row) for row in W[i - 1])
            active = np.linalg.norm(D[i - 1] @ W[i - 1])
            found.setdefault(("C3", i), []).append(np.sqrt(len(W[i - 1])) * largest / active)
    return found


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.LeakyReLU])
def test_conditions_are_those_of_the_paper(activation, bias):
    net, X = network(activation, bias), torch.randn(9, 4).double()
    table = sharpness_conditions(net, X, batch_size=4)
    expected = constants(net, X)
    assert len(table) == len(expected) == 7
    for (condition, at), values in expected.items():
        layer = str(2 * (at - 1))
        worst = min(values) if condition == "C1" else max(values)
        assert value(table, condition, layer) == pytest.approx(worst)
        assert value(table, condition, layer, "median") == pytest.approx(sorted(values)[4])
    assert set(table["constant"]) == {"mu", "C_2", "C_3"}
    first = table.iloc[0]
    assert f"{first['worst']:.3g}" in first["reading"]


def test_mu_is_one_for_independent_layers_and_zero_for_orthogonal_ones():
    net = nn.Sequential(
        nn.Linear(200, 200, bias=False), nn.LeakyReLU(1.0), nn.Linear(200, 200, bias=False)
    )
    X = torch.randn(3, 200)
    assert value(sharpness_conditions(net, X), "C1", "0") == pytest.approx(1, rel=0.2)
    with torch.no_grad():
        net[0].weight[100:] = 0
        net[2].weight[:, :100] = 0
    assert value(sharpness_conditions(net, X), "C1", "0") == pytest.approx(0, abs=1e-6)


def test_one_unit_with_large_weights_raises_the_third_constant():
    net, X = network(), torch.randn(9, 4).double()
    before = value(sharpness_conditions(net, X), "C3", "4")
    with torch.no_grad():
        net[4].weight[0] *= 1000
    # one for three equal rows, and the root of three if only one row is not zero
    assert (
        before < value(sharpness_conditions(net, X), "C3", "4") == pytest.approx(3**0.5, rel=1e-3)
    )


def test_units_that_are_never_active_fail_the_third_condition():
    net, X = network(), torch.randn(9, 4).double()
    with torch.no_grad():
        net[2].bias.fill_(-100)
    table = sharpness_conditions(net, X)
    assert value(table, "C3", "2") == np.inf
    # products of zero do not count as cancellation
    assert value(table, "C1", "2") == np.inf


def test_batch_norm_is_folded():
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Linear(6, 2))
    net(torch.randn(50, 4) * 3)
    net.double().eval()
    folded = nn.Sequential(nn.utils.fusion.fuse_linear_bn_eval(net[0], net[1]), nn.ReLU(), net[3])
    X = torch.randn(9, 4).double()
    one, two = sharpness_conditions(net.train(), X), sharpness_conditions(folded, X)
    np.testing.assert_allclose(one["worst"], two["worst"])


def test_the_network_stays_as_it_was():
    net, X = network(), torch.randn(9, 4).double()
    net.register_buffer("last", torch.zeros(()))
    before = state_of(net)
    sharpness_conditions(net, X)
    same(before, state_of(net))


def test_estimators_are_measured():
    X, y = np.random.default_rng(0).normal(size=(30, 4)), np.arange(30) % 3
    model = MLPClassifier((5,), max_iter=2000, random_state=0).fit(X, y)
    assert sharpness_conditions(model, X, y)["condition"].tolist() == ["C1", "C2", "C3", "C3"]


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.two(x + torch.relu(self.one(x)))


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (network(nn.Tanh), "the layer behind '0' is not a ReLU or leaky ReLU of the output of '0'"),
        (network(nn.ELU), "the layer behind '0' is not a ReLU or leaky ReLU of the output of '0'"),
        (Residual().double(), "behind 'one' is not a ReLU"),
        (
            nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 3), nn.Flatten()).double(),
            "need a fully connected network, but layer '1' receives inputs of shape .1, 4.",
        ),
    ],
)
def test_networks_of_other_kinds_are_refused(net, message):
    with pytest.raises(ValueError, match=message):
        sharpness_conditions(net, torch.randn(5, 4).double())


@pytest.mark.parametrize("activation", [nn.ELU, nn.GELU, nn.Softplus, lambda: nn.ELU(alpha=1e-9)])
def test_smooth_activations_do_not_pass_by_luck(activation):
    # one sample shows one slope, and ELU is the identity for positive numbers
    net = nn.Sequential(nn.Linear(2, 3), activation(), nn.Linear(3, 2))
    with torch.no_grad():
        net[0].weight.abs_()
        net[0].bias.fill_(30.0)
    for X in (torch.rand(1, 2), -100 * torch.rand(1, 2), torch.rand(5, 2)):
        with pytest.raises(ValueError, match="not a ReLU or leaky ReLU of the output of '0'"):
            sharpness_conditions(net, X)


def test_piecewise_linear_functions_that_are_no_relu_are_refused():
    class Bent(nn.Module):
        def forward(self, x):
            return torch.maximum(x, 0.1 * x - 0.01)

    net = nn.Sequential(nn.Linear(2, 3), Bent(), nn.Linear(3, 2))
    with pytest.raises(ValueError, match="not a ReLU or leaky ReLU of the output of '0'"):
        sharpness_conditions(net, torch.randn(5, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_leaky_slopes_may_be_rounded(dtype):
    torch.manual_seed(0)
    hidden = nn.Linear(4, 9)
    net = nn.Sequential(hidden, nn.LeakyReLU(0.3), nn.Linear(9, 2)).to(dtype)
    assert len(sharpness_conditions(net, torch.randn(50, 4).to(dtype)))
