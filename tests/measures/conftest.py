import pytest

from relflat_sk.measures._names import _REGISTERED


@pytest.fixture
def registry():
    """Forget what a test registers."""
    before = dict(_REGISTERED)
    yield
    _REGISTERED.clear()
    _REGISTERED.update(before)
