"""The curvature over chunks of very many classes, against sums written in float64."""

import pytest
import torch
from torch.testing import assert_close

from relflat_sk._losses.curvature import Factor
from relflat_sk._losses.many_classes import ManyClasses


def class_by_class(z, W, spread=None):
    """The variance of each column of W under softmax(z), about the most probable row."""
    z, W = z.double(), W.double()
    W = W if spread is None else W * spread.double()
    found = []
    for logits in z:
        top = int(logits.argmax())
        away = W - W[top]
        others = (logits - logits.logsumexp(0)).exp() * (torch.arange(len(logits)) != top)
        found.append(others @ away.square() - (others @ away).square())
    return torch.stack(found)


def trace(z):
    """The trace of diag(p) - p p^T, without 1 - p."""
    found = []
    for logits in z.double():
        p = logits.softmax(0)
        top = int(logits.argmax())
        rest = p[torch.arange(len(p)) != top]
        found.append(p[top] * rest.sum() + (rest * (1 - rest)).sum())
    return torch.stack(found)


def make(d, m, gap, n=4):
    """Logits whose greatest is ahead by about `gap`, and rows with a common part."""
    torch.manual_seed(0)
    z, W = torch.randn(n, d), torch.randn(d, m) + 3
    z[torch.arange(n), torch.randint(d, (n,))] += gap
    return z, W


def total(z, W, spread=None, weights=None, features=None):
    """The weighted sum of ``|phi_i|^2 V_i``, with its graph."""
    features = torch.ones_like(z[:, :1]) if features is None else features
    W = W if spread is None else W * spread
    return ManyClasses(z, None).total(W, features, 0.5 if weights is None else 0.5 * weights)


@pytest.fixture(params=[7, 2**23], ids=lambda size: f"chunks of {size}")
def chunks(request, monkeypatch):
    monkeypatch.setattr(
        "relflat_sk._losses.curvature._ROWS", {False: request.param, True: request.param}
    )


@pytest.mark.parametrize("gap", [0.0, 10.0, 60.0, 300.0], ids=lambda gap: f"ahead by {gap:g}")
@pytest.mark.parametrize(("d", "m"), [(7, 5), (50257, 6)], ids=str)
def test_float32_agrees_with_float64(d, m, gap):
    z, W = make(d, m, gap)
    curvature, forms = ManyClasses(z, None), class_by_class(z, W)
    assert (forms > 0).all()
    assert_close(curvature(W).double(), forms, rtol=5e-6, atol=0)
    assert_close(curvature.trace(Factor(W)).double(), forms.sum(dim=1), rtol=5e-6, atol=0)
    assert_close(curvature.trace(None).double(), trace(z), rtol=5e-6, atol=0)


@pytest.mark.usefixtures("chunks")
def test_any_chunks_give_the_same():
    z, W = make(20, 3, 2.0)
    spread = torch.tensor([2.0, 0.0, 0.5])
    curvature = ManyClasses(z, torch.tensor([1.0, 0.0, 2.0, 0.5]))
    scale = curvature.scale.double()
    forms = class_by_class(z, W) * scale[:, None]
    assert_close(curvature(W).double(), forms, rtol=1e-5, atol=0)
    assert_close(curvature.trace(None).double(), trace(z) * scale, rtol=1e-5, atol=0)
    scaled = class_by_class(z, W, spread).sum(dim=1) * scale
    assert_close(curvature.trace(Factor(W, spread)).double(), scaled, rtol=1e-5, atol=0)
    weights = torch.tensor([1.0, 2.0, 0.5, 1.0])
    summed = curvature.total(W * spread, torch.full((4, 1), 3.0), 2.0 * weights)
    assert_close(summed.double(), 18 * (weights * scaled).sum(), rtol=1e-5, atol=0)


def test_the_gradient_of_a_confident_prediction_keeps_its_digits():
    # relative to the largest other probability, 1e-13, which 1 - p does not show in float32
    z, W = make(9, 4, 30.0, n=1)
    found, expected = (x.clone().requires_grad_() for x in (z, z.double()))
    (2 * total(found, W)).backward()
    class_by_class(expected, W).sum().backward()
    assert_close(found.grad.double(), expected.grad, rtol=1e-5, atol=0)


@pytest.mark.usefixtures("chunks")
def test_derivatives_of_any_order():
    z, W = (x.double().requires_grad_() for x in make(8, 3, 1.0, n=2))
    spread = torch.rand(3).double().requires_grad_()
    features = torch.randn(2, 3).double().requires_grad_()
    weights = torch.tensor([2.0, 0.5]).double()
    inputs = z, W, spread, weights, features
    assert torch.autograd.gradcheck(total, inputs)
    assert torch.autograd.gradgradcheck(total, inputs)
    assert torch.autograd.gradcheck(total, (z, W.detach()))
    assert torch.autograd.gradcheck(total, (z.detach(), W))


def test_half_precision_is_summed_in_float32():
    z, W = (x.bfloat16().requires_grad_() for x in make(50257, 6, 5.0))
    forms = class_by_class(z.detach(), W.detach())
    curvature = ManyClasses(z.detach(), None)
    assert_close(curvature(W.detach()).double(), forms, rtol=1e-5, atol=0)
    assert_close(curvature.trace(Factor(W.detach())).double(), forms.sum(dim=1), rtol=1e-5, atol=0)
    value = 2 * total(z, W, features=torch.ones(len(z), 1))
    assert value.dtype == torch.float32
    found = torch.autograd.grad(value, (z, W))
    exact = [x.detach().double().requires_grad_() for x in (z, W)]
    expected = torch.autograd.grad(class_by_class(*exact).sum(), exact)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.double() - theirs).norm() <= 5e-3 * theirs.norm()  # rounded once


def test_autocast_does_not_reach_the_sums():
    z, W = make(5000, 6, 3.0)
    expected = ManyClasses(z, None).trace(Factor(W))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close(ManyClasses(z, None).trace(Factor(W)), expected, rtol=0, atol=0)


def test_rows_with_a_large_common_part():
    z, W = make(100, 8, 3.0)
    far = W + 100
    found = ManyClasses(z, None).trace(Factor(far)).double()
    assert_close(found, class_by_class(z, far).sum(dim=1), rtol=1e-4, atol=0)


def test_classes_that_are_masked_out():
    z, W = make(9, 4, 0.0)
    z[:, 3:] = -torch.inf
    assert_close(ManyClasses(z, None)(W).double(), class_by_class(z[:, :3], W[:3]),
                 rtol=1e-4, atol=0)  # fmt: skip
    z[:, 1:] = -torch.inf  # the others have no probability at all
    assert (ManyClasses(z, None)(W) == 0).all()
