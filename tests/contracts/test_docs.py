"""What the documentation says of measures, files and commands is true."""

import re
from inspect import ismodule
from operator import attrgetter
from pathlib import Path

import pytest

import relflat_sk
from relflat_sk.measures._names import SAME
from relflat_sk.measures._results import EVERY_CHANGE

ROOT = Path(__file__).parents[2]
DEFINITIONS = (ROOT / "docs" / "definitions.md").read_text(encoding="utf-8")
PAGES = [
    *sorted(ROOT.glob("*.md")),
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


@pytest.mark.parametrize("name", sorted(SAME))
def test_every_measure_is_defined_with_its_invariances(name):
    row = next(line for line in DEFINITIONS.splitlines() if re.match(rf"\| `.*{name}`", line))
    verdicts = ["same" if change in SAME[name] else "-" for change in EVERY_CHANGE]
    assert row.endswith(f"| {' | '.join(verdicts)} |")


def test_the_table_names_the_changes():
    assert f"| measure | definition | source | {' | '.join(EVERY_CHANGE)} |" in DEFINITIONS


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
