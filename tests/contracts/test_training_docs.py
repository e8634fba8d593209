"""The examples of docs/training.md run as a user would paste them."""

import pytest

from tests.contracts.pages import blocks, run_block


@pytest.mark.parametrize(
    "block",
    blocks("docs/training.md"),
    ids=["penalty", "plain torch", "ensemble", "grid search", "sam"],
)
def test_block_runs(block, tmp_path, capsys):
    run_block(block, tmp_path)
    assert float(capsys.readouterr().out) > 0.9
