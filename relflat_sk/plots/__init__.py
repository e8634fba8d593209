"""Displays, in scikit-learn's convention."""

from relflat_sk.plots._history import FlatnessHistoryDisplay
from relflat_sk.plots._label_noise import LabelNoiseDisplay
from relflat_sk.plots._measures import MeasurePanelsDisplay
from relflat_sk.plots._minima import FlatnessGapDisplay, MinimaRankingDisplay
from relflat_sk.plots._models import LayerFlatnessDisplay, SharpnessKLDisplay

__all__ = [
    "FlatnessGapDisplay",
    "FlatnessHistoryDisplay",
    "LabelNoiseDisplay",
    "LayerFlatnessDisplay",
    "MeasurePanelsDisplay",
    "MinimaRankingDisplay",
    "SharpnessKLDisplay",
]
