"""What the caller has around a call, and what a capture has around a forward."""

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import dit_graph
from dit_graph import eager_on_graph
from tests.pair import Machine
from tests.toys import Module, Unseen, rows, run


class Doubled(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        return out * 2 if func is torch.nn.functional.linear else out


def test_modes_around_a_call_are_eager_by_name(machine: Machine) -> None:
    pair = run(machine, lambda m, x: m.linear(x), [rows(i) for i in range(4)])
    x, counted = rows(5).to(machine.on), []
    with Doubled():
        pair(x)
    for module in (pair.graphed, pair.eager):
        with FlopCounterMode(display=False) as counter:
            module(x)
        counted.append(counter.get_total_flops())
    assert counted[0] == counted[1] > 0
    several = torch.stack([x, x + 1])
    assert torch.equal(torch.vmap(pair.graphed)(several), torch.vmap(pair.eager)(several))
    with torch.device(machine.on):  # is in the key
        for _ in range(3):
            pair(x)
    assert sorted(pair.stats["eager"]) == [
        "Doubled, a torch function mode, would see no operation",
        "_FlopCounterMode, a torch dispatch mode, would see no operation",
        "inside a functorch transform, such as vmap",
    ]
    assert pair.replays == 3


class DoubledBelow(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        return out * 2 if func is torch.ops.aten.addmm.default else out


@pytest.mark.parametrize(
    "around", ["autocast", "sdpa", "function mode", "dispatch mode", "gradients"]
)
@pytest.mark.parametrize("how", ["marked", "pattern", "function"])
def test_a_marked_break_under_the_forwards_own_modes(
    machine: Machine, around: str, how: str
) -> None:
    @eager_on_graph()
    def marked(m: Any, h: Any) -> Any:
        return m.inner(h)

    kind = torch.device(machine.on).type
    modes = {
        "autocast": lambda: torch.autocast(kind, torch.bfloat16),
        "sdpa": lambda: sdpa_kernel(SDPBackend.MATH),
        "function mode": Doubled,
        "dispatch mode": DoubledBelow,
        "gradients": torch.enable_grad,
    }

    def body(m: Any, x: Any) -> Any:
        with modes[around]():
            h = marked(m, x) if how == "marked" else m.inner(x)
        return m.linear(h.float())

    module = Module(body)
    module.inner = nn.Linear(8, 8).requires_grad_(False)
    patterns = {"marked": (), "pattern": ("inner",), "function": ("linear",)}[how]
    pair = machine.pair(module, breaks=patterns)
    with torch.no_grad():
        for i in range(5):
            pair(rows(i).to(machine.on))
    if (how, around) == ("function", "function mode"):  # which calls the function itself
        assert pair.replays == 3
        return
    (reason,) = pair.stats["eager"]
    assert "which a replay of this break would not have" in reason, reason
    assert pair.replays == 0


def test_no_grad_around_a_marked_break(machine: Machine) -> None:
    @eager_on_graph()
    def marked(m: Any, h: Any) -> Any:
        return m.linear(h)

    def body(m: Any, x: Any) -> Any:
        with torch.no_grad():
            return marked(m, x) + 1

    pair = machine.pair(Module(body))
    with torch.enable_grad():
        for i in range(5):
            pair(rows(i).to(machine.on))
    assert pair.replays == 3, pair.stats


@pytest.mark.parametrize("kind", ["layer", "encoder", "attention"])
def test_layers_with_a_fused_path_keep_it(machine: Machine, kind: str) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    module = {
        "layer": layer,
        "encoder": nn.TransformerEncoder(layer, 2),
        "attention": Module(lambda m, x: m.inner(x, x, x, need_weights=False)[0]),
    }[kind]
    module.inner = nn.MultiheadAttention(32, 4, batch_first=True)
    pair = machine.pair(module.requires_grad_(False))
    for i in range(5):
        pair(torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(i)).to(machine.on))
    assert pair.replays == 3, pair.stats


def test_autocast_as_a_decorator_caches_nothing(machine: Machine) -> None:
    kind = torch.device(machine.on).type

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)  # a weight that wants gradients is what autocast caches

        @torch.autocast(kind, dtype=torch.bfloat16)
        def forward(self, x: Any) -> Any:
            return self.linear(x) + self.linear(x + 1)

    pair = machine.pair(Net())
    with torch.no_grad(), torch.autocast(kind, dtype=torch.bfloat16):
        for i in range(6):
            if i == 4:
                torch.clear_autocast_cache()
                for module in (pair.graphed, pair.eager):
                    module.linear.weight.mul_(2)
            pair(rows(i).to(machine.on))
    assert pair.replays == 4, pair.stats


def test_nothing_is_collected_while_a_segment_is_open(machine: Machine) -> None:
    """A collection may destroy old graphs, which the device forbids inside a capture."""

    class Garbage:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            aside.list.append(dit_graph.breaks.capturing() and open_segments() > 0)

    aside = Unseen()

    def open_segments() -> int:
        capture: Any = dit_graph.breaks.local.capture
        return int(capture is not None and capture._segment is not None)

    half = eager_on_graph(pure=True)(lambda h: h * 2)

    def body(m: Any, x: Any) -> Any:
        h = m.linear(x)
        for _ in range(50):
            Garbage()
            h = h + 1
        return half(h) + 1

    threshold = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        assert run(machine, body, [rows(i) for i in range(4)]).replays == 2
    finally:
        gc.set_threshold(*threshold)
    assert aside.list and not any(aside.list)


def test_collection_stays_off_until_the_last_segment_is_closed(
    machine: Machine, monkeypatch: Any
) -> None:
    pair = machine.pair(Module(lambda m, x: m.linear(x)))
    pair(rows(0).to(machine.on))
    segment = type(pair.handle.pool_on(torch.device(machine.on)).device.segment(None, lambda t: t))
    real, states = segment.end, []
    monkeypatch.setattr(segment, "end", lambda self: (states.append(gc.isenabled()), real(self)))
    pair(rows(1).to(machine.on))
    assert states == [False] and gc.isenabled()
