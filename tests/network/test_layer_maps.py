"""Layers as linear maps of their weight matrix, against the layers themselves."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from relflat_sk._network.layers import layer_map
from tests.hugging_face import conv1d

LAYERS = {
    "linear": (lambda: nn.Linear(5, 3), (5,)),
    "linear on tokens": (lambda: nn.Linear(5, 3), (4, 5)),
    "linear on a grid": (lambda: nn.Linear(5, 3), (2, 4, 5)),
    "gpt2": (lambda: conv1d(5, 3), (5,)),
    "gpt2 on tokens": (lambda: conv1d(5, 3), (4, 5)),
    "conv1d": (lambda: nn.Conv1d(2, 4, 3, stride=2, padding=1), (2, 9)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3), (3, 6, 7)),
    "conv2d of few positions": (lambda: nn.Conv2d(2, 12, 3, padding=1, stride=2), (2, 5, 5)),
    "conv2d of single pixels": (lambda: nn.Conv2d(3, 4, 1), (3, 6, 7)),
    "conv2d stride, padding, dilation": (
        lambda: nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
        (3, 6, 7),
    ),
    "conv2d groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, bias=False), (4, 5, 5)),
    "conv2d depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4), (4, 5, 5)),
    "conv2d same": (lambda: nn.Conv2d(2, 3, (3, 5), padding="same"), (2, 6, 6)),
    "conv2d valid": (lambda: nn.Conv2d(2, 3, 4, padding="valid"), (2, 6, 6)),
    "conv2d reflect": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 6, 6)),
    "conv2d circular": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (2, 6, 6)),
    "conv3d": (lambda: nn.Conv3d(2, 4, 2, stride=2, padding=1, groups=2), (2, 4, 5, 4)),
    "transposed 1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, groups=2), (4, 5)),
    "transposed 2d": (
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, dilation=2),
        (4, 5, 4),
    ),
    "transposed 3d": (lambda: nn.ConvTranspose3d(2, 4, 2, groups=2), (2, 3, 3, 3)),
}


@pytest.fixture(params=LAYERS)
def case(request):
    torch.manual_seed(0)
    make, shape = LAYERS[request.param]
    return layer_map(make().double()), torch.randn(5, *shape).double()


def test_apply_is_the_layer_without_bias(case):
    linear_map, features = case
    layer = linear_map.layer
    z = layer(features)
    zero = layer(0 * features)
    d, m = linear_map.weight.shape
    assert d * m == layer.weight.numel()
    assert d == linear_map.n_outputs
    assert m == linear_map.n_inputs * linear_map.n_offsets // linear_map.groups
    rows = linear_map.to_rows(z - zero)
    assert rows.shape[:2] == (5, d)
    assert_close(linear_map.apply(features, linear_map.weight), rows)
    assert_close(linear_map.apply(features, linear_map.weight.expand(5, d, m)), rows)
    assert_close(linear_map.from_rows(rows, z), z - zero)


def test_samples_may_have_matrices_of_their_own(case):
    linear_map, features = case
    matrices = torch.randn(5, *linear_map.weight.shape).double()
    rows = linear_map.apply(features, matrices)
    for i in range(5):
        assert_close(rows[i], linear_map.apply(features[i : i + 1], matrices[i])[0])


def test_samples_may_have_signs_of_their_own(case):
    linear_map, features = case
    d, m = linear_map.weight.shape
    left, right = torch.randn(d, 2).double(), torch.randn(2, m).double()
    outer, inner = torch.randn(5, 2).double(), torch.randn(5, m).double()
    rows = linear_map.apply_signed(features, left, outer, right, inner)
    matrices = torch.stack([
        left @ s.diag() @ right @ t.diag() for s, t in zip(outer, inner, strict=True)
    ])
    assert_close(rows, linear_map.apply(features, matrices))


def test_transpose_is_the_transpose(case):
    linear_map, features = case
    matrices = torch.randn(5, *linear_map.weight.shape).double()
    rows = linear_map.apply(features, matrices)
    g = torch.randn(5, 3, *rows.shape[1:]).double()
    back = linear_map.transpose(features, g)
    assert back.shape == (5, 3, *linear_map.weight.shape)
    assert_close(
        torch.einsum("ncdm,ndm->nc", back, matrices), torch.einsum("ncdp,ndp->nc", g, rows)
    )
    assert_close(linear_map.transpose(features, g[:, 1]), back[:, 1])
    assert_close(linear_map.total(features, g[:, 1]), back[:, 1].sum(dim=0))


def test_planes_are_the_numbers_that_columns_multiply(case):
    linear_map, features = case
    d, m = linear_map.weight.shape
    groups, n_channels = linear_map.groups, m // linear_map.n_offsets
    channels = torch.randint(n_channels, (5, 2))
    everything = torch.arange(n_channels).expand(5, -1)
    for offset in {0, linear_map.n_offsets // 2, linear_map.n_offsets - 1}:
        some = linear_map.planes(features, channels, offset)
        for given, found in [
            (channels, some),
            (everything, linear_map.planes(features, None, offset)),
        ]:
            for k in range(given.shape[1]):
                ones = torch.zeros(5, d, m).double()
                ones[torch.arange(5), :, given[:, k] * linear_map.n_offsets + offset] = 1
                expected = linear_map.apply(features, ones)  # the same in all rows of a group
                assert_close(found[:, :, k].repeat_interleave(d // groups, dim=1), expected)


def test_columns_read_their_channels(case):
    linear_map, features = case
    factors = torch.rand(linear_map.n_inputs).double()
    shape = (-1,) if linear_map.channels_last else (-1, *[1] * (features.ndim - 2))
    scaled = linear_map.apply(features * factors.view(shape), linear_map.weight)
    columns = factors[linear_map.column_channels()]
    assert_close(linear_map.apply(features, linear_map.weight * columns), scaled)
