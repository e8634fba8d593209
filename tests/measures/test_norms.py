"""Norms and margins against values computed by hand, path by path, and from matrices."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier
from skorch import NeuralNetClassifier
from torch import nn

from benchmarks.worth.random_labels import draw_data
from relflat_sk import FlatnessScorer, FlatnessWarning, flatness_report, measure
from relflat_sk._losses.loss import Loss
from relflat_sk._losses.table import ProbabilityNLLLoss
from relflat_sk._network.batches import make_batches
from relflat_sk._network.borrowing import borrowed
from relflat_sk._network.network import Network
from relflat_sk._rescaling.layers import fold_layers
from relflat_sk.measures._api import evaluate
from relflat_sk.measures._norms import NORM_MEASURES, operator_norm
from relflat_sk.measures._predictions import sample_margins
from tests.processes import run_module
from tests.rescaling.test_folding import used

CE = nn.CrossEntropyLoss()
PRODUCTS = ["frobenius_product", "spectral_product"]
PATHS = ["l1_path_norm", "l2_path_norm"]
EXACT = 1e-10


def value(name, net, X, y=None, *, criterion=CE, batch_size=1024, sample_weight=None, **own):
    batches = make_batches(X, y, batch_size=batch_size, sample_weight=sample_weight)
    return NORM_MEASURES[name](Network(net, Loss(criterion), batches), **own).value


# ---- by hand


def small_net():
    """W = [[1, -2], [3, 0]], b = [1, -1], then ReLU, then [[2, -1]], 5."""
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    numbers = [[[1.0, -2.0], [3.0, 0.0]], [1.0, -1.0], [[2.0, -1.0]], [5.0]]
    for parameter, one in zip(net.parameters(), numbers, strict=True):
        parameter.data = torch.tensor(one)
    return net


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("l2_norm", math.sqrt(1 + 4 + 9 + 4 + 1)),
        ("frobenius_product", (1 + 4 + 9) * (4 + 1)),
        # eigenvalues of W W^T = [[5, 3], [3, 9]] are 7 +- sqrt(13); h = 2 and 1
        ("spectral_product", 2 * (7 + math.sqrt(13)) * 1 * 5),
        # hidden sums 1 + 2 + 1 and 3 + 1
        ("l1_path_norm", (2 * 4 + 1 * 4 + 5) ** 2),
        # hidden sums 1 + 4 + 1 and 9 + 1
        ("l2_path_norm", 4 * 6 + 1 * 10 + 25),
    ],
)
def test_by_hand(name, expected):
    X, y = torch.tensor([[1.0, 0.0]]), torch.tensor([1.0])
    bce = nn.BCEWithLogitsLoss()
    assert value(name, small_net(), X, criterion=bce) == pytest.approx(expected, rel=1e-12)
    # f(1, 0) = 2 * 2 - 1 * 2 + 5 = 7 is the margin of label 1
    over = expected / (7 if name == "l2_norm" else 49)
    found = value(name, small_net(), X, y, criterion=bce, over_margin=True)
    assert found == pytest.approx(over, rel=1e-6)
    assert value("inverse_margin", small_net(), X, y, criterion=bce) == pytest.approx(1 / 49)


# ---- all paths, one by one


def matrices(net, shape):
    """Write an MLP or ConvNet out: (A, b) per affine layer, "max" with its windows, "mean"."""
    steps = []
    x = torch.zeros(1, *shape).double()
    for layer in net:
        if isinstance(layer, nn.Linear | nn.Conv2d | nn.AvgPool2d):
            basis = torch.eye(x.numel()).double().reshape(-1, *x.shape[1:])
            b = layer(torch.zeros_like(x)).flatten()
            A = layer(basis).flatten(1).T - b[:, None]
            kind = "mean" if isinstance(layer, nn.AvgPool2d) else "affine"
            steps.append((kind, A.tolist(), b.tolist()))
        elif isinstance(layer, nn.MaxPool2d):
            number = torch.arange(x.numel()).double().reshape(x.shape)
            k = layer.kernel_size
            windows = (
                F.unfold(number.transpose(0, 1), k, stride=k).transpose(1, 2).reshape(-1, k * k)
            )
            steps.append(("max", [[int(at) for at in window] for window in windows], None))
        x = layer(x)
    return steps, math.prod(shape)


def all_paths(steps, n_inputs, power):
    """Compute the largest sum over paths, over all choices of one input per pooling window."""
    windows = [window for kind, found, _ in steps if kind == "max" for window in found]
    return max(
        paths_of_choice(steps, n_inputs, power, list(choice))
        for choice in itertools.product(*windows)
    )


def paths_of_choice(steps, n_inputs, power, choice):
    """Follow every path from its start, one weight after the other."""

    def follow(at, unit, so_far):
        if so_far == 0:
            return 0.0
        if at == len(steps):
            return so_far
        kind, A, _ = steps[at]
        if kind == "max":
            before = sum(len(found) for k, found, _ in steps[:at] if k == "max")
            chosen = choice[before : before + len(A)]
            return sum(follow(at + 1, j, so_far) for j, i in enumerate(chosen) if i == unit)
        p = power if kind == "affine" else 1  # averages have no weights
        return sum(follow(at + 1, j, so_far * abs(row[unit]) ** p) for j, row in enumerate(A))

    total = sum(follow(0, i, 1.0) for i in range(n_inputs))
    for at, (kind, _, b) in enumerate(steps):
        if kind == "affine":
            total += sum(follow(at + 1, j, abs(one) ** power) for j, one in enumerate(b))
    return total


CHAINS = {
    "mlp": (
        lambda: nn.Sequential(
            nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3), nn.LeakyReLU(), nn.Dropout(),
            nn.Linear(3, 2)),
        (3,),
    ),
    "max pooling": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2, 2)
        ),
        (1, 3, 3),
    ),
    "average pooling, stride, padding, groups": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 2, 2, stride=2, padding=1, groups=2), nn.AvgPool2d(2), nn.ReLU(),
            nn.Flatten(), nn.Linear(2, 3)),
        (2, 2, 3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", CHAINS)
def test_path_norms_are_sums_over_all_paths(kind):
    build, shape = CHAINS[kind]
    net = build().double().eval()
    steps, n_inputs = matrices(net, shape)
    X = torch.randn(5, *shape).double()
    for name, power, finish in [("l1_path_norm", 1, 2), ("l2_path_norm", 2, 1)]:
        expected = all_paths(steps, n_inputs, power) ** finish
        assert value(name, net, X) == pytest.approx(expected, rel=EXACT)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.two = nn.Linear(3, 2)

    def forward(self, x, scale=None):
        h = F.relu(x + F.relu(self.one(x)))
        return self.two(torch.cat([h, x], dim=1)[:, :3].view(x.size(0), -1))


def test_branches_of_a_residual_network_add_up():
    net = Residual().double()
    (A, a), (B, b) = [(m.weight.detach(), m.bias.detach()) for m in (net.one, net.two)]
    X = torch.randn(4, 3).double()
    for name, power, finish in [("l1_path_norm", 1, 2), ("l2_path_norm", 2, 1)]:
        W, v, V, w = (t.abs() ** power for t in (A, a, B, b))
        expected = (V @ (torch.ones(3).double() + W.sum(1) + v) + w).sum() ** finish
        assert value(name, net, X) == pytest.approx(expected.item(), rel=EXACT)


class Functional(nn.Module):
    """Convolution, batch norm, pooling, and the same convolution again, at another size."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.mixed = nn.Conv2d(2, 3, 3, bias=False)
        self.norm = nn.BatchNorm2d(3)
        self.out = nn.Linear(3, 2)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        x = F.dropout(F.leaky_relu(self.conv(input=x)), training=self.training)
        x = F.adaptive_avg_pool2d(self.norm(self.mixed(x)).relu(), 1)
        return F.log_softmax(self.out(torch.flatten(x, 1)), dim=1)


def test_functions_are_steps_like_modules():
    net = used(Functional())
    again = nn.Conv2d(2, 2, 3, padding=1)
    again.load_state_dict(net.conv.state_dict())
    plain = nn.Sequential(
        net.conv, nn.ReLU(), nn.MaxPool2d(2), again, nn.LeakyReLU(),
        nn.utils.fusion.fuse_conv_bn_eval(net.mixed, net.norm), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), net.out,
    ).double()  # fmt: skip
    X = torch.randn(3, 2, 8, 6).double()
    torch.testing.assert_close(net(X), plain(X).log_softmax(1))
    for name in [*PRODUCTS, *PATHS]:
        assert value(name, net, X) == pytest.approx(value(name, plain, X), rel=1e-9)


@pytest.mark.parametrize("tail", [nn.LogSoftmax(dim=1), nn.Softmax(dim=1), nn.Identity()])
def test_paths_end_in_logits(tail):
    net = nn.Sequential(nn.Linear(3, 2, bias=False), tail).double()
    X = torch.randn(4, 3).double()
    expected = net[0].weight.square().sum().item()
    assert value("l2_path_norm", net, X) == pytest.approx(expected, rel=EXACT)


# ---- convolutions as linear maps

CONVOLUTIONS = {
    "plain": (lambda: nn.Conv2d(2, 3, 3), (2, 6, 5)),
    # no output sees all weights
    "small image": (lambda: nn.Conv2d(2, 3, 3, padding=1), (2, 2, 2)),
    "stride and padding": (lambda: nn.Conv2d(2, 3, 3, stride=2, padding=(1, 2)), (2, 6, 5)),
    "dilation": (lambda: nn.Conv2d(2, 3, 2, dilation=2, padding="same"), (2, 5, 5)),
    "groups": (lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2, bias=False), (4, 5, 4)),
    "circular": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (2, 5, 4)),
    "one axis": (lambda: nn.Conv1d(3, 2, 4, stride=3), (3, 11)),
    "three axes": (lambda: nn.Conv3d(2, 2, 2), (2, 3, 4, 3)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 2, 3, stride=2, padding=1), (3, 4, 3)),
}


@pytest.mark.parametrize("iterate", [False, True], ids=["written out", "iterated"])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_norms_of_a_convolution_are_those_of_the_map_between_images(kind, iterate, monkeypatch):
    if iterate:
        monkeypatch.setattr("relflat_sk.measures._norms._DENSE", 0)
    build, shape = CONVOLUTIONS[kind]
    layer = build().double()
    X = torch.randn(2, *shape).double()
    basis = torch.eye(math.prod(shape)).double().reshape(-1, *shape)
    A = (layer(basis) - layer(torch.zeros_like(basis))).flatten(1).T.detach().numpy()
    largest = np.linalg.svd(A, compute_uv=False)[0]
    network = Network(layer, Loss(CE), make_batches(X))
    with borrowed(layer):
        (found,) = fold_layers(network)
        assert operator_norm(found, 1e-8) == pytest.approx(largest, rel=1e-7)
    product = NORM_MEASURES["spectral_product"](network)
    assert product.method == ("lanczos" if iterate else "exact")
    assert product.stderr == pytest.approx(1e-4 * product.value if iterate else 0)
    assert abs(product.value - len(A) * largest**2) <= product.stderr + EXACT * product.value
    assert value("l2_lipschitz_product", layer, X) == pytest.approx(largest, rel=1e-4)
    rows = value("linf_lipschitz_product", layer, X)
    assert rows == pytest.approx(np.abs(A).sum(axis=1).max(), rel=1e-12)
    # only these two are norms of the kernel
    kernel = layer.weight.detach()
    assert value("frobenius_product", layer, X) == pytest.approx(kernel.square().sum().item())
    if kind != "transposed":  # whose units are on the second axis
        sums = kernel.abs().flatten(1).sum(dim=1)
        assert value("group_norm_product", layer, X) == pytest.approx(sums.max().item() ** 2)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("inverse_margin", {}), ("l1_path_norm", {"over_margin": True}), ("log_robustness", {})],
)
def test_a_margin_that_is_not_positive_gives_nan(name, arguments):
    net = nn.Linear(1, 2, bias=False)
    net.weight.data = torch.tensor([[0.0], [1.0]])
    X = torch.tensor([[1.0], [2.0]])
    with pytest.warns(FlatnessWarning, match="the margin is -1.95, not positive: it is the 5th"):
        assert math.isnan(value(name, net, X, torch.tensor([0, 0]), **arguments))


def test_tokens_share_one_matrix():
    layer = nn.Linear(3, 2).double()
    largest = torch.linalg.svdvals(layer.weight)[0].item()
    found = value("spectral_product", layer, torch.randn(4, 5, 3).double())
    assert found == pytest.approx(2 * 5 * largest**2, rel=EXACT)


# ---- batch norm


def norm_net():
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(),
        nn.Linear(3 * 3 * 3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3),
    )  # fmt: skip


SPECTRA = {"soft_rank", "spectral_exponent", "stable_rank"}  # of the weights as trained


@pytest.mark.parametrize("name", sorted(set(NORM_MEASURES) - SPECTRA - {"parameter_count"}))
def test_batch_norm_is_folded(name):
    X = torch.randn(6, 2, 5, 5).double()
    net = used(norm_net())
    y = net(X).argmax(dim=1)
    fuse = nn.utils.fusion
    folded = nn.Sequential(
        fuse.fuse_conv_bn_eval(net[0], net[1]), nn.ReLU(), nn.Flatten(),
        fuse.fuse_linear_bn_eval(net[4], net[5]), nn.ReLU(), net[7],
    )  # fmt: skip
    torch.testing.assert_close(folded(X), net(X))
    assert value(name, net, X, y) == pytest.approx(value(name, folded, X, y), rel=1e-9)


# ---- margins


def margins_of(net, criterion, X, y):
    return sample_margins(Network(net, Loss(criterion), make_batches(X, y, batch_size=4)))


def by_definition(f, y):
    return [
        f[i][c] - max(one for k, one in enumerate(f[i]) if k != c) for i, c in enumerate(y.tolist())
    ]


@pytest.mark.parametrize(
    ("tail", "criterion"),
    [
        (nn.Identity, nn.CrossEntropyLoss),
        (lambda: nn.LogSoftmax(dim=1), nn.NLLLoss),
        (lambda: nn.Softmax(dim=1), ProbabilityNLLLoss),
        # the network has steps behind its last layer
        (lambda: nn.Sequential(nn.Softmax(dim=1), nn.Hardtanh()), ProbabilityNLLLoss),
    ],
)
def test_margins_are_computed_from_logits(tail, criterion):
    layer = nn.Linear(3, 4).double()
    X, y = torch.randn(9, 3).double(), torch.arange(9) % 4
    expected = by_definition(layer(X).tolist(), y)
    found = margins_of(nn.Sequential(layer, tail()), criterion(), X, y)
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize(
    ("tail", "criterion"), [(nn.Identity, nn.BCEWithLogitsLoss), (nn.Sigmoid, nn.BCELoss)]
)
def test_margins_of_one_logit(tail, criterion):
    layer = nn.Linear(3, 1)
    X, y = 1000 * torch.randn(9, 3), (torch.arange(9) % 2).float()[:, None]
    z = layer(X)[:, 0].tolist()
    expected = [one if c else -one for one, c in zip(z, y[:, 0].tolist(), strict=True)]
    # also where the probability is 1 or 0 in floating point
    np.testing.assert_allclose(
        margins_of(nn.Sequential(layer, tail()), criterion(), X, y), expected
    )


def test_margins_of_labelled_tokens():
    net = nn.Linear(3, 4).double()
    X, y = torch.randn(2, 5, 3).double(), torch.arange(10).reshape(2, 5) % 4
    y[0, 2] = -100
    expected = by_definition(net(X)[y >= 0].tolist(), y[y >= 0])
    np.testing.assert_allclose(margins_of(net, CE, X, y), expected)


# ---- refusals and warnings


class Own(nn.Module):
    """A layer in a forward pass that is given as a function."""

    def __init__(self, ways):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.ways = ways

    def forward(self, x):
        return self.ways(self, x)


@pytest.mark.parametrize(
    ("ways", "message"),
    [
        (lambda net, x: net.layer(torch.tanh(net.layer(x))), "'tanh' .* positively homogeneous"),
        (lambda net, x: net.layer(x) - x, "'sub' .* is not known to be positively homogeneous"),
        (lambda net, x: net.layer(x) * net.layer(x), "'mul' .* is not known"),
        (lambda net, x: net.layer(x) * net.scale, "'scale' .* is used outside of any layer"),
        (lambda net, x: net.layer(x) + 1, "'add' .* adds something other than"),
        (lambda net, x: torch.add(net.layer(x), x, alpha=-1), "'add' .* adds something other than"),
        (lambda net, x: net.layer(net.layer(x).softmax(1)), "'softmax' .* is not known"),
        (lambda net, x: net.layer(x) if x.sum() > 0 else x, "paths cannot be followed"),
        (lambda net, x: nn.functional.gelu(net.layer(x)), r"no path norm .*'gelu' .*is not known"),
    ],
)
def test_refuses_steps_that_paths_cannot_lead_through(ways, message):
    with pytest.raises(ValueError, match=message):
        value("l1_path_norm", Own(ways), torch.ones(4, 3))


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.out = nn.Linear(3, 2)

    def forward(self, words):
        return self.out(self.table(words).mean(dim=1))


def test_weights_of_other_kinds_count_in_the_l2_norm_only():
    net, X = Embedded(), torch.tensor([[0, 1], [2, 4]])
    squares = sum(m.weight.double().square().sum().item() for m in (net.table, net.out))
    assert value("l2_norm", net, X) == pytest.approx(math.sqrt(squares))
    for name in PRODUCTS:
        with pytest.raises(ValueError, match=f"{name} is a product .* other weights: table.weight"):
            value(name, net, X)
    with pytest.raises(ValueError, match=r"takes 'words' of torch.int64, as for an embedding"):
        value("l1_path_norm", net, X)


def test_parametrized_weights_count_with_their_values():
    net = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)).double()
    X = torch.randn(4, 3).double()
    assert value("l2_norm", net, X) == pytest.approx(net.weight.norm().item(), rel=EXACT)
    assert value("frobenius_product", net, X) == pytest.approx(net.weight.square().sum().item())
    paths = (net.weight.abs().sum() + net.bias.abs().sum()).item() ** 2
    assert value("l1_path_norm", net, X) == pytest.approx(paths, rel=EXACT)


def test_norms_of_a_net_in_training_take_no_step_of_spectral_norm():
    """In training mode, each read of such a weight is an iteration that changes buffers."""
    torch.manual_seed(0)
    spectral_norm = nn.utils.parametrizations.spectral_norm
    layers = [spectral_norm(layer) for layer in (nn.Conv2d(1, 2, 3), nn.Linear(8, 3))]
    for layer in layers:
        nn.init.normal_(layer.parametrizations.weight.original)  # as after a step of training
    net, X = nn.Sequential(layers[0], nn.ReLU(), nn.Flatten(), layers[1]), torch.randn(4, 1, 4, 4)
    names = ["l2_norm", *PRODUCTS, *PATHS]
    expected = [value(name, net.eval(), X) for name in names]
    before = copy.deepcopy(net.train().state_dict())
    assert [value(name, net, X) for name in names] == expected
    for key, after in net.state_dict().items():
        assert torch.equal(after, before[key])


def test_norms_too_large_for_a_number_are_infinite():
    net = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(3))).double()
    for layer in net:
        nn.init.constant_(layer.weight, 1e120)
    X, y = torch.ones(2, 1).double(), torch.zeros(2, 1)
    for name in [*PRODUCTS, *PATHS]:
        with pytest.warns(FlatnessWarning, match="too large for a float"):
            found = value(name, net, X, y, criterion=nn.MSELoss())
        assert found == math.inf
    nn.init.zeros_(net[0].weight)
    for name in [*PRODUCTS, *PATHS]:
        assert value(name, net, X, y, criterion=nn.MSELoss()) == 0


# ---- through the public functions


def test_estimators_reports_and_scorers_take_norms():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 4))
    y = np.array(["no", "yes"])[(X[:, 0] > 0).astype(int)]
    model = MLPClassifier((5,), solver="lbfgs", random_state=0).fit(X, y)
    sums = np.ones(4)
    for A, b in zip(model.coefs_, model.intercepts_, strict=True):
        sums = np.abs(A).T @ sums + np.abs(b)
    gamma = evaluate("inverse_margin", model, X, y).value ** -0.5
    report = flatness_report(model, X, y, measures=["l1_path_norm", "l2_norm"], over_margin=True)
    assert report["layer"].tolist() == ["", ""]
    expected = [
        sums.sum() ** 2 / gamma**2,
        np.sqrt(sum((A**2).sum() for A in model.coefs_)) / gamma,
    ]
    np.testing.assert_allclose(report["value"], expected)
    scorer = FlatnessScorer("l1_path_norm", measure_params={"over_margin": True})
    assert scorer(model, X, y) == pytest.approx(-expected[0])

    net = NeuralNetClassifier(
        nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2), nn.Softmax(dim=1)),
        lr=0.5, max_epochs=60, train_split=None, verbose=0,
    )  # fmt: skip
    classes = (y == "yes").astype(np.int64)
    net.fit(X.astype(np.float32), classes)
    z = net.module_[:3](torch.tensor(X, dtype=torch.float32)).detach().numpy()
    gamma = np.percentile((z[:, 1] - z[:, 0]) * (2 * classes - 1), 5)
    assert gamma > 0
    found = measure("inverse_margin", net, X.astype(np.float32), classes)
    assert found == pytest.approx(gamma**-2, rel=1e-4)
    module = net.module_[:3].double()
    expected = value("l1_path_norm", module, X) / gamma**2
    found = measure("l1_path_norm", net, X, classes, over_margin=True)
    assert found == pytest.approx(expected, rel=1e-4)

    logistic = LogisticRegression().fit(X, y)
    norm = np.linalg.norm(logistic.coef_)
    assert measure("l2_norm", logistic, X, y) == pytest.approx(norm)


# the parameters are counted without running the network


@pytest.mark.slow
def test_the_benchmark_compares_true_and_random_labels(tmp_path):
    picture = tmp_path / "norms.png"
    done = run_module("benchmarks.worth.random_labels", "--quick", "--figure", picture)
    assert done.returncode == 0, done.stderr
    *_, budgets = done.stdout.strip().split("\n\n")
    lines = dict(line.split(", random / true") for line in budgets.splitlines())
    assert list(lines) == ["l2_norm", *PRODUCTS, *PATHS]
    assert all("not judged (quick)" in line for line in lines.values())
    assert "inverse_margin" in done.stdout
    assert picture.stat().st_size > 10_000


def test_labels_of_the_benchmark():
    X, y = draw_data(50, "true", seed=3)
    same, drawn = draw_data(50, "random", seed=3)
    assert torch.equal(X, same)
    assert 0 < (y == drawn).sum() < 20
    assert X.shape == (50, 64)
