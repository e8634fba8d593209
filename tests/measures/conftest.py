import pytest


@pytest.fixture
def few_are_many(monkeypatch):
    """Return a function that lets heads of few classes be read in chunks of them, too."""

    def change():
        monkeypatch.setattr("relflat_sk._network.tail.MANY", 2)
        monkeypatch.setattr("relflat_sk._losses.curvature._ROWS", {False: 3, True: 3})

    return change
