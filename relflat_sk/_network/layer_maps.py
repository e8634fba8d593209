r"""Layers as linear maps of their weight matrix.

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

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["LayerMap", "LinearMap", "TransposedLinearMap", "select_channels"]


class LayerMap:
    """A layer as a linear map of its weight matrix.

    Parameters
    ----------
    layer : nn.Module
        The layer. Each kind of layer has a subclass, see `relflat_sk._network.layers.layer_map`.
    weight : Tensor of shape (...), optional
        Its weight in one of its calls, if each read computes another one, as in spectral norm.

    Attributes
    ----------
    channels_last : bool
        Whether channels are on the last axis of inputs and outputs, with samples and positions
        before them. Otherwise, they are on axis 1.
    """

    channels_last = False

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

    @property
    def n_inputs(self) -> int:
        """Number of input features, or channels."""
        raise NotImplementedError

    @property
    def n_outputs(self) -> int:
        """Number of output features, or channels."""
        raise NotImplementedError

    @property
    def inputs_first(self) -> bool:
        """Whether the first axis of the weight is that of the inputs, instead of the outputs."""
        return False

    @property
    def groups(self) -> int:
        """Number of blocks of rows, each of which is applied to patches of its own."""
        return 1

    @property
    def n_offsets(self) -> int:
        """Number of columns that read the same input channel."""
        return 1

    def planes(self, features: Tensor, channels: Tensor | None, offset: int) -> Tensor:
        """Select what columns of the weight matrix are multiplied with at all positions.

        Parameters
        ----------
        features : Tensor of shape (n, ...)
            The layer's input, of n samples.
        channels : Tensor of shape (n, k) or None
            Input channels for each sample, counted within a group; all of them if None.
        offset : int
            Which of the columns that read a channel, from 0 to ``n_offsets - 1``.

        Returns
        -------
        Tensor of shape (n, groups, k, P)
            The numbers that the columns are multiplied with.
        """
        raise NotImplementedError

    def to_rows(self, z: Tensor) -> Tensor:
        """Rearrange an array of the shape of the output.

        Parameters
        ----------
        z : Tensor of shape (n, ...)
            Of the shape of the layer's output.

        Returns
        -------
        Tensor of shape (n, d, P)
            One row for each output channel.
        """
        raise NotImplementedError

    def from_rows(self, rows: Tensor, z: Tensor) -> Tensor:
        """Undo `to_rows`.

        Parameters
        ----------
        rows : Tensor of shape (n, d, P)
            The array.
        z : Tensor of shape (n, ...)
            Of the shape of the layer's output.

        Returns
        -------
        Tensor of shape (n, ...)
            Of the shape of `z`.
        """
        raise NotImplementedError

    def apply(self, features: Tensor, matrices: Tensor) -> Tensor:
        """Apply matrices in place of the weight, without bias.

        Parameters
        ----------
        features : Tensor of shape (n, ...)
            The layer's input, of n samples.
        matrices : Tensor of shape (n, d, m) or (d, m)
            One for each sample, or one for all.

        Returns
        -------
        Tensor of shape (n, d, P)
            Products with the layer's input, rearranged as by `to_rows`.
        """
        raise NotImplementedError

    def transpose(self, features: Tensor, rows: Tensor) -> Tensor:
        """Sum ``g_p phi_p^T`` over the positions of each sample.

        Parameters
        ----------
        features : Tensor of shape (n, ...)
            The layer's input, of n samples.
        rows : Tensor of shape (n, ..., d, P)
            The vectors g.

        Returns
        -------
        Tensor of shape (n, ..., d, m)
            One matrix of the weight's shape for each sample.
        """
        raise NotImplementedError

    def total(self, features: Tensor, rows: Tensor) -> Tensor:
        """Sum ``g_p phi_p^T`` over positions and samples.

        Parameters
        ----------
        features : Tensor of shape (n, ...)
            The layer's input, of n samples.
        rows : Tensor of shape (n, d, P)
            The vectors g.

        Returns
        -------
        Tensor of shape (d, m)
            A matrix of the weight's shape.
        """
        return self.transpose(features, rows).sum(dim=0)

    def channels(self, features: Tensor) -> Tensor:
        """Arrange features in one column for each input channel.

        Parameters
        ----------
        features : Tensor of shape (n, ...)
            The layer's input.

        Returns
        -------
        Tensor of shape (n_values, c)
            All samples and positions below each other.
        """
        raise NotImplementedError

    def column_channels(self) -> Tensor:
        """Return the input channel that each column of the weight matrix reads.

        Returns
        -------
        Tensor of shape (m,) or (d, m)
            (d, m) where rows read channels of their own group.
        """
        raise NotImplementedError

    def is_flat(self, features: Tensor) -> bool:
        """Return whether each sample has one position only.

        Parameters
        ----------
        features : Tensor of shape (n, ...)
            The layer's input.

        Returns
        -------
        bool
            Whether the input has shape (n, m).
        """
        return False


def select_channels(features: Tensor, channels: Tensor | None) -> Tensor:
    """Select channels of each sample.

    Shapes: `features` (n, c, ...), `channels` (n, k); returns (n, k, ...).
    """
    if channels is None:
        return features
    rows = torch.arange(len(features), device=features.device)[:, None]
    found: Tensor = features[rows, channels]
    return found


class LinearMap(LayerMap):
    """The map of `nn.Linear`, for inputs (n, m) or with positions on axes in between.

    Shapes: `weight` (...).
    """

    channels_last = True

    @property
    def n_inputs(self) -> int:
        """Number of input features."""
        return int(self.layer.in_features)  # a weight may be expensive to compute

    @property
    def n_outputs(self) -> int:
        """Number of output features."""
        return int(self.layer.out_features)

    def is_flat(self, features: Tensor) -> bool:
        """Return whether the input has no axis of positions."""
        return features.ndim == 2

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

    def planes(self, features: Tensor, channels: Tensor | None, offset: int) -> Tensor:
        """Select features of each sample at all positions."""
        return select_channels(self.to_rows(features), channels)[:, None]

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

    def transpose(self, features: Tensor, rows: Tensor) -> Tensor:
        """Sum outer products over positions."""
        phi = self.to_rows(features).transpose(1, 2)
        return rows @ (phi if rows.ndim == 3 else phi[:, None])


class TransposedLinearMap(LinearMap):
    """The map of a linear layer whose weight has shape (inputs, outputs).

    Shapes: `weight` (...).
    """

    @property
    def matrix(self) -> Tensor:
        """The weight as a matrix of shape (outputs, inputs), with its graph."""
        return self.kernel.T

    @property
    def n_inputs(self) -> int:
        """Number of input features."""
        return len(self.kernel)

    @property
    def n_outputs(self) -> int:
        """Number of output features."""
        return int(self.kernel.shape[1])

    @property
    def inputs_first(self) -> bool:
        """Whether the first axis of the weight is that of the inputs."""
        return True
