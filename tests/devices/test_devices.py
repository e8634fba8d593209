"""Run the tests on another device in a process of their own: a simulated one, or CUDA.

Torch cannot forget a device type. Once it knows one, it treats it as the machine's accelerator,
also in tests that have nothing to do with it.
"""

from pathlib import Path

import pytest
import torch

from tests.processes import run_module

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize("module", ["values.py", "trainings.py", "counts.py"])
def test_on_a_simulated_device(module):
    run_tests(module)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("module", ["values.py", "trainings.py"])
def test_on_cuda(module):
    run_tests(module, RELFLAT_SK_TEST_DEVICE="cuda")


def run_tests(module, **variables):
    # plugins that a machine has beside the project's warn of one another, which are errors here
    variables["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    run = run_module("pytest", "-q", "-p", "no:cacheprovider", HERE / module, **variables)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
