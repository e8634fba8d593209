"""The blocks of docs/start.md run one after the other, as a new user would paste them."""

from tests.contracts.pages import blocks, run_block


def test_the_five_minutes_work(tmp_path, capsys):
    found = run_block("\n".join(blocks("docs/start.md")), tmp_path)
    assert len(capsys.readouterr().out.splitlines()) > 10
    assert found["net"].score(found["X"] / 16, found["y"]) > 0.95
    assert found["search"].minima_["rank"].tolist() == [1, 2, 3, 4]
