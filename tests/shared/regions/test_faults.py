"""What goes wrong in one region stays there; how regions count, and where they end."""

import copy
import gc
import json
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import dit_graph
from dit_graph.memory.pool import Pool
from tests.pair import Machine
from tests.shared.regions.test_hooks import Block, Stack, Twins, diffusers_on
from tests.toys import Unseen, rows


def regions_of(twins: Twins) -> list[Any]:
    (install,) = twins.handle.installs.values()
    return list(install.regions.now)


class Odd(Block):
    """Does what its list says; the plain twin has a list of its own."""

    kind = ""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Any = None

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        out = super().forward(x, scale)
        if self.kind == "keeps":
            self.seen = out
        if self.kind == "address" and dit_graph.breaks.capturing():
            x.data_ptr()
        if self.kind == "other bits":
            return out + float(dit_graph.breaks.capturing())
        return out


def stack_with(kind: str) -> Stack:
    stack = Stack()
    stack.blocks = nn.ModuleList(Odd() for _ in range(4))
    stack.blocks[1].kind = kind
    return stack


@pytest.mark.parametrize("kind", ["keeps", "address", "other bits"])
def test_a_fault_in_one_region_leaves_the_others(kind: str, machine: Machine) -> None:
    whole = "auto" if kind != "other bits" else "blocks"  # it writes state: it is not compared
    twins = Twins(machine, stack_with(kind), verify="first", regions=whole)
    twins.enable()
    twins.call(10)
    odd = regions_of(twins)[1]
    others = [region for region in regions_of(twins) if region is not odd]
    for region in others:
        counts = dit_graph.runner.tally.totals([region.tally])
        assert counts["captures"] == 1 and not counts["eager"], counts
    counts = dit_graph.runner.tally.totals([odd.tally])
    assert counts["eager"] and counts["replays"] <= 1
    report = twins.handle.report()
    why = {"keeps": "writes Python state", "address": "reads an address", "other bits": "differs"}
    assert why[kind] in report and odd.path == "blocks.1"
    if kind == "keeps":
        assert torch.equal(twins.ours.blocks[1].seen, twins.plain.blocks[1].seen)


def test_strict_raises_for_a_region_that_is_eager(machine: Machine) -> None:
    twins = Twins(machine, stack_with("address"), strict=True)
    twins.enable()
    with pytest.raises(dit_graph.NotReplayed, match=r"Stack\.blocks\.1: .*address"):
        twins.call(10)


def test_regions_of_a_signature_count_as_one(machine: Machine) -> None:
    twins = Twins(machine, Stack(depth=6), max_graphs=2)
    twins.enable()
    twins.call(8)
    regions = twins.regions()
    assert (regions["captures"], regions["replays"]) == (6, 6 * 4)
    pool = regions_of(twins)[0].runner.pool
    (generation,) = pool._generations
    assert len(generation.groups) == 1 and len(generation.held) == 6
    staged = {id(entry.static) for entry, _ in generation.held}
    assert len(staged) == 1  # one memory for the arguments of all


def test_memory_that_runs_out_takes_the_least_recently_used(machine: Machine) -> None:
    pair = machine.pair(Block())
    (install,) = pair.handle.installs.values()
    pool: Pool = install.runner.pool
    first, second = pool.generation(alone=True), pool.generation(alone=True)
    pool.tick()
    pool.touch(first)
    assert pool.make_room() and pool._generations == [first]
    assert pool.make_room() and not pool.make_room() and second not in pool._generations


def test_breaks_know_regions(machine: Machine) -> None:
    twins = Twins(machine, breaks=("blocks.1", "*.2.ff"))
    twins.enable()
    twins.call(8)
    names = [region.path for region in regions_of(twins)]
    assert names == ["blocks.0", "blocks.2", "blocks.3"]
    explained = twins.handle.explain()
    steps = [
        step for region in explained.modules[0].regions for signature in region.signatures
        for variant in signature.variants for step in variant.steps
    ]  # fmt: skip
    assert twins.handle.stats()["regions"]["replays"] >= 3 * 4
    assert json.loads(json.dumps(explained.to_dict())) == explained.to_dict()
    marked = [tape for region in regions_of(twins)
              for entry in region.runner.entries.values() for tape in entry.tapes
              for tape in tape.breaks()]  # fmt: skip
    assert [step.module for step in marked] == ["blocks.2.ff"] and steps
    assert "regions blocks.0 to blocks.3" in twins.handle.report()


def test_extra_key_is_in_the_keys_of_regions(machine: Machine) -> None:
    class Scaled(Block):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return super().forward(x, scale) * SCALE.list[0]

    stack = Stack()
    stack.blocks = nn.ModuleList(Scaled() for _ in range(2))
    SCALE.list[:] = [1.0]
    twins = Twins(machine, stack, extra_key=lambda module, arguments: SCALE.list[0])
    twins.enable()
    for value in (1.0, 2.0, 1.0, 2.0):
        SCALE.list[:] = [value]
        twins.call(4)
    assert twins.regions()["captures"] == 4  # two blocks, two values


SCALE = Unseen()


def test_choosing_them(machine: Machine) -> None:
    with pytest.raises(dit_graph.ConfigError, match="regions must be one of auto, off, blocks"):
        machine.pair(Block(), regions="all")
    with pytest.raises(dit_graph.ConfigError, match="a list of blocks of one class, and Block"):
        machine.pair(Block(), regions="blocks")
    off = Twins(machine, regions="off")
    off.enable()
    off.call(6)
    stats = off.handle.stats()
    assert "regions" not in stats and not stats["replays"]
    chosen = Twins(machine, regions="blocks")
    chosen.enable()
    chosen.call(6)
    assert chosen.regions()["captures"] == 4 and not chosen.handle.stats()["eager"]


def test_a_patched_forward_that_keeps_a_residual(machine: Machine) -> None:
    """As TeaCache does it: the class's forward is written anew, with a memory of its own."""

    def patch(module: Any) -> None:
        def forward(x: torch.Tensor) -> torch.Tensor:
            module.calls += 1
            if module.calls % 3 == 0:
                return x + module.residual
            out = x
            for block in module.blocks:
                out = block(out)
            module.residual = out - x
            return out

        module.forward = forward

    class Steady(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    twins = Twins(machine, Steady())
    for module in (twins.ours, twins.plain):
        patch(module)
    twins.enable()
    twins.call(12)
    stats = twins.handle.stats()
    assert stats["regions"]["replays"] >= 4 * 4 and not stats["regions"]["eager"]
    twins.handle.disable()
    for module in (twins.ours, twins.plain):
        del module.forward
    twins.enable()
    twins.call(5)
    assert twins.handle.stats()["captures"] == 1 and "regions" not in twins.handle.stats()


@pytest.mark.parametrize("hooks", [True, False])
def test_compiled_blocks_keep_their_kernels(hooks: bool, machine: Machine) -> None:
    runs = []

    def backend(graph: Any, example: Any) -> Any:
        assert not dit_graph.breaks.capturing()

        def compiled(*args: Any) -> Any:
            runs.append(len(args))
            return [out * 2 for out in graph.forward(*args)]  # other numbers than eager's

        return compiled

    torch.compiler.reset()
    twins = Twins(machine)
    for module in (twins.plain, twins.ours):
        for block in module.blocks:
            block.compile(backend=backend)
    if hooks:
        twins.both(diffusers_on, 0, 2)
    twins.enable()
    twins.call(8)
    if not hooks:
        twins.both(diffusers_on, 1)
        twins.call(6)
    regions = twins.handle.stats()["regions"]
    assert regions["replays"] >= 4 * 4 and not regions["eager"] and runs
    twins.handle.disable()
    twins.call(2)


def test_copies_are_plain(machine: Machine) -> None:
    twins = Twins(machine)
    twins.both(diffusers_on, 1)
    twins.enable()
    twins.call(6)
    x = rows(3)[:, :1].expand(-1, 8).contiguous().to(machine.on)
    twin = copy.deepcopy(twins.ours)
    assert torch.equal(twin(x), copy.deepcopy(twins.plain)(x))
    for child in twin.blocks[0].modules():
        assert "forward" not in child.__dict__
    assert twins.handle.stats()["regions"]["replays"]
    plain = Twins(machine)
    plain.enable()
    plain.call(6)
    state = pickle.loads(pickle.dumps(plain.ours.blocks[0].state_dict()))
    assert state.keys() == plain.plain.blocks[0].state_dict().keys()


def test_a_block_that_is_replaced_goes(machine: Machine) -> None:
    twins = Twins(machine)
    twins.enable()
    twins.call(6)
    old = weakref.ref(twins.ours.blocks[2])
    before = twins.regions()["calls"]
    for module in (twins.plain, twins.ours):
        torch.manual_seed(3)
        module.blocks[2] = Block().to(machine.on)
    (install,) = twins.handle.installs.values()
    install.regions.refresh()  # as a picture begins
    twins.call(6)
    gc.collect()
    assert old() is None
    assert twins.regions()["calls"] == before + 6 * 4
