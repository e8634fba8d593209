"""What the documentation says of measures, files and commands is true."""

import re
from inspect import isclass, isfunction, ismodule, signature
from operator import attrgetter

import pytest

import relflat_sk
from relflat_sk import MinimaObjective, get_measure_names
from relflat_sk.measures._measure_network import NETWORK_WIDE, SAME
from relflat_sk.measures._network_measure import EVERY_CHANGE
from relflat_sk.search._task import DATA_NAMES
from tests.contracts.pages import ROOT

DEFINITIONS = (ROOT / "docs" / "definitions.md").read_text(encoding="utf-8")
PAPERS = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
PAGES = [ROOT / "benchmarks" / "README.md", *sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])]


@pytest.mark.parametrize("name", sorted(SAME))
def test_every_measure_is_defined_with_its_invariances(name):
    rows = [line for line in DEFINITIONS.splitlines() if re.match(rf"\| `.*{name}`", line)]
    assert rows, f"add a row of {name} to docs/definitions.md"
    changes = ", ".join(change for change in EVERY_CHANGE if change in SAME[name])
    short = {"": "none", ", ".join(EVERY_CHANGE): "all"}
    short[", ".join(EVERY_CHANGE[:-1])] = f"all but {EVERY_CHANGE[-1]}"
    assert rows[0].endswith(f"| {short.get(changes, changes)} |")


@pytest.mark.parametrize("name", DATA_NAMES)
def test_every_axis_of_the_data_is_documented(name):
    assert name in (ROOT / "docs" / "searching.md").read_text(encoding="utf-8")
    assert name in (MinimaObjective.__doc__ or "")


def test_the_page_explains_the_changes():
    assert re.findall(r"^- \*\*(.*)\*\*:", DEFINITIONS, re.MULTILINE) == list(EVERY_CHANGE)


def test_the_reference_lists_every_public_name():
    listed = set(re.findall(r"^   ([\w.]+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE))
    assert listed >= {
        name for name in relflat_sk.__all__ if not ismodule(getattr(relflat_sk, name))
    }
    found = [attrgetter(name)(relflat_sk) for name in sorted(listed)]
    for public in found:  # and the types that users get from them
        members = vars(public).values() if isclass(public) else [public]
        for function in filter(isfunction, members):
            kind = signature(function).return_annotation
            kind = function.__globals__.get(kind, kind) if isinstance(kind, str) else kind
            ours = isclass(kind) and kind.__module__.startswith("relflat_sk")
            assert not ours or function.__name__[0] == "_" or kind in found, (public, kind)


def anchors(page):
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.fixture(params=PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def page(request):
    return request.param


def test_links_and_commands_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"\{\w+\}`", text)  # GitHub shows roles of Sphinx as they are
    for link, heading in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
        if not link.startswith("https://"):
            target = page.parent / link if link else page
            assert target.exists(), link
            assert not heading or heading in anchors(target), (link, heading)
    for module in re.findall(r"python -m (benchmarks[\w.]*\w)", text):
        assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists(), module


def test_lines_are_about_120_characters_long_and_tables_have_headers(page):
    """Tables may be wider; a blank line within a table makes text of its other rows."""
    text = page.read_text(encoding="utf-8")
    assert not [line for line in text.splitlines() if len(line) > 125 and line[0] != "|"]
    parts = [part.strip().splitlines() for part in text.split("\n\n")]
    tables = [part for part in parts if part and part[0].startswith("|")]
    assert not [table[0] for table in tables if not table[1:] or not table[1].startswith("|---")]


# -- docs/papers.md names functions, measures and arguments that exist -----------------------------

ITEMS = PAPERS.split("## Figures")[0]
ROWS = [line.strip("|").split(" | ") for line in ITEMS.splitlines() if line.startswith("| ")]
ROWS = [row for row in ROWS if row[0].strip() != "item"]
MEASURES = {*get_measure_names()}
PUBLIC = {name: getattr(relflat_sk, name) for name in relflat_sk.__all__}
PUBLIC |= vars(relflat_sk.theory)


@pytest.mark.parametrize("row", ROWS, ids=[row[0].strip()[:20] for row in ROWS])
def test_every_row_names_something_that_exists_or_says_why_not(row):
    assert len(row) == 2
    cell = row[1].strip()
    names = re.findall(r"`(\w+)`", cell)
    known = [name for name in names if name in MEASURES or name in PUBLIC]
    links = re.findall(r"\]\((\w+\.md)\)", cell)
    assert known or links or cell.startswith("none")
    texts = " ".join(" ".join(one.arguments) for name, one in NETWORK_WIDE.items() if name in known)
    places = [PUBLIC.get(name, relflat_sk.measure) for name in known]
    texts += " ".join(f"{signature(one)} {one.__doc__}" for one in places)
    texts += " ".join((ROOT / "docs" / link).read_text(encoding="utf-8") for link in links)
    for name in set(names) - set(known) - {"C1", "C2", "delta"}:
        assert re.search(rf"\b{name}\b", texts), name


NUMBERS = {
    "P21": "Definition 1, Proposition 2, Definition 3, Theorem 4, Theorem 5, Theorem 6",
    "P19": "Definition 1, Theorem 2, Definition 3, Corollary 4, Theorem 5, Remark 6, Theorem 7, "
    "Corollary 8, Definition 9, Theorem 10, Theorem 12, Theorem 13, Proposition 14",
    "N17": "Equation 1, Equation 2, Equation 4, Equation 5, Theorem 1",
}


@pytest.mark.parametrize("paper", NUMBERS)
def test_the_tables_have_all_numbered_items(paper):
    part = ITEMS.split(f"## {paper}")[1].split("\n## ")[0]
    for number in NUMBERS[paper].split(", "):
        assert re.search(rf"\| [^|]*{number}\b", part), number
