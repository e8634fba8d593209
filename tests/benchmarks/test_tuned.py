"""Smoke runs of the comparison of methods and of the study of large weights."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(module, *arguments):
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_tuning_goes_on_where_it_was(tmp_path):
    import optuna

    storage = f"sqlite:///{tmp_path / 'trials.db'}"
    methods = ("SAM", "flatness, all layers")
    common = ("--quick", "--n-train", "100", "--epochs", "1", "--storage", tmp_path / "trials.db")
    for trials in (1, 2):
        text = run("benchmarks.tuned", *common, "--trials", str(trials), "--methods", *methods)
        studies = [
            optuna.load_study(study_name=name, storage=storage)
            for name in optuna.get_all_study_names(storage)
        ]
        assert len(studies) == 2
        assert [len(study.trials) for study in studies] == [trials] * 2
    drawn = [[trial.params["lr"] for trial in study.trials] for study in studies]
    assert drawn[0] == drawn[1]  # the same learning rates were tried by all
    assert drawn[0][0] != drawn[0][1]
    for method in methods:
        assert f"\n{method} " in text
    assert "Difference to SAM with the same seeds" in text


@pytest.mark.slow
def test_a_study_of_large_weights():
    text = run("benchmarks.stability", "--quick", "--layers", "last")
    *_, last = text.strip().split("\n\n")
    assert len(last.splitlines()) == 2 + 1 + 2 * 4  # header, plain, weights times remedies
