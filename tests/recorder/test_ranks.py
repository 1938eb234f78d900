"""Two CPU processes under accelerate and torchrun: they draw what one draws, and stay in step."""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from PIL import Image

from dit_graph.cli import generate
from tests.launchers import ACCELERATE, TORCHRUN, contents, launch
from tests.ranks import FAILS_AT

PROMPTS = ["a fox", "a cat", "a dog", "birthday cake", FAILS_AT]
OPTIONS = ["--steps", "3", "--guidance-scale", "2", "--device", "recorder", "--seed", "7"]
OPTIONS += ["--size", "64x64", "--size", "96x64", "--report", "json"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prompt file, and `alone` with what one process draws from it."""
    folder = tmp_path_factory.mktemp("ranks")
    Path(folder, "prompts.txt").write_text("\n".join(PROMPTS))
    for name in ("alone", "together"):
        Path(folder, name).mkdir()
        Image.new("RGB", (8, 8)).save(folder / name / "0002-of-before.png")
    argv = [*OPTIONS, "--prompt-file", str(folder / "prompts.txt")]
    with redirect_stdout(io.StringIO()) as out:
        assert generate.main([*argv, "--output", str(folder / "alone")]) == 0
    Path(folder, "alone.json").write_text(out.getvalue())
    return folder


def test_two_processes_draw_what_one_draws(folder: Path) -> None:
    argv = ["dit_graph.generate", *OPTIONS, "--prompt-file", "prompts.txt", "--output", "together"]
    done = launch(ACCELERATE, folder, *argv)
    assert done.returncode == 0, done.stderr
    alone, together = contents(folder / "alone"), contents(folder / "together")
    assert len(alone) == 10 + 1 + 1 and sorted(alone) == sorted(together)
    assert "0003-a-fox-96x64-seed8.png" in alone and "contact-sheet.png" in alone
    for name in alone:
        assert alone[name] == together[name], name
    assert done.stdout.count("\n") == 1, "the main process alone reports"
    merged, one = json.loads(done.stdout), json.loads(Path(folder, "alone.json").read_text())
    assert merged.keys() == one.keys() and merged["calls"] == one["calls"] == 30
    assert merged["eager"] == {} and merged["captures"] == 4 == 2 * one["captures"]
    assert merged["cold"] + merged["captures"] + merged["replays"] == 30
    for name in contents(folder / "together"):
        assert done.stderr.count(name) == (name != "0002-of-before.png"), "drawn once"


def test_a_failed_process_is_named_and_the_others_go_on(folder: Path) -> None:
    argv = ["tests.ranks", "failing", *OPTIONS[:-2], "--prompt-file", "prompts.txt"]
    done = launch(TORCHRUN, folder, *argv, "--output", "kept")
    assert done.returncode != 0
    line = "generate: error: process 2 of 2: RuntimeError: no rabbit today\n"
    assert done.stderr.count(line) == 1
    assert "(exitcode: 2)" in done.stderr
    report = done.stdout[done.stdout.index("process 1 of 2: 5 pictures") :].splitlines()
    assert "process 2 of 2: 3 pictures" in report
    assert "  failed: RuntimeError: no rabbit today" in report
    assert report[-3].startswith("all processes: calls 24, cold 4, captures 4, replays 16")
    assert report[-2:] == [
        "  not drawn: 'a rabbit' 64x64 seed 15",
        "  not drawn: 'a rabbit' 96x64 seed 16",
    ]
    alone, kept = contents(folder / "alone"), contents(folder / "kept")
    by_seed = {name.rsplit("-", 1)[1]: picture for name, picture in alone.items()}
    assert sorted(kept)[0] == "0001-a-fox-64x64-seed7.png" and len(kept) == 8
    for name, picture in kept.items():
        assert picture == by_seed[name.rsplit("-", 1)[1]], name


def test_what_is_wrong_for_all_is_said_once(folder: Path) -> None:
    done = launch(TORCHRUN, folder, "dit_graph.generate", *OPTIONS, "zebra", "--output", "none")
    assert done.returncode != 0 and done.stdout == ""
    assert done.stderr.count("generate: error: no known concept in 'zebra'; nearest") == 1
    assert done.stderr.count("generate: error") == 1 and not Path(folder, "none").exists()


def test_calls_with_collectives_are_eager_in_every_process(folder: Path) -> None:
    done = launch(TORCHRUN, folder, "tests.ranks", "talking", folder)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads(Path(folder, f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second, "all decide the same"
    for way, op in [
        ("plain", "c10d.allreduce_"),
        ("functional", "_c10d_functional.all_reduce"),
        ("in a break", "c10d.allreduce_"),
    ]:
        said = first[way]
        assert said["calls"] == 5 and said["cold"] == 1 and not said["replays"], way
        ((reason, count),) = said["eager"].items()
        assert count == 4 and reason.startswith(f"a collective, {op}, is not recorded, at tests/")
        assert said["collectives"] == 2 * 5, "each ran once a call, in the failed capture too"
    reason = "sharded as DTensors over 2 processes: its collectives are not recorded"
    assert first["sharded"]["eager"] == {reason: 3}
    reason = "context parallel over 2 processes: its collectives are not recorded"
    assert first["context parallel"]["eager"] == {reason: 3}
    assert first["context parallel"]["replays"] == 1
