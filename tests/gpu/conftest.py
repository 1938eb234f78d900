"""These run on CUDA alone: also those that ask for no machine are skipped without one."""

import pytest

from tests.pair import Machine


@pytest.fixture(autouse=True)
def needs_cuda(machine: Machine) -> None:
    pass
