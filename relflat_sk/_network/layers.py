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

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy

from relflat_sk.exceptions import LayerNotFoundError

# numbers of the patches that are copied at a time: they are large, and products with them are
# fastest in the cache
_PATCHES = 2**22


class LayerMap:
    """A layer as a linear map of its weight matrix: `nn.Linear`; subclasses are other kinds.

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
    groups : int
        Number of blocks of rows, each of which is applied to patches of its own.
    n_offsets : int
        Number of columns that read the same input channel.
    """

    channels_last = True
    inputs_first = False
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
        return self.kernel.flatten(1)

    @property
    def weight(self) -> Tensor:
        """The weight as a matrix of shape (d, m), detached."""
        return self.matrix.detach()

    @property
    def n_outputs(self) -> int:
        """Number of output features, or channels."""
        return len(self.matrix)

    @property
    def n_inputs(self) -> int:
        """Number of input features, or channels."""
        return self.matrix.shape[1] * self.groups // self.n_offsets

    def to_rows(self, z: Tensor) -> Tensor:
        """Rearrange an array of the shape of the output: (n, d, P)."""
        return z.reshape(len(z), -1, z.shape[-1]).transpose(1, 2)

    def from_rows(self, rows: Tensor, z: Tensor) -> Tensor:
        """Undo `to_rows`; z has the shape of the output."""
        return rows.transpose(1, 2).reshape(z.shape)

    def patches(self, features: Tensor) -> Iterator[Tensor]:
        """Copy ``phi_ip`` of some samples at a time: (n, groups, m, P)."""
        size = max(1, _PATCHES // max(1, features[:1].numel()))
        yield from torch.split(self.to_rows(features)[:, None], size)

    def planes(self, features: Tensor, channels: Tensor | None, offset: int) -> Tensor:
        """Select what columns of the weight are multiplied with: (n, groups, k, P)."""
        # They are the columns at one offset that read some channels (n, k), or all, of each group.
        return select_channels(self.to_rows(features), channels)[:, None]

    def apply(self, features: Tensor, matrices: Tensor) -> Tensor:
        """Apply matrices, or one for all samples, in place of the weight, without bias: rows."""
        if matrices.ndim == 2:  # in one product, instead of one for each sample
            return self.to_rows(F.linear(features, matrices))
        return matrices @ self.to_rows(features)

    def apply_signed(
        self,
        features: Tensor,
        left: Tensor,  # (d, k)
        outer: Tensor,  # (n, k)
        right: Tensor,  # (k, m)
        inner: Tensor,  # (n, m)
    ) -> Tensor:
        """Apply ``L diag(s_i) R diag(t_i)`` with s the outer signs and t the inner ones: rows."""
        n_positions = next(self.patches(features[:1])).shape[-1]
        # patches that overlap may take more memory than a kernel for each sample
        if self.groups > 1 or (self.n_offsets > 1 and n_positions > len(left)):
            return self.apply(features, (left * outer[:, None]) @ (right * inner[:, None]))
        return torch.cat([
            left @ ((right @ (columns[:, 0] * inner[part, :, None])) * outer[part, :, None])
            for part, columns in self._parts(features)
        ])

    def transpose(self, features: Tensor, rows: Tensor) -> Tensor:
        """Sum ``g_p phi_p^T`` over the positions of each sample, g (n, ..., d, P): matrices."""
        found = []
        for part, columns in self._parts(features):
            (n, groups, m, _), g = columns.shape, rows[part]
            blocks = g.reshape(n, -1, groups, g.shape[-2] // groups, g.shape[-1])
            sums = blocks @ columns.transpose(2, 3)[:, None]
            found.append(sums.reshape(*g.shape[:-1], m))
        return torch.cat(found)

    def total(self, features: Tensor, rows: Tensor) -> Tensor:
        """Sum ``g_p phi_p^T`` over positions and samples, g (n, d, P): (d, m)."""
        total = torch.zeros_like(self.weight, dtype=rows.dtype)
        for part, columns in self._parts(features):
            blocks = torch.unflatten(rows[part], 1, (self.groups, -1))
            if columns.shape[-1] == 1:  # in one product, instead of one for each sample
                total += torch.einsum("ngdp,ngmp->gdm", blocks, columns).flatten(0, 1)
            else:
                total += (blocks @ columns.transpose(2, 3)).sum(dim=0).flatten(0, 1)
        return total

    def _parts(self, features: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield the patches of some samples at a time, with the place of these samples."""
        start = 0
        for columns in self.patches(features):
            yield slice(start, start := start + len(columns)), columns

    def channels(self, features: Tensor) -> Tensor:
        """Arrange features in one column for each input channel: (n_values, c)."""
        return features.reshape(-1, features.shape[-1])

    def column_channels(self) -> Tensor:
        """Return the input channel of each column: (m,), or (d, m) if rows read their group's."""
        (d, m), device = self.weight.shape, self.kernel.device
        within = torch.arange(m, device=device) // self.n_offsets
        if self.groups == 1:
            return within
        group = torch.arange(d, device=device) // (d // self.groups)
        return within + group[:, None] * (m // self.n_offsets)

    def by_position(self, features: Tensor, z: Tensor) -> "tuple[LayerMap, Tensor, Tensor] | None":
        """Return the layer, inputs (n * P, m) and outputs of positions that share no inputs."""
        return self, features.flatten(0, -2), z.flatten(0, -2)


def select_channels(features: Tensor, channels: Tensor | None) -> Tensor:
    """Select channels (n, k) of each sample in an array (n, c, ...)."""
    if channels is None:
        return features
    rows = torch.arange(len(features), device=features.device)[:, None]
    selected: Tensor = features[rows, channels]
    return selected


class TransposedLinearMap(LayerMap):
    """The map of a linear layer whose weight has shape (inputs, outputs)."""

    inputs_first = True

    @property
    def matrix(self) -> Tensor:
        """The weight as a matrix of shape (outputs, inputs), with its graph."""
        return self.kernel.T


class ConvolutionMap(LayerMap):
    """The map of convolutions, transposed ones too, with any stride, padding, dilation, groups."""

    channels_last = False

    def __init__(self, layer: Any, weight: Tensor | None = None) -> None:
        super().__init__(layer, weight)
        self.inputs_first, self.groups = layer.transposed, layer.groups
        self.n_offsets = prod(layer.kernel_size)

    @property
    def matrix(self) -> Tensor:
        """The weight as a matrix: one row for each output channel, one column for each input."""
        if not self.inputs_first:
            return self.kernel.flatten(1)
        blocks = torch.unflatten(self.kernel.flatten(2), 0, (self.groups, -1))
        return blocks.transpose(1, 2).flatten(0, 1).flatten(1)

    def to_rows(self, z: Tensor) -> Tensor:
        """Flatten the positions."""
        return z.flatten(2)

    def from_rows(self, rows: Tensor, z: Tensor) -> Tensor:
        """Undo `to_rows`."""
        return rows.reshape(z.shape)

    def patches(self, features: Tensor) -> Iterator[Tensor]:
        """Copy the patches of some samples at a time."""
        axes = tuple(range(2, features.ndim))
        size = max(1, _PATCHES // max(1, features[:1].numel() * self.n_offsets))
        for some in torch.split(features, size):
            if self.inputs_first:
                copies = self._entries(some, slice(None)).flatten(2)
            else:
                view = self._padded(some, with_zeros=True)
                for axis, (reach, stride, dilation) in zip(axes, self._windows(), strict=True):
                    view = view.unfold(axis, reach + 1, stride)[..., ::dilation]
                copies = view.movedim(axes, tuple(range(-len(axes), 0))).flatten(-len(axes))
            yield copies.reshape(len(some), self.groups, -1, copies.shape[-1])

    def planes(self, features: Tensor, channels: Tensor | None, offset: int) -> Tensor:
        """Select one entry of all patches, in channels of each group."""
        blocks = torch.unflatten(features, 1, (self.groups, -1)).transpose(1, 2)
        images = select_channels(blocks, channels)  # (n, k, groups, ...)
        if self.inputs_first:
            planes = self._entries(images.flatten(1, 2), slice(offset, offset + 1))
        else:
            planes = self._padded(images.flatten(1, 2), with_zeros=True)
            entry = np.unravel_index(offset, self.layer.kernel_size)
            for axis, (reach, stride, dilation) in enumerate(self._windows()):
                start, length = dilation * int(entry[axis]), planes.shape[2 + axis] - reach
                planes = planes.narrow(2 + axis, start, length)
                if stride > 1:
                    planes = planes[(slice(None),) * (2 + axis) + (slice(None, None, stride),)]
        return planes.reshape(*images.shape[:3], -1).transpose(1, 2)

    def apply(self, features: Tensor, matrices: Tensor) -> Tensor:
        """Convolve each sample with its own kernels, all in one grouped convolution."""
        n, x = len(features), self._padded(features)
        if matrices.ndim == 2:
            return self._convolve(x, self._kernels(matrices[None]), self.groups).flatten(2)
        x = x.reshape(1, -1, *x.shape[2:])
        out = self._convolve(x, self._kernels(matrices), n * self.groups)
        return out.reshape(n, matrices.shape[1], -1)

    def by_position(self, features: Tensor, z: Tensor) -> tuple[LayerMap, Tensor, Tensor] | None:
        """Take pixels as samples, if the kernel reads one of them."""
        reads_one = self.n_offsets == self.groups == 1 and not self.inputs_first
        # a kernel of one pixel with padding puts out more positions than there are
        is_all = set(self.layer.stride) == {1} and features.shape[2:] == z.shape[2:]
        if not (reads_one and is_all):
            return None
        pixels = LayerMap(self.layer, self._weight)
        pixels.channels_last = False
        return pixels, features.movedim(1, -1).flatten(0, -2), z.movedim(1, -1).flatten(0, -2)

    def channels(self, features: Tensor) -> Tensor:
        """Arrange all positions of all samples below each other."""
        return features.transpose(0, 1).flatten(1).T

    def _windows(self) -> list[tuple[int, int, int]]:
        """Return how far patches reach along each axis, with stride and dilation."""
        layer = self.layer
        axes = zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)
        return [(dilation * (size - 1), stride, dilation) for size, stride, dilation in axes]

    def _entries(self, features: Tensor, offsets: slice) -> Tensor:
        """Return what entries of a transposed kernel are multiplied with, at all positions."""
        # They are convolutions of each channel with kernels that are one at one of the offsets.
        kernels = torch.eye(self.n_offsets).to(features)[offsets]
        images = features.reshape(-1, 1, *features.shape[2:])
        entries = self._convolve(images, kernels.reshape(1, -1, *self.layer.kernel_size), 1)
        return entries.reshape(len(features), -1, *entries.shape[2:])  # (n, c * offsets, ...)

    def _padded(self, x: Tensor, *, with_zeros: bool = False) -> Tensor:
        """Pad features as the layer does; torch's convolution itself pads with zeros."""
        mode, padding = self.layer.padding_mode, self.layer._reversed_padding_repeated_twice
        if not any(padding) or (mode == "zeros" and not with_zeros):
            return x
        return F.pad(x, padding, mode="constant" if mode == "zeros" else mode)

    def _kernels(self, matrices: Tensor) -> Tensor:
        """Rearrange matrices (n, d, m) into the kernels of n convolutions side by side."""
        kernels = torch.unflatten(matrices, 2, (-1, *self.layer.kernel_size))
        if not self.inputs_first:
            return kernels.flatten(0, 1)
        blocks = torch.unflatten(kernels, 1, (self.groups, -1))
        return blocks.transpose(2, 3).flatten(0, 2)

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
    nn.Linear: LayerMap,
    **dict.fromkeys(_CONVOLUTIONS, ConvolutionMap),
}


def weight_kind(module: nn.Module) -> type[nn.Module] | None:
    """Return the class that makes a module a layer with a weight matrix, if it is one."""
    own = next((kind for kind in _MAPS if isinstance(module, kind)), None) or _conv1d_kind(module)
    base = None if own else adapted_layer(module)
    return own if base is None else weight_kind(base)


def _conv1d_kind(module: nn.Module) -> type[nn.Module] | None:
    """Recognise the linear layer of GPT-2 in Hugging Face's transformers, without importing it."""
    # Its name is misleading: it is a linear layer with a weight of shape (inputs, `nf` outputs).
    n_outputs, weight = module.__dict__.get("nf"), module._parameters.get("weight")
    if n_outputs is None or weight is None or weight.shape[1:] != (n_outputs,):
        return None
    return next((kind for kind in type(module).__mro__ if kind.__name__ == "Conv1D"), None)


def adapted_layer(module: nn.Module) -> nn.Module | None:
    """Recognise a layer with low-rank adapters, and return the layer inside it."""
    # It is called as the `LoraLayer` of PEFT is: `base_layer`, `lora_A`, `get_delta_weight`.
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
    """Return a layer with a weight matrix as a linear map of it."""
    base = adapted_layer(layer)
    if base is not None:
        return layer_map(base, _merged_weight(layer) if weight is None else weight)
    kind = weight_kind(layer)
    assert kind is not None
    return _MAPS.get(kind, TransposedLinearMap)(layer, weight)


def weight_layers(module: nn.Module) -> dict[str, nn.Module]:
    """List the layers with a weight matrix, by dotted name, in the order of registration."""
    return {name: part for name, part in module.named_modules() if weight_kind(part)}


CALL_LAYERS = "Call a layer itself, as in layer(x); F.linear(x, layer.weight) calls none."


def find_layer(module: nn.Module, layer: Layer, order: Sequence[str] | None = None) -> str:
    """Return the dotted name of a layer with a weight matrix."""
    layers = weight_layers(module)
    names = list(layers if order is None else order)
    listed = _describe(layers, names)
    if isinstance(layer, int | np.integer) and not isinstance(layer, bool):
        if not -len(names) <= layer < len(names):
            raise LayerNotFoundError(f"there is no layer {layer}. {listed}")
        return names[layer]
    parts = dict(module.named_modules(remove_duplicate=False))
    if isinstance(layer, nn.Module):
        name = next((name for name, part in parts.items() if part is layer), None)
        if name is None:
            raise LayerNotFoundError(
                f"the {type(layer).__name__} given as layer is not part of the network (was the "
                f"network copied, as clone and deepcopy do?). {listed}"
            )
    elif isinstance(layer, str):
        name = layer
    else:
        raise TypeError(
            "layer must be an int, a dotted module name or the module itself, got "
            f"{layer!r} of type {type(layer).__name__}; flatness_report measures several. {listed}"
        )
    if name not in parts:
        several = " To measure all layers, use flatness_report." if name == "all" else ""
        raise LayerNotFoundError(f"there is no layer {name!r}.{several} {listed}")
    if not weight_kind(parts[name]):
        raise LayerNotFoundError(
            f"layer {name!r} is a {type(parts[name]).__name__}, which has no weight matrix that "
            f"its input is multiplied by, and flatness is not defined there. {listed}"
        )
    return name


def find_names(module: nn.Module, asked: Sequence[Layer] | None, order: list[str]) -> list[str]:
    """Return the dotted names of the layers that the user asked for, each once."""
    if asked is None:
        return order
    if asked == (-1,) and order:  # without a walk through the network, in every epoch
        return order[-1:]
    return list(dict.fromkeys(find_layer(module, layer, order) for layer in asked))


def _describe(layers: Mapping[str, nn.Module], called: Sequence[str]) -> str:
    """Return what an error message says of the layers there are, and of those that are called."""
    if not layers:
        return (
            "The network has no layer whose weight matrix can be measured, such as nn.Linear or "
            "nn.Conv2d; recurrent layers and embeddings are not measured."
        )
    kinds = {name: f"{name!r} ({type(layer).__name__})" for name, layer in layers.items()}
    listed = ", ".join(f"{i}: {kinds[name]}" for i, name in enumerate(called))
    uncalled = ", ".join(kinds[name] for name in kinds if name not in called)
    text = f"Layers with a weight matrix: {listed}." if called else "No layer is called."
    return text + (f" Not called: {uncalled}. {CALL_LAYERS}" if uncalled else "")


def why_shared(name: str, named: Mapping[str, nn.Module]) -> str:
    """Say which other modules than embeddings have the weight of a layer; nothing if none have."""
    # A layer that is tied to an embedding is the head of a language model. It counts as if it had a
    # copy of the weight to itself.
    weight = named[name]._parameters.get("weight")
    others = [
        other
        for other, candidate in named.items()
        # the packed weight of attention is that of the layer `in_proj` inside it
        if other != name
        and not isinstance(candidate, (nn.MultiheadAttention, nn.Embedding, nn.EmbeddingBag))
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
        raise ValueError("the network has lazy layers without weights yet: run it once on data.")


def check_real(module: nn.Module) -> None:
    """Refuse a network with complex parameters, whose imaginary parts would be left out."""
    named = module.named_parameters()
    name = next((name for name, parameter in named if parameter.is_complex()), None)
    if name is not None:
        raise ValueError(f"the parameter {name!r} is complex, and weights must be real here.")


def find_non_finite(module: nn.Module) -> str | None:
    """Return the name of the first parameter or buffer that contains nan or an infinite number."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return next(
        (name for name, tensor in tensors if not bool(tensor.to_dense().isfinite().all())), None
    )
