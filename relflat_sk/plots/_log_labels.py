"""Labels of logarithmic axes. Imported when an axis needs them, since matplotlib is optional."""

from matplotlib.ticker import LogFormatterSciNotation


class PlainLogFormatter(LogFormatterSciNotation):
    """Write 0.2 and 40 at a logarithmic axis; smaller and larger numbers remain powers of ten."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        """Return a label, which is empty where it would be too close to others."""
        label: str = super().__call__(x, pos)
        return f"{x:g}" if label and 1e-3 <= x < 1e4 else label
