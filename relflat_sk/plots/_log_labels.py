"""Labels of logarithmic axes. Imported when an axis needs them, since matplotlib is optional."""

from matplotlib.axis import XAxis, YAxis
from matplotlib.ticker import LogFormatterSciNotation

__all__ = ["label_plainly"]


def label_plainly(axis: XAxis | YAxis) -> None:
    """Write 0.2 and 40 at a logarithmic axis; smaller and larger numbers remain powers of ten."""
    axis.set_major_formatter(_PlainLogFormatter())
    axis.set_minor_formatter(_PlainLogFormatter())


class _PlainLogFormatter(LogFormatterSciNotation):
    def __call__(self, x: float, pos: int | None = None) -> str:
        label: str = super().__call__(x, pos)  # empty where it would be too close to others
        return f"{x:g}" if label and 1e-3 <= x < 1e4 else label
