r"""Layers with a weight matrix: linear maps of it, which ones a network has, and their values.

A layer with weight sharing applies one matrix ``W`` to many vectors of each sample: a
convolution to the patches of an image, a linear layer to the tokens of a sequence. With
``P`` positions, ``z_ip = W phi_ip + b``, and arrays in the layout all measures use:

============  ================  =========================================================
name          shape             meaning
============  ================  =========================================================
``weight``    ``(d, m)``        one row per output channel, ``m`` inputs of each of them
``features``  layer's own       the layer's input, in the shape in which it arrives
``rows``      ``(n, d, P)``     an array of the shape of the layer's output, rearranged
``matrices``  ``(n, d, m)``     one change of the weight matrix for each sample
============  ================  =========================================================

A `LayerMap` has the map ``V -> V phi`` and its transpose ``g -> sum_p g_p phi_p^T``, all that
curvature in a weight needs. With groups, a row of ``W`` sees the patches of its own group.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy

from relflat_sk.exceptions import LayerNotFoundError

# numbers of the patches that are copied at a time
_PATCHES = 2**22


class LayerMap(ABC):
    """A layer as a linear map of its weight matrix; each kind of layer has a subclass.

    Parameters
    ----------
    layer : nn.Module
        The layer.
    weight : Tensor of shape (...), optional
        Its weight in one of its calls, if each read computes another one, as in spectral norm.

    Attributes
    ----------
    channels_last : bool
        Whether channels are on the last axis of inputs and outputs, with samples and positions
        before them. Otherwise, they are on axis 1.
    inputs_first : bool
        Whether the first axis of the weight is that of the inputs, instead of the outputs.
    n_inputs, n_outputs : int
        Numbers of input and output features, or channels.
    groups : int
        Number of blocks of rows, each of which is applied to patches of its own.
    n_offsets : int
        Number of columns that read the same input channel.
    """

    channels_last = False
    inputs_first = False
    n_inputs: int
    n_outputs: int
    groups = 1
    n_offsets = 1

    def __init__(self, layer: Any, weight: Tensor | None = None) -> None:
        self.layer = layer
        self._weight = weight

    @property
    def kernel(self) -> Tensor:
        """The weight in the shape that it has in the layer, with its graph."""
        return self.layer.weight if self._weight is None else self._weight

    @property
    def matrix(self) -> Tensor:
        """The weight as a matrix of shape (d, m), with its graph."""
        return self.kernel

    @property
    def weight(self) -> Tensor:
        """The weight as a matrix of shape (d, m), detached."""
        return self.matrix.detach()

    @abstractmethod
    def planes(self, features: Tensor, channels: Tensor | None, offset: int) -> Tensor:
        """Select what columns of the weight are multiplied with: (n, groups, k, P).

        They are the columns at one offset that read some channels (n, k), or all, of each group.
        """

    @abstractmethod
    def patches(self, features: Tensor) -> Iterator[Tensor]:
        """Copy ``phi_ip`` of some samples at a time: (n, groups, m, P)."""

    @abstractmethod
    def to_rows(self, z: Tensor) -> Tensor:
        """Rearrange an array of the shape of the output: (n, d, P)."""

    @abstractmethod
    def from_rows(self, rows: Tensor, z: Tensor) -> Tensor:
        """Undo `to_rows`; z has the shape of the output."""

    @abstractmethod
    def apply(self, features: Tensor, matrices: Tensor) -> Tensor:
        """Apply matrices, or one for all samples, in place of the weight, without bias: rows."""

    def apply_signed(
        self, features: Tensor, left: Tensor, outer: Tensor, right: Tensor, inner: Tensor
    ) -> Tensor:
        """Apply ``L diag(s_i) R diag(t_i)``, L (d, k), s (n, k), R (k, m), t (n, m): rows."""
        return self.apply(features, (left * outer[:, None]) @ (right * inner[:, None]))

    @abstractmethod
    def transpose(self, features: Tensor, rows: Tensor) -> Tensor:
        """Sum ``g_p phi_p^T`` over the positions of each sample, g (n, ..., d, P): matrices."""

    def total(self, features: Tensor, rows: Tensor) -> Tensor:
        """Sum ``g_p phi_p^T`` over positions and samples: (d, m)."""
        return self.transpose(features, rows).sum(dim=0)

    @abstractmethod
    def channels(self, features: Tensor) -> Tensor:
        """Arrange features in one column for each input channel: (n_values, c)."""

    @abstractmethod
    def column_channels(self) -> Tensor:
        """Return the input channel of each column: (m,), or (d, m) if rows read their group's."""

    def by_position(self, features: Tensor, z: Tensor) -> "tuple[LayerMap, Tensor, Tensor] | None":
        """Return the layer, inputs (n * P, m) and outputs of positions that share no inputs."""
        return None


def select_channels(features: Tensor, channels: Tensor | None) -> Tensor:
    """Select channels (n, k) of each sample in an array (n, c, ...)."""
    if channels is None:
        return features
    rows = torch.arange(len(features), device=features.device)[:, None]
    selected: Tensor = features[rows, channels]
    return selected


class LinearMap(LayerMap):
    """The map of `nn.Linear`, for inputs (n, m) or with positions on axes in between."""

    channels_last = True

    def __init__(self, layer: Any, weight: Tensor | None = None) -> None:
        super().__init__(layer, weight)
        self.n_inputs, self.n_outputs = layer.in_features, layer.out_features

    def to_rows(self, z: Tensor) -> Tensor:
        """Flatten the positions of (n, ..., d) and move them behind the channels."""
        return z.reshape(len(z), -1, z.shape[-1]).transpose(1, 2)

    def from_rows(self, rows: Tensor, z: Tensor) -> Tensor:
        """Undo `to_rows`."""
        return rows.transpose(1, 2).reshape(z.shape)

    def apply(self, features: Tensor, matrices: Tensor) -> Tensor:
        """Multiply every position with the matrix."""
        if matrices.ndim == 2:  # in one product, instead of one for each sample
            return self.to_rows(nn.functional.linear(features, matrices))
        return matrices @ self.to_rows(features)

    def apply_signed(
        self, features: Tensor, left: Tensor, outer: Tensor, right: Tensor, inner: Tensor
    ) -> Tensor:
        """Multiply every position with both matrices, without a matrix for each sample."""
        own = (len(features), *[1] * (features.ndim - 2), -1)
        between = (features * inner.reshape(own)) @ right.T
        return self.to_rows((between * outer.reshape(own)) @ left.T)

    def planes(self, features: Tensor, channels: Tensor | None, offset: int) -> Tensor:
        """Select features of each sample at all positions."""
        return select_channels(self.to_rows(features), channels)[:, None]

    def patches(self, features: Tensor) -> Iterator[Tensor]:
        """Return the vectors of all positions of some samples at a time."""
        size = max(1, _PATCHES // max(1, features[:1].numel()))
        yield from torch.split(self.to_rows(features)[:, None], size)

    def total(self, features: Tensor, rows: Tensor) -> Tensor:
        """Sum outer products over samples and positions."""
        return rows.transpose(0, 1).flatten(1) @ self.to_rows(features).transpose(1, 2).flatten(
            0, 1
        )

    def channels(self, features: Tensor) -> Tensor:
        """Arrange all positions of all samples below each other."""
        return features.reshape(-1, features.shape[-1])

    def column_channels(self) -> Tensor:
        """Return the numbers of the features: column j reads feature j."""
        return torch.arange(self.n_inputs, device=self.kernel.device)

    def by_position(self, features: Tensor, z: Tensor) -> tuple[LayerMap, Tensor, Tensor] | None:
        """Take tokens as samples."""
        return self, features.flatten(0, -2), z.flatten(0, -2)

    def transpose(self, features: Tensor, rows: Tensor) -> Tensor:
        """Sum outer products over positions."""
        phi = self.to_rows(features).transpose(1, 2)
        return rows @ (phi if rows.ndim == 3 else phi[:, None])


class TransposedLinearMap(LinearMap):
    """The map of a linear layer whose weight has shape (inputs, outputs)."""

    inputs_first = True

    def __init__(self, layer: Any, weight: Tensor | None = None) -> None:
        LayerMap.__init__(self, layer, weight)
        self.n_inputs, self.n_outputs = self.kernel.shape

    @property
    def matrix(self) -> Tensor:
        """The weight as a matrix of shape (outputs, inputs), with its graph."""
        return self.kernel.T


class PixelMap(LinearMap):
    """The map of a convolution whose kernel is one pixel, for pixels as samples."""

    channels_last = False

    def __init__(self, layer: Any, weight: Tensor | None = None) -> None:
        LayerMap.__init__(self, layer, weight)
        self.n_inputs, self.n_outputs = layer.in_channels, layer.out_channels

    @property
    def matrix(self) -> Tensor:
        """The weight as a matrix of shape (outputs, inputs), with its graph."""
        return self.kernel.flatten(1)


# -- convolutions --------------------------------------------------------------------------


class ConvolutionMap(LayerMap):
    """The map of convolutions, transposed ones too, with any stride, padding, dilation, groups."""

    def __init__(self, layer: Any, weight: Tensor | None = None) -> None:
        super().__init__(layer, weight)
        self.n_inputs, self.n_outputs = layer.in_channels, layer.out_channels
        self.inputs_first, self.groups = layer.transposed, layer.groups
        self.n_offsets = prod(layer.kernel_size)

    @property
    def matrix(self) -> Tensor:
        """The weight as a matrix: one row for each output channel, one column for each input."""
        weight = self.kernel
        if not self.inputs_first:
            return weight.flatten(1)
        columns = weight.reshape(self.groups, -1, self.n_outputs // self.groups, self.n_offsets)
        return columns.transpose(1, 2).reshape(self.n_outputs, -1)

    def planes(self, features: Tensor, channels: Tensor | None, offset: int) -> Tensor:
        """Select one entry of all patches, in channels of each group."""
        n, groups, space = len(features), self.groups, features.shape[2:]
        grouped = features.reshape(n, groups, -1, *space).transpose(1, 2)
        some = select_channels(grouped, channels)
        images = some.reshape(-1, 1, *space)
        if self.inputs_first:  # by a kernel that is one at the offset
            kernel = features.new_zeros(self.n_offsets)
            kernel[offset] = 1
            planes = self._convolve(images, kernel.reshape(1, 1, *self.layer.kernel_size), 1)
        else:
            planes = self._shifted(images, offset)
        return planes.reshape(n, some.shape[1], groups, -1).transpose(1, 2)

    def to_rows(self, z: Tensor) -> Tensor:
        """Flatten the positions."""
        return z.flatten(2)

    def from_rows(self, rows: Tensor, z: Tensor) -> Tensor:
        """Undo `to_rows`."""
        return rows.reshape(z.shape)

    def apply(self, features: Tensor, matrices: Tensor) -> Tensor:
        """Convolve each sample with its own kernels, all in one grouped convolution."""
        n, x = len(features), self._padded(features)
        if matrices.ndim == 2:
            return self._convolve(x, self._kernels(matrices[None]), self.groups).flatten(2)
        x = x.reshape(1, -1, *x.shape[2:])
        out = self._convolve(x, self._kernels(matrices), n * self.groups)
        return out.reshape(n, self.n_outputs, -1)

    def apply_signed(
        self, features: Tensor, left: Tensor, outer: Tensor, right: Tensor, inner: Tensor
    ) -> Tensor:
        """Multiply copies of the patches where they take less memory than kernels do."""
        if self.inputs_first or self.groups > 1 or self._has_more_positions(features, len(left)):
            return super().apply_signed(features, left, outer, right, inner)
        found, start = [], 0
        for columns in self.patches(features):
            part = slice(start, start := start + len(columns))
            between = right @ (columns[:, 0] * inner[part, :, None])
            found.append(left @ (between * outer[part, :, None]))
        return torch.cat(found)

    def by_position(self, features: Tensor, z: Tensor) -> tuple[LayerMap, Tensor, Tensor] | None:
        """Take pixels as samples, if the kernel reads one of them."""
        reads_one = self.n_offsets == self.groups == 1 and not self.inputs_first
        # a kernel of one pixel with padding puts out more positions than there are
        is_all = set(self.layer.stride) == {1} and features.shape[2:] == z.shape[2:]
        if not (reads_one and is_all):
            return None
        pixels = PixelMap(self.layer, self._weight)
        return pixels, features.movedim(1, -1).flatten(0, -2), z.movedim(1, -1).flatten(0, -2)

    def transpose(self, features: Tensor, rows: Tensor) -> Tensor:
        """Multiply rows with copies of the patches, for some samples at a time."""
        groups, found, start = self.groups, [], 0
        for columns in self.patches(features):
            many = rows[start : (start := start + len(columns))]
            grouped = many.reshape(len(many), -1, groups, many.shape[-2] // groups, many.shape[-1])
            sums = grouped @ columns.transpose(2, 3)[:, None]
            found.append(sums.reshape(*many.shape[:-1], sums.shape[-1]))
        return torch.cat(found)

    def channels(self, features: Tensor) -> Tensor:
        """Arrange all positions of all samples below each other."""
        return features.transpose(0, 1).flatten(1).T

    def column_channels(self) -> Tensor:
        """Return the input channel of each column; with groups, those of each row's group."""
        n_within = self.n_inputs // self.groups
        within = torch.arange(n_within, device=self.kernel.device).repeat_interleave(self.n_offsets)
        if self.groups == 1:
            return within
        row = torch.arange(self.n_outputs, device=self.kernel.device)
        return within + (row // (self.n_outputs // self.groups))[:, None] * n_within

    def _has_more_positions(self, features: Tensor, n: int) -> bool:
        """Return whether patches overlap, and are more than so many."""
        positions = self._patches(features[:1]).shape[2 : -len(self.layer.kernel_size)]
        return self.n_offsets > 1 and prod(positions) > n

    def patches(self, features: Tensor) -> Iterator[Tensor]:
        """Copy the patches of some samples at a time."""
        n_axes, n_offsets = len(self.layer.kernel_size), self.n_offsets
        if self.inputs_first:  # by kernels that are one at an offset each
            kernels = torch.eye(n_offsets).to(features).reshape(1, -1, *self.layer.kernel_size)
            n_copied = features[:1].numel() * n_offsets * prod(self.layer.stride)
            for some in torch.split(features, max(1, _PATCHES // max(1, n_copied))):
                images = some.reshape(-1, 1, *some.shape[2:])
                found = self._convolve(images, kernels, 1).flatten(2)
                yield found.reshape(len(some), self.groups, -1, found.shape[-1])
            return
        patches = self._patches(features)
        within = tuple(range(2 + n_axes, 2 + 2 * n_axes))
        patches = patches.permute(0, 1, *within, *range(2, 2 + n_axes))
        n_positions = prod(patches.shape[2 + n_axes :])
        # copies of patches are large, and products with them are fastest in the cache
        size = max(1, _PATCHES // max(1, patches[:1].numel()))
        for some in torch.split(patches, size):
            yield some.reshape(len(some), self.groups, -1, n_positions)

    def _patches(self, features: Tensor) -> Tensor:
        """Return a view of all patches: (n, c, positions ..., kernel ...)."""
        layer, x = self.layer, self._fully_padded(features)
        axes = zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)
        for axis, (size, stride, dilation) in enumerate(axes):
            x = x.unfold(2 + axis, dilation * (size - 1) + 1, stride)[..., ::dilation]
        return x

    def _shifted(self, images: Tensor, offset: int) -> Tensor:
        """Return a view of what one entry of the kernel is multiplied with, at all positions."""
        layer, x = self.layer, self._fully_padded(images)
        axes = zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)
        for axis, (size, stride, dilation) in reversed(list(enumerate(axes))):
            offset, at = divmod(offset, size)
            length = x.shape[2 + axis] - dilation * (size - 1)
            x = x.narrow(2 + axis, dilation * at, length)
            if stride > 1:
                x = x[(slice(None),) * (2 + axis) + (slice(None, None, stride),)]
        return x

    def _fully_padded(self, features: Tensor) -> Tensor:
        """Pad features as the layer does, with zeros too."""
        layer = self.layer
        x = self._padded(features)
        if layer.padding_mode != "zeros" or layer.padding == "valid":
            return x
        if layer.padding == "same":
            return F.pad(x, layer._reversed_padding_repeated_twice)
        if not any(layer.padding):  # `F.pad` would make a copy
            return x
        return F.pad(x, [p for one in reversed(layer.padding) for p in (one, one)])

    def _padded(self, x: Tensor) -> Tensor:
        """Pad features unless torch's convolution does so itself, which it does with zeros."""
        if self.layer.padding_mode == "zeros":
            return x
        return F.pad(x, self.layer._reversed_padding_repeated_twice, mode=self.layer.padding_mode)

    def _kernels(self, matrices: Tensor) -> Tensor:
        """Rearrange matrices (n, d, m) into the kernels of n convolutions side by side."""
        groups, d, size = self.groups, self.n_outputs, self.layer.kernel_size
        if not self.inputs_first:
            return matrices.reshape(-1, self.n_inputs // groups, *size)
        parts = matrices.reshape(len(matrices), groups, d // groups, -1, self.n_offsets)
        return parts.transpose(2, 3).reshape(-1, d // groups, *size)

    def _convolve(self, x: Tensor, kernels: Tensor, groups: int) -> Tensor:
        """Run the layer's convolution with other kernels and groups, without bias."""
        layer, n_axes = self.layer, len(self.layer.kernel_size)
        options = {
            "stride": layer.stride,
            "padding": layer.padding if layer.padding_mode == "zeros" else 0,
            "dilation": layer.dilation,
            "groups": groups,
        }
        if self.inputs_first:
            transposed = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[n_axes - 1]
            return transposed(x, kernels, output_padding=layer.output_padding, **options)
        return (F.conv1d, F.conv2d, F.conv3d)[n_axes - 1](x, kernels, **options)


# -- finding the layers of a network ------------------------------------------------------

Layer = int | str | nn.Module

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d,
                 nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)  # fmt: skip
_MAPS: dict[type[nn.Module], type[LayerMap]] = {
    nn.Linear: LinearMap,
    **dict.fromkeys(_CONVOLUTIONS, ConvolutionMap),
}
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
# layers with weights of another kind, refused by name
_OTHER_WEIGHTS = (nn.Bilinear, *_EMBEDDINGS)


def is_weight_layer(module: nn.Module) -> bool:
    """Return whether a module is of a kind of layer that has a weight matrix."""
    return weight_kind(module) is not None


def weight_kind(module: nn.Module) -> type[nn.Module] | None:
    """Return the class that makes a module a layer with a weight matrix."""
    own = next((kind for kind in _MAPS if isinstance(module, kind)), None) or _conv1d_kind(module)
    base = None if own else adapted_layer(module)
    return own if base is None else weight_kind(base)


def _conv1d_kind(module: nn.Module) -> type[nn.Module] | None:
    """Recognise the linear layer of GPT-2 in Hugging Face's transformers, without importing it.

    Its name is misleading: it is a linear layer with a weight of shape (inputs, `nf` outputs).
    """
    n_outputs, weight = module.__dict__.get("nf"), module._parameters.get("weight")
    if n_outputs is None or weight is None or weight.shape[1:] != (n_outputs,):
        return None
    return next((kind for kind in type(module).__mro__ if kind.__name__ == "Conv1D"), None)


def adapted_layer(module: nn.Module) -> nn.Module | None:
    """Recognise a layer with low-rank adapters, and return the layer inside it.

    It is called as the `LoraLayer` of PEFT is: `base_layer`, `lora_A`, `get_delta_weight`.
    """
    is_adapted = "lora_A" in module._modules and hasattr(type(module), "get_delta_weight")
    return module._modules.get("base_layer") if is_adapted else None


def _merged_weight(layer: Any) -> Tensor:
    """Add the active adapters of a layer to its weight, with their graph."""
    weight: Tensor = layer.base_layer.weight
    if layer.merged or layer.disable_adapters:
        return weight
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    return sum((layer.get_delta_weight(name) for name in active), start=weight)


def layer_map(layer: nn.Module, weight: Tensor | None = None) -> LayerMap:
    """Return a layer as a linear map of its weight matrix."""
    base = adapted_layer(layer)
    if base is not None:
        return layer_map(base, _merged_weight(layer) if weight is None else weight)
    kind = weight_kind(layer)
    if kind is not None:
        return _MAPS.get(kind, TransposedLinearMap)(layer, weight)
    raise TypeError(
        f"flatness is not defined at a {type(layer).__name__}: its output is not a matrix times "
        f"its input. Layers that can be measured: {[kind.__name__ for kind in _MAPS]}, and "
        "the Conv1D of transformers."
    )


def weight_layers(module: nn.Module) -> dict[str, nn.Module]:
    """List the layers with a weight matrix, by dotted name, in the order of registration."""
    return {name: m for name, m in module.named_modules() if is_weight_layer(m)}


def find_layer(module: nn.Module, layer: Layer, order: Sequence[str] | None = None) -> str:
    """Return the dotted name of a layer with a weight matrix."""
    layers = weight_layers(module)
    names = list(layers) if order is None else list(order)
    known = _describe({name: layers[name] for name in names})
    if isinstance(layer, np.integer):
        layer = int(layer)
    if isinstance(layer, bool) or not isinstance(layer, int | str | nn.Module):
        raise TypeError(
            "layer must be an int, a dotted module name or the module itself, got "
            f"{layer!r} of type {type(layer).__name__}; flatness_report measures several. {known}"
        )
    if isinstance(layer, int):
        if not -len(names) <= layer < len(names):
            raise LayerNotFoundError(f"there is no layer {layer}. {known}")
        return names[layer]
    name = _find_module(module, layer, known)
    found = module.get_submodule(name)
    if isinstance(found, _OTHER_WEIGHTS):
        layer_map(found)  # raises and says why not
    if not is_weight_layer(found):
        raise LayerNotFoundError(
            f"layer {name!r} is a {type(found).__name__}, which has no weight matrix to measure "
            f"flatness at. {known}"
        )
    return name


def _find_module(module: nn.Module, layer: Layer, known: str) -> str:
    """Return the dotted name of any module of the network."""
    modules = dict(module.named_modules(remove_duplicate=False))
    if isinstance(layer, str):
        if layer not in modules:
            several = " To measure all layers, use flatness_report." if layer == "all" else ""
            raise LayerNotFoundError(f"there is no layer {layer!r}.{several} {known}")
        return layer
    same = [name for name, candidate in modules.items() if candidate is layer]
    if not same:
        raise LayerNotFoundError(
            f"the {type(layer).__name__} given as layer is not part of the network (was the "
            f"network copied, as clone and deepcopy do?). {known}"
        )
    return str(same[0])


def _describe(layers: Mapping[str, nn.Module]) -> str:
    """Return the sentence of an error message that lists the layers there are."""
    if not layers:
        return (
            "The network has no layer whose weight matrix can be measured, such as nn.Linear or "
            "nn.Conv2d; recurrent layers and embeddings are not measured."
        )
    listed = ", ".join(
        f"{i}: {name!r} ({type(layer).__name__})" for i, (name, layer) in enumerate(layers.items())
    )
    return f"Layers with a weight matrix: {listed}."


def why_shared(name: str, named: Mapping[str, nn.Module]) -> str:
    """Say which other modules than embeddings have the weight of a layer; nothing if none have.

    A layer that is tied to an embedding is the head of a language model. It counts as if it had a
    copy of the weight to itself.
    """
    weight = named[name]._parameters.get("weight")
    others = [
        other
        for other, candidate in named.items()
        # the packed weight of attention is that of the layer `in_proj` inside it
        if other != name
        and not isinstance(candidate, (nn.MultiheadAttention, *_EMBEDDINGS))
        and any(parameter is weight for parameter in candidate._parameters.values())
    ]
    if weight is None or not others:  # None if it is computed from parameters of its own
        return ""
    return (
        f"the weight of layer {name!r} is shared by the modules {sorted([name, *others])}; the "
        "curvature in a shared weight is not that of one layer. Measure another layer."
    )


# -- values of parameters ------------------------------------------------------------------


def check_stored(module: nn.Module) -> None:
    """Refuse a network with lazy layers, which a measure would fill with random weights."""
    if any(map(is_lazy, (*module.parameters(), *module.buffers()))):
        raise ValueError(
            "the network has lazy layers, which have no weights yet; run it once on data first."
        )


def check_real(module: nn.Module) -> None:
    """Refuse a network with complex parameters, whose imaginary parts would be left out."""
    named = module.named_parameters()
    name = next((name for name, parameter in named if parameter.is_complex()), None)
    if name is not None:
        raise ValueError(
            f"the parameter {name!r} is complex, and weights must be real numbers here. Measure "
            "the flatness of a layer with a real weight instead."
        )


def find_non_finite(module: nn.Module) -> str | None:
    """Return the name of the first parameter or buffer that contains nan or an infinite number."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return next((name for name, tensor in tensors if not bool(tensor.isfinite().all())), None)
