"""What searches, objectives, studies and rules refuse before anything is trained, and how."""

import io
import math
from functools import partial
from pathlib import Path

import numpy as np
import optuna
import pandas as pd
import pytest
import torch
from optuna.artifacts import FileSystemArtifactStore
from optuna.pruners import MedianPruner
from optuna.samplers import TPESampler
from scipy import stats
from scipy.sparse import csr_array
from sklearn.compose import TransformedTargetRegressor
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import FixedThresholdClassifier, GridSearchCV
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from skorch import NeuralNetClassifier, NeuralNetRegressor

from relflat_sk import (
    MLP,
    FlatnessScorer,
    MinimaObjective,
    RelativeFlatnessRegularizedClassifier,
    flattest_within,
    rank_minima,
)
from relflat_sk.search._data import scale_lr, vary_data
from relflat_sk.search._space import Space
from relflat_sk.training._convergence import StopAtDepth
from tests.search.examples import WEIGHTS, X, Y, logistic, make_net, piped

SGD, Adam = torch.optim.SGD, torch.optim.Adam
NET = NeuralNetClassifier(MLP)
NESTED = Pipeline([
    ("scale", StandardScaler()),
    ("net", TransformedTargetRegressor(NeuralNetRegressor(MLP))),
])
LR, ALPHA = {"lr": [0.1]}, {"alpha": [0.1]}
MISSPELT = RelativeFlatnessRegularizedClassifier(flatnes_weight=1)
PIPELINE = make_pipeline(LogisticRegression())
ROWS = np.arange(40)


def search(*data, estimator=None, space=None, fit=(), **parameters):
    """A call of `fit`."""
    data = data or (X, Y)
    return lambda: logistic(space, estimator, **parameters).fit(*data, **dict(fit))


def scored(measure="relative_flatness", **arguments):
    return search(measure=FlatnessScorer(measure, **arguments))


def objective(estimator=None, X=X, y=Y, space=None, **parameters):
    estimator = LogisticRegression() if estimator is None else estimator
    space = {"C": [1.0]} if space is None else space
    return lambda: MinimaObjective(estimator, X, y, space, **parameters)


def study(directions=("minimize",), **parameters):
    made = objective(**parameters)()
    return lambda: optuna.create_study(directions=directions).optimize(made, 1)


def name(estimator, name):
    """A space of one name."""
    return objective(estimator, space={name: [1]})


def early(**parameters):
    return MLPClassifier((4,), random_state=0, **{"early_stopping": True, **parameters})


def vary(X=ROWS, y=ROWS, **parameters):
    return lambda: vary_data(X, y, **parameters)


class FullStore(FileSystemArtifactStore):
    """A folder on a disk that is full."""

    def write(self, artifact_id, content):
        raise OSError(28, "No space left on device")


class FarAway:
    """A store of one's own that cannot be written to."""

    def __repr__(self):
        return "a store far away"

    def write(self, artifact_id, content):
        raise PermissionError("permission denied")

    def open_reader(self, artifact_id):
        return io.BytesIO()


SQRT = {"lr_scaling": "sqrt"}
VALUES = [
    # the search
    (search(n_trials=0), "n_trials must be a positive integer or None, got 0"),
    (search(sampler=TPESampler()), "n_trials is needed with a sampler"),
    (search(space={"C": lambda trial: 1}), "n_trials is needed"),
    (search(space={"D": [1]}), "'D'"),
    (search(measure="flat"), "there is no measure 'flat'"),
    (search(measure=[]), r"measure must be a name, .* or a sequence of these, got \[\]"),
    (search(n_jobs=0), "n_jobs == 0"),
    (search(n_threads=0), "n_threads must be a positive integer or None"),
    (search(fleet="many"), "fleet must be a positive integer"),
    (search(fit={"timeout": "1h"}), "timeout must be"),
    (search(n_jobs=2, pruner=MedianPruner()), "pruner.*n_jobs"),
    (search(study_name="sweep"), "study_name='sweep' needs a storage: without one"),
    *(
        (partial(rank_minima, None, depth_band=band), "depth_band must be a number of at least 1")
        for band in (0.5, "wide", math.nan)
    ),
    # data
    (search(X[:0], Y[:0]), r"X holds 0 sample\(s\)"),
    (search(X[:1], Y[:1]), r"X holds 1 sample\(s\)"),
    (objective(X_test=X), "X_test and y_test go together"),
    (objective(y_test=Y), "X_test and y_test go together"),
    (search(fit={"sample_weight": WEIGHTS[:-1]}), "74"),
    (search(fit={"sample_weight": -WEIGHTS}), "negative"),
    (search(fit={"sample_weight": np.full(len(X), np.nan)}), "finite"),
    # the estimator
    (search(estimator=early(), space=ALPHA), "early_stopping=True holds out"),
    (
        search(estimator=piped(early()), space={"net__alpha": [0.1]}),
        "net__early_stopping=True holds out",
    ),
    # goals
    *(
        (search(goal=goal), "goal must be 'auto', a training loss greater than 0")
        for goal in (0, -1.0, "deep", math.inf, True)
    ),
    (
        search(estimator=piped(make_net()), space={"net__lr": [0.01]}, goal=0.1),
        r"goal=0.1, but the net has a goal of its own: \[StopAtLoss\(0.4",
    ),
    # measures
    (scored(measure_params={"batch_size": 0}), "batch_size must be"),
    (scored("joint_eigenvalue_flatness", layer=0), "has no layers to ch"),
    (scored("l2_norm", measure_params={"at_loss": 0.1}), "at_loss=0.1 has no effect on l2_norm"),
    (scored(measure_params={"device": "tpu9"}), "device"),
    (scored(data="train"), "measures on the training data. Leave data and non_minimum out"),
    (scored(non_minimum="warn"), "has its own rule for what is a minimum"),
    (
        search(measure=["l2_norm", FlatnessScorer(layer=0), FlatnessScorer()]),
        r"with the arguments \{'layer': 0\} and \{\}",
    ),
    (objective(direction="up"), r"direction must be one of \['minimize', 'maximize'\]"),
    (objective(measures=[]), "measure"),
    (objective(measures=["train_loss"]), "measure"),
    (search(measure=None), "measure"),
    (objective(measures=["flat"]), "there is no measure 'flat'"),
    (objective(space={"lr_scaling": ["log"]}), r"None or one of \['linear', 'sqrt'\], got 'log'"),
    # stores and storages
    *(
        (search(storage=place), f"storage='{place}'")
        for place in (
            *("minima", "sqlite:////no/such/folder/m.db", "nodir/minima.db"),
            *(Path("/no/such/folder/m.log"), Path(__file__).parent),
        )
    ),
    (search(storage="nobase://me:secret@there/m"), r"storage='nobase://me:\*\*\*@there/m' cannot"),
    # studies of one's own
    *(
        (study(**parameters), "the directions of study")
        for parameters in (
            {"directions": ["maximize"]},
            {"direction": "maximize"},
            {"directions": ["minimize", "minimize"]},
            {"measures": ["relative_flatness", "hessian_trace"]},
        )
    ),
    # spaces
    (lambda: Space({}), "space is empty: name at least one parameter"),
    (lambda: Space({"lr": []}), r"space\['lr'\] has no choices"),
    (name(NET, "learning_rate"), "learning_rate"),
    (name(NESTED, "net__lr"), "'lr'"),
    (name(NESTED, "net__data__train_size"), "data"),
    (name(LogisticRegression(), "data__size"), "but the names that vary the data are"),
    # varied data
    (vary(random_labels=1.5), "must be a share from 0 to 1, got 1.5"),
    (vary(random_labels="half"), "must be a share .* got 'half'"),
    (vary(confusion_size=-1), "must be an integer of at least 0, got -1"),
    (vary(confusion_size=1), "of 40 samples 0 are left"),
    (vary(train_size=30, confusion_size=11), "of 40 samples 10 are left"),
    (vary(train_size=41), "train_size=41 should be"),
    (vary(y=None, train_size=3), "begin with data__ need X and y as arrays"),
    (vary(iter(ROWS), train_size=3), "begin with data__ need X and y as arrays"),
    *(
        (partial(scale_lr, estimator, {"batch_size": size, **SQRT}), "'sqrt' needs numbers for 'ba")
        for estimator, size in (
            (MLPClassifier(), 32),
            (make_net(), "all"),
            (make_net(), -1),
            (make_pipeline(StandardScaler()), 32),
        )
    ),
    (search(refit="all"), "refit must be True, False, 'mean' or 'nearest', got 'all'"),
    *(
        (search(inputs, Y, refit="nearest"), f"'nearest' adds noise to X: .* of floats, got {kind}")
        for inputs, kind in (
            (X.astype(int), "ndarray of int64"),
            (torch.as_tensor(X).long(), "Tensor of torch.int64"),
            (csr_array(X), "csr_array"),
            (X.tolist(), "list"),
            (pd.DataFrame(X).assign(name="a"), "DataFrame"),
        )
    ),
    (
        search(
            estimator=FixedThresholdClassifier(LogisticRegression(), threshold=0.2),
            space={"estimator__C": [1.0]},
            refit="nearest",
        ),
        "'nearest' needs probabilities of single .* FixedThresholdClassifier",
    ),
    # the rule for searches of scikit-learn
    *(
        (partial(flattest_within, tolerance), "tolerance must be a finite number of at least 0, ")
        for tolerance in (-0.1, math.nan, math.inf, "1%", None, True)
    ),
    (lambda: flattest_within(0.1, score="flatness"), "score and flatness are both 'flatness'"),
]

TYPES = [
    (search(sampler="tpe"), "sampler must be an optuna sampler or None, got 'tpe'"),
    (search(n_jobs="a"), "n_jobs must be an integer or None, got 'a'"),
    (search(pruner="median"), "pruner must be an optuna pruner or None"),
    (search(storage=3), "storage must be the URL of a database, .*, got 3"),
    (search(artifact_store=3), "artifact_store must be a folder, an optuna artifact"),
    (search(estimator=LogisticRegression), "estimator must be an instance"),
    (
        search(estimator=RandomForestClassifier(), space={"max_depth": [1]}),
        "RandomForestClassifier is not a network",
    ),
    (search(estimator=SVC()), "SVC is not a network"),
    (search(estimator=make_pipeline(SVC()), space={"svc__C": [1.0]}), "SVC is not a network"),
    (scored(layer=torch.nn.Linear(2, 2)), "layer must be the position of a layer or"),
    (scored(layer=True), "layer must be the position"),
    (scored(measure_params={"probes": 3}), "'probes' is no argument of"),
    (scored(measure_params={"layer": 0}), "'layer'"),
    (scored(measure_params={"criterion": torch.nn.MSELoss()}), "'criterion'"),
    (objective(fit_params=WEIGHTS), "sequence|iterable"),
    (objective(X={"C": [1.0]}, y=X, space=Y), "space must be a dict .* got ndarray"),
    (lambda: Space([{"lr": [0.1]}]), "space must be a dict .* got list"),
    (lambda: Space(dict), "or a function of a trial that returns one, got type"),
    (lambda: Space({"lr": 0.1}), r"space\['lr'\] must be a list .* got 0.1.*list: \[0.1\]"),
    (lambda: Space({"lr": np.float64(0.1)}), r"space\['lr'\] must be a list"),
    (lambda: Space({"optimizer": "adam"}), r"must be a list of choices.* got 'adam'"),
    (lambda: Space({"optimizer": SGD}), r"goes into a list: \[SGD\]"),
    (lambda: Space({"lr": {0.1, 0.2}}), "must be a list of choices"),
    (lambda: Space({"lr": None}), "must be a list of choices"),
    (lambda: Space({"C": stats.loguniform(0.1, 1)}), "a distribution of optuna, .* got <scipy"),
]


STORES = [
    (search(artifact_store=FullStore("")), "artifact_store=.*OSError"),
    (search(artifact_store=__file__), "artifact_store='.*.py'"),
    (search(artifact_store=FarAway()), "a store far away"),
    (study(artifact_store=FullStore("")), "artifact_store="),
]


@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        *((call, ValueError, match) for call, match in VALUES),
        *((call, TypeError, match) for call, match in TYPES),
        *((call, RuntimeError, match) for call, match in STORES),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused(call, error, match):
    with pytest.raises(error, match=match) as caught:
        call()
    assert "secret" not in str(caught.value)


def test_what_a_class_refuses_is_the_reason_of_all_candidates():
    for estimator, space, named in (
        (MISSPELT, LR, "flatnes_weight"),
        (NET, {"module__hiden": [1]}, "hiden"),
        (PIPELINE, {"logisticregression__C": [-1.0]}, "'C'"),
    ):
        with pytest.raises((TypeError, ValueError), match=named):
            search(estimator=estimator, space=space)()
    with pytest.raises(ValueError, match=r"inconsistent numbers of samples: \[75, 9\]"):
        search(X, Y[:9])()


def test_a_goal_without_a_depth_is_refused_by_the_net():
    for depth in (0, math.inf):
        net = make_net(callbacks=[StopAtDepth(depth)])
        with pytest.raises(ValueError, match="none of 1 (.|\n)*depth must be a finite positive"):
            logistic({"lr": [0.1]}, net).fit(X, Y)


@pytest.mark.parametrize(
    ("estimator", "space"),
    [
        (make_pipeline(StandardScaler(), SVC()), {"svc": [LogisticRegression()]}),
        (make_pipeline(GridSearchCV(Ridge(), {"alpha": [1.0]})), {"gridsearchcv__cv": [3]}),
        (early(), {"early_stopping": [False]}),
        (piped(early()), {"net": [LogisticRegression()]}),
        (NET, {"optimizer": [SGD, Adam], "optimizer__betas": [(0.9, 0.99)], "lr": [1]}),
        (NET, {"iterator_train__shuffle": [1], "callbacks__print_log": [None]}),
        (NESTED, {"net__regressor__module__hidden_layer_sizes": [1], "scale": [None]}),
    ],
)
def test_what_candidates_may_be_is_not_refused(estimator, space):
    MinimaObjective(estimator, X, Y, space)
