"""Smoke runs of the benchmarks of worth, each night, and the choice of the tuned settings."""

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_wine

from benchmarks._harness.timing import interval
from benchmarks.worth import baselines, speedrun, tuned
from relflat_sk import RelativeFlatnessPenaltyCV, RelativeFlatnessRegularizedClassifier
from tests.benchmarks.commands import run

pytestmark = pytest.mark.scale


WAYS = ("comparable flatness", "head gradient", "last", "held-out loss", "any")
THEORY = ("--n-train", "100", "--measures", "relative_flatness", "hessian_trace")
BOUND = "share of seeds whose bound is above the true error: 1.00"
NOT_JUDGED = "not judged (quick)"
ON_CPU = ("--device", "cpu", "--epochs", "1", "--wrong", "0", "0.4")
QUICK = {  # a script, its options, and what it prints
    "reparameterization": (THEORY, ["relative_flatness ", NOT_JUDGED]),
    "pac_bayes": (("--seeds", "2"), [BOUND, NOT_JUDGED]),
    "checkpoints": (
        ("--tasks", "digits"),
        ["1 runs with 3 checkpoints each", *(f"\n{way} " for way in WAYS)],
    ),
    "tuned": ((), [f"\n{method} " for method in (*tuned.METHODS, *tuned.PEERS)]),
    "speedrun": (ON_CPU, [*speedrun.ARMS, "average", "40%"]),
    "stability": (("--problem", "wine", "--layers", "last"), ["points", "Time of the epochs"]),
    "baselines": (("--splits", "1"), ["regression: 1 data sets", f"\n{baselines.SEARCH} "]),
    "sensitivity": ((), ["perceptron", "convolutional", "transformer"]),
}


@pytest.mark.parametrize("script", QUICK)
def test_quick_runs_print_what_they_judge(script):
    options, expected = QUICK[script]
    printed = run(f"benchmarks.worth.{script}", "--quick", *options)
    for part in expected:
        assert part in printed


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
