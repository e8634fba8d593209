"""Pictures of single models: flatness by layer, and sharpness against the size of the weights."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from relflat_sk._models import DataOptions, to_network
from relflat_sk._network import Layer
from relflat_sk.measures import flatness_report, sharpness_curve
from relflat_sk.plots._style import (
    figure_of,
    is_wide,
    label_of,
    legend_right,
    make_axes,
    panels,
    prepare,
    shorten,
    spread,
    style_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["LayerFlatnessDisplay", "SharpnessKLDisplay"]

ROW, LETTER = 0.28, 0.075  # inches of height for each layer, of width for each letter
WHOLE = "whole network"  # the layer of measures that have none
ALPHAS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05)


class LayerFlatnessDisplay:
    """Flatness layer by layer, in forward order from top to bottom.

    Use `from_estimator` to make one. The bars are standard errors, where a value is estimated.

    Parameters
    ----------
    report : pandas.DataFrame
        The result of `flatness_report`.

    Attributes
    ----------
    ax_ : matplotlib.axes.Axes
        The first panel.
    axes_ : list of matplotlib.axes.Axes
        All panels, a measure each.
    figure_ : matplotlib.figure.Figure
        Their figure.

    See Also
    --------
    flatness_report : The values as a table.
    """

    ax_: "Axes"
    axes_: "list[Axes]"
    figure_: "Figure"

    def __init__(self, *, report: pd.DataFrame) -> None:
        self.report = report

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        X: Any,
        y: Any = None,
        *,
        measures: Sequence[str] = ("relative_flatness",),
        layers: Sequence[Layer] | str = "all",
        measure_params: Mapping[str, Any] | None = None,
        ax: "Axes | None" = None,
        **kwargs: Any,
    ) -> "LayerFlatnessDisplay":
        """Measure the layers of a model, and draw them.

        Parameters
        ----------
        estimator : nn.Module or fitted estimator
            See `relative_flatness`.
        X : array-like of shape (n, ...)
            As the estimator takes it.
        y : array-like of shape (n, ...), default=None
            Labels or targets, as in fit.
        measures : sequence of str, default=("relative_flatness",)
            Some of `get_measure_names`, a panel each.
        layers : sequence of int, str or nn.Module, or "all", default="all"
            Where to measure.
        measure_params : dict or None, default=None
            Further arguments of `flatness_report`, such as
            ``{"criterion": torch.nn.CrossEntropyLoss(), "random_state": 0}``.
        ax : matplotlib.axes.Axes or None, default=None
            Where to draw, divided into panels; None makes a new figure.
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
            If there is no network in the estimator.
        ValueError
            If there is no measure or layer of a name, or data and estimator do not fit.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklearn.neural_network import MLPClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> model = MLPClassifier((8,), max_iter=2000, random_state=0).fit(X, y)
        >>> display = LayerFlatnessDisplay.from_estimator(model, X, y)
        >>> [label.get_text() for label in display.ax_.get_yticklabels()]
        ['0', '2']
        """
        names = [measures] if isinstance(measures, str) else list(measures)
        report = flatness_report(
            estimator, X, y, measures=names, layers=layers, **(measure_params or {})
        )
        # a panel each, in the order asked for
        report = pd.concat([report[report["measure"] == name] for name in names])
        return cls(report=report.reset_index(drop=True)).plot(ax=ax, **kwargs)

    def plot(
        self, ax: "Axes | None" = None, *, loss_unit: str = "nats", **kwargs: Any
    ) -> "LayerFlatnessDisplay":
        """Draw the panels.

        Parameters
        ----------
        ax : matplotlib.axes.Axes or None, default=None
            Where to draw, divided into panels; None makes a new figure.
        loss_unit : str, default="nats"
            Unit of the loss, for the axis labels: nats for cross-entropy; "" for none.
        **kwargs
            Passed on to `matplotlib.axes.Axes.errorbar`.

        Returns
        -------
        LayerFlatnessDisplay
            The display itself.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        """
        measures = list(dict.fromkeys(self.report["measure"]))
        # measures of the whole network have no layer; they come last
        layers = sorted(dict.fromkeys(self.report["layer"]), key=lambda name: name == "")
        n_rows, n_columns = spread(len(measures), ax)
        height = n_rows * (ROW * len(layers) + 1.3)
        names = [shorten(name) or WHOLE for name in layers]
        width = 0.8 + LETTER * max(map(len, names)) + 3.2 * n_columns
        ax = make_axes(ax, (width, max(height, 2.2)))
        self.axes_ = panels(ax, n_rows, n_columns, len(measures), sharey="all")
        self.ax_, self.figure_ = self.axes_[0], figure_of(self.axes_[0])
        style = style_of(0) | {"linestyle": "none", "markersize": 6, "capsize": 3} | kwargs
        for at, (measure, panel) in enumerate(zip(measures, self.axes_, strict=True)):
            rows = self.report[self.report["measure"] == measure].set_index("layer")
            value, stderr = (
                rows[column].reindex(layers).to_numpy(dtype=np.float64)
                for column in ("value", "stderr")
            )
            prepare(panel)
            if is_wide(value):
                panel.set_xscale("log")
            bars = np.nan_to_num(np.where(stderr > 0, stderr, 0.0), posinf=0.0)
            panel.errorbar(value, np.arange(len(layers)), xerr=bars, **style)
            panel.set_xlabel(label_of(measure, loss_unit))
            panel.tick_params(labelleft=at % n_columns == 0)
            if at % n_columns == 0:
                panel.set_ylabel("layer")
        self.ax_.set_yticks(range(len(layers)), names)
        self.ax_.set_ylim(len(layers) - 0.4, -0.6)
        return self


class SharpnessKLDisplay:
    r"""Expected sharpness against the price of the weights, as the noise on them varies.

    Use `from_estimator` to make one. A bound on the gap adds the two: of models on the same
    data, the one whose curve lies lower and further to the left generalizes better, by [1]_.

    Parameters
    ----------
    curves : dict of str to pandas.DataFrame
        For each model, a row per scale of noise with columns ``alpha``, ``kl``,
        ``expected_sharpness`` and ``stderr``.

    Attributes
    ----------
    ax_ : matplotlib.axes.Axes
        The axes drawn into.
    figure_ : matplotlib.figure.Figure
        Its figure.

    Notes
    -----
    Figures 2 to 4 of [1]_: weights :math:`w_i` get Gaussian noise of standard deviation
    :math:`\alpha (10 |w_i| + 1)`. Expected sharpness is how much that raises the loss, the KL
    divergence between the noise around the weights and the same around 0 falls as
    :math:`1/\alpha^2`.

    References
    ----------
    .. [1] B. Neyshabur, S. Bhojanapalli, D. McAllester, N. Srebro, "Exploring Generalization
       in Deep Learning", NeurIPS 2017.
    """

    ax_: "Axes"
    figure_: "Figure"

    def __init__(self, *, curves: dict[str, pd.DataFrame]) -> None:
        self.curves = curves

    @classmethod
    def from_estimator(  # noqa: PLR0913
        cls,
        estimator: Any,
        X: Any,
        y: Any,
        *,
        alphas: Sequence[float] = ALPHAS,
        n_draws: int = 10,
        criterion: Any = None,
        batch_size: int = 1024,
        device: Any = None,
        random_state: int | np.random.RandomState | None = None,
        ax: "Axes | None" = None,
        **kwargs: Any,
    ) -> "SharpnessKLDisplay":
        """Disturb the weights of one or several models, and draw what that does.

        Parameters
        ----------
        estimator : nn.Module, fitted estimator, or dict of these
            One model, or several by name, a curve each. See `relative_flatness` for what
            works.
        X : array-like of shape (n, ...)
            As the estimators take it, best what they were trained on.
        y : array-like of shape (n, ...)
            Labels or targets, as in fit.
        alphas : sequence of float, default=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
            Scales of the noise, relative to the weights.
        n_draws : int, default=10
            Draws of noise at each scale.
        criterion : torch loss, default=None
            Needed for bare modules; an estimator knows its own.
        batch_size : int, default=1024
            Samples in one forward pass.
        device : str or torch.device, default=None
            Where to compute; where the model is if None.
        random_state : int, RandomState or None, default=None
            For the noise. An int gives all models the same.
        ax : matplotlib.axes.Axes or None, default=None
            Where to draw; None makes a new figure.
        **kwargs
            Passed on to `plot`.

        Returns
        -------
        SharpnessKLDisplay
            The display.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        TypeError
            If there is no network in an estimator.
        ValueError
            If there is no estimator, an alpha is not positive, or data and estimator do not
            fit.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklearn.linear_model import LogisticRegression
        >>> X, y = load_iris(return_X_y=True)
        >>> models = {
        ...     f"C = {C}": LogisticRegression(C=C, max_iter=5000).fit(X, y) for C in (1, 100)
        ... }
        >>> display = SharpnessKLDisplay.from_estimator(models, X, y, random_state=0)
        >>> list(display.curves), display.ax_.get_ylabel()
        (['C = 1', 'C = 100'], 'expected sharpness (nats)')
        """
        models = dict(estimator) if isinstance(estimator, Mapping) else {"": estimator}
        if not models:
            raise ValueError("estimator is an empty dict: pass at least one fitted model.")
        options = DataOptions(criterion, batch_size, device)
        curves = {
            str(name): sharpness_curve(
                to_network(model, X, y, options),
                alphas,
                n_draws=n_draws,
                random_state=random_state,
            )
            for name, model in models.items()
        }
        return cls(curves=curves).plot(ax=ax, **kwargs)

    def plot(
        self, ax: "Axes | None" = None, *, loss_unit: str = "nats", **kwargs: Any
    ) -> "SharpnessKLDisplay":
        """Draw the curves.

        Parameters
        ----------
        ax : matplotlib.axes.Axes or None, default=None
            Where to draw; None makes a new figure.
        loss_unit : str, default="nats"
            Unit of the loss, for the axis label: nats for cross-entropy; "" for none.
        **kwargs
            Passed on to `matplotlib.axes.Axes.errorbar`.

        Returns
        -------
        SharpnessKLDisplay
            The display itself.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        """
        self.ax_ = make_axes(ax, (8.0, 4.8) if len(self.curves) > 1 else None)
        self.figure_ = figure_of(self.ax_)
        prepare(self.ax_)
        for at, (name, curve) in enumerate(self.curves.items()):
            style: dict[str, Any] = {"label": shorten(name) or None, "markersize": 5, "capsize": 3}
            style |= style_of(at) | kwargs
            self.ax_.errorbar(
                curve["kl"], curve["expected_sharpness"], yerr=curve["stderr"], **style
            )
        every = pd.concat(self.curves.values())
        if is_wide(every["kl"].to_numpy(dtype=np.float64)):
            self.ax_.set_xscale("log")
        if is_wide(every["expected_sharpness"].to_numpy(dtype=np.float64)):
            self.ax_.set_yscale("log")
        low, high = every["alpha"].min(), every["alpha"].max()
        ends = f"$\\alpha$ = {high:.3g} (left) to {low:.3g} (right)"
        self.ax_.set_xlabel(f"KL divergence (nats), from {ends}")
        self.ax_.set_ylabel(label_of("expected_sharpness", loss_unit))
        legend_right(self.ax_)
        return self
