"""Networks with every kind of layer, and problems in which measures have a dense oracle."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.backends import cuda
from torch.nn import functional as F

from relflat_sk import flatness_report
from relflat_sk._losses.loss import Loss
from relflat_sk._models.network_of import open_model
from relflat_sk._network.batches import make_batches
from relflat_sk._network.network import Network
from relflat_sk.measures._measure_network import OF_DATA, measure_opened
from relflat_sk.measures._scan import range_of
from tests import cases, oracles
from tests.cases import Net
from tests.hugging_face import GPT2, Conv1D, GPT2LMHeadModel, conv1d

CE = nn.CrossEntropyLoss()
# networks with random weights are at no minimum, and some end in probabilities
UNTRAINED = [
    pytest.mark.filterwarnings(f"ignore:{said}:relflat_sk.FlatnessWarning")
    for said in (".*is negative", "NLLLoss takes log")
]


def residual():
    def run(net, x):
        h = torch.relu(net.bn(net.stem(x)))
        h = h + torch.relu(net.conv(h))
        return net.out(h.mean((2, 3)))

    stem, conv = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, bias=False)
    return Net(run, stem=stem, bn=nn.BatchNorm2d(4), conv=conv, out=nn.Linear(4, 3))


def block():
    """A transformer block with explicit projections, tokens pooled at the end."""

    def run(net, x):
        q, k, v = net.qkv(x).chunk(3, dim=-1)
        h = torch.softmax(q @ k.transpose(1, 2) / 6**0.5, dim=-1) @ v
        h = net.norm(x + net.proj(h))
        return net.head(nn.functional.gelu(net.up(h)).mean(1))

    attention = {"qkv": nn.Linear(6, 18), "proj": nn.Linear(6, 6), "norm": nn.LayerNorm(6)}
    return Net(run, **attention, up=nn.Linear(6, 5), head=nn.Linear(5, 3))


NETS = {
    "mlp relu": (lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.LeakyReLU(),
                                       nn.Linear(5, 3)), (4,)),
    "mlp tanh": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), (4,)),
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(4, 3, 2, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(3, 3)),
        (2, 8, 8),
    ),
    "conv tanh": (
        lambda: nn.Sequential(nn.Conv1d(2, 3, 3, dilation=2), nn.Tanh(), nn.AdaptiveAvgPool1d(2),
                              nn.Flatten(), nn.Linear(6, 3)),
        (2, 9),
    ),
    "grouped conv": (lambda: before_a_head(nn.Conv1d(4, 4, 2, groups=2), 4, 3), (4, 3)),
    "transposed": (
        lambda: nn.Sequential(
            nn.ConvTranspose2d(2, 4, 2, stride=2, groups=2), nn.ReLU(), nn.AvgPool2d(3),
            nn.Flatten(), nn.Linear(16, 3)),
        (2, 3, 3),
    ),
    "residual": (residual, (2, 5, 5)),
    "transformer": (block, (4, 6)),
    "gpt2": (lambda: nn.Sequential(conv1d(4, 5), nn.GELU(), conv1d(5, 3), nn.Flatten(),
                                   nn.ReLU(), conv1d(6, 3)), (2, 4)),
}  # fmt: skip
# other layers, before a head
BEFORE_A_HEAD = {
    "on a grid": (lambda: nn.Linear(4, 3), (2, 2, 4)),
    "few positions": (lambda: nn.Conv2d(2, 5, 2, padding=1, stride=2), (2, 3, 3)),
    "single pixels": (lambda: nn.Conv2d(3, 4, 1), (3, 2, 3)),
    "stride, padding, dilation": (
        lambda: nn.Conv2d(3, 2, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
        (3, 4, 3),
    ),
    "depthwise": (lambda: nn.Conv2d(3, 6, 2, groups=3), (3, 3, 3)),
    "same": (lambda: nn.Conv2d(2, 2, (1, 3), padding="same"), (2, 3, 3)),
    "valid": (lambda: nn.Conv2d(2, 3, 2, padding="valid"), (2, 3, 3)),
    "reflect": (lambda: nn.Conv2d(2, 2, 2, padding=1, padding_mode="reflect"), (2, 3, 2)),
    "circular": (lambda: nn.Conv2d(2, 2, 2, padding=1, padding_mode="circular"), (2, 3, 2)),
    "three axes": (lambda: nn.Conv3d(2, 4, 2, stride=2, padding=1, groups=2), (2, 2, 3, 2)),
    "transposed, one axis": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, groups=2), (4, 3)),
    "output padding, dilation": (
        lambda: nn.ConvTranspose2d(2, 2, 2, stride=2, padding=1, output_padding=1, dilation=2),
        (2, 2, 2),
    ),
    "transposed, three axes": (lambda: nn.ConvTranspose3d(2, 4, 2, groups=2), (2, 2, 1, 2)),
}


def before_a_head(layer, *shape):
    n_features = layer(torch.zeros(1, *shape)).numel()
    return nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(n_features, 3))


LAYERS = nn.Linear | nn.Conv1d | nn.Conv2d | nn.ConvTranspose2d | Conv1D


def make(kind, n=7):
    torch.manual_seed(0)
    build, shape = NETS.get(kind) or BEFORE_A_HEAD[kind]
    net = (build() if kind in NETS else before_a_head(build(), *shape)).double()
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.running_mean.normal_()
            m.running_var.uniform_(0.5, 2)
            nn.init.normal_(m.weight)
    return net.eval(), torch.randn(n, *shape).double(), torch.arange(n) % 3


def reached(name, criterion, X, y):
    """A criterion, and labels of three classes, at which a net without training can be measured.

    At equal loss, these are squared errors, of which every network has some.
    """
    if name == "comparable_flatness" and isinstance(criterion, nn.CrossEntropyLoss):
        return nn.MSELoss(), F.one_hot(y, 3) + X.flatten(1)[:, :1].double()
    return criterion, y


def best_constant(loss, *shape):
    """The lowest loss of an array of a shape, which all samples have in common."""
    z = torch.full(shape, 0.5, dtype=torch.float64, requires_grad=True)
    tolerances = {"tolerance_grad": 1e-14, "tolerance_change": 1e-16}
    optimizer = torch.optim.LBFGS([z], max_iter=300, line_search_fn="strong_wolfe", **tolerances)

    def closure():
        optimizer.zero_grad()
        value = loss(z)
        value.backward()
        return value

    optimizer.step(closure)
    return closure().item()


def dense(net, name, X, y, criterion=CE):
    return oracles.weight_hessian(net, name, criterion, X, y)


def network(net, criterion, X, y=None, **options):
    return Network(net, Loss(criterion), make_batches(X, y, **options))


def opened(name, model, X, y=None, *, layer=-1, **params):
    """Return the handle of a model, and what a measure finds."""
    of_data = {key: params.pop(key) for key in OF_DATA & params.keys()}
    network = open_model(model, X, y, **of_data, in_order=params.get("per_sample", False))
    return network, measure_opened(network, name, layer=layer, **params)


def evaluate(name, model, X, y=None, **params):
    return opened(name, model, X, y, **params)[1]


def constant_loss(model, X, y, **of_data):
    network, measured = opened("relative_flatness", model, X, y, **of_data)
    return range_of(network, measured.passes).constant


def count_runs(net, call):
    runs = []
    handle = net.register_forward_hook(lambda *_: runs.append(1))
    call()
    handle.remove()
    return len(runs)


def measure_all(net, X, y, layer, *others, **options):
    """The rows of the measures in `TABLE_1`, and of others, which share their passes."""
    names = [*oracles.TABLE_1, *others]
    table = flatness_report(net, X, y, layers=layer, measures=names, method="exact", **options)
    return table.set_index("measure")


# -- attention ------------------------------------------------------------------------------------


class Attends(nn.Module):
    def __init__(self, **arguments):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **arguments)
        self.head = nn.Linear(4, 3)

    def forward(self, x, **masks):
        h, _ = self.attention(x, x, x, **masks)
        return self.head(h.mean(1))


class AttendsAcross(Attends):
    """Keys and values are other tokens than queries, and more of them."""

    def forward(self, x):
        memory = torch.cat([x.flip(1), x[:, :1]], dim=1)
        h, _ = self.attention(x, memory, memory if self.training else memory.sin())
        return self.head(h.mean(1))


class Packed(nn.Module):
    """Gives the packed projections of an attention the name of a layer's weight."""

    def __init__(self, net):
        super().__init__()
        self.net = net
        self.in_proj = nn.Module()
        self.in_proj.weight = nn.Parameter(net.attention.in_proj_weight.detach().clone())

    def forward(self, x):
        weights = {"attention.in_proj_weight": self.in_proj.weight}
        return torch.func.functional_call(self.net, weights, (x,))


HEADS, SIZE = 2, 2


def allowed():
    kernels = "flash", "mem_efficient", "cudnn", "math"
    return tuple(getattr(cuda, f"{kernel}_sdp_enabled")() for kernel in kernels)


class FusedAttention(nn.Module):
    """A block with attention in one function, tokens pooled at the end."""

    def __init__(self, causal=False, dropout=0.0, at_the_end=False):
        super().__init__()
        self.qkv = nn.Linear(4, 3 * HEADS * SIZE)
        if not at_the_end:
            self.out = nn.Linear(HEADS * SIZE, 4)
            self.head = nn.Linear(4, 3)
        self.causal, self.dropout, self.at_the_end = causal, dropout, at_the_end
        self.allowed = []

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
        h = self.attend(q, k, v).transpose(1, 2).flatten(2)
        return h.mean(1) if self.at_the_end else self.head((x + self.out(h)).tanh().mean(1))

    def attend(self, q, k, v):
        self.allowed.append(allowed())
        p = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=p)


class WrittenOutAttention(FusedAttention):
    """The same, by matrix products and with a given mask of dropout."""

    mask = 1.0

    def attend(self, q, k, v):
        scores = q @ k.transpose(-2, -1) / SIZE**0.5
        if self.causal:
            scores = scores + torch.full(scores.shape[-2:], -torch.inf).triu(1)
        return (scores.softmax(-1) * self.mask) @ v


KINDS = {"plain": {}, "causal": {"causal": True}, "dropout": {"dropout": 0.5}}


def make_fused(kind, **options):
    """The network, the same network written out, and data."""
    torch.manual_seed(0)
    net = FusedAttention(**KINDS[kind], **options).double()
    with torch.no_grad():
        for weight in net.parameters():
            weight.mul_(2)  # attention that is far from a mean
    written = WrittenOutAttention(**KINDS[kind], **options).double()
    written.load_state_dict(net.state_dict())
    return net, written, torch.randn(6, 3, 4).double(), torch.arange(6) % 3


# -- language models ------------------------------------------------------------------------------


def language_model(classes_second=True):
    def run(net, ids):
        logits = net.head(torch.tanh(net.body(net.embed(ids))))
        return logits.transpose(1, 2) if classes_second else {"logits": logits}

    return Net(run, embed=nn.Embedding(7, 5), body=nn.Linear(5, 4), head=nn.Linear(4, 6))


IDS = torch.tensor([[3, 1, 4, 1], [5, 2, 6, 0], [2, 5, 0, 0]])
MASK = (torch.arange(4) < torch.tensor([4, 3, 2])[:, None]).long()
LABELS = IDS.where(MASK.bool(), -100)
INPUTS = {"input_ids": IDS, "attention_mask": MASK}


def untied(net):
    """The same network, whose head has a copy of the weight."""
    net = copy.deepcopy(net)
    net.lm_head.weight = nn.Parameter(net.lm_head.weight.detach().clone())
    return net


def own_loss_of(net):
    """A model whose output is its own loss, with a head that shares no weight."""
    return Net(lambda own, inputs: own.net(**inputs, labels=LABELS)["loss"], net=untied(net))


# -- problems -------------------------------------------------------------------------------------


@dataclass
class Problem:
    """A network with data, and what its dense Hessians are those of."""

    net: nn.Module
    X: Any
    y: Any
    criterion: Any = CE
    oracle: nn.Module | None = None  # the network written out, if torch cannot differentiate it
    loss: Callable[..., Any] | None = None  # of its output, if not the criterion
    layers: tuple[str, ...] = ()  # all of them if none are named
    closed: tuple[str, ...] | None = None  # those with a closed form; the last one if None
    names: dict[str, str] | None = None  # of layers in the oracle
    rtol: float = 1e-8
    is_mean: bool = True  # of losses that count alike

    def written_out(self, layer):
        """The network and its loss that torch can differentiate, and a layer's name there."""
        net = (self.oracle or self.net).eval()
        return net, (self.names or {}).get(layer, layer), self.loss or self.criterion

    def hessian(self, layer, oracle=oracles.weight_hessian):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return oracle(*self.written_out(layer), self.X, self.y)

    def risk(self):
        net, _, loss = self.written_out("")
        return loss(net(self.X), self.y)

    def gradient_norm(self, layer):
        net, name, _ = self.written_out(layer)
        (gradient,) = torch.autograd.grad(self.risk(), net.get_submodule(name).weight)
        return gradient.norm().item()

    def all_layers(self):
        named = self.net.named_modules()
        return self.layers or tuple(name for name, m in named if isinstance(m, LAYERS))


def labelled(*shape, n=6):
    return torch.randn(n, *shape).double(), torch.arange(n) % 3


def of_kind(kind):
    return Problem(*make(kind, n=5))


def of_layer(kind):
    return Problem(*make(kind, n=4))


def packed(kind):
    net = kind().double().eval()
    names = {"attention.in_proj": "in_proj", "attention.out_proj": "net.attention.out_proj"}
    options = {"layers": tuple(names), "closed": (), "names": names}
    return Problem(net, *labelled(3, 4), oracle=Packed(net), **options)


def fused(kind):
    net, written, *data = make_fused(kind)
    return Problem(net, *data, oracle=written.eval())


def attention_at_the_end():
    net, written, *data = make_fused("plain", at_the_end=True)
    return Problem(net, *data, oracle=written.eval(), closed=())


def encoder():
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, activation="gelu")
    net = nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 3)).double().eval()
    return Problem(net, *labelled(3, 4), layers=("0.linear1", "0.linear2", "2"))


def of_logits(out, y):
    return CE(out["logits"].transpose(1, 2), y)


def gpt2():
    net = GPT2().double()
    return Problem(net, *torch.randint(0, 7, (2, 5, 3)), oracle=untied(net), loss=of_logits)


def squeeze_and_excitation():
    """As in MobileNet: a hard sigmoid scales the channels."""

    def run(net, x):
        h = nn.functional.hardswish(net.stem(x))
        return net.head((h * net.scale(h)).mean((2, 3)))

    stem, inside = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, 1)
    scale = nn.Sequential(nn.AdaptiveAvgPool2d(1), inside, nn.Hardsigmoid())
    net = Net(run, stem=stem, scale=scale, head=nn.Linear(3, 3)).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(3)
    oracle = copy.deepcopy(net)
    oracle.scale[2] = Net(lambda _, x: F.relu6(x + 3) / 6)  # can be differentiated twice
    return Problem(net, *labelled(2, 4, 4, n=5), oracle=oracle)


class Standardised(nn.Conv2d):
    """A convolution by a standardised weight, which pads its input as TensorFlow does."""

    def computed(self):
        rows = self.weight.flatten(1)
        rows = (rows - rows.mean(1, keepdim=True)) / rows.std(1, keepdim=True)
        return rows.reshape(self.weight.shape)

    def forward(self, x):
        x = F.pad(x, (0, 1, 0, 1))
        return F.conv2d(x, self.computed(), self.bias, self.stride, self.padding)


def computed_weights():
    """A standardised convolution and a layer with weight norm; kappa is that of what multiplies."""
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 5))
    parts = Standardised(2, 4, 2, stride=2), nn.Tanh(), nn.Flatten(), nn.Unflatten(1, (4, 4))
    net = nn.Sequential(*parts, normed, nn.GELU(), nn.Flatten(), nn.Linear(20, 3)).double()
    conv, linear = nn.Conv2d(2, 4, 2, stride=2).double(), nn.Linear(4, 5).double()
    conv.load_state_dict({"weight": net[0].computed(), "bias": net[0].bias})
    linear.load_state_dict({"weight": normed.weight, "bias": normed.bias})
    padded = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), conv)
    oracle, layers = nn.Sequential(padded, *net[1:4], linear, *net[5:]), ("0", "4", "7")
    return Problem(net, *labelled(2, 4, 4, n=5), oracle=oracle, layers=layers, names={"0": "0.1"})


def tokens(classes_second, criterion):
    def loss(out, y):
        return criterion(out if classes_second else out["logits"].transpose(1, 2), y)

    net, (X, y) = language_model(classes_second).double(), torch.randint(0, 6, (2, 5, 3))
    return Problem(net, X, y, criterion, loss=loss, is_mean=criterion is CE)


def own_loss(net):
    """A language model by its own loss, whose oracle puts out that loss."""
    return Problem(
        net, INPUTS, LABELS, None, own_loss_of(net), lambda loss, y: loss, ("lm_head",),
        names={"lm_head": "net.lm_head"}, rtol=1e-6, is_mean=False,
    )  # fmt: skip


def regression_on_tokens():
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)).double()
    X, y = torch.randn(6, 3, 4).double(), torch.randn(6, 3, 2).double()
    return Problem(net, X, y, nn.MSELoss(), closed=())


def behind_relu(criterion, y):
    """Losses whose roots are taken, behind a piecewise linear network."""
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    is_mean = y.is_floating_point()  # without weights of classes
    return Problem(net, torch.randn(6, 4).double(), y, criterion, is_mean=is_mean)


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


def named_as(name):
    """A function of the user that has the name of one of torch's."""
    function, layers = smooth_absolute_value(name), {"first": nn.Linear(4, 5)}
    layers["head"] = nn.Linear(5, 3)
    net = Net(lambda net, x: net.head(function(net.first(x))), **layers).double()
    plain = Net(lambda net, x: net.head((net.first(x).square() + 1).sqrt()), **layers)
    return Problem(net, *labelled(4), oracle=plain)


def between_a_view_and_its_change(view, frozen):
    def run(net, x):
        out = VIEWS[view](torch.tanh(net.main(x)))
        out += net.shortcut(x)
        return net.head(out)

    modules = {"main": nn.Linear(4, 8), "shortcut": nn.Linear(4, 4), "head": nn.Linear(4, 3)}
    net = Net(run, **modules).double()
    net.main.weight.requires_grad = not frozen
    return Problem(net, *labelled(4), layers=("shortcut",), closed=())


def called(run, closed=(), hook=None):
    """Two layers that are called in another order than they are registered."""
    layers = {"b": nn.Linear(4, 3), "a": nn.Linear(5, 4)}
    net = Net(lambda net, x: run(net.a, net.b, x), **layers).double()
    for layer in (net.a, net.b) if hook else ():
        layer.register_forward_hook(hook)
    return Problem(net, *labelled(5), layers=("a", "b"), closed=closed)


def wide(activation):
    """Too wide for a penalty to take all columns of the weight."""
    net = nn.Sequential(nn.Linear(150, 6), activation(), nn.Linear(6, 3)).double()
    return Problem(net, *labelled(150))


def added_keys():
    def run(net, x):
        h = net.body(x)
        return net.head(net.attention(h, h, h, need_weights=False)[0].mean(1))

    attention = nn.MultiheadAttention(4, 2, add_bias_kv=True, batch_first=True)
    net = Net(run, body=nn.Linear(4, 4), attention=attention, head=nn.Linear(4, 3)).double()
    return Problem(net.eval(), *labelled(3, 4), layers=("body", "head"), closed=("head",))


def last_of_a_sequence(net, x):
    return net.out(net.body(x)[0][:, -1])


def lstm():
    body, out = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)
    net = Net(last_of_a_sequence, body=body, out=out).double()
    return Problem(net, *labelled(6, 4, n=7), layers=("out",))


def head(criterion, y, n_outputs, *parts, method="closed form"):
    """A linear layer whose outputs are reshaped, or followed by a softmax."""
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, n_outputs), *parts).double()
    closed = ("2",) if method == "closed form" else ()
    X = torch.randn(len(y), 5).double()
    return Problem(net, X, y, criterion, layers=("2",), closed=closed, is_mean=False)


def head_of_classes(criterion, shape):
    """Outputs of a shape, whose labels are the classes in turn."""
    n_labels = math.prod(shape[1:])
    y = (torch.arange(8)[:, None] + torch.arange(n_labels)).reshape(8, *shape[1:]) % 4
    method = "closed form" if len(shape) == 1 else "exact"
    return head(criterion, y, math.prod(shape), nn.Unflatten(1, shape), method=method)


CRITERIA = {
    "plain": CE,
    "smoothed": nn.CrossEntropyLoss(label_smoothing=0.2, ignore_index=1),
    "class weights": nn.CrossEntropyLoss(weight=cases.WEIGHTS),
    "weights, smoothed, ignoring": nn.CrossEntropyLoss(cases.WEIGHTS, None, 1, label_smoothing=0.3),
}


def of_criterion(case, reduction=None):
    """A criterion of tests/cases.py, or the sum or the list of its losses, measured as a mean."""
    build, make_criterion, target, closed = cases.CASES[case]
    torch.manual_seed(1)
    net, criterion, X, y = build(), make_criterion(), torch.randn(11, 5).double(), target(11)
    closed = None if closed else ()
    problem = Problem(net, X, y, criterion, closed=closed, rtol=1e-10, is_mean=False)
    if reduction:
        criterion.reduction = reduction
        n = len(y) if reduction == "sum" else 1
        problem.loss = lambda out, y: criterion(out, y).mean() / n
    return problem


def of_hooked_criterion(case):
    """A criterion whose hooks are part of the loss."""
    problem = of_criterion(case)
    plain, hooked = problem.criterion, copy.deepcopy(problem.criterion)
    hooked.register_forward_pre_hook(lambda _, args: (2 * args[0], args[1]))
    hooked.register_forward_hook(lambda _, args, loss: 3 * loss)
    options = {"loss": lambda z, y: 3 * plain(2 * z, y), "closed": ()}
    return replace(problem, criterion=hooked, **options)


def pixels(criterion, y, *, last=(1,), closed=None, is_mean=True):
    """A head of segmentation, with a loss for each pixel."""
    last = nn.Conv2d(4, 3, *last)
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), last).double()
    X = torch.randn(len(y), 2, 4, 5).double()
    return Problem(net, X, y, criterion, layers=("2",), closed=closed, is_mean=is_mean)


def classes(*size):
    return torch.arange(5 * math.prod(size)).reshape(5, *size) % 3


def seeded(problems):
    """Build the network and the data of each problem from the same seed."""

    def build(make):
        torch.manual_seed(0)
        return make()

    return {name: partial(build, make) for name, make in problems.items()}


CLASSES = classes(4, 5)
PIXELS = {
    "pixels": partial(pixels, CE, CLASSES),
    "pixels, weighted, some ignored": partial(
        pixels, nn.CrossEntropyLoss(cases.WEIGHTS[:3]), CLASSES.where(CLASSES.flip(1) < 2, -100),
        is_mean=False,
    ),
    "pixels, probabilities": partial(
        pixels, CE, torch.rand(5, 3, 4, 5).double().softmax(1), is_mean=False
    ),
    "pixels, masks": partial(
        pixels, nn.BCEWithLogitsLoss(), torch.rand(5, 3, 4, 5).double().round(), is_mean=False
    ),
    "images": partial(pixels, nn.MSELoss(), torch.randn(5, 3, 4, 5).double(), is_mean=False),
    "padded pixels": partial(pixels, CE, classes(6, 7), last=(1, 1, 1), closed=()),
    "nine pixels": partial(pixels, CE, classes(2, 3), last=(3,), closed=()),
}  # fmt: skip


# names of torch's operations that are piecewise linear, linear in an input, or no change at all
NAMES = ["Abs", "Add", "Div", "Mul", "NativeBatchNorm", "View", "_OfBatch", "Embedding"]
VIEWS = {
    "slice": lambda h: h[:, 2:6],
    "reshaped": lambda h: h.view(-1, 2, 4)[:, 1],
    "whole": lambda h: h.view(-1, 8).narrow(1, 0, 4),
}
# layers that are used in unusual ways
UNUSUAL = {
    **{f"a function named {name}": partial(named_as, name) for name in NAMES},
    "called by name": lambda: called(lambda a, b, x: b(input=a(input=x).relu()), ("b",)),
    "overwritten later": lambda: called(lambda a, b, x: b(a(x).relu_()).tanh_()),
    "hooks": lambda: called(lambda a, b, x: b(a(x).relu()), hook=lambda _, x, z: z + z.tanh() / 2),
    "wide, relu": partial(wide, nn.ReLU),
    "wide, tanh": partial(wide, nn.Tanh),
    "added keys": added_keys,
    "hooks of cross-entropy": partial(of_hooked_criterion, "cross-entropy"),
    "hooks of squares": partial(of_hooked_criterion, "squared error"),
}
REDUCED = ("cross-entropy", "cross-entropy class weights", "squared error")
OF_CRITERIA = {
    **{case: partial(of_criterion, case) for case in cases.CASES},
    **{
        f"{case}, {reduction}": partial(of_criterion, case, reduction)
        for case in REDUCED
        for reduction in ("sum", "none")
    },
}
# of classes, of labels for each sample
SHAPES = {"one label": (4,), "4 labels": (4, 4), "images": (4, 2, 2), "an axis": (4, 1)}
PROBLEMS = seeded({
    **{kind: partial(of_kind, kind) for kind in NETS},
    "packed attention": partial(packed, Attends),
    "packed cross-attention": partial(packed, AttendsAcross),
    **{f"fused attention, {kind}": partial(fused, kind) for kind in KINDS},
    "attention at the end": attention_at_the_end,
    "encoder": encoder,
    "GPT-2": gpt2,
    "computed weights": computed_weights,
    "squeeze and excitation": squeeze_and_excitation,
    **{
        f"language model, {name}, {axis}": partial(tokens, axis == "classes second", criterion)
        for name, criterion in {"plain": CE, "smoothed": CRITERIA["smoothed"]}.items()
        for axis in ("classes second", "mapping")
    },
    "regression on tokens": regression_on_tokens,
    "squares behind relu": partial(behind_relu, nn.MSELoss(), torch.rand(6, 3).double()),
    "labels behind relu": partial(behind_relu, nn.BCEWithLogitsLoss(), torch.rand(6, 3).double()),
    "weights behind relu": partial(
        behind_relu, nn.CrossEntropyLoss(cases.WEIGHTS[:3]), torch.arange(6) % 3
    ),
    **PIXELS,
    "lstm": lstm,
    **UNUSUAL,
    **{  # which have no gradients in front of the view
        f"a {view} that is changed, {frozen=}": partial(between_a_view_and_its_change, view, frozen)
        for view, frozen in product(VIEWS, (False, True))
    },
    **OF_CRITERIA,
})
HEADS_OF_CLASSES = seeded({
    **{
        f"{name}, {size}": partial(head_of_classes, criterion, shape)
        for name, criterion in CRITERIA.items()
        for size, shape in SHAPES.items()
    },
    "its own loss, tied": lambda: own_loss(GPT2LMHeadModel(tie=True).double()),
    "its own loss, untied": lambda: own_loss(GPT2LMHeadModel(tie=False).double()),
    "probabilities": lambda: head(CE, torch.rand(8, 4).double(), 4),
    "log-probabilities": lambda: head(nn.NLLLoss(), torch.arange(8) % 4, 4, nn.LogSoftmax(dim=1)),
    "log-probabilities of images": lambda: head(
        nn.NLLLoss(), torch.arange(8) % 6, 6, nn.Unflatten(1, (2, 3)), nn.LogSoftmax(2),
        nn.Flatten(), method="exact",
    ),
    "labels of outputs with an axis": lambda: head(
        nn.BCEWithLogitsLoss(pos_weight=cases.WEIGHTS[:, None]),
        torch.rand(8, 4, 1).round().double(), 4, nn.Unflatten(1, (4, 1)), method="exact",
    ),
})  # fmt: skip
