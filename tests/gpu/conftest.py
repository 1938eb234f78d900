import pytest
import torch

from tests.pair import Machine


@pytest.fixture(autouse=True)
def gpu(request: pytest.FixtureRequest) -> None:
    if not torch.cuda.is_available():
        if request.config.getoption("--require-gpu"):
            pytest.fail("--require-gpu: torch sees no CUDA device")
        pytest.skip("needs a CUDA device; torch sees none")


@pytest.fixture
def machine(gpu: None) -> Machine:
    return Machine("cuda", "cuda:0")
