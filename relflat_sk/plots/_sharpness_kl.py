"""Expected sharpness of models against the KL divergence of noise on their weights."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from relflat_sk._models import DataOptions, to_network
from relflat_sk.measures import sharpness_curve
from relflat_sk.plots._display import EstimatorDisplay, with_unit
from relflat_sk.plots._labels import label_of, shorten
from relflat_sk.plots._panels import figure_of, make_axes
from relflat_sk.plots._style import choose_scale, curve_style, draw_grid, legend_right

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["SharpnessKLDisplay"]

ALPHAS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05)


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
    ax_ : matplotlib.axes.Axes
        The axes with the curves.
    figure_ : matplotlib.figure.Figure
        The figure of the axes.

    Notes
    -----
    The display is that of figures 2 to 4 of [1]_. Every weight :math:`w_i` gets Gaussian noise
    of standard deviation :math:`\alpha (10 |w_i| + 1)`. Expected sharpness is the mean increase
    of the loss. The KL divergence is that from the same noise around 0 to the noise around the
    weights; it falls as :math:`1/\alpha^2`.

    References
    ----------
    .. [1] Neyshabur, Bhojanapalli, McAllester, Srebro, "Exploring Generalization
       in Deep Learning", NeurIPS 2017.
    """

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
        ImportError
            If matplotlib is not installed.
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
        return cls(curves=curves).plot(ax=ax, **with_unit(kwargs, *models.values()))

    def _draw(self, ax: "Axes | None", loss_unit: str, kwargs: dict[str, Any]) -> None:
        """Draw one curve per model, with standard errors."""
        self.ax_ = make_axes(ax, (8.0, 4.8) if len(self.curves) > 1 else None)
        self.figure_ = figure_of(self.ax_)
        draw_grid(self.ax_)
        for number, (name, curve) in enumerate(self.curves.items()):
            style: dict[str, Any] = {"label": shorten(name) or None, "markersize": 5, "capsize": 3}
            style |= curve_style(number) | kwargs
            self.ax_.errorbar(
                curve["kl"], curve["expected_sharpness"], yerr=curve["stderr"], **style
            )
        every = pd.concat(self.curves.values())
        choose_scale(self.ax_.xaxis, every["kl"].to_numpy(dtype=np.float64))
        choose_scale(self.ax_.yaxis, every["expected_sharpness"].to_numpy(dtype=np.float64))
        low, high = every["alpha"].min(), every["alpha"].max()
        ends = f"$\\alpha$ = {high:.3g} (left) to {low:.3g} (right)"
        self.ax_.set_xlabel(f"KL divergence (nats), from {ends}")
        self.ax_.set_ylabel(label_of("expected_sharpness", loss_unit))
        legend_right(self.ax_)
