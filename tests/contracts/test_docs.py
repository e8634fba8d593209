"""What the documentation says of measures is what the package knows of them."""

from pathlib import Path

from relflat_sk import get_measure_names
from relflat_sk.measures._registry import invariance_table

DOCS = Path(__file__).parents[2] / "docs" / "measures.md"


def test_the_table_of_invariances_is_printed_as_it_is():
    table = invariance_table()
    lines = [f"| measure | {' | '.join(table.columns)} |"]
    lines += [f"| `{name}` | {' | '.join(row)} |" for name, row in table.iterrows()]
    text = DOCS.read_text(encoding="utf-8")
    for line in lines:
        assert line in text


def test_every_measure_is_defined():
    definitions = DOCS.read_text(encoding="utf-8").split("##")[0]
    for name in get_measure_names():
        assert f"`{name}`" in definitions
