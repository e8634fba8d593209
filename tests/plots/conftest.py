"""Every test of the displays leaves no figure behind."""

import pytest
from matplotlib import pyplot as plt


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")
