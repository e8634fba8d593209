"""Draw minima, measures and trainings with matplotlib.

The displays follow the convention of scikit-learn. A class method ``from_...`` computes what is
drawn and draws it, ``__init__`` only stores it, and ``plot(ax=None)`` draws it (again) and
returns the display. The attributes ``ax_`` and ``figure_`` give access to the drawing. Matplotlib
is imported when something is drawn; the extra ``plot`` installs it, by ``pip install ".[plot]"`` in
a copy of the repository.
"""

from relflat_sk.plots._minima import (
    FlatnessGapDisplay,
    HyperparameterDisplay,
    LabelNoiseDisplay,
    MeasurePanelsDisplay,
    MinimaRankingDisplay,
)
from relflat_sk.plots._models import (
    LayerFlatnessDisplay,
    LayerSensitivityDisplay,
    SharpnessKLDisplay,
)
from relflat_sk.plots._training import FlatnessHistoryDisplay, TrainingCurvesDisplay

__all__ = [
    "FlatnessGapDisplay",
    "FlatnessHistoryDisplay",
    "HyperparameterDisplay",
    "LabelNoiseDisplay",
    "LayerFlatnessDisplay",
    "LayerSensitivityDisplay",
    "MeasurePanelsDisplay",
    "MinimaRankingDisplay",
    "SharpnessKLDisplay",
    "TrainingCurvesDisplay",
]
