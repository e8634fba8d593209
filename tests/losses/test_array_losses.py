"""Formulas over arrays are those of the table of losses, differentiated by autograd."""

import numpy as np
import pytest
import torch
from torch import nn

from relflat_sk import _numerics
from relflat_sk._losses.curvature import CrossEntropy, find_array_loss
from relflat_sk._losses.loss import Loss

N, D, M, K = 6, 4, 5, 3
CRITERIA = {
    "classes": (nn.CrossEntropyLoss(), lambda: torch.randint(D, (K, N))),
    "smoothed": (nn.CrossEntropyLoss(label_smoothing=0.2), lambda: torch.randint(D, (K, N))),
    "numbers": (nn.MSELoss(), lambda: torch.randn(K, N, D).double()),
    "several labels": (nn.BCEWithLogitsLoss(), lambda: torch.rand(K, N, D).double()),
}


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("scale", [1.0, 30.0], ids=["unsure", "confident"])
@pytest.mark.parametrize("name", CRITERIA)
def test_losses_and_trace_terms_have_the_gradients_of_autograd(name, scale, library):
    criterion, make = CRITERIA[name]
    target = make()
    loss = find_array_loss(criterion, target[0], D)
    phi, weight = torch.randn(K, N, M).double(), torch.randn(K, D, M).double()
    z = scale * torch.randn(K, N, D).double()
    shares = torch.rand(K, N).double()
    shares /= shares.sum(1, keepdim=True)
    factors = torch.rand(K, N).double()
    leaves = [one.requires_grad_() for one in (z, phi, weight)]

    expected, constant, term = [], [], []
    for k in range(K):
        each = Loss(criterion).losses(z[k], target[k])
        expected.append((each * shares[k]).sum() / loss.divisor(D))
        mean = (shares[k] @ z[k]).expand(N, D)
        constant.append((Loss(criterion).losses(mean, target[k]) * shares[k]).sum())
        curvature = Loss(criterion).closed_form("identity", z[k], None)
        term.append((curvature(weight[k]).sum(1) * phi[k].square().sum(1) * factors[k]).sum())
    slopes = torch.autograd.grad(sum(expected), z)[0]
    of_term = torch.autograd.grad(sum(term), leaves, materialize_grads=True)

    wanted = loss.targets(target, D, z)
    arrays = [one.detach() for one in (z, wanted, shares, phi, weight, factors)]
    if library == "numpy":
        arrays = [one.numpy() for one in arrays]
    z_, wanted, shares_, phi_, weight_, factors_ = arrays
    found = loss.slopes(z_, wanted, shares_)
    trace = loss.trace_term(found.p, phi_, weight_, factors_[..., None])
    of_constant = loss.of_constant(z_, wanted, shares_)
    pairs = [
        (found.value, torch.stack(expected)),
        (found.z, slopes),
        (of_constant, torch.stack(constant) / loss.divisor(D)),
        (trace.value, torch.stack(term)),
        (trace.z, of_term[0]),
        (trace.of_phi * phi_, of_term[1]),
        (trace.weight, of_term[2]),
    ]
    for one, other in pairs:
        assert isinstance(one, np.ndarray) is (library == "numpy")
        torch.testing.assert_close(torch.as_tensor(one), other.detach(), rtol=1e-9, atol=1e-12)


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
        torch.testing.assert_close(torch.as_tensor(one).double(), other, rtol=1e-4, atol=1e-30)
    certain = np.eye(D)[None], np.ones((1, D, M)), weight[:1].numpy(), 1.0
    term = CrossEntropy().trace_term(*certain)
    assert not term.value.any()
    assert not term.weight.any()


def test_a_single_sample_has_no_constant_to_compare_with():
    loss = find_array_loss(nn.MSELoss(), torch.ones(1, 2), 2)
    ones = np.ones((1, 1, 2))
    assert loss.of_constant(ones, ones, np.ones((1, 1))).tolist() == [np.inf]


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
