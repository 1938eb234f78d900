"""Few recordings for many sizes, and what is counted and said of them."""

import random
from typing import Any

import pytest
import torch
from torch import nn

from dit_graph import eager_on_graph
from tests.pair import Machine, torchs
from tests.toys import Module, fail_while_recording, plain, rows


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
