"""docs/papers.md names functions, measures and arguments that exist."""

import inspect
import re
from pathlib import Path

import pytest

import relflat_sk
from relflat_sk import get_measure_names
from relflat_sk.measures._measure_network import NETWORK_WIDE

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "papers.md").read_text(encoding="utf-8")
DEFINITIONS = PAGE.split("## Figures")[0]
ROWS = [line.strip("|").split(" | ") for line in DEFINITIONS.splitlines() if line.startswith("| ")]
ROWS = [row for row in ROWS if row[0].strip() != "item"]
MEASURES = {*get_measure_names()}
PUBLIC = {name: getattr(relflat_sk, name) for name in relflat_sk.__all__}
PUBLIC |= vars(relflat_sk.theory)


@pytest.mark.parametrize("row", ROWS, ids=[row[0].strip()[:20] for row in ROWS])
def test_every_row_names_something_that_exists_or_says_why_not(row):
    assert len(row) == 3
    cell = row[2].strip()
    names = re.findall(r"`(\w+)`", cell)
    known = [name for name in names if name in MEASURES or name in PUBLIC]
    links = re.findall(r"\]\((\w+\.md)\)", cell)
    assert known or links or cell.startswith("none")
    texts = " ".join(" ".join(one.arguments) for name, one in NETWORK_WIDE.items() if name in known)
    places = [PUBLIC.get(name, relflat_sk.measure) for name in known]
    texts += " ".join(f"{inspect.signature(one)} {one.__doc__}" for one in places)
    texts += " ".join((DOCS / link).read_text(encoding="utf-8") for link in links)
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
    part = DEFINITIONS.split(f"## {paper}")[1].split("\n## ")[0]
    for number in NUMBERS[paper].split(", "):
        assert re.search(rf"\| [^|]*{number}\b", part), number
