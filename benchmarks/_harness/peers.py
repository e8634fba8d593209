"""Estimate the trace of one layer's Hessian with PyHessian and curvlinops.

Their estimators draw a given number of probes and report no standard error. The functions here
return the value of each probe, from which the caller computes the error. Both libraries are
optional: ``pip install -c constraints.txt pyhessian==0.1 curvlinops-for-pytorch==3.0.1``.
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
# method -> function of curvlinops, and the number that its number of products is a multiple of
DEFLATED = {"Hutch++": ("hutchpp_trace", 3), "XTrace": ("xtrace", 2)}
# numbers of vectors that curvlinops multiplies at once; the fastest is chosen
WIDTHS = (1, 4, 8)

Batches = Sequence[tuple[Tensor, Tensor]]


class MissingPeer(ImportError):
    """A library to compare with is not installed; the message says how to install it."""


def load(package: str) -> Any:
    """Import pyhessian or curvlinops.

    Parameters
    ----------
    package : {"pyhessian", "curvlinops"}
        Name of the package.

    Returns
    -------
    module
        The imported package.

    Raises
    ------
    MissingPeer
        If the package is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingPeer(
            f"{package} is missing ({error}): pip install -c constraints.txt {PIP[package]}"
        ) from error


def _only(module: nn.Module, layer: str) -> tuple[nn.Module, nn.Parameter]:
    """Copy a network and freeze all parameters but the weight of one layer."""
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
    module : nn.Module
        The network.
    criterion : nn.Module
        The loss, with mean reduction.
    layer : str
        Name of the layer; the Hessian is taken in its weight.
    batches : sequence of (Tensor, Tensor)
        Inputs and targets. A single batch is passed as `data`, where PyHessian keeps the
        graph of the gradient between probes; several batches are passed as `dataloader`.

    Returns
    -------
    callable
        Takes a number of probes, draws them, and returns their values.

    Raises
    ------
    MissingPeer
        If PyHessian is not installed.
    """
    hessian = load("pyhessian").hessian
    module, _ = _only(module, layer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of reference cycles
        if len(batches) == 1:
            found = hessian(module, criterion, data=batches[0], cuda=False)
        else:
            found = hessian(module, criterion, dataloader=batches, cuda=False)

    def draw(n: int) -> list[float]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # without the tolerance it would stop where two means are close by chance
            return [float(value) for value in found.trace(maxIter=n, tol=-math.inf)]

    return draw


class Operator:
    """A Hessian of curvlinops that multiplies a few vectors at a time and keeps their forms.

    The quadratic forms ``v^T H v`` of the latest product are in `forms`.

    Parameters
    ----------
    operator : curvlinops.HessianLinearOperator
        The Hessian.
    width : int
        Number of vectors that are multiplied at once; all of them together would need too
        much memory.
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
    """Set up curvlinops' Hessian in the weight of one layer.

    Parameters
    ----------
    module : nn.Module
        The network.
    criterion : nn.Module
        The loss, with mean reduction.
    layer : str
        Name of the layer.
    batches : sequence of (Tensor, Tensor)
        Inputs and targets.
    width : int, optional
        Number of vectors that are multiplied at once. If None, 1, 4 and 8 are tried on one
        batch and the fastest is taken.

    Returns
    -------
    Operator
        The Hessian of the mean loss.

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
    """Time one product with `width` vectors, after a first one that is not timed."""
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
        The Hessian.

    Returns
    -------
    callable
        Takes a number of probes, draws them, and returns their values.
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
        The Hessian.
    method : {"Hutch++", "XTrace"}
        The estimator.
    n_products : int
        Number of products with the Hessian.

    Returns
    -------
    float
        The estimate.
    """
    function, _ = DEFLATED[method]
    return float(getattr(load("curvlinops"), function)(operator, n_products))
