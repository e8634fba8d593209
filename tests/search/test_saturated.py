"""A network whose loss has rounded to 0 has no flatness, and does not win a search."""

import numpy as np
import pytest
from sklearn.datasets import make_blobs

from relflat_sk import MLP, FlatMinimaSearch, FlatnessWarning, RelativeFlatnessRegularizedClassifier

X, Y = make_blobs(60, 5, centers=3, random_state=0)
SATURATES = 1e5


class Gain(MLP):
    """Multiplies its outputs, so that a network without errors has no loss at all."""

    def __init__(self, n_features, n_outputs, gain=1.0):
        super().__init__(n_features, n_outputs)
        self.gain = gain

    def forward(self, x):
        return self.gain * super().forward(x)


def search(gains, **params):
    net = RelativeFlatnessRegularizedClassifier(Gain, max_epochs=40, verbose=0)
    space = {"module__gain": gains, "batch_size": [16, 32]}
    return FlatMinimaSearch(net, space, goal=0.02, random_state=0, **params)


@pytest.mark.parametrize(("band", "fleet"), [(3.0, None), (None, 4)])
def test_saturated_networks_rank_behind_all_minima(band, fleet):
    with pytest.warns(FlatnessWarning, match="2 of 4 candidates are no minima(.|\n)*saturated"):
        found = search([1.0, SATURATES], depth_band=band, fleet=fleet).fit(X, Y)
    table = found.minima_
    assert table["param_module__gain"].tolist() == [1.0, 1.0, SATURATES, SATURATES]
    assert table["converged"].tolist() == [True, True, False, False]
    assert (table["relative_flatness"][:2] > 0.1).all()
    assert (table["relative_flatness"][2:] == 0).all()
    assert found.best_params_["module__gain"] == 1.0
    # a sampler that learns is not drawn to them
    values = [trial.value for trial in found.study_.get_trials() if trial.value is not None]
    assert len(values) == 2
    assert np.isfinite(values).all()


def test_only_saturated_networks():
    message = "no candidate has a curvature to compare.*Train to a larger loss"
    with pytest.warns(FlatnessWarning, match=message):
        found = search([SATURATES]).fit(X, Y)
    assert not found.minima_["converged"].any()
    assert found.score(X, Y) == 1
