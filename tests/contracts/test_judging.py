"""The example of docs/judging.md runs as a user would paste it."""

import matplotlib.pyplot as plt
import pytest

from tests.contracts.pages import blocks, run_block


@pytest.mark.slow
def test_the_example_runs(tmp_path, monkeypatch, capsys):
    (block,) = blocks("docs/judging.md")
    monkeypatch.chdir(tmp_path)
    run_block(block, tmp_path)
    printed = capsys.readouterr().out
    for expected in ("kendall_low", "psi_batch_size", "psi_lr", "cmi_given_2", "chance"):
        assert expected in printed
    assert (tmp_path / "measures.png").stat().st_size > 0
    plt.close("all")
