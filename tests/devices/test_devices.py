"""Run the tests on a simulated device in a process of their own.

Torch cannot forget a device type. Once it knows one, it treats it as the machine's accelerator,
also in tests that have nothing to do with it.
"""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize("module", ["values.py", "counts.py", "fleets.py"])
def test_on_a_simulated_device(module):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / module)]
    run = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=HERE.parents[1], timeout=1500
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
