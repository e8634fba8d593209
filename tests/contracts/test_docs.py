"""What the documentation says of measures, files and commands is true."""

import re
from inspect import ismodule
from operator import attrgetter
from pathlib import Path

import pytest

import relflat_sk
from relflat_sk import get_measure_names
from relflat_sk.measures._names import SAME
from relflat_sk.measures._results import EVERY_CHANGE

ROOT = Path(__file__).parents[2]
MEASURES = ROOT / "docs" / "measures.md"
PAGES = [
    *sorted(ROOT.glob("*.md")),
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


def test_the_table_of_invariances_is_printed_as_it_is():
    lines = [f"| measure | {' | '.join(EVERY_CHANGE)} |"]
    for name, same in SAME.items():
        verdicts = ["same" if change in same else "different" for change in EVERY_CHANGE]
        lines.append(f"| `{name}` | {' | '.join(verdicts)} |")
    text = MEASURES.read_text(encoding="utf-8")
    for line in lines:
        assert line in text


def test_every_measure_is_defined():
    definitions = MEASURES.read_text(encoding="utf-8").split("##")[0]
    for name in get_measure_names():
        assert f"`{name}`" in definitions


def test_the_reference_lists_every_public_name():
    listed = set(re.findall(r"^   ([\w.]+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE))
    assert listed >= {
        name for name in relflat_sk.__all__ if not ismodule(getattr(relflat_sk, name))
    }
    for name in listed:
        assert attrgetter(name)(relflat_sk)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_commands_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert link.startswith("https://") or (page.parent / link).exists(), link
    for module in re.findall(r"python -m (benchmarks[\w.]*\w)", text):
        assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists(), module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_are_about_120_characters_long(page):
    """Tables may be wider."""
    lines = page.read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if len(line) > 125 and not line.startswith("|")]
