"""The scripts of the papers' figures: runs in chunks that go on, and verdicts."""

from importlib import import_module
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from benchmarks import papers
from benchmarks.papers._common import Claim, bootstrap, conditions
from benchmarks.papers.regularised import difference

SCRIPTS = sorted(
    path.stem for path in Path(papers.__file__).parent.glob("*.py") if not path.stem.startswith("_")
)


@pytest.mark.scale
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_goes_on_where_the_last_one_ended(script, tmp_path, capsys):
    main = import_module(f"benchmarks.papers.{script}").main
    results = tmp_path / "minima.csv"
    options = ["--quick", "--results", str(results), "--limit"]
    for limit, n in ((1, 1), (2, 3)):
        assert main([*options, str(limit)]) == 0
        rows = pd.read_csv(results)
        assert len(rows) == n
        assert not rows.filter(like="param_").duplicated().any()
        assert rows["train_loss"].notna().all()
        assert "cannot tell (quick)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("theirs", "low", "high", "n", "verdict"),
    [
        (0.7, 0.6, 0.8, 50, "agrees"),
        (0.7, 0.1, 0.8, 50, "cannot tell"),
        (0.7, 0.1, 0.6, 50, "disagrees"),
        (0.7, 0.6, 0.8, 5, "cannot tell"),
        ("> 0", 0.1, 0.8, 50, "agrees"),
        ("> 0", -0.1, 0.8, 50, "cannot tell"),
        ("> 0.25", 0.1, 0.2, 50, "disagrees"),
        ("< 5", 1.0, 2.0, 50, "agrees"),
        ("< 0", 0.1, 0.2, 50, "disagrees"),
        ("> 0", float("nan"), 0.2, 50, "cannot tell"),
    ],
)
def test_verdicts(theirs, low, high, n, verdict):
    assert Claim("r", theirs, (low + high) / 2, low, high, n).verdict() == verdict


def test_intervals_are_those_of_resampled_rows():
    frame = pd.DataFrame({"x": range(100)})
    claim = bootstrap("mean", "> 0", frame, lambda rows: float(rows["x"].mean()))
    assert (claim.value, claim.n) == (49.5, 100)
    half = 1.96 * 28.87 / 10  # of a mean of 100 independent rows
    assert claim.low == pytest.approx(49.5 - half, abs=0.6)
    assert claim.high == pytest.approx(49.5 + half, abs=0.6)


def test_methods_are_compared_over_the_runs_that_both_have():
    rows = [
        (method, size, seed, 10 * size + seed + (method == "other"))
        for method in ("one", "other")
        for size in (1, 2)
        for seed in range(5)
        if (method, size) != ("other", 2)  # networks that did not converge
    ]
    names = ["param_method", "param_batch_size", "param_seed", "error"]
    claim = difference("error", "> 0", pd.DataFrame(rows, columns=names), "error", "other", "one")
    assert (claim.value, claim.low, claim.high, claim.n) == (1, 1, 1, 10)


def test_the_condition_under_which_flatness_and_gap_agree_is_found(capsys):
    rng = np.random.default_rng(0)
    rate = np.repeat([1.0, 2.0, 3.0], 40)
    log_flatness = rng.normal(size=120) - 5 * rate  # higher rates are flatter, with larger gaps
    minima = pd.DataFrame({
        "param_rate": rate, "train_loss": rng.uniform(1, 2, 120),
        "flatness": np.exp(log_flatness), "flatness_at_loss": np.nan,
        "generalization_gap": 100 * rate + log_flatness, "error_gap": -log_flatness,
    })  # fmt: skip
    conditions(minima, ["flatness"], ["param_rate"])
    verdict = capsys.readouterr().out.splitlines()[0]
    assert verdict == "flatness: r is positive for flatness, one setting, in nats"
