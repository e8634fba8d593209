"""Every Python block of the README runs, each as a user would paste it."""

import re
import runpy
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_there_are_three_examples_of_about_ten_lines():
    assert len(BLOCKS) == 3
    assert all(len(block.strip().splitlines()) <= 13 for block in BLOCKS)


@pytest.mark.parametrize("block", BLOCKS, ids=["score", "net", "sweep"])
def test_readme_block_runs(block, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "block.py"
    script.write_text(block)
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.strip()
