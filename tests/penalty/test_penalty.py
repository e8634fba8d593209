"""The penalty of a batch: its value against the full Hessian, its slope against differences."""

import copy
import io
import pickle
from contextlib import nullcontext
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from relflat_sk import (
    FlatnessWarning,
    RelativeFlatnessPenalty,
    RelativeFlatnessRegularizedNet,
    relative_flatness,
)
from tests import oracles
from tests.cases import CASES, Net, mlp, published_penalty
from tests.penalty.every_draw import assert_right_on_average, evaluate, train

pytestmark = pytest.mark.filterwarnings("ignore:NLLLoss takes log:relflat_sk.FlatnessWarning")

EXACT = 1e-10  # float64: both sum the same terms
SLOPE = 1e-6  # central differences in float64, step 1e-5: truncation 1e-10, rounding 1e-11
CLOSED = [name for name, (*_, closed) in CASES.items() if closed]
CE, MSE = nn.CrossEntropyLoss(), nn.MSELoss()
REDUCIBLE = [name for name in CASES if name not in {"kl divergence", "a function"}]


def make(case, n=11):
    network, criterion, target, _ = CASES[case]
    torch.manual_seed(1)
    return network(), criterion(), torch.randn(n, 5).double(), target(n)


def expected(net, layer, criterion, X, y):
    """kappa / (2 m) of the full Hessian at a layer, or the sum over several layers."""
    names = [name for name, m in net.named_modules() if isinstance(m, nn.Linear)]
    chosen = names if layer == "all" else layer if isinstance(layer, list | tuple) else [layer]
    chosen = [at if isinstance(at, str) else names[at] for at in chosen]
    return sum(oracles.penalty(net, name, criterion, X, y) for name in chosen)


# -- the value ---------------------------------------------------------------------------


SCALED = {
    "times": (lambda z: z * (1 / 9), True),
    "negative": (lambda z: -0.3 * z, True),
    "divided": (lambda z: z / torch.tensor(9.0), True),
    "in place": (lambda z: z.div_(9), True),
    "each its own": (lambda z: z * torch.tensor([1.0, 2.0, 3.0]), False),
}


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(label_smoothing=0.2), MSE])
@pytest.mark.parametrize("name", SCALED)
def test_a_constant_factor_behind_the_last_layer_keeps_the_closed_form(name, criterion):
    scaled, is_closed = SCALED[name]
    net, X = Net(lambda own, X: scaled(own.net(X)), net=mlp(3)), torch.randn(11, 5).double()
    y = X[:, :3] if criterion is MSE else torch.arange(11) % 3
    state = torch.get_rng_state()
    with (penalty := published_penalty()).capture(net):
        output = net(X)
    value = penalty(criterion, output, y)
    assert torch.equal(torch.get_rng_state(), state) == is_closed  # no probe was drawn
    if is_closed:
        assert value.item() == pytest.approx(expected(net, -1, criterion, X, y), rel=EXACT)


@pytest.mark.parametrize(
    ("change", "criterion"),
    [(torch.sigmoid_, nn.BCELoss()), (lambda z: z.squeeze_(1), nn.BCEWithLogitsLoss())],
    ids=["sigmoid", "squeeze"],
)
def test_a_step_may_overwrite_what_the_last_layer_puts_out(change, criterion):
    net, X = Net(lambda own, X: change(own.net(X)), net=mlp(1)), torch.randn(11, 5).double()
    y = (X[:, 0] > 0).double().reshape(net(X).shape)
    truth = expected(net, -1, criterion, X, y)
    assert_right_on_average(published_penalty(), net, criterion, X, y, truth)


# torch's functions, the modules that compute the same, and cases with networks for them
FUNCTIONS = [
    (F.cross_entropy, CE, "cross-entropy"),
    (F.nll_loss, nn.NLLLoss(), "nll of log-softmax"),
    (F.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss(), "bce with logits"),
    (F.binary_cross_entropy, nn.BCELoss(), "bce of sigmoid"),
    (F.mse_loss, MSE, "squared error"),
    (F.poisson_nll_loss, nn.PoissonNLLLoss(), "poisson"),
    (F.l1_loss, nn.L1Loss(), "huber"),
    (F.smooth_l1_loss, nn.SmoothL1Loss(), "huber"),
    (F.huber_loss, nn.HuberLoss(), "huber"),
]


@pytest.mark.filterwarnings("ignore:.*L1Loss has no curvature")
@pytest.mark.parametrize(
    ("function", "module", "case"), FUNCTIONS, ids=[case[0].__name__ for case in FUNCTIONS]
)
def test_functions_of_torch_are_known_as_their_modules(function, module, case):
    net, _, X, y = make(case)
    parameters, found = list(net.parameters()), []
    for seed, criterion in enumerate([module, function]):
        penalty = RelativeFlatnessPenalty(weight=2.0)
        value = evaluate(penalty, net, criterion, X, y, seed=seed if case in CLOSED else 0)
        slopes = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
        found.append([value, *slopes, relative_flatness(net, X, y, criterion=criterion)])
    assert_close(*found, rtol=EXACT, atol=0)


def cubic(output, target):
    return (output - target).abs().pow(3).mean()


def test_a_criterion_without_curvature_is_told_once():
    net, _, X, y = make("huber")
    penalty, criterion = RelativeFlatnessPenalty(), nn.L1Loss()
    with pytest.warns(FlatnessWarning, match="penalty has no effect: L1Loss"):
        evaluate(penalty, net, criterion, X, y)
    # without a warning
    assert evaluate(penalty, net, criterion, X, y) == 0
    net[-1].weight.data.zero_()
    assert evaluate(penalty, net, cubic, X, y) == 0


EARLIER = [0, -2]
SEVERAL = [[0, -1, "2"], ("0", "4", -2), "all"]
AVERAGED = [  # the last layer, earlier ones, and several
    *product(CASES, [-1], [1]),
    *product(["bce of sigmoid", "squared error", "a function"], EARLIER, [1]),
    *product(["cross-entropy"], EARLIER, [4]),
    *product(["cross-entropy", "a function"], SEVERAL, [1]),
]


@pytest.mark.parametrize(("case", "layer", "probes"), AVERAGED)
def test_right_on_average(case, layer, probes):
    net, criterion, X, y = make(case)
    truth, penalty = expected(net, layer, criterion, X, y), published_penalty(layer, probes=probes)
    assert_right_on_average(penalty, net, criterion, X, y, truth)
    evaluate(penalty, net, criterion, X, y, seed=0)
    is_closed = layer == -1 and case in CLOSED
    assert torch.equal(torch.get_rng_state(), torch.manual_seed(0).get_state()) == is_closed


@pytest.mark.parametrize("case", ["cross-entropy", "squared error"])
def test_layers_may_be_named_in_any_order_and_twice(case):
    net, criterion, X, y = make(case)
    for options in ({"clip": None}, {"weight": 1e4}):  # the limit depends on their number
        values = [
            evaluate(RelativeFlatnessPenalty(order, **options), net, criterion, X, y)
            for order in ([-1, 0], [0, -1], [0, -1, 0])
        ]
        assert_close(values[1:], values[:1] * 2, rtol=EXACT, atol=0)


@pytest.mark.parametrize("case", REDUCIBLE)
def test_sums_where_the_criterion_sums(case):
    net, criterion, X, y = make(case)
    mean, mean_loss = evaluate(published_penalty(), net, criterion, X, y), criterion(net(X), y)
    criterion.reduction = "sum"
    value = evaluate(published_penalty(), net, criterion, X, y)
    assert_close(value, mean * criterion(net(X), y) / mean_loss, rtol=EXACT, atol=0)
    if case in CLOSED:
        assert value.item() == pytest.approx(expected(net, -1, criterion, X, y), rel=EXACT)


def test_normalized_ignores_rounding_noise_on_a_constant_feature():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Identity(), nn.Linear(3, 4))
    X, y = torch.randn(8, 3), torch.arange(8) % 4
    X[:, 1] = 0.1
    exact = evaluate(published_penalty(normalize=True), net, CE, X, y)
    X[::2, 1] *= 1 + torch.finfo(torch.float32).eps
    assert X[:, 1].var() > 0
    noisy = evaluate(published_penalty(normalize=True), net, CE, X, y)
    assert_close(noisy, exact)


# -- the slope ---------------------------------------------------------------------------


def assert_slope_is_that_of_differences(penalty, net, criterion, X, y, step=1e-5):
    value = evaluate(penalty, net, criterion, X, y)
    parameters = list(net.parameters())
    slopes = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
    found, truth = [], []
    generator = torch.Generator().manual_seed(0)
    # a random direction within each parameter, in which a wrong slope of any entry shows
    for parameter, slope in zip(parameters, slopes, strict=True):
        entries, kept = parameter.data, parameter.data.clone()
        direction = torch.randn(entries.shape, generator=generator, dtype=entries.dtype)
        values = []
        for side in (1, -1):
            entries.copy_(kept + side * step * direction)
            values.append(evaluate(penalty, net, criterion, X, y).item())
        entries.copy_(kept)
        truth.append((values[0] - values[1]) / (2 * step))
        found.append((slope * direction).sum().item())
    largest = max(map(abs, truth))
    assert largest > 1e-4  # there is a slope to get right
    assert found == pytest.approx(truth, rel=SLOPE, abs=SLOPE * largest)


NORMALIZED = {"normalize": True, "probes": 2}
SLOPES = [
    *product(CASES, [-1, 0], [{}]),
    *product(["cross-entropy", "bce of sigmoid", "huber"], [-1, -2], [NORMALIZED]),
    ("bce multi-label, pos_weight and weight", "all", {}),  # of a sum
]


@pytest.mark.parametrize(("case", "layer", "options"), SLOPES)
def test_slope_in_every_parameter(case, layer, options):
    net, criterion, X, y = make(case)
    if layer == "all":
        criterion.reduction = "sum"
    assert_slope_is_that_of_differences(published_penalty(layer, **options), net, criterion, X, y)


def normalised(net, x):
    """Blocks that may run again in the backward pass, and a normalisation."""
    again = partial(checkpoint, net.first, use_reentrant=False)
    return net.norm(net.last(again(x) if net.again else net.first(x)))


def make_normalised(norm=nn.Identity, again=False):
    torch.manual_seed(1)
    first = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.LayerNorm(4))
    net = Net(normalised, first=first, last=nn.Linear(4, 4), norm=norm(4)).double()
    net.again = again
    return net


def test_a_normalisation_behind_the_last_layer():
    """Also in the steps behind the first, for which it is known what they need."""
    _, criterion, X, y = make("cross-entropy")
    net, penalty = make_normalised(nn.LayerNorm), published_penalty()
    truth = expected(net, "last", criterion, X, y)
    for _ in range(2):
        assert_right_on_average(penalty, net, criterion, X, y, truth)
    assert_slope_is_that_of_differences(penalty, net, criterion, X, y)


def test_gradient_checkpointing_is_right_at_the_last_layer_and_refused_before_normalisations():
    _, criterion, X, y = make("cross-entropy")
    trained = []
    for again in (False, True):
        net, penalty = make_normalised(again=again), RelativeFlatnessPenalty(weight=5.0)
        train(penalty, net, criterion, X, y, 10, lr=0.5)
        trained.append(nn.utils.parameters_to_vector(net.parameters()))
    assert_close(*trained, rtol=EXACT, atol=0)
    with pytest.raises(ValueError, match="gradient checkpointing runs normalisations or attention"):
        evaluate(RelativeFlatnessPenalty(layer=0), net, criterion, X, y)


# -- how it is used ----------------------------------------------------------------------


def count_calls(net):
    calls = []
    net.register_forward_hook(lambda *_: calls.append(1))
    return calls


def test_takes_one_forward_pass_and_leaves_nothing_behind():
    net, criterion, X, y = make("cross-entropy")
    calls, penalty = count_calls(net), published_penalty("all")
    evaluate(penalty, net, criterion, X, y).backward()
    assert len(calls) == 1
    fresh = make("cross-entropy")[0]
    for layer in (0, "all", -1):  # the first time anew, then as planned
        penalty.layer = layer
        for _ in range(2):
            with pytest.raises(ZeroDivisionError), penalty.capture(net):
                _ = len(net(X)) / 0
            with penalty.capture(net):
                net(X)
            assert [m.__dict__.keys() for m in net] == [m.__dict__.keys() for m in fresh]
            assert not any(m._forward_hooks or m._forward_pre_hooks for m in net)


def test_keeps_what_others_put_in_place_of_a_layers_forward():
    net, criterion, X, y = make("cross-entropy")
    value = evaluate(published_penalty(), net, criterion, X, y)
    calls, usual = [], net[-1].forward
    net[-1].forward = own = lambda x: calls.append(1) or usual(x)
    inner, outer = published_penalty(), published_penalty("all")
    for n_calls in (1, 2):
        with outer.capture(net), inner.capture(net):
            output = net(X)
        assert inner(criterion, output, y) == value
        assert outer(criterion, output, y) > value
        assert net[-1].forward is own
        assert len(calls) == n_calls


@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about its own insides
@pytest.mark.parametrize(("layer", "inside"), [(-1, True), (0, False)])
def test_a_compiled_network_makes_the_same_steps_and_runs_its_hooks_once(layer, inside):
    def steps(compiles):
        net, criterion, X, y = make("cross-entropy")
        seen = count_calls(net[-1])
        called = torch.compile(net, backend="aot_eager") if compiles else net
        penalty, found = RelativeFlatnessPenalty(layer, weight=1.0), []
        for step in range(3):
            torch.manual_seed(step)
            with penalty.capture(called):
                output = called(X)
                term = penalty(criterion, output, y) if inside else None
            loss = criterion(output, y) + (term if inside else penalty(criterion, output, y))
            found.append(torch.autograd.grad(loss, list(net.parameters())))
        assert len(seen) == 3
        assert_close(called(X), net(X))
        assert not any("forward" in vars(m) for m in net.modules())
        return found

    torch._dynamo.reset()
    assert_close(steps(True), steps(False), rtol=EXACT, atol=0)


@pytest.mark.parametrize("layer", [0, "0", ["0", -1], "all"])
def test_another_layer_can_be_asked_for_later(layer):
    at, penalty = make("cross-entropy"), published_penalty()
    last = evaluate(penalty, *at)
    penalty.layer = layer
    assert evaluate(penalty, *at) == evaluate(published_penalty(layer), *at) != last
    if isinstance(layer, list):
        layer.pop(0)
        assert evaluate(penalty, *at) == last


PARAMETERS = [
    *product(["probes"], [0, -1, 1.5, True, "1"]),
    *product(["clip"], [0, "half"]),
    ("layer", []),
    ("weight", float("nan")),
    ("every", 0),
]


@pytest.mark.parametrize(("name", "value"), PARAMETERS, ids=str)
def test_parameters_are_checked(name, value):
    with pytest.raises(ValueError, match=name):
        RelativeFlatnessPenalty(**{name: value})


# from a captured network and its data to the arguments of the penalty, and its error
REFUSED = {
    "no gradient": (
        lambda net, X, y: (CE, torch.no_grad()(net)(X), y), "y_pred carries no gradient: .*no_grad"
    ),
    "detached": (lambda net, X, y: (CE, net(X).detach(), y), "y_pred carries .* was detached"),
    "empty": (lambda net, X, y: (CE, net(X[:0]), y[:0]), r"y_pred has shape \(0, 4\)"),
    "targets": (lambda net, X, y: (MSE, net(X), torch.zeros(11)), r"\(11, 4\), got \(11,\)"),
    "criterion": (lambda net, X, y: ("mse", net(X), y), "criterion"),
    "weights": (lambda net, X, y: (CE, net(X), y, torch.ones(3)), "sample_weight"),
}  # fmt: skip


@pytest.mark.parametrize("layer", [-1, 0])
@pytest.mark.parametrize("case", REFUSED)
def test_refuses_what_has_no_penalty(case, layer):
    call, message = REFUSED[case]
    net, _, X, y = make("cross-entropy")
    with (penalty := published_penalty(layer)).capture(net):
        arguments = call(net, X, y)
    with pytest.raises((TypeError, ValueError), match=message):
        penalty(*arguments)


@pytest.mark.parametrize("layer", [-1, 0, [0, -1], "all"], ids=str)
def test_refuses_the_output_of_another_forward_pass(layer):
    net, criterion, X, y = make("squared error")
    output = net(X)
    with (penalty := published_penalty(layer)).capture(net):
        net(X)
    with pytest.raises(ValueError, match="not the output of the captured .*once, inside"):
        penalty(criterion, output, y)


def test_refuses_to_be_called_without_a_new_forward_pass():
    net, criterion, X, y = make("cross-entropy")
    penalty = published_penalty()

    def check(output):
        with pytest.raises(RuntimeError, match="has recorded no forward pass"):
            penalty(criterion, output, y)

    check(net(X))
    evaluate(penalty, net, criterion, X, y)
    check(net(X))
    with penalty.capture(net):
        output = net(X)
    with pytest.raises(ZeroDivisionError), penalty.capture(net):
        _ = len(net(X)) / 0
    check(output)  # nothing is left of the pass before


def test_refuses_a_layer_in_a_part_without_gradients():
    net = Net(lambda own, X: own.last(torch.no_grad()(own.first)(X)), first=mlp(4), last=mlp(4))
    net.last[0] = nn.Linear(4, 7).double()
    with pytest.raises(ValueError, match="nothing to train up to layer 'first.0'"):
        evaluate(published_penalty(0), net, *make("cross-entropy")[1:])


def test_repr_shows_all_parameters_and_defaults_are_those_of_the_nets():
    defaults = RelativeFlatnessRegularizedNet().get_params()
    names = {"layer": -1, "normalize": False, "probes": 1, "weight": 0.1, "clip": 1.0, "every": 1}
    assert {name: defaults[f"flatness_{name}"] for name in names} == names
    assert repr(RelativeFlatnessPenalty(["0", -1], probes=2)) == (
        "RelativeFlatnessPenalty("
        "layer=['0', -1], normalize=False, probes=2, weight=0.1, clip=1.0, every=1)"
    )


@pytest.mark.parametrize("layer", [-1, 0])
@pytest.mark.parametrize("late", [lambda z: z - z.mean(0), lambda z: z.view(2, 2, 3).mean(1)])
def test_rows_are_checked_again_where_outputs_arise_in_another_way(layer, late):
    net = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    X, y = torch.randn(4, 5), torch.arange(4) % 3
    penalty = RelativeFlatnessPenalty(layer=layer)
    for change in (lambda z: z, lambda z: 2 * z):
        with penalty.capture(net):
            z = net(X)
        penalty(CE, change(z), y)
    with penalty.capture(net):
        z = late(net(X))
    with pytest.raises(ValueError, match="depend on other rows"):
        penalty(CE, z, y[: len(z)])


# -- rows that show nothing at first --------------------------------------------------------------


def windowed(net, x):  # (n, 4, 5)
    """Take the four windows of all samples below each other."""
    h = torch.relu(net.embed(x.flatten(0, 1))).unflatten(0, x.shape[:2]) * net.gates
    return net.head(net.branch * h.mean(1) + torch.tanh(x.mean(1) @ x.new_ones(5, 6)))


def make_windowed(zero):
    """A network of which a part starts at zero."""
    net = Net(windowed, embed=nn.Linear(5, 6), head=nn.Linear(6, 3))
    net.gates, net.branch = nn.Parameter(torch.ones(4, 1)), nn.Parameter(torch.ones(()))
    parts = {"head": net.head.weight.data, "branch": net.branch.data, "windows": net.gates.data[1:]}
    parts[zero].zero_()
    return net.double()


@pytest.mark.parametrize("zero", ["head", "branch", "windows"])
@pytest.mark.parametrize("weight", [None, torch.ones(8)], ids=["alike", "weighted"])
def test_rows_are_checked_until_they_show_something(zero, weight):
    net, penalty = make_windowed(zero), published_penalty("embed")
    X, y = torch.randn(8, 4, 5).double(), torch.arange(8) % 3
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)

    def train():
        for _ in range(3):
            value = evaluate(penalty, net, CE, X, y, sample_weight=weight)
            optimizer.zero_grad()
            (CE(net(X), y) + 0 * value).backward()
            optimizer.step()

    with pytest.raises(ValueError, match="depend on other rows of what layer 'embed'"):
        train()


def branched(net, x):
    h = net.first(x)
    return net.last(h + net.scale * torch.tanh(net.inside(h)))


@pytest.mark.parametrize("zero", ["last", "scale"])
def test_layers_that_start_at_zero_are_penalised(zero):
    X, y = torch.randn(8, 5).double(), torch.arange(8) % 3
    net = Net(branched, first=nn.Linear(5, 6), inside=nn.Linear(6, 6), last=nn.Linear(6, 3))
    net.scale = nn.Parameter(torch.ones(6))
    (net.scale if zero == "scale" else net.last.weight).data.zero_()
    net.double()
    penalty, optimizer = published_penalty("first"), torch.optim.SGD(net.parameters(), lr=0.5)
    for _ in range(3):
        truth = expected(net, "first", CE, X, y)
        assert_right_on_average(penalty, net, CE, X, y, truth)
        optimizer.zero_grad()
        CE(net(X), y).backward()
        optimizer.step()


# -- layers that training skips -------------------------------------------------------------------


def blocked(net, x):
    """Call some blocks: not all, as LayerDrop, or one several times, as ALBERT."""
    h = net.first(x)
    if net.draws:
        torch.rand(())  # the calls may depend on it
    for i in net.calls:
        h = h + torch.tanh(net.blocks[i](h))
    return net.head(h)


def make_blocks(calls=(0, 1, 2), draws=False):
    blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
    net = Net(blocked, first=nn.Linear(5, 6), blocks=blocks, head=nn.Linear(6, 3)).double()
    net.calls, net.draws = calls, draws
    return net


SKIPPING = [(0, 1), (0, 1, 2), (2,), (0, 2), (), (0, 1, 2)]
REPEATING = [(0, 1), (0, 0, 1), (), (0, 0, 0), (0,)]
BLOCKS_X, BLOCKS_Y = torch.randn(6, 5).double(), torch.arange(6) % 3


PASSES = [*product(["all", ["blocks.1", "head"], "blocks.1"], [SKIPPING]), ("all", REPEATING)]


@pytest.mark.parametrize(("layer", "passes"), PASSES, ids=str)
def test_the_layers_of_a_step_are_those_that_it_calls_once(layer, passes):
    net, penalty, at = make_blocks(), published_penalty(layer), (CE, BLOCKS_X, BLOCKS_Y)
    for calls in passes:
        net.calls = calls
        once = [f"blocks.{i}" for i in range(3) if calls.count(i) == 1]
        called = {"first", "head", *once}
        names = called & ({layer} if isinstance(layer, str) else set(layer))
        names = called if layer == "all" else names
        is_first = calls == (0, 0, 1)
        with pytest.warns(match="'blocks.0' left out") if is_first else nullcontext():
            evaluate(penalty, net, *at)
        truth = sum(oracles.penalty(net, name, *at) for name in names)
        assert_right_on_average(penalty, net, *at, truth)


@pytest.mark.parametrize(("calls", "n"), [((0, 0, 0), 3), ((1, 2), 0)])
def test_a_layer_that_is_not_called_once_is_refused_or_reported(calls, n):
    penalty, at = RelativeFlatnessPenalty("blocks.0"), (CE, BLOCKS_X, BLOCKS_Y)
    with pytest.raises(ValueError, match=f"layer 'blocks.0' was called {n} times"):
        evaluate(penalty, make_blocks(calls), *at)
    if not n:
        with pytest.warns(FlatnessWarning, match="layer 'blocks.0' was not called"):
            assert evaluate(penalty, make_blocks(calls, draws=True), *at) == 0


class Gated(nn.Linear):
    """Is linear until its gate opens."""

    gate = 0.0

    def forward(self, x):
        z = super().forward(x)
        return z + self.gate * z.tanh()


@pytest.mark.parametrize("calls", [(0, 1, 2), (0, 2)])
def test_a_layer_is_checked_when_it_is_first_called_and_again_with_its_own_forward(calls):
    net, penalty, at = make_blocks(calls), published_penalty("all"), (CE, BLOCKS_X, BLOCKS_Y)
    net.blocks[1] = Gated(6, 6).double()
    evaluate(penalty, net, *at)
    net.calls, net.blocks[1].gate = (0, 1, 2), 1.0
    with pytest.raises(ValueError, match="layer 'blocks.1' does not compute W x"):
        evaluate(penalty, net, *at)


# -- copies, and trainings that are resumed --------------------------------------------------------


def saved(part, weights_only=False):
    file = io.BytesIO()
    torch.save(part, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


class Trained(nn.Sequential):
    """A network that holds its penalty, as a LightningModule does."""

    def __init__(self, layer, every):
        layers = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 3)
        super().__init__(*layers)
        self.settings = layer, every
        at = self[0] if layer == "module" else layer
        self.penalty = RelativeFlatnessPenalty(at, weight=5.0, every=every)

    def train_further(self, n_steps=20):
        X, y = torch.randn(20, 5), torch.arange(20) % 3
        # with a criterion of which the penalty knows nothing
        train(self.penalty, self, lambda z, y: F.cross_entropy(z, y), X, y, n_steps, lr=0.2)


def loaded(trained):
    fresh = Trained(*trained.settings)
    fresh.load_state_dict(trained.state_dict())
    fresh.penalty.load_state_dict(saved(trained.penalty.state_dict(), weights_only=True))
    return fresh


COPIES = [
    copy.deepcopy,
    lambda part: pickle.loads(pickle.dumps(part)),
    saved,
    lambda net: AveragedModel(net).module,
]


@pytest.mark.parametrize("copied", [*COPIES, loaded])
@pytest.mark.parametrize(
    ("layer", "every"), [(-1, 1), (0, 1), ("all", 1), ("module", 1), (0, 3)], ids=str
)
def test_a_resumed_training_goes_on_as_the_uninterrupted_one(copied, layer, every):
    found = []
    for resumes in (False, True):
        torch.manual_seed(0)
        trained = Trained(layer, every)
        trained.train_further()
        with trained.penalty.capture(trained):  # a step that is not finished
            trained(torch.randn(20, 5))
        state = torch.get_rng_state()
        trained = copied(trained) if resumes else trained
        torch.set_rng_state(state)
        trained.train_further()
        found.append(trained.state_dict())
    assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("order", [[0] * 12 + [1] * 12, [0, 1] * 12], ids=["in turn", "mixed"])
def test_each_network_has_a_limit_of_its_own(order, every):
    X, y = torch.randn(20, 5), torch.arange(20) % 3

    def trained(penalties):
        torch.manual_seed(0)
        nets = [nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)) for _ in range(2)]
        for number in order:
            train(penalties[number], nets[number], CE, X, y, 1, lr=1.0)
        return [net.state_dict() for net in nets]

    alone, other, shared = (RelativeFlatnessPenalty(weight=5.0, every=every) for _ in range(3))
    expected = trained([alone, other])
    for _ in range(2):  # a network that is gone leaves nothing to the next one
        assert_close(trained([shared] * 2), expected, rtol=0, atol=0)


def test_wrappers_have_the_limit_of_the_network_inside():
    net, penalty = mlp(3), RelativeFlatnessPenalty()
    X, y = torch.randn(6, 5).double(), torch.arange(6) % 3
    for module in (net, torch.compile(net, backend="eager"), net):
        evaluate(penalty, module, CE, X, y)
    assert penalty.state_dict()["steps"] == 3


def attending(net, x):
    h = net.norm(net.first(x))[:, None]
    return net.last(net.attention(h, h, h)[0].squeeze(1))


def make_attending():
    """A network with all that is replaced while a penalty records."""
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    parts = {"norm": nn.LayerNorm(8), "attention": attention, "last": nn.Linear(8, 3)}
    parts["last"].register_full_backward_hook(lies_still)
    return Net(attending, first=nn.Linear(5, 8), **parts)


def lies_still(layer, grad_input, grad_output):
    """Hook that does nothing."""


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("layer", [-1, 0, "all"], ids=str)
def test_a_network_is_copied_while_a_penalty_records(copied, layer):
    torch.manual_seed(0)
    net, X, y = make_attending(), torch.randn(8, 5), torch.arange(8) % 3
    penalty, names = RelativeFlatnessPenalty(layer), [name for name, _ in net.named_modules()]
    for _ in range(2):  # the first pass records all layers
        with penalty.capture(net):
            output = net(X)
            penalty(CE, output, y)
            copies = [copied(net)]
            assert net.state_dict().keys() == copies[0].state_dict().keys()
        copies.append(copied(net))
        for parameter in net.parameters():
            parameter.data += 1  # a copy that runs the network's own layers sees it
        for other in copies:
            torch.testing.assert_close(other(X), output)
            assert [name for name, _ in other.named_modules()] == names
            assert "forward" not in vars(other.first)
            evaluate(RelativeFlatnessPenalty(layer), other, CE, X, y).backward()
            assert list(other.last._backward_hooks.values()) == [lies_still]


def test_a_state_dict_of_something_else_is_refused():
    with pytest.raises(ValueError, match=r"'steps'.* got \['lr'\]"):
        RelativeFlatnessPenalty().load_state_dict({"lr": 0.1})


# -- in some steps only ------------------------------------------------------------------


def test_every_third_step_has_the_penalty_three_times_as_heavy():
    batches, y = torch.randn(7, 9, 5).double(), torch.arange(9) % 3
    net = nn.Linear(5, 3).double()

    def steps_of(**options):
        """The penalties of the steps, and the gradients of the penalised objective."""
        penalty, found = RelativeFlatnessPenalty(clip=None, **options), []
        for X in batches:
            with penalty.capture(net):
                output = net(X)
            value = penalty(CE, output, y)
            found.append([value, *torch.autograd.grad(output.square().sum() + value, net.weight)])
        return found

    none, heavy = steps_of(weight=0.0), steps_of(weight=3.0)
    expected = [(none, heavy)[step % 3 == 0][step] for step in range(7)]
    assert_close(steps_of(weight=1.0, every=3), expected)
