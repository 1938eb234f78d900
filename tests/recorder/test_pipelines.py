"""What the recipes say without a device, and of pixels that differ."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.shared.test_pipelines import NAMES, RECIPES, SAME, frames, recipe, tiny
from tests.shared.test_pipelines import importable as importable


def test_every_recipe_is_tested_and_in_the_index() -> None:
    assert sorted(p.stem for p in RECIPES.glob("*.py") if p.stem != "common") == NAMES
    rows = (RECIPES / "README.md").read_text(encoding="utf-8").splitlines()
    for name in NAMES:
        (row,) = [row for row in rows if f"[{name}.py]({name}.py)" in row]
        assert f"| `{recipe(name).MODEL}` |" in row


@pytest.mark.parametrize("wrong", [{2}, {1, 2}])
def test_other_pixels_with_graphs_are_an_error(
    wrong: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """One value of one pixel, in some of the pictures that are drawn with graphs."""
    script = recipe("flux")
    pictures, drawn = script.common.pictures, []

    def spoilt(output: Any) -> list[Any]:
        (picture,) = pictures(output)
        drawn.append(picture)
        if len(drawn) not in wrong:
            return [picture]
        pixels = np.array(picture)
        pixels[3, 4, 1] ^= 1
        return [Image.fromarray(pixels)]

    monkeypatch.setattr(script.common, "pictures", spoilt)
    with pytest.raises(SystemExit) as error:
        script.main(tiny("recorder", tmp_path))
    name = "FLUX.1-dev-tiny-seed{}.png"
    files = [tmp_path / name.format(number - 1) for number in sorted(wrong)]
    said = f"other pixels with graphs than without: {', '.join(map(str, files))}"
    assert error.value.code == said, "which Python prints, with exit code 1"
    assert len(drawn) == 4 and SAME not in (told := capsys.readouterr().out), told
    for path in files:
        right = frames(path.with_stem(f"{path.stem}-without-graphs"))
        assert np.count_nonzero(frames(path) != right) == 1


def test_the_second_drawing_is_without_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = recipe("flux")
    draw, slots = script.common.draw, []

    def watched(pipe: Any, *rest: Any) -> Any:
        slots.append("forward" in vars(pipe.transformer))
        return draw(pipe, *rest)

    monkeypatch.setattr(script.common, "draw", watched)
    assert script.main(tiny("recorder", tmp_path)) == 0
    assert slots == [True, False]


def test_a_folder_as_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    script = recipe("dit")
    pipe, _ = script.tiny()
    pipe.save_pretrained(tmp_path / "saved")
    monkeypatch.setitem(script.CALL, "num_inference_steps", 3)
    given = ["7", "--model", str(tmp_path / "saved"), "--device", "recorder", "--pictures", "1"]
    assert script.main([*given, "--output", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert str(tmp_path / "saved-seed0.png") in told and "replays 1" in told
    assert SAME.replace("2", "1") in told and "(not timed: --pictures 1)" in told


def test_on_the_cpu_nothing_is_recorded_and_it_says_so(tmp_path: Path, capsys: Any) -> None:
    assert recipe("dit").main(tiny("cpu", tmp_path)) == 0
    told = capsys.readouterr().out
    assert "--device cpu records nothing" in told and SAME not in told
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("there_is_one", "given", "device"),
    [
        (True, [], "cuda"),
        (True, ["--tiny"], "cuda"),
        (True, ["--tiny", "--device", "cpu"], "cpu"),
        (False, [], "cpu"),
        (False, ["--tiny"], "recorder"),
        (False, ["--device", "recorder"], "recorder"),
    ],
)
def test_the_device(
    there_is_one: bool, given: list[str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: there_is_one)
    common = recipe("flux").common
    assert common.arguments("", "some/model", "a fox", given).device == device


@pytest.mark.parametrize("given", [["--device", "cuda"], ["--pictures", "0"]])
def test_what_cannot_work(given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as error:
        recipe("flux").main(["--tiny", *given])
    assert error.value.code == 2 and " ".join(given) in capsys.readouterr().err


def test_a_label_is_a_word_or_a_number() -> None:
    dit = recipe("dit")
    pipe, call = dit.tiny()
    assert call["class_labels"] == [277]
    assert dit.ask(pipe, "Vulpes macrotis") == {"class_labels": [278]}
    assert dit.ask(pipe, "7") == {"class_labels": [7]}
    for label in ("a fox", "1000", "-1"):
        with pytest.raises(SystemExit, match=f"'{label}'.* 0 to 999 or one of 4 words"):
            dit.ask(pipe, label)
    pipe.labels = {}
    with pytest.raises(SystemExit, match=r"a number from 0 to 999$"):
        dit.ask(pipe, "red fox")
