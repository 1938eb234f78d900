"""`python -m dit_graph.bench` with the embedded model on the recorder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from dit_graph.bench import run, tasks
from dit_graph.bench.contenders import (
    Contender,
)
from dit_graph.bench.options import main
from dit_graph.cli.errors import UsageError
from tests.launchers import ROOT, TORCHRUN, launch
from tests.pair import Machine
from tests.shared.syncs.pictures import dit

QUICK = ["--images", "2", "--steps", "2", "--device", "recorder"]
HERE = [*QUICK, "--set-up", "here"]


def record(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_run_measures_and_says_what_it_could_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = "breakable,full,reduce-overhead"
    more = ["--compare", asked, "--batch", "1,2", "--output", str(tmp_path / "run")]
    assert main([*HERE, *more, "--prompt", "a fox", "a rocket"]) == 0
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    rows = result["rows"]
    assert [row["mode"] for row in rows] == ["eager", "breakable", "full"] * 2
    assert [row["scenario"].split()[2] for row in rows] == ["B1"] * 3 + ["B2"] * 3
    assert all(row["equal"] and row["difference"] == 0 for row in rows)
    assert all(row["stats"]["replays"] >= 4 for row in rows if row["mode"] != "eager")
    assert all(row["time_s"] > 0 and row["gpu_busy"] is None for row in rows)
    assert all(row["graph_MiB"] is None for row in rows), "the recorder's bytes are no device's"
    assert any("no CUDA device" in note for note in result["notes"])
    assert "not measured: reduce-overhead needs a CUDA device" in result["notes"]
    assert result["machine"]["torch"] == torch.__version__ and result["machine"]["cpu"]
    text = (tmp_path / "run.md").read_text()
    assert text.rstrip() in printed and "| breakable |" in text and "GPU busy" not in text
    assert json.loads((tmp_path / "run.json").read_text()) == result
    with Image.open(tmp_path / "run.png") as drawn:
        assert drawn.size[0] > 300


def test_a_step_and_a_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*HERE, "--what", "step", "--sizes", "48x64", "--compare", "eager,full"]) == 0
    result = record(capsys)
    assert [row["scenario"] for row in result["rows"]] == ["embedded 48x64 B1 one step"] * 2
    assert all(row["equal"] for row in result["rows"])


def test_latents_and_removed_syncs(capsys: pytest.CaptureFixture[str]) -> None:
    """With the defaults and with the loop's waits taken out, in one run."""
    asked = ["breakable", "breakable+remove-syncs"]
    assert main([*HERE, "--compare", ",".join(asked), "--latent"]) == 0
    result = record(capsys)
    assert "not run: VAE" in result["notes"]
    assert [row["mode"] for row in result["rows"]] == ["eager", *asked]
    assert all(row["equal"] for row in result["rows"])
    assert all(row["stats"]["replays"] for row in result["rows"][1:])


def test_set_up_in_a_fresh_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--compare", "breakable"]) == 0
    eager, graphs = record(capsys)["rows"]
    assert eager["set_up"] == graphs["set_up"] == "fresh process"
    assert graphs["set_up_s"] >= 0 and graphs["first_s"] > 0
    assert graphs["break_even_images"] is None, "the recorder's times say nothing"


def test_a_contender_that_fails_is_told_and_the_others_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Contender) -> None:
        if self.name == "full":
            raise RuntimeError("no luck")

    monkeypatch.setattr(Contender, "before_call", fails)
    assert main(HERE) == 0
    result = record(capsys)
    assert [row["mode"] for row in result["rows"]] == ["eager", "breakable"]
    assert any("full: failed: RuntimeError: no luck" in note for note in result["notes"])


def test_two_processes_share_the_images() -> None:
    done = launch(TORCHRUN, ROOT, "dit_graph.bench", *HERE, "--compare", "breakable")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert [row["processes"] for row in result["rows"]] == [2, 2]
    for row in result["rows"]:
        assert row["equal"] and row["images_per_s"] > 1.5 / row["time_s"]
    assert done.stdout.count("| breakable |") == 1, "one report"
    assert "| processes |" in done.stdout


def test_a_process_that_fails_ends_all_by_name() -> None:
    done = launch(TORCHRUN, ROOT, "tests.ranks", "bench", *HERE, "--compare", "full")
    assert done.returncode != 0
    assert "process 2 of 2: RuntimeError: no profiler today" in done.stderr
    assert "| full |" not in done.stdout and "Traceback" in done.stderr


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--compare", "eager,fast"], "knows no 'fast'; known: eager"),
        (["--compare", ","], "names nothing to measure; known: eager"),
        (["--model", "flux-dev", "--prompt", "a fox"], "take no prompt"),
        (["--model", "flux-dev", "--what", "prefill"], "draws pictures; leave --what prefill out"),
        (["--model", "qwen3-4b"], "is an LLM; add --what prefill"),
        (["--what", "prefill", "--latent"], "about pictures, not prefill"),
        (["--model", "fluxdev"], "or one of dit-xl-2, pixart-sigma"),
        (["--tokens", "16"], "add --what prefill"),
        (["--prompt", "zzzz"], "no known concept in 'zzzz'"),
        (["--sizes", "12y"], "must be WIDTHxHEIGHT"),
        (["--images", "0"], "at least 1"),
        (["--chart", "x.jpg"], "is no .png file"),
        (["--chart", "tests"], "is a folder"),
        (["--model", "dit-xl-2", "--sizes", "512x256"], "draws squares"),
        (["--output", "nowhere/x"], "nothing can be written in nowhere"),
    ],
)
def test_wrong_options_are_one_line(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err.strip()
    assert says in error and error.startswith("bench: error: ") and "\n" not in error


def test_where_no_model_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "no/such/folder/here", *HERE]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_what_is_kept_from_an_earlier_call_is_no_equal_picture(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call of a contender draws something else; so do the pictures of a batch."""
    real, kept = tasks.Task, []

    def remembers(scenario: str, model: Any, call: Any, *rest: Any) -> Any:
        def stale(contender: Contender) -> Any:
            out = call(contender)
            kept.append(out) if contender.name == "full" else None
            return kept[0] if contender.name == "full" else out

        return real(scenario, model, stale, *rest)

    monkeypatch.setattr(tasks, "Task", remembers)
    for what in ("picture", "step"):
        kept.clear()
        assert main([*HERE, "--what", what, "--compare", "full", "--batch", "2"]) == 0
        assert [row["equal"] for row in record(capsys)["rows"]] == [True, False], what
        assert not torch.equal(kept[-1][0], kept[-1][1])


def test_a_saved_pipeline_draws_at_its_own_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that takes no prompt too."""
    dit(Machine("recorder", "cpu")).save_pretrained(tmp_path / "dit")
    assert main([*HERE, "--model", str(tmp_path / "dit")]) == 2
    assert "DiTPipeline needs class_labels; give it with" in capsys.readouterr().err
    labels = ["--pipeline-kwargs", '{"class_labels": [1]}']
    assert main([*HERE, "--model", str(tmp_path / "dit"), *labels, "--compare", "full"]) == 0
    _, graphs = record(capsys)["rows"]
    assert "own size B1" in graphs["scenario"] and graphs["equal"] and graphs["stats"]["replays"]
    assert main([*HERE, "--model", str(tmp_path / "dit"), *labels, "--sizes", "64"]) == 2
    assert "takes no height" in capsys.readouterr().err


def test_graphs_that_replay_nothing_say_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIT_GRAPH_DISABLE", "1")
    assert main([*HERE, "--compare", "full"]) == 0
    (note,) = [note for note in record(capsys)["notes"] if "replayed nothing" in note]
    assert (
        "full replayed nothing (DIT_GRAPH_DISABLE=1 is set): its times are those without graphs"
        in note
    )
    monkeypatch.delenv("DIT_GRAPH_DISABLE")
    assert main([*HERE[:-2], "--set-up", "here", "--compare", "full", "--device", "cpu"]) == 0
    result = record(capsys)
    assert [row["mode"] for row in result["rows"]] == ["eager"]
    assert any("nothing is recorded on a CPU" in note for note in result["notes"])


def test_an_eager_failure_ends_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Contender) -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr(Contender, "before_call", fails)
    assert main([*HERE, "--compare", "full"]) == 2
    assert "eager itself fails: failed: RuntimeError: no luck" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (UsageError, 2)])
def test_what_was_measured_before_an_end_stays(
    error: type[BaseException], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    real, seen = run.measured, []

    def measured(*args: Any) -> Any:
        seen.append(args)
        if len(seen) == 2:
            notes = json.loads((tmp_path / "run.json").read_text())["notes"]
            assert "failed: the run has not ended" in notes
            raise error("in the second scenario")
        return real(*args)

    monkeypatch.setattr(run, "measured", measured)
    more = ["--compare", "full", "--batch", "1,2", "--output", str(tmp_path / "run")]
    assert main([*HERE, *more]) == code
    rows = json.loads((tmp_path / "run.json").read_text())["rows"]
    assert [(row["mode"], row["images"]) for row in rows] == [("eager", 1), ("full", 1)]
    result = record(capsys)
    assert result["rows"] == rows and any("failed: " in note for note in result["notes"])
    text = (tmp_path / "run.md").read_text()
    assert "embedded 64x64 B1" in text and "* failed: " in text


def test_more_arguments_of_the_call(capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--pipeline-kwargs", '{"style": "noto"}']
    assert main([*HERE, "--compare", "eager", *more]) == 0
    assert main([*HERE, "--compare", "eager", "--pipeline-kwargs", '{"nonsense": 3}']) == 2
    assert "takes no such argument" in capsys.readouterr().err
