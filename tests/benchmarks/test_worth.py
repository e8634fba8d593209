"""Smoke runs of the benchmarks of worth, each night: they print, draw and go on."""

import numpy as np
import pytest

from benchmarks.worth import baselines
from benchmarks.worth.tuned import interval
from tests.benchmarks.commands import run

pytestmark = pytest.mark.scale


@pytest.mark.parametrize(
    ("module", "options", "line"),
    [
        (
            "reparameterization",
            ["--n-train", "100", "--measures", "relative_flatness", "hessian_trace"],
            "relative_flatness ",
        ),
        ("synthetic", [], "relative flatness orders the gaps"),
    ],
    ids=["reparameterization", "synthetic"],
)
def test_quick_runs_of_the_theory_print_what_they_judge(module, options, line):
    printed = run(f"benchmarks.worth.{module}", "--quick", *options)
    assert line in printed
    assert "not judged (quick)" in printed


def test_quick_runs_of_the_guarantee_print_bounds_that_hold():
    printed = run("benchmarks.worth.pac_bayes", "--quick", "--seeds", "2")
    assert "the bound is above the true error for 2 of 2 seeds" in printed
    assert "not judged (quick)" in printed


def saved(store):
    """When each training was saved."""
    return {path: path.stat().st_mtime_ns for path in store.rglob("output.pkl")}


def test_an_interrupted_tuning_continues(tmp_path):
    methods = ("SAM", "flatness, all layers")
    common = ("--quick", "--epochs", "1", "--methods", *methods, "--store", tmp_path)
    run("benchmarks.worth.tuned", *common, "--trials", "1")
    first = saved(tmp_path)
    assert len(first) == 2 * (3 + 6 + 2)  # parts that score, further parts, and seeds
    text = run("benchmarks.worth.tuned", *common, "--trials", "2")
    both = saved(tmp_path)
    assert first.items() <= both.items()
    assert 2 * (3 + 6) <= len(both) - len(first) <= 2 * (3 + 6 + 2)
    for method in methods:
        assert f"\n{method} " in text
    assert "Difference to SAM with the same seeds" in text


def test_dead_networks_leave_no_number_that_is_none():
    assert interval(np.array([0.5, np.nan, 0.7]), sign="+") == "+60.0 +- 127.1"
    assert interval(np.array([0.5, np.nan])) == "too few networks (1)"


def test_an_interrupted_study_of_weights_continues(tmp_path):
    options = ("--quick", "--problem", "wine", "--store", tmp_path)
    text = run("benchmarks.worth.stability", *options, "--layers", "last")
    *_, rows, _, summary = text.strip().split("\n\n")
    assert len(rows.splitlines()) == 2 + 2 * 2 * 3  # header; two for optimizer and learning rate
    assert len(summary.splitlines()) == 2 + 2  # header; two for the layer
    of_last = saved(tmp_path)
    assert len(of_last) == 2 * 3 * (1 + 2)  # without penalty, and with two weights
    run("benchmarks.worth.stability", *options, "--layers", "last", "first")
    assert of_last.items() <= saved(tmp_path).items()
    assert len(saved(tmp_path)) == 2 * len(of_last)


def test_an_interrupted_comparison_with_baselines_continues(tmp_path):
    results = tmp_path / "rows.csv"
    options = ("--only", "wine", "diabetes", "--splits", "1", "--results", results)
    run("benchmarks.worth.baselines", *options, "--limit", "5")
    stored = results.read_text()
    assert len(stored.splitlines()) == 1 + 5
    printed = run("benchmarks.worth.baselines", *options)
    assert results.read_text().startswith(stored)
    assert len(results.read_text().splitlines()) == 1 + 2 * len(baselines.METHODS)
    again = run("benchmarks.worth.baselines", *options, "--report")
    assert again.splitlines()[4:] == printed.splitlines()[4:]


def test_a_quick_run_of_checkpoints_compares_all_ways():
    printed = run("benchmarks.worth.checkpoints", "--quick", "--tasks", "digits")
    assert "1 runs with 3 checkpoints each" in printed
    ways = ("comparable flatness", "head gradient", "last", "held-out loss", "any")
    assert all(f"\n{way} " in printed for way in ways)


def test_a_quick_run_of_sensitivity_judges_three_networks():
    rows = [line.split() for line in run("benchmarks.worth.sensitivity", "--quick").splitlines()]
    for name in ("perceptron", "convolutional", "transformer"):
        found = [row for row in rows if row[0] == name]
        assert [row[2] for row in found] == ["8", "6", "4", "3"]
        assert all(float(row[5]) > 0.5 for row in found)  # Kendall's coefficient
