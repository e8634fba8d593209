"""Norms, margins, robustness and counts against values by hand, path by path, and from matrices."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from relflat_sk import FlatnessWarning
from relflat_sk._losses.table import ProbabilityNLLLoss
from relflat_sk._network.borrowing import borrowed
from relflat_sk._network.folding import fold_layers
from relflat_sk.measures._norms import NORM_MEASURES, operator_norm
from relflat_sk.measures._predictions import sample_margins
from tests.cases import Net
from tests.measures.nets import evaluate, network
from tests.measures.test_every_measure import chain
from tests.network.test_folding import used

CE = nn.CrossEntropyLoss()
PRODUCTS = ["frobenius_product", "spectral_product"]
PATHS = ["l1_path_norm", "l2_path_norm"]
EXACT = 1e-10


def value(name, net, X, y=None, *, criterion=CE, **own):
    return NORM_MEASURES[name](network(net, criterion, X, y), **own).value


def mlp():
    torch.manual_seed(0)
    layers = nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)
    return nn.Sequential(*layers).double()


def data(net, n=40):
    """Inputs of three features, with the labels that a network predicts."""
    X = torch.randn(n, 3).double()
    return X, net(X).argmax(dim=1)


def weights(net):
    return [layer.weight.detach().numpy() for layer in net if isinstance(layer, nn.Linear)]


# ---- products over the layers of a chain


def group_norm(p, q):
    return lambda W: np.linalg.norm([np.linalg.norm(row, p) for row in W], q) ** 2


OF_LAYERS = [
    ("frobenius_product", {}, lambda W: (W**2).sum()),
    ("linf_lipschitz_product", {}, lambda W: np.abs(W).sum(axis=1).max()),
    ("l2_lipschitz_product", {}, lambda W: np.linalg.svd(W, compute_uv=False)[0]),
    # by default, the largest sum of incoming weights
    ("group_norm_product", {}, lambda W: np.abs(W).sum(axis=1).max() ** 2),
    *(
        ("group_norm_product", {"p": p, "q": q}, group_norm(p, q))
        for p, q in [(1, math.inf), (2, 2), (3, 1.5), (math.inf, 1), (1, 1)]
    ),
]


@pytest.mark.parametrize(("name", "arguments", "of_layer"), OF_LAYERS)
def test_products_over_the_layers_of_a_chain(name, arguments, of_layer):
    net = mlp()
    expected = math.prod(map(of_layer, weights(net)))
    assert value(name, net, *data(net), **arguments) == pytest.approx(expected, rel=1e-12)


# ---- all paths


def matrices(net, shape):
    """Write an MLP or ConvNet out: (A, b) per affine layer, "max" with its windows, "mean"."""
    steps = []
    x = torch.zeros(1, *shape).double()
    for layer in net:
        if isinstance(layer, nn.Linear | nn.Conv2d | nn.AvgPool2d):
            basis = torch.eye(x.numel()).double().reshape(-1, *x.shape[1:])
            b = layer(torch.zeros_like(x)).flatten().detach()
            A = layer(basis).flatten(1).T.detach() - b[:, None]
            kind = "mean" if isinstance(layer, nn.AvgPool2d) else "affine"
            steps.append((kind, A.numpy(), b.numpy()))
        elif isinstance(layer, nn.MaxPool2d):
            number, k = torch.arange(x.numel()).double().reshape(x.shape), layer.kernel_size
            windows = F.unfold(number.transpose(0, 1), k, stride=k).transpose(1, 2)
            steps.append(("max", windows.reshape(-1, k * k).long().numpy(), None))
        x = layer(x)
    return steps, math.prod(shape)


def all_paths(steps, n_inputs, power):
    """Compute the largest sum over paths, over all choices of one input per pooling window."""
    windows = [window for kind, found, _ in steps if kind == "max" for window in found]
    return max(
        sum_of_paths(steps, n_inputs, power, iter(choice)) for choice in itertools.product(*windows)
    )


def sum_of_paths(steps, n_inputs, power, choice):
    """Add up the paths that lead to each unit, layer by layer."""
    sums = np.ones(n_inputs)
    for kind, A, b in steps:
        if kind == "max":
            sums = sums[[next(choice) for _ in A]]
        elif kind == "mean":  # averages have no weights
            sums = A @ sums
        else:
            sums = np.abs(A) ** power @ sums + np.abs(b) ** power
    return sums.sum()


CHAINS = {
    "mlp": (
        lambda: nn.Sequential(
            nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3), nn.LeakyReLU(), nn.Dropout(),
            nn.Linear(3, 2), nn.Softmax(dim=1)),
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


class Own(nn.Module):
    """A layer in a forward pass that is given as a function."""

    def __init__(self, ways):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.ways = ways

    def forward(self, x, unused=None):
        return self.ways(self, x)


def residual(net, x):
    h = F.relu(x + F.relu(net.layer(x)))
    return net.two(torch.cat([h, x], dim=1)[:, :3].view(x.size(0), -1))


def test_branches_of_a_residual_network_add_up():
    net = Own(residual)
    net.two = nn.Linear(3, 2)
    (A, a), (B, b) = [(m.weight.detach(), m.bias.detach()) for m in (net.double().layer, net.two)]
    X = torch.randn(4, 3).double()
    for name, power, finish in [("l1_path_norm", 1, 2), ("l2_path_norm", 2, 1)]:
        W, v, V, w = (t.abs() ** power for t in (A, a, B, b))
        expected = (V @ (torch.ones(3).double() + W.sum(1) + v) + w).sum() ** finish
        assert value(name, net, X) == pytest.approx(expected.item(), rel=EXACT)


def test_functions_are_steps_like_modules():
    """Convolution, batch norm, pooling, and the same convolution again, at another size."""

    def run(net, x):
        x = F.max_pool2d(F.relu(net.conv(x)), 2)
        x = F.dropout(F.leaky_relu(net.conv(input=x)), training=net.training)
        x = F.adaptive_avg_pool2d(net.norm(net.mixed(x)).relu(), 1)
        return F.log_softmax(net.out(torch.flatten(x, 1)), dim=1)

    conv, mixed = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 3, 3, bias=False)
    net = used(Net(run, conv=conv, mixed=mixed, norm=nn.BatchNorm2d(3), out=nn.Linear(3, 2)))
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
    "tokens": (lambda: nn.Linear(3, 2), (5, 3)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 2, 3, stride=2, padding=1), (3, 4, 3)),
}


@pytest.mark.parametrize(
    ("kind", "iterate"),
    [
        *((kind, False) for kind in CONVOLUTIONS),
        *((kind, True) for kind in CONVOLUTIONS if kind != "tokens"),
    ],
)
def test_norms_of_a_convolution_are_those_of_the_map_between_images(kind, iterate, monkeypatch):
    if iterate:
        monkeypatch.setattr("relflat_sk.measures._norms._DENSE", 0)
    build, shape = CONVOLUTIONS[kind]
    layer = build().double()
    X = torch.randn(2, *shape).double()
    basis = torch.eye(math.prod(shape)).double().reshape(-1, *shape)
    A = (layer(basis) - layer(torch.zeros_like(basis))).flatten(1).T.detach().numpy()
    largest = np.linalg.svd(A, compute_uv=False)[0]
    at = network(layer, CE, X)
    with borrowed(layer):
        (found,) = fold_layers(at)
        assert operator_norm(found, 1e-8) == pytest.approx(largest, rel=1e-7)
    product = NORM_MEASURES["spectral_product"](at)
    assert product.method == ("lanczos" if iterate else "exact")
    assert product.stderr == pytest.approx(1e-4 * product.value if iterate else 0)
    assert abs(product.value - len(A) * largest**2) <= product.stderr + EXACT * product.value
    lipschitz = NORM_MEASURES["l2_lipschitz_product"](at, rtol=1e-3)
    assert lipschitz.value == pytest.approx(largest, rel=5e-4)
    assert lipschitz.stderr == pytest.approx(5e-4 * lipschitz.value if iterate else 0)
    rows = value("linf_lipschitz_product", layer, X)
    assert rows == pytest.approx(np.abs(A).sum(axis=1).max(), rel=1e-12)
    # only these two are norms of the kernel
    kernel = layer.weight.detach()
    assert value("frobenius_product", layer, X) == pytest.approx(kernel.square().sum().item())
    if kind != "transposed":  # whose units are on the second axis
        sums = kernel.abs().flatten(1).sum(dim=1)
        assert value("group_norm_product", layer, X) == pytest.approx(sums.max().item() ** 2)


# ---- batch norm


@pytest.mark.parametrize("name", sorted(set(NORM_MEASURES) - {"parameter_count"}))
def test_batch_norm_is_folded(name):
    net, X, _ = chain()
    net, X = used(net), X.double()
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
    return sample_margins(network(net, criterion, X, y, batch_size=4))


def by_definition(f, y):
    return [
        f[i][c] - max(one for k, one in enumerate(f[i]) if k != c) for i, c in enumerate(y.tolist())
    ]


@pytest.mark.parametrize(
    ("tail", "criterion"),
    [
        (nn.Identity(), CE),
        (nn.LogSoftmax(dim=1), nn.NLLLoss()),
        (nn.Softmax(dim=1), ProbabilityNLLLoss()),
        # the network has steps behind its last layer
        (nn.Sequential(nn.Softmax(dim=1), nn.Hardtanh()), ProbabilityNLLLoss()),
        (nn.Identity(), nn.BCEWithLogitsLoss()),
        (nn.Sigmoid(), nn.BCELoss()),
    ],
    ids=lambda part: type(part).__name__,
)
def test_margins_are_computed_from_logits(tail, criterion):
    binary = "BCE" in type(criterion).__name__
    layer, X, y = nn.Linear(3, 1 if binary else 4).double(), torch.randn(9, 3), torch.arange(9) % 2
    if binary:  # also where the probability is 1 or 0 in floating point
        X = 1000 * X
    z = layer(X.double())
    expected = by_definition((torch.cat([-z / 2, z / 2], dim=1) if binary else z).tolist(), y)
    labels = y.double()[:, None] if binary else y
    found = margins_of(nn.Sequential(layer, tail), criterion, X.double(), labels)
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_margins_of_labelled_tokens():
    net = nn.Linear(3, 4).double()
    X, y = torch.randn(2, 5, 3).double(), torch.arange(10).reshape(2, 5) % 4
    y[0, 2] = -100
    expected = by_definition(net(X)[y >= 0].tolist(), y[y >= 0])
    np.testing.assert_allclose(margins_of(net, CE, X, y), expected)


def between_two_classes():
    """A network whose margin is the input."""
    net = nn.Linear(1, 2, bias=False)
    net.weight.data = torch.tensor([[0.0], [1.0]])
    return net


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("inverse_margin", {}), ("l1_path_norm", {"over_margin": True}), ("log_robustness", {})],
)
def test_a_margin_that_is_not_positive_gives_nan(name, arguments):
    X, y = torch.tensor([[1.0], [2.0]]), torch.tensor([0, 0])
    with pytest.warns(FlatnessWarning, match="the margin is -1.95, not positive: it is the 5th"):
        assert math.isnan(value(name, between_two_classes(), X, y, **arguments))


# norms over the margin, by the power of the margin; each norm is 1, but the spectral product 2
OVER_MARGIN = {
    1: ["l2_norm", "linf_lipschitz_product", "l2_lipschitz_product"],
    2: ["frobenius_product", "spectral_product", *PATHS, "group_norm_product"],
}


@pytest.mark.parametrize(("percentile", "margin"), [(0, 1), (5, 6), (10, 11), (100, 101)])
def test_the_percentile_of_the_margin_is_an_argument(percentile, margin):
    X = torch.arange(1.0, 102.0)[torch.randperm(101)][:, None]  # its margins are 1, 2, ..., 101
    at = between_two_classes(), X, torch.ones(101).long()
    assert value("inverse_margin", *at, percentile=percentile) == pytest.approx(margin**-2)
    for power, names in OVER_MARGIN.items():
        for name in names:
            found = value(name, *at, over_margin=True, percentile=percentile)
            norm = 2 if name == "spectral_product" else 1
            assert found == pytest.approx(norm * margin**-power), name


# ---- robustness


def cells_per_axis(X, side):
    return [max(1, math.ceil((max(column) - min(column)) / side)) for column in X.T.tolist()]


def test_robustness_counts_the_cells_of_a_grid():
    net = mlp()
    X, y = data(net)
    lipschitz = math.prod(np.linalg.norm(W, np.inf) for W in weights(net))
    margins = by_definition(net(X).tolist(), y)
    side = np.percentile(margins, 30) / (2 * lipschitz)
    found = value("log_robustness", net, X, y, percentile=30)
    assert found == pytest.approx(math.log(math.prod(cells_per_axis(X, side))), rel=1e-9)


def test_a_constant_feature_takes_one_cell_and_very_many_cells_are_counted():
    net = nn.Linear(2, 2, bias=False).double()
    net.weight.data = torch.tensor([[1e30, 0.0], [0.0, 0.0]], dtype=torch.double)
    X = torch.tensor([[1e-20, 3.0], [3.2e-20, 3.0]], dtype=torch.double)
    y = torch.zeros(2).long()
    # the smallest margin is 1e10, so a cell is 1e10 / 2e30 wide; the other feature is constant
    found = value("log_robustness", net, X, y, percentile=0)
    assert found == pytest.approx(math.log(5), rel=1e-9)
    X[1, 0] = 3.0
    found = value("log_robustness", net, X, y, percentile=0)
    assert found == pytest.approx(math.log(6) + 20 * math.log(10), rel=1e-12)


def test_robustness_of_a_chain_of_all_kinds():
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.LeakyReLU(), nn.MaxPool2d(2),
        nn.Dropout(), nn.Conv2d(3, 4, 2), nn.Hardtanh(), nn.AvgPool2d(2, 1), nn.Flatten(),
        nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Identity(),
    )  # fmt: skip
    X = torch.randn(20, 1, 6, 6)
    y = net.eval()(X).argmax(dim=1)
    assert 0 < value("log_robustness", net, X, y, percentile=0) < math.inf


# ---- refusals


IMAGES, SUMS = nn.Unflatten(1, (1, 1, 3)), nn.AvgPool2d((1, 2), divisor_override=1)
REFUSED = {
    "l1_path_norm": [
        (lambda net, x: net.layer(torch.tanh(net.layer(x))), "TanhBackward0 is not known"),
        (lambda net, x: net.layer(x) - x, "SubBackward0 is not known"),
        (lambda net, x: net.layer(x) * net.layer(x), "MulBackward0 is not known"),
        (lambda net, x: net.layer(x) + net.scale, "not homogeneous"),
        (lambda net, x: net.layer(x) + 1, "not homogeneous"),
        (nn.Sequential(nn.Linear(3, 3), nn.ConstantPad1d(1, 1.0)), "not homogeneous"),
        (lambda net, x: torch.add(net.layer(x), x, alpha=-1), "AddBackward0 is not known"),
        (lambda net, x: net.layer(net.layer(x).softmax(1)), "SoftmaxBackward0 is not known"),
        (lambda net, x: x if x.sum() == 3 else net.layer(x), "for some inputs than for others"),
    ],
    "log_robustness": [
        (lambda net, x: x + net.layer(x), "AddBackward0 joins 2 branches"),
        (nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.Linear(3, 3)), "GeluBackward0"),
        (nn.Sequential(nn.Linear(3, 3), nn.LeakyReLU(-2.0)), "LeakyReluBackward0"),
        (lambda net, x: net.layer(x @ torch.eye(3)), "outside of layers"),
        (nn.Sequential(IMAGES, SUMS, nn.Flatten(), nn.Linear(1, 3)), "AvgPool2DBackward0"),
    ],
}


@pytest.mark.parametrize(
    ("name", "net", "message"), [(name, *row) for name, rows in REFUSED.items() for row in rows]
)
def test_refuses_what_is_no_network_of_paths_or_no_chain(name, net, message):
    net = net if isinstance(net, nn.Module) else Own(net)
    X, y = torch.randn(8, 3), torch.arange(8) % 3
    own = {}
    if name == "log_robustness":
        own, message = {"percentile": 50}, f"needs a Lipschitz constant.*{message}"
    with pytest.raises(ValueError, match=message):
        value(name, net, X, y, **own)


# ---- weights of all kinds


def test_parameters_are_counted_once():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
    X, y = torch.randn(5, 3), torch.arange(5) % 3
    count = 3 * 4 + 4 + 2 * 4 + 4 * 3 + 3
    assert value("parameter_count", net, X, y) == count
    assert value("parameter_count", net, X, y, times_depth=True) == 2 * count
    shared = nn.Linear(3, 3)
    twice = nn.Sequential(shared, nn.ReLU(), shared)
    assert value("parameter_count", twice, X) == 12
    assert value("l2_norm", twice, X) == pytest.approx(shared.weight.norm().item())


def test_weights_of_other_kinds_count_in_the_l2_norm_only():
    net = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2))
    X = torch.tensor([[0, 1], [2, 4]])
    squares = sum(net[i].weight.double().square().sum().item() for i in (0, 2))
    assert value("l2_norm", net, X) == pytest.approx(math.sqrt(squares))
    for name in PRODUCTS:
        with pytest.raises(ValueError, match=f"{name} is a product .* other weights: 0.weight"):
            value(name, net, X)
    with pytest.raises(ValueError, match=r"takes 'input' of torch.int64, as for an embedding"):
        value("l1_path_norm", net, X)


@pytest.mark.parametrize("labelled", [False, True])
def test_a_network_without_linear_layers_has_norms_and_a_loss(labelled):
    net, X, y = nn.Sequential(nn.Embedding(5, 3)), torch.arange(5), torch.arange(5) % 3
    names = ["l2_norm", "parameter_count"]
    norm, count = (evaluate(n, net, X, y if labelled else None, criterion=CE) for n in names)
    assert (norm.value, count.value) == (pytest.approx(net[0].weight.norm().item()), 15)
    loss = CE(net(X), y).item() if labelled else math.nan
    assert norm.passes.risk == pytest.approx(loss, nan_ok=True)
    assert norm.passes.n_samples == 5


@pytest.mark.parametrize(
    ("words", "message"),
    [(torch.ones(4, 3).long(), "of torch.int64"), ({"x": torch.ones(4, 3)}, "dict")],
)
def test_robustness_needs_inputs_with_distances(words, message):
    net, y = Own(lambda net, x: net.layer(x.float())), torch.zeros(4).long()
    with pytest.raises(ValueError, match=f"but the network takes inputs {message}"):
        value("log_robustness", net, words, y)


def test_norms_of_a_net_in_training_take_no_step_of_spectral_norm():
    """In training mode, each read of such a weight is an iteration that changes buffers."""
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


def test_norms_too_large_for_a_number_are_infinite_without_an_error():
    net = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(3))).double()
    for layer in net:
        nn.init.constant_(layer.weight, 1e120)
    X, y = torch.ones(2, 1).double(), torch.zeros(2, 1)
    for name in [*PRODUCTS, *PATHS, "l2_lipschitz_product"]:
        with pytest.warns(FlatnessWarning, match="too large for a float"):
            found = evaluate(name, net, X, y, criterion=nn.MSELoss())
        assert (found.value, found.stderr) == (math.inf, 0.0), name
    nn.init.zeros_(net[0].weight)
    for name in [*PRODUCTS, *PATHS]:
        assert value(name, net, X, y, criterion=nn.MSELoss()) == 0
