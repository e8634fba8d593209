"""Every Python block of the README runs, each as a user would paste it."""

import pytest

from tests.contracts.pages import blocks, run_block

BLOCKS = blocks("README.md")


def test_there_are_three_examples_of_about_ten_lines():
    assert len(BLOCKS) == 3
    assert all(len(block.strip().splitlines()) <= 13 for block in BLOCKS)


@pytest.mark.parametrize("block", BLOCKS, ids=["score", "net", "sweep"])
def test_readme_block_runs(block, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_block(block, tmp_path)
    assert capsys.readouterr().out.strip()
