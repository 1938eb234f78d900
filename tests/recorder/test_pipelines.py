"""The recipes under pipelines/, each with `--tiny`: replayed, and equal to eager."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image, ImageSequence

RECIPES = Path(__file__).parents[2] / "pipelines"
NAMES = ["emoji", "flux", "pixart", "qwen_image", "sd3", "wan", "z_image"]


def recipe(name: str) -> ModuleType:
    """The script as a module under a name of its own: another package may be called so too."""
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", RECIPES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def frames(path: Path) -> np.ndarray:
    """All of a picture's frames, (F, H, W, 3)."""
    with Image.open(path) as image:
        return np.stack([np.asarray(f.convert("RGB")) for f in ImageSequence.Iterator(image)])


def test_every_recipe_is_tested() -> None:
    assert sorted(p.stem for p in RECIPES.glob("*.py") if p.stem != "common") == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_replays_what_eager_draws(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(RECIPES)
    script = recipe(name)
    assert script.main(["--tiny", "--output", str(tmp_path / "graphs")]) == 0
    report = capsys.readouterr().out
    assert sum(map(int, re.findall(r"replays (\d+)", report))) > 0, report
    assert "eager" not in report
    options = ["--tiny", "--backend", "eager", "--output", str(tmp_path / "eager")]
    assert script.main(options) == 0
    assert "eager 8: backend eager" in (told := capsys.readouterr().out) or "eager 16:" in told
    names = sorted(path.name for path in (tmp_path / "eager").iterdir())
    assert len(names) == 2
    drawn = [frames(tmp_path / "graphs" / name) for name in names]
    for name, picture in zip(names, drawn):
        assert np.array_equal(picture, frames(tmp_path / "eager" / name)), name
    assert not np.array_equal(*drawn), "two seeds"
    assert drawn[0].std() > 1, "not of one colour"
