"""Peak memory over data larger than what may be in memory, in fresh processes."""

import pytest

from benchmarks.costs.streaming import FUNCTIONS, KINDS
from tests.benchmarks.commands import run

MIB = 320  # of data, 64 rows each


def peak(function, kind):
    """Return the peak in MiB."""
    printed = run("benchmarks.costs.streaming", "--cell", function, kind, str(64 * MIB))
    return float(printed.split()[0]) / 2**20


@pytest.mark.parametrize("kind", KINDS)
def test_memory_does_not_grow_with_the_number_of_rows(kind):
    assert peak("relative_flatness", kind) < 128


SLOWEST = "normalised, first layer"
CASES = [
    pytest.param(name, marks=pytest.mark.scale) if name == SLOWEST else name for name in FUNCTIONS
]


@pytest.mark.slow
@pytest.mark.parametrize("function", CASES)
def test_memory_of_measures_nets_and_searches(function):
    # at the first layer, a few arrays of the size of a batch, 16 MiB
    assert peak(function, "array-like") < 256
