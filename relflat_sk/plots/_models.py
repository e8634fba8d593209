"""Displays of trained models: their layers, and how noise on their weights raises the loss."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from relflat_sk._models.network_of import open_model
from relflat_sk._network.layers import Layer
from relflat_sk.measures import flatness_report, layer_sensitivity
from relflat_sk.measures._measure_network import find_measures
from relflat_sk.measures._sharpness import sharpness_curve
from relflat_sk.plots._base import (
    ON_THE_RIGHT,
    EstimatorDisplay,
    choose_scale,
    curve_style,
    draw_grid,
    draw_legend,
    label_of,
    make_axes,
    make_panels,
    measure_label,
    shorten,
    with_unit,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LAYER_HEIGHT, LETTER_WIDTH = 0.28, 0.075  # inches
WHOLE_NETWORK = "whole network"  # label of values that belong to no layer
ALPHAS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05)


def _refuse_arguments(
    arguments: Mapping[str, Any], function: Callable[..., Any], argument: str
) -> None:
    """Refuse arguments of a function among those of `plot`: matplotlib has none of these names."""
    for name in arguments.keys() & signature(function).parameters:
        raise TypeError(
            f"from_estimator has no argument {name!r}: pass it in {argument}, as "
            f'{argument}={{"{name}": ...}}.'
        )


def _layer_panels(ax: "Axes | None", n: int, names: Sequence[str]) -> "list[Axes]":
    """Make panels with a row for each layer, the first one at the top."""
    height, margin = LAYER_HEIGHT * len(names) + 1.3, LETTER_WIDTH * max(map(len, names)) + 0.6
    panels = make_panels(ax, n, "layer", height=height, margin=margin)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].set_ylim(len(names) - 0.4, -0.6)
    return panels


@dataclass(kw_only=True, eq=False, repr=False)
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
    axes_ : list of matplotlib.axes.Axes
        All panels, one for each measure.
    ax_, figure_ : matplotlib.axes.Axes, matplotlib.figure.Figure
        The first panel, and its figure.

    See Also
    --------
    flatness_report : The values as a table.
    LayerSensitivityDisplay : The rise of the loss if layers are rounded.
    """

    report: pd.DataFrame

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
            `measure`, with a panel for each.
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
        _refuse_arguments(kwargs, flatness_report, "measure_params")
        columns = find_measures(measures)
        report = flatness_report(
            estimator, X, y, measures=[*columns.values()], layers=layers, **(measure_params or {})
        )
        # the report has an order of its own; the panels follow the user's
        report = pd.concat([report[report["measure"] == name] for name in columns])
        display = cls(report=report.reset_index(drop=True))
        return display.plot(ax=ax, **with_unit(kwargs, [estimator]))

    def _draw(self, ax: "Axes | None", loss_unit: str, kwargs: dict[str, Any]) -> "list[Axes]":
        measures = list(dict.fromkeys(self.report["measure"]))
        # values of the whole network have no layer; they come last
        layers = sorted(dict.fromkeys(self.report["layer"]), key=lambda name: name == "")
        position = dict(zip(self.report["layer"], self.report["position"], strict=True))
        names = [f"{position[x]:.0f}: {shorten(x)}" if x else WHOLE_NETWORK for x in layers]
        panels = _layer_panels(ax, len(measures), names)
        style = curve_style(0) | {"linestyle": "none", "markersize": 6, "capsize": 3} | kwargs
        for measure, panel in zip(measures, panels, strict=True):
            rows = self.report[self.report["measure"] == measure].set_index("layer")
            value, stderr = (
                rows[column].reindex(layers).to_numpy(dtype=np.float64)
                for column in ("value", "stderr")
            )
            draw_grid(panel)
            bars = np.nan_to_num(np.where(stderr > 0, stderr, 0.0), posinf=0.0)
            panel.errorbar(value, np.arange(len(layers)), xerr=bars, **style)
            choose_scale(panel.xaxis, value)
            label = measure_label if len(panels) == 1 else label_of  # room for a long one
            panel.set_xlabel(label(measure, loss_unit))
        return panels


@dataclass(kw_only=True, eq=False, repr=False)
class LayerSensitivityDisplay(EstimatorDisplay):
    """Display of the rise of the loss if the weight of one layer is rounded to few bits.

    Make one with `from_estimator`. There is a color for each number of bits. Bars are standard
    errors, and crosses are measured rises.

    Parameters
    ----------
    table : pandas.DataFrame
        The result of `layer_sensitivity`.

    Attributes
    ----------
    ax_, figure_ : matplotlib.axes.Axes, matplotlib.figure.Figure
        The axes with the layers, and their figure.

    See Also
    --------
    layer_sensitivity : The values as a table.
    LayerFlatnessDisplay : The flatness of all layers.
    """

    table: pd.DataFrame

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        X: Any,
        y: Any,
        *,
        bits: int | Sequence[int] = (8, 4),
        measured: bool = False,
        sensitivity_params: Mapping[str, Any] | None = None,
        ax: "Axes | None" = None,
        **kwargs: Any,
    ) -> "LayerSensitivityDisplay":
        """Predict the rise of the loss for the layers of a model, and draw it.

        Parameters
        ----------
        estimator : nn.Module or fitted estimator
            The model; `relative_flatness` lists the supported models.
        X : array-like of shape (n, ...)
            Samples in the form the estimator takes.
        y : array-like of shape (n, ...)
            Labels or targets, as in fit.
        bits : int or sequence of int, default=(8, 4)
            Numbers of bits.
        measured : bool, default=False
            Whether to measure the rises as well.
        sensitivity_params : dict or None, default=None
            Further arguments of `layer_sensitivity`, such as
            ``{"criterion": torch.nn.CrossEntropyLoss(), "per_channel": False}``.
        ax : matplotlib.axes.Axes or None, default=None
            The axes to draw in; None makes a new figure.
        **kwargs
            Passed on to `plot`.

        Returns
        -------
        LayerSensitivityDisplay
            The display.

        Raises
        ------
        TypeError
            If the estimator holds no network, `bits` is no number or list of numbers, or an
            argument of `layer_sensitivity` is given by itself instead of in `sensitivity_params`.
        ValueError
            If a number of bits is below 2, or data and estimator do not fit together.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklearn.neural_network import MLPClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> model = MLPClassifier((8,), max_iter=2000, random_state=0).fit(X, y)
        >>> display = LayerSensitivityDisplay.from_estimator(model, X, y, bits=4)
        >>> [label.get_text() for label in display.ax_.get_yticklabels()]
        ['hidden0', 'output']
        """
        _refuse_arguments(kwargs, layer_sensitivity, "sensitivity_params")
        table = layer_sensitivity(
            estimator, X, y, bits=bits, measured=measured, **(sensitivity_params or {})
        )
        return cls(table=table).plot(ax=ax, **with_unit(kwargs, [estimator]))

    def _draw(self, ax: "Axes | None", loss_unit: str, kwargs: dict[str, Any]) -> "list[Axes]":
        layers = list(dict.fromkeys(self.table["layer"]))
        rows = np.arange(len(layers))
        (ax,) = _layer_panels(ax, 1, list(map(shorten, layers)))
        draw_grid(ax)
        for number, (bits, table) in enumerate(self.table.groupby("bits", sort=False)):
            part = table.set_index("layer").reindex(layers)
            style = curve_style(number) | {"linestyle": "none", "markersize": 6, "capsize": 3}
            style |= {"label": f"{bits} bits"} | kwargs
            bars = part["stderr"].fillna(0.0)
            drawn = ax.errorbar(part["predicted"], rows, xerr=bars, **style)
            if "measured" in part:
                color = drawn.lines[0].get_color()
                ax.plot(part["measured"], rows, "x", color=color, label=f"{bits} bits, measured")
        choose_scale(ax.xaxis, self.table["predicted"].to_numpy(dtype=np.float64))
        ax.set_xlabel(f"rise of the loss ({loss_unit})" if loss_unit else "rise of the loss")
        draw_legend([ax], ON_THE_RIGHT)
        return [ax]


@dataclass(kw_only=True, eq=False, repr=False)
class SharpnessKLDisplay(EstimatorDisplay):
    r"""Display of expected sharpness against KL divergence, for noise of several scales.

    Make one with `from_estimator`. A PAC-Bayes bound on the generalization gap adds the two
    quantities. According to [1]_, of models trained on the same data the one whose curve lies
    lower and further to the left generalizes better. The bars are standard errors.

    Parameters
    ----------
    curves : dict of str to pandas.DataFrame
        For each model, one row per scale of the noise with the columns ``alpha``, ``kl`` (in
        nats), ``expected_sharpness`` and ``stderr`` (both in the unit of the loss).

    Attributes
    ----------
    ax_, figure_ : matplotlib.axes.Axes, matplotlib.figure.Figure
        The axes with the curves, and their figure.

    See Also
    --------
    pac_bayes_bound : A bound that adds up the two axes.
    measure : ``"expected_sharpness"`` is one of its names.

    Notes
    -----
    The display is that of figures 2 to 4 of [1]_. Every weight :math:`w_i` gets Gaussian noise
    of standard deviation :math:`\alpha (10 |w_i| + 1)`. Expected sharpness is the mean increase
    of the loss. The KL divergence is that from the same noise around 0 to the noise around the
    weights, as in equation 6; it falls as :math:`1/\alpha^2`. Appendix A of [1]_ prints twice
    that number.

    References
    ----------
    .. [1] Neyshabur, Bhojanapalli, McAllester, Srebro, "Exploring Generalization
       in Deep Learning", NeurIPS 2017.
    """

    curves: dict[str, pd.DataFrame]

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
        """Add noise to the weights of one or several models, and draw the effect.

        Parameters
        ----------
        estimator : nn.Module, fitted estimator, or dict of these
            One model, or several models by name, with a curve for each. `relative_flatness`
            lists the supported models.
        X : array-like of shape (n, ...)
            Samples in the form the estimators take, preferably their training data.
        y : array-like of shape (n, ...)
            Labels or targets, as in fit.
        alphas : sequence of float, default=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
            Scales of the noise, relative to the weights.
        n_draws : int, default=10
            Number of draws of noise at each scale.
        criterion : torch loss, default=None
            The loss; only needed for a bare module, as an estimator has its own.
        batch_size : int, default=1024
            Number of samples in one forward pass.
        device : str or torch.device, default=None
            The device to compute on; None for the device of the model.
        random_state : int, RandomState or None, default=None
            Seed of the noise. With an int, all models get the same noise.
        ax : matplotlib.axes.Axes or None, default=None
            The axes to draw in; None makes a new figure.
        **kwargs
            Passed on to `plot`.

        Returns
        -------
        SharpnessKLDisplay
            The display.

        Raises
        ------
        TypeError
            If an estimator holds no network.
        ValueError
            If there is no estimator, an alpha is not positive, or data and estimator do not
            fit together.

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
        options = {"criterion": criterion, "batch_size": batch_size, "device": device}
        noise: dict[str, Any] = {"n_draws": n_draws, "random_state": random_state}
        curves = {
            str(name): sharpness_curve(open_model(model, X, y, **options), alphas, **noise)
            for name, model in models.items()
        }
        return cls(curves=curves).plot(ax=ax, **with_unit(kwargs, models.values()))

    def _draw(self, ax: "Axes | None", loss_unit: str, kwargs: dict[str, Any]) -> "list[Axes]":
        ax = make_axes(ax, (8.0, 4.8) if len(self.curves) > 1 else None)
        draw_grid(ax)
        for number, (name, curve) in enumerate(self.curves.items()):
            style: dict[str, Any] = {"label": shorten(name) or None, "markersize": 5, "capsize": 3}
            style |= curve_style(number) | kwargs
            ax.errorbar(curve["kl"], curve["expected_sharpness"], yerr=curve["stderr"], **style)
        curves = pd.concat(self.curves.values())
        choose_scale(ax.xaxis, curves["kl"].to_numpy(dtype=np.float64))
        choose_scale(ax.yaxis, curves["expected_sharpness"].to_numpy(dtype=np.float64))
        low, high = curves["alpha"].min(), curves["alpha"].max()
        ends = f"$\\alpha$ = {high:.3g} (left) to {low:.3g} (right)"
        ax.set_xlabel(f"KL divergence (nats), from {ends}")
        ax.set_ylabel(label_of("expected_sharpness", loss_unit))
        draw_legend([ax], ON_THE_RIGHT)
        return [ax]
