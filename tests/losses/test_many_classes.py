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


@pytest.mark.parametrize("gap", [0.0, 10.0, 60.0, 300.0], ids=lambda gap: f"ahead by {gap:g}")
@pytest.mark.parametrize(("d", "m"), [(7, 5), (50257, 6)], ids=str)
def test_float32_agrees_with_float64(d, m, gap):
    z, W = make(d, m, gap)
    curvature, forms = ManyClasses(z, None), class_by_class(z, W)
    assert (forms > 0).all()
    assert_close(curvature(W).double(), forms, rtol=5e-6, atol=0)
    assert_close(curvature.trace(Factor(W)).double(), forms.sum(dim=1), rtol=5e-6, atol=0)
    assert_close(curvature.trace(None).double(), trace(z), rtol=5e-6, atol=0)


def test_the_gradient_of_a_confident_prediction_keeps_its_digits():
    # relative to the largest other probability, 1e-13, which 1 - p does not show in float32
    z, W = make(9, 4, 30.0, n=1)
    found, expected = (x.clone().requires_grad_() for x in (z, z.double()))
    ManyClasses(found, None).total(W, torch.ones(1, 1), 1.0).backward()
    class_by_class(expected, W).sum().backward()
    assert_close(found.grad.double(), expected.grad, rtol=1e-5, atol=0)


def test_gradients_in_half_precision_are_rounded_once():
    z, W = (x.bfloat16().requires_grad_() for x in make(50257, 6, 5.0))
    value = ManyClasses(z, None).total(W, torch.ones(len(z), 1), 1.0)
    assert value.dtype == torch.float32
    exact = [x.detach().double().requires_grad_() for x in (z, W)]
    expected = torch.autograd.grad(class_by_class(*exact).sum(), exact)
    for found, truth in zip(torch.autograd.grad(value, (z, W)), expected, strict=True):
        assert found.dtype == torch.bfloat16
        assert (found.double() - truth).norm() <= 5e-3 * truth.norm()


def test_autocast_does_not_reach_the_sums():
    z, W = make(5000, 6, 3.0)
    expected = ManyClasses(z, None).trace(Factor(W))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close(ManyClasses(z, None).trace(Factor(W)), expected, rtol=0, atol=0)


def test_classes_that_are_masked_out():
    z, W = make(9, 4, 0.0)
    z[:, 3:] = -torch.inf
    assert_close(ManyClasses(z, None)(W).double(), class_by_class(z[:, :3], W[:3]),
                 rtol=1e-4, atol=0)  # fmt: skip
    z[:, 1:] = -torch.inf  # the others have no probability at all
    assert (ManyClasses(z, None)(W) == 0).all()
