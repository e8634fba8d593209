"""The spectral norm of a layer as the linear map it is."""

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator, svds
from torch import Tensor, nn

from relflat_sk._rescaling import AffineLayer

__all__ = ["is_iterated", "operator_norm"]

# numbers in the matrix of an operator up to which it is written out
_DENSE = 2**18


def is_iterated(layer: AffineLayer) -> bool:
    """Whether the norm comes from an iteration, which is exact to a tolerance only.

    Parameters
    ----------
    layer : AffineLayer

    Returns
    -------
    bool
    """
    return not isinstance(layer.map.layer, nn.Linear) and _size(layer) > _DENSE


def operator_norm(layer: AffineLayer, rtol: float) -> float:
    r"""Compute the spectral norm of the map from a layer's input to its output, bias left out.

    Of a convolution, that is not the spectral norm of its kernel written as a matrix, which
    depends neither on stride and padding nor on the size of the image, but of the
    convolution as it is used in this network [1]_. Of a linear layer it is the largest
    singular value of its weight, whatever the number of tokens.

    Parameters
    ----------
    layer : AffineLayer
    rtol : float
        Relative tolerance of the squared norm where it is iterated for.

    Returns
    -------
    float
        In float64: from the singular values of the matrix of the map where that is small,
        otherwise by Lanczos' iteration on products with the map and its transpose.

    References
    ----------
    .. [1] H. Sedghi et al., "The Singular Values of Convolutional Layers", ICLR 2019.
    """
    if isinstance(layer.map.layer, nn.Linear):
        return float(torch.linalg.matrix_norm(layer.weight, ord=2))
    if not is_iterated(layer):
        basis = torch.eye(layer.taken.numel()).to(layer.weight).reshape(-1, *layer.taken)
        with torch.no_grad():
            matrix = layer.apply(basis, layer.weight).flatten(1)
        return float(torch.linalg.matrix_norm(matrix, ord=2))
    operator = _as_operator(layer)
    # the start is arbitrary, but the same each time
    start = np.random.default_rng(0).standard_normal(min(operator.shape))
    (largest,) = svds(operator, k=1, v0=start, tol=rtol, return_singular_vectors=False)
    return float(largest)


def _size(layer: AffineLayer) -> int:
    return layer.taken.numel() * layer.given.numel()


def _as_operator(layer: AffineLayer) -> LinearOperator:
    shape = (layer.given.numel(), layer.taken.numel())
    origin = layer.weight.new_zeros((1, *layer.taken)).requires_grad_()
    with torch.enable_grad():
        output = layer.apply(origin, layer.weight)  # linear: its derivative is the same anywhere

    def tensor(vector: NDArray[np.float64], size: torch.Size) -> Tensor:
        return torch.from_numpy(np.asarray(vector)).to(layer.weight).reshape(1, *size)

    def product(vector: NDArray[np.float64]) -> NDArray[np.float64]:
        with torch.no_grad():
            found = layer.apply(tensor(vector, layer.taken), layer.weight)
        result: NDArray[np.float64] = found.flatten().cpu().numpy()
        return result

    def transposed(vector: NDArray[np.float64]) -> NDArray[np.float64]:
        (found,) = torch.autograd.grad(
            output, origin, tensor(vector, layer.given), retain_graph=True
        )
        result: NDArray[np.float64] = found.flatten().cpu().numpy()
        return result

    return LinearOperator(shape, matvec=product, rmatvec=transposed, dtype=np.float64)
