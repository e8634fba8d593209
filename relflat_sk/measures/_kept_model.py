"""Lend a model to a function of the user's, and return it as it was."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import joblib
import torch
from torch import nn

from relflat_sk._models import final_estimator
from relflat_sk._network import borrowed

__all__ = ["kept_model"]


@contextmanager
def kept_model(model: Any) -> Iterator[None]:
    """Restore weights, gradients and fitted attributes when the context ends.

    Inside the context a network is in evaluation mode, see `borrowed`. Its gradients are None, so
    that a backward pass adds to no gradient of the user's.
    """
    estimator = final_estimator(model)
    module = getattr(estimator, "module_", estimator)
    if isinstance(module, nn.Module):
        module = getattr(module, "_orig_mod", module)
        with borrowed(module), _kept_parameters(module):
            yield
    else:
        # scikit-learn's estimators have no module, so that only the random state is borrowed
        with borrowed(nn.Module()), _kept_attributes(estimator):
            yield


@contextmanager
def _kept_parameters(module: nn.Module) -> Iterator[None]:
    places = [(m, name, p) for m in module.modules() for name, p in m._parameters.items()]
    kept = [(p, p.data, p.detach().clone(), p.grad, p.requires_grad) for p in module.parameters()]
    for parameter in module.parameters():
        parameter.grad = None
    try:
        yield
    finally:
        for m, name, p in places:
            m._parameters[name] = p
        for parameter, storage, content, gradient, needs_gradient in kept:
            parameter.grad = None
            parameter.data = storage
            if not torch.equal(storage, content):
                storage.copy_(content)
            parameter.grad = gradient
            parameter.requires_grad_(needs_gradient)


@contextmanager
def _kept_attributes(estimator: Any) -> Iterator[None]:
    """Restore what `fit` has set, for estimators of scikit-learn; optimizers are private there."""
    before = copy.deepcopy(_fitted_attributes(estimator))
    try:
        yield
    finally:
        after = _fitted_attributes(estimator)
        if joblib.hash(after) != joblib.hash(before):
            for name in after.keys() - before.keys():
                delattr(estimator, name)
            vars(estimator).update(before)


def _fitted_attributes(estimator: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(estimator).items()
        if name.startswith("_") or name.endswith("_")
    }
