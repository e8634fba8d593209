"""The blocks of docs/start.md run one after the other, as a new user would paste them."""

from tests.contracts.pages import assert_prints, blocks, run_block


def test_the_five_minutes_print_what_the_page_says(tmp_path, capsys):
    found = run_block("\n".join(blocks("docs/start.md")), tmp_path)
    assert_prints("docs/start.md", capsys.readouterr().out)
    assert found["net"].score(found["X"] / 16, found["y"]) > 0.95
    assert found["search"].minima_["rank"].tolist() == [1, 2, 3, 4]
