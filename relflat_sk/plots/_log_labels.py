"""Labels of logarithmic axes. Imported when an axis needs them, since matplotlib is optional."""

from matplotlib.ticker import LogFormatterSciNotation

__all__ = ["PlainLogFormatter"]


class PlainLogFormatter(LogFormatterSciNotation):
    """Write 0.2 and 40 instead of powers of ten, which remain for smaller and larger numbers."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        """Return the label of a tick, empty where it would be too close to others."""
        label: str = super().__call__(x, pos)
        return f"{x:g}" if label and 1e-3 <= x < 1e4 else label
