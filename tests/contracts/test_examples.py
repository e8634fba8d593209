"""The demo, in its small version, as a user runs it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_demo_prints_its_findings_and_draws_them(tmp_path):
    picture = tmp_path / "folder" / "minima.png"
    script = ROOT / "examples" / "rank_minima.py"
    run = subprocess.run(
        [sys.executable, str(script), "--quick", "--output", str(picture)],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    for expected in (
        "4 candidates on 600 digits, 1197 held out",
        "Minima, flattest first:",
        "relative_flatness",
        "kendall_low",
        "5-fold cross-validation",
        "average candidate",
        "best candidate (hindsight)",
        "Kendall tau",
    ):
        assert expected in run.stdout
    assert "minima: 100%" in run.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
