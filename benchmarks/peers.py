"""Traces of one layer's Hessian as other libraries estimate them.

Their estimators draw a given number of probes and report no error. Here each of them hands
out its probes one by one, so that the caller can see the spread. The libraries are optional:
``pip install -c constraints.txt pyhessian==0.1 curvlinops-for-pytorch==3.0.1``.
"""

import copy
import importlib
import math
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "DEFLATED",
    "PIP",
    "MissingPeer",
    "Operator",
    "curvlinops_operator",
    "curvlinops_probes",
    "deflated_trace",
    "load",
    "pyhessian_probes",
]

PIP = {"pyhessian": "pyhessian==0.1", "curvlinops": "curvlinops-for-pytorch==3.0.1"}
# functions of curvlinops by the names of the methods, and what their products are multiples of
DEFLATED = {"Hutch++": ("hutchpp_trace", 3), "XTrace": ("xtrace", 2)}
# as many vectors at once that curvlinops may multiply with
WIDTHS = (1, 4, 8)

Batches = Sequence[tuple[Tensor, Tensor]]


class MissingPeer(ImportError):
    """A library to compare with is not installed; the message says how to."""


def load(package: str) -> Any:
    """Import pyhessian or curvlinops.

    Raises
    ------
    MissingPeer
        If it is not installed; says how to.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingPeer(
            f"{package} is missing ({error}): pip install -c constraints.txt {PIP[package]}"
        ) from error


def _only(module: nn.Module, layer: str) -> tuple[nn.Module, nn.Parameter]:
    """Copy a network in which nothing but one layer's weight takes part in derivatives."""
    module = copy.deepcopy(module).requires_grad_(False)
    weight = module.get_submodule(layer).weight
    assert isinstance(weight, nn.Parameter)
    return module, weight.requires_grad_(True)


def pyhessian_probes(
    module: nn.Module, criterion: nn.Module, layer: str, batches: Batches
) -> Callable[[int], list[float]]:
    """Set up PyHessian's Hutchinson estimator.

    Parameters
    ----------
    module, criterion : nn.Module
    layer : str
        Name of the layer whose weight counts.
    batches : sequence of (Tensor, Tensor)
        A single one goes in as `data`, where PyHessian keeps the gradient's graph between
        probes; more of them as `dataloader`.

    Returns
    -------
    callable
        From a number of probes to their values.

    Raises
    ------
    MissingPeer
        If PyHessian is not installed.
    """
    hessian = load("pyhessian").hessian
    module, _ = _only(module, layer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of reference cycles
        if len(batches) == 1:
            found = hessian(module, criterion, data=batches[0], cuda=False)
        else:
            found = hessian(module, criterion, dataloader=batches, cuda=False)

    def draw(n: int) -> list[float]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # the tolerance: never stop early, by luck, where two means are close
            return [float(value) for value in found.trace(maxIter=n, tol=-math.inf)]

    return draw


class Operator:
    """A linear operator of curvlinops that takes a few vectors at a time, and remembers.

    Parameters
    ----------
    operator : curvlinops.HessianLinearOperator
    width : int
        As many vectors are multiplied at once: all of them together need too much memory.
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
    """Set up the Hessian in one layer's weight.

    Parameters
    ----------
    module, criterion, layer, batches
        See `pyhessian_probes`.
    width : int, optional
        Vectors to multiply at once; the fastest of a few, tried on one batch, if None.

    Returns
    -------
    Operator

    Raises
    ------
    MissingPeer
        If curvlinops is not installed.
    """
    make = load("curvlinops").HessianLinearOperator
    module, weight = _only(module, layer)

    def operator(batches: Batches) -> Any:
        return make(module, criterion, [weight], list(batches), check_deterministic=False)

    if width is None:
        one = operator(batches[:1])
        width = min(WIDTHS, key=lambda k: _seconds(one, k) / k)
    return Operator(operator(batches), width)


def _seconds(operator: Any, width: int) -> float:
    vectors = torch.randn(operator.shape[1], width)
    operator @ vectors
    start = time.perf_counter()
    operator @ vectors
    return time.perf_counter() - start


def curvlinops_probes(operator: Operator) -> Callable[[int], list[float]]:
    """Set up curvlinops' Hutchinson estimator.

    Parameters
    ----------
    operator : Operator

    Returns
    -------
    callable
        From a number of probes to their values.
    """
    trace = load("curvlinops").hutchinson_trace

    def draw(n: int) -> list[float]:
        trace(operator, n)
        return operator.forms

    return draw


def deflated_trace(operator: Operator, method: str, n_products: int) -> float:
    """Estimate the trace once by Hutch++ or XTrace.

    Parameters
    ----------
    operator : Operator
    method : {"Hutch++", "XTrace"}
    n_products : int
        Products with the Hessian to spend.

    Returns
    -------
    float
    """
    function, _ = DEFLATED[method]
    return float(getattr(load("curvlinops"), function)(operator, n_products))
