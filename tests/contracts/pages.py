"""The Python blocks of a page, and how to run one as a user would paste it."""

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def blocks(page):
    """Return the Python blocks of a page, given by its path in the repository."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def run_block(block, folder):
    """Run a block as a script of its own, and return its names."""
    script = folder / "block.py"
    script.write_text(block, encoding="utf-8")
    return runpy.run_path(str(script), run_name="__main__")
