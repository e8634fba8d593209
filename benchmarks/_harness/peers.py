"""Estimate the trace of one layer's Hessian with PyHessian and curvlinops.

Their estimators draw a given number of probes and report no standard error. The functions here
return the value of each probe, from which the caller computes the error. Both libraries are
optional: ``pip install -c constraints.txt pyhessian==0.1 curvlinops-for-pytorch==3.0.1``.
"""

import copy
import math
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

# method -> function of curvlinops, and the number that its number of products is a multiple of
DEFLATED = {"Hutch++": ("hutchpp_trace", 3), "XTrace": ("xtrace", 2)}
# numbers of vectors that curvlinops multiplies at once; the fastest is chosen
WIDTHS = (1, 4, 8)

Batches = Sequence[tuple[Tensor, Tensor]]


def _only(module: nn.Module, layer: str) -> tuple[nn.Module, nn.Parameter]:
    """Copy a network and freeze all parameters but the weight of one layer."""
    module = copy.deepcopy(module).requires_grad_(False)
    weight = module.get_submodule(layer).weight
    assert isinstance(weight, nn.Parameter)
    return module, weight.requires_grad_(True)


def pyhessian_probes(
    module: nn.Module, criterion: nn.Module, layer: str, batches: Batches
) -> Callable[[int], list[float]]:
    """Return a function that draws a number of PyHessian's Hutchinson probes.

    A single batch is passed as `data`, where PyHessian keeps the graph of the gradient between
    probes; several batches are passed as `dataloader`.
    """
    from pyhessian import hessian  # noqa: PLC0415

    module, _ = _only(module, layer)
    data = {"data": batches[0]} if len(batches) == 1 else {"dataloader": batches}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of reference cycles
        operator = hessian(module, criterion, cuda=False, **data)

    def draw(n: int) -> list[float]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # without the tolerance it would stop where two means are close by chance
            return [float(value) for value in operator.trace(maxIter=n, tol=-math.inf)]

    return draw


class Operator:
    """A Hessian of curvlinops that multiplies `width` vectors at a time.

    The quadratic forms ``v^T H v`` of the latest product are in `forms`. All vectors of a product
    together would need too much memory.
    """

    def __init__(self, operator: Any, width: int) -> None:
        self.operator, self.width = operator, width
        self.shape, self.device, self.dtype = operator.shape, operator.device, operator.dtype
        self.forms: list[float] = []

    def __matmul__(self, vectors: Tensor) -> Tensor:
        products = torch.cat([self.operator @ v for v in vectors.split(self.width, dim=1)], dim=1)
        self.forms = (vectors * products).sum(dim=0).tolist()
        return products


def curvlinops_operator(
    module: nn.Module,
    criterion: nn.Module,
    layer: str,
    batches: Batches,
    width: int | None = None,
) -> Operator:
    """Make curvlinops' Hessian in the weight of a layer, of the fastest width if none is given."""
    from curvlinops import HessianLinearOperator  # noqa: PLC0415

    module, weight = _only(module, layer)

    def operator(batches: Batches) -> Any:
        return HessianLinearOperator(
            module, criterion, [weight], list(batches), check_deterministic=False
        )

    if width is None:
        of_a_batch = operator(batches[:1])
        width = min(WIDTHS, key=lambda k: _seconds(of_a_batch, k) / k)
    return Operator(operator(batches), width)


def _seconds(operator: Any, width: int) -> float:
    """Time one product with `width` vectors, after a first one that is not timed."""
    vectors = torch.randn(operator.shape[1], width)
    operator @ vectors
    start = time.perf_counter()
    operator @ vectors
    return time.perf_counter() - start


def curvlinops_probes(operator: Operator) -> Callable[[int], list[float]]:
    """Return a function that draws a number of curvlinops' Hutchinson probes."""
    from curvlinops import hutchinson_trace  # noqa: PLC0415

    def draw(n: int) -> list[float]:
        hutchinson_trace(operator, n)
        return operator.forms

    return draw


def deflated_trace(operator: Operator, method: str, n_products: int) -> float:
    """Estimate the trace by "Hutch++" or "XTrace", with a number of products with the Hessian."""
    import curvlinops  # noqa: PLC0415

    return float(getattr(curvlinops, DEFLATED[method][0])(operator, n_products))
