"""Proof, gate and memory, as only the recorder can be told what a device says of them."""

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from diffusers.hooks import HookRegistry, ModelHook
from peft import LoraConfig
from torch import nn

import dit_graph
from dit_graph.devices import recorder
from dit_graph.devices.recorder import Recorder
from dit_graph.runner.entry import PAUSE
from dit_graph.tape.buffers import StaticBuffers
from dit_graph.tape.tape import Tape
from tests.families import FAMILIES
from tests.pair import Machine
from tests.recorder.test_denoise import OPTIONS, draw, flux_pipeline
from tests.toys import Module, Unseen, plain, rows


@pytest.fixture
def clock(monkeypatch: Any) -> list[float]:
    """A device whose time a test moves, in milliseconds."""
    now = Unseen()
    now.list.append(0.0)
    monkeypatch.setattr(Recorder, "clock", staticmethod(lambda: now.list[0]))
    monkeypatch.setattr(Recorder, "time_counts", True)
    return now


def slow(clock: Unseen, eager: float, replay: float) -> nn.Module:
    """A module whose forward and replay take so many milliseconds."""

    def body(m: Any, x: Any) -> Any:
        clock.list[0] += eager
        return m.linear(x)

    def on_replay(pair: Any) -> None:
        runner = pair.handle.installs["Module"].runner
        for entry in runner.entries.values():
            for tape in entry.tapes:
                tape.steps.append(lambda: clock.list.__setitem__(0, clock.list[0] + replay))

    module = Module(body)
    module.on_replay = on_replay
    return module


@pytest.mark.parametrize(
    ("eager", "replay", "wins"), [(26.0, 3.7, True), (173.9, 173.4, False), (5.0, 8.0, False)]
)
def test_the_gate_keeps_what_pays(
    machine: Machine, clock: Unseen, eager: float, replay: float, wins: bool
) -> None:
    module = slow(clock, eager, replay)
    on_replay = module.__dict__.pop("on_replay")
    pair = machine.pair(module, gate="measure")
    pair(rows(0))
    pair(rows(1))
    on_replay(pair)
    for i in range(12):
        pair(rows(i))
    runner = pair.handle.installs["Module"].runner
    (entry,) = runner.entries.values()
    text = f"replay {replay:.4g} ms vs eager {eager:.4g} ms"
    assert text in pair.handle.report()
    if wins:
        assert pair.stats["eager"] == {dit_graph.runner.replay.TIMED: 2} and pair.replays == 10
    else:
        assert entry.state == f"eager: {text}" and pair.stats["eager"][text] >= 6
        assert runner.pool.bytes == 0, "memory returns with the verdict"


def test_the_gate_measures_again_after_a_change(machine: Machine, clock: Unseen) -> None:
    module = slow(clock, 1.0, 2.0)
    on_replay = module.__dict__.pop("on_replay")
    pair = machine.pair(module, gate="measure")
    pair(rows(0))
    pair(rows(1))
    on_replay(pair)
    for i in range(8):
        pair(rows(i))
    assert any("vs eager" in reason for reason in pair.stats["eager"])
    pair.graphed.flag, pair.eager.flag = 1, 1
    before = pair.stats["cold"]
    for i in range(8):
        pair(rows(i))
    assert pair.stats["cold"] == before + 1


def test_strict_allows_the_gates_own_call_but_not_its_verdict(
    machine: Machine, clock: Unseen
) -> None:
    module = slow(clock, 5.0, 8.0)
    on_replay = module.__dict__.pop("on_replay")
    pair = machine.pair(module, gate="measure", strict=True)
    pair(rows(0))
    pair(rows(1))
    on_replay(pair)
    with pytest.raises(dit_graph.NotReplayed, match="replay 8 ms vs eager 5 ms"):
        for i in range(8):
            pair.graphed(rows(i))


def test_a_picture_is_right_while_the_gate_measures(clock: Unseen) -> None:
    pipe, eager = flux_pipeline(), flux_pipeline()
    handle = dit_graph.enable(pipe, **OPTIONS)
    for seed in range(2):
        assert torch.equal(draw(pipe, seed, steps=8), draw(eager, seed, steps=8))
    assert handle.stats()["eager"].get(dit_graph.runner.replay.TIMED, 0) >= 1


def test_a_clear_gain_is_decided_at_once_after_a_comparison(
    machine: Machine, clock: Unseen
) -> None:
    module = slow(clock, 26.0, 3.7)
    on_replay = module.__dict__.pop("on_replay")
    pair = machine.pair(module, gate="measure", verify="first")
    pair(rows(0))
    pair(rows(1))
    on_replay(pair)
    for i in range(12):
        pair(rows(i))
    assert pair.stats["eager"] == {dit_graph.runner.replay.TIMED: 1} and pair.replays == 11


def test_always_verifying_does_not_time(machine: Machine, clock: Unseen) -> None:
    pair = machine.pair(Module(plain), gate="measure", verify="always")
    for i in range(12):
        pair(rows(i))
    assert pair.replays == 10 and pair.stats["eager"] == {}


# ---- memory


@pytest.fixture
def small_chunks(monkeypatch: Any) -> int:
    monkeypatch.setattr(recorder, "_CHUNK", 1 << 16)
    return 1 << 16


@pytest.fixture
def room(monkeypatch: Any) -> Any:
    """Sets how many bytes the device has beside what is taken now."""

    monkeypatch.setattr(recorder.Arena, "alive", weakref.WeakSet())  # without what others hold

    def leave(size: int) -> None:
        gc.collect()
        taken = sum(arena.bytes for arena in recorder.Arena.alive)
        monkeypatch.setattr(Recorder, "capacity", taken + size)

    return leave


def test_a_budget_holds_over_two_hundred_sizes(machine: Machine, small_chunks: int) -> None:
    module = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)).requires_grad_(False)
    pair = machine.pair(module, memory_budget=64 * small_chunks)
    held = []
    for i in range(200):
        n = 1 + 370 * i % 2001
        for _ in range(5):
            pair(rows(n, n))
        held.append(pair.handle.installs["Sequential"].runner.pool.bytes)
    assert max(held) <= 64 * small_chunks and max(held) > 32 * small_chunks
    assert pair.replays >= 600 and pair.stats["eager"] == {}
    pool = pair.handle.installs["Sequential"].runner.pool
    pair.handle.disable()
    assert pool.bytes == 0


def test_a_recording_larger_than_the_budget_is_eager_by_name(
    machine: Machine, small_chunks: int
) -> None:
    pair = machine.pair(Module(plain), memory_budget=2 * small_chunks)
    for i in range(4):
        pair(rows(i, 2))
    for i in range(80):  # longer than the window of recent calls
        pair(rows(i, 10_000))
    (reason,) = pair.stats["eager"]
    assert "memory_budget" in reason and "MiB" in reason
    for i in range(4):
        pair(rows(i, 2))
    assert pair.replays >= 4, "the small one still replays"


def test_a_share_of_the_device(machine: Machine, small_chunks: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(Recorder, "total_bytes", lambda self: 400 * small_chunks)
    monkeypatch.setattr(Recorder, "free_bytes", lambda self: 200 * small_chunks)
    pair = machine.pair(Module(plain), memory_budget="10%")
    held = []
    for n in range(1, 60):
        for _ in range(5):
            pair(rows(n, 200 * n))
        held.append(pair.handle.installs["Module"].runner.pool.bytes)
    assert 0 < max(held) <= 40 * small_chunks


def test_room_is_left_for_the_vae(machine: Machine, small_chunks: int, room: Any) -> None:
    """A twentieth of the device stays free, whatever the budget says."""
    room(100 * small_chunks)
    pair = machine.pair(Module(plain), memory_budget="100%")
    for n in range(1, 80):
        for _ in range(5):
            pair(rows(n, 200 * n))
        device = pair.handle.installs["Module"].runner.pool.device
        assert device.free_bytes() >= device.total_bytes() // 20
    assert pair.replays > 100


def test_a_capture_without_room_lets_the_others_go_and_tries_again(
    machine: Machine, small_chunks: int, room: Any
) -> None:
    pair = machine.pair(Module(plain), memory_budget=None)
    for i in range(4):
        pair(rows(i, 1000))
    room(130_000)
    for i in range(4):
        pair(rows(i, 3000))
    assert pair.stats["eager"] == {} and pair.replays == 4
    (large,) = [e for e in pair.handle.installs["Module"].runner.entries.values() if e.tapes]
    assert large.label == "x 3000x8"


def test_a_capture_that_never_fits_is_eager_by_name(
    machine: Machine, small_chunks: int, room: Any
) -> None:
    room(small_chunks)
    pair = machine.pair(Module(plain), memory_budget=None)
    for i in range(4):
        pair(rows(i, 100_000))
    (reason,) = pair.stats["eager"]
    assert "OutOfMemoryError" in reason
    for i in range(4):
        pair(rows(i, 10))
    assert pair.replays == 2


def test_a_device_without_room_for_now_is_tried_again(
    machine: Machine, small_chunks: int, monkeypatch: Any
) -> None:
    short = [True]
    monkeypatch.setattr(Recorder, "free_bytes", lambda self: 0 if short[0] else 200 * small_chunks)
    monkeypatch.setattr(Recorder, "total_bytes", lambda self: 400 * small_chunks)
    pair = machine.pair(Module(plain), memory_budget="50%")
    for i in range(10):
        pair(rows(i))
    (reason,) = pair.stats["eager"]
    assert reason.startswith("for now the device has no room")
    for i in range(PAUSE - 8):
        pair(rows(i))
    assert pair.stats["eager"] == {reason: PAUSE} and pair.stats["cold"] == 1
    short[0] = False
    for i in range(30):
        pair(rows(i))
    assert pair.stats["eager"] == {reason: PAUSE} and pair.replays == 28


def test_the_state_is_compared_when_a_pause_ends(machine: Machine) -> None:
    """By another answer at the very call that is recorded again."""
    pair = machine.pair(Module(lambda m, x: m.linear(x) * m.factor, factor=1.0))
    pair(rows(0))
    (entry,) = pair.handle.installs["Module"].runner.entries.values()
    entry.pause("no room")
    for i in range(PAUSE):
        pair(rows(i))
    for m in (pair.graphed, pair.eager):
        m.factor = 2.0
    for i in range(4):
        pair(rows(i))
    assert pair.replays == 2 and pair.stats["cold"] == 2


@pytest.mark.parametrize("where", ["copy_in", "__init__"])
def test_no_room_to_stage_the_arguments(machine: Machine, where: str, monkeypatch: Any) -> None:
    real, short = getattr(StaticBuffers, where), [False]

    def stage(self: Any, tensors: Any) -> None:
        if short[0]:
            raise torch.OutOfMemoryError("no room")
        real(self, tensors)

    monkeypatch.setattr(StaticBuffers, where, stage)
    pair = machine.pair(Module(plain))
    pair(rows(0))
    short[0] = True
    for i in range(3):
        pair(rows(i))
    (reason,) = pair.stats["eager"]
    assert "no room" in reason
    assert not pair.handle.installs["Module"].runner.pool.bytes
    short[0] = False
    for i in range(100):
        pair(rows(i))
    assert pair.replays > 20, "memory that was short for a while is asked for again"


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("no room"), RuntimeError("CUDA error: out of memory"),
])  # fmt: skip
def test_no_room_to_replay(machine: Machine, error: Exception, monkeypatch: Any) -> None:
    pair, real = machine.pair(Module(plain)), Tape.run

    def run(tape: Any, undo: Any, check: Any) -> None:
        raise error

    for i in range(3):
        pair(rows(i))
    monkeypatch.setattr(Tape, "run", run)
    for i in range(10):
        pair(rows(i))
    monkeypatch.setattr(Tape, "run", real)
    for i in range(200):
        pair(rows(i))
    assert pair.replays > 100, pair.stats


@pytest.mark.parametrize("state", ["none", "argument", "python"])
def test_an_eager_call_without_room_runs_again_where_nothing_moved(
    machine: Machine, state: str
) -> None:
    full = Unseen()

    def body(m: Any, x: Any) -> Any:
        if x.shape[0] == 5 and full.list:
            full.list.clear()
            torch.rand(3)
            if state == "argument":
                x.add_(1)
            if state == "python":
                m.seen = 1
            raise torch.OutOfMemoryError("no room")
        return m.linear(x) + torch.rand_like(x)

    pair = machine.pair(Module(body))
    for i in range(3):
        pair(rows(i), seed=i)
    full.list.append(True)
    x = rows(3, 5)
    torch.manual_seed(4)
    if state != "none":
        with pytest.raises(torch.OutOfMemoryError, match="no room"):
            pair.graphed(x)
        return
    result = pair.graphed(x)
    torch.manual_seed(4)
    assert torch.equal(result, pair.eager(x))
    assert pair.handle.installs["Module"].runner.pool.bytes == 0


def test_a_state_that_cannot_come_back_gives_its_memory_back_before_the_new(
    machine: Machine,
) -> None:
    pair = machine.pair(Module(plain))
    for i in range(3):
        pair(rows(i))
    pool = pair.handle.installs["Module"].runner.pool
    pair.graphed.flag = 1
    pair(rows(3))
    assert pool.bytes > 0, "the state before may come back"
    for module in (pair.graphed, pair.eager):
        module.linear.weight = nn.Parameter(module.linear.weight.clone(), requires_grad=False)
    pair(rows(4))
    assert pool.bytes == 0


def test_a_disabled_module_keeps_nothing(machine: Machine) -> None:
    def body(m: Any, x: Any, y: Any) -> Any:
        x.add_(1)
        return m.linear(x) + y

    pair = machine.pair(Module(body))
    shared = rows(0, 4)
    for _ in range(2):
        pair.graphed(shared[:2], shared[1:3])  # a conflict: staged, never recorded
    pair(rows(1), rows(2))
    runner = pair.handle.installs["Module"].runner
    pair.handle.disable()
    assert all(entry.static is None and not entry.tapes for entry in runner.entries.values())


# ---- devices that fail


@pytest.mark.parametrize("when", ["capture", "replay"])
def test_a_device_that_failed_is_an_error_with_its_cause(
    machine: Machine, when: str, monkeypatch: Any
) -> None:
    pair = machine.pair(Module(lambda m, x: m.linear(x) + bool(x.sum() > -1e9)))
    for i in range(1 if when == "capture" else 3):
        pair(rows(i))

    def fail(*args: Any) -> None:
        monkeypatch.setattr(Recorder, "broken", True)
        raise RuntimeError("an illegal memory access was encountered")

    stage = "end" if when == "capture" else "__call__"
    monkeypatch.setattr(recorder.RecorderSegment, stage, fail)
    with pytest.raises(dit_graph.DeviceFailed, match="illegal memory access") as failed:
        pair.graphed(rows(5))
    assert isinstance(failed.value.__cause__, RuntimeError)


# ---- never silent


class Guided(type(flux_pipeline())):  # type: ignore[misc]
    """A pipeline with a guider, as diffusers' video pipelines have one."""

    guider: Any = None


def test_a_guider_may_change_the_module_between_steps() -> None:
    """It adds and removes hooks inside the loop, where no callback says so."""
    pipe, eager = flux_pipeline(), flux_pipeline()
    pipe.__class__ = eager.__class__ = Guided

    for each in (pipe, eager):
        calls = []
        block = each.transformer.single_transformer_blocks[0]

        class Guider:
            def __call__(self, step: int, block: Any = block) -> None:
                block.skipped = step % 2 == 0

        each.guider = Guider()
        real = each.scheduler.step

        def stepped(*args: Any, real: Any = real, each: Any = each, calls: Any = calls, **kw: Any):
            calls.append(1)
            each.guider(len(calls))
            return real(*args, **kw)

        each.scheduler.step = stepped
        forward = type(block).forward

        def skipping(self: Any, hidden_states: Any, **kwargs: Any) -> Any:
            out = forward(self, hidden_states, **kwargs)
            return tuple(o * 0.5 for o in out) if getattr(self, "skipped", False) else out

        block.__class__ = type("Skipping", (type(block),), {"forward": skipping})
    dit_graph.enable(pipe, **OPTIONS)
    for seed in range(2):
        assert torch.equal(draw(pipe, seed, steps=8), draw(eager, seed, steps=8))


@pytest.mark.parametrize("what", ["forward hook", "diffusers hook", "adapter"])
def test_hooks_and_adapters_that_come_between_two_steps(what: str) -> None:
    """No callback is given: a scheduler that is wrapped changes the transformer."""
    pipe, eager = flux_pipeline(), flux_pipeline()
    dit_graph.enable(pipe, **OPTIONS)
    for each in (pipe, eager):
        real, calls = each.scheduler.step, []

        def stepped(*args: Any, real: Any = real, each: Any = each, calls: Any = calls, **kw: Any):
            calls.append(1)
            if len(calls) == 5:
                change(each.transformer, what)
            return real(*args, **kw)

        each.scheduler.step = stepped
    for seed in range(2):
        assert torch.equal(draw(pipe, seed, steps=8), draw(eager, seed, steps=8)), seed


def change(transformer: Any, what: str) -> None:
    block = transformer.single_transformer_blocks[0]
    if what == "forward hook":
        block.norm.register_forward_hook(lambda m, a, out: (out[0] * 2, *out[1:]))
    elif what == "diffusers hook":
        HookRegistry.check_if_exists_or_initialize(block).register_hook(Doubling(), "doubling")
    else:
        torch.manual_seed(0)
        transformer.add_adapter(
            LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False), "late"
        )


class Doubling(ModelHook):
    def post_forward(self, module: Any, output: Any) -> Any:
        return tuple(t * 2 for t in output)


def test_the_new_precision_switches() -> None:
    """torch raises where old and new switches are read together."""
    pair = Machine("recorder", "cpu").pair(Module(plain))
    matmul, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.fp32_precision
    for i in range(3):
        pair(rows(i))
    try:
        matmul.fp32_precision = "tf32"
        for i in range(3):
            pair(rows(i))
    finally:
        matmul.fp32_precision = before
    assert pair.stats["captures"] == 2


def test_current_call_is_known_whatever_is_switched_off(monkeypatch: Any) -> None:
    module = Module(lambda m, x: m.linear(x) * len(dit_graph.current_call().arguments))
    dit_graph.enable(module)  # no GPU
    assert module(rows(0)).shape == (2, 8)
    monkeypatch.setenv("DIT_GRAPH_DISABLE", "1")
    assert module(rows(0)).shape == (2, 8)


def test_a_module_whose_forward_is_compiled_over_is_named(caplog: Any) -> None:
    module = Module(plain)
    handle = dit_graph.enable(module, device="recorder", strict=True)
    module.forward = torch.compile(module.forward, backend="eager")
    module(rows(0))
    assert "compiled as a whole" in handle.report()


def test_a_replaced_component_is_said_once(caplog: Any) -> None:
    pipe = flux_pipeline()
    dit_graph.enable(pipe, **OPTIONS)
    pipe.transformer = FAMILIES["flux"].build()
    for seed in range(3):
        draw(pipe, seed)
    assert caplog.text.count("was replaced by") == 1


def test_the_report_can_be_read_from_another_thread(machine: Machine) -> None:
    pair = machine.pair(Module(plain))
    errors, stop = [], threading.Event()

    def read() -> None:
        while not stop.is_set():
            try:
                pair.handle.report(), pair.handle.stats()
            except Exception as error:
                errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for n in range(1, 60):
            for _ in range(3):
                pair.graphed(rows(n, n))
    finally:
        stop.set()
        thread.join()
    assert errors == []


def test_the_kill_switch(monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setenv("DIT_GRAPH_DISABLE", "1")
    pipe, eager = flux_pipeline(), flux_pipeline()
    handle = dit_graph.enable(pipe, strict=True, **OPTIONS)
    handle.warmup(sizes=[(16, 16)], prompt_embeds=torch.zeros(1, 6, 32))
    assert torch.equal(draw(pipe, 0), draw(eager, 0))
    assert handle.stats()["eager"] == {"DIT_GRAPH_DISABLE=1 is set": 4}
    assert "DIT_GRAPH_DISABLE=1 is set" in handle.report() and "nothing is recorded" in caplog.text
    monkeypatch.setenv("DIT_GRAPH_DISABLE", "0")
    assert torch.equal(draw(pipe, 1), draw(eager, 1))
    assert handle.stats()["replays"] == 2
    monkeypatch.setenv("DIT_GRAPH_DISABLE", "1")  # in a running process
    assert torch.equal(draw(pipe, 2), draw(eager, 2))
    assert handle.stats()["replays"] == 2
    dit_graph.disable(pipe)
    assert "forward" not in pipe.transformer.__dict__


def test_the_kill_switch_spares_what_would_be_refused(monkeypatch: Any) -> None:
    monkeypatch.setenv("DIT_GRAPH_DISABLE", "1")
    handle = dit_graph.enable(flux_pipeline(), device="cuda")
    assert handle.stats()["calls"] == 0


def test_strict_without_a_gpu(machine: Machine) -> None:
    pipe = flux_pipeline()
    dit_graph.enable(pipe, strict=True)
    with pytest.raises(dit_graph.NotReplayed, match="nothing is recorded"):
        draw(pipe)


@pytest.mark.parametrize("how", ["replaced", "compiled", "slot"])
def test_strict_names_what_stands_between(how: str, caplog: Any) -> None:
    pipe = flux_pipeline()
    handle = dit_graph.enable(pipe, strict=True, **OPTIONS)
    draw(pipe)
    if how == "replaced":
        pipe.transformer = torch.compile(FAMILIES["flux"].build(), backend="eager")
        says = "transformer was replaced by OptimizedModule"
    elif how == "compiled":
        pipe.transformer.compile(backend="eager")
        says = "compiled as a whole"
    else:
        pipe.transformer.forward = type(pipe.transformer).forward.__get__(pipe.transformer)
        says = "taken away by another hook"
    with pytest.raises(dit_graph.NotReplayed, match=says):
        draw(pipe, 1)
    assert says in caplog.text and says in handle.report()
    if how == "slot":  # put right
        draw(pipe, 2)


def test_a_replay_keeps_the_shapes_that_were_recorded() -> None:
    """A result of one element would fill a home of two."""
    segment, sizes = recorder.RecorderSegment(recorder.Arena(), lambda t: t), iter([2, 2, 1])
    segment.call(lambda: torch.ones(next(sizes)), (), {})
    segment()
    with pytest.raises(RuntimeError, match="recorded"):
        segment()
