"""Heads of segmentation: a convolution of single pixels, with a loss for each pixel."""

import pytest
import torch
from torch import nn

from relflat_sk import RelativeFlatnessPenalty, flatness_report, relative_flatness

N, SPACE = 6, (4, 5)


def labels(*, some_ignored=False):
    y = torch.randint(0, 3, (N, *SPACE))
    if some_ignored:
        y[0], y[2, :2] = -100, -100
    return y


WEIGHT = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
CASES = {
    "classes": lambda: (nn.CrossEntropyLoss(), labels()),
    "ignored pixels": lambda: (nn.CrossEntropyLoss(), labels(some_ignored=True)),
    "class weights": lambda: (nn.CrossEntropyLoss(weight=WEIGHT), labels(some_ignored=True)),
    "smoothed": lambda: (nn.CrossEntropyLoss(label_smoothing=0.1), labels()),
    "soft": lambda: (nn.CrossEntropyLoss(), torch.rand(N, 3, *SPACE).double().softmax(1)),
    "masks": lambda: (nn.BCEWithLogitsLoss(), torch.rand(N, 3, *SPACE).double().round()),
    "images": lambda: (nn.MSELoss(), torch.randn(N, 3, *SPACE).double()),
}


def make_net(last):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), last).double()


def dense(net, criterion, X, y):
    """Flatness and trace from the Hessian in the head's weight."""
    weight = net[-1].weight.detach()
    W = weight.flatten(1)

    def risk(w):
        return criterion(torch.func.functional_call(net, {"2.weight": w.view_as(weight)}, (X,)), y)

    H = torch.func.hessian(risk)(W)
    return torch.einsum("sj,tj,sktk->", W, W, H).item(), torch.einsum("sksk->", H).item()


@pytest.mark.parametrize("name", CASES)
def test_a_head_of_pixels_has_a_closed_form(name):
    net, X = make_net(nn.Conv2d(4, 3, 1)), torch.randn(N, 2, *SPACE).double()
    criterion, y = CASES[name]()
    flatness, trace = dense(net, criterion, X, y)
    report = flatness_report(
        net, X, y, criterion=criterion, layers=-1, batch_size=4,
        measures=["relative_flatness", "hessian_trace", "gradient_norm"],
    ).set_index("measure")  # fmt: skip
    assert report.value["relative_flatness"] == pytest.approx(flatness, rel=1e-9)
    assert report.value["hessian_trace"] == pytest.approx(trace, rel=1e-9)
    assert set(report.method) == {"closed form", "exact"}
    (gradient,) = torch.autograd.grad(criterion(net(X), y), net[-1].weight)
    assert report.value["gradient_norm"] == pytest.approx(gradient.norm().item(), rel=1e-9)
    per_sample = relative_flatness(net, X, y, criterion=criterion, per_sample=True)
    assert per_sample.shape == (N,)
    assert per_sample.mean() == pytest.approx(flatness, rel=1e-9)


def test_the_penalty_of_a_head_of_pixels():
    net, X = make_net(nn.Conv2d(4, 3, 1)), torch.randn(N, 2, *SPACE).double()
    criterion, y = CASES["ignored pixels"]()
    penalty = RelativeFlatnessPenalty(weight=1.0, clip=None)
    with penalty.capture(net):
        output = net(X)
        value = penalty(criterion, output, y)
    assert value.item() == pytest.approx(dense(net, criterion, X, y)[0] / (2 * 4), rel=1e-9)


@pytest.mark.parametrize(
    "last",
    [
        nn.Conv2d(4, 3, 1, padding=1),
        nn.Conv2d(4, 3, 1, stride=2, padding=(2, 2)),
        nn.Conv2d(4, 3, 3, padding=1),
        nn.ConvTranspose2d(4, 3, 1),
    ],
    ids=["padded", "strided", "of nine pixels", "transposed"],
)
def test_other_convolutions_have_none(last):
    net, X = make_net(last), torch.randn(3, 2, *SPACE).double()
    y = torch.randint(0, 3, (3, *net(X).shape[2:]))
    criterion = nn.CrossEntropyLoss()
    report = flatness_report(
        net, X, y, criterion=criterion, layers=-1, measures="relative_flatness", method="exact"
    )
    assert report.method[0] != "closed form"
    if not isinstance(last, nn.ConvTranspose2d):
        assert report.value[0] == pytest.approx(dense(net, criterion, X, y)[0], rel=1e-9)
