"""Data frames of pandas, polars and pyarrow train the same net as arrays, without a warning."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris

from relflat_sk import (
    FlatMinimaSearch,
    RelativeFlatnessRegularizedClassifier,
    relative_flatness,
)

X, Y = load_iris(return_X_y=True)
WEIGHTS = np.linspace(1, 2, len(X))
NAMES = ["a", "b", "c", "d"]


def _pandas(pd):
    return pd.DataFrame(X, columns=NAMES), pd.Series(Y), pd.Series(WEIGHTS)


def _polars(pl):
    return pl.DataFrame(X, schema=NAMES), pl.Series(Y), pl.Series(WEIGHTS)


def _pyarrow(pa):
    return pa.table(dict(zip(NAMES, X.T, strict=True))), pa.array(Y), pa.array(WEIGHTS)


@pytest.fixture
def _warn_each_time():
    torch.set_warn_always(True)  # else torch warns of read-only arrays only once in a process
    yield
    torch.set_warn_always(False)


@pytest.mark.usefixtures("_warn_each_time")
@pytest.mark.parametrize("make", [_pandas, _polars, _pyarrow])
def test_frames_train_the_net_that_arrays_train(make):
    library = make.__name__[1:]
    frame, labels, weights = make(pytest.importorskip(library, reason=f"needs {library}"))
    net = RelativeFlatnessRegularizedClassifier(max_epochs=2, random_state=0, verbose=0)
    expected = net.fit(X, Y, sample_weight=WEIGHTS).predict_proba(X)
    flatness = net.relative_flatness_
    net.fit(frame, labels, sample_weight=weights)
    np.testing.assert_array_equal(net.predict_proba(frame), expected)
    assert net.feature_names_in_.tolist() == NAMES
    assert relative_flatness(net, frame, labels, sample_weight=weights) == flatness
    search = FlatMinimaSearch(net, {"random_state": [0]}, goal=0.9)
    search.fit(frame, labels, sample_weight=weights, X_test=frame, y_test=labels)
    assert search.feature_names_in_.tolist() == NAMES
    assert search.score(frame, labels) == search.minima_["test_score"].iloc[0]


@pytest.mark.parametrize("make", [_polars, _pyarrow])
def test_frames_with_dates_are_refused(make):
    library = make.__name__[1:]
    module = pytest.importorskip(library, reason=f"needs {library}")
    dates = np.full(len(X), np.datetime64("2020-01-01"))
    table = module.table if library == "pyarrow" else module.DataFrame
    frame = table({"x": X[:, 0], "d": dates})
    with pytest.raises(TypeError, match="columns that hold no numbers: 'd' .*turn dates"):
        RelativeFlatnessRegularizedClassifier().fit(frame, Y)
