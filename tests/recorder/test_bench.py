"""`python -m dit_graph.bench` with the embedded model on the recorder."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from dit_graph.bench import chart, run, set_up, table, tasks
from dit_graph.bench.measure import (
    Apart,
    Clock,
    Times,
    break_even,
    covered,
    difference,
    finite,
    first_and_set_up,
    measured,
    percentile,
)
from dit_graph.bench.options import main, parse
from dit_graph.bench.rows import merged, with_gain
from dit_graph.bench.rows import row as made_row
from dit_graph.bench.shapes import LANGUAGE_MODELS, SHAPES
from dit_graph.bench.variants import (
    GRAPHS,
    VARIANTS,
    Front,
    compile_blocks,
    denoiser,
    eager_first,
    front,
    impossible,
    twin,
)
from dit_graph.cli.errors import UsageError
from dit_graph.cli.model import taken_by
from dit_graph.errors import ConfigError
from tests.families import FAMILIES
from tests.launchers import ROOT, TORCHRUN, launch
from tests.pair import Machine
from tests.shared.syncs.pictures import dit, dit_picture

FROM_HERE = os.environ | {"PYTHONPATH": str(ROOT)}
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


def test_a_variant_loses_the_waits_of_its_own_loop_alone() -> None:
    pipe = dit(Machine("recorder", "cpu"))
    graphs = [name for name in GRAPHS if not name.startswith("regional")]
    fronts = [front(name, pipe, {"device": "recorder"}) for name in ("eager", *graphs)]
    for seed in (0, 1):
        expected, *others = [dit_picture(made.target, seed) for made in fronts]
        assert all([torch.equal(other, expected) for other in others])
    removed = {made.variant: made.handle.explain().syncs_removed for made in fronts[1:]}
    with_waits = [name for name in graphs if removed[name] is None]
    assert with_waits == ["full", "breakable"]
    assert all(sum(removed[f"{name}+remove-syncs"].values()) for name in with_waits)
    slots = [made.variant for made in fronts if "step" in vars(made.target.scheduler)]
    assert slots == [f"{name}+remove-syncs" for name in with_waits]
    for made in fronts:
        made.release()


def test_set_up_in_a_fresh_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--compare", "breakable"]) == 0
    eager, graphs = record(capsys)["rows"]
    assert eager["set_up"] == graphs["set_up"] == "fresh process"
    assert graphs["set_up_s"] >= 0 and graphs["first_s"] > 0
    assert graphs["break_even_images"] is None, "the recorder's times say nothing"


class Told(Clock):
    """Says of each call what it is told to."""

    def __init__(self, *seconds: float) -> None:
        super().__init__(torch.device("cpu"))
        self.seconds = iter(seconds)

    def __call__(self, run: Any) -> tuple[Any, float, None]:
        return run(), next(self.seconds), None


def test_a_machine_that_gets_busier_turns_no_time_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first picture's time is read from the clock; set-up, a difference, is 0 at the least."""
    monkeypatch.setattr(set_up, "front", lambda *args: replace(front(*args), seconds=0.5))
    scenario = "embedded 64x64 B1 2 steps"
    options = replace(parse([*QUICK, "--compare", "full"]), scenario=scenario)
    idle = set_up.alone(options, "full", Told(3.0, 2.0, 1.0, 1.0, 1.0, 1.0))
    assert idle == {"first_s": 3.5, "set_up_s": 3.5, "mem_GB": None}
    busier = set_up.alone(options, "full", Told(3.0, 2.0, 1.0, 1.0, 20.0, 20.0))
    assert busier == {"first_s": 3.5, "set_up_s": 0.0, "mem_GB": None}
    task = tasks.Task(scenario, torch.nn.Linear(2, 2), lambda front: None, 1, 2)
    times = Times(wall=[0.5, 0.5])
    made = made_row(task, Front("full", None), times, None, Apart(True, 0.0), busier)
    assert (made["first_s"], made["set_up_s"], made["set_up"]) == (3.5, 0, "fresh process")


def test_a_variant_that_fails_is_told_and_the_others_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Front) -> None:
        if self.variant == "full":
            raise RuntimeError("no luck")

    monkeypatch.setattr(Front, "before_call", fails)
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


def test_names() -> None:
    assert len(SHAPES) == 8 and not SHAPES.keys() & LANGUAGE_MODELS.keys()
    options = parse(["--model", "dit-xl-2", "--compare", ",".join(VARIANTS)])
    assert options.compare == VARIANTS
    with pytest.raises(UsageError):
        parse(["--what", "nothing"])


@pytest.mark.parametrize(
    ("name", "billions"),
    [("dit-xl-2", 0.75), ("pixart-sigma", 0.611), ("sana-1.6b", 1.605), ("sd3.5-medium", 2.24),
     ("flux-dev", 11.9), ("z-image", 6.15), ("qwen-image", 20.4), ("wan-1.3b", 1.42)],
)  # fmt: skip
def test_named_shapes_are_of_the_real_size(name: str, billions: float) -> None:
    """Without memory, on the meta device; a scheduler's tables stay on the CPU."""
    dpm = {"pixart-sigma", "sana-1.6b"}
    schedulers = {"dit-xl-2": "DDIM", "wan-1.3b": "UniPCMultistep"}
    schedulers |= dict.fromkeys(dpm, "DPMSolverMultistep")
    with torch.device("meta"):
        pipe = SHAPES[name].pipeline((256, 256))
    kind = schedulers.get(name, "FlowMatchEulerDiscrete")
    assert type(pipe.scheduler).__name__ == f"{kind}Scheduler"
    with torch.device("meta"):
        call = SHAPES[name].call(2)
    count = sum(p.numel() for p in denoiser(pipe).parameters()) / 1e9
    assert count == pytest.approx(billions, rel=0.02)
    assert all(p.device.type == "meta" for p in denoiser(pipe).parameters())
    tables = [t for t in vars(pipe.scheduler).values() if isinstance(t, torch.Tensor)]
    assert tables and all(t.device.type == "cpu" for t in tables)
    pipe.scheduler.set_timesteps(4)
    assert call.keys() <= taken_by(type(pipe)).keys()


def test_break_even() -> None:
    """2 s more set-up, 0.5 s less a picture: after four they are even, the fifth is a gain."""
    assert break_even(3.0, 0.5, 1.0, 1.0) == 5
    assert break_even(1.0, 0.5, 1.0, 1.0) == 1
    assert break_even(0.5, 1.0, 1.0, 1.0) == 1
    assert break_even(3.0, 1.0, 1.0, 1.0) is None
    assert break_even(3.0, 2.0, 1.0, 1.0) is None
    for setup, steady in [(3.0, 0.5), (1.5, 0.9), (9.0, 0.1)]:
        n = break_even(setup, steady, 1.0, 1.0)
        assert n is not None
        totals = [(setup + k * steady, 1.0 + k) for k in (n - 1, n)]
        assert totals[0][0] >= totals[0][1] and totals[1][0] < totals[1][1]


def test_numbers() -> None:
    assert covered([(0, 2), (1, 3), (5, 6), (5.2, 5.5)]) == 4
    assert covered([]) == 0
    assert percentile([3.0], 0.95) == 3.0 and percentile([1.0, 2.0, 3.0], 0.5) == 2.0
    assert 2.8 < percentile([1.0, 2.0, 3.0], 0.95) <= 3.0
    assert eager_first(["full", "eager", "full"]) == ["eager", "full"]
    x = torch.tensor([1.0, -4.0])
    assert difference(x, x.clone()) == Apart(True, 0)
    near = difference(x + torch.tensor([0.0, 0.04]), x)
    assert not near.equal and near.most == pytest.approx(0.01)
    assert difference(x, x * torch.nan) == Apart(False, None)
    assert difference(torch.tensor([0.0, 1]), torch.tensor([-0.0, 1])) == Apart(False, 0)
    assert difference(x * torch.nan, x * torch.nan).equal
    assert finite(x) and not finite(x * torch.inf) and not finite(torch.ones(3))


def test_a_twin_shares_weights_and_no_module() -> None:
    module = FAMILIES["flux"].build()
    other = twin(module)
    pairs = zip(module.parameters(), other.parameters(), strict=True)
    assert all(a is b for a, b in pairs)
    assert not set(map(id, module.modules())) & set(map(id, other.modules()))


@pytest.mark.parametrize("name", SHAPES)
def test_repeated_blocks_are_found(name: str) -> None:
    """In diffusers' classes that name them and in those that do not; no block is left out."""
    with torch.device("meta"):
        module = denoiser(SHAPES[name].pipeline((256, 256)))
    compile_blocks(module)
    compiled = [m for m in module.modules() if m._compiled_call_impl is not None]
    inside = sum(p.numel() for m in compiled for p in m.parameters())
    assert inside > 0.9 * sum(p.numel() for p in module.parameters())
    assert len(compiled) >= 20 and module not in compiled
    with pytest.raises(ValueError, match="Linear has no repeated blocks"):
        compile_blocks(torch.nn.Linear(2, 2))


def test_compiled_variants_need_a_device() -> None:
    for variant in ("regional", "regional+breakable"):
        assert impossible(variant, "recorder", "picture") == f"{variant} needs a CUDA device"
        assert impossible(variant, "cuda", "prefill").startswith(f"{variant} compiles")
        assert impossible(variant, "cuda", "picture") == ""


def test_waits_are_taken_out_of_a_loop_only() -> None:
    for variant in ("full+remove-syncs", "regional+breakable+remove-syncs"):
        says = f"{variant} is about a picture's denoising loop"
        assert impossible(variant, "cuda", "picture") == ""
        assert impossible(variant, "cuda", "step") == says
    assert impossible("breakable+remove-syncs", "recorder", "prefill")
    assert impossible("breakable", "recorder", "prefill") == ""


def row(**more: Any) -> dict[str, Any]:
    numbers = ("time_s", "step_ms_p50", "step_ms_p95", "set_up_s", "first_s", "difference",
               "device_s")  # fmt: skip
    missing = ("gain", "gpu_busy", "kernels_per_step", "launches_per_step", "mem_GB",
               "allocated_GB", "graph_MiB", "break_even_images")  # fmt: skip
    return {
        "scenario": "m 64x64", "model_cls": "M", "num_params_B": 1.0, "mode": "eager",
        "processes": 1, "images": 1, "images_per_s": 2.0, "set_up": "here", "equal": True,
        "stats": None,
        **dict.fromkeys(numbers, 0.5), **dict.fromkeys(missing), **more,
    }  # fmt: skip


def test_processes_are_merged() -> None:
    graphs = row(mode="full", graph_MiB=3.0, set_up_s=2.5, time_s=0.25)
    second = [row(time_s=0.7), {**graphs, "graph_MiB": 4.0, "equal": False, "difference": None}]
    both = merged([[row(), graphs], [*second, row(mode="x")]])
    assert [r["mode"] for r in both] == ["eager", "full"]
    assert both[0]["images_per_s"] == 4.0 and both[0]["time_s"] == 0.7
    assert both[1]["graph_MiB"] == 4.0 and both[1]["equal"] is False
    assert both[1]["difference"] is None and [r["processes"] for r in both] == [2, 2]
    assert both[1]["break_even_images"] == break_even(2.5, 0.25, 0.5, 0.7) == 5
    assert both[1]["gain"] == 2.8 and both[0]["gain"] is None


def test_a_batch_pays_from_its_first_picture() -> None:
    """2 s more set-up, 0.25 s less a call of four: the ninth call, whose first picture is 33rd."""
    rows = with_gain([row(images=4), row(images=4, mode="full", time_s=0.25, set_up_s=2.5)])
    assert rows[1]["break_even_images"] == 8 * 4 + 1


def test_variants_take_turns_and_only_eagers_first_call_is_nobodys() -> None:
    fronts, order = [Front("eager", None), Front("full", None)], []

    def call(front: Front) -> torch.Tensor:
        order.append((front.variant, front.turn))
        return torch.arange(3.0) + front.turn

    found = measured(fronts, call, Clock(torch.device("cpu")), 2, 3, lambda value: [value or {}])
    variants = [name[0] for name, _ in order]
    assert "".join(variants) == "eeff" + "ef" + "fe" + "ef"
    assert [turn for name, turn in order if name == "full"] == [1, 2, 3, 4, 5]
    assert [len(found.times[front.variant].warm) for front in fronts] == [1, 2]
    assert found.apart["full"].equal and found.finite


def test_a_result_that_the_next_call_overwrites_is_compared_as_it_was() -> None:
    """A model under `reduce-overhead` gives out the memory of its graphs."""
    memory = torch.zeros(3)

    def call(front: Front) -> torch.Tensor:
        now = torch.arange(3.0) * front.turn
        return now if front.variant == "eager" else memory.copy_(now)

    fronts = [Front("eager", None), Front("reduce-overhead", None)]
    clock = Clock(torch.device("cpu"))
    found = measured(fronts, call, clock, 2, 2, lambda value: [value or {}])
    assert found.apart["reduce-overhead"].equal


def test_what_is_kept_from_an_earlier_call_is_no_equal_picture(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call of a variant draws something else; so do the pictures of a batch."""
    real, kept = tasks.Task, []

    def remembers(scenario: str, model: Any, call: Any, *rest: Any) -> Any:
        def stale(front: Front) -> Any:
            out = call(front)
            kept.append(out) if front.variant == "full" else None
            return kept[0] if front.variant == "full" else out

        return real(scenario, model, stale, *rest)

    monkeypatch.setattr(tasks, "Task", remembers)
    for what in ("picture", "step"):
        kept.clear()
        assert main([*HERE, "--what", what, "--compare", "full", "--batch", "2"]) == 0
        assert [row["equal"] for row in record(capsys)["rows"]] == [True, False], what
        assert not torch.equal(kept[-1][0], kept[-1][1])


def test_calls_go_through_the_prompts_and_processes_share_them() -> None:
    options = parse([*HERE, "--prompt", "fox", "rocket", "lemon", "--batch", "2", "--steps", "1"])
    seen = []
    for rank in (0, 1):
        task = next(tasks.tasks(options, torch.device("cpu"), (rank, 2)))
        target = SimpleNamespace(images=0)

        def draw(target: Any = target, **given: Any) -> Any:
            seen.append((given["prompt"], [g.initial_seed() for g in given["generator"]]))
            return target

        for turn in (0, 1):
            task.call(Front("eager", draw, turn=turn))
    assert seen == [(["fox", "rocket"], [0, 1]), (["rocket", "lemon"], [4, 5]),
                    (["lemon", "fox"], [2, 3]), (["fox", "rocket"], [6, 7])]  # fmt: skip


def test_a_call_that_takes_anything_gets_what_is_given() -> None:
    class Anything:
        def __call__(self, num_inference_steps: int = 1, **more: Any) -> Any:
            """A pipeline's."""

    seen = []
    options = replace(parse(HERE), pipeline_kwargs={"strength": 0.5})
    task = tasks._picture(options, Anything(), (64, 96), 1, torch.device("cpu"), (0, 1))
    task.call(Front("eager", lambda **given: seen.append(given) or SimpleNamespace(images=0)))
    (given,) = seen
    del given["generator"]
    assert given == {"num_inference_steps": 2, "strength": 0.5}


def test_a_fresh_process_finds_no_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere")
    monkeypatch.setenv("RANK", "1")

    def runs(command: list[str], env: dict[str, str], **more: Any) -> Any:
        assert command[-4:] == ["--set-up-of", "full", "--set-up-scenario", "a scenario"]
        caches = [env["TORCHINDUCTOR_CACHE_DIR"], env["TRITON_CACHE_DIR"]]
        assert "RANK" not in env and len(set(caches)) == 2
        (empty,) = {Path(cache).parent for cache in caches}
        assert empty.is_dir() and not list(empty.iterdir())
        return SimpleNamespace(returncode=0, stdout='noise\n{"first_s": 1}\n')

    monkeypatch.setattr(set_up.subprocess, "run", runs)
    task = tasks.Task("a scenario", None, lambda front: None, 1, 1)
    assert set_up.fresh("full", task, HERE, None) == {"first_s": 1}


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


def test_set_ups_that_were_not_taken_alike_are_not_compared() -> None:
    rows = with_gain([row(), row(mode="full", time_s=0.25, set_up="fresh process")])
    assert rows[1]["break_even_images"] is None


def test_set_up_is_all_that_the_first_calls_take_longer() -> None:
    """Enabling 0.1 s, cold 0.03, recorded 0.6, compared 0.06, timed 0.03; later 0.01 each."""
    first, more = first_and_set_up(0.1, [0.03, 0.6, 0.06, 0.03], 0.01)
    assert first == pytest.approx(0.13)
    assert more == pytest.approx(0.1 + 0.02 + 0.59 + 0.05 + 0.02)


def test_eager_has_no_set_up_where_the_kernels_are_warm() -> None:
    """The others' is what their first calls took beyond the median of later ones."""
    task = tasks.Task("m 64x64 B1", torch.nn.Linear(2, 2), lambda front: None, 1, 1)
    times = Times(0.5, warm=[9.0, 1.0], wall=[1.0, 3.0, 3.0])
    made = {
        name: made_row(task, Front(name, None), times, None, Apart(True, 0.0), None)
        for name in ("eager", "full")
    }
    assert made["eager"]["set_up_s"] == 0 and made["eager"]["first_s"] == 3
    assert made["full"]["set_up_s"] == 0.5 + 10 - 2 * 3 and made["full"]["first_s"] == 9.5


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
    def fails(self: Front) -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr(Front, "before_call", fails)
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


def test_what_never_pays_says_so(tmp_path: Path) -> None:
    machine = {"gpu": "a GPU", "cpu": "a CPU"}
    rows = with_gain([row(), row(mode="full", time_s=0.6), row(mode="x", set_up="fresh process")])
    assert [r["break_even_images"] for r in rows] == [None, "never", None], "the last is not known"
    result = {"machine": machine, "notes": ["a note"], "rows": rows}
    text = table.markdown(result)
    assert text.count("never") == 1 and "* a note" in text and text.startswith("a GPU, cpu a CPU")
    chart.draw(result, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_records_are_put_together(tmp_path: Path) -> None:
    machine = {"gpu": "a GPU", "cpu": "a CPU"}
    for number, name in enumerate(("m 64x64", "n 96x64")):
        common = {"scenario": name, "tokens": 64}
        rows = with_gain([row(**common), row(**common, mode="breakable", time_s=0.25)])
        result = {"machine": machine, "notes": [], "rows": rows}
        (tmp_path / f"{number}.json").write_text(json.dumps(result))
    for given, name in ((("0.json", "1.json"), "both"), (("both.json",), "again")):
        files = [str(tmp_path / file) for file in given]
        command = [sys.executable, "benchmarks/pictures.py", *files, "--output", tmp_path / name]
        subprocess.run(command, check=True, cwd=ROOT, env=FROM_HERE)
    assert (tmp_path / "both.json").read_text() == (tmp_path / "again.json").read_text()
    text = (tmp_path / "both.md").read_text()
    assert "| m 64x64 | 64 | 2 | - | breakable | 2.00x | 2 |" in text and "**n 96x64**" in text
    assert (tmp_path / "both.png").stat().st_size > 1000
    for wrong, says in (("none.json", "is no record"), ("0.json", "no folder")):
        command = [sys.executable, "benchmarks/pictures.py", str(tmp_path / wrong), "--output"]
        command.append(str(tmp_path / "nowhere" / "x"))
        done = subprocess.run(command, cwd=ROOT, env=FROM_HERE, capture_output=True, text=True)
        assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


def test_readmes_table_of_a_record(tmp_path: Path) -> None:
    """With the defaults, with the loop's waits taken out, and a column from an earlier record."""
    named = {"scenario": "dit-xl-2 256x256 B1 20 steps"}
    eager = row(**named, gpu_busy=0.112)
    graphs = {"gain": 6.3, "images_per_s": 8.567, "set_up_s": 0.72, "graph_MiB": 54.0}
    rows = [eager, row(**named | graphs, mode="breakable", gpu_busy=0.6)]
    more = graphs | {"gain": 7.0, "images_per_s": 9.0, "set_up_s": 0.2, "graph_MiB": 55.0}
    rows += [row(**named | more, mode="breakable+remove-syncs", gpu_busy=0.7)]
    rows += [row(scenario="m 64x64 B1 20 steps")]
    earlier = [eager, row(**named, mode="reduce-overhead", gain=5.184, set_up_s=44.7)]
    for name, found in (("now", rows), ("earlier", earlier)):
        one = {"machine": {}, "notes": [], "rows": found}
        (tmp_path / f"{name}.json").write_text(json.dumps({"records": [one]}))
    command = [sys.executable, "benchmarks/pictures.py", str(tmp_path / "now.json"), "--readme"]
    command.append(str(tmp_path / "earlier.json"))
    done = subprocess.run(command, cwd=ROOT, env=FROM_HERE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    titles, lines, first, second = done.stdout.splitlines()
    assert len({line.count("|") for line in (titles, lines, first, second)}) == 1
    assert first == (
        "| DiT-XL/2 | 256 | 2 | 8.57 | 6.30x | 9 | 7.00x | 11% → 70% | 0.7 | 54 | 5.18x, 45 |"
    )
    assert second == "| m | 64 | 2 |  |  |  |  |  |  |  |  |", "a variant that was not measured"


BENCH = """\
#!{python}
# Python, but the benchmark measures nothing: it fails with one model, and in the middle of others.
import json, os, sys
if sys.argv[1:3] != ["-m", "dit_graph.bench"]:
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
with open({log!r}, "a") as log:
    print(json.dumps(sys.argv[3:]), file=log)
given = dict(zip(sys.argv[3:-2:2], sys.argv[4:-2:2])) | dict([sys.argv[-2:]])
model, sizes = given["--model"], given["--sizes"].split(",")
if model == "flux-dev" or (model == "sana-1.6b" and len(sizes) > 1):
    sys.exit(2)
rows = []
for side in sizes[:1] if model == "z-image" else sizes:
    for mode in given["--compare"].split(","):
        scenario = f"{{model}} {{side}}x{{side}} B1"
        rows.append({row!r} | {{"scenario": scenario, "mode": mode, "tokens": 64}})
record = {{"machine": {{"gpu": "a GPU"}}, "notes": [], "rows": rows}}
for suffix in ("json", "md"):
    with open(given["--output"] + "." + suffix, "w") as file:
        json.dump(record, file)
sys.exit(2 if model == "z-image" else 0)
"""


def test_a_row_that_fails_takes_no_other_along(tmp_path: Path) -> None:
    """`benchmarks/pictures.sh`, with a benchmark that measures nothing."""
    log, python = tmp_path / "log", tmp_path / "python"
    python.write_text(BENCH.format(python=sys.executable, log=str(log), row=row()))
    python.chmod(0o755)
    models = ["dit-xl-2", "sana-1.6b", "z-image", "flux-dev", "qwen-image"]
    out = tmp_path / "a folder"
    environment = FROM_HERE | {"PYTHON": str(python), "NAME": "all", "PYTHONPATH": ""}
    command = ["bash", str(ROOT / "benchmarks/pictures.sh"), str(out), *models]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in out.iterdir()} == {"all.json", "all.md", "all.png"}
    rows = [r for one in json.loads((out / "all.json").read_text())["records"] for r in one["rows"]]
    assert list(dict.fromkeys(r["scenario"].removesuffix(" B1") for r in rows)) == [
        "dit-xl-2 256x256", "dit-xl-2 512x512", "sana-1.6b 1024x1024", "z-image 512x512",
        "qwen-image 512x512", "qwen-image 1024x1024",
    ]  # fmt: skip
    assert "flux-dev failed" in done.stderr and "dit-xl-2 failed" not in done.stderr
    out.joinpath("records").mkdir()  # in which the benchmark would have written
    for argv in map(json.loads, log.read_text().splitlines()):
        options = parse(argv)
        assert options.compare == ("eager", "breakable", "breakable+remove-syncs")
        assert options.set_up == "here" and options.sizes and options.images <= 4


def test_gain_against_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(tokens=64, time_s=1.0), row(mode="breakable", tokens=64, time_s=0.25)]
    more = {"scenario": "m 128x128", "tokens": 256}
    rows += [row(**more), row(**more, mode="breakable")]
    result = {"machine": {"gpu": "a GPU", "cpu": "a CPU"}, "notes": [], "rows": rows}
    figures, real = [], chart.empty_figure
    monkeypatch.setattr(chart, "empty_figure", lambda: figures.append(real()) or figures[-1])
    chart.crossover([result], tmp_path / "x.png")
    with Image.open(tmp_path / "x.png") as drawn:
        assert drawn.size == (880, 550)
    (axes,) = figures[0].axes
    assert [line.get_xydata().tolist() for line in axes.lines] == [[[64, 4.0], [256, 1.0]]]
    texts = [text.get_text().strip() for text in axes.texts]
    assert texts[:-1] == ["4.00x"] and "under 1.05x" in texts[-1] and len(axes.patches) == 1
    with pytest.raises(ConfigError, match="no row of full"):
        chart.crossover([result], tmp_path / "x.png", "full")
    sizes = {name: shape.tokens((512, 512)) for name, shape in SHAPES.items()}
    assert sizes["flux-dev"] == 1024 and sizes["sana-1.6b"] == 256 and sizes["wan-1.3b"] == 5120
