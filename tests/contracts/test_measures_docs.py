"""The example of docs/measures.md runs as a user would paste it."""

import re
import runpy
from pathlib import Path

import pytest

from relflat_sk import register_measure

TEXT = (Path(__file__).parents[2] / "docs" / "measures.md").read_text(encoding="utf-8")


@pytest.fixture
def registered():
    yield "largest weight"
    register_measure("largest weight", None)


def test_measures_of_your_own(registered, tmp_path, capsys):
    (block,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    script = tmp_path / "block.py"
    script.write_text(block)
    found = runpy.run_path(str(script), run_name="__main__")
    printed = capsys.readouterr().out
    assert 0 < float(printed.splitlines()[0]) < found["search"].minima_["largest_weight"].max()
    assert registered in printed
    assert found["search"].minima_["largest_weight"].is_monotonic_increasing
