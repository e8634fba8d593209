"""The examples of docs/training.md run as a user would paste them."""

import pytest

from tests.contracts.pages import blocks, run_block


# of Lightning and transformers: few workers, no accelerator, a tree of torch's
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")
@pytest.mark.filterwarnings("ignore:.*LeafSpec")
@pytest.mark.parametrize(
    "block",
    blocks("docs/training.md"),
    ids=[
        "penalty",
        "regression",
        "plain torch",
        "lightning",
        "trainer",
        "fleet",
        "grid search",
        "sam",
    ],
)
def test_block_runs(block, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # trainers make folders for their output
    run_block(block, tmp_path)
    assert float(capsys.readouterr().out.split()[-1]) > 0.9
