"""Compiled code of one test is none of another's."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def nothing_is_compiled_before_or_after() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()
