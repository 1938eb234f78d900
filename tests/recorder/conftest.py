import pytest

from tests.pair import Machine


@pytest.fixture
def machine() -> Machine:
    return Machine("recorder", "cpu")
