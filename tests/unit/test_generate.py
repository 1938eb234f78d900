"""`python -m dit_graph.generate`, all that needs no recording: options, errors, files."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

import dit_graph
from dit_graph import embedded
from dit_graph.cli import files, generate
from dit_graph.embedded import EmojiPipeline
from tests.unit.test_embedded import tiny_pipeline


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny EmojiPipeline."""
    folder = tmp_path_factory.mktemp("model")
    tiny_pipeline().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, where the tiny model is the embedded one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(embedded, "WEIGHTS", model)
    return tmp_path


def run(*argv: Any) -> int:
    return generate.main(["--steps", "2", "--device", "cpu", *map(str, argv)])


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


def drawn(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_prompt_is_enough(
    folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert generate.main(["fox", "--steps", "2", "--device", "cpu"]) == 0
    assert drawn(folder / "out") == ["0001-fox-64x64-seed0.png"], "and nothing half-written"
    out, err = capsys.readouterr()
    assert "out/0001-fox-64x64-seed0.png seed 0" in out.splitlines()
    assert len(caplog.messages) == 1 and "runs eagerly: the module is on cpu" in caplog.text
    assert "1/1" in err, "the progress bar counts pictures"


def test_it_runs_as_a_module(folder: Path, model: Path) -> None:
    root = Path(dit_graph.__file__).parent.parent
    command = [sys.executable, "-m", "dit_graph.generate", "--device", "cpu", "--steps", "1"]
    done = subprocess.run(
        [*command, "--model", str(model), "fox", "zebra"],
        capture_output=True, text=True, cwd=folder, env=os.environ | {"PYTHONPATH": str(root)},
    )  # fmt: skip
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("generate: error: no known concept in 'zebra'; nearest: ")
    assert done.stderr.count("\n") == 1


def test_the_picture_is_the_pipelines(folder: Path) -> None:
    assert run("fox", "--seed", 5, "--guidance-scale", 2) == 0
    expected = tiny_pipeline()(
        "fox", num_inference_steps=2, guidance_scale=2.0, generator=torch.Generator().manual_seed(5)
    ).images[0]
    assert np.array_equal(pixels(folder / "out/0001-fox-64x64-seed5.png"), np.asarray(expected))


def test_prompts_come_from_everywhere(folder: Path) -> None:
    Path("prompts.txt").write_text("\ufeffa wolf\n\n  octopus \r\n", encoding="utf-8")
    assert run("fox", "--prompt", "cherries", "ice", "--prompt-file", "prompts.txt") == 0
    assert drawn(folder / "out") == [
        "0001-fox-64x64-seed0.png",
        "0002-cherries-64x64-seed1.png",
        "0003-ice-64x64-seed2.png",
        "0004-a-wolf-64x64-seed3.png",
        "0005-octopus-64x64-seed4.png",
        "contact-sheet.png",
    ]


def test_a_contact_sheet_says_how_each_picture_was_made(folder: Path) -> None:
    assert run("fox", "wolf", "--seed", 3, "--steps", 2) == 0
    with Image.open(folder / "out/contact-sheet.png") as sheet:
        told = json.loads(sheet.text["pictures"])  # type: ignore[attr-defined]
    assert [one["file"] for one in told] == drawn(folder / "out")[:2]
    for one, seed in zip(told, ("3", "4")):
        with Image.open(folder / "out" / one.pop("file")) as picture:
            assert one == picture.text and one["seed"] == seed  # type: ignore[attr-defined]


def test_prompts_may_stand_around_options(folder: Path) -> None:
    assert run("fox", "--seed", 3, "wolf") == 0
    assert [name[:9] for name in drawn(folder / "out")] == ["0001-fox-", "0002-wolf", "contact-s"]


def test_sizes(folder: Path) -> None:
    assert run("fox", "--size", "96x64", "--size", "32X48") == 0
    assert run("fox", "--width", 48, "--output", "wide.png") == 0
    assert pixels(folder / "out/0001-fox-96x64-seed0.png").shape == (64, 96, 3)
    assert pixels(folder / "out/0002-fox-32x48-seed1.png").shape == (48, 32, 3)
    assert pixels(folder / "wide.png").shape == (64, 48, 3)


def test_a_picture_is_reproducible_alone(folder: Path) -> None:
    assert run("fox", "wolf", "--num-images-per-prompt", 2, "--seed", 7) == 0
    assert run("wolf", "--seed", 10, "--output", "alone.png") == 0
    among = pixels(folder / "out/0004-wolf-64x64-seed10.png").astype(int)
    assert np.abs(among - pixels(folder / "alone.png")).max() <= 1


def test_the_settings_are_in_the_picture(folder: Path, model: Path) -> None:
    options = ["--negative-prompt", "wolf", "--seed", 4, "--dtype", "bf16"]
    assert run("ein Fuchs 🦊 fox", *options, "--model", model, "--output", "one.png") == 0
    with Image.open("one.png") as image:
        settings = image.text  # type: ignore[attr-defined]
    assert settings == {
        "prompt": "ein Fuchs 🦊 fox",
        "negative_prompt": "wolf",
        "size": "64x64",
        "steps": "2",
        "guidance_scale": "1.5",
        "seed": "4",
        "model": str(model),
        "dtype": "bfloat16",
        "dit_graph": dit_graph.__version__,
        "backend": "eager",
    }


def test_pipeline_kwargs_reach_the_pipeline(folder: Path) -> None:
    assert run("fox", "--pipeline-kwargs", '{"style": "round"}') == 0
    seeded = torch.Generator().manual_seed(0)
    expected = tiny_pipeline()("fox", num_inference_steps=2, style="round", generator=seeded)
    path = folder / "out/0001-fox-64x64-seed0.png"
    assert np.array_equal(pixels(path), np.asarray(expected.images[0]))
    with Image.open(path) as image:
        assert json.loads(image.text["pipeline_kwargs"]) == {"style": "round"}  # type: ignore[attr-defined]


class Video(EmojiPipeline):
    """Like a video pipeline: it draws 81 frames as arrays unless it is told otherwise."""

    def __call__(  # type: ignore[override]
        self,
        prompt: str,
        num_inference_steps: int = 50,
        generator: Any = None,
        num_frames: int = 81,
        output_type: str = "np",
    ) -> Any:
        assert (num_frames, output_type) == (1, "pil")
        steps = num_inference_steps
        drawn = super().__call__(prompt, num_inference_steps=steps, generator=generator)
        return SimpleNamespace(frames=[[picture] for picture in drawn.images])


def test_a_video_pipeline_draws_one_frame(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "load", lambda dtype: Video(**tiny_pipeline().components))
    assert run("fox") == 0
    assert pixels(folder / "out/0001-fox-64x64-seed0.png").shape == (64, 64, 3)


def test_nothing_is_overwritten(folder: Path) -> None:
    assert run("fox", "wolf") == run("fox", "wolf") == 0
    first = pixels(folder / "out/0001-fox-64x64-seed0.png")
    assert drawn(folder / "out") == [
        "0001-fox-64x64-seed0.png",
        "0002-wolf-64x64-seed1.png",
        "0003-fox-64x64-seed0.png",
        "0004-wolf-64x64-seed1.png",
        "contact-sheet-2.png",
        "contact-sheet.png",
    ]
    assert np.array_equal(first, pixels(folder / "out/0003-fox-64x64-seed0.png"))


def test_the_contact_sheet_has_all_pictures() -> None:
    colours = ["red", "green", "blue"]
    sheet = files.contact_sheet([Image.new("RGB", (10, 20), c) for c in colours])
    assert sheet.size == (28, 48)
    seen = [sheet.getpixel(place) for place in [(7, 12), (21, 12), (7, 36), (21, 36)]]
    assert seen == [(255, 0, 0), (0, 128, 0), (0, 0, 255), (255, 255, 255)]


def test_a_failed_write_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(self: Image.Image, file: Any, **options: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", broken)
    assert run("fox") == 2
    assert drawn(folder / "out") == []
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.endswith("cannot write out/0001-fox-64x64-seed0.png: No space left on device")


def test_json_is_alone_on_stdout(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fox", "--report", "json") == 0
    out, err = capsys.readouterr()
    stats = json.loads(out)
    assert stats["calls"] == 2 and stats["replays"] == 0 and sum(stats["eager"].values()) == 2
    assert "out/0001-fox-64x64-seed0.png seed 0" in err
    assert run("fox", "--report", "json", "--no-graph") == 0
    assert json.loads(capsys.readouterr().out)["calls"] == 0


def refused(capsys: pytest.CaptureFixture[str], *argv: Any) -> str:
    """The one line of a run that fails, writes nothing and loads nothing."""
    before = sorted(Path().rglob("*"))
    assert run(*argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("generate: error: ") and err.count("\n") == 1
    assert sorted(Path().rglob("*")) == before
    return err.removeprefix("generate: error: ").strip()


@pytest.fixture
def unloadable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused here is refused before any model is loaded."""

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("loaded too early")

    monkeypatch.setattr(embedded, "load", never)
    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", never)
    Path("empty.txt").write_text("\n \n")
    Path("latin.txt").write_bytes(b"caf\xe9\n")
    Path("file.txt").write_text("fox\n")
    Path("there.png").write_text("x")


@pytest.mark.usefixtures("unloadable")
@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ([], ["no prompt", "for example"]),
        (["fox", ""], ["prompt 2 is empty ('')"]),
        (["--prompt", " "], ["prompt 1 is empty (' ')"]),
        (["\udcff"], ["prompt 1: is not UTF-8 text"]),
        (["foks"], ["'foks'", "nearest: fox,"]),
        (["fox", "--negative-prompt", "foks"], ["'foks'", "nearest: fox,"]),
        (["fox", "--prompt-file", "none.txt"], ["none.txt", "No such file"]),
        (["fox", "--prompt-file", "."], ["--prompt-file", "Is a directory"]),
        (["--prompt-file", "empty.txt"], ["empty.txt: has no prompt", "one a line"]),
        (["--prompt-file", "latin.txt"], ["latin.txt: is not UTF-8"]),
        (["fox", "--size", "64"], ["--size", "WIDTHxHEIGHT", "'64'"]),
        (["fox", "--size", "0x64"], ["--size", "WIDTHxHEIGHT", "'0x64'"]),
        (["fox", "--size", "64x-64"], ["--size", "'64x-64'"]),
        (["fox", "--size", "66x64"], ["size 66x64", "width must be a multiple of 4", "got 66"]),
        (["fox", "--height", "4000"], ["size ?x4000", "from 32 to 128, got 4000"]),
        (["fox", "--height", "0"], ["--height", "at least 1", "'0'"]),
        (["fox", "--size", "64x64", "--width", "64"], ["--size and --width contradict"]),
        (["fox", "--warmup-sizes", "64x64,9x9"], ["size 9x9", "multiple of 4"]),
        (["fox", "--warmup-sizes", "64x64,"], ["--warmup-sizes", "WIDTHxHEIGHT"]),
        (["fox", "--warmup-sizes", "64x64", "--no-graph"], ["--warmup-sizes", "--no-graph"]),
        (["fox", "--no-graph", "--backend", "full"], ["--backend", "not allowed", "--no-graph"]),
        (["fox", "--backend", "cuda"], ["--backend", "'cuda'", "breakable"]),
        (["fox", "--steps", "0"], ["--steps", "at least 1", "'0'"]),
        (["fox", "--steps", "many"], ["--steps", "'many'"]),
        (["fox", "--seed", "-1"], ["--seed", "at least 0", "'-1'"]),
        (["fox", "--seed", "9" * 20], ["--seed", "below 2**63", "9" * 20]),
        (["fox", "--num-images-per-prompt", "0"], ["--num-images-per-prompt", "'0'"]),
        (["fox", "--guidance-scale", "nan"], ["--guidance-scale", "'nan'"]),
        (["fox", "--dtype", "int8"], ["--dtype", "'int8'", "bf16"]),
        (["fox", "--device", "tpu"], ["--device", "'tpu'", "cuda"]),
        (["fox", "--report", "xml"], ["--report", "'xml'", "json"]),
        (["fox", "--pipeline-kwargs", "{"], ["--pipeline-kwargs", "is not JSON", "'{'"]),
        (["fox", "--pipeline-kwargs", "[1]"], ["--pipeline-kwargs", "JSON object", "'[1]'"]),
        (["fox", "--pipeline-kwargs", '{"a": 1}'], ["a", "EmojiPipeline takes no such"]),
        (["fox", "--pipeline-kwargs", '{"height": 64}'], ["height", "use --size"]),
        (["fox", "--pipeline-kwargs", '{"output_type": "pt"}'], ["output_type", "not free"]),
        (["fox", "--model", "./none"], ["--model ./none", "no such folder", "OWNER/NAME"]),
        (["fox", "--model", "file.txt"], ["--model file.txt", "no such folder"]),
        (["fox", "--model", "."], ["--model .", "no readable model_index.json"]),
        (["fox", "--cache", "tea"], ["--cache", "first-block:0.1", "'tea'"]),
        (["fox", "--cache", "first-block:-1"], ["--cache", "at least 0", "'-1'"]),
        (["fox", "--cache", "first-block:x"], ["--cache", "must be a number", "'x'"]),
        (["fox", "--lora", "none.safetensors"], ["--lora none.safetensors", "no such file"]),
        (["fox", "--lora", "loras/none.safetensors"], ["--lora", "no such file"]),
        (["fox", "--output", "file.txt"], ["--output file.txt", "no folder and no .png"]),
        (["fox", "--output", "file.txt/out"], ["--output file.txt/out", "nothing can be written"]),
        (["fox", "--output", "there.png"], ["--output there.png", "is there already"]),
        (["fox", "wolf", "--output", "a.png"], ["--output a.png", "for 2 pictures"]),
        (["fox", "--fast"], ["--fast"]),
    ],
)
def test_a_mistake_is_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], parts: list[str]
) -> None:
    line = refused(capsys, *argv)
    for part in parts:
        assert part in line


@pytest.mark.usefixtures("unloadable")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to draw on")
def test_no_gpu_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "torch sees no CUDA device" in refused(capsys, "fox", "--device", "cuda")


@pytest.mark.usefixtures("unloadable")
@pytest.mark.parametrize(
    ("cls", "argv", "parts"),
    [
        (
            "DiTPipeline",
            [],
            ["DiTPipeline takes no prompt, which PROMPT needs; explain and bench can run it"],
        ),
        ("FluxPipeline", ["--pipeline-kwargs", '{"style": 1}'], ["style: FluxPipeline takes no"]),
        ("WanPipeline", ["--num-images-per-prompt", "2"], ["WanPipeline takes no num_images_per"]),
        ("WanPipeline", ["--pipeline-kwargs", '{"num_frames": 81}'], ["num_frames", "must be 1"]),
        ("KandinskyPriorPipeline", ["--size", "64x64"], ["takes no height, which --size needs"]),
        ("PixArtAlphaPipeline", ["--lora", "file.txt"], ["takes no LoRA, which --lora needs"]),
    ],
)
def test_what_a_pipeline_does_not_take(
    capsys: pytest.CaptureFixture[str], cls: str, argv: list[str], parts: list[str]
) -> None:
    Path("other").mkdir()
    Path("other/model_index.json").write_text(json.dumps({"_class_name": cls}))
    line = refused(capsys, "fox", "--model", "other", *argv)
    for part in parts:
        assert part in line


def test_what_goes_wrong_while_loading_is_one_line(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(embedded, "WEIGHTS", folder / "none")
    assert "no embedded weights in" in refused(capsys, "fox")
    index = model / "model_index.json"
    Path("broken").mkdir()
    Path("broken/model_index.json").write_text(index.read_text())
    assert "broken/concept_encoder/config.json: cannot be read" in refused(
        capsys, "fox", "--model", "broken"
    )

    def gone(*args: Any, **kwargs: Any) -> None:
        raise OSError("404\nnot found")

    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", gone)
    line = refused(capsys, "fox", "--model", "some/where")
    assert line == "cannot load some/where: 404 not found"


def test_what_goes_wrong_while_drawing_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    style = json.dumps({"style": "oil"})
    assert run("fox", "--pipeline-kwargs", style) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "generate: error: drawing 'fox': ValueError: style 'oil' has no 'fox'; known:" in error

    def interrupted(self: EmojiPipeline, *args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(EmojiPipeline, "__call__", interrupted)
    monkeypatch.setattr("dit_graph.cli.model.arguments", lambda cls, options: {})
    assert run("fox") == 130
    assert not Path("out").exists()


def save_lora(path: Path, seed: int) -> None:
    """A LoRA for the tiny transformer, in the form that diffusers saves."""
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    transformer = tiny_pipeline().transformer
    transformer.add_adapter(
        LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
    )
    torch.manual_seed(seed)
    state = {
        f"transformer.{name}": torch.randn_like(value)
        for name, value in get_peft_model_state_dict(transformer).items()
    }
    diffusers.FluxPipeline.write_lora_layers(
        state, str(path.parent), True, path.name, None, safe_serialization=True
    )


def test_loras_change_the_picture_and_add_up(folder: Path) -> None:
    save_lora(folder / "a.safetensors", 1)
    save_lora(folder / "b.safetensors", 2)
    for name, loras in {"none": [], "a": ["a"], "b": ["b"], "ab": ["a", "b"]}.items():
        options = [word for lora in loras for word in ("--lora", f"{lora}.safetensors")]
        assert run("fox", *options, "--output", f"{name}.png") == 0
    images = [pixels(folder / f"{name}.png") for name in ("none", "a", "b", "ab")]
    assert len({image.tobytes() for image in images}) == 4
    with Image.open("ab.png") as image:
        assert json.loads(image.text["lora"]) == ["a.safetensors", "b.safetensors"]  # type: ignore[attr-defined]


def test_a_step_cache_draws_the_same_with_graphs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = ("--cache", "first-block:0.5", "--steps", "6")
    assert run("fox", "--steps", "6", "--no-graph", "--output", "plain.png") == 0
    assert run("fox", *cache, "--no-graph", "--output", "cached.png") == 0
    capsys.readouterr()
    given = ("--device", "recorder", "--report", "json", "--output", "ours.png")
    assert run("fox", *cache, *given) == 0
    stats = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert stats["regions"]["replays"] and stats["replays"] >= 3
    plain, cached, ours = (pixels(folder / f"{name}.png") for name in ("plain", "cached", "ours"))
    assert np.array_equal(ours, cached) and not np.array_equal(cached, plain)
    with Image.open("ours.png") as image:
        assert "threshold=0.5" in image.text["cache"]  # type: ignore[attr-defined]


def test_a_file_that_is_no_lora_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bad.safetensors").write_text("no")
    assert run("fox", "--lora", "bad.safetensors") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("generate: error: --lora bad.safetensors: cannot be loaded: ")


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        generate.main(["--help"])
    assert stopped.value.code == 0
    assert "python -m dit_graph.generate fox" in capsys.readouterr().out
