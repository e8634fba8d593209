"""Networks whose criterion, batch norm or last layer is not what measures suppose."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from relflat_sk import (
    FlatnessWarning,
    RelativeFlatnessPenalty,
    flatness_report,
    layer_sensitivity,
    measure,
    relative_flatness,
)
from tests import cases, oracles
from tests.cases import published_penalty
from tests.penalty.every_draw import assert_right_on_average
from tests.penalty.every_draw import evaluate as penalty_of

pytestmark = pytest.mark.filterwarnings("ignore:.*is negative:relflat_sk.FlatnessWarning")


def gaussian_loss(output, y):
    """Takes both heads by their index, which a tensor has as well."""
    return (0.5 * (output[1] + (y - output[0]) ** 2 / output[1].exp())).mean()


def squared_error_of_the_mean(output, y):
    mean = output[0] if isinstance(output, tuple) else output
    return ((mean - y) ** 2).mean()


@pytest.fixture
def data():
    torch.manual_seed(0)
    X = torch.randn(64, 4)
    torch.manual_seed(1)
    return X, X[:, :1] * 2 + 0.1 * torch.randn(64, 1)


@pytest.fixture
def two_heads():
    """A network of a mean and a variance."""
    heads = {"mean": nn.Linear(8, 1), "log_variance": nn.Linear(8, 1)}
    body = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    return cases.Net(
        lambda net, x: (net.mean(net.body(x)), net.log_variance(net.body(x))), body=body, **heads
    )


WHOLE = "takes the module's whole output, but {} a criterion of one tensor"


# tests/training/test_outputs.py asks nets
def test_penalty_and_measures_refuse_a_criterion_of_both_heads(data, two_heads):
    penalty = published_penalty(layer="mean")
    with penalty.capture(two_heads):
        output = two_heads(data[0])
    with pytest.raises(ValueError, match=WHOLE.format("the flatness penalty needs")):
        penalty(gaussian_loss, output, data[1])
    for name, params in (("relative_flatness", {"layer": "mean"}), ("expected_sharpness", {})):
        with pytest.raises(ValueError, match=WHOLE.format("measures need")):
            measure(name, two_heads, *data, criterion=gaussian_loss, **params)


def test_a_criterion_that_takes_the_first_head_as_well_is_measured(data, two_heads):
    found, expected = (
        relative_flatness(two_heads, *data, layer="mean", criterion=criterion)
        for criterion in (squared_error_of_the_mean, nn.MSELoss())
    )
    assert found == pytest.approx(expected, rel=1e-5)


def rmse(output, y):
    return F.mse_loss(output, y).sqrt()


NO_MEAN = {
    "RMSE": rmse,
    "batch statistics": lambda z, y: F.mse_loss(z, y) + z.var(0).sum(),
    "pairs": lambda z, y: ((z - z.T) ** 2).mean(),
    "of each, over the batch's": lambda z, y: ((z - y) ** 2 / z.detach().var()).mean(1),
}


@pytest.fixture
def chain():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))


@pytest.mark.parametrize("name", NO_MEAN)
def test_a_criterion_that_is_no_mean_over_samples_warns(data, chain, name):
    with pytest.warns(FlatnessWarning, match="is no mean of losses of single samples"):
        relative_flatness(chain, *data, criterion=NO_MEAN[name])


@pytest.mark.parametrize("batch_size", [1, 3, 64])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_weighted_mean_warns_at_any_batch_size(batch_size, ordered):
    torch.manual_seed(1)
    X, y = torch.randn(200, 4), (torch.rand(200) < 0.03).long()  # classes of very different size
    net, weight = nn.Linear(4, 2), torch.tensor([1.0, 9.0])
    y = y.sort()[0] if ordered else y
    with pytest.warns(FlatnessWarning, match="is no mean of losses of single samples"):
        relative_flatness(
            net, X, y, criterion=partial(F.cross_entropy, weight=weight), batch_size=batch_size
        )


def test_a_penalty_warns_of_it_in_the_first_step(data, chain):
    penalty = published_penalty()
    caught = []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            with penalty.capture(chain):
                output = chain(data[0])
            penalty(rmse, output, data[1])
        caught.append([str(one.message) for one in found])
    assert len(caught[0]) == 1
    assert "rmse is no mean of losses of single samples" in caught[0][0]
    assert caught[1] == []


@pytest.mark.parametrize("error", [AssertionError, ValueError])
def test_a_criterion_that_takes_no_part_of_a_batch_says_so(data, chain, error):
    def criterion(output, target):
        if len(output) < len(data[0]):
            raise error("all samples are needed")
        return F.mse_loss(output, target)

    with pytest.warns(FlatnessWarning, match="could not be checked.*all samples are needed"):
        value = relative_flatness(chain, *data, criterion=criterion)
    assert value == pytest.approx(relative_flatness(chain, *data, criterion=nn.MSELoss()), rel=1e-4)


class Summed(nn.Module):
    """A sum over samples, that counts its calls."""

    reduction = "sum"
    n_calls = 0

    def forward(self, z, y):
        self.n_calls += 1
        return ((z - y) ** 2).sum()


@pytest.mark.parametrize(
    "criterion",
    [lambda z, y: ((z - y) ** 2).mean(), lambda z, y: (z - y).abs().square(), Summed()],
    ids=["mean", "of each", "sum"],
)
def test_means_and_sums_over_samples_do_not_warn_and_are_not_changed(data, chain, criterion):
    X, y = (one[:63] for one in data)  # halves of different size
    state, expected = torch.get_rng_state(), relative_flatness(chain, X, y, criterion=nn.MSELoss())
    found = relative_flatness(chain, X, y, criterion=criterion)
    assert found == pytest.approx(expected, rel=1e-4)
    assert torch.equal(torch.get_rng_state(), state)
    if isinstance(criterion, Summed):
        once = criterion.n_calls
        relative_flatness(chain, X[:1], y[:1], criterion=criterion)  # nothing to check
        assert criterion.n_calls == 2 * once


def test_layers_behind_batch_norm_without_running_statistics_are_measured_with_a_warning(data):
    torch.manual_seed(3)
    norm = nn.BatchNorm1d(5, track_running_stats=False)
    net = nn.Sequential(nn.Linear(4, 5), norm, nn.ReLU(), nn.Linear(5, 1))
    mse, warns = {"criterion": nn.MSELoss()}, partial(pytest.warns, FlatnessWarning)
    with (
        warns(match=r"\('1'\) mixes the samples of a batch"),
        pytest.raises(ValueError, match="behind layer '0', batch norm mixes the samples"),
    ):
        relative_flatness(net, *data, layer=0, **mse)
    with warns(match="flatness depend on batch_size"):
        found = relative_flatness(net, *data, **mse)
    last = relative_flatness(net[3:], net[:3](data[0]).detach(), data[1], **mse)
    assert found == pytest.approx(last, rel=1e-5)
    with warns(match="'0' left out"), warns(match="flatness depend on batch_size"):
        report = flatness_report(net, *data, measures=["relative_flatness"], **mse)
    assert list(report["layer"]) == ["3"]


# -- the last layer with a weight matrix need not be what makes the output ------------------------

X, Y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3


class Net(nn.Module):
    """A linear layer, and a function of its output and further parameters behind it."""

    def __init__(self, function, *shapes, width=3):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.body = nn.Linear(4, width), nn.Linear(width, width)
        self.function = function
        self.more = nn.ParameterList(torch.randn(shape) for shape in shapes)
        self.head = nn.Linear(width, 3)
        self.norm, self.conv = nn.LayerNorm([width]), nn.ConvTranspose1d(1, 1, 3, padding=1)
        self.register_buffer("fixed", torch.eye(3))

    def forward(self, x):
        return self.function(self, self.body(self.first(x).relu()), *self.more)


def flat(net, y=Y, criterion=None, **arguments):
    return relative_flatness(net, X, y, criterion=criterion or nn.CrossEntropyLoss(), **arguments)


def report_of(net, y=Y, criterion=None, **arguments):
    arguments = {"layers": [0, -1], "measures": "relative_flatness"} | arguments
    return flatness_report(net, X, y, criterion=criterion or nn.CrossEntropyLoss(), **arguments)


HEADS = {
    "matrix": (lambda net, h, w: h.relu() @ w, (3, 3)),
    "functional": (lambda net, h, w, b: F.linear(h, w, b), (3, 3), (3,)),
    "cosine": (lambda net, h, w: F.normalize(h) @ F.normalize(w).T, (3, 3)),
    "einsum": (lambda net, h, w: torch.einsum("nd,dk->nk", h, w), (3, 3)),
    "not called": (lambda net, h: F.linear(h, net.head.weight, net.head.bias),),
    "normed": (lambda net, h, w: net.norm(h @ w), (3, 3)),
    "bilinear": (lambda net, h, w: F.bilinear(h, h, w), (3, 3, 3)),
}
OTHERS = {
    "log-softmax": (lambda net, h: 3 * h.log_softmax(dim=1),),
    "scale and bias": (lambda net, h, w, b: h * w + b, (3,), (3,)),
    "norm": (lambda net, h: net.norm(h),),
    "another branch": (lambda net, h, w: h + torch.ones(len(h), 3) @ w, (3, 3)),
    "constant matrix": (lambda net, h: h @ net.fixed,),
    "pooling": (lambda net, h: F.max_pool1d(h[:, None], 3, 1, 1)[:, 0],),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_a_head_that_is_no_layer_is_reported(name):
    net = Net(*HEADS[name])
    head = "head.weight" if name == "not called" else "more.0"
    message = f"layer=-1 is 'body', .* multiplies its output by the parameter '{head}'"
    with pytest.warns(FlatnessWarning, match=message) as found:
        value = flat(net)
    assert sum("layer=-1" in str(one.message) for one in found) == 1
    assert flat(net, layer="body") == value
    flat(net, layer=0)
    report_of(net, layers="all", measures="hessian_trace")
    measure("l2_norm", net, X, Y, criterion=nn.CrossEntropyLoss())
    if "norm" in name:  # a penalty is refused there
        return
    with pytest.warns(FlatnessWarning, match=message):
        penalty_of(RelativeFlatnessPenalty(), net, nn.CrossEntropyLoss(), X, Y)
    penalty_of(RelativeFlatnessPenalty("body"), net, nn.CrossEntropyLoss(), X, Y)


def test_a_product_of_two_layers_has_no_other_head():
    def run(net, x):
        h = net.body(x).tanh()
        return torch.einsum("nij,nj->ni", net.a(h).reshape(-1, 3, 3), net.b(h))

    net = cases.Net(run, body=nn.Linear(4, 4), a=nn.Linear(4, 9), b=nn.Linear(4, 3))
    penalty_of(RelativeFlatnessPenalty(), net, nn.CrossEntropyLoss(), X, Y)
    report_of(net, measures="hessian_trace")


@pytest.mark.parametrize("name", OTHERS)
def test_other_ends_of_a_network_are_no_heads(name):
    flat(Net(*OTHERS[name]))
    report_of(Net(*OTHERS[name]))


# -- functions of a user ------------------------------------------------------------------------

# names of torch's operations that are piecewise linear, linear in an input, or no change at all
NAMES = ["Abs", "Add", "Div", "Mul", "NativeBatchNorm", "View", "_OfBatch", "Embedding"]


def smooth_absolute_value(name):
    """Make the function ``sqrt(x^2 + 1)`` under any name."""

    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x.square() + 1).sqrt()

    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x / (x.square() + 1).sqrt()

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), methods).apply


@pytest.mark.parametrize("name", NAMES)
def test_a_function_of_the_user_may_be_named_as_one_of_torch(name):
    torch.manual_seed(0)
    function = smooth_absolute_value(name)
    net = cases.Net(
        lambda net, x: net.head(function(net.first(x))),
        first=nn.Linear(4, 5),
        head=nn.Linear(5, 3),
    ).double()
    X, y, criterion = torch.randn(6, 4).double(), torch.arange(6) % 3, nn.CrossEntropyLoss()
    plain = cases.Net(
        lambda _, x: net.head((net.first(x).square() + 1).sqrt()), first=net.first, head=net.head
    )
    expected = oracles.relative_flatness(plain, "first", criterion, X, y)
    found = relative_flatness(net, X, y, criterion=criterion, layer="first", method="exact")
    assert found == pytest.approx(expected, rel=1e-9)
    penalty = published_penalty(layer="first")
    truth = expected / (2 * 4)
    assert_right_on_average(penalty, net, criterion, X, y, truth)


def windows(net, x):
    """The middle layer has the windows of all samples as its rows."""
    rows = torch.tanh(net.first(x)).unflatten(1, (2, -1)).movedim(1, 0).flatten(0, 1)
    return net.head(torch.tanh(net.within(rows)).mean(1).unflatten(0, (2, -1)).mean(0))


@pytest.mark.parametrize("n_steps", [6, 12], ids=lambda n_steps: f"{n_steps} steps")
def test_a_layer_whose_rows_are_no_samples_is_left_out(n_steps):
    torch.manual_seed(0)
    modules = {"first": nn.Linear(3, 4), "within": nn.Linear(4, 4), "head": nn.Linear(4, 3)}
    net = cases.Net(windows, **modules).double()
    X, y = torch.randn(12, n_steps, 3).double(), torch.arange(12) % 3
    options = {"criterion": nn.CrossEntropyLoss(), "random_state": 0}
    exact = {"method": "exact", **options}
    left_out = partial(pytest.warns, FlatnessWarning, match="'within' left out")
    expected = {
        layer: relative_flatness(net, X, y, layer=layer, **exact) for layer in ("first", "head")
    }
    with left_out():
        report = flatness_report(net, X, y, measures="relative_flatness", **exact)
    assert report.set_index("layer")["value"].to_dict() == pytest.approx(expected)
    with left_out():
        assert measure("network_flatness", net, X, y, **options) > 0
    with left_out():
        assert set(layer_sensitivity(net, X, y, bits=8, **options)["layer"]) == {"first", "head"}
    with pytest.raises(ValueError, match="within"):
        relative_flatness(net, X, y, layer="within", **options)


# -- views that are changed in place --------------------------------------------------------------

VIEWS = {
    "slice": lambda h: h[:, 2:6],
    "reshaped": lambda h: h.view(-1, 2, 4)[:, 1],
    "whole": lambda h: h.view(-1, 8).narrow(1, 0, 4),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_layer_between_a_view_and_its_change_in_place(view, frozen):
    def run(net, x):
        out = VIEWS[view](torch.tanh(net.main(x)))
        out += net.shortcut(x)
        return net.head(out)

    torch.manual_seed(0)
    modules = {"main": nn.Linear(5, 8), "shortcut": nn.Linear(5, 4), "head": nn.Linear(4, 3)}
    net = cases.Net(run, **modules).double()
    net.main.weight.requires_grad = not frozen
    X, y, criterion = torch.randn(8, 5).double(), torch.arange(8) % 3, nn.CrossEntropyLoss()
    expected = oracles.relative_flatness(net, "shortcut", criterion, X, y)
    found = relative_flatness(net, X, y, criterion=criterion, layer="shortcut")
    assert found == pytest.approx(expected, rel=1e-9)
    assert [p.requires_grad for p in net.parameters()] == [not frozen, *[True] * 5]


def test_parameters_need_gradients_again_after_an_exception():
    net = nn.Sequential(nn.Linear(5, 4), nn.Linear(3, 2))
    with pytest.raises(RuntimeError, match="shapes"):
        relative_flatness(
            net, torch.randn(8, 5), torch.arange(8) % 2, criterion=nn.CrossEntropyLoss()
        )
    assert all(p.requires_grad for p in net.parameters())


# -- parts that torch.compile has compiled --------------------------------------------------------


compiled = partial(torch.compile, backend="aot_eager")
COMPILED = {
    "in place": lambda net: net.compile(backend="aot_eager"),
    "a part in place": lambda net: net.backbone.compile(backend="aot_eager"),
    "a part": lambda net: setattr(net, "backbone", compiled(net.backbone)),
    "its forward": lambda net: setattr(net.backbone, "forward", compiled(net.backbone.forward)),
    "a function": lambda net: setattr(net, "function", compiled(torch.tanh)),
}


def with_backbone():
    torch.manual_seed(0)
    torch._dynamo.reset()
    net = cases.Net(
        lambda net, x: net.head(net.function(net.backbone(x))),
        backbone=nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)), head=nn.Linear(4, 3),
    )  # fmt: skip
    net.function = torch.tanh
    return net


@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about its own insides
@pytest.mark.parametrize("change", COMPILED)
@pytest.mark.parametrize("called", [False, True])
def test_networks_with_compiled_parts_are_measured_and_penalised(change, called):
    net = with_backbone().double()
    X, y, criterion = torch.randn(8, 5).double(), torch.arange(8) % 3, nn.CrossEntropyLoss()
    kappas = [
        oracles.relative_flatness(net, name, criterion, X, y) for name in ("backbone.0", "head")
    ]
    COMPILED[change](net)
    if called:  # compiled already
        criterion(net(X), y).backward()
    before = net._compiled_call_impl, net.backbone, vars(net.backbone).get("forward")
    for layer, kappa in zip((0, -1), kappas, strict=True):
        found = relative_flatness(net, X, y, criterion=criterion, layer=layer, method="exact")
        assert found == pytest.approx(kappa, rel=1e-9)
    assert measure("fisher_rao_norm", net, X, y, criterion=criterion) > 0
    for layer, kappa, m in ((0, kappas[0], 5), (-1, kappas[1], 4)):
        penalty = published_penalty(layer)
        assert_right_on_average(penalty, net, criterion, X, y, kappa / (2 * m))
        value = penalty_of(penalty, net, criterion, X, y)
        net.zero_grad()
        (value + criterion(net(X), y)).backward()
        assert all(parameter.grad is not None for parameter in net.parameters())
    assert before == (net._compiled_call_impl, net.backbone, vars(net.backbone).get("forward"))


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_backbone_before_the_penalised_head_stays_compiled():
    net, X, y = with_backbone(), torch.randn(8, 5), torch.arange(8) % 3
    graphs = []
    net.backbone = torch.compile(
        net.backbone, backend=lambda graph, _: lambda *args: graphs.append(1) or graph(*args)
    )
    penalty = published_penalty()
    for _ in range(3):
        penalty_of(penalty, net, nn.CrossEntropyLoss(), X, y).backward()
    assert len(graphs) == 2  # all steps but the first, which finds the layers


# -- criteria that read weights; sparse gradients --------------------------------------------------


class OfWeights(nn.Module):
    """A criterion that holds the network, whose weights it decays."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, z, y):
        return F.cross_entropy(z, y) + sum(p.square().sum() for p in self.net.parameters())


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("name", ["hessian_trace", "gradient_norm", "expected_sharpness"])
def test_a_criterion_that_reads_weights_is_told(holds, name, frozen):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    X, y = torch.randn(8, 4), torch.arange(8) % 3
    net[0].requires_grad_(not frozen)
    decays = OfWeights(net) if holds else lambda z, y: F.cross_entropy(z, y) + net[0].weight.norm()
    with pytest.warns(FlatnessWarning, match="reads weights of the network"):
        measure(name, net, X, y, criterion=decays)
    with pytest.warns(FlatnessWarning, match="reads weights of the network"):
        penalty_of(published_penalty(-1), net, decays, X, y)
    assert net[0].weight.requires_grad is not frozen


@pytest.mark.parametrize(
    "name", ["fisher_rao_norm", "joint_eigenvalue_flatness", "keskar_sharpness"]
)
def test_sparse_gradients_make_no_difference(name):
    found = []
    for sparse in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(9, 4, sparse=sparse), nn.Flatten(), nn.Linear(12, 3))
        X, y = torch.randint(9, (8, 3)), torch.arange(8) % 3
        found.append(measure(name, net, X, y, criterion=nn.CrossEntropyLoss(), random_state=0))
        assert net[0].sparse is sparse
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize(("kind", "which"), [(dict, "out"), (tuple, 1), (list, -1)])
def test_one_of_several_outputs_is_chosen(kind, which):
    """As networks of torchvision for segmentation have them, or with several heads."""

    def run(net, x):
        h = torch.tanh(net.body(x))
        outputs = {"aux": net.other(h), "out": net.head(h)}
        return outputs if kind is dict else kind(outputs.values())

    modules = {"body": nn.Linear(4, 5), "other": nn.Linear(5, 3), "head": nn.Linear(5, 3)}
    net = cases.Net(run, **modules).double()
    alone = cases.Net(lambda _, x: net(x)[which], **modules)
    X, y = torch.randn(30, 4).double(), torch.arange(30) % 3
    params = {"criterion": nn.CrossEntropyLoss(), "random_state": 0}
    for name, at in (("relative_flatness", {"layer": "head"}), ("fisher_rao_norm", {})):
        chosen = measure(name, net, X, y, output=which, **at, **params)
        assert chosen == pytest.approx(measure(name, alone, X, y, **at, **params), rel=1e-9)
    with pytest.raises(ValueError, match="output="):
        relative_flatness(net, X, y, output="no such", criterion=nn.CrossEntropyLoss())
    if kind is dict:
        with pytest.raises(TypeError, match="output="):
            relative_flatness(net, X, y, criterion=nn.CrossEntropyLoss())
