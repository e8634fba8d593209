"""The penalty at a head of very many classes, whose gradient is computed over chunks of them."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from relflat_sk import RelativeFlatnessPenalty
from tests.cases import Net, published_penalty
from tests.hugging_face import GPT2
from tests.measures.nets import CE
from tests.measures.test_many_classes import Sizes, by_sums, make
from tests.penalty import test_penalty as small
from tests.penalty.every_draw import evaluate

SOFTMAX = [name for name in small.CLOSED if "cross-entropy" in name]


@pytest.mark.parametrize("gain", [0.05, 20.0], ids=["flat", "confident"])
@pytest.mark.parametrize(("d", "m"), [(5000, 8), (50257, 4)], ids=lambda size: str(size))
@pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalised"])
def test_value_and_gradient_in_float32(d, m, gain, normalize):
    net, X, y = make(d, m, gain)
    penalty = published_penalty(normalize=normalize)
    value = evaluate(penalty, net, CE, X, y)
    name = "normalized_relative_flatness" if normalize else "relative_flatness"
    assert value.item() == pytest.approx(by_sums(net, X)[name] / (2 * m), rel=1e-4)
    value.backward()
    exact = copy.deepcopy(net).double()
    features = exact[:-1](X.double())
    W = exact[-1].weight
    p = exact[-1](features).softmax(dim=1)
    variances = p @ W.square() - (p @ W).square()
    spread = features.var(dim=0, correction=0) if normalize else torch.ones(m).double()
    terms = (features.square() / spread).sum(dim=1) * (variances * spread).sum(dim=1)
    expected = torch.autograd.grad(terms.mean() / (2 * m), list(exact.parameters()))
    for parameter, truth in zip(net.parameters(), expected, strict=True):
        assert (parameter.grad.double() - truth).norm() <= 1e-4 * truth.norm()


def tokens(tie):
    """A language model whose labels have padding, in float64."""
    torch.manual_seed(0)
    net, ids = GPT2(tie=tie).double(), torch.randint(0, 7, (5, 3))
    return net, ids, ids.roll(1, dims=1).masked_fill(torch.arange(3) >= torch.tensor([[2]]), -100)


def of_six_classes(change=lambda net: None, behind=lambda z: z):
    """A network in float64, which a function changes, or what it returns; and data."""
    net, X, y = make(6, 5, 2.0)
    change(net)
    return Net(lambda whole, X: behind(whole.net(X)), net=net).double(), X.double(), y


def of_case(case):
    net, criterion, X, y = small.make(case)
    return net, X, y, criterion


NETS = {
    **{case: partial(of_case, case) for case in SOFTMAX},
    "sum": lambda: (*of_six_classes(), nn.CrossEntropyLoss(reduction="sum")),
    "tokens, tied": lambda: tokens(True),
    "tokens, untied": lambda: tokens(False),
    "frozen body": lambda: of_six_classes(lambda net: net[0].requires_grad_(False)),
    "frozen head": lambda: of_six_classes(lambda net: net[2].requires_grad_(False)),
    "no bias": lambda: of_six_classes(lambda net: net[2].register_parameter("bias", None)),
    "logits halved in place": lambda: of_six_classes(behind=lambda z: z.mul_(0.5)),
    "logits in another shape": lambda: of_six_classes(behind=lambda z: z.view(6, 6, 1).squeeze(2)),
}


def loss_of(output, y, criterion=CE):
    output = output["logits"].transpose(1, 2) if isinstance(output, dict) else output
    return criterion(output, y)


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weights"])
@pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalised"])
@pytest.mark.parametrize("case", NETS)
def test_few_and_many_classes_are_penalised_alike(case, normalize, weighted, few_are_many):
    net, X, y, *criterion = NETS[case]()
    criterion = criterion[0] if criterion else CE
    weights = torch.arange(len(X)).double() % 3 if weighted else None

    def value_and_gradients():
        # the first step finds the layers, the second one knows them
        penalty = RelativeFlatnessPenalty(normalize=normalize, weight=100.0, clip=0.5)
        found = []
        for _ in range(2):
            with penalty.capture(net):
                output = net(X)
            value = penalty(criterion, output, y, weights)
            net.zero_grad()
            (loss_of(output, y, criterion) + value).backward()
            found.append([value.detach(), *(p.grad for p in net.parameters())])
        return found

    expected = value_and_gradients()
    few_are_many()
    torch.testing.assert_close(value_and_gradients(), expected, rtol=1e-9, atol=1e-12)


def many_tokens():
    torch.manual_seed(0)
    X = torch.randint(0, 5000, (3, 4))
    return GPT2(vocabulary=5000, width=48, tie=False), X, X.roll(1, dims=1)


def half_precision():
    net, X, y = make(5000, 48, 1.0)
    return net.bfloat16(), X.bfloat16(), y


LARGE = {"float32": lambda: make(5000, 48, 1.0), "bfloat16": half_precision, "tokens": many_tokens}


@pytest.mark.parametrize("case", LARGE)
@pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalised"])
def test_a_step_makes_few_more_arrays_of_the_weights_size_than_without_penalty(case, normalize):
    net, X, y = LARGE[case]()
    penalty = RelativeFlatnessPenalty(normalize=normalize, weight=1.0, clip=0.5)

    def sizes(step):
        for parameter in net.parameters():
            parameter.grad = None
        with Sizes() as sizes:
            step().backward()
        return [size for size in sizes.found if size >= net.get_parameter(head).nbytes]

    def penalised():
        with penalty.capture(net):
            output = net(X)
        return loss_of(output, y) + penalty(CE, output, y)

    head = "lm_head.weight" if case == "tokens" else "2.weight"
    plain = sizes(lambda: loss_of(net(X), y))
    assert len(plain) == (2 if case == "tokens" else 1)  # those of embedding and head
    for _ in range(9):  # of which each measures norms for the limit
        penalised()
    # its own gradient and its sum with the loss's; normalised also the weight times the spreads,
    # with its gradient
    more = len(sizes(penalised)) - len(plain)
    assert more <= (6 if normalize else 2)
