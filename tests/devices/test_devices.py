"""Run the tests on a simulated device in a process of their own.

Torch cannot forget a device type. Once it knows one, it treats it as the machine's accelerator,
also in tests that have nothing to do with it.
"""

from pathlib import Path

import pytest

from tests.processes import run_module

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize("module", ["values.py", "trainings.py", "counts.py", "fleets.py"])
def test_on_a_simulated_device(module):
    run = run_module("pytest", "-q", "-p", "no:cacheprovider", HERE / module)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
