"""Peak memory over data larger than what may be in memory, in fresh processes."""

import pytest

from benchmarks.costs.streaming import KINDS
from tests.benchmarks.commands import run

MIB = 512  # 64 rows each


@pytest.mark.parametrize("kind", KINDS)
def test_memory_does_not_grow_with_the_number_of_rows(kind):
    printed = run("benchmarks.costs.streaming", "--cell", "relative_flatness", kind, str(64 * MIB))
    peak, _ = map(float, printed.split())
    assert peak < MIB / 4 * 2**20
