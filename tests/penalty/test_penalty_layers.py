"""The penalty at every kind of layer: its value against the dense Hessian, and its slope."""

import copy
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from relflat_sk import RelativeFlatnessPenalty, measure
from tests import oracles
from tests.cases import Net, published_penalty
from tests.measures.nets import (
    CE,
    HEADS,
    NETS,
    PROBLEMS,
    UNTRAINED,
    UNUSUAL,
    Problem,
    allowed,
    make,
    make_fused,
)
from tests.measures.nets import KINDS as ATTENTIONS
from tests.measures.test_layer_kinds import penalty_at as truth_at
from tests.penalty.every_draw import assert_right_on_average, evaluate, mean_of_all_draws
from tests.penalty.test_penalty import EXACT, assert_slope_is_that_of_differences

pytestmark = UNTRAINED
LANGUAGE = ["language model, plain, classes second", "language model, plain, mapping"]
KINDS = [*NETS, "packed attention", "packed cross-attention", *LANGUAGE, *UNUSUAL]
AT = [(kind, layer) for kind in KINDS for layer in PROBLEMS[kind]().all_layers()]
OTHERS = [
    ("GPT-2", "lm_head"),  # which is tied
    ("attention at the end", "qkv"),
    ("pixels, weighted, some ignored", "2"),
]


def prepared(kind):
    problem = PROBLEMS[kind]()
    return problem, (problem.net.eval(), problem.criterion, problem.X, problem.y)


@pytest.mark.parametrize(("kind", "layer"), AT + OTHERS)
def test_right_on_average(kind, layer, device):
    problem, (net, criterion, X, y) = prepared(kind)
    truth = truth_at(problem, layer)
    at = net.to(device), criterion, X.to(device), y.to(device)
    penalty = published_penalty(layer)
    assert_right_on_average(penalty, *at, truth)
    evaluate(penalty, *at).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize(("kind", "layer"), AT)
@pytest.mark.parametrize("normalize", [False, True])
def test_slope(kind, layer, normalize):
    _, at = prepared(kind)
    penalty = published_penalty(layer, normalize=normalize)
    assert_slope_is_that_of_differences(penalty, *at)


# at the last layers, with a feature that never varies
LAST = [("cross-entropy class weights", "4"), ("squared error", "4")]


@pytest.mark.parametrize(
    ("kind", "name"), [("conv", "0"), ("conv", "3"), ("residual", "conv"), *LAST]
)
def test_normalized_is_right_on_average(kind, name):
    _, (net, criterion, X, y) = prepared(kind)
    if name == "4":
        net[2].weight.data[1] = 0
    at = (net, criterion, X, y)
    truth = measure("normalized_relative_flatness", net, X, y, layer=name, criterion=criterion)
    m = net.get_submodule(name).weight[0].numel()
    assert_right_on_average(published_penalty(name, normalize=True), *at, truth / (2 * m))


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
@pytest.mark.parametrize("name", ["0", "3"])
def test_batch_norm_is_the_linear_map_that_the_batch_makes_of_it(name, activation):
    torch.manual_seed(0)
    head = activation(), nn.Flatten(), nn.Linear(8, 3)
    net = nn.Sequential(
        nn.Conv2d(2, 2, 2), nn.BatchNorm2d(2), activation(), nn.Conv2d(2, 2, 2), *head
    ).double()
    X, y = torch.randn(4, 2, 4, 4).double(), torch.arange(4) % 3
    fixed = copy.deepcopy(net).eval()
    with torch.no_grad():
        z = net[0](X)
        fixed[1].running_mean.copy_(z.mean((0, 2, 3)))
        fixed[1].running_var.copy_(z.var((0, 2, 3), correction=0))
    evaluate(published_penalty(name), net, CE, X, y)
    assert net[1].num_batches_tracked == 1
    truth = truth_at(Problem(fixed, X, y), name)
    assert_right_on_average(published_penalty(name), net, CE, X, y, truth)
    assert_slope_is_that_of_differences(published_penalty(name), net, CE, X, y)


def mean_penalty(penalty, net, X, y):
    return mean_of_all_draws(lambda: evaluate(penalty, net, CE, X, y).item(), len(X))


WEIGHTED = [
    *product(["mlp relu", "mlp tanh", "conv"], [-1, 0], [False]),
    *product(["mlp tanh"], [-1, 0], [True]),
    *product(["conv"], [1], [False, True]),
    ("mlp tanh", "all", False),
]


@pytest.mark.parametrize(("kind", "layer", "normalize"), WEIGHTED)
def test_a_weight_of_two_is_the_same_sample_twice(kind, layer, normalize):
    net, X, y = make(kind)
    times = torch.tensor([2, 1, 0, 1, 3, 1, 1])
    X[times == 0] += 5
    penalty = published_penalty(layer, normalize=normalize)
    truth = mean_penalty(penalty, net, X.repeat_interleave(times, 0), y.repeat_interleave(times))
    assert_right_on_average(penalty, net, CE, X, y, truth, sample_weight=times.double())
    assert mean_penalty(penalty, net, X, y) != pytest.approx(truth, rel=0.01)  # weights matter


def test_a_frozen_prefix_can_still_be_penalised():
    net, X, y = make("mlp relu")
    net[0].requires_grad_(False)
    truth = truth_at(Problem(net, X, y), "0")
    assert_right_on_average(published_penalty(0), net, CE, X, y, truth)
    evaluate(published_penalty(0), net, CE, X, y).backward()
    assert net[0].weight.grad is None
    assert net[2].weight.grad.abs().max() > 0


def test_dead_features_have_no_nan_slope():
    net, X, y = make("mlp relu")
    with torch.no_grad():
        net[0].bias.fill_(-100.0)
    value = evaluate(published_penalty("all"), net, CE, X, y)
    value.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in net.parameters())


NORMS = {
    "batch": (lambda: nn.BatchNorm1d(6), (5,)),
    "instance": (lambda: nn.InstanceNorm1d(6, affine=True), (5, 4)),
    "group": (lambda: nn.GroupNorm(2, 6), (5,)),
    "layer": (lambda: nn.LayerNorm(6), (5,)),
    "rms": (lambda: nn.RMSNorm(6), (5,)),
    "batch without weight": (lambda: nn.BatchNorm1d(6, affine=False), (5,)),
    "layer without bias": (lambda: nn.LayerNorm(6, bias=False), (5,)),
}


def normed(net, x):
    """Apply the norm to channels on the second axis, and take the mean over positions."""
    channels = (lambda z: z) if x.ndim == 2 else (lambda z: z.transpose(1, 2))
    h = channels(torch.tanh(net.norm(channels(net.first(channels(x))))))
    return net.last(h if h.ndim == 2 else h.mean(1))


def with_norm(norm):
    return Net(normed, first=nn.Linear(5, 6), norm=norm, last=nn.Linear(6, 3))


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("norm", NORMS)
def test_outputs_and_slopes_behind_every_normalisation(norm, frozen):
    make_norm, shape = NORMS[norm]
    net = with_norm(make_norm()).double()
    for p in net.norm.parameters():
        p.data.add_(0.3 * torch.randn_like(p))
    X, y = torch.randn(7, *shape).double(), torch.arange(7) % 3
    net.norm.requires_grad_(not frozen)
    trained = [p for p in net.parameters() if p.requires_grad]
    buffers, expected = copy.deepcopy(dict(net.norm.named_buffers())), net(X)
    slopes = torch.autograd.grad(CE(expected, y), trained)
    penalty = published_penalty(0)
    for _ in range(2):  # while it finds its way, and when it knows it
        net.norm.load_state_dict({**net.norm.state_dict(), **buffers})
        with penalty.capture(net):
            output = net(X)
        torch.testing.assert_close(output, expected)
        penalty(CE, output, y)
        torch.testing.assert_close(torch.autograd.grad(CE(output, y), trained), slopes)
    assert "forward" not in net.norm.__dict__
    if not frozen:
        assert_slope_is_that_of_differences(penalty, net, CE, X, y)


def by_function(norm):
    norm.forward = lambda x: F.layer_norm(x.flip(1), (6,))
    return norm


@pytest.mark.parametrize(
    ("norm", "message"),
    [
        (by_function(nn.Identity()), "LayerNormBackward.*called as a function.*nn.LayerNorm"),
        (by_function(nn.LayerNorm(6)), "LayerNormBackward.*called as a function.*nn.LayerNorm"),
        (
            Net(lambda net, x: F.batch_norm(x, None, None, training=True)),
            "behind layer 'first', batch norm mixes the samples",
        ),
    ],
)
def test_refuses_normalisation_by_others_than_torchs_modules(norm, message):
    net, X, y = with_norm(norm), torch.randn(7, 5), torch.arange(7) % 3
    with pytest.raises(ValueError, match=message):
        evaluate(published_penalty(0), net, CE, X, y)
    assert evaluate(published_penalty(), net, CE, X, y) > 0


@pytest.mark.parametrize("clip", [None, 1e-3], ids=["free", "limited"])
@pytest.mark.parametrize("layer", [-1, 0, "all"])
def test_a_weight_that_changes_when_it_is_read_is_that_of_the_forward_pass(layer, clip):
    """In training mode, each read of a weight with spectral norm is a power iteration."""
    torch.manual_seed(0)
    fixed = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Tanh(), nn.ConvTranspose2d(4, 3, 2), nn.Flatten(), nn.Linear(27, 3)
    ).double()
    net, with_weight = copy.deepcopy(fixed), (0, 2, 4)
    for i in with_weight:
        nn.utils.parametrizations.spectral_norm(net[i])
        nn.init.normal_(net[i].parametrizations.weight.original)  # as after a step of training
    plain = copy.deepcopy(net)
    X, y = torch.randn(6, 1, 4, 4).double(), torch.arange(6) % 3
    penalties = [RelativeFlatnessPenalty(layer, weight=10.0, clip=clip) for _ in range(2)]
    for _ in range(2):  # the first step finds the layers
        plain.train()(X)
        plain.eval()
        for i in with_weight:
            fixed[i].weight.data = plain[i].weight.detach().clone()
        values = []
        for penalty, module in zip(penalties, (fixed, net), strict=True):
            # the nets differ in their parameters, and so in what past steps show the limit
            penalty.load_state_dict(RelativeFlatnessPenalty().state_dict())
            values.append(evaluate(penalty, module, CE, X, y, seed=1).item())
        assert values[0] > 0
        assert values[1] == pytest.approx(values[0], rel=1e-9)
        buffers = [dict(module.named_buffers()) for module in (net, plain)]
        torch.testing.assert_close(*buffers, rtol=0, atol=0)


@pytest.mark.parametrize("layer", [-1, 0])
def test_ignored_labels_do_not_count_in_the_spread(layer):
    net, X, y = make("mlp tanh")
    kept = torch.tensor([True, True, False, True, True, False, True])
    X[~kept] *= 9
    penalty = published_penalty(layer, normalize=True)
    found = mean_penalty(penalty, net, X, y.where(kept, -100))
    assert found == pytest.approx(mean_penalty(penalty, net, X[kept], y[kept]), rel=1e-10)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft calls it
@pytest.mark.parametrize("inside", [False, True], ids=["after capture", "inside capture"])
def test_dropout_in_adapters_that_are_loaded_is_noise_in_the_output(inside, tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    config = peft.LoraConfig(target_modules=["2"], r=4, lora_dropout=0.5, init_lora_weights=False)
    peft.get_peft_model(copy.deepcopy(base), config).save_pretrained(tmp_path)
    net = peft.PeftModel.from_pretrained(base, tmp_path, is_trainable=True).double()
    X, y = torch.randn(9, 4).double(), torch.arange(9) % 3
    penalty, (first, activation, adapted) = published_penalty(), net.base_model.model
    with penalty.capture(net.train()):
        output = net(X)
        value = penalty(CE, output, y) if inside else None
    value = penalty(CE, output, y) if value is None else value
    features = activation(first(X)).detach()
    W = (adapted.base_layer.weight + adapted.get_delta_weight("default")).detach()
    H = torch.autograd.functional.hessian(
        lambda D: CE(output.detach() + features @ D.T, y), torch.zeros_like(W)
    )
    assert value.item() == pytest.approx(oracles.kappa_of(H, W) / (2 * 5), rel=EXACT)
    value.backward()
    assert all(p.grad.abs().sum() > 0 for p in net.parameters() if p.requires_grad)
    assert adapted.lora_dropout["default"].training


# -- normalisations with a forward method of a user -----------------------------------------------


def own(kind, forward):
    return type("Own", (kind,), {"forward": forward})


def in_channels_last(norm):
    return Net(lambda net, x: net.norm(x.movedim(1, -1)).movedim(-1, 1), norm=norm)


def with_tanh(norm):
    return nn.Sequential(norm, nn.Tanh())


def by_layer_norm(self, x):
    x = x.permute(0, 2, 3, 1)
    x = F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias, self.eps)
    return x.permute(0, 3, 1, 2)


def by_rms_norm(self, x):
    x = x.movedim(1, -1)
    return F.rms_norm(x, self.normalized_shape, weight=self.weight, eps=self.eps).movedim(-1, 1)


def by_batch_norm(self, x):
    """Update the statistics, and apply an activation, as timm's does."""
    self.num_batches_tracked.add_(1)
    args = self.weight, self.bias, self.training, 0.1, self.eps
    return torch.tanh(F.batch_norm(x, self.running_mean, self.running_var, *args))


def by_group_norm(self, x):
    return torch.tanh(F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps))


LAYER, RMS, BATCH, GROUP = nn.LayerNorm, nn.RMSNorm, nn.BatchNorm2d, nn.GroupNorm
SUPER = own(LAYER, lambda self, x: LAYER.forward(self, x.movedim(1, -1)).movedim(-1, 1))

# by a forward method of a user, and by torch's own modules
OWN_NORMS = {
    "layer norm": (lambda: SUPER(4), lambda: in_channels_last(LAYER(4))),
    "by its function": (lambda: own(LAYER, by_layer_norm)(4), lambda: in_channels_last(LAYER(4))),
    "rms norm": (lambda: own(RMS, by_rms_norm)(4), lambda: in_channels_last(RMS(4))),
    "batch norm": (lambda: own(BATCH, by_batch_norm)(4), lambda: with_tanh(BATCH(4))),
    "group norm": (lambda: own(GROUP, by_group_norm)(2, 4), lambda: with_tanh(GROUP(2, 4))),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", OWN_NORMS)
def test_normalisations_with_a_forward_method_of_a_user(kind, training):
    found = []
    for make_norm in OWN_NORMS[kind]:
        torch.manual_seed(0)
        first, behind = nn.Conv2d(3, 4, 3), (nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 3))
        net = nn.Sequential(first, make_norm(), *behind).double().train(training)
        X, y = torch.randn(6, 3, 6, 6).double(), torch.arange(6) % 3
        penalty = published_penalty(0)
        for _ in range(2):  # the first step finds the layers
            value = evaluate(penalty, net, CE, X, y)
        found.append((value, *torch.autograd.grad(value, list(net.parameters()))))
    torch.testing.assert_close(*found)


# -- in front of `scaled_dot_product_attention` -------------------------------------------

SEED = 7


@pytest.mark.parametrize("layer", ["qkv", "out", "head"])
@pytest.mark.parametrize("kind", ATTENTIONS)
def test_fused_attention_is_right_on_average_in_training(kind, layer):
    net, written, X, y = make_fused(kind)
    shape = (len(X), HEADS, X.shape[1], X.shape[1])
    torch.manual_seed(SEED)
    written.mask = F.dropout(torch.ones(shape).double(), net.dropout)
    torch.manual_seed(SEED)  # the same neurons are dropped in each pass
    torch.testing.assert_close(net(X), written(X))
    truth = oracles.penalty(written, layer, CE, X, y)
    assert_right_on_average(published_penalty(layer), net, CE, X, y, truth, seed=SEED)


@pytest.mark.parametrize("layer", ["qkv", "all"])
def test_slope_in_fused_attention(layer):
    net, _, X, y = make_fused("causal")
    penalty = published_penalty(layer)
    assert_slope_is_that_of_differences(penalty, net, CE, X, y, step=1e-5)


def test_attention_stays_fused_where_no_second_derivative_is_needed():
    net, _, X, y = make_fused("plain")
    before = allowed()
    for layer in (-1, 2, "head"):
        penalty = published_penalty(layer)
        for _ in range(3):
            evaluate(penalty, net, CE, X, y).backward()
        assert net.allowed[-2:] == [before] * 2  # the first step finds the layers
    assert net.allowed[:3] == [before] * 3
    penalty = published_penalty("qkv")
    for _ in range(3):
        with penalty.capture(net):
            output = net(X)
        assert allowed() == before
        penalty(CE, output, y).backward()
    assert net.allowed[-3:] == [(False, False, False, True)] * 3
