"""Tests of failures that come from the call: found early, and not recorded as results."""

import time
from pathlib import Path

import numpy as np
import optuna
import pytest
import torch
from optuna.artifacts import FileSystemArtifactStore
from sklearn.linear_model import LogisticRegression

from relflat_sk import FlatnessWarning, MinimaObjective
from relflat_sk.search._storage import open_storage
from tests.search.examples import NO_MINIMA, X, Y, attributes_of, load, logistic

SPACE = {"C": [0.5, 1.0, 2.0]}


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


def states(stored):
    return [trial.state.name for trial in load(stored).trials]


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
    search = logistic(SPACE, artifact_store=FullStore(folder, stored), n_jobs=n_jobs, **stored)
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
        logistic(SPACE, **stored).fit(X, Y, X_test, y_test)
    assert states(stored) == ["FAIL"]
    # the study belongs to nothing yet
    search = logistic(SPACE, **stored).fit(X, Y, X, Y)
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
@NO_MINIMA
def test_failed_candidates_are_tried_again_if_asked(stored, tmp_path, n_trials):
    works = tmp_path / "works"

    def fit(**arguments):
        found = logistic(SPACE, FailsAtFirst(works), n_trials=n_trials, **stored)
        return found.fit(X, Y, **arguments)

    assert fit().minima_["state"].tolist() == ["complete", "complete", "failed"]
    # it fails again
    again = fit(retry_failed=True).minima_
    assert again["state"].tolist() == ["complete", "complete", "failed"]
    assert len(states(stored)) == 4
    works.touch()
    assert fit().minima_["reason"].tolist() == ["", "", "RuntimeError: out of luck"]
    mended = fit(retry_failed=True).minima_
    assert mended["state"].tolist() == ["complete"] * 3
    assert sorted(mended["param_C"]) == [0.5, 1.0, 2.0]
    # and nothing is trained once more
    assert len(fit(retry_failed=True).study_.trials) == 5


def truncate(path):
    path.write_bytes(path.read_bytes()[:-200])


def overwrite(path):
    path.write_bytes(b"nothing that torch can read")


def exchange(path):
    """The weights of another minimum, which can be read."""
    other = next(one for one in sorted(path.parent.iterdir()) if one != path)
    path.write_bytes(other.read_bytes())


def damaged_search(stored, folder, damage):
    """A search whose weights of trial 1 are damaged, and how it predicted before."""
    search = logistic(SPACE, artifact_store=folder, refit=False, **stored).fit(X, Y)
    path = folder / search.study_.trials[1].user_attrs["artifact_id"]
    predicted = search.get_estimator(1).predict_proba(X)
    damage(path)
    return search, path, predicted


AGAIN = "The candidate is trained again"


@pytest.mark.parametrize("damage", [truncate, overwrite, exchange, Path.unlink])
def test_damaged_weights_are_named_and_the_others_are_measured(stored, tmp_path, damage):
    search, path, predicted = damaged_search(stored, tmp_path / "minima", damage)
    message = rf"the weights of trial 1.* '{path.name}'"
    with pytest.warns(FlatnessWarning, match=message) as warned:
        found = search.remeasure(["l2_norm"]).set_index("trial").sort_index()
    assert found["l2_norm"].isna().tolist() == [False, True, False]
    assert "remeasure(..., retrain=True)" in str(warned[0].message)
    with pytest.warns(FlatnessWarning, match=AGAIN):
        whole = search.remeasure(["l2_norm"], retrain=True).set_index("trial").sort_index()
    expected = logistic(SPACE, measure=["relative_flatness", "l2_norm"]).fit(X, Y).minima_
    expected = expected.set_index("trial").sort_index()
    np.testing.assert_allclose(whole["l2_norm"], expected["l2_norm"], rtol=1e-6)
    with pytest.warns(FlatnessWarning, match=AGAIN):
        again = search.get_estimator(1)
    np.testing.assert_array_equal(again.predict_proba(X), predicted)
