"""Two processes of accelerate train as one, with whole batches, where the penalty is a mean."""

import pytest

from tests.benchmarks.commands import run


@pytest.mark.slow
def test_weights_after_training_in_two_processes():
    printed = run("benchmarks.worth.processes", "--quick")
    *_, budgets = printed.strip().split("\n\n")
    apart = {
        line.split(", way")[0]: float(line.split(": ")[1].split()[0])
        for line in budgets.splitlines()
    }
    assert apart["no penalty"] == apart["last layer, no limit"] == 0  # of three digits
    assert all(share <= 0.01 for share in apart.values())
