"""The penalty of a batch: its value against the full Hessian, its slope against differences."""

import copy
import io
import pickle
from contextlib import nullcontext

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
REDUCIBLE = [name for name in CASES if name not in {"kl divergence", "a function"}]


def make(case, n=11):
    network, criterion, target, _ = CASES[case]
    torch.manual_seed(1)
    return network(), criterion(), torch.randn(n, 5).double(), target(n)


def test_probabilities_under_cross_entropy_are_doubtful():
    net = nn.Sequential(nn.Linear(5, 3), nn.Softmax(dim=1))
    with pytest.warns(FlatnessWarning, match="CrossEntropyLoss takes logits, .* ends in a softmax"):
        evaluate(
            published_penalty(), net, nn.CrossEntropyLoss(), torch.randn(4, 5),
            torch.arange(4) % 3,
        )  # fmt: skip


def expected(net, layer, criterion, X, y):
    """kappa / (2 m) of the full Hessian at a layer, or the sum over several layers."""
    names = [name for name, m in net.named_modules() if isinstance(m, nn.Linear)]
    chosen = layer if isinstance(layer, list | tuple) else names if layer == "all" else [layer]
    total = 0.0
    for one in chosen:
        total += oracles.penalty(net, one if isinstance(one, str) else names[one], criterion, X, y)
    return total


# -- the value ---------------------------------------------------------------------------


@pytest.mark.parametrize("case", CLOSED)
def test_last_layer_is_kappa_over_2m_of_the_full_hessian(case):
    net, criterion, X, y = make(case)
    state = torch.get_rng_state()
    with (penalty := published_penalty()).capture(net):
        output = net(X)
    value = penalty(criterion, output, y)
    assert value.item() == pytest.approx(expected(net, -1, criterion, X, y), rel=EXACT)
    assert_close(torch.get_rng_state(), state)  # no probe was drawn


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(label_smoothing=0.2), nn.MSELoss()])
@pytest.mark.parametrize(
    ("scaled", "is_closed"),
    [
        (lambda z: z * (1 / 9), True),
        (lambda z: -0.3 * z, True),
        (lambda z: z / torch.tensor(9.0), True),
        (lambda z: z * torch.tensor([1.0, 2.0, 3.0]), False),
    ],
    ids=["times", "negative", "divided", "each its own"],
)
def test_a_constant_factor_behind_the_last_layer_keeps_the_closed_form(
    scaled, is_closed, criterion
):
    torch.manual_seed(1)
    net, X = Net(lambda own, X: scaled(own.net(X)), net=mlp(3)), torch.randn(11, 5).double()
    y = torch.arange(11) % 3 if isinstance(criterion, nn.CrossEntropyLoss) else X[:, :3]
    state = torch.get_rng_state()
    with (penalty := published_penalty()).capture(net):
        output = net(X)
    value = penalty(criterion, output, y)
    assert torch.equal(torch.get_rng_state(), state) == is_closed  # no probe was drawn
    if is_closed:
        assert value.item() == pytest.approx(expected(net, -1, criterion, X, y), rel=EXACT)


# torch's functions, the modules that compute the same, and cases with networks for them
FUNCTIONS = [
    (F.cross_entropy, nn.CrossEntropyLoss(), "cross-entropy"),
    (F.nll_loss, nn.NLLLoss(), "nll of log-softmax"),
    (
        F.binary_cross_entropy_with_logits,
        nn.BCEWithLogitsLoss(),
        "bce multi-label, pos_weight and weight",
    ),
    (F.binary_cross_entropy, nn.BCELoss(), "bce of sigmoid"),
    (F.mse_loss, nn.MSELoss(), "squared error"),
    (F.poisson_nll_loss, nn.PoissonNLLLoss(), "poisson"),
    (F.l1_loss, nn.L1Loss(), "huber"),
    (F.smooth_l1_loss, nn.SmoothL1Loss(), "huber"),
    (F.huber_loss, nn.HuberLoss(), "huber"),
]


@pytest.mark.filterwarnings("ignore:.*L1Loss has no curvature")
@pytest.mark.parametrize(
    ("function", "module", "case"), FUNCTIONS, ids=[function.__name__ for function, *_ in FUNCTIONS]
)
def test_functions_of_torch_are_known_as_their_modules(function, module, case):
    net, _, X, y = make(case)
    parameters, found = list(net.parameters()), []
    for seed, criterion in enumerate([module, function]):
        torch.manual_seed(seed if case in CLOSED else 0)
        value = evaluate(RelativeFlatnessPenalty(weight=2.0), net, criterion, X, y)
        slopes = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
        found.append([value, *slopes, relative_flatness(net, X, y, criterion=criterion)])
    assert_close(*found, rtol=EXACT, atol=0)


DRAWN = [  # the last layer without a closed form, earlier ones, and several
    *((case, -1, 1) for case in CASES if case not in CLOSED),
    *(
        (case, at, 1)
        for case in ("bce of sigmoid", "squared error", "a function")
        for at in (0, -2)
    ),
    *(("cross-entropy", at, 4) for at in (0, -2)),
    *(
        (case, several, 1)
        for case in ("cross-entropy", "a function")
        for several in ([0, -1, "2"], ("0", "4", -2), "all")
    ),
]


@pytest.mark.parametrize(("case", "layer", "probes"), DRAWN)
def test_right_on_average(case, layer, probes):
    net, criterion, X, y = make(case)
    truth = expected(net, layer, criterion, X, y)
    assert_right_on_average(published_penalty(layer, probes=probes), net, criterion, X, y, truth)


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
    mean, mean_loss = (
        evaluate(published_penalty(), net, criterion, X, y),
        criterion(net(X), y),
    )
    criterion.reduction = "sum"
    value = evaluate(published_penalty(), net, criterion, X, y)
    assert_close(value, mean * criterion(net(X), y) / mean_loss, rtol=EXACT, atol=0)
    if case in CLOSED:
        truth = expected(net, -1, criterion, X, y)
        assert value.item() == pytest.approx(truth, rel=EXACT)


@pytest.mark.parametrize("case", ["cross-entropy class weights", "squared error"])
def test_normalized_is_theorem_4(case):
    net, criterion, X, y = make(case)
    with torch.no_grad():
        net[2].weight[1] = 0.0  # a feature that never varies
    layer = net[-1]
    with torch.no_grad():
        phi = net[:-1](X)
        spread = phi.std(dim=0, correction=0)
        spread[1] = 0.0
        varies = spread > 0
        constant = layer(phi) - phi[:, varies] @ layer.weight[:, varies].T
    truth = oracles.normalized_relative_flatness(
        phi, layer.weight.detach(), lambda z: criterion(z + constant, y), spread
    )
    value = evaluate(published_penalty(normalize=True), net, criterion, X, y)
    assert value.item() == pytest.approx(truth / (2 * layer.in_features), rel=EXACT)


def test_normalized_ignores_rounding_noise_on_a_constant_feature():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Identity(), nn.Linear(3, 4))
    X, y = torch.randn(8, 3), torch.arange(8) % 4
    X[:, 1] = 0.1
    exact = evaluate(published_penalty(normalize=True), net, nn.CrossEntropyLoss(), X, y)
    X[::2, 1] *= 1 + torch.finfo(torch.float32).eps
    assert X[:, 1].var() > 0
    noisy = evaluate(published_penalty(normalize=True), net, nn.CrossEntropyLoss(), X, y)
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


@pytest.mark.parametrize(
    ("case", "layer", "options"),
    [
        *((case, layer, {}) for case in CASES for layer in (-1, 0)),
        *(
            (c, at, NORMALIZED)
            for c in ("cross-entropy", "bce of sigmoid", "huber")
            for at in (-1, -2)
        ),
        ("bce multi-label, pos_weight and weight", "all", {}),  # of a sum
    ],
)
def test_slope_in_every_parameter(case, layer, options):
    net, criterion, X, y = make(case)
    if layer == "all":
        criterion.reduction = "sum"
    assert_slope_is_that_of_differences(published_penalty(layer, **options), net, criterion, X, y)


class Normalised(nn.Module):
    """A normalisation in front of the last layer or behind it, and blocks that may run again."""

    def __init__(self, behind, again=False):
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.LayerNorm(4)).double()
        self.last = nn.Linear(4, 4).double()
        self.norm = nn.LayerNorm(4).double() if behind else nn.Identity()
        self.again = again

    def forward(self, x):
        features = checkpoint(self.first, x, use_reentrant=False) if self.again else self.first(x)
        return self.norm(self.last(features))


def test_a_normalisation_behind_the_last_layer():
    """Also in the steps behind the first, for which it is known what they need."""
    _, criterion, X, y = make("cross-entropy")
    net, penalty = Normalised(behind=True), published_penalty()
    truth = expected(net, "last", criterion, X, y)
    for _ in range(2):
        assert_right_on_average(penalty, net, criterion, X, y, truth)
    assert_slope_is_that_of_differences(penalty, net, criterion, X, y)


def test_gradient_checkpointing_is_right_at_the_last_layer_and_refused_before_normalisations():
    _, criterion, X, y = make("cross-entropy")
    trained = []
    for again in (False, True):
        net, penalty = Normalised(behind=False, again=again), RelativeFlatnessPenalty(weight=5.0)
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
    calls = count_calls(net)
    penalty = published_penalty("all")
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
    expected = evaluate(published_penalty(), net, criterion, X, y)
    calls, usual = [], net[-1].forward
    net[-1].forward = own = lambda x: calls.append(1) or usual(x)
    inner, outer = published_penalty(), published_penalty("all")
    for done in (1, 2):
        with outer.capture(net), inner.capture(net):
            output = net(X)
        assert inner(criterion, output, y) == expected
        assert outer(criterion, output, y) > expected
        assert net[-1].forward is own
        assert len(calls) == done


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


def test_is_float32_under_autocast():
    net, criterion, X, y = make("cross-entropy")
    exact = evaluate(published_penalty(), net, criterion, X, y).item()
    net.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = evaluate(published_penalty(), net, criterion, X.float(), y)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(exact, rel=0.05)  # bfloat16 has 8 bits
    value.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize("layer", [0, "0", ["0", -1], "all"])
def test_another_layer_can_be_asked_for_later(layer):
    at = make("cross-entropy")

    def value(penalty):
        return evaluate(penalty, *at).item()

    penalty = published_penalty()
    last = value(penalty)
    penalty.layer = layer
    assert value(penalty) == value(published_penalty(layer=layer)) != last
    if isinstance(layer, list):
        layer.pop(0)
        assert value(penalty) == last


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("probes", value) for value in (0, -1, 1.5, True, "1")),
        *(("clip", value) for value in (0, "half")),
        ("layer", []),
        ("weight", float("nan")),
        ("every", 0),
    ],
    ids=str,
)
def test_parameters_are_checked(name, value):
    with pytest.raises(ValueError, match=name):
        RelativeFlatnessPenalty(**{name: value})


CE, MSE = nn.CrossEntropyLoss(), nn.MSELoss()

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
    message = "has recorded no forward pass"
    with pytest.raises(RuntimeError, match=message):
        penalty(criterion, net(X), y)
    evaluate(penalty, net, criterion, X, y)
    with pytest.raises(RuntimeError, match=message):
        penalty(criterion, net(X), y)
    with penalty.capture(net):
        output = net(X)
    with pytest.raises(ZeroDivisionError), penalty.capture(net):
        _ = len(net(X)) / 0
    with pytest.raises(RuntimeError, match=message):  # nothing is left of the pass before
        penalty(criterion, output, y)


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
        penalty(nn.CrossEntropyLoss(), change(z), y)
    with penalty.capture(net):
        z = late(net(X))
    with pytest.raises(ValueError, match="depend on other rows"):
        penalty(nn.CrossEntropyLoss(), z, y[: len(z)])


# -- rows that show nothing at first --------------------------------------------------------------


class Windows(nn.Module):
    """Takes the four windows of all samples below each other; their mean starts at zero or one."""

    def __init__(self, start, embed):
        super().__init__()
        self.embed, self.head = embed, nn.Linear(6, 3)
        self.gates = nn.Parameter(torch.ones(4, 1))
        self.branch = nn.Parameter(torch.ones(()))
        with torch.no_grad():
            if start == "head":
                self.head.weight.zero_()
            elif start == "branch":
                self.branch.zero_()
            else:
                self.gates[1:] = 0

    def forward(self, x):  # (n, 4, 5)
        h = torch.relu(self.embed(x.flatten(0, 1))).unflatten(0, x.shape[:2]) * self.gates
        return self.head(self.branch * h.mean(1) + torch.tanh(x.mean(1) @ x.new_ones(5, 6)))


@pytest.mark.parametrize("start", ["head", "branch", "windows"])
@pytest.mark.parametrize("weighted", [False, True])
def test_rows_are_checked_until_they_show_something(start, weighted):
    torch.manual_seed(0)
    net = Windows(start, nn.Linear(5, 6)).double()
    X, y = torch.randn(8, 4, 5).double(), torch.arange(8) % 3
    penalty, weight = published_penalty("embed"), torch.ones(8) if weighted else None
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)

    def train():
        for _ in range(3):
            value = evaluate(penalty, net, CE, X, y, sample_weight=weight)
            optimizer.zero_grad()
            (CE(net(X), y) + 0 * value).backward()
            optimizer.step()

    with pytest.raises(ValueError, match="depend on other rows of what layer 'embed'"):
        train()


@pytest.mark.parametrize("start", ["head", "branch"])
def test_layers_that_start_at_zero_are_penalised(start):
    torch.manual_seed(0)
    X, y = torch.randn(8, 5).double(), torch.arange(8) % 3
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    if start == "head":
        nn.init.zeros_(net[2].weight)
    else:
        net[1] = Branch().double()
    penalty, optimizer = published_penalty(0), torch.optim.SGD(net.parameters(), lr=0.5)
    for _ in range(3):
        assert_right_on_average(penalty, net, CE, X, y, expected(net, 0, CE, X, y))
        optimizer.zero_grad()
        CE(net(X), y).backward()
        optimizer.step()


class Branch(nn.Module):
    """A branch beside the layer's output, which starts at zero."""

    def __init__(self):
        super().__init__()
        self.scale, self.inside = nn.Parameter(torch.zeros(6)), nn.Linear(6, 6)

    def forward(self, x):
        return x + self.scale * torch.tanh(self.inside(x))


# -- layers that training skips -------------------------------------------------------------------


class LayerDrop(nn.Module):
    """Blocks of which some are skipped, in a pass with these numbers or at random."""

    def __init__(self, skipped=()):
        super().__init__()
        self.first, self.head = nn.Linear(5, 6), nn.Linear(6, 3)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.skipped, self.share = skipped, 0.0

    def forward(self, x):
        h = self.first(x)
        for i, block in enumerate(self.blocks):
            if i not in self.skipped and not (self.share and torch.rand(()) < self.share):
                h = h + torch.tanh(block(h))
        return self.head(h)


@pytest.mark.parametrize("layer", ["all", ["blocks.1", "head"], "blocks.1"], ids=str)
def test_the_layers_of_a_step_are_those_that_it_calls(layer):
    torch.manual_seed(0)
    net = LayerDrop().double()
    X, y = torch.randn(6, 5).double(), torch.arange(6) % 3
    penalty = published_penalty(layer)
    for skipped in [(2,), (), (0, 1), (1,), (0, 1, 2), ()]:
        net.skipped = skipped
        called = [name for name, part in net.named_modules() if isinstance(part, nn.Linear)]
        called = [name for name in called if not name.endswith(tuple(map(str, skipped)))]
        names = called if layer == "all" else {layer} if isinstance(layer, str) else set(layer)
        truth = sum(oracles.penalty(net, name, CE, X, y) for name in called if name in names)
        assert_right_on_average(penalty, net, CE, X, y, truth)


class SharedBlock(nn.Module):
    """A block that is called as often as a pass draws, as in ALBERT with LayerDrop."""

    def __init__(self, n_calls):
        super().__init__()
        self.first, self.block, self.head = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.n_calls = n_calls

    def forward(self, x):
        h = self.first(x)
        for _ in range(self.n_calls):
            h = h + torch.tanh(self.block(h))
        return self.head(h)


def test_all_layers_are_those_that_a_step_calls_once():
    torch.manual_seed(0)
    net, X, y = SharedBlock(1).double(), torch.randn(6, 5).double(), torch.arange(6) % 3
    penalty = published_penalty("all")
    for n_calls in (1, 2, 0, 3, 1):
        net.n_calls = n_calls
        names = ["first", *(["block"] if n_calls == 1 else []), "head"]
        truth = sum(oracles.penalty(net, name, CE, X, y) for name in names)
        is_first = n_calls == 2
        with pytest.warns(match="'block' left out") if is_first else nullcontext():
            evaluate(penalty, net, CE, X, y)
        assert_right_on_average(penalty, net, CE, X, y, truth)
    with pytest.raises(ValueError, match="'block' was called 3 times"):
        evaluate(RelativeFlatnessPenalty("block"), SharedBlock(3).double(), CE, X, y)


def test_a_layer_that_is_never_called_is_refused_or_reported():
    torch.manual_seed(0)
    X, y, net = torch.randn(8, 5), torch.arange(8) % 3, LayerDrop(skipped=(1,))
    with pytest.raises(ValueError, match="layer 'blocks.1' was called 0 times"):
        evaluate(RelativeFlatnessPenalty("blocks.1"), net, CE, X, y)
    net.share = 0.5
    with pytest.warns(FlatnessWarning, match="layer 'blocks.1' was not called"):
        value = evaluate(RelativeFlatnessPenalty("blocks.1"), net, CE, X, y)
    assert value == 0


class Gated(nn.Linear):
    """Is linear until its gate opens."""

    gate = 0.0

    def forward(self, x):
        z = super().forward(x)
        return z + self.gate * z.tanh()


@pytest.mark.parametrize("is_called", [True, False])
def test_a_layer_is_checked_when_it_is_first_called_and_again_with_its_own_forward(is_called):
    torch.manual_seed(0)
    X, y, net = torch.randn(8, 5), torch.arange(8) % 3, LayerDrop()
    net.blocks[1], net.skipped = Gated(6, 6), () if is_called else (1,)
    penalty = published_penalty("all")
    evaluate(penalty, net, CE, X, y)
    net.skipped, net.blocks[1].gate = (), 1.0
    with pytest.raises(ValueError, match="layer 'blocks.1' does not compute W x"):
        evaluate(penalty, net, CE, X, y)


# -- copies, and trainings that are resumed --------------------------------------------------------


def pickled(penalty):
    return pickle.loads(pickle.dumps(penalty))


def saved(penalty):
    file = io.BytesIO()
    torch.save(penalty, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def loaded(penalty):
    file = io.BytesIO()
    torch.save(penalty.state_dict(), file)
    file.seek(0)
    fresh = RelativeFlatnessPenalty(penalty.layer, weight=penalty.weight)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    return fresh


class Trained(nn.Module):
    """A network that holds its penalty, as a LightningModule does."""

    def __init__(self, penalty):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 3)
        )
        self.penalty = penalty

    def forward(self, X):
        return self.net(X)


def function_of_outputs(z, y):
    return nn.functional.cross_entropy(z, y)


def train_held(trained, n_steps, lr=0.1):
    """Train by the penalty that a network holds, with a criterion of which it knows nothing."""
    X, y = torch.randn(20, 5), torch.arange(20) % 3
    train(trained.penalty, trained, function_of_outputs, X, y, n_steps, lr=lr)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved, loaded])
@pytest.mark.parametrize("layer", [-1, 0, "all"], ids=str)
def test_a_resumed_training_goes_on_as_the_uninterrupted_one(copied, layer):
    found = []
    for resumes in (False, True):
        torch.manual_seed(0)
        trained = Trained(RelativeFlatnessPenalty(layer, weight=5.0))
        train_held(trained, 20, lr=0.2)
        state = torch.get_rng_state()
        if resumes:
            other = Trained(copied(trained.penalty))
            other.load_state_dict(trained.state_dict())
            trained = other
        torch.set_rng_state(state)
        train_held(trained, 20, lr=0.2)
        found.append(torch.cat([parameter.flatten() for parameter in trained.parameters()]))
    assert torch.equal(*found)


def steps_of_networks(order, penalties):
    """Train two networks, one step at a time, by the penalty of each; return their weights."""
    torch.manual_seed(0)
    X, y = torch.randn(20, 5), torch.arange(20) % 3
    nets = [nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)) for _ in range(2)]
    for number in order:
        train(penalties[number], nets[number], CE, X, y, 1, lr=1.0)
    return [net.state_dict() for net in nets]


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(
    "order", [[0] * 12 + [1] * 12, [0, 1] * 12], ids=["one after the other", "alternately"]
)
def test_each_network_has_a_limit_of_its_own(order, every):
    options = {"weight": 5.0, "every": every}
    alone = [RelativeFlatnessPenalty(**options), RelativeFlatnessPenalty(**options)]
    shared = [RelativeFlatnessPenalty(**options)] * 2
    expected = steps_of_networks(order, alone)
    assert_close(steps_of_networks(order, shared), expected, rtol=0, atol=0)
    # a network that is gone leaves nothing to the next one
    assert_close(steps_of_networks(order, shared), expected, rtol=0, atol=0)


def test_wrappers_have_the_limit_of_the_network_inside():
    net, penalty = mlp(3), RelativeFlatnessPenalty()
    X, y = torch.randn(6, 5).double(), torch.arange(6) % 3
    for module in (net, torch.compile(net, backend="eager"), net):
        evaluate(penalty, module, CE, X, y)
    assert penalty.state_dict()["steps"] == 3


class Attending(nn.Module):
    """Has all that is replaced while a penalty records: layers, norms, attention, hooks."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(5, 8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.last = nn.Linear(8, 3)
        self.last.register_full_backward_hook(lies_still)

    def forward(self, X):
        h = self.norm(self.first(X))[:, None]
        return self.last(self.attention(h, h, h)[0].squeeze(1))


def lies_still(layer, grad_input, grad_output):
    """Hook that does nothing."""


def averaged(net):
    return AveragedModel(net).module


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved, averaged])
@pytest.mark.parametrize("layer", [-1, 0, "all"], ids=str)
def test_a_network_is_copied_while_a_penalty_records(copied, layer):
    torch.manual_seed(0)
    net, X, y = Attending(), torch.randn(8, 5), torch.arange(8) % 3
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


@pytest.mark.parametrize("in_a_step", [False, True])
def test_modules_that_hold_a_penalty_are_copied(in_a_step):
    torch.manual_seed(0)
    trained = Trained(RelativeFlatnessPenalty(0))
    trained.penalty.layer = trained.net[0]  # which the copy has to find in its own network
    train_held(trained, 3)
    if in_a_step:
        with trained.penalty.capture(trained):
            trained(torch.randn(20, 5))
    averaged = AveragedModel(trained)
    averaged.update_parameters(trained)
    for copied in (averaged.module, saved(trained)):
        train_held(copied, 3)


def test_a_state_dict_of_something_else_is_refused():
    with pytest.raises(ValueError, match=r"'steps'.* got \['lr'\]"):
        RelativeFlatnessPenalty().load_state_dict({"lr": 0.1})


# -- in some steps only ------------------------------------------------------------------


def steps_of(penalty, steps):
    """The penalties of some steps, and the gradients of the penalised objective."""
    torch.manual_seed(0)
    net, batches, y = nn.Linear(5, 3).double(), torch.randn(7, 9, 5).double(), torch.arange(9) % 3
    found = []
    for step in steps:
        with penalty.capture(net):
            output = net(batches[step])
        value = penalty(nn.CrossEntropyLoss(), output, y)
        (slope,) = torch.autograd.grad(output.square().sum() + value, net.weight)
        found.append((value, slope))
    return found


def test_every_third_step_has_the_penalty_three_times_as_heavy_also_when_a_training_resumes():
    heavy = steps_of(RelativeFlatnessPenalty(weight=3.0, clip=None), range(7))
    none = steps_of(RelativeFlatnessPenalty(weight=0.0, clip=None), range(7))
    expected = [(none, heavy)[step % 3 == 0][step] for step in range(7)]
    rare = {"weight": 1.0, "clip": None, "every": 3}
    assert_close(steps_of(RelativeFlatnessPenalty(**rare), range(7)), expected)
    stopped, resumed = RelativeFlatnessPenalty(**rare), RelativeFlatnessPenalty(**rare)
    before = steps_of(stopped, range(2))
    resumed.load_state_dict(stopped.state_dict())
    assert_close(before + steps_of(resumed, range(2, 7)), expected)
