"""Smoke runs of the benchmarks of worth, each night: they print, draw and go on."""

from importlib.util import find_spec

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_wine

from benchmarks._harness.data import load_images
from benchmarks._harness.timing import interval
from benchmarks.worth import baselines, speedrun, tuned
from relflat_sk import RelativeFlatnessPenaltyCV, RelativeFlatnessRegularizedClassifier
from tests.benchmarks.commands import run

pytestmark = pytest.mark.scale


WAYS = ("comparable flatness", "head gradient", "last", "held-out loss", "any")
THEORY = ("--n-train", "100", "--measures", "relative_flatness", "hessian_trace")
BOUND = "the bound is above the true error for 2 of 2 seeds"
NOT_JUDGED = "not judged (quick)"
QUICK = {  # a script, its options, and what it prints
    "reparameterization": (THEORY, ["relative_flatness ", NOT_JUDGED]),
    "pac_bayes": (("--seeds", "2"), [BOUND, NOT_JUDGED]),
    "checkpoints": (
        ("--tasks", "digits"),
        ["1 runs with 3 checkpoints each", *(f"\n{way} " for way in WAYS)],
    ),
}


@pytest.mark.parametrize("script", QUICK)
def test_quick_runs_print_what_they_judge(script):
    options, expected = QUICK[script]
    printed = run(f"benchmarks.worth.{script}", "--quick", *options)
    for part in expected:
        assert part in printed


def saved(store):
    """When each training was saved."""
    return {path: path.stat().st_mtime_ns for path in store.rglob("output.pkl")}


def test_an_interrupted_comparison_continues(tmp_path):
    results = tmp_path / "results.csv"
    options = ("benchmarks.worth.tuned", "--quick", "--results", results)
    first = run(*options)
    saved = results.read_text().splitlines()
    assert len(saved) == 1 + 2 * (len(tuned.SETTINGS) + len(tuned.PEERS))
    results.write_text("\n".join(saved[:60]) + "\n")
    assert tables(run(*options)) == tables(first)
    assert results.read_text().splitlines()[:60] == saved[:60]
    assert sorted(results.read_text().splitlines()) == sorted(saved)
    for method in (*tuned.METHODS, *tuned.PEERS):
        assert f"\n{method} " in first


def tables(printed):
    return printed[printed.index("Test accuracy") :]


def test_methods_have_six_settings_and_the_tool_its_default_grid():
    assert {len(settings) for settings in tuned.METHODS.values()} == {1, 6, len(tuned.TOOL)}
    X, y = load_wine(return_X_y=True)
    net = RelativeFlatnessRegularizedClassifier(max_epochs=1, batch_size=200, verbose=0)
    search = RelativeFlatnessPenaltyCV(net, cv=2, refit=False).fit(X, y)
    names = ("flatness_layer", "flatness_weight", "optimizer__weight_decay")
    defaults = tuned.PLAIN | {"optimizer__weight_decay": 0.0, "flatness_layer": -1}

    def rows(grid):
        return {tuple((defaults | params)[name] for name in names) for params in grid}

    assert rows(search.cv_results_["params"]) == rows(map(tuned.SETTINGS.get, tuned.TOOL))


def test_folds_choose_and_ties_go_to_the_weaker_setting():
    better = {"decay 1": 0.65, "decay 3": 0.65 + 1e-12, "SAM 0.2": 0.7}
    rows = {
        name: {"accuracy": better.get(name, 0.5), "loss": i, "test": i / 100, "mean": i / 200}
        for i, name in enumerate(tuned.SETTINGS)
    } | {name: {"test": 0.9} for name in tuned.PEERS}
    places = {name: i for i, name in enumerate(tuned.SETTINGS)}
    found = tuned.judge(pd.DataFrame(rows).T).round(9)
    assert found["plain"] == found["epochs"] == 0
    assert found["decay"] == found["tool"] == places["decay 1"]
    assert found["SAM"] == places["SAM 0.2"]
    assert found["tool, mean of folds"] == places["decay 1"] / 2
    assert found["tool, by log loss"] == 0
    assert found["forest"] == 90


def test_intervals_are_those_of_the_t_distribution():
    assert interval(np.array([0.5, 0.7])) == "+0.6 +- 1.3"
    assert interval(np.array([0.5])) == "+0.5"


def test_an_interrupted_speedrun_continues(tmp_path):
    results = tmp_path / "results.csv"
    options = ("benchmarks.worth.speedrun", "--device", "cpu", "--quick", "--epochs", "1")
    options += ("--results", results, "--wrong")
    text = run(*options, "0")
    first = results.read_text()
    assert len(first.splitlines()) == 1 + len(speedrun.ARMS)
    rows = {line.split()[1] for line in text.splitlines() if line.startswith("0% ")}
    assert rows == {*speedrun.ARMS, "average"}
    text = run(*options, "0", "0.4")
    assert results.read_text().startswith(first)
    rows = {line.split()[1] for line in text.splitlines() if line.startswith("40% ")}
    assert rows == {"plain", "average", "last", "all"}


def test_images_are_whitened_and_each_is_flipped_in_every_other_epoch():
    X, _ = load_images(3000)
    patches = speedrun.Speedrun(X, (8, 8, 8))[0](X).movedim(1, -1).flatten(0, -2)[:, :12]
    covariance = patches.T @ patches / len(patches)
    np.testing.assert_allclose(covariance.detach(), np.eye(12), atol=0.1)
    X, rows = X[:64], torch.arange(64)
    epochs = speedrun.batches(X, rows, 2, 64, torch.Generator().manual_seed(0))
    one, other = (moved[order.argsort()] for moved, order in epochs)
    padded = torch.nn.functional.pad(X, (2,) * 4, "reflect")
    for i in range(64):
        corners = [(down, right) for down in range(5) for right in range(5)]
        crops = torch.stack([padded[i, :, d : d + 32, r : r + 32] for d, r in corners])
        straight = [bool((crops == image[i]).flatten(1).all(1).any()) for image in (one, other)]
        flipped = [
            bool((crops.flip(-1) == image[i]).flatten(1).all(1).any()) for image in (one, other)
        ]
        assert sorted(straight) == [False, True]
        assert flipped == straight[::-1]


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
    left_out = [baselines.BAYESIAN] if find_spec("bde") is None else []
    assert len(results.read_text().splitlines()) == 1 + 2 * (len(baselines.METHODS) - len(left_out))
    assert all(f"{name}: sklearn-contrib-bde is not installed" in printed for name in left_out)
    again = run("benchmarks.worth.baselines", *options, "--report")
    assert again.splitlines()[4:] == printed.splitlines()[4:]


def test_a_quick_run_of_sensitivity_judges_three_networks():
    rows = [line.split() for line in run("benchmarks.worth.sensitivity", "--quick").splitlines()]
    for name in ("perceptron", "convolutional", "transformer"):
        found = [row for row in rows if row[0] == name]
        assert [row[2] for row in found] == ["8", "6", "4", "3"]
        assert all(float(row[5]) > 0.5 for row in found)  # Kendall's coefficient
