"""`python -m dit_graph.explain`, all that is refused before a model is loaded."""

import sys
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

import dit_graph
from dit_graph import embedded
from dit_graph.cli.explain import main
from dit_graph.explain import Explanation, Module, Signature, Step, Variant
from tests.unit.test_embedded import tiny_pipeline


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny EmojiPipeline."""
    folder = tmp_path_factory.mktemp("model")
    tiny_pipeline().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def unloadable(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory and models that must not be loaded."""

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("loaded too early")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(embedded, "WEIGHTS", model)
    monkeypatch.setattr(embedded, "load", never)
    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", never)
    Path("folder.png").mkdir()


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    before = sorted(Path().rglob("*"))
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("explain: error: ") and err.count("\n") == 1
    assert sorted(Path().rglob("*")) == before
    return err.removeprefix("explain: error: ").strip()


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ([], ["required: MODEL"]),
        (["./none"], ["MODEL ./none: no such folder", "OWNER/NAME"]),
        (["."], ["MODEL .: has no readable model_index.json"]),
        (["embedded", "--steps", "2"], ["--steps", "at least 3", "'2'"]),
        (["embedded", "--size", "64"], ["--size", "WIDTHxHEIGHT", "'64'"]),
        (["embedded", "--size", "66x64"], ["size 66x64", "multiple of 4"]),
        (["embedded", "--prompt", "foks"], ["'foks'", "nearest: fox,"]),
        (["embedded", "--prompt", "\udcff"], ["--prompt: is not UTF-8 text"]),
        (["embedded", "--dtype", "int8"], ["--dtype", "'int8'"]),
        (["embedded", "--device", "tpu"], ["--device", "'tpu'"]),
        (["embedded", "--backend", "fast"], ["--backend", "'fast'"]),
        (["embedded", "--report", "xml"], ["--report", "'xml'"]),
        (["embedded", "--pipeline-kwargs", "["], ["--pipeline-kwargs", "is not JSON"]),
        (["embedded", "--pipeline-kwargs", '{"a": 1}'], ["a: EmojiPipeline takes no such"]),
        (["embedded", "--pipeline-kwargs", '{"prompt": "fox"}'], ["prompt: use --prompt"]),
        (["embedded", "--pipeline-kwargs", '{"output_type": "pt"}'], ["output_type", "not free"]),
        (["embedded", "--plot", "tape.pdf"], ["--plot tape.pdf", "ends in .png"]),
        (["embedded", "--plot", "folder.png"], ["--plot folder.png", "is a folder"]),
        (["embedded", "--plot", "none/tape.png"], ["--plot none/tape.png", "written in none"]),
        (["embedded", "--plot", "a.png", "--device", "cpu"], ["--plot", "--device cpu makes none"]),
        (["embedded", "--time", "--backend", "eager"], ["--time", "--backend eager makes none"]),
        (["embedded", "--fast"], ["--fast"]),
    ],
)
def test_a_mistake_is_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], parts: list[str]
) -> None:
    line = refused(capsys, *argv)
    for part in parts:
        assert part in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to record on")
def test_no_gpu_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "torch sees no CUDA device" in refused(capsys, "embedded", "--device", "cuda")


def test_a_pipeline_that_takes_no_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    Path("other").mkdir()
    Path("other/model_index.json").write_text('{"_class_name": "DiTPipeline"}')
    line = refused(capsys, "./other", "--prompt", "fox")
    assert "DiTPipeline takes no prompt, which --prompt needs" in line
    line = refused(capsys, "./other", "--device", "recorder")
    assert (
        """DiTPipeline needs class_labels; give it with --pipeline-kwargs '{"class_labels":"""
        in line
    )
    argv = ["./other", "--device", "recorder", "--pipeline-kwargs", '{"class_labels": [1]}']
    assert refused(capsys, *argv).endswith("loaded too early"), "nothing else is wrong with it"


def test_a_video_may_be_longer_than_a_picture(capsys: pytest.CaptureFixture[str]) -> None:
    Path("other").mkdir()
    Path("other/model_index.json").write_text('{"_class_name": "WanPipeline"}')
    argv = ["./other", "--device", "recorder", "--pipeline-kwargs", '{"num_frames": 81}']
    assert refused(capsys, *argv).endswith("loaded too early"), "nothing else is wrong with it"


def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def test_a_plot_needs_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_matplotlib(monkeypatch)
    line = refused(capsys, "embedded", "--plot", "tape.png")
    assert "pip install matplotlib" in line and "dit_graph[plot]" in line
    with pytest.raises(dit_graph.ConfigError, match="pip install matplotlib"):
        made(Step("segment", 3)).plot("tape.png")


def made(*steps: Step, **facts: Any) -> Explanation:
    """An explanation of one recording with these steps."""
    variant = Variant(steps, (), (), (), 0, 0, **facts)
    signature = Signature("2x8", "captured", 1, 1, 0, {}, 0.1, 64, "", (variant,))
    return Explanation((Module("t", "T", "cpu", "breakable", 2**21, (), {}, (signature,)),))


def test_text_and_explanation_need_no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    without_matplotlib(monkeypatch)
    assert "segment  3 operations" in str(made(Step("segment", 3)))


def test_breaks_fold_when_only_their_times_differ() -> None:
    first = Step("break", reason="read", where="a.py:1 in f", module="block", ms=1.0)
    second = Step("break", reason="read", where="a.py:1 in f", module="block", ms=2.5)
    other = Step("break", reason="read", where="a.py:1 in f", module="", ms=1.0)
    lines = str(made(first, second, other, first)).splitlines()[-3:]
    assert lines == [
        "      break x2  read in block at a.py:1 in f  3.500 ms",
        "      break  read in the module itself at a.py:1 in f  1.000 ms",
        "      break  read in block at a.py:1 in f  1.000 ms",
    ]


def test_notes_come_first() -> None:
    text = str(Explanation((), ("not installed: transformer was replaced",)))
    assert text == "! not installed: transformer was replaced"
