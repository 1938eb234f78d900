"""Proof at run time, the gate, strictness and the ladder of failures, on every device."""

import copy
import dataclasses
import logging
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dit_graph
from dit_graph import eager_on_graph
from dit_graph.runner.proof import Gate
from dit_graph.tape.tape import Tape
from tests.contract import Module, rows
from tests.pair import PLAIN, Machine, torchs

ALWAYS = {"gate": "always"}


def plain(m: Any, x: Any) -> Any:
    return m.linear(x).tanh()


def corrupt(patch: Any) -> None:
    """From now on every replay gives a result that is a little off."""
    real = Tape.result
    patch.setattr(Tape, "result", lambda tape, live: real(tape, live) * 1.01)


# ---- verify


@pytest.mark.parametrize("verify", ["first", "always"])
def test_a_wrong_replay_is_found_before_it_is_seen(
    machine: Machine, monkeypatch: Any, verify: str, caplog: Any
) -> None:
    pair = machine.pair(Module(plain), verify=verify)
    pair(rows(0).to(machine.on))
    pair(rows(1).to(machine.on))
    corrupt(monkeypatch)
    for i in range(4):
        pair(rows(i).to(machine.on))
    assert pair.replays == 0 and "differs by up to" in next(iter(pair.stats["eager"]))
    assert "verify: the replay differs from eager" in pair.handle.report()
    assert "verify: the replay differs from eager" in caplog.text


def test_a_wrong_replay_is_seen_without_verification(machine: Machine, monkeypatch: Any) -> None:
    pair = machine.pair(Module(plain), verify="off")
    pair(rows(0).to(machine.on))
    corrupt(monkeypatch)
    pair.compare(rows(1).to(machine.on))
    assert not pair.compare(rows(2).to(machine.on))[0]


def test_each_variant_and_signature_is_compared_once(machine: Machine, monkeypatch: Any) -> None:
    def body(m: Any, x: Any) -> Any:
        return m.linear(x) if x.sum() > 0 else x

    calls = []
    pair = machine.pair(Module(body), verify="first")
    original = pair.handle.installs["Module"].runner.target.original

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    pair.handle.installs["Module"].runner.target.original = counted
    for _ in range(4):
        for value in (1.0, -1.0):
            pair(torch.full((2, 8), value, device=machine.on))
    # cold, two captures, and both compared when they are made and at their first replay
    assert pair.replays == 5 and len(calls) == 3 + 4
    assert "bit-equal when compared (4x)" in pair.handle.report()


def test_a_wrong_recording_is_found_before_it_is_seen(machine: Machine, caplog: Any) -> None:
    def body(m: Any, x: Any) -> Any:
        return m.linear(x) * (2 if dit_graph.breaks.capturing() else 1)

    pair = machine.pair(Module(body), verify="first")
    for i in range(4):
        pair(rows(i).to(machine.on))
    assert "verify: the recording differs from eager" in caplog.text
    assert pair.replays == 0 and pair.stats["captures"] == 0
    assert "verify: the recording differs" in pair.handle.report()


def test_always_compares_every_replay(machine: Machine, monkeypatch: Any) -> None:
    pair = machine.pair(Module(plain), verify="always")
    for i in range(6):
        pair(rows(i).to(machine.on))
    assert "bit-equal when compared (5x)" in pair.handle.report()
    corrupt(monkeypatch)
    assert pair.stats["eager"] == {}
    pair(rows(7).to(machine.on))
    assert "differs by up to" in next(iter(pair.stats["eager"]))


@pytest.mark.parametrize("what", ["buffer", "argument", "marked"])
def test_what_a_second_run_would_change_is_left_alone(machine: Machine, what: str) -> None:
    ran = []

    @eager_on_graph
    def marked(h: torch.Tensor) -> torch.Tensor:
        ran.append(1)
        return h * 2

    def body(m: Any, x: Any) -> Any:
        if what == "buffer":
            m.count.add_(1)
        if what == "argument":
            x.add_(1)
        return marked(x) if what == "marked" else m.linear(x) + m.count

    pair = machine.pair(Module(body), verify="always")
    for i in range(6):
        pair(rows(i).to(machine.on))
    assert pair.replays == 4 and "not compared:" in pair.handle.report()
    if what == "marked":
        assert len(ran) == 12  # six of ours, six of the eager twin


def test_a_forward_that_draws_is_compared_and_draws_once(machine: Machine) -> None:
    pair = machine.pair(Module(lambda m, x: m.linear(x) + torch.rand_like(x)), verify="always")
    for i in range(6):
        pair(rows(i).to(machine.on), seed=i)
    assert pair.replays == 4 and "bit-equal when compared (5x)" in pair.handle.report()


# ---- what differs from eager, as text


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        (torch.ones(2), torch.ones(2), ""),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), ""),
        (torch.zeros(1), -torch.zeros(1), "differs by up to 0"),
        ([torch.ones(2), 3], [torch.ones(2), 4], "result 1 is 3, eager's 4"),
        (torch.ones(2), torch.ones(3), "(2,)"),
        ([torch.ones(2)], torch.ones(2), "structure"),
        (torch.ones(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), "differs"),
        (torch.ones(2, 2).t(), torch.ones(2, 2), ""),
    ],
)
def test_differences_are_named(a: Any, b: Any, says: str) -> None:
    found = dit_graph.runner.proof.difference(a, b)
    assert found == says if not says else says in found


# ---- strict


@torchs
def fail_while_recording() -> None:
    if dit_graph.breaks.capturing():
        raise RuntimeError("only while recording: the stream is capturing")


def test_strict_lets_cold_captured_and_replayed_calls_through(machine: Machine) -> None:
    pair = machine.pair(Module(plain), strict=True)
    for i in range(8):
        pair(rows(i, 2 + i % 2).to(machine.on))
    assert pair.replays == 4


@pytest.mark.parametrize("why", ["gradients", "generator", "capture", "backend"])
def test_strict_raises_at_the_first_eager_call(machine: Machine, why: str) -> None:
    def body(m: Any, x: Any, generator: Any = None) -> Any:
        if why == "capture":
            fail_while_recording()
        return m.linear(x)

    options = {"backend": "eager"} if why == "backend" else {}
    pair = machine.pair(Module(body), strict=True, **options)
    x, kwargs = rows(0).to(machine.on), {}
    if why == "generator":
        kwargs["generator"] = torch.Generator()
    if why == "gradients":
        x.requires_grad_()
    expected = {
        "gradients": "gradients are needed",
        "generator": "generator is a Generator",
        "capture": "only while recording",
        "backend": "backend eager",
    }
    with torch.set_grad_enabled(why == "gradients"):
        if why == "capture":
            pair.graphed(x)
        with pytest.raises(dit_graph.NotReplayed, match=expected[why]):
            pair.graphed(x, **kwargs)


def test_strict_names_where_a_size_that_was_not_warmed_up_differs(machine: Machine) -> None:
    pair = machine.pair(Module(plain), on_new_shape="eager", strict=True)
    pair.handle.warmup(inputs=[{"x": rows(0).to(machine.on)}])
    pair(x=rows(1).to(machine.on))
    with pytest.raises(dit_graph.NotReplayed, match="x dim 0: 5 vs 2"):
        pair.graphed(x=rows(1, 5).to(machine.on))


# ---- misses


def test_a_miss_names_the_field_that_differs(machine: Machine, caplog: Any) -> None:
    caplog.set_level(logging.INFO)

    def body(m: Any, x: Any, t: Any, scale: Any = 1, extra: Any = None) -> Any:
        return m.linear(x) * scale + t.sum()

    pair = machine.pair(Module(body))
    t = torch.ones(2, 1, device=machine.on)

    def call(x: Any, t: Any, **kwargs: Any) -> str:
        caplog.clear()
        pair(**machine.to({"x": x, "t": t, **kwargs}))
        return caplog.text

    for i in range(3):
        call(rows(i), t)
    assert "t has 1 dimensions vs 2" in call(rows(0), t[:, 0])  # row 33
    assert "x dim 0: 5 vs 2" in call(rows(0, 5), t)  # row 34
    assert "t dtype: float64 vs float32" in call(rows(0), t.double())
    assert "x strides" in call(rows(0, 8).t()[:2], t)
    assert "scale: 2 vs not given" in call(rows(0), t, scale=2)
    extra = {"a": [t.clone()]}
    assert "extra['a'][0]: a tensor (2, 1) vs not given" in call(rows(0), t, extra=extra)
    for _ in range(3):
        call(rows(0), t, extra=extra)
    again = {"a": [t]}
    assert "extra['a'][0]: a tensor that is another argument too" in call(rows(0), t, extra=again)
    with torch.autocast(machine.on.partition(":")[0], torch.bfloat16):
        assert "autocast" in call(rows(0), t)
    assert "new signature" not in call(rows(0), t)
    assert "differs from the nearest recorded: x dim 0: 5 vs 2" in pair.handle.report()


@dataclasses.dataclass
class Grid:
    height: int
    width: int


def test_a_miss_names_what_lies_inside_a_value(machine: Machine, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    pair = machine.pair(
        Module(lambda m, x, grid, table: m.linear(x) * grid.width + float(table[0]))
    )

    def call(grid: Grid, table: Any) -> str:
        caplog.clear()
        pair.graphed(x=rows(0).to(machine.on), grid=grid, table=np.array(table))
        return caplog.text

    for _ in range(3):
        call(Grid(2, 4), [1, 2])
    assert "grid.width: 5 vs 4" in call(Grid(2, 5), [1, 2])
    assert "table: ndarray [1, 3] vs ndarray [1, 2]" in call(Grid(2, 4), [1, 3])


def test_a_miss_names_the_extra_key(machine: Machine, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    level = [1]
    pair = machine.pair(Module(plain), extra_key=lambda module, arguments: ("level", level[0]))
    for i in range(3):
        pair(rows(i).to(machine.on))
    level[0] = 7
    pair(rows(0).to(machine.on))
    assert "extra_key: 'level', 7 vs 'level', 1" in caplog.text


# ---- extra_key


def test_an_extra_key_that_never_repeats_is_named(machine: Machine) -> None:
    counter = iter(range(1000))
    pair = machine.pair(Module(plain), extra_key=lambda module, arguments: next(counter))
    for i in range(12):
        pair(rows(i).to(machine.on))
    assert pair.stats["eager"]["extra_key is another value at every call"] >= 6


def test_an_extra_key_that_raises_is_eager_by_name(machine: Machine) -> None:
    pair = machine.pair(Module(plain), extra_key=lambda module, arguments: 1 // 0)
    for i in range(3):
        pair(rows(i).to(machine.on))
    (reason,) = pair.stats["eager"]
    assert reason.startswith("extra_key raised ZeroDivisionError")


def test_extra_key_keeps_calls_apart(machine: Machine) -> None:
    outside = {"scale": 1.0}
    pair = machine.pair(
        Module(lambda m, x: m.linear(x) * outside["scale"]),
        extra_key=lambda module, arguments: [outside["scale"], arguments["x"].shape[0]],
    )
    for scale in (1.0, 2.0, 1.0, 2.0, 1.0, 2.0):
        outside["scale"] = scale
        for i in range(2):
            pair(rows(i).to(machine.on))
    assert pair.replays == 8 and pair.stats["captures"] == 2


def test_a_global_is_frozen_without_extra_key(machine: Machine) -> None:
    outside = {"scale": 1.0}
    pair = machine.pair(Module(lambda m, x: m.linear(x) * outside["scale"]))
    for i in range(3):
        pair(rows(i).to(machine.on))
    outside["scale"] = 2.0
    assert not pair.compare(rows(1).to(machine.on))[0]  # the documented limit


@pytest.mark.parametrize("value", [torch.ones(1), object()])
def test_an_extra_key_without_a_value_is_eager_by_name(machine: Machine, value: Any) -> None:
    pair = machine.pair(Module(plain), extra_key=lambda module, arguments: value)
    for i in range(3):
        pair(rows(i).to(machine.on))
    (reason,) = pair.stats["eager"]
    assert reason.startswith("extra_key returned")


# ---- the gate, as numbers


class Took:
    """A timer that took so many milliseconds, once it is `done`."""

    def __init__(self, ms: float, done: bool = True) -> None:
        self.took, self.done = ms, done

    def ms(self) -> float | None:
        return self.took if self.done else None


def decide(replay: list[float], eager: list[float], min_gain: float = 0.01) -> tuple[Gate, int]:
    """Run a gate on timings; returns it and the calls that it took."""
    gate, replays, eagers = Gate(min_gain), iter(replay), iter(eager)
    for call in range(1, 20):
        if gate.slower() or gate.decided:
            return gate, call
        if gate.wants_eager():
            gate.eager.append(Took(next(eagers)))
        else:
            gate.replay.append(Took(next(replays)))
    raise AssertionError("undecided")


def test_a_clear_gain_is_decided_in_five_calls() -> None:
    gate, calls = decide([3.7] * 9, [26.0] * 9)
    assert calls == 5 and gate.text == "replay 3.7 ms vs eager 26 ms"


def test_a_close_call_is_measured_twice_and_decided_in_five() -> None:
    gate, calls = decide([173.9, 173.4, 173.4], [173.9, 174.2])
    assert calls == 5 and gate.text == "replay 173.4 ms vs eager 173.9 ms"


def test_a_call_that_ran_eagerly_before_decides_a_round_earlier() -> None:
    gate = Gate(0.01)
    gate.first_eager = False
    gate.replay, gate.eager = [Took(3.7), Took(3.8)], [Took(26.0)]
    assert gate.slower() == "" and gate.decided


def test_variants_do_different_work_and_are_not_timed(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        return m.linear(x) if x.sum() > 0 else x

    pair = machine.pair(Module(body), gate="measure")
    for i in range(20):
        pair(torch.full((2, 8), (-1.0) ** i, device=machine.on))
    assert all("vs eager" not in reason for reason in pair.stats["eager"])
    assert pair.replays >= 15


@pytest.mark.parametrize(
    ("replay", "eager", "min_gain", "wins"),
    [
        (100, 102, 0.01, True), (100, 100.5, 0.01, False), (100, 100.5, 0.0, True),
        (100, 130, 0.3, False), (100, 90, 0.0, False), (100, 150, 0.3, True),
    ],
)  # fmt: skip
def test_min_gain_is_what_a_replay_must_save(
    replay: float, eager: float, min_gain: float, wins: bool
) -> None:
    gate = Gate(min_gain)
    while not gate.decided:
        verdict = gate.slower()
        if gate.wants_eager():
            gate.eager.append(Took(eager))
        elif not gate.decided:
            gate.replay.append(Took(replay))
    assert (verdict == "") == wins


def test_nothing_waits_for_a_timing() -> None:
    gate = Gate(0.01)
    late = [Took(100, done=False), Took(5), Took(5)]
    gate.replay, gate.eager = late[:2], [late[2]]
    assert gate.slower() == "" and not gate.decided
    late[0].done = True
    assert gate.slower() == "" and not gate.decided  # close: once more
    gate.eager.append(Took(4))
    assert "replay 5 ms vs eager 4 ms" in gate.slower()


# ---- the key's context


@pytest.mark.parametrize("what", ["grad", "autocast cache", "tf32", "deterministic", "math sdp"])
def test_a_switch_that_selects_kernels_is_in_the_key(machine: Machine, what: str) -> None:
    switches = {
        "grad": (torch.is_grad_enabled, torch.set_grad_enabled),
        "autocast cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        "tf32": (
            lambda: torch.backends.cuda.matmul.fp32_precision,
            lambda to: setattr(torch.backends.cuda.matmul, "fp32_precision", to or "tf32"),
        ),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled,
            lambda on: torch.use_deterministic_algorithms(on, warn_only=on),
        ),
        "math sdp": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    }
    read, write = switches[what]
    pair, before = machine.pair(Module(plain)), read()
    for i in range(3):
        pair(rows(i).to(machine.on))
    try:
        write("tf32" if what == "tf32" else not before)
        pair(rows(3).to(machine.on))
    finally:
        write(before)
    pair(rows(4).to(machine.on))
    assert pair.stats["cold"] == 2 and pair.replays == 2


def test_a_switch_that_the_forward_leaves_behind_costs_no_second_cold_call(
    machine: Machine,
) -> None:
    """As the first attention on CUDA, which settles the order of torch's kernels for good."""

    def body(m: Any, x: Any) -> Any:
        torch.backends.cudnn.benchmark = True
        return m.linear(x) + 1

    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        pair = machine.pair(Module(body))
        for i in range(5):
            pair.graphed(rows(i).to(machine.on))
        assert pair.stats["cold"] == 1 and pair.replays == 3
        torch.backends.cudnn.benchmark = False
        pair(rows(5).to(machine.on))  # another key, as for every such switch
        pair(rows(6).to(machine.on))
        assert pair.stats["cold"] == 2 and pair.replays == 4
        assert len(pair.handle.explain().modules[0].buckets) == 2
    finally:
        torch.backends.cudnn.benchmark = before


def test_recordings_do_not_move_to_the_switch_that_a_cold_call_leaves_behind(
    machine: Machine,
) -> None:
    """A thread that has warmed nothing up makes a cold call of a bucket that is recorded."""

    def body(m: Any, x: Any) -> Any:
        h = m.linear(x)
        if bool(x[0, 0] > 0):
            return h * torch.full((8,), 1 / 3, device=x.device).to(torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        return h

    pair, x = machine.pair(Module(body)), rows(0).abs().to(machine.on)
    try:
        for _ in range(4):
            pair(x)
        thread = threading.Thread(target=torch.no_grad()(pair.graphed), args=(-x,))
        thread.start()
        thread.join()
        assert torch.get_default_dtype() == torch.float64
        assert pair.graphed(x).dtype == pair.eager(x).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


# ---- memory


def test_two_hundred_sizes_stay_right_within_a_few_recordings(machine: Machine) -> None:
    module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).requires_grad_(False)
    pair = machine.pair(module, max_graphs=8)
    sizes = random.Random(0)
    for _ in range(200):
        n = sizes.randint(1, 200)
        for _ in range(5):
            pair(rows(n, n).to(machine.on))
    runner = pair.handle.installs["Sequential"].runner
    assert sum(len(entry.tapes) for entry in runner.entries.values()) <= 8
    assert pair.replays >= 500 and pair.stats["eager"] == {}


def test_alternating_over_a_full_memory_is_eager_by_name(machine: Machine) -> None:
    pair = machine.pair(Module(plain), max_graphs=4)
    for i in range(300):
        pair(rows(i, 1 + i % 12).to(machine.on))
    stats = pair.stats
    (reason,) = stats["eager"]
    assert reason.startswith("thrashing: ")
    assert stats["captures"] < 75, "captures stop once they are worth nothing"
    before = pair.replays
    for i in range(200):  # a workload that fits again
        pair(rows(i, 30).to(machine.on))
    assert pair.replays - before >= 100


def test_long_runs_of_one_size_never_thrash(machine: Machine) -> None:
    pair = machine.pair(Module(plain), max_graphs=2)
    for i in range(30):
        for _ in range(10):
            pair(rows(i, 1 + i).to(machine.on))
    assert pair.stats["eager"] == {} and pair.replays == 240


def test_what_made_room_is_said(machine: Machine, caplog: Any) -> None:
    pair = machine.pair(Module(plain), max_graphs=2)
    for n in (1, 2, 3, 1):
        for i in range(5):
            pair(rows(i, n).to(machine.on))
    assert "made room for other recordings 1 times" in pair.handle.report()
    assert caplog.text.count("recordings make room for others") == 1


def test_the_report_says_what_was_disabled_and_what_matched_nothing(machine: Machine) -> None:
    pair = machine.pair(Module(plain), breaks=("*.attn",))
    for i in range(3):
        pair(rows(i).to(machine.on))
    assert "breaks pattern '*.attn' matches nothing" in pair.handle.report()
    pair.handle.disable()
    report = pair.handle.report()
    assert "! disabled" in report and "another hook" not in report


def test_the_report_counts_what_breaks_compare(machine: Machine) -> None:
    pair = machine.pair(Module(lambda m, x: m.linear(x)[x.sum(1) > -1e9]))
    for i in range(3):
        pair(rows(i).to(machine.on))
    assert "breaks 1, guards 1" in pair.handle.report()


def test_a_change_ends_the_thrashing(machine: Machine) -> None:
    pair = machine.pair(Module(plain), max_graphs=4)
    for i in range(300):
        pair(rows(i, 1 + i % 12).to(machine.on))
    pair.graphed.flag, pair.eager.flag = 1, 1  # as another adapter does
    before = pair.replays
    for i in range(20):
        pair(rows(i, 3).to(machine.on))
    assert pair.replays - before == 18


def test_a_failed_variant_gives_its_memory_back(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        if x.sum() > 0:
            return m.linear(x)
        fail_while_recording()
        return x

    pair = machine.pair(Module(body))
    for value in (1.0, 1.0, 1.0, -1.0):
        pair(torch.full((2, 8), value, device=machine.on))
    assert "only while recording" in next(iter(pair.stats["eager"]))
    assert pair.handle.installs["Module"].runner.pool.bytes == 0


@pytest.mark.parametrize("when", ["capture", "replay"])
def test_every_raised_failure_is_counted(machine: Machine, when: str) -> None:
    fail = []

    @eager_on_graph(pure=True)
    @torchs
    def marked(h: torch.Tensor) -> torch.Tensor:
        if fail:
            raise RuntimeError("no luck")
        return h * 2

    pair = machine.pair(Module(lambda m, x: marked(m.linear(x)) + 1), on_failure="raise")
    for i in range(1 if when == "capture" else 3):
        pair(rows(i).to(machine.on))
    fail.append(1)
    with pytest.raises(RuntimeError, match="no luck"):
        pair.graphed(rows(5).to(machine.on))
    fail.clear()
    for i in range(4):
        pair(rows(i).to(machine.on))
    assert any("no luck" in reason for reason in pair.stats["eager"])
    if when == "replay":
        assert pair.stats["cold"] == 2, "a broken recording goes"


# ---- other people's generators


def test_verification_leaves_a_generator_alone_that_the_forward_does_not_use(
    machine: Machine,
) -> None:
    elsewhere = []

    def draw(h: torch.Tensor) -> torch.Tensor:
        elsewhere.append(torch.rand(1).item())  # stands for another thread
        return h

    pair = machine.pair(Module(plain), verify="always")
    pair(rows(0).to(machine.on))
    pair(rows(1).to(machine.on))
    runner = pair.handle.installs["Module"].runner
    original = runner.target.original
    runner.target.original = lambda *args, **kwargs: draw(original(*args, **kwargs))
    for i in range(20):
        pair.graphed(rows(i).to(machine.on))
    assert len(elsewhere) == 20 == len(set(elsewhere))


def test_another_threads_draws_do_not_block_a_key(machine: Machine) -> None:
    module = Module(lambda m, x: m.linear(x))
    calls = []

    def body(m: Any, x: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            random.random()  # stands for another thread, once
        return m.linear(x)

    module.body = body
    module.to(machine.on).eval()
    handle = dit_graph.enable(module, device=machine.device, **PLAIN)
    for i in range(8):
        module(rows(i).to(machine.on))
    assert handle.stats()["replays"] == 5 and handle.stats()["eager"] == {}


# ---- the end of a device


def test_eager_stays_as_it_was_when_a_capture_is_interrupted(machine: Machine) -> None:
    """Control-C inside a recording: the error comes through, the next call records."""
    stop = []

    def body(m: Any, x: Any) -> Any:
        h = m.linear(x)
        if stop and dit_graph.breaks.capturing():
            raise KeyboardInterrupt
        return h

    pair = machine.pair(Module(body))
    pair(rows(0).to(machine.on))
    stop.append(1)
    with pytest.raises(KeyboardInterrupt):
        pair.graphed(rows(1).to(machine.on))
    stop.clear()
    expected = copy.deepcopy(pair.eager)(rows(2).to(machine.on))
    assert torch.equal(pair.graphed(rows(2).to(machine.on)), expected)
    for i in range(3):
        pair.graphed(rows(i).to(machine.on))
    assert pair.replays == 3
