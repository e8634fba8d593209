"""The figure, the axes and the panels that a display draws in."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "divide",
    "figure_of",
    "grid_shape",
    "has_layout",
    "label_rows",
    "make_axes",
    "make_panels",
    "require_matplotlib",
]

MAX_COLUMNS = 4
PANEL_SIZE = (3.3, 2.8)  # inches
MIN_WIDTH = 2.6  # inches, of a panel with readable labels
MIN_HEIGHT = 1.5  # inches, of a panel with room for a label beside it


def require_matplotlib() -> None:
    """Check that matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401, PLC0415
    except ImportError as error:
        raise ImportError(
            "The displays of relflat_sk draw with matplotlib, which is not installed. "
            'Install it with: pip install "relflat_sk[plot]"'
        ) from error


def make_axes(ax: "Axes | None", size: tuple[float, float] | None = None) -> "Axes":
    """Return the axes to draw in."""
    require_matplotlib()
    from matplotlib import pyplot  # noqa: PLC0415

    return pyplot.subplots(layout="constrained", figsize=size)[1] if ax is None else ax


def figure_of(ax: "Axes") -> "Figure":
    """Return the figure of some axes, also of axes in a subfigure."""
    # get_figure(root=True) does not exist in matplotlib 3.8
    return ax.figure.figure


def has_layout(ax: "Axes") -> bool:
    """Return whether the figure has a layout engine, which makes room around axes."""
    return figure_of(ax).get_layout_engine() is not None


def divide(
    ax: "Axes", n_rows: int, n_columns: int, n: int | None = None, **share: str
) -> "list[Axes]":
    """Divide the space of some axes into panels."""
    figure, spec = ax.figure, ax.get_subplotspec()
    if spec is None:
        box = ax.get_position()
        whole = figure.add_gridspec(1, 1, left=box.x0, right=box.x1, bottom=box.y0, top=box.y1)
        spec = whole[0]
    grid = spec.subgridspec(n_rows, n_columns, hspace=None if has_layout(ax) else 0.5)
    ax.set_subplotspec(grid[0, 0])
    shared = dict.fromkeys(share, ax)
    count = n_rows * n_columns if n is None else n
    places = [divmod(number, n_columns) for number in range(1, count)]
    return [ax, *(figure.add_subplot(grid[place], **shared) for place in places)]


def grid_shape(n: int, ax: "Axes | None" = None) -> tuple[int, int]:
    """Return the shape of a grid for a number of panels."""
    n_columns = -(-n // -(-n // (3 if n <= 9 else MAX_COLUMNS)))  # nearly fills the last row
    if ax is not None:
        width = ax.bbox.width / figure_of(ax).dpi
        n_columns = max(1, min(n_columns, int(width / MIN_WIDTH)))
    return -(-n // n_columns), n_columns


def make_panels(ax: "Axes | None", n: int, **share: str) -> "tuple[list[Axes], int]":
    """Make panels with a common y axis."""
    n_rows, n_columns = grid_shape(n, ax)
    size = (n_columns * PANEL_SIZE[0] + 0.6, n_rows * PANEL_SIZE[1])
    return divide(make_axes(ax, size), n_rows, n_columns, n, sharey="all", **share), n_columns


def label_rows(panels: "list[Axes]", n_columns: int, label: str) -> None:
    """Label the common y axis of panels at the first panel of every row.

    Where the rows are too low for that, only the row in the middle gets the label.
    """
    firsts = panels[::n_columns]
    for panel in panels:
        panel.tick_params(labelleft=panel in firsts)
    height = panels[0].bbox.height / figure_of(panels[0]).dpi
    for panel in firsts if height > MIN_HEIGHT else firsts[len(firsts) // 2 :][:1]:
        panel.set_ylabel(label, fontsize="small")
