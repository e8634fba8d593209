r"""Layers as linear maps of their weight matrix.

A layer with weight sharing applies one matrix ``W`` to many vectors of each sample: a
convolution to the patches of an image, a linear layer to the tokens of a sequence. With
``P`` positions, ``z_ip = W phi_ip + b``, and arrays in the layout all measures use:

============  ================  =========================================================
name          shape             meaning
============  ================  =========================================================
``weight``    ``(d, m)``        one row per output channel, ``m`` inputs of each of them
``features``  layer's own       what the layer receives, as it receives it
``rows``      ``(n, d, P)``     something of the shape of the layer's output
``matrices``  ``(n, d, m)``     a change of the weight matrix for each sample by itself
============  ================  =========================================================

A `LayerMap` has the map ``V -> V phi`` and its transpose ``g -> sum_p g_p phi_p^T``, and
that is all that curvature in the weight of any layer needs. With groups, a row of ``W``
sees the patches of its own group only.
"""

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["MAPS", "LayerMap", "chosen", "layer_map"]

# numbers of patches that are copied at a time
_PATCHES = 2**22


class LayerMap:
    """A layer seen as a linear map of its weight matrix.

    Parameters
    ----------
    layer : nn.Module
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    @property
    def matrix(self) -> Tensor:
        """The weight as a matrix of shape (d, m), with its graph."""
        weight: Tensor = self.layer.weight
        return weight

    @property
    def weight(self) -> Tensor:
        """The same, detached."""
        return self.matrix.detach()

    @property
    def groups(self) -> int:
        """How many blocks of rows see patches of their own."""
        return 1

    @property
    def n_offsets(self) -> int:
        """How many columns read the same input channel."""
        return 1

    def planes(self, features: Tensor, channels: Tensor | None, offset: int) -> Tensor:
        """Select what columns multiply: (n, groups, k, P).

        Of channels (n, k) for each sample, or of all. With an offset, columns are those that
        read the channels there.
        """
        raise NotImplementedError

    def to_rows(self, z: Tensor) -> Tensor:
        """Bring an array of the shape of the output into shape (n, d, P)."""
        raise NotImplementedError

    def from_rows(self, rows: Tensor, z: Tensor) -> Tensor:
        """Bring rows back into the shape of the output `z`."""
        raise NotImplementedError

    def apply(self, features: Tensor, matrices: Tensor) -> Tensor:
        """Apply matrices of shape (n, d, m) or (d, m) in place of the weight: rows."""
        raise NotImplementedError

    def transpose(self, features: Tensor, rows: Tensor) -> Tensor:
        """Map rows of shape (n, ..., d, P) to sums of ``g_p phi_p^T``: (n, ..., d, m)."""
        raise NotImplementedError

    def total(self, features: Tensor, rows: Tensor) -> Tensor:
        """Sum what `transpose` gives over samples: (d, m)."""
        return self.transpose(features, rows).sum(dim=0)

    def channels(self, features: Tensor) -> Tensor:
        """Arrange features as (n_values, c), one column for each input channel."""
        raise NotImplementedError

    def column_channels(self) -> Tensor:
        """Say for the columns of the weight matrix which channel they read: (m,) or (d, m)."""
        raise NotImplementedError

    def is_flat(self, features: Tensor) -> bool:
        """Whether each sample has one position."""
        return False


def chosen(features: Tensor, channels: Tensor | None) -> Tensor:
    """Select from features (n, c, ...) by channels (n, k), all by None."""
    if channels is None:
        return features
    rows = torch.arange(len(features), device=features.device)[:, None]
    found: Tensor = features[rows, channels]
    return found


class LinearMap(LayerMap):
    """`nn.Linear`, on (n, m) inputs or with positions on the axes in between."""

    def is_flat(self, features: Tensor) -> bool:
        """Whether each sample has one position."""
        return features.ndim == 2

    def to_rows(self, z: Tensor) -> Tensor:
        """Bring (n, ..., d) into shape (n, d, P)."""
        return z.reshape(len(z), -1, z.shape[-1]).transpose(1, 2)

    def from_rows(self, rows: Tensor, z: Tensor) -> Tensor:
        """Bring (n, d, P) into the shape of `z`."""
        return rows.transpose(1, 2).reshape(z.shape)

    def apply(self, features: Tensor, matrices: Tensor) -> Tensor:
        """Multiply every position with the matrix."""
        return matrices @ self.to_rows(features)

    def planes(self, features: Tensor, channels: Tensor | None, offset: int) -> Tensor:
        """Select some features of each sample at all positions."""
        return chosen(self.to_rows(features), channels)[:, None]

    def total(self, features: Tensor, rows: Tensor) -> Tensor:
        """Sum outer products over samples and positions."""
        return rows.transpose(0, 1).flatten(1) @ self.to_rows(features).transpose(1, 2).flatten(
            0, 1
        )

    def channels(self, features: Tensor) -> Tensor:
        """Arrange all positions below each other."""
        return features.reshape(-1, features.shape[-1])

    def column_channels(self) -> Tensor:
        """Column j reads feature j."""
        return torch.arange(self.layer.in_features, device=self.layer.weight.device)

    def transpose(self, features: Tensor, rows: Tensor) -> Tensor:
        """Sum outer products over positions."""
        phi = self.to_rows(features).transpose(1, 2)
        return rows @ (phi if rows.ndim == 3 else phi[:, None])


class ConvMap(LayerMap):
    """Convolutions and transposed convolutions with any stride, padding, dilation, groups."""

    @property
    def matrix(self) -> Tensor:
        """The weight as a matrix: rows are output channels, columns what each of them sees."""
        weight: Tensor = self.layer.weight
        if not self._transposed:
            return weight.flatten(1)
        groups, d = self.layer.groups, self.layer.out_channels
        columns = weight.reshape(groups, -1, d // groups, prod(weight.shape[2:]))
        return columns.transpose(1, 2).reshape(d, -1)

    @property
    def groups(self) -> int:
        """How many blocks of rows see patches of their own."""
        return int(self.layer.groups)

    @property
    def n_offsets(self) -> int:
        """How many columns read the same input channel: the size of the kernel."""
        return prod(self.layer.kernel_size)

    def planes(self, features: Tensor, channels: Tensor | None, offset: int) -> Tensor:
        """Select the entry of the patches at the offset, in some channels of each group."""
        n, groups, space = len(features), self.groups, features.shape[2:]
        grouped = features.reshape(n, groups, -1, *space).transpose(1, 2)
        some = chosen(grouped, channels)
        images = some.reshape(-1, 1, *space)
        if self._transposed:
            # a convolution with a kernel that is one at the offset
            kernel = features.new_zeros(self.n_offsets)
            kernel[offset] = 1
            kernel = kernel.reshape(1, 1, *self.layer.kernel_size)
            planes = self._convolve(self._padded(images), kernel, 1)
        else:
            planes = self._at(self._fully_padded(images), offset)
        return planes.reshape(n, some.shape[1], groups, -1).transpose(1, 2)

    @property
    def _transposed(self) -> bool:
        return bool(self.layer.transposed)

    def to_rows(self, z: Tensor) -> Tensor:
        """Flatten the positions."""
        return z.flatten(2)

    def from_rows(self, rows: Tensor, z: Tensor) -> Tensor:
        """Bring (n, d, P) into the shape of `z`."""
        return rows.reshape(z.shape)

    def apply(self, features: Tensor, matrices: Tensor) -> Tensor:
        """Convolve every sample with kernels of its own, as one grouped convolution."""
        layer, n = self.layer, len(features)
        x = self._padded(features)
        if matrices.ndim == 2:
            return self._convolve(x, self._kernels(matrices[None]), layer.groups).flatten(2)
        x = x.reshape(1, -1, *x.shape[2:])
        out = self._convolve(x, self._kernels(matrices), n * layer.groups)
        return out.reshape(n, layer.out_channels, -1)

    def transpose(self, features: Tensor, rows: Tensor) -> Tensor:
        """Sum outer products of output channels and patches over positions."""
        if not self._transposed:
            return self._transpose_by_patches(features, rows)
        n, d, m = len(features), *self.weight.shape
        many = rows.reshape(n, -1, *rows.shape[-2:])
        matrices = features.new_zeros(n, d, m).requires_grad_()
        with torch.enable_grad():
            out = self.apply(features, matrices)
        found = [
            torch.autograd.grad(out, matrices, part, retain_graph=True)[0]
            for part in many.unbind(dim=1)
        ]
        return torch.stack(found, dim=1).reshape(*rows.shape[:-2], d, m)

    def channels(self, features: Tensor) -> Tensor:
        """Arrange all positions below each other."""
        return features.transpose(0, 1).flatten(1).T

    def column_channels(self) -> Tensor:
        """Every column reads one input channel; with groups, each row its own group's."""
        layer = self.layer
        size = prod(layer.weight.shape[2:])
        within = torch.arange(layer.in_channels // layer.groups).repeat_interleave(size)
        group = torch.arange(layer.out_channels) // (layer.out_channels // layer.groups)
        at = within + group[:, None] * (layer.in_channels // layer.groups)
        return (at if layer.groups > 1 else within).to(layer.weight.device)

    def _transpose_by_patches(self, features: Tensor, rows: Tensor) -> Tensor:
        groups, n_axes = self.layer.groups, len(self.layer.kernel_size)
        patches = self._patches(features)
        within = tuple(range(2 + n_axes, 2 + 2 * n_axes))
        patches = patches.permute(0, 1, *within, *range(2, 2 + n_axes))
        found = []
        # some samples at a time: copies of patches are large, and fastest in the cache
        size = max(1, _PATCHES // max(1, patches[:1].numel()))
        for some, many in zip(torch.split(patches, size), torch.split(rows, size), strict=True):
            n = len(some)
            columns = some.reshape(n, groups, -1, rows.shape[-1]).transpose(2, 3)
            grouped = many.reshape(n, -1, groups, rows.shape[-2] // groups, rows.shape[-1])
            sums = grouped @ columns[:, None]
            found.append(sums.reshape(*many.shape[:-1], sums.shape[-1]))
        return torch.cat(found)

    def _patches(self, features: Tensor) -> Tensor:
        """View all patches, without a copy: (n, c, positions ..., kernel ...)."""
        x = self._fully_padded(features)
        for axis, (size, stride, dilation) in enumerate(self._axes()):
            x = x.unfold(2 + axis, dilation * (size - 1) + 1, stride)[..., ::dilation]
        return x

    def _at(self, x: Tensor, offset: int) -> Tensor:
        """View the same at one place in the kernel: (n, c, positions ...)."""
        steps: list[slice] = []
        where = np.unravel_index(offset, self.layer.kernel_size)
        for i, length, (size, stride, dilation) in zip(
            where, x.shape[2:], self._axes(), strict=True
        ):
            count = (length - dilation * (size - 1) - 1) // stride + 1
            first = int(i) * dilation
            steps.append(slice(first, first + (count - 1) * stride + 1, stride))
        return x[:, :, *steps]

    def _axes(self) -> Iterator[tuple[int, int, int]]:
        layer = self.layer
        return zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)

    def _fully_padded(self, features: Tensor) -> Tensor:
        layer = self.layer
        x = self._padded(features)
        if layer.padding_mode != "zeros" or layer.padding == "valid":
            return x
        if layer.padding == "same":
            return self._pad_same(x)
        if not any(layer.padding):  # which `F.pad` would copy
            return x
        return F.pad(x, [p for one in reversed(layer.padding) for p in (one, one)])

    def _pad_same(self, x: Tensor) -> Tensor:
        return F.pad(x, self.layer._reversed_padding_repeated_twice)

    def _padded(self, x: Tensor) -> Tensor:
        if self.layer.padding_mode == "zeros":
            return x
        return F.pad(x, self.layer._reversed_padding_repeated_twice, mode=self.layer.padding_mode)

    def _kernels(self, matrices: Tensor) -> Tensor:
        """Matrices of shape (n, d, m) as the kernels of n convolutions side by side."""
        shape = self.layer.weight.shape
        if not self._transposed:
            return matrices.reshape(-1, *shape[1:])
        groups, d = self.layer.groups, self.layer.out_channels
        parts = matrices.reshape(len(matrices), groups, d // groups, -1, prod(shape[2:]))
        return parts.transpose(2, 3).reshape(-1, *shape[1:])

    def _convolve(self, x: Tensor, kernels: Tensor, groups: int) -> Tensor:
        layer = self.layer
        n_axes = layer.weight.ndim - 2
        padding = layer.padding if layer.padding_mode == "zeros" else 0
        if self._transposed:
            transposed = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[n_axes - 1]
            return transposed(
                x,
                kernels,
                None,
                layer.stride,
                padding,
                layer.output_padding,
                groups,
                layer.dilation,
            )
        convolve = (F.conv1d, F.conv2d, F.conv3d)[n_axes - 1]
        return convolve(x, kernels, None, layer.stride, padding, layer.dilation, groups)


MAPS: dict[type[nn.Module], Callable[[Any], LayerMap]] = {
    nn.Linear: LinearMap,
    nn.Conv1d: ConvMap,
    nn.Conv2d: ConvMap,
    nn.Conv3d: ConvMap,
    nn.ConvTranspose1d: ConvMap,
    nn.ConvTranspose2d: ConvMap,
    nn.ConvTranspose3d: ConvMap,
}


def layer_map(layer: nn.Module) -> LayerMap:
    """See a layer as a linear map of its weight matrix.

    Parameters
    ----------
    layer : nn.Module

    Returns
    -------
    LayerMap

    Raises
    ------
    TypeError
        If it is of another kind; lists the kinds that can be measured.

    Examples
    --------
    >>> layer_map(nn.Conv2d(3, 8, 5)).weight.shape
    torch.Size([8, 75])
    """
    for kind, make in MAPS.items():
        if isinstance(layer, kind):
            return make(layer)
    raise TypeError(
        f"flatness is not defined at a {type(layer).__name__}: its output is not a matrix times "
        f"its input. Layers that can be measured: {[kind.__name__ for kind in MAPS]}."
    )
