"""Copies with other weights: the same function, the factors asked for, or a refusal."""

import copy
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations

from relflat_sk import LayerNotFoundError, relative_flatness, reparameterize
from tests.cases import Net
from tests.network.test_network import same, state_of

SAME = 1e-9  # of outputs in float64, a few thousand roundings apart
FEW = settings(max_examples=25, deadline=None)

ACTIVATIONS = st.sampled_from([
    nn.ReLU,
    nn.LeakyReLU,
    lambda: nn.LeakyReLU(0.3),
    nn.PReLU,
    nn.Identity,
    nn.RReLU,
])


def randomize(net, seed=0):
    """Draw parameters and running statistics, the latter far from 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in net.state_dict().items():
        if tensor.is_floating_point():
            values = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            tensor.copy_(values.abs() * 3 if "var" in name else values)
    return net.double().eval()


CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
NORMS = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
POOLS = {1: nn.MaxPool1d, 2: nn.AvgPool2d, 3: nn.MaxPool3d}
GLOBAL_POOLS = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveMaxPool3d}


@st.composite
def nets(draw):
    """Chains of linear layers, or convolutions of 1 to 3 axes with a head behind them."""
    n_axes, groups = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    widths = [groups * draw(st.integers(1, 3)) for _ in range(4)]
    steps = [nn.Flatten()] if n_axes == 0 else []
    for n_in, n_out in pairwise(widths):
        bias = draw(st.booleans())
        if n_axes == 0:
            layer = nn.Linear(n_in, n_out, bias)
        else:
            kind = draw(st.sampled_from([CONVS, CONVS, TRANSPOSED]))[n_axes]
            in_groups = draw(st.sampled_from([1, groups]))
            layer = kind(n_in, n_out, 3, padding=1, groups=in_groups, bias=bias)
        block = [layer, draw(ACTIVATIONS)()]
        if draw(st.booleans()):  # behind the layer or behind the activation
            norm = NORMS[n_axes](n_out, affine=draw(st.booleans()))
            block.insert(draw(st.integers(1, 2)), norm)
        steps.append(nn.Sequential(*block, nn.Dropout()))
    extent = 1
    if n_axes:
        steps.append(POOLS[n_axes](2))
        extent = 2**n_axes
        if draw(st.booleans()):
            steps.append(GLOBAL_POOLS[n_axes](1))
            extent = 1
        steps.append(nn.Flatten())
    steps += [nn.Linear(widths[-1] * extent, 4), nn.ReLU(), nn.Linear(4, 3)]
    net = randomize(nn.Sequential(*steps), draw(st.integers(0, 99)))
    return net, torch.randn(3, widths[0], *[4] * n_axes).double()


KINDS = (nn.Linear, *CONVS.values(), *TRANSPOSED.values())


def draw_factors(data, n):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    return np.exp(rng.uniform(np.log(0.1), np.log(25), n))


def check_same_function(old, new, X):
    with torch.no_grad():
        expected, found = old(X), new(X)
        if isinstance(expected, dict):
            expected, found = expected["logits"], found["logits"]
        scale = expected.abs().max().item()
        torch.testing.assert_close(found, expected, rtol=SAME, atol=SAME * scale)


@pytest.mark.filterwarnings("ignore:.* may be (dead|saturated):relflat_sk.FlatnessWarning")
@pytest.mark.parametrize("kind", ["layer", "neuron"])
@FEW
@given(nets(), st.data())
def test_factors_leave_function_and_flatness(kind, case, data):
    net, X = case
    layers = {name: layer for name, layer in net.named_modules() if isinstance(layer, KINDS)}
    *hidden, _ = layers.items()
    if kind == "layer":
        factors = draw_factors(data, len(hidden))
        factors = dict(zip(layers, [*factors, 1 / factors.prod()], strict=True))
    else:
        chosen = [(name, layer) for name, layer in hidden if data.draw(st.booleans())]
        sizes = {n: getattr(m, "out_features", getattr(m, "out_channels", 0)) for n, m in chosen}
        factors = {name: draw_factors(data, size) for name, size in sizes.items()}
    before = state_of(net)
    new = reparameterize(net, factors, X=X, kind=kind)
    check_same_function(net, new, X)
    y, options = torch.arange(len(X)) % 2, {"normalize": kind == "neuron"}
    options["criterion"] = nn.CrossEntropyLoss()
    expected, found = (relative_flatness(which, X, y, **options) for which in (net, new))
    assert found == pytest.approx(expected, rel=1e-6)
    same(before, state_of(net))
    so_far = 1.0
    for at, name in enumerate(factors):
        old, rescaled, factor = layers[name], new.get_submodule(name), torch.tensor(factors[name])
        so_far = so_far * factor if kind == "layer" else factor
        if old.bias is not None:
            torch.testing.assert_close(rescaled.bias, old.bias * so_far, rtol=1e-13, atol=0)
        if kind == "layer":
            torch.testing.assert_close(rescaled.weight, factor * old.weight, rtol=1e-15, atol=0)
        elif at == 0 and not isinstance(old, tuple(TRANSPOSED.values())):  # nothing is undone in it
            rows = old.weight.flatten(1) * factor[:, None]
            assert torch.equal(rescaled.weight.flatten(1), rows)


def test_batch_norm_keeps_honest_statistics():
    """Fresh statistics of the rescaled network, from data, are those that it was given."""
    net = randomize(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=None)))
    net = nn.Sequential(*net, nn.ReLU(), nn.Linear(3, 2).double())
    X = torch.randn(50, 4).double()
    net[1].reset_running_stats()
    net.train()(X)
    net.eval()
    new = reparameterize(net, {0: [0.2, 5.0, 20.0]}, X=X, kind="neuron")
    fresh = copy.deepcopy(new)
    fresh[1].reset_running_stats()
    fresh.train()(X)
    torch.testing.assert_close(fresh[1].running_mean, new[1].running_mean)
    torch.testing.assert_close(fresh[1].running_var, new[1].running_var)


def between(*steps):
    return nn.Sequential(nn.Linear(4, 3), *(steps or [nn.ReLU()]), nn.Linear(3, 2))


def pooled(net, x):
    return net.outer(net.inner(x).relu().mean([2, 3]))


def of_set(net, x):
    """A deep set: the axis of the set is not that of the neurons."""
    return net.outer(net.inner(x).relu().to(torch.float64).sum(-2))


TWO, EACH = [2.0, 0.5], {0: [0.1, 3.0, 25.0]}
OUTER = nn.Linear(3, 2)
BATCH_NORM = partial(nn.BatchNorm1d, 3, eps=1e-30, track_running_stats=False)
BEHIND_FLATTEN = nn.Conv1d(2, 3, 2), nn.ReLU(), nn.ConstantPad1d(1, 0.0), nn.Flatten()
# a network, the shape of its inputs, and factors
ALLOWED = {
    "pooled": (Net(pooled, inner=nn.Conv2d(2, 3, 2), outer=OUTER), (4, 2, 5, 5), TWO, EACH),
    "a set": (Net(of_set, inner=nn.Linear(4, 3), outer=OUTER), (4, 6, 4), TWO, EACH),
    "tokens": (between(), (4, 6, 4), TWO, EACH),
    # each neuron of a Linear behind a Flatten of (n, 6, 3): tiles, not blocks
    "tiles": (
        nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(18, 2)), (4, 6, 4), TWO,
        EACH,
    ),
    "blocks": (
        nn.Sequential(*BEHIND_FLATTEN, nn.BatchNorm1d(18), nn.Linear(18, 2)), (4, 2, 5), TWO, EACH,
    ),
    "batch norm of the batch": (between(BATCH_NORM()), (5, 4), EACH),
    "batch norm along another axis": (between(nn.BatchNorm1d(6)), (2, 6, 4), TWO),
    # anything goes where the factors multiply to one
    "tanh": (
        nn.Sequential(*between(nn.ReLU(), nn.Linear(3, 3), nn.Tanh()), nn.Softmax(dim=1)), (5, 4),
        [2.0, 0.5, 1.0],
    ),
    # their product is not quite 1: what is missing goes into the last layer
    "factors of float32": (between(), (5, 4), torch.tensor([3.0, 1 / 3], requires_grad=True)),
}  # fmt: skip


@pytest.mark.parametrize("name", ALLOWED)
def test_the_function_stays_also_in_unusual_networks(name):
    net, shape, *all_factors = ALLOWED[name]
    net, X = randomize(net), torch.randn(shape).double()
    for factors in all_factors:
        kind = "neuron" if isinstance(factors, dict) else "layer"
        new = reparameterize(net, factors, X=X, kind=kind)
        check_same_function(net, new, X)
        assert any(
            (new.state_dict()[key] != value).any() for key, value in net.state_dict().items()
        )


def block(net, x):
    x = net.stem(x).relu()
    out = net.outer(F.relu(net.norm(net.inner(x)), inplace=True))
    out += net.project(x)
    return {"logits": net.fc(out.relu().mean((2, 3)))}


def residual(project):
    layers = {"stem": nn.Conv2d(2, 4, 3, padding=1), "inner": nn.Conv2d(4, 4, 3, padding=1)}
    layers |= {"norm": nn.BatchNorm2d(4), "outer": nn.Conv2d(4, 4, 3, padding=1)}
    return randomize(Net(block, **layers, project=project, fc=nn.Linear(4, 3)))


def test_branches():
    net, X = residual(nn.Conv2d(4, 4, 1)), torch.randn(3, 2, 4, 4).double()
    # stem, inner, outer, project, fc: both ways through the block multiply to 6
    for factors in ([0.5, 2.0, 3.0, 6.0, 1 / 3], {"inner": 4.0, "outer": 0.25}):
        check_same_function(net, reparameterize(net, factors, X=X), X)
    four = [2.0, 3.0, 4.0, 5.0]
    for factors in ({"inner": four}, {"outer": four, "project": four}):
        check_same_function(net, reparameterize(net, factors, X=X, kind="neuron"), X)
    with pytest.raises(ValueError, match="'fc' of the copy .* multiply to 1 on every path"):
        reparameterize(net, [1.0, 2.0, 3.0, 1.0, 1 / 6], X=X)
    with pytest.raises(ValueError, match="'fc' of the copy does not receive"):
        reparameterize(net, {"outer": four}, X=X, kind="neuron")
    plain, factors = residual(nn.Identity()), {"stem": 2.0, "inner": 2.0, "fc": 0.25}
    with pytest.raises(ValueError, match="'fc' of the copy does not receive"):
        reparameterize(plain, factors, X=X)


class Noisy(nn.Module):
    def forward(self, x):
        return x.tanh() if self.training else x.relu()


def test_the_copy_is_a_copy():
    net, X = between(Noisy()), torch.randn(5, 4)
    net(X).sum().backward()
    net[0].weight.requires_grad_(False)
    before = state_of(net)
    new = reparameterize(net, [4.0, 1 / 4], X=X)
    same(before, state_of(net))
    assert [module.training for module in new.modules()] == [True] * 4
    assert [tensor.requires_grad for tensor in new.parameters()] == [False, True, True, True]
    assert new[0].bias.grad is None
    pointers = ({tensor.data_ptr() for tensor in each.parameters()} for each in (net, new))
    assert set.isdisjoint(*pointers)
    assert torch.equal(new[0].weight, net[0].weight * 4)
    # the function is that of evaluation mode
    torch.testing.assert_close(new.eval()(X), net.eval()(X), rtol=0, atol=0)


def with_step(run):
    return Net(lambda net, x: net.b(run(net.a(x))), a=nn.Linear(4, 3), b=nn.Linear(3, 2))


def crossed():
    """Neurons along two axes of the same length, (n, 3, 3)."""
    return Net(
        lambda net, x: net.head(net.channels(x) + net.last(x)),
        channels=nn.Conv1d(3, 3, 1), last=nn.Linear(3, 3), head=nn.Linear(3, 2),
    )  # fmt: skip


def shared(is_weight):
    def run(net, x):
        x = net.b(net.a(x).relu()).relu()
        return net.c(x if is_weight else net.a(x))

    net = Net(run, **{name: nn.Linear(3, 3) for name in "abc"})
    if is_weight:
        net.b.weight = net.a.weight
    return net


def returning():
    def run(net, x):
        features = net.body(x).relu()
        return net.head(features), features

    return Net(run, body=nn.Linear(4, 3), head=nn.Linear(3, 2))


def branching():
    """Calls the layer that large values choose."""
    return Net(
        lambda net, x: (net.b if net.a(x).abs().max() > 10 else net.c)(net.a(x).relu()),
        a=nn.Linear(4, 3), b=nn.Linear(3, 2), c=nn.Linear(3, 2),
    )  # fmt: skip


def changed(change):
    net = between()
    change(net[0])
    return net


def hook(layer):
    layer.register_forward_hook(lambda module, args, output: output.tanh())


NEXT, OUTPUT = "'.*' of the copy does not receive what it", "outputs of the copy on X differ"
EITHER = f"{NEXT}|{OUTPUT}"
STEPS = [
    (run, factors)
    for factors in (TWO, EACH)
    for run in (torch.tanh, nn.ReLU6(), nn.LayerNorm(3), lambda x: x + 1, lambda x: x * x.relu())
]
STEPS += [(lambda x: x.flip(1), EACH), (lambda x: x.mean(-1, keepdim=True).expand(-1, 3), EACH)]
REFUSED = [
    *((lambda run=run: with_step(run), factors, (5, 4), EITHER) for run, factors in STEPS),
    (crossed, {name: [2.0, 3.0, 4.0] for name in ("channels", "last")}, (5, 3, 3), NEXT),
    (between, {-1: [2.0, 3.0]}, (5, 4), OUTPUT),
    (between, [2.0, 0.25], (5, 4), OUTPUT),
    # weights and modules that cannot be changed
    (lambda: shared(True), [2.0, 2.0, 0.25], (5, 3), EITHER),
    (lambda: shared(False), [2.0, 2.0, 0.25], (5, 3), EITHER),
    (lambda: changed(parametrizations.weight_norm), TWO, (5, 4), EITHER),
    (lambda: changed(hook), TWO, (5, 4), EITHER),
    (returning, TWO, (5, 4), OUTPUT),
    (nn.ReLU, TWO, (5, 4), "each of the 0 layers with a weight"),
    (branching, [100.0, 0.01], (5, 4), EITHER),
    (lambda: between().half(), [1e9, 1e-9], (5, 4), "nor too large for their dtype"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "factors", "shape", "message"), REFUSED)
def test_refused(make, factors, shape, message):
    net = make()
    X = (10 * torch.randn(shape)).to(next(net.parameters(), torch.empty(0)).dtype)
    before = state_of(net)
    with pytest.raises(ValueError, match=message):
        reparameterize(net, factors, X=X, kind="neuron" if isinstance(factors, dict) else "layer")
    same(before, state_of(net))


def test_all_batches_are_compared():
    """A step that differs in the last of 1,100 samples only."""
    X, net = torch.rand(1100, 4), between(nn.ReLU6())
    X[-1] = 100.0
    nn.init.constant_(net[0].weight, 0.1)
    reparameterize(net, TWO, X=X[:-1])
    with pytest.raises(ValueError, match=OUTPUT):
        reparameterize(net, TWO, X=X)


def test_a_dead_layer_takes_the_factors_before_it():
    net = randomize(between())
    nn.init.constant_(net[0].bias, -100)  # dead on small inputs
    new = reparameterize(net, EACH, X=torch.zeros(5, 4).double(), kind="neuron")
    check_same_function(net, new, 100 * torch.randn(5, 4).double())


ONE, THREE_EACH = (rf"must be positive finite numbers of shape \({n}\)" for n in ("", "3,"))


@pytest.mark.parametrize(
    ("factors", "kind", "message"),
    [
        ([2.0], "layer", r"each of the 2 layers .*\('0', '2'\).* got \[2.0\]"),
        ([-1.0, -1.0], "layer", f"factors of layer '0' {ONE}"),
        ([1.0, np.nan], "layer", f"factors of layer '2' {ONE}"),
        (None, "layer", "each of the 2 layers .* got None"),
        ({0: 2.0, "0": 0.5}, "layer", "names layer '0' more than once"),
        ({3: 2.0}, "layer", "there is no layer 3"),
        ({"1": 2.0}, "layer", "'1' is a ReLU, which has no weight"),
        ({0: [2.0, 2.0]}, "neuron", rf"{THREE_EACH}.* got \[2.0, 2.0\]"),
        ({0: 2.0}, "neuron", f"{THREE_EACH}.* got 2.0"),
        ([[1.0, 1.0, 1.0]], "neuron", r'kind="neuron" a mapping only; got \[\['),
        ([1.0, 1.0], "rows", "kind must be .*, got 'rows'"),
    ],
)
def test_refuses_bad_arguments(factors, kind, message):
    with pytest.raises((ValueError, LayerNotFoundError), match=message):
        reparameterize(between(), factors, X=torch.randn(5, 4), kind=kind)
    with pytest.raises(TypeError, match="must be a torch.nn.Module, got Tensor"):
        reparameterize(torch.ones(2), TWO, X=torch.ones(2))


def test_ways_to_name_a_layer():
    net, X = randomize(between()), torch.randn(5, 4)
    expected = reparameterize(net, [5.0, 0.2], X=X).state_dict()
    for factors in ({0: 5.0, -1: 0.2}, {"0": 5.0, net[2]: 0.2}, np.array([5.0, 0.2])):
        found = reparameterize(net, factors, X=X).state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
