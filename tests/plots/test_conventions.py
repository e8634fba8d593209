"""What all displays promise: the convention of scikit-learn, units, and matplotlib on demand."""

import pickle
import sys

import numpy as np
import optuna
import pandas as pd
import pytest
from matplotlib import pyplot as plt
from sklearn.datasets import load_iris
from sklearn.preprocessing import scale

import relflat_sk
from relflat_sk import (
    FlatMinimaSearch,
    FlatnessGapDisplay,
    HyperparameterDisplay,
    LabelNoiseDisplay,
    RelativeFlatnessRegularizedRegressor,
)
from tests.plots.drawings import noisy_table, points, table

pytestmark = pytest.mark.filterwarnings("ignore:.* candidates are no minima")
X, Y = load_iris(return_X_y=True)
X, Y = scale(X).astype(np.float32), Y.astype(np.float32)

# what makes each display from a fitted search over a regressor
DISPLAYS = {
    "FlatnessGap": lambda s, cls: cls.from_minima(s, random_state=0),
    "Hyperparameter": lambda s, cls: cls.from_minima(s),
    "LabelNoise": lambda s, cls: cls.from_minima(noisy_table(), random_state=0),
    "MeasurePanels": lambda s, cls: cls.from_minima(s, random_state=0),
    "MinimaRanking": lambda s, cls: cls.from_minima(s, random_state=0),
    "TrainingCurves": lambda s, cls: cls.from_minima(s),
    "FlatnessHistory": lambda s, cls: cls.from_estimator(s),
    "LayerFlatness": lambda s, cls: cls.from_estimator(s, X, Y),
    "LayerSensitivity": lambda s, cls: cls.from_estimator(s, X, Y, measured=True),
    "SharpnessKL": lambda s, cls: cls.from_estimator(s, X, Y, alphas=[0.1, 0.2], n_draws=2),
}


@pytest.fixture(scope="module")
def search():
    net = RelativeFlatnessRegularizedRegressor(max_epochs=12, verbose=0, random_state=0)
    search = FlatMinimaSearch(net, {"batch_size": [16, 32, 64]}, goal=10.0)
    return search.fit(X, Y, X, Y)


@pytest.fixture(params=DISPLAYS)
def make(request, search):
    kind = getattr(relflat_sk, f"{request.param}Display")
    return lambda: DISPLAYS[request.param](search, kind)


def test_they_follow_the_convention_of_displays(make):
    def labels(figure):
        return " ".join(ax.get_xlabel() + ax.get_ylabel() for ax in figure.axes)

    made = make()
    assert made.ax_ in made.figure_.axes
    # losses of regressors have no unit, unless one is given
    assert "nats" not in labels(made.figure_).replace("KL divergence (nats", "")
    # an axes, which may be in a part of a figure
    figure = plt.figure(layout="constrained", figsize=(16, 8))
    left, right = figure.subfigures(1, 2)
    axes = right.subplots()
    unit = {} if isinstance(made, LabelNoiseDisplay) else {"loss_unit": "m²"}
    assert made.plot(ax=axes, **unit) is made
    assert made.ax_ is axes
    assert made.figure_ is figure
    assert not left.axes
    figure.canvas.draw()
    assert ("m²" in labels(figure)) == bool(unit)
    restored = pickle.loads(pickle.dumps(made))
    assert type(restored.plot()) is type(made)


def test_tables_and_studies_know_the_unit(search):
    for source in (search.minima_, search.study_, search.minima_.query("converged")):
        display = HyperparameterDisplay.from_minima(source)
        assert display.ax_.get_ylabel() == "relative flatness κ (small is flat)"
        assert "nats" not in FlatnessGapDisplay.from_minima(source).ax_.get_ylabel()
    assert "nats" in FlatnessGapDisplay.from_minima(table()).ax_.get_ylabel()


def test_they_say_how_to_install_matplotlib(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'relflat_sk\[plot\].* pip install "\.\[plot\]"'):
        make()


@pytest.mark.parametrize("name", ["FlatnessGap", "LabelNoise", "MeasurePanels", "MinimaRanking"])
def test_tables_stay_as_they_are_and_studies_are_accepted(name):
    display, minima = getattr(relflat_sk, f"{name}Display"), noisy_table()
    before = minima.copy(deep=True)
    display.from_minima(minima, random_state=0)
    pd.testing.assert_frame_equal(minima, before)
    study, columns = optuna.create_study(), ["relative_flatness", "generalization_gap", "test_loss"]
    for kappa in (1.0, 2.0, 3.0):
        attributes = dict.fromkeys(columns, kappa) | {"random_labels": 0.1}
        study.add_trial(optuna.trial.create_trial(value=kappa, user_attrs=attributes))
    made = display.from_minima(study, random_state=0)
    if display is LabelNoiseDisplay:
        assert made.correlations[["share", "kendall"]].to_numpy().tolist() == [[0.1, 1.0]]
    else:
        assert len(points(made.ax_)) == 3
