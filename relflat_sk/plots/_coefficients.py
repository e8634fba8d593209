"""Which measures a display compares, and their correlation coefficients as text."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from relflat_sk.minima import FEWEST_MINIMA, column_of, correlate, measure_columns, numeric_column
from relflat_sk.plots._labels import label_of
from relflat_sk.plots._points import Points

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["SYMBOLS", "choose_measures", "correlation_of", "show_correlation"]

SYMBOLS = {
    "pearson": "Pearson $r$",
    "spearman": "Spearman $\\rho$",
    "kendall": "Kendall $\\tau$",
}


def choose_measures(
    minima: pd.DataFrame,
    measures: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | None,
    target: str,
) -> list[str]:
    """Return the measures to draw."""
    if measures is None:
        names = [name for name in measure_columns(minima) if name != target]
    else:
        given = [measures] if isinstance(measures, str) or callable(measures) else measures
        names = [column_of(measure) for measure in given]
    for name in names:
        numeric_column(minima, name, argument="measures")
    if not names:
        raise ValueError(
            "There are no measures to draw: name numeric columns as measures, or run a search "
            "that records measures."
        )
    return names


def correlation_of(
    minima: pd.DataFrame, measure: str, target: str, random_state: Any
) -> "pd.Series[Any] | None":
    """Return the row of `correlate` for one measure."""
    x = numeric_column(minima, measure, argument="measure")
    y = numeric_column(minima, target, argument="target")
    used = Points(minima, x, y).converged
    if used.sum() < FEWEST_MINIMA:
        return None
    pairs = pd.DataFrame({"measure": x[used], "target": y[used]})
    return correlate(pairs, "target", random_state=random_state).iloc[0]


def show_correlation(
    ax: "Axes",
    correlation: "pd.Series[Any] | None",
    names: Sequence[str] = ("pearson", "kendall"),
    fontsize: str = "medium",
    between: tuple[str, str] | None = None,
) -> None:
    """Write coefficients with their intervals above the axes."""
    if correlation is None:
        return
    parts = []
    for name in names:
        value, low, high = (correlation[name + end] for end in ("", "_low", "_high"))
        parts.append(f"{SYMBOLS[name]} = {value:z.2f} [{low:z.2f}, {high:z.2f}]")
    text = ",  ".join([*parts, f"$n$ = {correlation['n']}"])
    if between is not None:
        text = " and ".join(label_of(name, "") for name in between) + f"\n{text}"
    ax.set_title(text, fontsize=fontsize, pad=9)
