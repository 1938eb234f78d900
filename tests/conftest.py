"""Options, devices and what all tests share. Warnings of ours are read, never ignored."""

from pathlib import Path

import pytest
import torch

from tests.pair import Machine

torch.set_num_threads(1)  # tiny models: a second thread only waits

HERE = Path(__file__).parent
SHARED = HERE / "shared"
FOLDERS = {HERE / "recorder": "recorder", HERE / "gpu": "cuda"}
MACHINES = {"recorder": Machine("recorder", "cpu"), "cuda": Machine("cuda", "cuda:0")}
ASKED = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-gpu", action="store_true", help="fail where no GPU is seen")


def pytest_configure(config: pytest.Config) -> None:
    """A device's folder on the command line stands for all that this device must do.

    Its own tests are in the folder; the shared ones come with it, on that device alone. Where the
    command line names shared tests itself, as it does by `tests`, they run on every device.
    """
    base = config.invocation_params.dir
    named = {(base / argument.partition("::")[0]).resolve() for argument in config.args}
    asked = [device for folder, device in FOLDERS.items() if folder in named]
    if any(path.is_relative_to(SHARED) or SHARED.is_relative_to(path) for path in named):
        asked = []
    elif asked:
        config.args.append(str(SHARED))
    config.stash[ASKED] = asked or list(MACHINES)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A folder of one device has that one, which then is no part of its tests' names."""
    if "machine" not in metafunc.fixturenames:
        return
    own = [name for folder, name in FOLDERS.items() if folder in metafunc.definition.path.parents]
    names, ids = (own, [pytest.HIDDEN_PARAM]) if own else (metafunc.config.stash[ASKED], None)
    metafunc.parametrize("machine", names, indirect=True, ids=ids)


@pytest.fixture
def machine(request: pytest.FixtureRequest) -> Machine:
    if request.param == "cuda" and not torch.cuda.is_available():
        if request.config.getoption("--require-gpu"):
            pytest.fail("--require-gpu: torch sees no CUDA device")
        pytest.skip("needs a CUDA device; torch sees none")
    return MACHINES[request.param]


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
