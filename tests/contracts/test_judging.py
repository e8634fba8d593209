"""The example of docs/judging.md runs as a user would paste it."""

import re
import runpy
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

DOC = Path(__file__).parents[2] / "docs" / "judging.md"


@pytest.mark.slow
def test_the_example_runs(tmp_path, monkeypatch, capsys):
    (block,) = re.findall(r"```python\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "block.py"
    script.write_text(block)
    runpy.run_path(str(script), run_name="__main__")
    printed = capsys.readouterr().out
    for expected in ("kendall_low", "psi_batch_size", "psi_lr", "cmi_given_2", "chance"):
        assert expected in printed
    assert (tmp_path / "measures.png").stat().st_size > 0
    plt.close("all")
