"""These run once a device: also those that ask for no machine, since torch differs by device."""

import pytest

from tests.pair import Machine


@pytest.fixture(autouse=True)
def on_each_device(machine: Machine) -> None:
    pass
