"""Options and markers that all tests share. Warnings of ours are read, never ignored."""

import pytest
import torch

SHARED = ("contract", "proving", "threads", "prefill", "recipes", "tracing", "copies", "odd")
pytest.register_assert_rewrite(*(f"tests.{name}" for name in SHARED))

torch.set_num_threads(1)  # tiny models: a second thread only waits


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-gpu", action="store_true", help="fail where no GPU is seen")


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
