"""The example of docs/measures.md runs as a user would paste it."""

import pytest

from relflat_sk import register_measure
from tests.contracts.pages import blocks, run_block


@pytest.fixture
def registered():
    yield "largest weight"
    register_measure("largest weight", None)


def test_measures_of_your_own(registered, tmp_path, capsys):
    (block,) = blocks("docs/measures.md")
    found = run_block(block, tmp_path)
    printed = capsys.readouterr().out
    assert 0 < float(printed.splitlines()[0]) < found["search"].minima_["largest_weight"].max()
    assert registered in printed
    assert found["search"].minima_["largest_weight"].is_monotonic_increasing
