"""Normalisations within `ExplicitLayers`: what they compute, and their derivatives."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import grad
from torch.autograd.graph import GradientEdge
from torch.testing import assert_close

from relflat_sk._network.borrowing import ExplicitLayers, find_fused


class ChannelsFirst(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.transpose(1, -1)).transpose(1, -1)


def test_layers_with_a_way_of_their_own_are_left_alone():
    assert not find_fused(ChannelsFirst(3))
    assert not find_fused(nn.Conv2d(2, 3, 3))
    layer = nn.LayerNorm(3)
    assert find_fused(layer) == [layer]
    layer.forward = lambda x: x
    assert not find_fused(layer)


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("affine", [True, False])
def test_a_batch_norm_is_pulled_back_with_its_statistics_as_constants(axes, affine):
    torch.manual_seed(0)
    norm = (nn.BatchNorm1d if axes == 1 else nn.BatchNorm2d)(4, affine=affine).double()
    if affine:
        nn.init.normal_(norm.weight)
    z = torch.randn(5, 4, *[3] * axes).double().requires_grad_()
    fixed = copy.deepcopy(norm).eval()
    over = [axis for axis in range(z.ndim) if axis != 1]
    fixed.running_mean.copy_(z.detach().mean(over))
    fixed.running_var.copy_(z.detach().var(over, correction=0))
    vector = torch.randn_like(z)
    with ExplicitLayers(find_fused(norm)) as explicit:
        x = z * 1
        out = norm(x)
    assert "forward" not in vars(norm)
    (pulled,) = explicit.pull_back([out], [GradientEdge(x.grad_fn, 0)], [vector], linear=True)
    assert_close(pulled, grad(fixed(z), z, vector)[0], rtol=1e-9, atol=1e-9)
    # and the result knows that the statistics depend on the input
    (moved,) = grad((pulled * vector).sum(), z)
    assert moved.abs().max() > 1e-3


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm2d(4), nn.LayerNorm([3, 3]), nn.RMSNorm(3), nn.GroupNorm(2, 4),
     nn.InstanceNorm2d(4, affine=True)],
    ids=lambda norm: type(norm).__name__,
)  # fmt: skip
def test_the_gradient_of_a_normalisation_is_torchs(norm, frozen):
    torch.manual_seed(0)
    z = torch.randn(5, 4, 3, 3).requires_grad_()
    norm.requires_grad_(not frozen)
    wanted = [z] if frozen else [z, *norm.parameters()]
    vector = torch.randn_like(z)
    expected = grad(norm(z), wanted, vector)
    with ExplicitLayers(find_fused(norm)):
        out = norm(z)
    assert_close(grad(out, wanted, vector), expected)
