"""Tests of failures that come from the call: found early, and not recorded as results."""

import io
from pathlib import Path

import numpy as np
import optuna
import pytest
from optuna.artifacts import FileSystemArtifactStore
from optuna.trial import TrialState
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import scale

from relflat_sk import (
    FlatMinimaSearch,
    FlatnessWarning,
    MinimaObjective,
    RelativeFlatnessRegularizedClassifier,
)
from relflat_sk.search._failures import CallError, blame_storage, explain, is_of_storage
from relflat_sk.search._study import open_storage

X, Y = load_iris(return_X_y=True)
X = scale(X).astype(np.float32)


@pytest.fixture
def stored(tmp_path):
    return {"storage": tmp_path / "minima.log", "study_name": "sweep"}


def make_search(space=None, estimator=None, **parameters):
    estimator = LogisticRegression(max_iter=1000) if estimator is None else estimator
    space = {"C": [0.5, 1.0, 2.0]} if space is None else space
    return FlatMinimaSearch(estimator, space, random_state=0, depth_band=None, **parameters)


class FullStore(FileSystemArtifactStore):
    """A folder on a disk that is full after a number of files."""

    def __init__(self, folder, n_files):
        super().__init__(folder)
        self.folder, self.n_files = folder, n_files

    def write(self, artifact_id, content):
        if len(list(self.folder.iterdir())) >= self.n_files:
            raise OSError(28, "No space left on device")
        super().write(artifact_id, content)


def load(stored):
    return optuna.load_study(study_name="sweep", storage=open_storage(stored["storage"]))


def states(stored):
    return [trial.state.name for trial in load(stored).trials]


# -- before training ---------------------------------------------------------------------------


class FarAway:
    """A store of one's own that cannot be written to."""

    def __repr__(self):
        return "a store far away"

    def write(self, artifact_id, content):
        raise PermissionError("permission denied")

    def open_reader(self, artifact_id):
        return io.BytesIO()


@pytest.mark.parametrize(
    ("parameters", "error", "match"),
    [
        (
            {"artifact_store": FullStore(Path(), 0)},
            ValueError,
            r"cannot be written to: OSError: .*Free space on its disk",
        ),
        (
            {"artifact_store": __file__},
            ValueError,
            r"artifact_store='.*/test_call_errors.py' cannot be written to",
        ),
        ({"artifact_store": FarAway()}, ValueError, "a store far away.* Give a place that this"),
        ({"artifact_store": 3}, TypeError, "artifact_store must be a folder, an optuna artifact"),
        ({"storage": "minima"}, ValueError, "Could not parse SQLAlchemy URL .* Expected the URL"),
        (
            {"storage": "sqlite:////no/such/folder/m.db"},
            ValueError,
            "unable to open .* put it back, or give another storage",
        ),
        ({"storage": Path("/no/such/folder/m.db")}, ValueError, "there is no folder .* make it"),
        (
            {"storage": "nobase://me:secret@there/m"},
            ValueError,
            r"storage='nobase://me:\*\*\*@there/m' cannot",
        ),
        ({"storage": 3}, TypeError, "storage must be the URL of a database, .*, got 3"),
        ({"study_name": "sweep"}, ValueError, "study_name='sweep' needs a storage: without one"),
    ],
)
def test_what_cannot_be_written_to_is_refused_before_training(
    parameters, error, match, monkeypatch
):
    monkeypatch.setattr(MinimaObjective, "train", None)
    with pytest.raises(error, match=match) as caught:
        make_search(**parameters).fit(X, Y)
    assert "secret" not in str(caught.value)


def test_the_probe_of_a_store_is_removed(tmp_path):
    make_search(artifact_store=tmp_path).fit(X, Y)
    assert len(list(tmp_path.iterdir())) == 3


def test_the_objective_checks_its_store_too(tmp_path, monkeypatch):
    monkeypatch.setattr(MinimaObjective, "train", None)
    objective = MinimaObjective(
        LogisticRegression(), X, Y, {"C": [1.0]}, artifact_store=FullStore(tmp_path, 0)
    )
    with pytest.raises(ValueError, match="cannot be written to"):
        optuna.create_study().optimize(objective, n_trials=1)


@pytest.mark.parametrize(
    "storage",
    ["minima.db", "minima.sqlite", "minima.log", Path("minima.db"), Path("a"), Path("a.journal")],
    ids=str,
)
def test_a_file_is_a_storage(storage, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stored = {"storage": storage, "study_name": "sweep"}
    first = make_search(**stored).fit(X, Y)
    is_sqlite = (tmp_path / storage).read_bytes().startswith(b"SQLite format 3")
    assert is_sqlite == (Path(storage).suffix not in {".log", ".journal"})
    monkeypatch.setattr(MinimaObjective, "train", None)
    again = make_search(**stored).set_params(refit=False).fit(X, Y)
    assert again.minima_.equals(first.minima_)


# -- while candidates train --------------------------------------------------------------------


@pytest.mark.parametrize("n_jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_weights_that_cannot_be_saved_end_the_search(stored, tmp_path, n_jobs):
    folder = tmp_path / "minima"
    folder.mkdir()
    search = make_search(artifact_store=FullStore(folder, 1), n_jobs=n_jobs, **stored)
    with pytest.raises(CallError, match=r"the weights of trial \d cannot be saved in .*Free space"):
        search.fit(X, Y)
    assert states(stored).count("COMPLETE") == 1
    assert "RUNNING" not in states(stored)
    # the corrected call trains the others, and nothing is left of the failure
    search.set_params(artifact_store=FileSystemArtifactStore(folder), n_jobs=1).fit(X, Y)
    assert search.minima_["state"].tolist() == ["complete"] * 3
    assert states(stored).count("COMPLETE") == 3
    assert len(list(folder.iterdir())) == 3


def test_held_out_data_that_cannot_be_evaluated_end_the_search(stored):
    wrong = X.copy()
    wrong[0, 0] = np.nan
    with pytest.raises(CallError, match="X_test and y_test cannot be evaluated: ValueError: .*NaN"):
        make_search(**stored).fit(X, Y, wrong, Y)
    assert states(stored) == ["FAIL"]
    # the study belongs to nothing yet
    search = make_search(**stored).fit(X, Y, X, Y)
    assert search.minima_["test_loss"].notna().all()
    assert len(search.minima_) == 3


class NoMemory(LogisticRegression):
    """Runs out of memory while it is scored on held-out data."""

    def score(self, X, y):
        if self.C == 1.0 and len(X) < 100:
            raise MemoryError("unable to allocate")
        return super().score(X, y)


@pytest.mark.filterwarnings("ignore:.* candidates are no minima")
def test_memory_is_a_matter_of_the_candidate():
    search = make_search(estimator=NoMemory(max_iter=1000)).fit(X, Y, X[::2], Y[::2])
    assert search.minima_["state"].tolist() == ["complete", "complete", "failed"]


def test_an_error_of_the_storage_is_no_failure_of_the_candidate(stored, monkeypatch):
    """The storage fails for a moment, while a candidate is recorded."""
    write = optuna.Trial.set_user_attr
    failed = []

    def fail_once(trial, name, value):
        if name == "train_loss" and trial.number == 1 and not failed:
            failed.append(trial.number)
            raise KeyError("no record exists")
        write(trial, name, value)

    monkeypatch.setattr(optuna.Trial, "set_user_attr", fail_once)
    search = make_search(**stored)
    with pytest.raises(RuntimeError, match="the storage of study 'sweep' failed: KeyError"):
        search.fit(X, Y)
    # what was finished is at hand
    assert [trial.state for trial in search.study_.trials] == [TrialState.COMPLETE, TrialState.FAIL]
    monkeypatch.undo()
    assert search.fit(X, Y).minima_["state"].tolist() == ["complete"] * 3


def test_the_objective_records_no_failure_of_the_call(tmp_path):
    objective = MinimaObjective(
        LogisticRegression(), X, Y, {"C": [1.0]}, artifact_store=FullStore(tmp_path, 1)
    )
    study = optuna.create_study()
    with pytest.raises(CallError, match="the weights of trial 1 cannot be saved"):
        study.optimize(objective, n_trials=2)
    assert "failed" not in study.trials[1].user_attrs
    assert "reason" not in study.trials[1].user_attrs


# -- tried again -------------------------------------------------------------------------------


class FailsAtFirst(LogisticRegression):
    """Fails for one value of C until a file exists."""

    def __init__(self, works=None, C=1.0, max_iter=1000):
        super().__init__(C=C, max_iter=max_iter)
        self.works = works

    def fit(self, X, y):
        if self.C == 1.0 and not self.works.exists():
            raise RuntimeError("out of luck")
        return super().fit(X, y)


@pytest.mark.parametrize("n_trials", [None, 3], ids=["grid", "draws"])
@pytest.mark.filterwarnings("ignore:.* candidates are no minima")
def test_failed_candidates_are_tried_again(stored, tmp_path, n_trials):
    works = tmp_path / "works"
    parameters = {"estimator": FailsAtFirst(works), "n_trials": n_trials, **stored}
    first = make_search(**parameters).fit(X, Y).minima_
    assert first["state"].tolist() == ["complete", "complete", "failed"]
    # it fails again
    again = make_search(retry_failed=True, **parameters).fit(X, Y).minima_
    assert again["state"].tolist() == ["complete", "complete", "failed"]
    assert len(states(stored)) == 4
    works.touch()
    assert make_search(**parameters).fit(X, Y).minima_["state"].tolist()[2] == "failed"
    mended = make_search(retry_failed=True, **parameters).fit(X, Y).minima_
    assert mended["state"].tolist() == ["complete"] * 3
    assert sorted(mended["param_C"]) == [0.5, 1.0, 2.0]
    # and nothing is trained once more
    assert len(make_search(retry_failed=True, **parameters).fit(X, Y).study_.trials) == 5


# -- what is said ------------------------------------------------------------------------------


def test_errors_are_explained_by_their_root():
    try:
        try:
            raise OSError(28, "No space left on device")
        except OSError as error:
            raise ValueError("while it wrote") from error
    except ValueError as caught:
        error = caught
    assert explain(error) == (
        "OSError: [Errno 28] No space left on device. Free space on its disk."
    )
    assert explain(ValueError("odd")) == "ValueError: odd."
    assert not is_of_storage(error)
    with pytest.raises(CallError, match="the storage failed: KeyError") as missing, blame_storage():
        raise KeyError("no such trial")
    assert is_of_storage(missing.value)


# -- damaged weights ---------------------------------------------------------------------------


def file_of(search, number, folder):
    trial = search.study_.trials[number]
    return folder / trial.user_attrs["artifact_id"]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-200])


def overwrite(path):
    path.write_bytes(b"nothing that torch can read")


def exchange(path):
    """The weights of another minimum, which can be read."""
    other = next(one for one in sorted(path.parent.iterdir()) if one != path)
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize("damage", [truncate, overwrite, exchange])
def test_damaged_weights_are_named_and_the_others_are_measured(stored, tmp_path, damage):
    folder = tmp_path / "minima"
    search = make_search(artifact_store=folder, refit=False, **stored).fit(X, Y)
    path = file_of(search, 1, folder)
    predicted = search.get_estimator(1).predict_proba(X)
    damage(path)
    with pytest.warns(
        FlatnessWarning, match=rf"trial 1 are damaged: file '{path.name}' in '/.*"
    ) as w:
        found = search.remeasure(["l2_norm"]).set_index("trial").sort_index()
    assert found["l2_norm"].isna().tolist() == [False, True, False]
    assert "remeasure(..., retrain=True)" in str(w[0].message)
    with pytest.warns(FlatnessWarning, match="are damaged: .* The candidate is trained again"):
        whole = search.remeasure(["l2_norm"], retrain=True).set_index("trial").sort_index()
    expected = make_search(measure=["relative_flatness", "l2_norm"]).fit(X, Y).minima_
    np.testing.assert_allclose(
        whole["l2_norm"], expected.set_index("trial").sort_index()["l2_norm"], rtol=1e-6
    )
    # the file is whole again
    search.remeasure(["hessian_trace"])
    assert search.minima_["hessian_trace"].notna().all()
    damage(path)
    with pytest.warns(FlatnessWarning, match="are damaged: .* The candidate is trained again"):
        again = search.get_estimator(1)
    np.testing.assert_array_equal(again.predict_proba(X), predicted)
    np.testing.assert_array_equal(search.get_estimator(1).predict_proba(X), predicted)


@pytest.mark.parametrize("random_state", [0, None])
def test_weights_that_were_never_saved_can_be_trained_again(stored, random_state):
    search = make_search(**stored).set_params(random_state=random_state).fit(X, Y)
    assert search.remeasure(["l2_norm"], retrain=True)["l2_norm"].notna().all()


def test_another_network_is_not_measured(stored, monkeypatch):
    """Without saved weights, its loss tells that it is another one."""
    net = RelativeFlatnessRegularizedClassifier(max_epochs=60, verbose=0)
    search = make_search({"lr": [0.01, 0.02]}, net, goal=0.7, **stored).fit(X, Y)
    train = MinimaObjective.train
    monkeypatch.setattr(
        MinimaObjective, "train", lambda self, params, seed: train(self, params, seed + 1)
    )
    with pytest.warns(FlatnessWarning, match="minimum of trial 0 cannot be had again"):
        found = search.remeasure(["l2_norm"], retrain=True)
    assert found["l2_norm"].isna().all()
