"""Finding layers, and refusing those at which the curvature is not that of one weight."""

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune, weight_norm
from torch.utils.data import DataLoader, TensorDataset

from relflat_sk import (
    FlatnessWarning,
    LayerNotFoundError,
    RelativeFlatnessPenalty,
    feature_robustness,
    flatness_report,
    relative_flatness,
)
from relflat_sk._network.layers import find_layer
from tests import cases, oracles
from tests.cases import published_penalty
from tests.penalty.every_draw import assert_right_on_average, evaluate

N = 6
CE, MSE = nn.CrossEntropyLoss(), nn.MSELoss()


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).double()


X, Y = numbers(N, 5), torch.arange(N) % 3


def pair(run, n_outputs=3):
    """Two layers, which are called in another order, and a function that uses them."""
    torch.manual_seed(0)
    layers = {"b": nn.Linear(4, n_outputs), "a": nn.Linear(5, 4)}
    return cases.Net(lambda net, x: run(net.a, net.b, x), **layers).double()


def chain(a, b, x):
    return b(a(x).relu())


def penalise(net, X, y, criterion=CE, layer=-1, weight=None):
    return evaluate(published_penalty(layer), net, criterion, X, y, sample_weight=weight)


def test_positions_count_in_forward_order():
    net = pair(chain)
    for layer, name in ((-1, "b"), (1, "b"), (0, "a"), (-2, "a")):
        expected = oracles.relative_flatness(net, name, CE, X, Y)
        for way in (layer, name, net.get_submodule(name)):
            value = relative_flatness(net, X, Y, layer=way, criterion=CE, batch_size=4)
            assert value == pytest.approx(expected, rel=1e-10)
    assert find_layer(net, -1) == "a"  # as registered


def behind_relu():
    net = pair(chain)
    net.a = nn.Sequential(net.a, nn.ReLU())
    return net


def by_functions():
    return pair(lambda a, b, x: F.linear(F.linear(x, a.weight), b.weight))


NO_LAYER = [
    (behind_relu, 2, r"no layer 2. Layers with a weight matrix: 0: 'a.0' \(Linear"),
    (behind_relu, -3, "no layer -3"),
    (behind_relu, "tail", "no layer 'tail'"),
    (behind_relu, "all", "no layer 'all'. To measure all layers, use flatness_report"),
    (behind_relu, "a.1", "'a.1' is a ReLU, which has no weight"),
    (behind_relu, nn.Linear(2, 2), "not part of the network"),
    (behind_relu, 1.0, "layer must be an int, a dotted module name or the module itself, got 1"),
    (behind_relu, True, "got True of type bool"),
    (behind_relu, None, "got None"),
    (lambda: nn.Sequential(nn.ReLU()), -1, "no layer whose weight matrix can be measured"),
    (by_functions, -1, r"No layer is called. Not called: '[ab]' \(Linear\), .*F.linear"),
    (lambda: nn.Sequential(nn.Bilinear(5, 5, 3)), "0", "'0' is a Bilinear"),
    (lambda: nn.Sequential(nn.Embedding(3, 2)), "0", "'0' is a Embedding"),
]


@pytest.mark.parametrize(("make", "layer", "message"), NO_LAYER)
def test_no_such_layer(make, layer, message):
    is_layer = isinstance(layer, int | str | nn.Module) and layer is not True
    error = LayerNotFoundError if is_layer else TypeError
    with pytest.raises(error, match=message):
        relative_flatness(make(), X, Y, layer=layer, criterion=CE)
    if make is behind_relu and layer != "all":  # a penalty adds up the terms of all layers
        with pytest.raises(error, match=r"layer.* 0: .*\(Linear\)"):
            penalise(make(), X, Y, layer=layer)


class Scaled(nn.Linear):
    """A linear layer that is none."""

    def forward(self, x):
        return 2 * super().forward(x)


def overwritten(a, b, x):
    h = x * 2
    z = a(h)
    h.add_(1)
    return z


def tied():
    net = pair(lambda a, b, x: b(a(x)))
    net.a, net.b = nn.Linear(5, 5).double(), nn.Linear(5, 5).double()
    net.b.weight = net.a.weight
    return net


def with_size():
    """Calls a layer with the size of its output, which another one would have by default."""
    layer = nn.ConvTranspose1d(1, 1, 2, stride=2).double()
    return cases.Net(lambda net, x: net.a(x[:, None], output_size=[11])[:, 0], a=layer)


def behind(last):
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), Scaled(4, 3), last).double()


@pytest.mark.parametrize(
    ("make", "layer", "message"),
    [
        (lambda: pair(lambda a, b, x: a(x) + a(2 * x)), "a", "layer 'a' was called 2 times in one"),
        (lambda: pair(lambda a, b, x: a(x)), "b", "layer 'b' was called 0 times.*F.linear"),
        (tied, -1, r"layer 'b' is shared by the modules \['a', 'b'\]"),
        (lambda: pair(overwritten), "a", "input that layer 'a' received was overwritten in place"),
        (lambda: behind(nn.Identity()), -1, "layer '2' does not compute W x"),
        (with_size, -1, "layer 'a' does not compute W x .*, or an output_size"),
    ],
    ids=["twice", "never", "shared", "overwritten", "no linear layer", "output_size"],
)
def test_layers_without_a_weight_to_themselves(make, layer, message):
    with pytest.raises(ValueError, match=message):
        relative_flatness(make(), X, Y, layer=layer, criterion=CE)


@pytest.mark.parametrize("layer", [-1, "a", "all"])
def test_a_penalty_says_which_layers_are_not_called(layer):
    net = by_functions()
    with (
        pytest.raises(LayerNotFoundError, match=r"Not called: '[ab]' .*F.linear"),
        RelativeFlatnessPenalty(layer).capture(net),
    ):
        net(X)


def test_division_by_zero_is_an_infinite_factor():
    net = pair(lambda a, b, x: chain(a, b, x) / 0)
    with pytest.warns(FlatnessWarning, match="not finite|nan"):
        assert math.isnan(relative_flatness(net, X, Y, criterion=CE))
    assert penalise(net, X, Y).isnan()


NEIGHBOURS = numbers(N, N).softmax(1)


def sequence_first(a, b, x):
    return b(a(x.transpose(0, 1)).relu().sum(0))


def tokens_as_rows(a, b, x):
    return b(a(x.flatten(0, 1)).relu().view(*x.shape[:2], -1).sum(1))


def centred(a, b, x):
    z = a(x)
    return b((z - z.mean(0)).relu())


def sorted_by_length(a, b, x):
    order = x[:, 0].argsort()
    return b(a(x[order]).relu())[order.argsort()]


# what a network does with its layers, and the shape of a sample
RUNS = {
    "sequence first": (sequence_first, (2, 5)),
    "as many tokens as samples": (sequence_first, (N, 5)),
    "tokens as rows": (tokens_as_rows, (2, 5)),
    "graph": (lambda a, b, x: NEIGHBOURS @ chain(a, b, x), (5,)),
    "mean of the batch": (centred, (5,)),
    "other order": (sorted_by_length, (5,)),
}


@pytest.mark.parametrize("kind", RUNS)
def test_layers_whose_rows_are_no_samples_are_refused(kind):
    run, shape = RUNS[kind]
    net, X = pair(run), numbers(N, *shape)
    message = "depend on other rows of what layer 'a' puts out, of"
    with pytest.raises(ValueError, match=f"rows at layer 'a' into|{message}"):
        relative_flatness(net, X, Y, layer="a", criterion=CE)
    weight = torch.linspace(1, 2, N) if kind == "other order" else None
    with pytest.raises(ValueError, match=message):
        penalise(net, X, Y, layer="a", weight=weight)


def test_rows_are_checked_in_a_batch_of_each_size():
    sizes = [[0], list(range(1, N))]  # one sample mixes nothing
    loader = DataLoader(TensorDataset(X, Y), batch_sampler=sizes)
    with pytest.raises(ValueError, match="depend on other rows of what layer 'a' puts out, of"):
        relative_flatness(pair(centred), loader, layer="a", criterion=CE)


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize(
    ("n_outputs", "shape"), [(6, (5,)), (3, (2, 5))], ids=["two heads", "two tokens"]
)
def test_penalties_of_several_outputs_for_each_sample(n_outputs, shape, name):
    net, X = pair(lambda a, b, x: chain(a, b, x).view(-1, 3), n_outputs), numbers(N, *shape)
    y = torch.arange(2 * N) % 3
    truth = oracles.penalty(net, name, CE, X, y)
    assert_right_on_average(published_penalty(name), net, CE, X, y, truth)


@pytest.mark.parametrize("rows", [slice(None, None, 2), [2, 0, 1, 5, 3, 4]], ids=["some", "order"])
@pytest.mark.parametrize("name", ["a", "b"])
def test_penalties_of_chosen_rows(rows, name):
    net, y, copies = pair(lambda a, b, x: chain(a, b, x)[rows]), Y[rows], 400
    truth = oracles.penalty(net, name, CE, X, y)
    net.run = lambda net, x: chain(net.a, net.b, x).view(copies, N, 3)[:, rows].flatten(0, 1)
    penalty = published_penalty(name, probes=8)
    found = evaluate(penalty, net, CE, X.repeat(copies, 1), y.repeat(copies))
    assert found.item() == pytest.approx(truth, rel=0.05)


def with_second_output(a, b, x):
    z = a(x)
    return z, b(z.tanh())


def test_layers_of_a_second_output_are_refused_or_left_out():
    net, y = pair(with_second_output), numbers(N, 4)
    message = "criterion does not depend on the output of layer 'b'"
    with pytest.raises(ValueError, match=message):
        relative_flatness(net, X, y, criterion=MSE)
    with pytest.raises(ValueError, match=message):
        penalise(net, X, y, MSE)
    with pytest.warns(FlatnessWarning, match="'b' left out: the criterion does not depend on"):
        report = flatness_report(net, X, y, criterion=MSE, measures="relative_flatness")
    assert list(report["layer"]) == ["a"]
    every, first = (penalise(net, X, y, MSE, layer).item() for layer in ("all", "a"))
    assert every == pytest.approx(first, rel=1e-12)


Z = numbers(N, 4)


def tied_by(use):
    """An autoencoder, with the weight of one of its modules used by a function as well."""

    def run(net, x):
        if net.use == "before":
            return net.dec(net.mid(F.linear(x, net.dec.weight.T)).tanh())
        return OUTPUTS[net.use](net, x, net.mid(net.enc(x).tanh()).tanh())

    torch.manual_seed(0)
    layers = {"enc": nn.Linear(4, 3), "mid": nn.Linear(3, 3), "dec": nn.Linear(3, 4)}
    net = cases.Net(run, **layers).double()
    net.use = use
    return net


def ask(net, x, h):
    """Ask for properties of the weight only."""
    weight = net.enc.weight
    zeros = torch.zeros_like(weight).sum() + x.new_zeros(weight.shape[1])
    return net.dec(h.type_as(weight)) + zeros.to(weight.dtype)


def log(read):
    """Keep a number that is computed from the weight."""

    def run(net, x, h):
        net.norm = read(net.enc.weight)
        return net.dec(h)

    return run


OUTPUTS = {
    "none": lambda net, x, h: net.dec(h),
    "function": lambda net, x, h: F.linear(h, net.enc.weight.T),
    "operator": lambda net, x, h: h @ net.enc.weight,
    "list": lambda net, x, h: torch.einsum("ni,ij->nj", [h, net.enc.weight]),
    # of a value that does not pass the layer
    "aside": lambda net, x, h: net.dec(h) + x @ net.enc.weight.T @ net.enc.weight,
    "like": ask,
    "in no_grad": log(torch.no_grad()(lambda weight: weight.norm())),
    "detach": log(lambda weight: weight.detach().norm()),
    "data": log(lambda weight: weight.data.norm()),
}
USES = {"function": "enc", "operator": "enc", "list": "enc", "aside": "enc", "before": "dec"}


def measured(net, layer):
    return relative_flatness(net, Z, Z, layer=layer, criterion=MSE)


def assert_refused(net, name):
    message = f"uses the weight of layer '{name}' outside of the layer's call"
    with pytest.raises(ValueError, match=message):
        measured(net, name)
    if any(weight.requires_grad for weight in net.get_submodule(name).parameters()):
        with pytest.raises(ValueError, match=message):  # the graph shows no use of a frozen weight
            penalise(net, Z, Z, MSE, name)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("use", USES)
def test_layers_with_another_use_of_their_weight_are_refused(use, frozen):
    net, name = tied_by(use), USES[use]
    layer = net.get_submodule(name).requires_grad_(not frozen)
    assert_refused(net, name)
    assert all(weight.requires_grad is not frozen for weight in layer.parameters())
    assert all("forward" not in vars(module) for module in net.modules())
    assert measured(net, "mid") > 0
    assert penalise(net, Z, Z, MSE, "mid") > 0
    with pytest.warns(FlatnessWarning, match=f"'{name}' left out: .* outside of the layer's"):
        report = flatness_report(net, Z, Z, criterion=MSE, measures="relative_flatness")
    assert {"mid"} <= set(report["layer"]) <= {"enc", "mid", "dec"} - {name}


@pytest.mark.parametrize("use", ["in no_grad", "detach", "data", "like"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_a_weight_may_be_read_without_a_gradient_as_for_a_log(use, frozen):
    net = tied_by(use)
    net.enc.requires_grad_(not frozen)
    assert penalise(net, Z, Z, MSE, "enc") > 0
    assert measured(net, "enc") == pytest.approx(measured(tied_by("none"), "enc"), rel=1e-12)


COMPUTED = {
    "parametrization": parametrizations.weight_norm,
    "weight norm": weight_norm,
    "pruning": lambda layer: prune.random_unstructured(layer, "weight", 3),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("compute", COMPUTED)
def test_weights_that_are_computed_are_watched(compute):
    net = tied_by("function")
    COMPUTED[compute](net.enc)
    assert_refused(net, "enc")
    net.use = "none"
    assert measured(net, "enc") > 0


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_penalties_take_the_weight_that_a_hook_computed_for_their_pass():
    slopes = []
    for again in (False, True):
        net, penalty = tied_by("none"), published_penalty("enc")
        weight_norm(net.enc)
        with penalty.capture(net):
            y_pred = net(Z)
        if again:
            net(Z)
        torch.manual_seed(0)
        penalty(MSE, y_pred, Z).backward()
        slopes.append(net.enc.weight_g.grad)
    assert torch.equal(*slopes)


@pytest.mark.parametrize("name", ["a", "b"])
def test_weights_given_to_functional_call_are_those_of_the_layers(name):
    doubled = pair(chain)
    with torch.no_grad():
        for parameter in doubled.parameters():
            parameter.mul_(2)
    given = {n: p.detach().clone().requires_grad_() for n, p in doubled.named_parameters()}
    net = cases.Net(lambda own, x: functional_call(own.net, given, x), net=pair(chain))
    found = []
    for model, layer, parameters in (
        (doubled, name, [*doubled.parameters()]),
        (net, f"net.{name}", [*given.values()]),
    ):
        value = penalise(model, X, Y, layer=layer)
        slopes = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
        settings = {"layer": layer, "criterion": CE, "random_state": 0}
        rise = feature_robustness(model, X, Y, 0.1, **settings)[0]
        found.append([value, *slopes, relative_flatness(model, X, Y, **settings), rise])
    torch.testing.assert_close(*found, rtol=1e-10, atol=0)


class Reads(nn.Linear):
    """A layer that uses the weight of another one in its own call."""

    def forward(self, x):
        return super().forward(F.linear(x, self.other[0].weight))


def test_a_use_inside_of_another_layer_is_noticed():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Reads(4, 4)).double()
    net[2].other = [net[0]]  # in a list, so that it is no module of its own there
    with pytest.raises(ValueError, match="uses the weight of layer '0' outside"):
        measured(net, 0)


def words(tie):
    """A language model whose embedding is a function of the head's weight."""

    def run(net, tokens):
        return net.head(F.embedding(tokens.long(), net.head.weight if tie else copy).mean(1))

    torch.manual_seed(0)
    net = cases.Net(run, head=nn.Linear(4, 5, bias=False).double())
    copy = net.head.weight.detach().clone()
    return net


def test_a_head_tied_to_an_embedding_counts_as_its_own_copy():
    tokens, y = torch.arange(8).reshape(4, 2) % 5, torch.arange(4)
    tied, own = (relative_flatness(words(tie), tokens, y, criterion=CE) for tie in (True, False))
    assert tied == own
    assert penalise(words(True), tokens, y) > 0
    assert penalise(words(True).requires_grad_(False), tokens, y) > 0
