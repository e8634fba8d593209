"""Draw minima, measures and trainings with matplotlib.

The displays follow the convention of scikit-learn. A class method ``from_...`` computes what is
drawn and draws it, ``__init__`` only stores it, and ``plot(ax=None)`` draws it (again) and
returns the display. The attributes ``ax_`` and ``figure_`` give access to the drawing. Matplotlib
is imported when something is drawn; ``pip install "relflat_sk[plot]"`` installs it.
"""

from relflat_sk.plots._gap import FlatnessGapDisplay
from relflat_sk.plots._history import FlatnessHistoryDisplay
from relflat_sk.plots._label_noise import LabelNoiseDisplay
from relflat_sk.plots._layers import LayerFlatnessDisplay
from relflat_sk.plots._measures import MeasurePanelsDisplay
from relflat_sk.plots._ranking import MinimaRankingDisplay
from relflat_sk.plots._sharpness_kl import SharpnessKLDisplay

__all__ = [
    "FlatnessGapDisplay",
    "FlatnessHistoryDisplay",
    "LabelNoiseDisplay",
    "LayerFlatnessDisplay",
    "MeasurePanelsDisplay",
    "MinimaRankingDisplay",
    "SharpnessKLDisplay",
]
