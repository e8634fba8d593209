"""skorch nets that are trained to be flat, and callbacks for training to convergence."""

from relflat_sk._penalty.penalty import RelativeFlatnessPenalty
from relflat_sk.training._callbacks import StopAtGradientNorm, StopAtLoss, WeightAverage
from relflat_sk.training._mlp import MLP
from relflat_sk.training._nets import (
    RelativeFlatnessRegularizedBinaryClassifier,
    RelativeFlatnessRegularizedClassifier,
    RelativeFlatnessRegularizedNet,
    RelativeFlatnessRegularizedRegressor,
)
from relflat_sk.training._sam import SharpnessAwareMixin

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
