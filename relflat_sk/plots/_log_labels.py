"""Labels of logarithmic axes. Imported when an axis needs them, since matplotlib is optional."""

from math import floor, log10

from matplotlib.ticker import LogFormatterSciNotation


class PlainLogFormatter(LogFormatterSciNotation):
    """Write 0.2 and 50 at a logarithmic axis; smaller and larger numbers remain powers of ten."""

    def __init__(self) -> None:
        super().__init__(minor_thresholds=(2.5, 2.5))  # decades that have labels between powers

    def __call__(self, x: float, pos: int | None = None) -> str:
        """Return a label, which is empty where it would be too close to others."""
        label: str = super().__call__(x, pos)
        if not label or round(x / 10 ** floor(log10(x)), 6) not in {1, 2, 5}:
            return ""
        return f"{x:g}" if 1e-3 <= x < 1e5 else label
