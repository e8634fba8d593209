"""The primitive in its closed forms, against dense matrices B_i, and formulas over arrays."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from relflat_sk import _numerics
from relflat_sk._losses.curvature import (
    CrossEntropy,
    Diagonal,
    Softmax,
    find_array_loss,
)
from relflat_sk._losses.many_classes import ManyClasses


def dense_softmax(z, scale=None):
    p = z.softmax(1)
    B = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    return B if scale is None else B * scale[:, None, None]


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).double()


Z, SCALE = numbers(7, 5), numbers(7).abs()


def test_products_of_the_root_with_signs_are_exact_between_two_classes():
    # so one draw of a penalty is enough
    curvature, expected = Softmax(Z[:, :2]), dense_softmax(Z[:, :2]).diagonal(dim1=1, dim2=2)
    for signs in torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0]]).double():
        square = curvature.root_product(signs.expand(7, 2)) ** 2
        assert_close(square, expected, rtol=1e-12, atol=0)


def test_roots_have_a_finite_slope_where_the_curvature_is_zero():
    z = torch.tensor([[0.0, -2000.0, 3.0]], dtype=torch.float64, requires_grad=True)
    for curvature in (Softmax(z), Diagonal(z.square())):
        (slope,) = torch.autograd.grad(curvature.root_product(torch.ones(1, 3).double()).sum(), z)
        assert slope.isfinite().all()


@pytest.mark.parametrize("gap", [40.0, 300.0, 700.0])
def test_nearly_one_hot_probabilities_keep_their_digits(gap):
    # p = (1, e, e^2-ish): to first order B = e (u u^T) with u = e_0 - e_1 for the second class
    close = partial(assert_close, rtol=1e-9, atol=0)
    curvature = Softmax(torch.tensor([[gap, 0.0, -2000.0]], dtype=torch.float64))
    e = torch.tensor(-gap, dtype=torch.float64).exp()
    F = torch.tensor([[1.0], [4.0], [2.0]], dtype=torch.float64)
    close(curvature(F), 9 * e.reshape(1, 1))
    close(curvature.total(F.expand(3, 4), torch.tensor([[2.0]]).double(), 1.0), 16 * 9 * e)
    close(curvature.diagonal()[:, :2], e.expand(1, 2))
    root = curvature.root()[0]
    close((root @ root.T)[:2, :2], e * torch.tensor([[1.0, -1], [-1, 1]]).double())


@pytest.fixture(params=[(Softmax, 0), (ManyClasses, 7), (ManyClasses, 2**20)], ids=str)
def kind(request, monkeypatch):
    kind, rows = request.param
    monkeypatch.setattr("relflat_sk._losses.curvature._ROWS", {False: rows, True: rows})
    return kind


@pytest.mark.parametrize("shape", [(3, 6), (40, 50)], ids=["few numbers", "many"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("frozen", [(), (1,), (2,), (0, 1)])
def test_totals_can_be_differentiated_twice(kind, weighted, frozen, shape):
    d = shape[0]
    shapes = (4, d), (4, 5), shape
    inputs = [
        torch.randn(*s, dtype=float, requires_grad=k not in frozen) for k, s in enumerate(shapes)
    ]
    weights = torch.rand(4).double() if weighted else None
    each = 0.7 * weights if weighted else 0.7

    def total(z, features, F):
        return kind(z, weights).total(F, features, each)

    z, features, F = inputs
    forms = torch.einsum("sk,nst,tk->n", F, dense_softmax(z, weights), F)
    expected = (each * forms * features.square().sum(dim=1)).sum()
    assert_close(total(*inputs), expected)
    assert torch.autograd.gradcheck(total, inputs, fast_mode=d > 3)
    assert torch.autograd.gradgradcheck(total, inputs, fast_mode=d > 3)


def test_logits_may_depend_on_the_features_and_the_factor(kind):
    features, F = numbers(4, 5).requires_grad_(), numbers(3, 5).requires_grad_()

    def total(features, F):
        return kind(features @ F.T, None).total(F, features, 0.7 * SCALE[:4])

    assert torch.autograd.gradcheck(total, [features, F])
    assert torch.autograd.gradgradcheck(total, [features, F])
    once = torch.autograd.grad(total(features, F), [features, F])
    again = torch.autograd.grad(total(features, F), [features, F], create_graph=True)
    assert_close(again, once)


@pytest.mark.parametrize("d", [10, 100])
def test_totals_ignore_the_common_part_of_the_rows_of_the_weight(kind, d):
    z, features, F = torch.randn(20, d), torch.randn(20, 6), torch.randn(d, 200)

    def total_and_slope(F, dtype):
        F = F.to(dtype).requires_grad_()
        total = kind(z.to(dtype), None).total(F, features.to(dtype), 1.0)
        return total.detach(), *torch.autograd.grad(total, F)

    far = F + 300 * torch.randn(200)  # in float32 it has lost two to three of seven digits
    for found, expected in zip(
        total_and_slope(far, torch.float32), total_and_slope(far, torch.float64), strict=True
    ):
        assert_close(found.double(), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


N, D, M, K = 6, 4, 5, 3


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("few", [2**16, 0], ids=["few classes", "many classes"])
def test_confident_predictions_are_exact_in_float32(few, library, monkeypatch):
    """A net whose weights are large is sure of its classes: rounding must not seem to be curved."""
    monkeypatch.setattr(_numerics, "FEW", few)
    weight = 1e5 * torch.randn(K, D, M, generator=torch.Generator().manual_seed(0)).double()
    p = torch.zeros(K, N, D).double()
    p[..., 1] = 1e-20
    p[..., 0] = 1.0
    arrays = [p, torch.ones(K, N, M).double(), weight, torch.ones(K, N, 1).double()]
    exact = CrossEntropy().trace_term(*arrays)
    assert (exact.value < 1e-5).all()
    narrow = [one.float().numpy() if library == "numpy" else one.float() for one in arrays]
    for one, other in zip(CrossEntropy().trace_term(*narrow), exact, strict=True):
        assert_close(torch.as_tensor(one).double(), other, rtol=1e-4, atol=1e-30)
    certain = np.eye(D)[None], np.ones((1, D, M)), weight[:1].numpy(), 1.0
    term = CrossEntropy().trace_term(*certain)
    assert not term.value.any()
    assert not term.weight.any()


@pytest.mark.parametrize(
    ("criterion", "target"),
    [
        (nn.CrossEntropyLoss(reduction="sum"), torch.tensor([0, 1])),
        (nn.CrossEntropyLoss(weight=torch.ones(2), label_smoothing=0.1), torch.tensor([0, 1])),
        (nn.CrossEntropyLoss(), torch.tensor([0, -100])),
        (nn.CrossEntropyLoss(), torch.ones(2, 2)),
        (nn.BCEWithLogitsLoss(pos_weight=torch.ones(2)), torch.ones(2, 2)),
        (nn.MSELoss(), torch.ones(2)),
        (nn.L1Loss(), torch.ones(2, 2)),
    ],
    ids=str,
)
def test_other_criteria_have_no_formulas(criterion, target):
    assert find_array_loss(criterion, target, 2) is None
