"""The first example of docs/scaling.md runs as a user would paste it."""

import re
import runpy
from pathlib import Path

TEXT = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text(encoding="utf-8")


def test_the_example_of_data_on_disk_runs(tmp_path, capsys):
    script = tmp_path / "block.py"
    script.write_text(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[0])
    runpy.run_path(str(script), run_name="__main__")
    score, flatness, again, minus = map(float, capsys.readouterr().out.split())
    assert score > 0.7
    assert flatness == again == -minus
