"""`python -m dit_graph.explain` on the recorder."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image

import dit_graph
from dit_graph import embedded
from dit_graph.cli.explain import main
from dit_graph.explain import Explanation, HostSync, host_syncs
from tests.recorder.test_generate import tiny_sd3
from tests.unit.test_embedded import tiny_pipeline


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory, where a tiny model is the embedded one."""
    tiny_pipeline().save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(embedded, "WEIGHTS", tmp_path / "model")


@pytest.mark.usefixtures("folder")
def test_the_command_tells_it_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["embedded", "--device", "recorder", "--breaks", "*.attn"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("transformer (FluxTransformer2DModel) on cpu, breakable, graph")
    assert lines[2].startswith("    cold 1, captures 1 in ") and "replays 2," in lines[2]
    assert "segments 3," in lines[4] and "breaks 2," in lines[4]
    assert sum("single_transformer_blocks.1.attn ('*.attn') at" in line for line in lines) == 1


@pytest.mark.usefixtures("folder")
def test_the_command_tells_it_as_json_and_as_a_picture(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["model", "--device", "recorder", "--report", "json", "--time", "--plot", "tape.png"]
    argv += ["--size", "64x64", "--size", "96x64", "--steps", "3", "--prompt", "wolf"]
    argv += ["--breaks", "scaled_dot_product_attention", "--pipeline-kwargs", '{"style": "flat"}']
    assert main(argv) == 0
    out, err = capsys.readouterr()
    (module,) = json.loads(out.splitlines()[-1])["modules"]
    assert [signature["replays"] for signature in module["signatures"]] == [1, 1]
    for signature in module["signatures"]:
        (variant,) = signature["variants"]
        assert all(step["ms"] > 0 for step in variant["steps"]) and len(variant["steps"]) == 5
    assert "tape.png" in err and "tape.png" not in out
    with Image.open("tape.png") as image:
        assert image.format == "PNG"


@pytest.mark.usefixtures("folder")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to record on")
def test_the_command_says_where_it_records(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["embedded"]) == 0
    out, err = capsys.readouterr()
    assert "so --device recorder" in err and "replays 2" in out


@pytest.mark.usefixtures("folder")
def test_what_goes_wrong_after_loading_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed = ["embedded", "--device", "recorder"]
    assert main([*fixed, "--pipeline-kwargs", '{"style": "oil"}']) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("explain: error: running the pipeline: ValueError: style 'oil' has no")

    def full(self: Explanation, path: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Explanation, "plot", full)
    assert main([*fixed, "--plot", "tape.png"]) == 2
    out, err = capsys.readouterr()
    assert "segment" in out, "the text is there all the same"
    assert err.splitlines()[-1] == "explain: error: cannot write tape.png: No space left on device"


@pytest.mark.usefixtures("folder")
def test_on_the_cpu_the_reason_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["embedded", "--device", "cpu"]) == 0
    assert "eager 4: the module is on cpu" in capsys.readouterr().out


@pytest.mark.usefixtures("folder")
def test_any_diffusers_pipeline_is_explained(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_sd3().save_pretrained("sd3")
    monkeypatch.delattr(AutoencoderKL, "decode")  # nothing is drawn
    argv = ["sd3", "--device", "recorder", "--size", "16x16", "--report", "json"]
    assert main([*argv, "--pipeline-kwargs", '{"guidance_scale": 1.0}']) == 0
    alone = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert main(argv) == 0
    guided = json.loads(capsys.readouterr().out.splitlines()[-1])
    labels = [facts["modules"][0]["signatures"][0]["label"] for facts in (alone, guided)]
    assert labels[0] != labels[1], "an argument that has an option in generate is free here"
    assert all("2x" not in label for label in labels[:1]) and "2x" in labels[1]


def test_it_runs_as_a_module(tmp_path: Path) -> None:
    root = Path(dit_graph.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-m", "dit_graph.explain", "./none"],
        capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(root)},
    )  # fmt: skip
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("explain: error: MODEL ./none: no such folder")


def test_syncs_need_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("torch sees a CUDA device")
    assert main(["embedded", "--syncs", "--device", "recorder"]) == 2
    assert "--syncs needs a CUDA device" in capsys.readouterr().err
    with pytest.raises(dit_graph.ConfigError, match="on a CUDA device"), host_syncs():
        pass


def test_syncs_that_were_found_are_in_text_and_dict() -> None:
    found = Explanation((), syncs=(HostSync("a.py:3 in f", 6),), syncs_removed={"x": 2})
    assert str(found).splitlines() == [
        "remove_syncs: x (2x)", "host syncs of a picture: 6", "  6x at a.py:3 in f",
    ]  # fmt: skip
    assert found.to_dict()["syncs"] == [{"where": "a.py:3 in f", "count": 6}]
    assert "host syncs of a picture: none" in str(Explanation((), syncs=()))
