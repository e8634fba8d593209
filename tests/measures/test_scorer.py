"""FlatnessScorer: its scores, scikit-learn's tools that use it, and the arguments it refuses."""

import math
import pickle
import warnings
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import sklearn
import torch
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.base import clone
from sklearn.datasets import load_iris, make_classification
from sklearn.exceptions import NotFittedError, UnsetMetadataPassedError
from sklearn.inspection import permutation_importance
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import make_scorer
from sklearn.model_selection import GridSearchCV, cross_validate, learning_curve
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler, scale
from sklearn.utils.parallel import Parallel, delayed
from skorch import NeuralNetClassifier, NeuralNetRegressor
from torch import nn

from relflat_sk import (
    MLP,
    FlatnessWarning,
    RelativeFlatnessRegularizedBinaryClassifier,
    RelativeFlatnessRegularizedClassifier,
    measure,
    relative_flatness,
)
from relflat_sk.measures._minimum import ConstantComparison
from relflat_sk.measures._scorer import FlatnessScorer
from tests.cases import Net
from tests.measures.nets import constant_loss, evaluate
from tests.rounding import FLOAT32

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")

X, Y = load_iris(return_X_y=True)
X = scale(X).astype(np.float32)
NAMES = load_iris().target_names[Y]
TARGET = X @ np.float32([1.0, -2.0, 0.5, 0.0])
SCORER = FlatnessScorer()


PLAIN = {"optimizer": torch.optim.Adam, "train_split": None, "verbose": 0}


def net(**parameters):
    """Make a small skorch classifier that learns iris well enough to be at a minimum."""
    defaults = {
        "module": MLP, "module__n_features": 4, "module__n_outputs": 3,
        "module__hidden_layer_sizes": (8,), "criterion": nn.CrossEntropyLoss, "lr": 0.05,
        "batch_size": 16, "max_epochs": 8, "iterator_train__shuffle": True,
    }  # fmt: skip
    return NeuralNetClassifier(**PLAIN | defaults | parameters)


def flat_net(*module, **parameters):
    """Make the package's own classifier: seeded, for labels of any type."""
    parameters = {"max_epochs": 8, "lr": 0.05, **parameters}
    return RelativeFlatnessRegularizedClassifier(*module, random_state=0, verbose=0, **parameters)


def folds(model, scoring, X=X, y=NAMES, **options):
    """The estimators of three folds, the rows of their test and training sets, and the results."""
    options |= {"cv": 3, "error_score": "raise", "return_estimator": True, "return_indices": True}
    found = cross_validate(model, X, y, scoring=scoring, **options)
    return found, list(zip(found["estimator"], *found["indices"].values(), strict=True))


def assert_no_score(message, scorer, *data):
    with pytest.warns(FlatnessWarning, match=message) as caught:
        assert math.isnan(scorer(*data))
    assert [warning.filename for warning in caught] == [__file__]


MODELS = {
    "skorch": (net, Y),
    "logistic, two names": (LogisticRegression, np.where(Y == 0, "yes", "no")),
    "regressor": (lambda: regressor()[0], TARGET[:, None]),
    "search": (lambda: GridSearchCV(LogisticRegression(max_iter=500), {"C": [0.1, 1.0]}), NAMES),
}


@pytest.mark.parametrize("name", MODELS)
def test_score_is_minus_the_flatness(name):
    make, y = MODELS[name]
    model = make().fit(X, y)
    score = SCORER(model, X[::2], y[::2])
    assert score == -relative_flatness(model, X[::2], y[::2]) < 0
    of_first = FlatnessScorer("hessian_trace", layer=0, measure_params={"rtol": 1e-3})(model, X, y)
    expected = measure("hessian_trace", model, X, y, layer=0, rtol=1e-3)
    assert of_first == pytest.approx(-expected, rel=0.01)
    for data in ("given", "train"):
        with pytest.raises(NotFittedError):
            FlatnessScorer(data=data)(clone(model), X, y)
    if name == "skorch":
        with pytest.warns(FlatnessWarning, match="without y, the scorer cannot check .* the Neur"):
            assert SCORER(model, X) == -relative_flatness(model, X)
        unchecked = FlatnessScorer(non_minimum="accept")(model, X)
        assert unchecked == -relative_flatness(model, X)


@pytest.mark.parametrize("function", [relative_flatness, partial(measure, "l2_norm")])
def test_a_measure_is_no_scorer(function):
    """It would choose the sharpest candidate."""
    model = LogisticRegression(max_iter=500).fit(X, Y)
    scorers = {"flatness": function, "accuracy": "accuracy"}
    for call in (
        lambda: GridSearchCV(model, {"C": [0.1]}, scoring=function).fit(X, Y),
        lambda: GridSearchCV(model, {"C": [0.1]}, scoring=scorers, refit=False).fit(X, Y),
        lambda: learning_curve(model, X, Y, scoring=function, shuffle=True),
        lambda: permutation_importance(model, X, Y, scoring=function),
        lambda: make_scorer(function)(model, X, Y),
    ):
        with pytest.raises((TypeError, ValueError), match=r"use FlatnessScorer\("):
            call()


def test_a_measure_is_called_by_users_through_joblib_and_wrappers():
    model = LogisticRegression(max_iter=500).fit(X, Y)
    expected = relative_flatness(model, X, Y)
    assert Parallel(n_jobs=1)([delayed(relative_flatness)(model, X, Y)]) == [expected]
    scorers = {"own": lambda *fold: -relative_flatness(*fold), "ours": SCORER}
    found = cross_validate(model, X, Y, scoring=scorers, error_score="raise")
    assert_array_equal(found["test_own"], found["test_ours"])


@pytest.fixture
def _routing():
    with sklearn.config_context(enable_metadata_routing=True):
        yield


WEIGHTS = np.linspace(0.1, 2.0, len(Y))


def routed(scorer, **params):
    weighted = LogisticRegression(max_iter=500).set_fit_request(sample_weight=True)
    return folds(weighted, scorer, params=params)


AGAIN = {"itself": lambda s: s, "clone": clone, "pickle": lambda s: pickle.loads(pickle.dumps(s))}


@pytest.mark.usefixtures("_routing")
@pytest.mark.parametrize(
    ("request_", "weights"), [(True, WEIGHTS), ("mine", WEIGHTS[::-1]), (False, None)]
)
@pytest.mark.parametrize("again", AGAIN.values(), ids=AGAIN)
def test_routing_passes_requested_weights(request_, weights, again):
    scorer = again(FlatnessScorer().set_score_request(sample_weight=request_))
    mine = {"mine": WEIGHTS[::-1]} if request_ == "mine" else {}
    results, parts = routed(scorer, sample_weight=WEIGHTS, **mine)
    for (model, _, rows), score in zip(parts, results["test_score"], strict=True):
        part = None if weights is None else weights[rows]
        assert score == SCORER(model, X[rows], NAMES[rows], sample_weight=part)
        assert (score == SCORER(model, X[rows], NAMES[rows])) == (part is None)


@pytest.mark.usefixtures("_routing")
@pytest.mark.parametrize("several", [False, True], ids=["alone", "dict"])
@pytest.mark.parametrize("make", [FlatnessScorer, lambda: FlatnessScorer().set_score_request()])
def test_routing_refuses_weights_without_a_request(make, several):
    scorer = {"flat": make()} if several else make()
    assert np.isfinite(routed(scorer)[0]["test_flat" if several else "test_score"]).all()
    with pytest.raises(UnsetMetadataPassedError, match="sample_weight") as caught:
        routed(scorer, sample_weight=WEIGHTS)
    # before version 1.7, scikit-learn answers with an error of its own about the estimator
    errors = f"{caught.value} {caught.value.__context__}"
    assert "FlatnessScorer.score" in errors


@pytest.mark.parametrize("several", [False, True], ids=["alone", "dict"])
def test_weights_without_routing(several):
    scoring = {"flat": SCORER, "accuracy": "accuracy"} if several else SCORER
    options = {"scoring": scoring, "refit": "flat" if several else True, "error_score": "raise"}
    search = GridSearchCV(LogisticRegression(max_iter=500), {"C": [1.0]}, cv=3, **options)
    search.fit(X, NAMES, sample_weight=WEIGHTS)
    assert search.score(X, NAMES) == -relative_flatness(search.best_estimator_, X, NAMES)


class Dead(MLP):
    """A network whose hidden units are never active: it predicts a constant."""

    def __init__(self, n_features, n_outputs, hidden_layer_sizes=(8,)):
        super().__init__(n_features, n_outputs, hidden_layer_sizes)
        nn.init.constant_(self.get_parameter(f"hidden{len(hidden_layer_sizes) - 1}.bias"), -1e6)


class Lucky(MLP):
    """A network that beats every constant prediction before any training."""

    def __init__(self, n_features, n_outputs, hidden_layer_sizes=(8,)):
        super().__init__(n_features, n_outputs, hidden_layer_sizes)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        self.hidden0.weight.data[:2, 2] = torch.tensor([1.0, -1.0])  # longer and shorter petals
        self.output.weight.data[[2, 0], [0, 1]] = 0.2


def fitted(**parameters):
    return lambda: (net(**parameters).fit(X, Y), X, Y)


def regressor(module=MLP):
    shape = {"module__n_features": 4, "module__n_outputs": 1}
    y = TARGET[:, None]
    return NeuralNetRegressor(module, max_epochs=10, **shape, **PLAIN).fit(X, y), X, y


def blind():
    """A classifier that knows the frequencies of the classes only."""
    model = LogisticRegression().fit(X, NAMES)
    model.coef_[:], model.intercept_[:] = 0, 0
    return model, X, NAMES


def of_a_single_class():
    return LogisticRegression(max_iter=500).fit(X, NAMES), X[Y == 0], NAMES[Y == 0]


NO_PROGRESS = "training made no progress, .* is little better than the best constant"
NO_MINIMUM = {  # a model with its data, and why it has no score
    "dead": (fitted(module=Dead), "mean loss of .* is no better than the best constant"),
    "diverged": (
        fitted(optimizer=torch.optim.SGD, lr=1e20), "mean loss is (nan|inf); has training diverged",
    ),
    "untrained": (fitted(max_epochs=0, module=Lucky), NO_PROGRESS),
    "hardly trained": (fitted(lr=1e-12, module=Lucky), NO_PROGRESS),
    "frequencies": (blind, r"loss of 1\.09861 is no better .*, 1\.09861\."),
    "a single class": (of_a_single_class, "no better than the best constant prediction's, 0"),
    "dead regressor": (lambda: regressor(Dead), r"the NeuralNetRegressor\(.*\) is not at a mini"),
    "R2": (
        lambda: (Ridge(alpha=1e-6).fit(X, TARGET), X, -TARGET),
        "its R2 of -.* is not clearly better than .*, 0, and",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:the value of relative_fl:relflat_sk.FlatnessWarning")
@pytest.mark.filterwarnings("ignore:relative_flatness is 0, which:relflat_sk.FlatnessWarning")
@pytest.mark.parametrize("name", NO_MINIMUM)
def test_models_that_are_not_at_a_minimum_are_scored_on_demand_only(name):
    make, message = NO_MINIMUM[name]
    data = make()
    assert_no_score(f"{message}.* its score is nan", SCORER, *data)
    flatness = -relative_flatness(*data)
    with pytest.warns(FlatnessWarning, match=f"{message}.* it is scored anyway"):
        assert_array_equal(FlatnessScorer(non_minimum="warn")(*data), flatness)
    assert_array_equal(FlatnessScorer(non_minimum="accept")(*data), flatness)


@pytest.mark.filterwarnings("ignore:relative_flatness is:relflat_sk.FlatnessWarning")
@pytest.mark.filterwarnings("ignore:One or more of the test scores:UserWarning")
@pytest.mark.parametrize("filters", ["default", "always"])
def test_a_search_warns_of_the_first_model_without_a_score(filters):
    scorer, rows = FlatnessScorer(), np.arange(len(Y))
    model, options = net(module=Dead, max_epochs=1), {"refit": False, "cv": [(rows, rows)] * 3}
    search = GridSearchCV(model, {"lr": [0.01, 0.02]}, scoring=scorer, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(filters)
        search.fit(X, Y)
    (found,) = [one for one in caught if "not at a minimum" in str(one.message)]
    assert "Of further models" in str(found.message)
    assert found.filename == __file__
    with pytest.warns(FlatnessWarning, match="not at a minimum"):  # at another line
        search.fit(X, Y)
    for _ in range(2):  # called by the user
        again = pickle.loads(pickle.dumps(scorer))
        assert_no_score("not at a minimum", again, model.fit(X, Y), X, Y)


def history(*epochs, shuffle=True):
    """Make a net with lucky initial weights and a history of these batch losses."""
    model = net(module=Lucky, max_epochs=0)
    model.set_params(iterator_train__shuffle=shuffle).fit(X, Y)
    for losses in epochs:
        model.history.new_epoch()
        model.history.record("train_loss", float(np.mean(losses)))
        for loss in losses:
            model.history.new_batch()
            model.history.record_batch("train_loss", loss)
    return model


NOISE = np.random.default_rng(0).normal(0, 0.1, (20, 10))
HARDER = np.linspace(0.5, 1.5, 10)[::-1]  # batches in a fixed order, harder ones first
PROGRESS = {  # losses of the batches in each epoch, whether they are shuffled, and the verdict
    "large": ([[1.0], [0.7]], True, True),
    "an outlier at the end": ([[1.0], [0.7], [99.0]], True, True),
    "small, may be noise": ([[1.0], [0.95]], True, False),
    "noise": ([1 + noise for noise in NOISE[:3]], True, False),
    "beyond noise": ([1 - 0.02 * at + noise for at, noise in enumerate(NOISE)], True, True),
    "batches of one epoch": ([np.linspace(1.0, 0.9, 40)], True, True),
    "nan": ([[1.0, math.nan], [math.nan, 0.5]], True, False),
    "order and noise": ([HARDER + noise / 10 for noise in NOISE[:3]], False, False),
    "first epoch alone": ([[0.83], *([0.8 + noise.mean() / 100] for noise in NOISE)], True, True),
    "slow": ([[1 - 0.0005 * at] for at in range(20)], True, False),
    "lower in the same order": ([HARDER - 0.05 * at for at in range(3)], False, True),
}


@pytest.mark.parametrize(("epochs", "shuffle", "progress"), PROGRESS.values(), ids=PROGRESS)
def test_progress_is_more_than_rounding_noise_and_order(epochs, shuffle, progress):
    model = history(*epochs, shuffle=shuffle)
    if progress:
        assert SCORER(model, X, Y) == -relative_flatness(model, X, Y)
    else:
        assert_no_score("made no progress", SCORER, model, X, Y)


def test_weights_that_were_loaded_and_the_loss_curve_of_scikit_learn_are_evidence():
    trained = net(max_epochs=15).fit(X, Y)
    loaded = net().initialize()
    loaded.module_.load_state_dict(trained.module_.state_dict())
    assert not loaded.history
    assert SCORER(loaded, X, Y) == SCORER(trained, X, Y)
    trained = MLPClassifier((8,), max_iter=120, random_state=0).fit(X, Y)
    found = evaluate("relative_flatness", trained, X, Y)
    assert found.passes.risk > 0.5 * constant_loss(trained, X, Y)
    assert math.isfinite(SCORER(trained, X, Y))
    trained.loss_curve_ = [trained.loss_curve_[-1]] * 30
    assert_no_score(r"the MLPClassifier\(.*\) is .* made no progress", SCORER, trained, X, Y)


def assert_scored(*data):
    """The score is a number, although the loss is above that of a constant prediction."""
    found = evaluate("relative_flatness", *data)
    assert found.passes.risk > constant_loss(*data)
    assert math.isfinite(SCORER(*data))


@pytest.mark.parametrize("kind", [flat_net, RelativeFlatnessRegularizedBinaryClassifier])
def test_accuracy_above_chance_is_enough_for_a_trained_net(kind):
    labels = (Y == 1).astype(int)
    model = kind(max_epochs=10, lr=0.05).set_params(verbose=0).fit(X, labels)
    # mistakes cost much, and no prediction changes
    for parameter in model.module_.output.parameters():
        parameter.data.mul_(50)
    assert_scored(model, X, labels)
    guess = np.resize([0, 1], len(Y))
    assert_no_score(r"its accuracy of .* is not clearly better than", SCORER, model, X, guess)


@pytest.mark.parametrize(
    ("measure_", "parameters"),
    [
        ("relative_flatness", {}),
        ("relative_flatness", {"flatness_layer": 0}),
        ("normalized_relative_flatness", {"flatness_normalize": True}),
    ],
)
def test_recorded_value_is_that_of_the_training_data(measure_, parameters):
    layer = parameters.get("flatness_layer", -1)
    scorer = FlatnessScorer(measure_, layer=layer, data="train")
    results, parts = folds(make_pipeline(StandardScaler(), flat_net(**parameters)), scorer)
    for (model, rows, _), score in zip(parts, results["test_score"], strict=True):
        assert score == -model[-1].relative_flatness_
        expected = measure(measure_, model, X[rows], NAMES[rows], layer=layer)
        assert_allclose(score, -expected, rtol=FLOAT32)


def test_the_record_of_the_training_decides_then_its_history_and_then_the_fold():
    scorer, wrong = FlatnessScorer(data="train"), np.roll(NAMES, 60)
    model = flat_net().fit(X, NAMES)
    value = -model.relative_flatness_
    assert math.isfinite(SCORER(model, X, wrong))
    assert scorer(model, X, wrong) == value

    def record(**changes):
        model._record = replace(model._record, **changes)

    record(comparison=ConstantComparison(2.0, 1.0))
    assert_no_score("mean loss of 2 is no better than .*, 1. With", scorer, model, X, NAMES)
    record(comparison=ConstantComparison(math.nan, math.nan))
    assert scorer(model, X, wrong) == value
    model.history.clear()
    assert scorer(model, X, NAMES) == value
    assert_no_score("its score is nan", scorer, model, X, wrong)
    record(value=math.nan)  # as where measuring fails
    assert_no_score("the measure 'relative_flatness' is nan", scorer, model, X, NAMES)
    untrained = flat_net(Lucky, max_epochs=0).set_params(module__hidden_layer_sizes=(8,))
    assert_no_score(NO_PROGRESS, scorer, untrained.fit(X, NAMES), X, NAMES)


OVERFITTED = {
    "ours": flat_net(max_epochs=60, lr=0.01, flatness_weight=0),
    "skorch's": net(module__n_features=20, module__n_outputs=2, lr=0.01, max_epochs=60),
    "MLPClassifier": MLPClassifier(max_iter=1000, random_state=0),
    "MLPClassifier by L-BFGS": MLPClassifier(solver="lbfgs", max_iter=1000, random_state=0),
}


@pytest.mark.parametrize("name", OVERFITTED)
def test_a_model_that_has_learned_noise_is_at_a_minimum(name):
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(60, 20)).astype(np.float32), rng.integers(0, 2, 60)
    assert_scored(clone(OVERFITTED[name]).fit(X[:30], y[:30]), X[30:], y[30:])
    linear = LogisticRegression(C=1e3, max_iter=5000).fit(X[:30], y[:30])
    assert math.isfinite(SCORER(linear, X[:30], y[:30]))
    message = r"Logis.* keeps no record .*score it on those that"
    assert_no_score(message, SCORER, linear, X[30:], y[30:])


def test_a_linear_model_of_rare_classes_is_judged_by_the_area_under_the_curve():
    X, y = make_classification(300, 20, weights=[0.9], flip_y=0, class_sep=0.6, random_state=1)
    model, X, y = LogisticRegression(C=100, max_iter=2000).fit(X[:60], y[:60]), X[60:], y[60:]
    assert_scored(model, X, y)
    assert model.score(X, y) <= max(np.mean(y), 1 - np.mean(y))
    assert_no_score("its score is nan", SCORER, model, X, 1 - y)


def twice(net, x):
    """Uses the last weight twice, which leaves that layer out of "all"."""
    return net.last(torch.tanh(net.last(torch.tanh(net.first(x)))))


TIED = Net(twice, first=nn.Linear(4, 3), last=nn.Linear(3, 3))


NORMALIZED = {"measure": "normalized_relative_flatness"}
NOT_RECORDED = [
    (flat_net(), {"layer": 0}, "with layer=-1, normalize=False, but .* asks for layer=0, norm"),
    (flat_net(flatness_layer=0), {}, "with layer=0, .* asks for layer=-1"),
    (flat_net(flatness_layer=[0, -1]), {"layer": 0}, r"with layer=\[0, -1\], normalize=False, but"),
    (flat_net(TIED, flatness_layer="all", flatness_weight=0), {}, "asks for layer=-1"),
    (flat_net(), NORMALIZED, "asks for layer=-1, normalize=True"),
]


@pytest.mark.filterwarnings("ignore:'last' left out", "ignore:.*is negative")
@pytest.mark.parametrize(("model", "asked", "message"), NOT_RECORDED)
def test_flatness_that_was_not_recorded_is_no_score(model, asked, message):
    model = model.fit(X, Y)
    model.set_params(flatness_layer=asked.get("layer", -1), flatness_normalize="measure" in asked)
    assert_no_score(message, FlatnessScorer(data="train", **asked), model, X, Y)


@pytest.mark.parametrize("layers", ["all", [-1, 0]])
def test_of_several_recorded_layers_the_scorer_takes_the_last_or_the_sum(layers):
    model = flat_net(flatness_layer=layers).fit(X, Y)
    of_layers = [measure("relative_flatness", model, X, Y, layer=layer) for layer in (0, 1)]
    assert FlatnessScorer(data="train")(model, X, Y) == pytest.approx(-of_layers[1], rel=FLOAT32)
    for data in ("train", "given"):
        scorer = FlatnessScorer(layer=layers, data=data)
        assert scorer(model, X, Y) == pytest.approx(-sum(of_layers), rel=FLOAT32)
