"""Networks whose criterion, batch norm or last layer is not what measures suppose."""

from functools import partial

import numpy as np
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
from tests import oracles
from tests.cases import Net, published_penalty
from tests.measures.nets import UNTRAINED
from tests.penalty.every_draw import assert_right_on_average
from tests.penalty.every_draw import evaluate as penalise

pytestmark = UNTRAINED
CE, MSE = nn.CrossEntropyLoss(), nn.MSELoss()
X, Y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
warns = partial(pytest.warns, FlatnessWarning)


def exact(net, layer, *data, **options):
    options = {"criterion": CE, "method": "exact", **options}
    return relative_flatness(net, *data, layer=layer, **options)


def gaussian_loss(output, y):
    """Takes both heads by their index, which a tensor has as well."""
    return (0.5 * (output[1] + (y - output[0]) ** 2 / output[1].exp())).mean()


def squared_error_of_the_mean(output, y):
    mean = output[0] if isinstance(output, tuple) else output
    return ((mean - y) ** 2).mean()


@pytest.fixture
def data():
    X = torch.randn(64, 4)
    return X, X[:, :1] * 2 + 0.1 * torch.randn(64, 1)


@pytest.fixture
def two_heads():
    def run(net, x):
        h = net.body(x).relu()
        return net.mean(h), net.log_variance(h)

    return Net(run, body=nn.Linear(4, 8), mean=nn.Linear(8, 1), log_variance=nn.Linear(8, 1))


WHOLE = "takes the module's whole output, but {} a criterion of one tensor"


# tests/training/test_outputs.py asks nets
def test_penalty_and_measures_refuse_a_criterion_of_both_heads(data, two_heads):
    with pytest.raises(ValueError, match=WHOLE.format("the flatness penalty needs")):
        penalise(published_penalty(layer="mean"), two_heads, gaussian_loss, *data)
    for name, params in (("relative_flatness", {"layer": "mean"}), ("expected_sharpness", {})):
        with pytest.raises(ValueError, match=WHOLE.format("measures need")):
            measure(name, two_heads, *data, criterion=gaussian_loss, **params)


def test_a_criterion_that_takes_the_first_head_as_well_is_measured(data, two_heads):
    found, expected = (
        relative_flatness(two_heads, *data, layer="mean", criterion=criterion)
        for criterion in (squared_error_of_the_mean, MSE)
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
IS_NO_MEAN = "is no mean of losses of single samples"


@pytest.fixture
def chain():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))


@pytest.mark.parametrize("name", NO_MEAN)
def test_a_criterion_that_is_no_mean_over_samples_warns(data, chain, name):
    with warns(match=IS_NO_MEAN):
        relative_flatness(chain, *data, criterion=NO_MEAN[name])


@pytest.mark.parametrize("batch_size", [1, 3, 64])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_weighted_mean_warns_at_any_batch_size(batch_size, ordered):
    X, y = torch.randn(200, 4), (torch.rand(200) < 0.03).long()  # classes of very different size
    y = y.sort()[0] if ordered else y
    weighted = partial(F.cross_entropy, weight=torch.tensor([1.0, 9.0]))
    with warns(match=IS_NO_MEAN):
        relative_flatness(nn.Linear(4, 2), X, y, criterion=weighted, batch_size=batch_size)


def test_a_penalty_warns_of_it_in_the_first_step(data, chain):
    penalty = published_penalty()
    with warns(match=f"rmse {IS_NO_MEAN}") as caught:
        penalise(penalty, chain, rmse, *data)
    assert len(caught) == 1
    penalise(penalty, chain, rmse, *data)  # warnings are errors


@pytest.mark.parametrize("error", [AssertionError, ValueError])
def test_a_criterion_that_takes_no_part_of_a_batch_says_so(data, chain, error):
    def criterion(output, target):
        if len(output) < len(data[0]):
            raise error("all samples are needed")
        return F.mse_loss(output, target)

    with warns(match="could not be checked.*all samples are needed"):
        value = relative_flatness(chain, *data, criterion=criterion)
    assert value == pytest.approx(relative_flatness(chain, *data, criterion=MSE), rel=1e-4)


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
    X, y = (part[:63] for part in data)  # halves of different size
    state, expected = torch.get_rng_state(), relative_flatness(chain, X, y, criterion=MSE)
    found = relative_flatness(chain, X, y, criterion=criterion)
    assert found == pytest.approx(expected, rel=1e-4)
    assert torch.equal(torch.get_rng_state(), state)
    if isinstance(criterion, Summed):
        once = criterion.n_calls
        relative_flatness(chain, X[:1], y[:1], criterion=criterion)  # nothing to check
        assert criterion.n_calls == 2 * once


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
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    net[0].requires_grad_(not frozen)
    decays = OfWeights(net) if holds else lambda z, y: F.cross_entropy(z, y) + net[0].weight.norm()
    for call in (
        lambda: measure(name, net, X, Y, criterion=decays),
        lambda: penalise(published_penalty(-1), net, decays, X, Y),
    ):
        with warns(match="reads weights of the network"):
            call()
    assert net[0].weight.requires_grad is not frozen


def test_layers_behind_batch_norm_without_running_statistics_are_measured_with_a_warning(data):
    norm = nn.BatchNorm1d(5, track_running_stats=False)
    net = nn.Sequential(nn.Linear(4, 5), norm, nn.ReLU(), nn.Linear(5, 1))
    with (
        warns(match=r"\('1'\) mixes the samples of a batch"),
        pytest.raises(ValueError, match="behind layer '0', batch norm mixes the samples"),
    ):
        relative_flatness(net, *data, layer=0, criterion=MSE)
    with warns(match="flatness depend on batch_size"):
        found = relative_flatness(net, *data, criterion=MSE)
    last = relative_flatness(net[3:], net[:3](data[0]).detach(), data[1], criterion=MSE)
    assert found == pytest.approx(last, rel=1e-5)
    with warns(match="'0' left out"), warns(match="flatness depend on batch_size"):
        report = flatness_report(net, *data, measures=["relative_flatness"], criterion=MSE)
    assert list(report["layer"]) == ["3"]


def with_end(function, *shapes):
    """A linear layer, and a function of its output and further parameters behind it."""
    layers = {"first": nn.Linear(4, 3), "body": nn.Linear(3, 3), "head": nn.Linear(3, 3)}
    layers |= {"norm": nn.LayerNorm([3]), "more": nn.ParameterList(map(torch.randn, shapes))}
    net = Net(lambda net, x: function(net, net.body(net.first(x).relu()), *net.more), **layers)
    net.register_buffer("fixed", torch.eye(3))
    return net


def report_of(net, measures="relative_flatness", layers=(0, -1)):
    return flatness_report(net, X, Y, criterion=CE, measures=measures, layers=layers)


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
    net = with_end(*HEADS[name])
    head = "head.weight" if name == "not called" else "more.0"
    message = f"layer=-1 is 'body', .* multiplies its output by the parameter '{head}'"
    with warns(match=message) as caught:
        value = relative_flatness(net, X, Y, criterion=CE)
    assert sum("layer=-1" in str(warning.message) for warning in caught) == 1
    assert relative_flatness(net, X, Y, criterion=CE, layer="body") == value
    report_of(net, "hessian_trace", "all")
    measure("l2_norm", net, X, Y, criterion=CE)
    if "norm" in name:  # a penalty is refused there
        return
    with warns(match=message):
        penalise(RelativeFlatnessPenalty(), net, CE, X, Y)
    penalise(RelativeFlatnessPenalty("body"), net, CE, X, Y)


@pytest.mark.parametrize("name", OTHERS)
def test_other_ends_of_a_network_are_no_heads(name):
    report_of(with_end(*OTHERS[name]))


def test_a_product_of_two_layers_has_no_other_head():
    def run(net, x):
        h = net.body(x).tanh()
        return torch.einsum("nij,nj->ni", net.a(h).reshape(-1, 3, 3), net.b(h))

    net = Net(run, body=nn.Linear(4, 4), a=nn.Linear(4, 9), b=nn.Linear(4, 3))
    penalise(RelativeFlatnessPenalty(), net, CE, X, Y)
    report_of(net, "hessian_trace")


def windows(net, x):
    """The middle layer has the windows of all samples as its rows."""
    rows = torch.tanh(net.first(x)).unflatten(1, (2, -1)).movedim(1, 0).flatten(0, 1)
    return net.head(torch.tanh(net.within(rows)).mean(1).unflatten(0, (2, -1)).mean(0))


@pytest.mark.parametrize("n_steps", [6, 12], ids=lambda n_steps: f"{n_steps} steps")
def test_a_layer_whose_rows_are_no_samples_is_left_out(n_steps):
    modules = {"first": nn.Linear(3, 4), "within": nn.Linear(4, 4), "head": nn.Linear(4, 3)}
    net = Net(windows, **modules).double()
    at, options = (net, torch.randn(12, n_steps, 3).double(), Y), {"criterion": CE}
    left_out = partial(warns, match="'within' left out")
    with left_out():
        report = flatness_report(*at, measures="relative_flatness", method="exact", **options)
    expected = {layer: exact(net, layer, *at[1:]) for layer in ("first", "head")}
    assert report.set_index("layer")["value"].to_dict() == pytest.approx(expected)
    with left_out():
        assert measure("network_flatness", *at, **options) > 0
    with left_out():
        assert set(layer_sensitivity(*at, bits=8, **options)["layer"]) == {"first", "head"}
    with pytest.raises(ValueError, match="within"):
        exact(net, "within", *at[1:])


compiled = partial(torch.compile, backend="aot_eager")
COMPILED = {
    "in place": lambda net: net.compile(backend="aot_eager"),
    "a part in place": lambda net: net.backbone.compile(backend="aot_eager"),
    "a part": lambda net: setattr(net, "backbone", compiled(net.backbone)),
    "its forward": lambda net: setattr(net.backbone, "forward", compiled(net.backbone.forward)),
    "a function": lambda net: setattr(net, "function", compiled(torch.tanh)),
}


def with_backbone():
    torch._dynamo.reset()
    backbone = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    run = lambda net, x: net.head(net.function(net.backbone(x)))  # noqa: E731
    net = Net(run, backbone=backbone, head=nn.Linear(4, 3))
    net.function = torch.tanh
    return net


@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about its own insides
@pytest.mark.parametrize("change", COMPILED)
@pytest.mark.parametrize("called", [False, True])
def test_networks_with_compiled_parts_are_measured_and_penalised(change, called):
    net, X = with_backbone().double(), torch.randn(12, 4).double()
    kappas = [oracles.relative_flatness(net, name, CE, X, Y) for name in ("backbone.0", "head")]
    COMPILED[change](net)
    if called:  # compiled already
        CE(net(X), Y).backward()
    before = net._compiled_call_impl, net.backbone, vars(net.backbone).get("forward")
    for layer, kappa in zip((0, -1), kappas, strict=True):
        assert exact(net, layer, X, Y) == pytest.approx(kappa, rel=1e-9)
        penalty = published_penalty(layer)
        assert_right_on_average(penalty, net, CE, X, Y, kappa / (2 * 4))
        value = penalise(penalty, net, CE, X, Y)
        net.zero_grad()
        (value + CE(net(X), Y)).backward()
        assert all(parameter.grad is not None for parameter in net.parameters())
    assert measure("fisher_rao_norm", net, X, Y, criterion=CE) > 0
    assert before == (net._compiled_call_impl, net.backbone, vars(net.backbone).get("forward"))


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_backbone_before_the_penalised_head_stays_compiled():
    net, graphs, penalty = with_backbone(), [], published_penalty()
    net.backbone = torch.compile(
        net.backbone, backend=lambda graph, _: lambda *args: graphs.append(1) or graph(*args)
    )
    for _ in range(3):
        penalise(penalty, net, CE, X, Y).backward()
    assert len(graphs) == 2  # all steps but the first, which finds the layers


@pytest.mark.parametrize(
    "name", ["fisher_rao_norm", "joint_eigenvalue_flatness", "keskar_sharpness"]
)
def test_sparse_gradients_make_no_difference(name):
    net = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 3))
    X, found = torch.randint(9, (12, 3)), []
    for sparse in (False, True):
        net[0].sparse = sparse
        found.append(measure(name, net, X, Y, criterion=CE, random_state=0))
        assert net[0].sparse is sparse
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_derivatives_of_an_embedding_that_limits_its_rows_are_those_at_the_limit(max_norm):
    net = nn.Sequential(nn.Embedding(9, 4, max_norm=max_norm), nn.Flatten(), nn.Linear(12, 3))
    X, options = torch.arange(36).reshape(12, 3) % 9, {"criterion": CE, "random_state": 0}
    norm, top, rise = (
        measure(name, net, X, Y, **options)
        for name in ("fisher_rao_norm", "joint_eigenvalue_flatness", "keskar_sharpness")
    )
    slopes = []
    for x, y in zip(X, Y, strict=True):
        net.zero_grad()
        CE(net(x[None]), y[None]).backward()  # limits the rows
        slopes.append(sum((p.detach() * p.grad).sum().item() for p in net.parameters()))
    assert norm == pytest.approx(np.sqrt(np.mean(np.square(slopes))), rel=1e-5)
    net[0].max_norm = None
    expected = measure("joint_eigenvalue_flatness", net, X, Y, **options)
    assert top == pytest.approx(expected, rel=1e-4)
    assert rise > 0


def test_a_part_with_two_names_is_measured_and_given_back():
    body = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    net = Net(lambda net, x: net.body(x), body=body, first=body[0])
    parameters = dict(net.named_parameters())
    measures = ["adaptive_sharpness", "fisher_rao_norm", "l1_path_norm", "relative_flatness"]
    options = {"measures": measures, "layers": [0], "criterion": CE}
    found = flatness_report(net, X, Y, **options)["value"]
    for name, parameter in parameters.items():
        assert net.get_parameter(name) is parameter
    expected = flatness_report(body, X, Y, **options)["value"]
    assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-4)


def test_instance_norm_in_batches_of_one():
    layer = nn.ConvTranspose2d(2, 2, 1)  # whose output has the order of axes of channels last
    net = nn.Sequential(layer, nn.InstanceNorm2d(2), nn.Tanh(), nn.Flatten(), nn.Linear(32, 3))
    X, options = torch.randn(3, 2, 4, 4), {"layer": 0, "criterion": CE, "method": "exact"}
    one_by_one = relative_flatness(net, X, Y[:3], batch_size=1, **options)
    assert one_by_one == pytest.approx(relative_flatness(net, X, Y[:3], **options), rel=1e-4)


@pytest.mark.parametrize(("kind", "which"), [(dict, "out"), (tuple, 1), (list, -1)])
def test_one_of_several_outputs_is_chosen(kind, which):
    """As networks of torchvision for segmentation have them, or with several heads."""

    def run(net, x):
        h = torch.tanh(net.body(x))
        outputs = {"aux": net.other(h), "out": net.head(h)}
        return outputs if kind is dict else kind(outputs.values())

    modules = {"body": nn.Linear(4, 5), "other": nn.Linear(5, 3), "head": nn.Linear(5, 3)}
    net = Net(run, **modules)
    alone = Net(lambda _, x: net(x)[which], **modules)
    for name, at in (("relative_flatness", {"layer": "head"}), ("fisher_rao_norm", {})):
        chosen = measure(name, net, X, Y, output=which, criterion=CE, **at)
        expected = measure(name, alone, X, Y, criterion=CE, **at)
        assert chosen == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match="output="):
        relative_flatness(net, X, Y, output="no such", criterion=CE)
    if kind is dict:
        with pytest.raises(TypeError, match="output="):
            relative_flatness(net, X, Y, criterion=CE)
