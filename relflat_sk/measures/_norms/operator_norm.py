"""The spectral norm of a layer, as a linear map from its input to its output."""

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator, svds
from torch import Tensor

from relflat_sk._rescaling import AffineLayer

__all__ = ["is_iterated", "operator_norm"]

# largest size of the matrix of a convolution for which it is written out
_DENSE = 2**18


def is_iterated(layer: AffineLayer) -> bool:
    """Tell whether `operator_norm` iterates, and so is exact to a tolerance only."""
    return not layer.map.channels_last and _size(layer) > _DENSE


def operator_norm(layer: AffineLayer, rtol: float) -> float:
    r"""Compute the spectral norm of the map from a layer's input to its output, without bias.

    For a linear layer, this is the largest singular value of its weight, whatever the number
    of tokens. For a convolution, it is the norm of the convolution as this network uses it,
    with its stride, its padding and the size of the image [1]_. The spectral norm of the kernel
    as a matrix does not depend on these.
    """
    if layer.map.channels_last:
        return float(torch.linalg.matrix_norm(layer.weight, ord=2))
    if not is_iterated(layer):
        basis = (
            torch.eye(layer.input_shape.numel()).to(layer.weight).reshape(-1, *layer.input_shape)
        )
        with torch.no_grad():
            matrix = layer.apply(basis, layer.weight).flatten(1)
        return float(torch.linalg.matrix_norm(matrix, ord=2))
    operator = _as_operator(layer)
    # an arbitrary start, but the same in every call
    start = np.random.default_rng(0).standard_normal(min(operator.shape))
    (largest,) = svds(operator, k=1, v0=start, tol=rtol, return_singular_vectors=False)
    return float(largest)


def _size(layer: AffineLayer) -> int:
    return layer.input_shape.numel() * layer.output_shape.numel()


def _array(tensor: Tensor) -> NDArray[np.float64]:
    array: NDArray[np.float64] = tensor.flatten().cpu().numpy()
    return array


def _as_operator(layer: AffineLayer) -> LinearOperator:
    """Wrap products with a layer's map and its transpose for SciPy."""
    shape = (layer.output_shape.numel(), layer.input_shape.numel())
    origin = layer.weight.new_zeros((1, *layer.input_shape)).requires_grad_()
    with torch.enable_grad():
        output = layer.apply(origin, layer.weight)  # linear: its derivative is the same anywhere

    def tensor(vector: NDArray[np.float64], size: torch.Size) -> Tensor:
        return torch.from_numpy(np.asarray(vector)).to(layer.weight).reshape(1, *size)

    def product(vector: NDArray[np.float64]) -> NDArray[np.float64]:
        with torch.no_grad():
            return _array(layer.apply(tensor(vector, layer.input_shape), layer.weight))

    def transposed(vector: NDArray[np.float64]) -> NDArray[np.float64]:
        (pulled_back,) = torch.autograd.grad(
            output, origin, tensor(vector, layer.output_shape), retain_graph=True
        )
        return _array(pulled_back)

    return LinearOperator(shape, matvec=product, rmatvec=transposed, dtype=np.float64)
