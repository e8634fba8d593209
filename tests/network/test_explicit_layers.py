"""Layers within `ExplicitLayers`: what they compute, and their derivatives, are torch's."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import grad
from torch.autograd.graph import GradientEdge
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from relflat_sk._network import ExplicitLayers, find_convolutions, find_norms

CONVOLUTIONS = {
    "plain": lambda: nn.Conv2d(4, 6, 3),
    "padding": lambda: nn.Conv2d(4, 6, 3, padding=1, bias=False),
    "stride": lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1),
    "stride over kernel": lambda: nn.Conv2d(4, 6, 1, stride=3, bias=False),
    "uneven": lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 3), padding=(2, 0), dilation=(1, 2)),
    "groups": lambda: nn.Conv2d(4, 6, 3, groups=2, stride=2),
    "depthwise": lambda: nn.Conv2d(4, 8, 5, groups=4, dilation=2, padding=3),
    "one axis": lambda: nn.Conv1d(4, 6, 3, stride=2),
    "three axes": lambda: nn.Conv3d(4, 2, 2, stride=2, padding=1),
}


def make(name, size=8):
    torch.manual_seed(0)
    layer = CONVOLUTIONS[name]().double()
    z = torch.randn(3, 4, *[size] * (layer.weight.ndim - 2)).double().requires_grad_()
    return layer, z


class ConvolutionSizes(TorchDispatchMode):
    """Note the largest kernel among the convolutions that run."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in {
            torch.ops.aten.convolution.default,
            torch.ops.aten.convolution_backward.default,
        }:
            kernel = args[1] if func is torch.ops.aten.convolution.default else args[2]
            self.largest = max(self.largest, kernel[0, 0].numel())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("size", [8, 9])
def test_convolutions_have_torchs_derivatives(name, size):
    layer, z = make(name, size)
    found = []
    for layers in ([], find_convolutions(layer)):
        torch.manual_seed(1)
        with ExplicitLayers(layers) as explicit, ConvolutionSizes() as sizes:
            x = z * 1
            out = layer(x)
            vector = torch.randn_like(out).requires_grad_()
            edges = [GradientEdge(x.grad_fn, 0)]
            first = grad(out, [z, *layer.parameters()], vector.detach(), retain_graph=True)
            (pulled,) = explicit.pull_back([out], edges, [vector], linear=True)
            second = grad(pulled.square().sum(), [vector, layer.weight])
            slope = grad(out.square().sum(), layer.weight, create_graph=True)[0]
            third = grad(slope.square().sum(), [z, *layer.parameters()])
        found.append([out, *first, pulled, *second, slope, *third])
        if layers:
            assert out.grad_fn.name() == "_ConvolutionBackward"
    assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)
    assert "forward" not in vars(layer)
    assert sizes.largest > 0


def test_the_second_derivative_of_a_convolution_needs_no_other_kernels():
    largest = []
    for find in (lambda layer: [], find_convolutions):
        layer, z = make("padding")
        with ExplicitLayers(find(layer)) as explicit:
            x = z * 1
            out = layer(x)
            with ConvolutionSizes() as sizes:
                (pulled,) = explicit.pull_back(
                    [out], [GradientEdge(x.grad_fn, 0)], [out.detach()], linear=True
                )
                pulled.square().sum().backward()
        largest.append(sizes.largest)
    assert largest == [64, 9]  # torch's own way takes kernels of the images' size


def test_weights_get_no_gradient_while_vectors_are_pulled_back():
    layer, z = make("plain")
    with ExplicitLayers(find_convolutions(layer)) as explicit:
        out = layer(z * 1)
    used = []

    class Backward(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            used.append(func)
            return func(*args, **(kwargs or {}))

    edge = GradientEdge(out.grad_fn.next_functions[0][0], 0)
    with Backward():
        explicit.pull_back([out], [edge], [torch.ones_like(out)], linear=True)
    assert torch.ops.aten.convolution.default in used
    assert torch.ops.aten.convolution_backward.default not in used


class Standardised(nn.Conv2d):
    def forward(self, x):
        return nn.functional.conv2d(x, self.weight - self.weight.mean(), self.bias)


class ChannelsFirst(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.transpose(1, -1)).transpose(1, -1)


@pytest.mark.parametrize(
    "layer",
    [
        Standardised(2, 3, 3), ChannelsFirst(3), nn.ConvTranspose2d(2, 3, 3),
        nn.Conv2d(2, 3, 3, padding="same"), nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"),
    ],
    ids=["convolution", "norm", "transposed", "same", "reflect"],
)  # fmt: skip
def test_layers_with_a_way_of_their_own_are_left_alone(layer):
    assert not find_convolutions(layer)
    assert not find_norms(layer)


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
    with ExplicitLayers(find_norms(norm)) as explicit:
        x = z * 1
        out = norm(x)
    (pulled,) = explicit.pull_back([out], [GradientEdge(x.grad_fn, 0)], [vector], linear=True)
    assert_close(pulled, grad(fixed(z), z, vector)[0], rtol=1e-9, atol=1e-9)
    # and the result knows that the statistics depend on the input
    (moved,) = grad((pulled * vector).sum(), z)
    assert moved.abs().max() > 1e-3


@pytest.mark.parametrize("frozen", [False, True])
def test_the_gradient_of_a_batch_norm_is_torchs(frozen):
    torch.manual_seed(0)
    norm, z = nn.BatchNorm2d(4), torch.randn(5, 4, 3, 3).requires_grad_()
    norm.requires_grad_(not frozen)
    wanted = [z] if frozen else [z, norm.weight, norm.bias]
    vector = torch.randn_like(z)
    expected = grad(norm(z), wanted, vector)
    with ExplicitLayers(find_norms(norm)):
        out = norm(z)
    assert_close(grad(out, wanted, vector), expected)
