"""Norms, margins, robustness and counts against values by hand, path by path, and from matrices."""

import copy
import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from relflat_sk import FlatnessWarning
from relflat_sk._losses.table import ProbabilityNLLLoss
from relflat_sk._network.borrowing import has_own_forward
from relflat_sk.measures._norms import NORM_MEASURES
from tests.cases import Net
from tests.measures.nets import CE, evaluate, network

PRODUCTS = ["frobenius_product", "spectral_product"]
PATHS = ["l1_path_norm", "l2_path_norm"]
EXACT = 1e-10


def norm(name, net, X, y=None, *, criterion=CE, batch_size=1024, **own):
    return NORM_MEASURES[name].compute(network(net, criterion, X, y, batch_size=batch_size), **own)


def value(*args, **options):
    return norm(*args, **options).value


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


def residual(net, x):
    h = F.relu(x + F.relu(net.layer(x)))
    return net.two(torch.cat([h, x], dim=1)[:, :3].view(x.size(0), -1))


HOMOGENEOUS = {  # networks, with their numbers of inputs
    "activations": (3, nn.Sequential(
        nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3), nn.LeakyReLU(), nn.Dropout(), nn.Linear(3, 2),
    )),
    "maximum": (9, nn.Sequential(
        nn.Unflatten(1, (1, 3, 3)), nn.Conv2d(1, 2, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(2, 2),
    )),
    "mean": (12, nn.Sequential(
        nn.Unflatten(1, (2, 2, 3)), nn.Conv2d(2, 2, 2, stride=2, padding=1, groups=2),
        nn.AvgPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(2, 3),
    )),
    "branches": (3, Net(residual, layer=nn.Linear(3, 3), two=nn.Linear(3, 2))),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOMOGENEOUS)
def test_path_norms_are_outputs_for_ones_of_a_network_of_positive_weights(kind):
    """Absolute values to a power pass on the sums over paths, and no activation changes them."""
    m, net = HOMOGENEOUS[kind]
    net, X = net.double().eval(), torch.randn(5, m).double()
    for tail in (nn.Identity(), nn.Softmax(dim=1)):
        for name, power, finish in [("l1_path_norm", 1, 2), ("l2_path_norm", 2, 1)]:
            plain = copy.deepcopy(net)
            for parameter in plain.parameters():
                parameter.data = parameter.abs() ** power
            expected = plain(torch.ones(1, m).double()).sum().item() ** finish
            found = value(name, nn.Sequential(net, tail), X)
            assert found == pytest.approx(expected, rel=EXACT)


def test_path_norms_are_sums_over_all_paths():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    A, a, B, b = (parameter.detach().numpy() for parameter in net.parameters())
    paths = [B[k, j] * A[j, i] for k, j, i in itertools.product(range(2), range(4), range(3))]
    paths += [B[k, j] * a[j] for k, j in itertools.product(range(2), range(4))]
    paths += list(b)
    X = torch.randn(5, 3).double()
    assert value("l1_path_norm", net, X) == pytest.approx(np.abs(paths).sum() ** 2, rel=EXACT)
    assert value("l2_path_norm", net, X) == pytest.approx(np.square(paths).sum(), rel=EXACT)


def own(ways):
    """A layer in a forward pass that is given as a function."""
    return Net(ways, layer=nn.Linear(3, 3))


def used(module):
    """In evaluation mode, batch norms with statistics of their own."""
    for m in module.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats:
            m.running_mean.normal_()
            m.running_var.uniform_(0.5, 2)
            if m.weight is not None:
                nn.init.normal_(m.weight)
                nn.init.normal_(m.bias)
    return module.double().eval()


def test_functions_are_steps_like_modules():
    """Convolution, batch norm, pooling, and the same convolution again, at another size."""

    def run(net, x):
        x = F.max_pool2d(F.relu(net.conv(x)), 2)
        x = F.dropout(F.leaky_relu(net.conv(input=x)), training=net.training)
        x = F.adaptive_avg_pool2d(net.norm(net.mixed(x)).relu(), 1)
        return F.log_softmax(net.out(torch.flatten(x, 1)), dim=1)

    mixed = nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 3, 3, bias=False))
    conv, norm, out = nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(3), nn.Linear(3, 2)
    net = used(Net(run, out=out, conv=conv, mixed=mixed, norm=norm))
    fused = nn.Conv2d(2, 3, 3, bias=False).double().eval()
    fused.weight.data = mixed.weight.detach().clone()
    plain = nn.Sequential(
        conv, nn.ReLU(), nn.MaxPool2d(2), copy.deepcopy(conv), nn.LeakyReLU(),
        fuse_conv_bn_eval(fused, norm), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), out,
    )  # fmt: skip
    X = torch.randn(3, 2, 8, 6).double()
    torch.testing.assert_close(net(X), plain(X).log_softmax(1))
    for name in [*PRODUCTS, *PATHS]:
        assert value(name, net, X) == pytest.approx(value(name, plain, X), rel=1e-9)


CONVOLUTIONS = {
    "plain": (nn.Conv2d(2, 3, 3), (2, 6, 5)),
    "small image": (nn.Conv2d(2, 3, 3, padding=1), (2, 2, 2)),  # no output sees all weights
    "stride and padding": (nn.Conv2d(2, 3, 3, stride=2, padding=(1, 2)), (2, 6, 5)),
    "dilation": (nn.Conv2d(2, 3, 2, dilation=2, padding="same"), (2, 5, 5)),
    "groups": (nn.Conv2d(4, 6, 3, padding=1, groups=2, bias=False), (4, 5, 4)),
    "circular": (nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (2, 5, 4)),
    "one axis": (nn.Conv1d(3, 2, 4, stride=3), (3, 11)),
    "three axes": (nn.Conv3d(2, 2, 2), (2, 3, 4, 3)),
    "tokens": (nn.Linear(3, 2), (5, 3)),
    "transposed": (nn.ConvTranspose2d(3, 2, 3, stride=2, padding=1), (3, 4, 3)),
}


@pytest.mark.parametrize("iterate", [False, True])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_norms_of_a_convolution_are_those_of_the_map_between_images(kind, iterate, monkeypatch):
    if iterate:
        monkeypatch.setattr("relflat_sk.measures._norms._DENSE", 0)
    iterated = iterate and kind != "tokens"
    layer, shape = CONVOLUTIONS[kind]
    layer, X = layer.double(), torch.randn(2, *shape).double()
    basis = torch.eye(math.prod(shape)).double().reshape(-1, *shape)
    A = (layer(basis) - layer(torch.zeros_like(basis))).flatten(1).T.detach().numpy()
    largest = np.linalg.svd(A, compute_uv=False)[0]
    assert value("l2_lipschitz_product", layer, X, rtol=2e-8) == pytest.approx(largest, rel=1e-7)
    product = norm("spectral_product", layer, X)
    assert product.method == ("lanczos" if iterated else "exact")
    assert product.stderr == pytest.approx(1e-4 * product.value if iterated else 0)
    assert abs(product.value - len(A) * largest**2) <= product.stderr + EXACT * product.value
    lipschitz = norm("l2_lipschitz_product", layer, X, rtol=1e-3)
    assert lipschitz.value == pytest.approx(largest, rel=5e-4)
    assert lipschitz.stderr == pytest.approx(5e-4 * lipschitz.value if iterated else 0)
    rows = value("linf_lipschitz_product", layer, X)
    assert rows == pytest.approx(np.abs(A).sum(axis=1).max(), rel=1e-12)
    # only these two are norms of the kernel
    kernel = layer.weight.detach()
    assert value("frobenius_product", layer, X) == pytest.approx(kernel.square().sum().item())
    if kind != "transposed":  # whose units are on the second axis
        sums = kernel.abs().flatten(1).sum(dim=1)
        assert value("group_norm_product", layer, X) == pytest.approx(sums.max().item() ** 2)


FOLDED = {
    "linear": (nn.Linear(4, 5), nn.BatchNorm1d(5), fuse_linear_bn_eval),
    "no bias": (nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5, eps=0.1), fuse_linear_bn_eval),
    "groups": (nn.Conv2d(2, 4, 3, groups=2), nn.BatchNorm2d(4), fuse_conv_bn_eval),
    "no affine": (
        nn.Conv2d(2, 3, 2, bias=False), nn.BatchNorm2d(3, affine=False), fuse_conv_bn_eval,
    ),
    "transposed": (
        nn.ConvTranspose2d(2, 3, 3, stride=2), nn.BatchNorm2d(3),
        partial(fuse_conv_bn_eval, transpose=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("layer", "norm", "fuse"), FOLDED.values(), ids=FOLDED)
def test_batch_norm_is_folded_as_torch_does(layer, norm, fuse):
    layer, norm = used(layer), used(norm)
    X = torch.randn(7, *((4,) if isinstance(layer, nn.Linear) else (2, 5, 5))).double()
    tail = nn.ReLU(), nn.Flatten(), used(nn.Linear(norm(layer(X)).flatten(1).shape[1], 3))
    net, folded = nn.Sequential(layer, norm, *tail), nn.Sequential(fuse(layer, norm), *tail)
    torch.testing.assert_close(folded(X), net(X))
    y = net(X).argmax(dim=1)
    for name in NORM_MEASURES.keys() - {"parameter_count"}:
        assert value(name, net, X, y) == pytest.approx(value(name, folded, X, y), rel=1e-9), name


class OwnForward(nn.Linear):
    def forward(self, x):
        return super().forward(x).tanh()


def twice(forward):
    """Layer, batch norm, and something else done with one of them."""
    return Net(forward, layer=nn.Linear(4, 4), norm=nn.BatchNorm1d(4))


def either(net, x):
    return net.norm(net.layer(x)) if x.sum() > 9e9 else net.norm(x)


NOT_FOLDED = [
    (nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)), "'0' .* does not follow a layer"),
    (nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.BatchNorm1d(2)), "'2' .* not follow a layer"),
    (
        nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2, track_running_stats=False)),
        "no running statistics",
    ),
    (twice(lambda net, x: (h := net.layer(x)) + net.norm(h)), "'layer' is also used elsewhere"),
    (twice(lambda net, x: net.layer(net.norm(net.layer(x)))), "'norm' .* more than once"),
    (nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Linear(2, 3), nn.BatchNorm1d(2)), "another axis"),
    (twice(either), "'norm' .* does not follow a layer"),
    (OwnForward(4, 2), "'' is a OwnForward"),
]


@pytest.mark.parametrize(("net", "message"), NOT_FOLDED)
def test_refuses_layers_that_are_not_affine(net, message):
    with pytest.raises(ValueError, match=message):
        value("l2_norm", used(net), torch.randn(3, 4).double())
    assert not any(has_own_forward(m) for m in net.modules())


def by_definition(f, y):
    return [f[i][c] - max(f[i][:c] + f[i][c + 1 :]) for i, c in enumerate(y.tolist())]


def assert_margins(net, criterion, X, y, expected):
    """Compare all percentiles of the margin with the margins by definition."""
    at, options = (net, X, y), {"criterion": criterion, "batch_size": 4}
    places = np.linspace(0, 100, len(expected))
    found = [value("inverse_margin", *at, percentile=p, **options) ** -0.5 for p in places]
    np.testing.assert_allclose(found, sorted(expected), rtol=1e-9)


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
    layer, X = nn.Linear(3, 1 if binary else 4).double(), torch.randn(9, 3).double()
    if binary:  # also where the probability is 1 or 0 in floating point
        X = 1000 * X
    z = layer(X).detach()
    logits = torch.cat([-z / 2, z / 2], dim=1) if binary else z
    y = logits.argmax(dim=1)
    labels = y.double()[:, None] if binary else y
    net, expected = nn.Sequential(layer, tail), by_definition(logits.tolist(), y)
    assert_margins(net, criterion, X, labels, expected)
    if isinstance(tail, nn.Identity) and not binary:  # also of labelled tokens
        X = torch.cat([X.reshape(3, 3, 3), torch.randn(3, 2, 3)], dim=1)
        y = F.pad(y.reshape(3, 3), (0, 2), value=-100)
        assert_margins(net, criterion, X, y, expected)


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


def cells_per_axis(X, side):
    return [max(1, math.ceil((max(column) - min(column)) / side)) for column in X.T.tolist()]


def test_robustness_counts_the_cells_of_a_grid():
    plain = mlp()
    steps = nn.Unflatten(1, (1, 3)), nn.MaxPool1d(1), nn.Dropout(), nn.AvgPool1d(1), nn.Flatten()
    # steps that change nothing, and activations of slope at most 1
    net = nn.Sequential(*steps, *plain, nn.LeakyReLU(), nn.Hardtanh(), nn.Tanh(), nn.Identity())
    X, y = data(plain)
    lipschitz = math.prod(np.linalg.norm(W, np.inf) for W in weights(plain))
    side = np.percentile(by_definition(net.eval()(X).tolist(), y), 90) / (2 * lipschitz)
    found = value("log_robustness", net, X, y, percentile=90)
    assert found == pytest.approx(math.log(math.prod(cells_per_axis(X, side))), rel=1e-9)
    for words, message in ((X.long(), "of torch.int64"), ({"x": X}, "dict")):
        with pytest.raises(ValueError, match=f"but the network takes inputs {message}"):
            value("log_robustness", own(lambda net, x: net.layer(x.float())), words, y)


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


IMAGES, SUMS = nn.Unflatten(1, (1, 1, 3)), nn.AvgPool2d((1, 2), divisor_override=1)
REFUSED = {
    "l1_path_norm": [
        (lambda net, x: net.layer(torch.tanh(net.layer(x))), "TanhBackward0 is not known"),
        (lambda net, x: net.layer(x) - x, "SubBackward0 is not known"),
        (lambda net, x: net.layer(x) * net.layer(x), "MulBackward0 is not known"),
        (lambda net, x: net.layer(x) + net.layer.bias, "not homogeneous"),
        (lambda net, x: net.layer(x) + 1, "not homogeneous"),
        (nn.Sequential(nn.Linear(3, 3), nn.ConstantPad1d(1, 1.0)), "not homogeneous"),
        (lambda net, x: torch.add(net.layer(x), x, alpha=-1), "AddBackward0 is not known"),
        (lambda net, x: net.layer(net.layer(x).softmax(1)), "SoftmaxBackward0 is not known"),
        (lambda net, x: x if x.sum() == 3 else net.layer(x), "for some inputs than for others"),
        (nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), "NativeLayerNormBackward0 is not"),
        (nn.Sequential(nn.Linear(3, 4), nn.GroupNorm(2, 4)), "NativeGroupNormBackward0 is not"),
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
    net = net if isinstance(net, nn.Module) else own(net)
    X, y = torch.randn(8, 3), torch.arange(8) % 3
    options = {"percentile": 50} if name == "log_robustness" else {}
    with pytest.raises(ValueError, match=message):
        value(name, net, X, y, **options)


ONE, WORDS = nn.Linear(4, 4), nn.Embedding(5, 3)
NUMBERS = {  # networks, five samples, and how many parameters there are
    "a layer that is called twice": (
        Net(lambda net, x: net.one(torch.relu(net.one(x))), one=ONE), torch.randn(5, 4), 20,
    ),
    "a layer that is not called": (
        Net(lambda net, x: x @ net.one.weight, one=ONE), torch.randn(5, 4), 20,
    ),
    "words": (
        nn.Sequential(WORDS, nn.Flatten(), nn.Linear(6, 3)), torch.arange(10).reshape(5, 2) % 5, 36,
    ),
    "no linear layer": (nn.Sequential(WORDS), torch.arange(5), 15),
}  # fmt: skip


@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_any_network(name, labelled):
    net, X, n_parameters = NUMBERS[name]
    y, names = torch.arange(5) % 3, ["l2_norm", "parameter_count"]
    norm, count = (evaluate(n, net, X, y if labelled else None, criterion=CE) for n in names)
    squares = [p.detach().square().sum().item() for p in net.parameters() if p.ndim > 1]
    assert (norm.value, count.value) == (pytest.approx(math.sqrt(sum(squares))), n_parameters)
    loss = CE(net(X), y).item() if labelled else math.nan
    assert norm.passes.risk == pytest.approx(loss, nan_ok=True)
    assert norm.passes.n_samples == 5


def test_only_linear_layers_and_convolutions_have_depth_products_and_paths():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
    X, n_parameters = torch.randn(5, 3), 3 * 4 + 4 + 2 * 4 + 4 * 3 + 3
    for times_depth, expected in ((False, n_parameters), (True, 2 * n_parameters)):
        assert value("parameter_count", net, X, times_depth=times_depth) == expected
    words, X, _ = NUMBERS["words"]
    for name in PRODUCTS:
        with pytest.raises(ValueError, match=f"{name} is a product .* other weights: 0.weight"):
            value(name, words, X)
    with pytest.raises(ValueError, match=r"takes an input of torch.int64, as for an embedding"):
        value("l1_path_norm", words, X)


def test_norms_of_a_net_in_training_take_no_step_of_spectral_norm():
    """In training mode, each read of such a weight is an iteration that changes buffers."""
    spectral_norm = nn.utils.parametrizations.spectral_norm
    layers = spectral_norm(nn.Conv2d(1, 2, 3)), spectral_norm(nn.Linear(8, 3))
    for layer in layers:
        nn.init.normal_(layer.parametrizations.weight.original)  # as after a step of training
    net, X = nn.Sequential(layers[0], nn.ReLU(), nn.Flatten(), layers[1]), torch.randn(4, 1, 4, 4)
    names = ["l2_norm", *PRODUCTS, *PATHS]
    expected = [value(name, net.eval(), X) for name in names]
    before = copy.deepcopy(net.train().state_dict())
    assert [value(name, net, X) for name in names] == expected
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)


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
