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
ROWS = [line.strip("|").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
ROWS = [row for row in ROWS if row[0].strip() != "item"]
MEASURES = {*get_measure_names(), "neuron_flatness"}
PUBLIC = vars(relflat_sk) | vars(relflat_sk.theory)


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


def test_the_table_has_all_numbered_items_of_the_submission():
    numbers = [f"Definition {k}" for k in (1, 3, 9)] + [f"Theorem {k}" for k in (2, 5, 7, 10)]
    numbers += ["Corollary 4", "Remark 6", "Corollary 8"]
    part = PAGE.split("## P19")[1].split("## N17")[0]
    for number in numbers:
        assert re.search(rf"\| [^|]*{number}\b", part), number
