"""Compiled code of which a new variant is needed, inside a recording or after it."""

import threading
from typing import Any

import pytest
import torch
from torch import nn

import dit_graph
from tests.pair import Machine
from tests.shared.compiled.blocks import Block, compiled_pair, refuses
from tests.toys import Module, rows


class Branching(Block):
    def forward(self, x: Any, large: bool) -> Any:
        return self.linear(x) * (2 if large else 3)


def test_a_new_variant_is_compiled_in_the_eager_answer(machine: Machine) -> None:
    """No cold call comes before it; the recordings that are there stay."""
    module = Module(lambda m, x: m.blocks[0](x, bool(x[0, 0] > 0)) + 1)
    module.blocks = nn.ModuleList([Branching()])
    pair = compiled_pair(machine, module, refuses)
    for sign in (1, 1, 1, 1, -1, -1, -1, 1, 1, 1, -1, 1):
        pair((rows(0).abs() * sign).to(machine.on))
    ((reason, count),) = pair.stats["eager"].items()
    assert count == 1 and pair.replays == 8 and pair.stats["captures"] == 2
    # dynamo's wrapper is looked through
    assert reason.startswith("capture failed: RuntimeError('operation not permitted")


class BranchingTwice(Branching):
    def forward(self, x: Any, large: bool, even: bool) -> Any:
        return super().forward(x, large) + (1 if even else 2)


def test_many_variants_are_compiled_in_eager_answers(machine: Machine) -> None:
    """Each comes to a recording, so that none of them is one failure too many."""
    module = Module(lambda m, x: m.blocks[0](x, bool(x[0, 0] > 0), bool(x[0, 1] > 0)))
    module.blocks = nn.ModuleList([BranchingTwice()])
    pair = compiled_pair(machine, module, refuses)
    signs = [torch.tensor([[a, b] + [1.0] * 6]) for a in (1.0, -1.0) for b in (1.0, -1.0)]
    for sign in [signs[0], signs[0], *(s for s in signs for _ in range(3)), *signs]:
        pair((rows(0).abs() * sign).to(machine.on))
    assert pair.stats["captures"] == 4 and sum(pair.stats["eager"].values()) == 3
    assert pair.replays == 3 + 3 * 1 + 4


def strict_pair(machine: Machine) -> tuple[Any, torch.Tensor]:
    """Recorded for the rows that come with it; no eager answer compiles the others' variant."""
    module = Module(lambda m, x: m.blocks[0](x, bool(x[0, 0] > 0)) + 1)
    module.blocks = nn.ModuleList([Branching()])
    pair = compiled_pair(machine, module, refuses, strict=True)
    x = rows(0).abs().to(machine.on)
    for _ in range(3):
        pair(x)
    return pair, x


def test_under_strict_a_variant_that_cannot_be_had_leaves_the_others(machine: Machine) -> None:
    pair, x = strict_pair(machine)
    for _ in range(5):
        with pytest.raises(dit_graph.NotReplayed, match="not permitted when stream is capturing"):
            pair.graphed(-x)
    for _ in range(2):
        pair(x)
    assert pair.replays == 3 and len(pair.stats["eager"]) == 1


def test_a_new_recording_takes_variants_again(machine: Machine) -> None:
    """It gave up on a variant; then the recordings made room for others."""
    pair, x = strict_pair(machine)
    for _ in range(4):
        with pytest.raises(dit_graph.NotReplayed):
            pair.graphed(-x)
    (entry,) = pair.handle.installs["Module"].runner.entries.values()
    assert entry.gave_up
    entry.retire()
    pair.graphed.blocks[0](-x, False)  # compiles what was missing
    for sign in (1, 1, 1, -1, -1):
        pair(x * sign)
    assert pair.stats["captures"] == 3 and len(entry.tapes) == 2


def test_a_failed_compilation_takes_no_recording_with_it(machine: Machine) -> None:
    """What its traceback holds would look like memory of the recording that outlives the call."""
    fails, failed = [], []

    def lowering(args: Any) -> None:  # what its frame holds is in the cause's traceback alone
        raise ValueError(f"the cause, {args[0].shape}")

    def backend(graph: Any, example: Any) -> Any:
        def compiled(*args: Any) -> Any:
            if not fails or not dit_graph.breaks.capturing():
                return graph.forward(*args)
            error: Any = RuntimeError("not permitted when stream is capturing")
            try:
                lowering(args)
            except ValueError as cause:
                error.inner_exception = cause
            failed.append(1)
            raise error

        return compiled

    module = Module(lambda m, x: m.blocks[0](m.linear(x)) + 1)
    module.blocks = nn.ModuleList([Block()])
    pair = compiled_pair(machine, module, backend)
    for i in range(3):
        pair(rows(i).to(machine.on))
    fails.append(True)
    for i in range(3):
        pair(rows(i, 3).to(machine.on))
    fails.clear()
    for i in range(3):
        pair(rows(i).to(machine.on))
    assert pair.replays == 1 + 3 and len(failed) == 1
    assert "the cause" in str(pair.stats["eager"])


def test_calls_of_a_thread_count_while_another_compiles(machine: Machine) -> None:
    """Their way leads through the recordings, too."""
    started, done = threading.Event(), threading.Event()

    def slow(graph: Any, example: Any) -> Any:
        started.set()
        assert done.wait(60)
        return graph.forward

    pair = machine.pair(Module(lambda m, x: m.linear(x).sin()))
    other = Block().to(machine.on)
    other.compile(fullgraph=True, backend=slow)
    thread = threading.Thread(target=lambda: other(rows(0).to(machine.on)))
    thread.start()
    try:
        assert started.wait(60)
        for i in range(5):
            pair(rows(i).to(machine.on))
    finally:
        done.set()
        thread.join()
    assert pair.stats["calls"] == 5 and pair.replays == 3
