"""Networks with every kind of layer, and problems in which measures have a dense oracle."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

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
from relflat_sk.measures._results import range_of
from tests import cases, oracles
from tests.cases import Net
from tests.hugging_face import GPT2, Conv1D, GPT2LMHeadModel, conv1d

CE = nn.CrossEntropyLoss()


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
    "grouped conv": (
        lambda: nn.Sequential(nn.Conv1d(4, 4, 2, groups=2), nn.Tanh(), nn.Flatten(),
                              nn.Linear(8, 3)),
        (4, 3),
    ),
    "transposed": (
        lambda: nn.Sequential(nn.ConvTranspose2d(2, 4, 2, stride=2, groups=2), nn.ReLU(),
                              nn.AvgPool2d(3), nn.Flatten(), nn.Linear(16, 3)),
        (2, 3, 3),
    ),
    "residual": (residual, (2, 5, 5)),
    "transformer": (block, (4, 6)),
    "gpt2": (lambda: nn.Sequential(conv1d(4, 5), nn.GELU(), conv1d(5, 3), nn.Flatten(),
                                   nn.ReLU(), conv1d(6, 3)), (2, 4)),
}  # fmt: skip
LAYERS = nn.Linear | nn.Conv1d | nn.Conv2d | nn.ConvTranspose2d | Conv1D


def make(kind, n=7):
    torch.manual_seed(0)
    build, shape = NETS[kind]
    net = build().double()
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
    """The network on its data, which functions of one measure take."""
    return Network(net, Loss(criterion), make_batches(X, y, **options))


def opened(name, model, X, y=None, *, layer=-1, **params):
    """Return the handle of a model, and what a measure finds."""
    of_data = {key: params.pop(key) for key in OF_DATA & params.keys()}
    network = open_model(model, X, y, **of_data, in_order=params.get("per_sample", False))
    return network, measure_opened(network, name, layer=layer, **params)


def evaluate(name, model, X, y=None, **params):
    """Return what a measure finds."""
    return opened(name, model, X, y, **params)[1]


def constant_loss(model, X, y, **of_data):
    """Return the mean loss of the best constant prediction."""
    network, measured = opened("relative_flatness", model, X, y, **of_data)
    return range_of(network, measured.passes).constant


def count_runs(net, call):
    """How often the network runs in a call."""
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
    """The kernels of attention that torch may use."""
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.math_sdp_enabled(),
    )


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


class LanguageModel(nn.Module):
    def __init__(self, classes_second=True):
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.body = nn.Linear(5, 4)
        self.head = nn.Linear(4, 6)
        self.classes_second = classes_second

    def forward(self, ids):
        logits = self.head(torch.tanh(self.body(self.embed(ids))))
        return logits.transpose(1, 2) if self.classes_second else {"logits": logits}


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

    def hessian(self, layer, oracle=oracles.weight_hessian):
        """The dense Hessian in a layer's weight."""
        net, name = self.oracle or self.net, (self.names or {}).get(layer, layer)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return oracle(net.eval(), name, self.loss or self.criterion, self.X, self.y)

    def risk(self):
        """The mean loss."""
        net = self.oracle or self.net
        return (self.loss or self.criterion)(net.eval()(self.X), self.y).item()

    def gradient_norm(self, layer):
        """The norm of the gradient of the mean loss in a layer's weight."""
        net, name = self.oracle or self.net, (self.names or {}).get(layer, layer)
        loss = (self.loss or self.criterion)(net.eval()(self.X), self.y)
        (gradient,) = torch.autograd.grad(loss, net.get_submodule(name).weight)
        return gradient.norm().item()

    def all_layers(self):
        """The names of the layers that are measured."""
        if self.layers:
            return self.layers
        return tuple(name for name, m in self.net.named_modules() if isinstance(m, LAYERS))


def of_kind(kind):
    net, X, y = make(kind, n=5)
    return Problem(net, X, y)


def packed(kind):
    torch.manual_seed(0)
    net = kind().double().eval()
    names = {"attention.in_proj": "in_proj", "attention.out_proj": "net.attention.out_proj"}
    return Problem(
        net, torch.randn(6, 3, 4).double(), torch.arange(6) % 3, oracle=Packed(net),
        layers=tuple(names), closed=(), names=names,
    )  # fmt: skip


def fused(kind):
    net, written, X, y = make_fused(kind)
    return Problem(net, X, y, oracle=written.eval())


def attention_at_the_end():
    net, written, X, y = make_fused("plain", at_the_end=True)
    return Problem(net, X, y, oracle=written.eval(), closed=())


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, activation="gelu")
    net = nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 3)).double().eval()
    X, y = torch.randn(6, 3, 4).double(), torch.arange(6) % 3
    return Problem(net, X, y, layers=("0.linear1", "0.linear2", "2"))


def gpt2():
    torch.manual_seed(0)
    net = GPT2().double()
    X, y = torch.randint(0, 7, (2, 5, 3))
    return Problem(
        net, X, y, oracle=untied(net), loss=lambda out, y: CE(out["logits"].transpose(1, 2), y)
    )


def squeeze_and_excitation():
    """As in MobileNet: a hard sigmoid scales the channels."""

    def run(net, x):
        h = nn.functional.hardswish(net.stem(x))
        return net.head((h * net.scale(h)).mean((2, 3)))

    torch.manual_seed(0)
    stem, inside = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, 1)
    scale = nn.Sequential(nn.AdaptiveAvgPool2d(1), inside, nn.Hardsigmoid())
    net = Net(run, stem=stem, scale=scale, head=nn.Linear(3, 3)).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(3)
    oracle = copy.deepcopy(net)
    oracle.scale[2] = Net(lambda _, x: F.relu6(x + 3) / 6)  # can be differentiated twice
    return Problem(net, torch.randn(5, 2, 4, 4).double(), torch.arange(5) % 3, oracle=oracle)


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
    torch.manual_seed(0)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 5))
    parts = Standardised(2, 4, 2, stride=2), nn.Tanh(), nn.Flatten(), nn.Unflatten(1, (4, 4))
    net = nn.Sequential(*parts, normed, nn.GELU(), nn.Flatten(), nn.Linear(20, 3)).double()
    conv, linear = nn.Conv2d(2, 4, 2, stride=2).double(), nn.Linear(4, 5).double()
    conv.load_state_dict({"weight": net[0].computed(), "bias": net[0].bias})
    linear.load_state_dict({"weight": normed.weight, "bias": normed.bias})
    padded = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), conv)
    oracle = nn.Sequential(padded, *net[1:4], linear, *net[5:])
    X, y = torch.randn(5, 2, 4, 4).double(), torch.arange(5) % 3
    return Problem(net, X, y, oracle=oracle, layers=("0", "4", "7"), names={"0": "0.1"})


def tokens(classes_second, criterion):
    torch.manual_seed(0)
    X, y = torch.randint(0, 6, (2, 5, 3))

    def loss(out, y):
        return criterion(out if classes_second else out["logits"].transpose(1, 2), y)

    net = LanguageModel(classes_second).double()
    return Problem(net, X, y, criterion, loss=loss, is_mean=criterion is CE)


def own_loss(tie):
    torch.manual_seed(0)
    net = GPT2LMHeadModel(tie=tie).double()
    return Problem(
        net, INPUTS, LABELS, None, oracle=own_loss_of(net), loss=lambda loss, y: loss,
        layers=("lm_head",), names={"lm_head": "net.lm_head"}, rtol=1e-6, is_mean=False,
    )  # fmt: skip


def regression_on_tokens():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)).double()
    X, y = torch.randn(6, 3, 4).double(), torch.randn(6, 3, 2).double()
    return Problem(net, X, y, nn.MSELoss(), closed=())


def last_of_a_sequence(net, x):
    return net.out(net.body(x)[0][:, -1])


def lstm():
    torch.manual_seed(0)
    body = nn.LSTM(4, 5, batch_first=True)
    net = Net(last_of_a_sequence, body=body, out=nn.Linear(5, 3)).double()
    return Problem(net, torch.randn(7, 6, 4).double(), torch.arange(7) % 3, layers=("out",))


def head(criterion, y, n_outputs, *parts, method="closed form"):
    """A linear layer whose outputs are reshaped, or followed by a softmax."""
    torch.manual_seed(0)
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


WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 3.0]).double()
CRITERIA = {
    "plain": CE,
    "smoothed": nn.CrossEntropyLoss(label_smoothing=0.2, ignore_index=1),
    "class weights": nn.CrossEntropyLoss(weight=WEIGHTS),
    "weights, smoothed, ignoring": nn.CrossEntropyLoss(WEIGHTS, None, 1, label_smoothing=0.3),
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


def pixels(criterion, y, *, last=(1,), closed=None, is_mean=True):
    """A head of segmentation, with a loss for each pixel."""
    torch.manual_seed(0)
    head = nn.Conv2d(4, 3, *last)
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), head).double()
    X = torch.randn(len(y), 2, 4, 5).double()
    return Problem(net, X, y, criterion, layers=("2",), closed=closed, is_mean=is_mean)


def classes(*size):
    return torch.arange(5 * math.prod(size)).reshape(5, *size) % 3


CLASSES = classes(4, 5)
PIXELS = {
    "pixels": partial(pixels, CE, CLASSES),
    "pixels, weighted, some ignored": partial(
        pixels, nn.CrossEntropyLoss(WEIGHTS[:3]), CLASSES.where(CLASSES.flip(1) < 2, -100),
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
PROBLEMS = {
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
    **PIXELS,
    "lstm": lstm,
    **OF_CRITERIA,
}
HEADS_OF_CLASSES = {
    **{
        f"{name}, {size}": partial(head_of_classes, criterion, shape)
        for name, criterion in CRITERIA.items()
        for size, shape in SHAPES.items()
    },
    "its own loss, tied": partial(own_loss, True),
    "its own loss, untied": partial(own_loss, False),
    "probabilities": lambda: head(CE, torch.rand(8, 4).double(), 4),
    "log-probabilities": lambda: head(nn.NLLLoss(), torch.arange(8) % 4, 4, nn.LogSoftmax(dim=1)),
    "log-probabilities of images": lambda: head(
        nn.NLLLoss(), torch.arange(8) % 6, 6, nn.Unflatten(1, (2, 3)), nn.LogSoftmax(2),
        nn.Flatten(), method="exact",
    ),
    "labels of outputs with an axis": lambda: head(
        nn.BCEWithLogitsLoss(pos_weight=WEIGHTS[:, None]), torch.rand(8, 4, 1).round().double(), 4,
        nn.Unflatten(1, (4, 1)), method="exact",
    ),
}  # fmt: skip
