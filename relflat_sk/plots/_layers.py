"""Flatness of one model, layer by layer."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from relflat_sk._network import Layer
from relflat_sk.measures import find_measures, flatness_report
from relflat_sk.plots._display import EstimatorDisplay, with_unit
from relflat_sk.plots._labels import label_of, shorten
from relflat_sk.plots._panels import divide, figure_of, grid_shape, make_axes
from relflat_sk.plots._style import choose_scale, curve_style, draw_grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["LayerFlatnessDisplay"]

LAYER_HEIGHT, LETTER_WIDTH = 0.28, 0.075  # inches
# arguments that `from_estimator` passes itself, and their names there
OWN_ARGUMENTS = {
    "layer": "layers",
    "layers": "layers",
    "measure": "measures",
    "measures": "measures",
    "model": "estimator",
    "X": "X",
    "y": "y",
}
# arguments of `flatness_report` that matplotlib would get, which has none of these names
REPORT_ARGUMENTS = {
    "batch_size",
    "criterion",
    "device",
    "method",
    "n_probes",
    "process_group",
    "random_state",
    "rtol",
    "sample_weight",
    "weight_decay",
}
WHOLE_NETWORK = "whole network"  # label of values that belong to no layer


class LayerFlatnessDisplay(EstimatorDisplay):
    """Display of flatness layer by layer, in forward order from top to bottom.

    Make one with `from_estimator`. Layers are labelled by position and name. The bars are
    standard errors of estimated values.

    Parameters
    ----------
    report : pandas.DataFrame
        The result of `flatness_report`.

    Attributes
    ----------
    ax_ : matplotlib.axes.Axes
        The first panel.
    axes_ : list of matplotlib.axes.Axes
        All panels, one for each measure.
    figure_ : matplotlib.figure.Figure
        The figure of the panels.

    See Also
    --------
    flatness_report : Compute the values as a table.
    """

    axes_: "list[Axes]"

    def __init__(self, *, report: pd.DataFrame) -> None:
        self.report = report

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        X: Any,
        y: Any = None,
        *,
        measures: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] = (
            "relative_flatness",
        ),
        layers: Layer | Sequence[Layer] = "all",
        measure_params: Mapping[str, Any] | None = None,
        ax: "Axes | None" = None,
        **kwargs: Any,
    ) -> "LayerFlatnessDisplay":
        """Measure the layers of a model, and draw the values.

        Parameters
        ----------
        estimator : nn.Module or fitted estimator
            The model; `relative_flatness` lists the supported models.
        X : array-like of shape (n, ...)
            Samples in the form the estimator takes.
        y : array-like of shape (n, ...), default=None
            Labels or targets, as in fit.
        measures : str, callable or sequence of these, default=("relative_flatness",)
            Names of measures, see `get_measure_names`, or functions of model, X and y, see
            `register_measure`, with a panel for each.
        layers : int, str, nn.Module, a sequence of these, or "all", default="all"
            The layers to measure.
        measure_params : dict or None, default=None
            Further arguments of `flatness_report`, such as
            ``{"criterion": torch.nn.CrossEntropyLoss(), "random_state": 0}``.
        ax : matplotlib.axes.Axes or None, default=None
            The axes to draw in, which are divided into panels; None makes a new figure.
        **kwargs
            Passed on to `plot`.

        Returns
        -------
        LayerFlatnessDisplay
            The display.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        TypeError
            If the estimator holds no network, or an argument of `flatness_report` is given by
            itself instead of in `measure_params`.
        ValueError
            If a measure or layer does not exist, or data and estimator do not fit together.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklearn.neural_network import MLPClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> model = MLPClassifier((8,), max_iter=2000, random_state=0).fit(X, y)
        >>> display = LayerFlatnessDisplay.from_estimator(model, X, y)
        >>> [label.get_text() for label in display.ax_.get_yticklabels()]
        ['0: hidden0', '1: output']
        """
        for name in kwargs.keys() & REPORT_ARGUMENTS:
            raise TypeError(
                f"from_estimator has no argument {name!r}: pass it in measure_params, as "
                f'measure_params={{"{name}": ...}}.'
            )
        names, params = find_measures(measures), _check_params(measure_params)
        report = flatness_report(estimator, X, y, measures=names, layers=layers, **params)
        # the report has an order of its own; the panels follow the user's
        report = pd.concat([report[report["measure"] == name] for name in names])
        display = cls(report=report.reset_index(drop=True))
        return display.plot(ax=ax, **with_unit(kwargs, estimator))

    def _draw(self, ax: "Axes | None", loss_unit: str, kwargs: dict[str, Any]) -> None:
        """Draw a panel for each measure."""
        measures = list(dict.fromkeys(self.report["measure"]))
        # values of the whole network have no layer; they come last
        layers = sorted(dict.fromkeys(self.report["layer"]), key=lambda name: name == "")
        names = self._name_layers(layers)
        n_columns = self._make_panels(ax, len(measures), names)
        style = curve_style(0) | {"linestyle": "none", "markersize": 6, "capsize": 3} | kwargs
        for number, (measure, panel) in enumerate(zip(measures, self.axes_, strict=True)):
            rows = self.report[self.report["measure"] == measure].set_index("layer")
            value, stderr = (
                rows[column].reindex(layers).to_numpy(dtype=np.float64)
                for column in ("value", "stderr")
            )
            draw_grid(panel)
            choose_scale(panel.xaxis, value)
            bars = np.nan_to_num(np.where(stderr > 0, stderr, 0.0), posinf=0.0)
            panel.errorbar(value, np.arange(len(layers)), xerr=bars, **style)
            panel.set_xlabel(label_of(measure, loss_unit))
            panel.tick_params(labelleft=number % n_columns == 0)
            if number % n_columns == 0:
                panel.set_ylabel("layer")
        self.ax_.set_yticks(range(len(layers)), names)
        self.ax_.set_ylim(len(layers) - 0.4, -0.6)

    def _name_layers(self, layers: Sequence[str]) -> list[str]:
        """Return a label for each layer: its position, if the report has it, and its name."""
        prefixes = dict.fromkeys(layers, "")
        if "position" in self.report:
            known = self.report.dropna(subset="position")
            for name, position in zip(known["layer"], known["position"], strict=True):
                prefixes[name] = f"{position:.0f}: "
        return [prefixes[name] + shorten(name) if name else WHOLE_NETWORK for name in layers]

    def _make_panels(self, ax: "Axes | None", n: int, names: list[str]) -> int:
        """Make n panels large enough for the names of the layers, and return the columns."""
        n_rows, n_columns = grid_shape(n, ax)
        width = 0.8 + LETTER_WIDTH * max(map(len, names)) + 3.2 * n_columns
        height = n_rows * (LAYER_HEIGHT * len(names) + 1.3)
        place = make_axes(ax, (width, max(height, 2.2)))
        self.axes_ = divide(place, n_rows, n_columns, n, sharey="all")
        self.ax_, self.figure_ = self.axes_[0], figure_of(self.axes_[0])
        return n_columns


def _check_params(measure_params: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Check further arguments of `flatness_report`, and return them."""
    if not isinstance(measure_params, Mapping | None):
        raise TypeError(
            f"measure_params={measure_params!r}, expected None or a dict of further arguments of "
            'flatness_report, such as {"batch_size": 256}.'
        )
    for name in OWN_ARGUMENTS.keys() & (measure_params or {}).keys():
        raise ValueError(
            f"measure_params={measure_params!r} must not contain {name!r}: give it to "
            f"from_estimator itself, as {OWN_ARGUMENTS[name]}=..."
        )
    return measure_params or {}
