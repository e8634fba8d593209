"""Runs of the benchmarks of costs: ratios whose size is not judged, peak memory."""

import pytest
import torch

from benchmarks._harness.networks import LeNet5
from benchmarks.costs import training
from tests.benchmarks.commands import run

# a ratio, or a count, that each benchmark prints
RATIOS = [
    ("scoring", "torch.func.hessian / scoring, the measure by itself"),
    ("training", "MLP 784-256-128-10, first layer / no penalty"),
    ("layers", "flatness_report / forward-backward"),
    ("heads", "relative_flatness / forward"),
    ("fitting", "digits, defaults / scikit-learn"),
    ("fleet", "64-128-64-10, batch 32, fleet / torch loop"),
    ("imports", "the first public name / what it imports"),
    ("search", "seconds beside the training of a trial, journal"),
]


def budgets(printed):
    """The last part of what a benchmark prints: values and budgets, by name."""
    return dict(line.split(": ", 1) for line in printed.strip().split("\n\n")[-1].splitlines())


@pytest.mark.scale
@pytest.mark.parametrize(("module", "ratio"), RATIOS, ids=[row[0] for row in RATIOS])
def test_quick_run_prints_ratios_and_budgets(module, ratio):
    printed = run(f"benchmarks.costs.{module}", "--quick", RELFLAT_SK_CIFAR10="")
    assert "torch threads" in printed  # the environment
    value, _, rest = budgets(printed)[ratio].partition(" ")
    assert float(value) > 0
    assert rest.startswith("(budget ")
    assert rest.endswith("not judged (quick)")


@pytest.mark.scale
@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("scoring", ["--peak-of", "forward", "--n-samples", "64"]),
        ("heads", ["--quick", "--peak-of", "training step"]),
        ("fleet", ["--n", "2"]),
    ],
    ids=["scoring", "heads", "fleet"],
)
def test_parts_that_quick_runs_leave_out(module, arguments):
    """Each of them runs in a process of its own, and prints a number."""
    assert float(run(f"benchmarks.costs.{module}", *arguments)) > 0


@pytest.mark.slow
def test_training_steps_in_mixed_precision():
    X, y = torch.randn(128, 3, 32, 32), torch.arange(128) % 10
    losses = []
    for mixed in (False, True):
        net = training.METHODS["last layer"](LeNet5, mixed=mixed)
        training.Epochs(net, X, y)()
        losses.append(net.history[-1]["batches"][0]["train_loss"])
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
