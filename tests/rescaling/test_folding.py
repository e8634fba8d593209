"""Layers as affine maps with batch norm folded in, against torch's own fusion."""

import pytest
import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from relflat_sk._losses.loss import Loss
from relflat_sk._network.batches import make_batches
from relflat_sk._network.borrowing import borrowed, has_own_forward
from relflat_sk._network.network import Network
from relflat_sk._rescaling.layers import fold_layers

X2 = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).double()
X4 = torch.randn(3, 2, 7, 6, generator=torch.Generator().manual_seed(0)).double()


def folded(module, X):
    network = Network(module, Loss(nn.CrossEntropyLoss()), make_batches(X))
    with borrowed(module):
        return fold_layers(network)


def used(module):
    """In evaluation mode, batch norms with statistics of their own."""
    for m in module.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats:
            m.running_mean.normal_()
            m.running_var.uniform_(0.5, 2)
            if m.weight is not None:
                nn.init.normal_(m.weight)
                nn.init.normal_(m.bias)
    return module.double().eval()


@pytest.mark.parametrize(
    ("layer", "norm", "X", "fuse"),
    [
        (lambda: nn.Linear(4, 5), lambda: nn.BatchNorm1d(5), X2, fuse_linear_bn_eval),
        (
            lambda: nn.Linear(4, 5, bias=False),
            lambda: nn.BatchNorm1d(5, eps=0.1),
            X2,
            fuse_linear_bn_eval,
        ),
        (lambda: nn.Conv2d(2, 4, 3, groups=2), lambda: nn.BatchNorm2d(4), X4, fuse_conv_bn_eval),
        (
            lambda: nn.Conv2d(2, 3, 2, bias=False),
            lambda: nn.BatchNorm2d(3, affine=False),
            X4,
            fuse_conv_bn_eval,
        ),
        (
            lambda: nn.ConvTranspose2d(2, 3, 3, stride=2),
            lambda: nn.BatchNorm2d(3),
            X4,
            lambda layer, norm: fuse_conv_bn_eval(layer, norm, transpose=True),
        ),
    ],
    ids=["linear", "linear without bias", "groups", "without affine", "transposed"],
)
def test_folds_as_torch_does(layer, norm, X, fuse):
    net = used(nn.Sequential(layer(), norm(), nn.ReLU()))
    layer, norm = net[0], net[1]
    (found,) = folded(net, X)
    (expected,) = folded(fuse(layer, norm), X)
    torch.testing.assert_close(found.weight, expected.weight)
    torch.testing.assert_close(found.bias, expected.bias)
    assert (found.name, found.norm) == ("0", "1")
    z = found.apply(X, found.weight) + found.spread_bias(found.bias)
    torch.testing.assert_close(z, norm(layer(X)))


def test_layers_come_in_the_order_of_their_calls():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.second = nn.Linear(3, 4)
            self.first = nn.Linear(4, 3, bias=False)
            self.unused = nn.Linear(2, 2)

        def forward(self, x):
            return self.second(self.first(self.second(self.first(x))))

    net = Backwards()
    layers = folded(net, X2)
    assert [layer.name for layer in layers] == ["first", "second", "first", "second"]
    assert [tuple(layer.output_shape) for layer in layers] == [(3,), (4,), (3,), (4,)]
    assert layers[0].bias is None
    assert layers[1].weight.dtype == torch.float64
    torch.testing.assert_close(layers[1].weight, net.second.weight.detach().double())


def test_computed_weights_are_those_in_use():
    net = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)).double()
    (layer,) = folded(net, X2)
    torch.testing.assert_close(layer.weight, net.weight.detach())


class Twice(nn.Module):
    """Layer, batch norm, and something else done with one of them."""

    def __init__(self, forward):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.ways = forward

    def forward(self, x):
        return self.ways(self, x)


class OwnForward(nn.Linear):
    def forward(self, x):
        return super().forward(x).tanh()


@pytest.mark.parametrize(
    ("build", "X", "message"),
    [
        (lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)), X2, "'0' .* follows 'input"),
        (
            lambda: nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.BatchNorm1d(2)),
            X2,
            "'2' cannot be folded .* it follows '_1', which is no layer with a weight matrix",
        ),
        (
            lambda: nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2, track_running_stats=False)),
            X2,
            "it has no running statistics",
        ),
        (
            lambda: Twice(lambda net, x: (h := net.layer(x)) + net.norm(h)),
            X2,
            "the output of layer 'layer' is also used elsewhere",
        ),
        (
            lambda: Twice(lambda net, x: net.layer(net.norm(net.layer(x)))),
            X2,
            "'norm' .* it or layer 'layer' is called more than once",
        ),
        (
            lambda: nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(7)),
            X4[:, 0],
            "batch norm '1' cannot be folded into layer '0': it acts on another axis",
        ),
        (
            lambda: Twice(lambda net, x: net.norm(net.layer(x)) if x.sum() > 9e9 else net.norm(x)),
            X2,
            "it is not known which layers these are: torch.fx cannot follow",
        ),
        (lambda: OwnForward(4, 2), X2, "'' is a OwnForward with a forward .* Use one of torch's"),
    ],
)
def test_refuses_layers_that_are_not_affine(build, X, message):
    net = used(build())
    with pytest.raises(ValueError, match=message):
        folded(net, X)
    assert not any(has_own_forward(m) for m in net.modules())
