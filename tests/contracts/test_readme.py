"""The README's example runs, and prints what the README says; so does that of the search's page."""

from tests.contracts.pages import ROOT, assert_prints, blocks, run_block

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_prints_what_the_readme_says(tmp_path, capsys):
    run_block(blocks("README.md")[0], tmp_path)
    assert_prints("README.md", capsys.readouterr().out)


def test_the_readme_fits_on_a_screen():
    assert len(README.splitlines()) < 80


def test_the_first_example_of_a_search_runs(tmp_path, capsys):
    run_block(blocks("docs/searching.md")[0], tmp_path)
    assert "relative_flatness" in capsys.readouterr().out
