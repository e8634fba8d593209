"""Sparse inputs give what dense ones do, and only a batch at a time is made dense."""

import numpy as np
import pytest
import scipy.sparse
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from skorch.dataset import ValidSplit

from relflat_sk import (
    FlatMinimaSearch,
    FlatnessScorer,
    RelativeFlatnessRegularizedBinaryClassifier,
    RelativeFlatnessRegularizedClassifier,
    RelativeFlatnessRegularizedRegressor,
    StopAtGradientNorm,
    StopAtLoss,
    flatness_report,
    relative_flatness,
)

N = 120
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 20)) * (RNG.uniform(size=(N, 20)) < 0.2)
Y = X[:, :3].argmax(axis=1)
FORMATS = ["csr_array", "csr_matrix", "csc_array", "csc_matrix", "coo_array", "dok_matrix"]
SPARSE = scipy.sparse.csr_array(X)
SETTINGS = {"max_epochs": 4, "lr": 0.01, "verbose": 0, "random_state": 0}
TASKS = {
    "classes": (RelativeFlatnessRegularizedClassifier, np.array(["a", "b", "c"])[Y]),
    "binary": (RelativeFlatnessRegularizedBinaryClassifier, Y > 0),
    "regression": (RelativeFlatnessRegularizedRegressor, X @ RNG.normal(size=20)),
}


def make(**params):
    return RelativeFlatnessRegularizedClassifier(**{**SETTINGS, **params})


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("name", FORMATS)
def test_fit_predict_and_measures_are_those_of_dense_data(kind, name):
    estimator, y = TASKS[kind]
    sparse = getattr(scipy.sparse, name)(X)
    dense_net, net = estimator(**SETTINGS).fit(X, y), estimator(**SETTINGS).fit(sparse, y)
    assert net.n_features_in_ == 20
    # by formulas for dense data, and by torch's autograd for sparse ones
    losses, expected = ([*one.history[:, "train_loss"]] for one in (net, dense_net))
    assert_allclose(losses, expected, rtol=1e-10)
    assert_same = assert_allclose if kind == "regression" else assert_array_equal
    assert_same(net.predict(sparse), dense_net.predict(X))
    assert_allclose(net.score(sparse, y), dense_net.score(X, y), rtol=1e-8)
    assert_allclose(net.relative_flatness_, dense_net.relative_flatness_, rtol=1e-8)
    assert_allclose(relative_flatness(net, sparse, y), relative_flatness(dense_net, X, y))
    assert_allclose(FlatnessScorer()(net, sparse, y), FlatnessScorer()(dense_net, X, y))


@pytest.mark.parametrize(
    "params",
    [
        {"train_split": ValidSplit(4)},
        {"callbacks": [StopAtLoss(0.5)], "max_epochs": 40},
        {"callbacks": [StopAtGradientNorm(0.3)], "max_epochs": 40},
        {"batch_size": -1},
        {"flatness_layer": "all"},
    ],
)
@pytest.mark.parametrize("weights", [None, np.arange(N)])
@pytest.mark.usefixtures("own_loop")
def test_ways_of_training(params, weights):
    dense, sparse = (make(**params).fit(data, Y, sample_weight=weights) for data in (X, SPARSE))
    assert sparse.history[:, "train_loss"] == dense.history[:, "train_loss"]
    assert_allclose(sparse.relative_flatness_, dense.relative_flatness_, rtol=1e-12)


def test_through_a_loader_of_torch():
    nets = [make(iterator_train__num_workers=0).fit(data, Y) for data in (X, SPARSE)]
    assert_allclose(*(net.relative_flatness_ for net in nets), rtol=1e-12)


@pytest.mark.usefixtures("own_loop")
def test_partial_fit():
    nets = make(), make()
    for _ in range(3):
        for net, data in zip(nets, (X, SPARSE), strict=True):
            net.partial_fit(data, Y, classes=[0, 1, 2, 3])
    assert_array_equal(nets[1].predict_proba(SPARSE), nets[0].predict_proba(X))
    assert_allclose(*(net.relative_flatness_ for net in nets), rtol=1e-12)


def test_integers_and_float32():
    counts = scipy.sparse.csr_array(RNG.integers(0, 3, size=(N, 5)))
    assert make().fit(counts, Y).predict(counts).shape == (N,)
    assert make().fit(SPARSE.astype("f4"), Y).predict_proba(SPARSE.astype("f4")).dtype == "f4"


def test_cross_validation_and_searches():
    dense, sparse = (
        cross_val_score(make(), data, Y, cv=3, scoring=FlatnessScorer(at_minimum="ignore"))
        for data in (X, SPARSE)
    )
    assert_allclose(sparse, dense)
    search = GridSearchCV(make(), {"lr": [0.01, 0.03]}, cv=3).fit(SPARSE, Y)
    assert search.best_score_ > 0.5
    searches = [
        FlatMinimaSearch(make(max_epochs=100), {"lr": [0.01, 0.03]}, random_state=0).fit(data, Y)
        for data in (X, SPARSE)
    ]
    assert_allclose(*(search.minima_["relative_flatness"] for search in searches))


def test_text_in_a_pipeline():
    texts, labels = ["good film", "bad film", "good", "bad"] * 10, [1, 0, 1, 0] * 10
    pipeline = make_pipeline(CountVectorizer(), make(max_epochs=30)).fit(texts, labels)
    assert pipeline.score(texts, labels) == 1
    assert relative_flatness(pipeline, texts, labels) > 0


@pytest.mark.parametrize("kind", [scipy.sparse.csr_array, scipy.sparse.csr_matrix])
def test_only_a_batch_is_made_dense(kind, monkeypatch):
    rows = []
    for base in (scipy.sparse.csr_array, scipy.sparse.csr_matrix):

        def toarray(matrix, original=base.toarray):
            rows.append(matrix.shape[0])
            return original(matrix)

        monkeypatch.setattr(base, "toarray", toarray)
    sparse = kind(X)
    net = make(batch_size=16, iterator_valid__batch_size=16)
    net.fit(sparse, Y, sample_weight=np.ones(N))
    net.partial_fit(sparse, Y)
    net.predict(sparse)
    relative_flatness(net, sparse, Y, batch_size=16)
    flatness_report(net, sparse, Y, measures=["relative_flatness"], batch_size=16)
    cross_val_score(net, sparse, Y, cv=3)
    assert set(rows) <= set(range(1, 17))
    assert 16 in rows


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (SPARSE * np.nan, "contains NaN"),
        (SPARSE * np.inf, "contains (NaN|infinity)"),
        (scipy.sparse.csr_array((0, 20)), r"0 sample\(s\)"),
    ],
    ids=["nan", "infinity", "empty"],
)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_refuses_data(data, message):
    with pytest.raises(ValueError, match=message):
        make().fit(data, Y[: data.shape[0]])


def test_refuses_other_features():
    net = make().fit(SPARSE, Y)
    with pytest.raises(ValueError, match="X has 19 features"):
        net.predict(SPARSE[:, :19])
    assert net.__sklearn_tags__().input_tags.sparse
