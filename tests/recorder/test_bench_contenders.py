"""What `python -m dit_graph.bench` runs, and how: named models, contenders, tasks, turns."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dit_graph.bench import set_up, tasks
from dit_graph.bench.contenders import (
    CONTENDERS,
    GRAPHS,
    Contender,
    compile_blocks,
    denoiser,
    eager_first,
    impossible,
    twin,
)
from dit_graph.bench.measure import (
    Apart,
    Clock,
    Times,
    measured,
)
from dit_graph.bench.options import parse
from dit_graph.bench.rows import row as made_row
from dit_graph.bench.shapes import LANGUAGE_MODELS, SHAPES
from dit_graph.cli.errors import UsageError
from dit_graph.cli.model import taken_by
from tests.families import FAMILIES
from tests.pair import Machine
from tests.recorder.test_bench import HERE, QUICK
from tests.shared.syncs.pictures import dit, dit_picture


def test_a_contender_loses_the_waits_of_its_own_loop_alone() -> None:
    pipe = dit(Machine("recorder", "cpu"))
    graphs = [n for n in GRAPHS if not n.startswith("regional") and not n.endswith("+cache")]
    contenders = [Contender.of(name, pipe, {"device": "recorder"}) for name in ("eager", *graphs)]
    for seed in (0, 1):
        expected, *others = [dit_picture(made.target, seed) for made in contenders]
        assert all([torch.equal(other, expected) for other in others])
    removed = {made.name: made.handle.explain().syncs_removed for made in contenders[1:]}
    with_waits = [name for name in graphs if removed[name] is None]
    assert with_waits == ["full", "breakable", "blocks"]
    assert all(sum(removed[f"{name}+remove-syncs"].values()) for name in with_waits)
    slots = [made.name for made in contenders if "step" in vars(made.target.scheduler)]
    assert slots == [f"{name}+remove-syncs" for name in with_waits]
    for made in contenders:
        made.release()


class Told(Clock):
    """Says of each call what it is told to."""

    def __init__(self, *seconds: float) -> None:
        super().__init__(torch.device("cpu"))
        self.seconds = iter(seconds)

    def __call__(self, run: Any) -> tuple[Any, float, None]:
        return run(), next(self.seconds), None


def test_a_machine_that_gets_busier_turns_no_time_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first picture's time is read from the clock; set-up, a difference, is 0 at the least."""
    real = Contender.of
    monkeypatch.setattr(Contender, "of", lambda *args: replace(real(*args), seconds=0.5))
    scenario = "embedded 64x64 B1 2 steps"
    options = replace(parse([*QUICK, "--compare", "full"]), scenario=scenario)
    idle = set_up.alone(options, "full", Told(3.0, 2.0, 1.0, 1.0, 1.0, 1.0))
    assert idle == {"first_s": 3.5, "set_up_s": 3.5, "mem_GB": None}
    busier = set_up.alone(options, "full", Told(3.0, 2.0, 1.0, 1.0, 20.0, 20.0))
    assert busier == {"first_s": 3.5, "set_up_s": 0.0, "mem_GB": None}
    task = tasks.Task(scenario, torch.nn.Linear(2, 2), lambda contender: None, 1, 2)
    times = Times(wall=[0.5, 0.5])
    made = made_row(task, Contender("full", None), times, None, Apart(True, 0.0), busier)
    assert (made["first_s"], made["set_up_s"], made["set_up"]) == (3.5, 0, "fresh process")


def test_names() -> None:
    assert len(SHAPES) == 8 and not SHAPES.keys() & LANGUAGE_MODELS.keys()
    options = parse(["--model", "dit-xl-2", "--compare", ",".join(CONTENDERS)])
    assert options.compare == CONTENDERS
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


def test_compiled_contenders_need_a_device() -> None:
    for contender in ("regional", "regional+breakable"):
        assert impossible(contender, "recorder", "picture") == f"{contender} needs a CUDA device"
        assert impossible(contender, "cuda", "prefill").startswith(f"{contender} compiles")
        assert impossible(contender, "cuda", "picture") == ""


def test_waits_are_taken_out_of_a_loop_only() -> None:
    for contender in ("full+remove-syncs", "regional+breakable+remove-syncs"):
        says = f"{contender} is about a picture's denoising loop"
        assert impossible(contender, "cuda", "picture") == ""
        assert impossible(contender, "cuda", "step") == says
    assert impossible("breakable+remove-syncs", "recorder", "prefill")
    assert impossible("breakable", "recorder", "prefill") == ""


def test_contenders_take_turns_and_only_eagers_first_call_is_nobodys() -> None:
    contenders, order = [Contender("eager", None), Contender("full", None)], []

    def call(contender: Contender) -> torch.Tensor:
        order.append((contender.name, contender.turn))
        return torch.arange(3.0) + contender.turn

    found = measured(
        contenders, call, Clock(torch.device("cpu")), 2, 3, lambda value: [value or {}]
    )
    names = [name[0] for name, _ in order]
    assert "".join(names) == "eeff" + "ef" + "fe" + "ef"
    assert [turn for name, turn in order if name == "full"] == [1, 2, 3, 4, 5]
    assert [len(found.times[contender.name].warm) for contender in contenders] == [1, 2]
    assert found.apart["full"].equal and found.finite


def test_a_result_that_the_next_call_overwrites_is_compared_as_it_was() -> None:
    """A model under `reduce-overhead` gives out the memory of its graphs."""
    memory = torch.zeros(3)

    def call(contender: Contender) -> torch.Tensor:
        now = torch.arange(3.0) * contender.turn
        return now if contender.name == "eager" else memory.copy_(now)

    contenders = [Contender("eager", None), Contender("reduce-overhead", None)]
    clock = Clock(torch.device("cpu"))
    found = measured(contenders, call, clock, 2, 2, lambda value: [value or {}])
    assert found.apart["reduce-overhead"].equal


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
            task.call(Contender("eager", draw, turn=turn))
    assert seen == [(["fox", "rocket"], [0, 1]), (["rocket", "lemon"], [4, 5]),
                    (["lemon", "fox"], [2, 3]), (["fox", "rocket"], [6, 7])]  # fmt: skip


def test_a_call_that_takes_anything_gets_what_is_given() -> None:
    class Anything:
        def __call__(self, num_inference_steps: int = 1, **more: Any) -> Any:
            """A pipeline's."""

    seen = []
    options = replace(parse(HERE), pipeline_kwargs={"strength": 0.5})
    task = tasks._picture(options, Anything(), (64, 96), 1, torch.device("cpu"), (0, 1))
    task.call(Contender("eager", lambda **given: seen.append(given) or SimpleNamespace(images=0)))
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
    task = tasks.Task("a scenario", None, lambda contender: None, 1, 1)
    assert set_up.fresh("full", task, HERE, None) == {"first_s": 1}


def test_contenders_with_a_step_cache_are_compared_with_eager_under_it() -> None:
    pipe = dit(Machine("recorder", "cpu"))
    names = eager_first(["breakable+cache"])
    assert names == ["eager", "eager+cache", "breakable+cache"]
    contenders = [Contender.of(name, pipe, {"device": "recorder"}) for name in names]
    for seed in (0, 1, 2):
        plain, cached, ours = [dit_picture(made.target, seed) for made in contenders]
        assert torch.equal(ours, cached) and not torch.equal(cached, plain)
    stats = contenders[2].handle.stats()
    assert stats["regions"]["replays"] and not stats["eager"]
    for made in contenders:
        made.release()
    assert "a step cache is a diffusers model's" in impossible("eager+cache", "cuda", "prefill")
