"""The recipes under pipelines/ on any device, each with `--tiny`: replayed, and equal to eager."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageSequence

from tests.pair import Machine

RECIPES = Path(__file__).parents[2] / "pipelines"
NAMES = ["dit", "emoji", "flux", "pixart", "qwen_image", "sana", "sd3", "wan", "z_image"]
SAME = "same pixels with and without graphs (2 drawn)"
TIMES = r"\d+\.\d{3} s a picture with graphs, \d+\.\d{3} s without"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script finds `common` next to it."""
    monkeypatch.syspath_prepend(RECIPES)


def recipe(name: str) -> ModuleType:
    """The script as a module under a name of its own: another package may be called so too."""
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", RECIPES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tiny(device: str, output: Path, *more: str) -> list[str]:
    """A command line."""
    return ["--tiny", "--device", device, "--pictures", "2", "--output", str(output), *more]


def frames(path: Path) -> np.ndarray:
    """All of a picture's frames, (F, H, W, 3)."""
    with Image.open(path) as image:
        return np.stack([np.asarray(f.convert("RGB")) for f in ImageSequence.Iterator(image)])


def replays(report: str) -> int:
    return sum(map(int, re.findall(r"replays (\d+)", report)))


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_replays_what_eager_draws(
    name: str, machine: Machine, tmp_path: Path, capsys: Any
) -> None:
    script = recipe(name)
    assert script.main(tiny(machine.device, tmp_path / "graphs")) == 0
    report = capsys.readouterr().out
    assert replays(report) > 0, report
    assert SAME in report and re.search(TIMES, report), report
    on_recorder = machine.device == "recorder"
    assert ("the recorder's time says nothing about a GPU" in report) == on_recorder
    assert not on_recorder or "eager" not in report, "elsewhere the gate times eager calls"
    eager = tiny(machine.device, tmp_path / "eager", "--backend", "eager")
    assert script.main(eager) == 0
    told = capsys.readouterr().out
    assert "eager 8: backend eager" in told or "eager 16: backend eager" in told
    assert "nothing was replayed" in told and SAME not in told
    names = sorted(path.name for path in (tmp_path / "eager").iterdir())
    assert len(names) == 2
    assert names == sorted(path.name for path in (tmp_path / "graphs").iterdir())
    drawn = [frames(tmp_path / "graphs" / name) for name in names]
    for name, picture in zip(names, drawn):
        assert np.array_equal(picture, frames(tmp_path / "eager" / name)), name
    assert not np.array_equal(*drawn), "two seeds"
    assert drawn[0].std() > 1, "not of one colour"


@pytest.mark.parametrize("name", ["dit", "flux"])  # timesteps on the host, and on the device
def test_a_recipe_without_host_syncs(
    name: str, machine: Machine, tmp_path: Path, capsys: Any
) -> None:
    assert recipe(name).main(tiny(machine.device, tmp_path, "--remove-syncs")) == 0
    report = capsys.readouterr().out
    assert replays(report) > 0 and SAME in report, report
    assert re.search(r"remove_syncs: .+ \(\d+x\)", report), report
