"""The first example of docs/scaling.md runs as a user would paste it."""

from tests.contracts.pages import blocks, run_block


def test_the_example_of_data_on_disk_runs(tmp_path, capsys):
    run_block(blocks("docs/scaling.md")[0], tmp_path)
    score, flatness, again, minus = map(float, capsys.readouterr().out.split())
    assert score > 0.7
    assert flatness == again == -minus
