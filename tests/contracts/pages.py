"""The Python blocks of a page, and how to run one as a user would paste it."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def blocks(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def run_block(block, folder):
    """Run a block as a script of its own, and return its names."""
    script = folder / "block.py"
    script.write_text(block, encoding="utf-8")
    return runpy.run_path(str(script), run_name="__main__")


def assert_prints(page, printed):
    """Compare what the blocks of a page print with the page's blocks of text, to 10%."""
    text = (ROOT / page).read_text(encoding="utf-8")
    said = " ".join(re.findall(r"```text\n(.*?)```", text, re.DOTALL))
    number = re.compile(r"-?\d[\d.]*")
    for found, expected in zip(words(printed), words(said), strict=True):
        if number.fullmatch(expected):
            assert float(found) == pytest.approx(float(expected), rel=0.1)
        else:
            assert found == expected


def words(text):
    return re.sub(r"[\[\]]", " ", text).split()
