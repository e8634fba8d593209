"""skorch nets that are trained to be flat, and callbacks for training to convergence.

The callbacks for other libraries' trainers need extras and are imported on demand:
``LightningFlatnessCallback`` (``pip install "relflat_sk[lightning]"``) and
``TransformersFlatnessCallback`` (``pip install "relflat_sk[transformers]"``).
"""

from importlib import import_module as _import_module
from typing import Any as _Any

from relflat_sk._penalty.penalty import RelativeFlatnessPenalty
from relflat_sk.training._convergence import StopAtGradientNorm, StopAtLoss
from relflat_sk.training._mlp import MLP
from relflat_sk.training._nets import (
    RelativeFlatnessRegularizedBinaryClassifier,
    RelativeFlatnessRegularizedClassifier,
    RelativeFlatnessRegularizedNet,
    RelativeFlatnessRegularizedRegressor,
)
from relflat_sk.training._sam import SharpnessAwareMixin
from relflat_sk.training._weight_average import WeightAverage

__all__ = [
    "MLP",
    "RelativeFlatnessPenalty",
    "RelativeFlatnessRegularizedBinaryClassifier",
    "RelativeFlatnessRegularizedClassifier",
    "RelativeFlatnessRegularizedNet",
    "RelativeFlatnessRegularizedRegressor",
    "SharpnessAwareMixin",
    "StopAtGradientNorm",
    "StopAtLoss",
    "WeightAverage",
]

# outside of __all__, because the import of each needs an extra
_OF_EXTRAS = {
    "LightningFlatnessCallback": "_lightning",
    "TransformersFlatnessCallback": "_transformers",
}


def __getattr__(name: str) -> _Any:
    if name in _OF_EXTRAS:
        return getattr(_import_module(f"{__name__}.{_OF_EXTRAS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
