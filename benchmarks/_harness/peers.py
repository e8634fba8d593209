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
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

CURVLINOPS = "curvlinops Hutchinson"
# method -> function of curvlinops
DEFLATED = {"Hutch++": "hutchpp_trace", "XTrace": "xtrace"}
# numbers of vectors that curvlinops multiplies at once; the fastest is chosen
WIDTHS = (1, 4, 8)

Batches = Sequence[tuple[Tensor, Tensor]]
Draw = Callable[[int], list[float]]  # draws a number of probes


def probes(
    module: nn.Module, criterion: nn.Module, layer: str, batches: Batches
) -> dict[str, Draw]:
    """Return functions that draw Hutchinson probes of the libraries that are installed."""
    draws: dict[str, Draw] = {}
    if find_spec("pyhessian"):
        if len(batches) > 1:
            draws["PyHessian"] = _pyhessian(module, criterion, layer, dataloader=batches)
        # where it keeps the graph of the gradient between probes
        data = tuple(map(torch.cat, zip(*batches, strict=True)))
        draws["PyHessian, one batch"] = _pyhessian(module, criterion, layer, data=data)
    if find_spec("curvlinops"):
        from curvlinops import hutchinson_trace  # noqa: PLC0415

        operator = curvlinops_operator(module, criterion, layer, batches)

        def draw(n: int) -> list[float]:
            hutchinson_trace(operator, n)
            return operator.forms

        draws[CURVLINOPS] = draw
    return draws


def _only(module: nn.Module, layer: str) -> tuple[nn.Module, nn.Parameter]:
    """Copy a network and freeze all parameters but the weight of one layer."""
    module = copy.deepcopy(module).requires_grad_(False)
    weight = module.get_submodule(layer).weight
    assert isinstance(weight, nn.Parameter)
    return module, weight.requires_grad_(True)


def _pyhessian(module: nn.Module, criterion: nn.Module, layer: str, **data: Any) -> Draw:
    from pyhessian import hessian  # noqa: PLC0415

    def quietly(call: Callable[..., Any], *args: Any, **arguments: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of reference cycles
            return call(*args, **arguments)

    operator = quietly(hessian, _only(module, layer)[0], criterion, cuda=False, **data)
    # without the tolerance it would stop where two means are close by chance
    return lambda n: [*map(float, quietly(operator.trace, maxIter=n, tol=-math.inf))]


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
    module: nn.Module, criterion: nn.Module, layer: str, batches: Batches
) -> Operator:
    """Make curvlinops' Hessian in the weight of a layer, of the width that is fastest."""
    from curvlinops import HessianLinearOperator  # noqa: PLC0415

    module, weight = _only(module, layer)
    of_a_batch, of_all = (
        HessianLinearOperator(module, criterion, [weight], [*some], check_deterministic=False)
        for some in (batches[:1], batches)
    )

    def seconds(width: int) -> float:
        vectors = torch.randn(of_a_batch.shape[1], width)
        of_a_batch @ vectors  # a first one that is not timed
        start = time.perf_counter()
        of_a_batch @ vectors
        return (time.perf_counter() - start) / width

    return Operator(of_all, min(WIDTHS, key=seconds))


def deflated_trace(operator: Operator, method: str, n_products: int) -> float:
    """Estimate the trace by "Hutch++" or "XTrace", with a number of products with the Hessian."""
    import curvlinops  # noqa: PLC0415

    return float(getattr(curvlinops, DEFLATED[method])(operator, n_products))
