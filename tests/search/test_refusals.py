"""What is refused before anything is trained, and failures that are not the candidates'."""

import math
import time
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
from sklearn.compose import TransformedTargetRegressor
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import FixedThresholdClassifier, GridSearchCV
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from skorch import NeuralNetClassifier, NeuralNetRegressor
from skorch.callbacks import Checkpoint
from skorch.dataset import ValidSplit

from relflat_sk import (
    MLP,
    FlatnessScorer,
    MinimaObjective,
    RelativeFlatnessRegularizedClassifier,
    flattest_within,
    rank_minima,
)
from relflat_sk.search._space import Space
from relflat_sk.search._storage import open_storage
from relflat_sk.search._task import scale_lr
from tests.search.examples import (
    NO_MINIMA,
    WEIGHTS,
    X,
    Y,
    attributes_of,
    load,
    logistic,
    make_net,
    piped,
    plain_net,
    vary,
)

SGD, Adam = torch.optim.SGD, torch.optim.Adam
NET = NeuralNetClassifier(MLP)
INNER = TransformedTargetRegressor(NeuralNetRegressor(MLP))
NESTED = Pipeline([("scale", StandardScaler()), ("net", INNER)])
LR, ESTIMATOR_C = {"lr": [0.1]}, {"estimator__C": [1.0]}
THRESHOLD = FixedThresholdClassifier(LogisticRegression(), threshold=0.2)
MISSPELT = RelativeFlatnessRegularizedClassifier(flatnes_weight=1)
PIPELINE = make_pipeline(LogisticRegression())
SAVED = make_net(callbacks=[("best", Checkpoint("train_loss_best", load_best=True))])
ROWS = np.arange(40)


def search(*data, estimator=None, space=None, fit=(), **parameters):
    data = data or (X, Y)
    return lambda: logistic(space, estimator, **parameters).fit(*data, **dict(fit))


def scored(measure="relative_flatness", **arguments):
    return search(measure=FlatnessScorer(measure, **arguments))


def split(estimator, name="lr", value=0.05):
    return search(estimator=estimator, space={name: [value]})


def objective(estimator=None, X=X, y=Y, space=None, **parameters):
    estimator = LogisticRegression() if estimator is None else estimator
    space = {"C": [1.0]} if space is None else space
    return lambda: MinimaObjective(estimator, X, y, space, **parameters)


def study(directions=("minimize",), **parameters):
    made = objective(**parameters)()
    return lambda: optuna.create_study(directions=directions).optimize(made, 1)


MINIMA = pd.DataFrame({"relative_flatness": [1.0], "converged": [True]})


def name(estimator, name):
    return objective(estimator, space={name: [1]})


def early(**parameters):
    return MLPClassifier((4,), random_state=0, **{"early_stopping": True, **parameters})


def varied(y=ROWS, **amounts):
    return lambda: vary(ROWS, y, **amounts)


def states(stored):
    return [trial.state.name for trial in load(stored).trials]


class FullStore(FileSystemArtifactStore):
    """A folder on a disk that is full after one file, whose candidate is recorded first."""

    def __init__(self, folder, stored=None):
        super().__init__(folder)
        self.folder, self.stored = folder, stored

    def write(self, artifact_id, content):
        if list(self.folder.iterdir()):
            while self.stored and "COMPLETE" not in states(self.stored):
                time.sleep(0.02)  # another process is about to record it
            raise OSError(28, "No space left on device")
        super().write(artifact_id, content)


VALUES = [
    # the search
    (search(n_trials=0), "n_trials must be a positive integer or None, got 0"),
    (search(sampler=TPESampler()), "n_trials is needed with a sampler"),
    (search(space={"C": lambda trial: 1}), "n_trials is needed"),
    (search(space={"D": [1]}), "'D'"),
    (search(measure="flat"), "there is no measure 'flat'"),
    (search(measure=[]), r"measure must be a name, .* got \[\]"),
    (search(n_jobs=0), "n_jobs == 0"),
    (search(n_threads=0), "n_threads must be"),
    (search(random_state="x"), "random_state must be an int, .* got 'x'"),
    (search(fleet="many"), "fleet must be"),
    (search(fit={"timeout": "1h"}), "timeout must be"),
    (search(n_jobs=2, pruner=MedianPruner()), "pruner.*n_jobs"),
    (search(estimator=piped(SAVED), space={"net__lr": [0.1]}, n_jobs=2), "Checkpoint.*n_jobs"),
    (search(study_name="sweep"), "study_name='sweep' needs a storage"),
    (search(refit="all"), "refit must be True, False, 'mean' or 'nearest', got 'all'"),
    (partial(rank_minima, MINIMA, depth_band=0.5), "depth_band must be"),
    # data
    (search(X[:1], Y[:1]), r"X holds 1 sample\(s\)"),
    (objective(X_test=X), "X_test and y_test go together"),
    (search(fit={"sample_weight": WEIGHTS[:-1]}), "74"),
    (search(fit={"sample_weight": -WEIGHTS}), "negative"),
    (search(X.tolist(), Y, refit="nearest"), "'nearest' adds noise to X: .* got list"),
    (search(X.astype(int), Y, refit="nearest"), "'nearest' adds .* got ndarray of int64"),
    # the estimator and its goal
    (search(estimator=piped(early()), space={"net__alpha": [0.1]}), "net__early_stopping=True"),
    (search(estimator=THRESHOLD, space=ESTIMATOR_C, refit="nearest"), "'nearest' needs prob"),
    (search(goal=0), "goal must be 'auto', a training loss"),
    (search(goal="deep"), "goal must be 'auto', a training loss"),
    (search(estimator=make_net(), space=LR, goal=0.1), r"goal=0.1, .*\[StopAtLoss\(0.4"),
    # measures
    (scored(measure_params={"batch_size": 0}), "batch_size must be"),
    (scored("joint_eigenvalue_flatness", layer=0), "has no layers to ch"),
    (scored("l2_norm", measure_params={"at_loss": 0.1}), "at_loss=0.1 has no effect on l2_norm"),
    (split(make_net(train_split=ValidSplit(4))), "train_split=None"),
    (split(plain_net(train_split=ValidSplit(4))), "train_split=None"),
    (split(plain_net(), "train_split", ValidSplit(4)), "train_split=None"),
    (scored(data="train"), "Leave data and non_minimum out"),
    (scored(non_minimum="warn"), "has its own rule for what is a minimum"),
    (search(measure=[FlatnessScorer(layer=0), FlatnessScorer()]), r"\{'layer': 0\} and \{\}"),
    (objective(direction="up"), r"direction must be one of \['minimize', 'maximize'\]"),
    (objective(measures=["train_loss"]), "measure"),
    # storages and studies
    (search(storage="nodir/minima.db"), "storage='nodir/minima.db'"),
    (search(storage=Path(__file__).parent), "storage='"),
    (search(storage="nobase://me:secret@there/m"), r"storage='nobase://me:\*\*\*@there/m' cannot"),
    (study(directions=["maximize"]), r"direction='minimize', .* MinimaObjective\(direction="),
    (study(measures=["relative_flatness", "hessian_trace"]), "the directions of study"),
    # spaces and varied data
    (lambda: Space({}), "space is empty"),
    (lambda: Space({"lr": []}), r"space\['lr'\] has no choices"),
    (name(NET, "learning_rate"), "learning_rate"),
    (name(NET, "btch"), r"'btch' .*'batch_size'\?.*: \['batch_size', [^_]"),
    (name(PIPELINE, "logisticregression__max_itr"), "'max_itr' for estimator Log.*n 'max_iter'"),
    (name(PIPELINE, "max_iter"), "Did you mean 'logisticregression__max_iter'"),
    (name(PIPELINE, "logistic_regression__C"), "Did you mean 'logisticregression'"),
    (name(NESTED, "net__lr"), "'lr'"),
    (name(LogisticRegression(), "data__size"), "the names that vary the data are"),
    (varied(random_labels=1.5), "must be a share from 0 to 1, got 1.5"),
    (varied(confusion_size=-1), "must be an integer of at least 0, got -1"),
    (varied(train_size=30, confusion_size=11), "of 40 samples 10 are left"),
    (varied(train_size=41), "train_size=41"),
    (varied(y=None, train_size=3), "data__ need X and y as arrays"),
    (objective(space={"lr_scaling": ["log"]}), r"one of \['linear', 'sqrt'\], got 'log'"),
    (partial(scale_lr, make_net(), {"batch_size": -1, "lr_scaling": "sqrt"}), "'sqrt' needs num"),
    # the rule for searches of scikit-learn
    (partial(flattest_within, math.nan), "tolerance must be"),
    (partial(flattest_within, "1%"), "tolerance must be"),
    (lambda: flattest_within(0.1, score="flatness"), "score and flatness are both 'flatness'"),
]

TYPES = [
    (search(sampler="tpe"), "sampler must be an optuna sampler or None, got 'tpe'"),
    (search(n_jobs="a"), "n_jobs must be an integer or None, got 'a'"),
    (search(pruner="median"), "pruner must be an optuna pruner or None"),
    (search(storage=3), "storage must be"),
    (search(artifact_store=3), "artifact_store must be"),
    (search(estimator=LogisticRegression), "an instance"),
    (search(estimator=make_pipeline(SVC()), space={"svc__C": [1.0]}), "SVC is not a network"),
    (scored(layer=True), "layer must be the position"),
    (scored(measure_params={"probes": 3}), "'probes' is no argument of"),
    (scored(measure_params={"layer": 0}), "'layer'"),
    (objective(X={"C": [1.0]}, y=X, space=Y), "space must be a dict .* got array"),
    (lambda: Space(dict), "space must be a dict .* got <class"),
    (lambda: Space({"lr": 0.1}), r"space\['lr'\] must be a list .* got 0.1"),
    (lambda: Space({"optimizer": SGD}), "must be a list of choices"),
    (lambda: Space({"C": stats.loguniform(0.1, 1)}), "a distribution of optuna, .* got <scipy"),
]


FULL = FullStore(Path(__file__).parent)
STORES = [
    (search(artifact_store=FULL), "artifact_store=.*OSError"),
    (search(artifact_store=__file__), "artifact_store='.*.py'"),
    (study(artifact_store=FULL), "artifact_store="),
]
REFUSALS = {ValueError: VALUES, TypeError: TYPES, RuntimeError: STORES}


@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize(
    ("error", "call", "match"),
    [(error, *row) for error, rows in REFUSALS.items() for row in rows],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused(call, error, match):
    with pytest.raises(error, match=match) as caught:
        call()
    assert "secret" not in str(caught.value)


MISSING = np.where(np.arange(X.size).reshape(X.shape) == 5, np.nan, X)
OF_NETS, OF_SKLEARN = {"estimator": make_net(), "space": LR}, {"space": {"C": [0.1, 1.0]}}


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (search(estimator=MISSPELT, space=LR), "flatnes_weight"),
        (search(estimator=NET, space={"module__hiden": [1]}), "hiden"),
        (search(estimator=PIPELINE, space={"logisticregression__C": [-1.0]}), "'C'"),
        (search(X, Y[:9]), r"inconsistent numbers of samples: \[75, 9\]"),
        *((search(MISSING, Y, **of), "^Input X contains NaN") for of in (OF_NETS, OF_SKLEARN)),
        *((search(X, None, **of), "^[Tt]his .* requires y") for of in (OF_NETS, OF_SKLEARN)),
    ],
)
def test_what_a_class_refuses_is_the_error_of_the_search(call, match):
    with pytest.raises((TypeError, ValueError), match=match):
        call()


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


# -- failures in the middle of a search ----------------------------------------------------------


@pytest.mark.parametrize("storage", ["minima.db", "minima.log", Path("a"), Path("a.journal")])
def test_a_file_is_a_storage(storage, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    optuna.create_study(storage=open_storage(storage), study_name="sweep")
    is_sqlite = (tmp_path / storage).read_bytes().startswith(b"SQLite format 3")
    assert is_sqlite == (Path(storage).suffix not in {".log", ".journal"})
    assert optuna.get_all_study_names(open_storage(storage)) == ["sweep"]


@pytest.mark.parametrize("n_jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_weights_that_cannot_be_saved_end_the_search(stored, tmp_path, n_jobs):
    folder = tmp_path / "minima"
    folder.mkdir()
    search = logistic(artifact_store=FullStore(folder, stored), n_jobs=n_jobs, **stored)
    with pytest.raises(RuntimeError, match=r"weights of trial \d cannot be saved .*Free space"):
        search.fit(X, Y)
    assert states(stored).count("COMPLETE") == 1
    assert "RUNNING" not in states(stored)
    # the corrected call trains the others, and nothing is left of the failure, nor of probes
    search.set_params(artifact_store=FileSystemArtifactStore(folder), n_jobs=1).fit(X, Y)
    assert search.minima_["state"].tolist() == ["complete"] * 3
    assert states(stored).count("COMPLETE") == 3
    assert len(list(folder.iterdir())) == 3


@pytest.mark.parametrize(
    ("X_test", "y_test", "match"),
    [
        (np.full((9, 4), np.nan), Y[:9], "ValueError: .*NaN"),
        (X[:9], Y[:8], "9 samples.* 8 labels"),
        (X[:9, :2], Y[:9], "2 features"),
        (X, Y + 1, "KeyError: 3"),
    ],
)
def test_held_out_data_that_cannot_be_evaluated_end_the_search(stored, X_test, y_test, match):
    with pytest.raises(RuntimeError, match=f"X_test and y_test cannot be evaluated: .*{match}"):
        logistic(**stored).fit(X, Y, X_test, y_test)
    assert states(stored) == ["FAIL"]
    # the study belongs to nothing yet
    search = logistic(**stored).fit(X, Y, X, Y)
    assert search.minima_["test_loss"].notna().all()
    assert len(search.minima_) == 3


class RunsOut(LogisticRegression):
    """Runs out of memory in the way that class_weight names."""

    def fit(self, X, y):
        if self.class_weight == "numpy":
            raise MemoryError("Unable to allocate 3. PiB for an array")
        if self.class_weight == "torch":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 PiB")
        return super().fit(X, y)


@NO_MINIMA
def test_running_out_of_memory_does_not_end_the_sweep(monkeypatch):
    """What a large candidate leaves in torch's cache, the next one may need."""
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    search = logistic({"class_weight": ["numpy", "torch", None]}, RunsOut(max_iter=1000)).fit(X, Y)
    table = search.minima_.set_index("param_class_weight")
    assert table["state"].tolist() == ["complete", "failed", "failed"]
    assert table["reason"]["numpy"] == "MemoryError: Unable to allocate 3. PiB for an array"
    assert table["reason"]["torch"].startswith("OutOfMemoryError: CUDA out of memory")
    assert search.best_params_ == {"class_weight": None}
    assert len(emptied) == 2


def test_the_objective_records_no_failure_of_the_call(tmp_path):
    store = FullStore(tmp_path)
    objective = MinimaObjective(LogisticRegression(), X, Y, {"C": [1.0]}, artifact_store=store)
    study = optuna.create_study()
    with pytest.raises(RuntimeError, match="the weights of trial 1 cannot be saved"):
        study.optimize(objective, n_trials=2)
    assert not {"failed", "reason"} & attributes_of(study.trials[1]).keys()
