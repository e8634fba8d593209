"""Layers as affine maps with batch norm folded in, against torch's own fusion."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from relflat_sk._network.borrowing import borrowed, has_own_forward
from relflat_sk._network.folding import fold_layers
from tests.cases import Net
from tests.measures.nets import CE, network

X2 = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).double()
X4 = torch.randn(3, 2, 7, 6, generator=torch.Generator().manual_seed(0)).double()


def folded(module, X):
    with borrowed(module):
        return fold_layers(network(module, CE, X))


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


FOLDED = {
    "linear": (nn.Linear(4, 5), nn.BatchNorm1d(5), X2, fuse_linear_bn_eval),
    "linear without bias": (
        nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5, eps=0.1), X2, fuse_linear_bn_eval,
    ),
    "groups": (nn.Conv2d(2, 4, 3, groups=2), nn.BatchNorm2d(4), X4, fuse_conv_bn_eval),
    "without affine": (
        nn.Conv2d(2, 3, 2, bias=False), nn.BatchNorm2d(3, affine=False), X4, fuse_conv_bn_eval,
    ),
    "transposed": (
        nn.ConvTranspose2d(2, 3, 3, stride=2), nn.BatchNorm2d(3), X4,
        partial(fuse_conv_bn_eval, transpose=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("layer", "norm", "X", "fuse"), FOLDED.values(), ids=FOLDED)
def test_folds_as_torch_does(layer, norm, X, fuse):
    net = used(nn.Sequential(layer, norm, nn.ReLU()))
    (found,) = folded(net, X)
    (expected,) = folded(fuse(layer, norm), X)
    torch.testing.assert_close(found.weight, expected.weight)
    torch.testing.assert_close(found.bias, expected.bias)
    assert (found.name, found.norm) == ("0", "1")
    z = found.apply(X, found.weight) + found.spread_bias(found.bias)
    torch.testing.assert_close(z, norm(layer(X)))


def test_layers_come_in_the_order_of_their_calls():
    net = Net(
        lambda net, x: net.second(net.first(net.second(net.first(x)))),
        second=nn.Linear(3, 4), first=nn.Linear(4, 3, bias=False), unused=nn.Linear(2, 2),
    )  # fmt: skip
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


def twice(forward):
    """Layer, batch norm, and something else done with one of them."""
    return Net(forward, layer=nn.Linear(4, 4), norm=nn.BatchNorm1d(4))


class OwnForward(nn.Linear):
    def forward(self, x):
        return super().forward(x).tanh()


def either(net, x):
    return net.norm(net.layer(x)) if x.sum() > 9e9 else net.norm(x)


UNTRACKED = nn.BatchNorm1d(2, track_running_stats=False)
LINEAR = nn.Linear(4, 2)
CHANNELS = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(7))


@pytest.mark.parametrize(
    ("net", "X", "message"),
    [
        (nn.Sequential(nn.BatchNorm1d(4), LINEAR), X2, "'0' .* does not follow a layer"),
        (
            nn.Sequential(LINEAR, nn.ReLU(), nn.BatchNorm1d(2)), X2,
            "'2' cannot be folded .* does not follow a layer with a weight matrix",
        ),
        (nn.Sequential(LINEAR, UNTRACKED), X2, "it has no running statistics"),
        (
            twice(lambda net, x: (h := net.layer(x)) + net.norm(h)), X2,
            "the output of layer 'layer' is also used elsewhere",
        ),
        (
            twice(lambda net, x: net.layer(net.norm(net.layer(x)))), X2,
            "'norm' .* it or layer 'layer' is called more than once",
        ),
        (CHANNELS, X4[:, 0], "batch norm '1' cannot be folded into layer '0': it acts on another"),
        (twice(either), X2, "'norm' .* does not follow a layer"),
        (OwnForward(4, 2), X2, "'' is a OwnForward with a forward .* Use one of torch's"),
    ],
)  # fmt: skip
def test_refuses_layers_that_are_not_affine(net, X, message):
    net = used(net)
    with pytest.raises(ValueError, match=message):
        folded(net, X)
    assert not any(has_own_forward(m) for m in net.modules())
