"""`python -m dit_graph.generate --device recorder`: the pictures of graphs are the eager ones."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline
from PIL import Image
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from dit_graph import embedded
from dit_graph.cli import generate
from tests.families import FAMILIES
from tests.unit.test_embedded import tiny_pipeline
from tests.unit.test_generate import pixels


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory, where a tiny model is the embedded one."""
    tiny_pipeline().save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(embedded, "WEIGHTS", tmp_path / "model")


def run(capsys: pytest.CaptureFixture[str], *argv: Any) -> dict[str, Any]:
    """Draw in three steps on the recorder with guidance; the counters of the report."""
    fixed = ["--steps", 3, "--guidance-scale", 2, "--device", "recorder", "--report", "json"]
    assert generate.main([str(word) for word in (*fixed, *argv)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    stats: dict[str, Any] = json.loads(line)
    return stats


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_graphs_draw_the_eager_pixels(
    capsys: pytest.CaptureFixture[str],
    batch: int,
) -> None:
    sizes = ["64x64", "96x64", "64x96"]
    options = ["fox", "--num-images-per-prompt", batch]
    options += [word for size in sizes for word in ("--size", size)]
    stats = run(capsys, *options, "--output", "graphs")
    assert stats["calls"] == 9 and stats["replays"] > 0
    assert stats["eager"] == {}
    assert run(capsys, *options, "--output", "eager", "--no-graph")["calls"] == 0
    names = sorted(path.name for path in Path("graphs").iterdir())
    assert len(names) == 3 * batch + 1 == len(list(Path("eager").iterdir()))
    for name in names:
        assert np.array_equal(pixels(Path("graphs", name)), pixels(Path("eager", name))), name


def test_the_embedded_model_draws(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(embedded, "WEIGHTS", Path(embedded.__file__).parent / "weights")
    assert run(capsys, "a fox", "--output", "graphs.png")["replays"] > 0
    run(capsys, "a fox", "--output", "eager.png", "--no-graph")
    picture = pixels(Path("graphs.png"))
    assert np.array_equal(picture, pixels(Path("eager.png")))
    assert picture[0].min() > 230 and picture.std() > 30, "something on white"


@pytest.mark.parametrize("backend", ["breakable", "full", "debug", "eager"])
def test_every_backend_draws_the_same(
    capsys: pytest.CaptureFixture[str],
    backend: str,
) -> None:
    run(capsys, "fox", "--backend", backend, "--output", "one.png")
    run(capsys, "fox", "--no-graph", "--output", "eager.png")
    assert np.array_equal(pixels(Path("one.png")), pixels(Path("eager.png")))


def test_warmed_up_sizes_are_replayed_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["fox", "--size", "64x96", "--num-images-per-prompt", 2, "--negative-prompt", "wolf"]
    stats = run(capsys, *options, "--warmup-sizes", "64x64,64x96")
    assert stats["calls"] == 2 * 2 + 3 and stats["captures"] >= 2 and stats["replays"] > 0
    run(capsys, *options, "--no-graph", "--output", "eager")
    for path in Path("eager").iterdir():
        assert np.array_equal(pixels(path), pixels(Path("out", path.name)))


def test_the_text_report_is_the_handles(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert generate.main(["fox", "--steps", "3", "--device", "recorder"]) == 0
    out = capsys.readouterr().out
    assert "transformer (FluxTransformer2DModel) on cpu, breakable" in out
    assert "signature" in out and "eager" not in out


def test_the_saved_settings_name_the_backend(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for options, expected in [([], "breakable"), (["--no-graph"], "eager")]:
        path = f"{expected}.png"
        run(capsys, "fox", *options, "--output", path)
        with Image.open(path) as image:
            assert image.text["backend"] == expected  # type: ignore[attr-defined]


def test_without_weights_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "WEIGHTS", Path("none"))
    assert generate.main(["fox", "--device", "recorder"]) == 2
    assert not Path("out").exists()


LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPECIAL = ["<|startoftext|>", "<|endoftext|>"]
VOCABULARY = {
    token: number
    for number, token in enumerate([*SPECIAL, *LETTERS, *(f"{c}</w>" for c in LETTERS)])
}
PIECES = [(piece, -1.0) for piece in ["<pad>", "</s>", "<unk>", "▁", *LETTERS]]


def tiny_sd3() -> StableDiffusion3Pipeline:
    """A diffusers pipeline that reads prompts itself, with random weights."""
    text = CLIPTextConfig(
        hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1,
        projection_dim=32, vocab_size=len(VOCABULARY), bos_token_id=0, eos_token_id=1,
        pad_token_id=1,
    )  # fmt: skip
    t5 = T5Config(d_model=32, d_ff=8, d_kv=8, num_heads=2, num_layers=1, vocab_size=len(PIECES))
    torch.manual_seed(0)
    encoders = [CLIPTextModelWithProjection(text).eval() for _ in range(2)]
    tokenizers = [CLIPTokenizer(vocab=VOCABULARY, merges=[], model_max_length=77) for _ in range(2)]
    return StableDiffusion3Pipeline(
        transformer=FAMILIES["sd3"].build(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=AutoencoderKL(
            block_out_channels=(8,), latent_channels=4, norm_num_groups=4, shift_factor=0.0
        ),
        text_encoder=encoders[0],
        tokenizer=tokenizers[0],
        text_encoder_2=encoders[1],
        tokenizer_2=tokenizers[1],
        text_encoder_3=T5EncoderModel(t5).eval(),
        tokenizer_3=T5Tokenizer(vocab=PIECES, extra_ids=0, model_max_length=32),
    )


def test_any_diffusers_pipeline_draws(capsys: pytest.CaptureFixture[str]) -> None:
    tiny_sd3().save_pretrained("sd3")
    options = ["--model", "sd3", "--size", "16x16", "--size", "24x16"]
    options += ["--negative-prompt", "dull", "--num-images-per-prompt", 2]
    options += ["--pipeline-kwargs", '{"max_sequence_length": 16}', "a fox", "a wolf"]
    assert run(capsys, *options, "--output", "graphs")["replays"] > 0
    run(capsys, *options, "--output", "eager", "--no-graph")
    names = sorted(path.name for path in Path("eager").iterdir())
    assert names[3] == "0004-a-fox-24x16-seed3.png" and len(names) == 9
    images = {name: pixels(Path("graphs", name)) for name in names}
    for name, image in images.items():
        assert np.array_equal(image, pixels(Path("eager", name))), name
    assert len({image.tobytes() for image in images.values()}) == 9
