"""Two processes on two GPUs draw what one draws on one."""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

from dit_graph.cli import generate
from tests.launchers import ACCELERATE, ROOT, TORCHRUN, contents, launch

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

PROMPTS = ["a fox", "a cat", "a dog", "birthday cake", "a rabbit"]
OPTIONS = ["--steps", "6", "--seed", "7", "--size", "64x64", "--size", "96x64", "--report", "json"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prompt file, and `alone` with what one process draws from it on the first GPU."""
    folder = tmp_path_factory.mktemp("ranks")
    Path(folder, "prompts.txt").write_text("\n".join(PROMPTS))
    argv = [*OPTIONS, "--prompt-file", str(folder / "prompts.txt")]
    with redirect_stdout(io.StringIO()):
        assert generate.main([*argv, "--output", str(folder / "alone")]) == 0
    return folder


@pytest.mark.parametrize("launcher", [ACCELERATE, TORCHRUN], ids=["accelerate", "torchrun"])
def test_two_gpus_draw_what_one_draws(folder: Path, tmp_path: Path, launcher: list[str]) -> None:
    argv = ["dit_graph.generate", *OPTIONS, "--prompt-file", folder / "prompts.txt"]
    done = launch(launcher, tmp_path, *argv, "--output", "together", gpus="0,1")
    assert done.returncode == 0, done.stderr
    alone, together = contents(folder / "alone"), contents(tmp_path / "together")
    assert len(alone) == 10 + 1 and sorted(alone) == sorted(together)
    for name in alone:
        assert alone[name] == together[name], name
    assert done.stdout.count("\n") == 1, "the main process alone reports"
    report = json.loads(done.stdout)
    assert report["calls"] == 60 and report["captures"] == 4, "each GPU records both sizes"
    assert report["replays"] > 20


def test_the_bench_splits_its_images_over_two_gpus() -> None:
    argv = ["--images", "4", "--steps", "8", "--set-up", "here", "--compare", "breakable"]
    done = launch(TORCHRUN, ROOT, "dit_graph.bench", *argv, gpus="0,1")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [row["processes"] for row in rows] == [2, 2]
    assert all(row["equal"] and row["kernels_per_step"] > 50 for row in rows)
    assert len(rows[1]["stats"]) == 2 and all(s["replays"] > 0 for s in rows[1]["stats"])
