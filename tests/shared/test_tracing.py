"""To exporters, tracers and counters of torch an enabled module is a plain one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from tests.families import FAMILIES
from tests.pair import Machine
from tests.toys import rows


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu() + x


def flops(module: Any, x: torch.Tensor) -> Any:
    with FlopCounterMode(display=False) as counter:
        module(x)
    return counter.get_total_flops()


SEEN: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "export": lambda m, x: torch.export.export(m, (x,)).module()(x),
    "strict export": lambda m, x: torch.export.export(m, (x,), strict=True).module()(x),
    "draft export": lambda m, x: torch.export.draft_export(m, (x,)).module()(x),
    "jit.trace": lambda m, x: torch.jit.trace(m, (x,), check_trace=False)(x + 1),
    "jit.trace_module": lambda m, x: torch.jit.trace_module(m, {"forward": (x,)})(x + 1),
    "traced code": lambda m, x: torch.jit.trace(m, (x,), check_trace=False).code,
    "make_fx": lambda m, x: make_fx(m)(x).code,
    "symbolic_trace": lambda m, x: torch.fx.symbolic_trace(m).code,
    "compile": lambda m, x: torch.compile(m, backend="eager", fullgraph=True)(x),
    "vmap": lambda m, x: torch.func.vmap(m)(x),
    "flops": flops,
    "code": lambda m, x: m.forward.__code__ is Net.forward.__code__,
}


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("name", SEEN)
def test_seen_as_a_plain_module(machine: Machine, name: str, hooked: bool) -> None:
    pair = machine.pair(Net())
    if hooked:
        for module in (pair.graphed, pair.eager):
            module.register_forward_hook(lambda module, args, out: out * 2)
    x = rows(0).to(machine.on)
    for after in (0, 3):
        for i in range(after):
            pair(rows(i).to(machine.on))
        mine, its = (SEEN[name](module, x) for module in (pair.graphed, pair.eager))
        same = torch.equal(mine, its) if isinstance(its, torch.Tensor) else mine == its
        assert same
    for i in range(3):
        pair(rows(i).to(machine.on))
    assert pair.replays >= 3, "calls in between are replayed as before"


@pytest.mark.parametrize("strict", [False, True])
def test_a_transformer_exports(machine: Machine, strict: bool) -> None:
    family = FAMILIES["flux"]
    pair = machine.pair(family.build())
    inputs = machine.to(family.inputs(0, 6))
    exported = torch.export.export(pair.graphed, (), inputs, strict=strict)
    (mine,), (its,) = exported.module()(**inputs), pair.eager(**inputs)
    torch.testing.assert_close(mine, its)


def test_a_profiler_shows_replays(machine: Machine) -> None:
    pair = machine.pair(Net())
    for i in range(3):
        pair(rows(i).to(machine.on))
    with torch.profiler.profile() as profile:
        pair(rows(4).to(machine.on))
    if machine.device == "cuda":
        assert any("cudaGraphLaunch" in event.key for event in profile.key_averages())
    assert pair.replays == 2 and pair.stats["eager"] == {}
