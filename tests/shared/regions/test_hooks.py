"""Regions lie below whatever stands around a block's forward, in any order of coming and going."""

import copy
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook as AccelerateHook
from accelerate.hooks import add_hook_to_module, remove_hook_from_module
from diffusers.hooks import HookRegistry, ModelHook
from torch import nn

import dit_graph
from dit_graph.links import innermost
from dit_graph.slot import Slot
from tests.pair import PLAIN, Machine, same_tree
from tests.toys import rows


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.ff = nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.ff(self.norm(x))


class Stack(nn.Module):
    """Blocks around which its Python counts, so that it can never be recorded as a whole."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for block in self.blocks:
            x = block(x)
        return x * self.calls


class Shift(ModelHook):
    """diffusers' kind, before and after the forward, or in its place."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        return (args[0] + self.by, *args[1:]), kwargs

    def post_forward(self, module: Any, output: Any) -> Any:
        return output * 1.5


class EveryOther(ModelHook):
    """Takes the forward's place, and leaves it out at every second call."""

    calls = 0

    def new_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls % 2:
            return self.fn_ref.original_forward(*args, **kwargs)
        return args[0] + 1


class Theirs(AccelerateHook):
    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        return (args[0] * 0.5, *args[1:]), kwargs

    def post_forward(self, module: Any, output: Any) -> Any:
        return output - 0.25


def diffusers_on(block: nn.Module) -> None:
    HookRegistry.check_if_exists_or_initialize(block).register_hook(Shift(0.1), "shift")


def diffusers_off(block: nn.Module) -> None:
    HookRegistry.check_if_exists_or_initialize(block).remove_hook("shift")


def other_on(block: nn.Module) -> None:
    HookRegistry.check_if_exists_or_initialize(block).register_hook(EveryOther(), "other")


def accelerate_on(block: nn.Module) -> None:
    add_hook_to_module(block, Theirs())


def torch_on(block: nn.Module) -> None:
    block.register_forward_hook(lambda module, args, out: out + 0.5)


HOOKS: dict[str, Callable[[nn.Module], None]] = {
    "diffusers": diffusers_on, "in its place": other_on, "accelerate": accelerate_on,
    "torch": torch_on,
}  # fmt: skip
OFF: dict[str, Callable[[nn.Module], None]] = {
    "diffusers": diffusers_off, "accelerate": remove_hook_from_module,
}  # fmt: skip


class Twins:
    def __init__(self, machine: Machine, module: nn.Module | None = None, **options: Any) -> None:
        self.machine = machine
        self.ours = (Stack() if module is None else module).to(machine.on).eval()
        self.plain = copy.deepcopy(self.ours)
        self.options = {"device": machine.device, **PLAIN, **options}
        self.handle: Any = None
        self.seed = 0

    def enable(self) -> None:
        self.handle = dit_graph.enable(self.ours, **self.options)

    def both(self, change: Callable[[nn.Module], None], *which: int) -> None:
        for module in (self.plain, self.ours):
            for i in which:
                change(module.blocks[i])

    def call(self, times: int = 5) -> None:
        for _ in range(times):
            self.seed += 1
            x = rows(self.seed).to(self.machine.on)
            x = x[:, :1].expand(-1, 8).contiguous()
            assert same_tree(self.ours(x.clone()), self.plain(x.clone())), self.seed

    def regions(self) -> dict[str, int]:
        return {name: n for name, n in self.handle.stats()["regions"].items() if name != "eager"}


@pytest.mark.parametrize("order", itertools.permutations(["enable", *HOOKS], 3), ids="-".join)
def test_orders(order: tuple[str, ...], machine: Machine) -> None:
    twins = Twins(machine)
    for what in order:
        if what == "enable":
            twins.enable()
            twins.call()
        else:
            twins.both(HOOKS[what], 0, 2)
        if twins.handle is not None:
            twins.call()
    if twins.handle is None:
        twins.enable()
    twins.call(8)
    before = twins.regions()
    twins.call()
    after = twins.regions()
    assert after["replays"] - before["replays"] == after["calls"] - before["calls"] > 0
    for what in filter(OFF.get, reversed(order)):  # the other way round the libraries fail too
        twins.both(OFF[what], 0, 2)
        twins.call()
    twins.handle.disable()
    twins.call()
    for block in twins.ours.blocks:
        space, key = innermost(block)
        assert not isinstance(space.get(key), Slot)


def test_what_a_hook_keeps_stays(machine: Machine) -> None:
    twins, kept = Twins(machine), ([], [])
    for module, mine in zip((twins.plain, twins.ours), kept):
        for block in module.blocks:
            block.register_forward_hook(lambda m, a, out, mine=mine: mine.append(out))
    twins.enable()
    twins.call(9)
    for expected, result in zip(*kept):
        assert torch.equal(result, expected)


def test_features_are_taken_from_inside_and_the_rest_replays(machine: Machine) -> None:
    """A hook on a layer inside cuts its block; the others are whole."""
    twins, kept = Twins(machine), ([], [])
    for module, mine in zip((twins.plain, twins.ours), kept):
        layer = module.blocks[1].ff[0]
        layer.register_forward_hook(lambda m, a, out, mine=mine: mine.append(out.clone()))
    twins.enable()
    twins.call(9)
    assert all(map(torch.equal, *kept))
    names = [module.name for module in twins.handle.explain().modules[0].regions]
    assert names == ["blocks.0 to blocks.3"]
    stats = twins.handle.stats()
    assert stats["regions"]["replays"] >= 3 * 4 and not stats["regions"]["eager"]


def test_a_block_that_keeps_what_it_sees_is_eager_alone(machine: Machine) -> None:
    class Store(Block):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            self.seen = super().forward(x, scale)
            return self.seen

    stack = Stack()
    for name, child in Store().named_children():
        assert hasattr(stack.blocks[1], name), child
    stack.blocks[1].__class__ = Store
    stack.blocks = nn.ModuleList(stack.blocks)
    twins = Twins(machine, stack)
    for block in (*twins.plain.blocks, *twins.ours.blocks):
        block.__class__ = Store  # of one class, as lists of blocks are
        block.keeps = False
    twins.enable()
    twins.call(9)
    for a, b in zip(twins.plain.blocks, twins.ours.blocks):
        assert torch.equal(a.seen, b.seen)


def test_two_threads(machine: Machine) -> None:
    class Adds(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            for block in self.blocks:
                x = block(x)
            return x

    twins = Twins(machine, Adds())
    twins.enable()
    twins.call(6)
    wrong: list[int] = []

    def draw(seed: int) -> None:
        with torch.no_grad():
            for i in range(20):
                x = torch.full((2, 8), float(seed + i), device=machine.on)
                if not torch.equal(twins.ours(x), twins.plain(x)):
                    wrong.append(seed + i)

    threads = [threading.Thread(target=draw, args=(100 * i,)) for i in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
