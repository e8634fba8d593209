"""The examples of docs/training.md run as a user would paste them."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize(
    "block", BLOCKS, ids=["penalty", "plain torch", "ensemble", "grid search", "sam"]
)
def test_block_runs(block, tmp_path, capsys):
    script = tmp_path / "block.py"
    script.write_text(block)
    runpy.run_path(str(script), run_name="__main__")
    assert float(capsys.readouterr().out) > 0.9
