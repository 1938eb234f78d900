"""Random numbers, and state of the module or of others that a call reads or changes."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dit_graph
from dit_graph import eager_on_graph
from tests.pair import PLAIN, Machine
from tests.toys import Module, rows, run


def test_a_break_that_draws_between_two_segments(machine: Machine) -> None:
    draw = eager_on_graph(lambda h: h + torch.randn_like(h))

    def body(m: Any, x: Any) -> Any:
        h = m.linear(x) + torch.rand_like(x)
        return draw(h) * torch.rand_like(h)

    assert run(machine, body, [rows(i) for i in range(6)]).replays == 4


def test_a_callers_generator_is_eager_by_name(machine: Machine) -> None:
    module = Module(lambda m, x: x + torch.randn(x.shape, generator=m.generator, device=x.device))
    module.to(machine.on).generator = torch.Generator(machine.on).manual_seed(3)
    handle = dit_graph.enable(module, device=machine.device, **PLAIN)
    results = [module(rows(0).to(machine.on)) for _ in range(4)]
    again = torch.Generator(machine.on).manual_seed(3)
    for result in results:
        noise = torch.randn(2, 8, generator=again, device=machine.on)
        assert torch.equal(result, rows(0).to(machine.on) + noise)
    assert "a generator of the caller's" in next(iter(handle.stats()["eager"]))


def test_a_counter_in_python_is_eager_by_name(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        m.steps += 1
        return m.linear(x) * m.steps

    pair = machine.pair(Module(body, steps=0))
    for i in range(6):
        pair(rows(i).to(machine.on))
    assert list(pair.stats["eager"]) == ["the forward writes Python state: steps"]


def test_a_tensor_kept_in_python_is_eager_by_name(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        h = m.linear(x) + (0 if m.last is None else m.last)
        m.last = h
        return h

    pair = machine.pair(Module(body, last=None))
    for i in range(6):
        pair(rows(i).to(machine.on))
    assert list(pair.stats["eager"]) == ["the forward writes Python state: last"]


def test_a_memo_table_settles(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        if x.shape[0] not in m.memo:
            m.memo[x.shape[0]] = torch.arange(x.shape[0], device=x.device).float()[:, None] * 2
        return m.linear(x) + m.memo[x.shape[0]]

    pair = machine.pair(Module(body, memo={}))
    for i in range(12):
        pair(rows(i, 1 + i % 2).to(machine.on))
    assert pair.replays >= 6 and pair.stats["eager"] == {}


def test_a_memo_first_made_under_capture_stays_right(machine: Machine) -> None:
    memo: dict[str, torch.Tensor] = {}

    def body(m: Any, x: Any) -> Any:
        if dit_graph.breaks.capturing() and "table" not in memo:
            memo["table"] = torch.full((8,), 3.0, device=x.device)
        return m.linear(x) + memo.get("table", 3.0)

    module = Module(body).to(machine.on)
    expected = copy.deepcopy(module.linear)
    handle = dit_graph.enable(module, device=machine.device, **PLAIN)
    for i in range(8):
        x = rows(i).to(machine.on)
        assert torch.equal(module(x), expected(x) + 3.0)
    assert torch.equal(memo["table"], torch.full((8,), 3.0, device=machine.on))
    assert handle.stats()["replays"] >= 3


def test_changed_weights_and_attributes_are_seen(machine: Machine) -> None:
    pair = machine.pair(Module(lambda m, x: m.linear(x) * m.scale, scale=1.0))

    def both(change: Any) -> None:
        for m in (pair.graphed, pair.eager):
            change(m)
        for i in range(4):
            pair(rows(i).to(machine.on))

    both(lambda m: None)
    both(lambda m: m.linear.weight.mul_(2))  # in place: no new recording
    assert pair.stats["captures"] == 1
    both(lambda m: setattr(m, "scale", 3.0))
    both(lambda m: m.double().float())
    both(lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}, assign=True))
    both(lambda m: setattr(m.linear, "weight", nn.Parameter(m.linear.weight * 2, False)))
    assert pair.stats["captures"] == 5 and pair.replays == 14, pair.handle.report()


def test_gradients_are_eager_by_name(machine: Machine) -> None:
    pair = machine.pair(Module(lambda m, x: m.linear(x)))
    with torch.enable_grad():
        for _ in range(3):
            x = rows(0).to(machine.on).requires_grad_()
            pair.graphed(x).sum().backward()
            assert x.grad is not None
    assert pair.stats["eager"] == {"gradients are needed; call it under torch.no_grad()": 3}


def test_a_forward_hook_on_a_block_is_eager_by_name(machine: Machine) -> None:
    pair = machine.pair(Module(lambda m, x: m.linear(x)))
    for i in range(4):
        pair(rows(i).to(machine.on))
    seen: list[int] = []
    hook = pair.graphed.linear.register_forward_hook(lambda *a: seen.append(1))
    for i in range(3):
        pair(rows(i).to(machine.on))
    assert len(seen) == 3 and list(pair.stats["eager"]) == [
        "a forward hook on linear would not run"
    ]
    hook.remove()
    for i in range(4):
        pair(rows(i).to(machine.on))
    assert pair.replays == 6, "the state without the hook is known"


def test_a_constant_that_is_read_and_then_written(machine: Machine) -> None:
    def body(m: Any, x: Any, n: Any) -> Any:
        host = torch.arange(3)
        n = n.cpu()
        before = n + host
        host += 1
        on_device = torch.tensor([1.0, 2.0, 3.0], device=x.device)
        h = m.linear(x)[:, :3] * on_device
        on_device.copy_(host)
        return h + on_device + (before * (n + host)).to(x.device)

    calls = [{"x": rows(i), "n": torch.tensor([i])} for i in range(6)]
    assert run(machine, body, calls).replays == 4


def test_one_graphed_module_inside_another(machine: Machine) -> None:
    inner = Module(lambda m, x: m.linear(x).tanh())
    pair = machine.pair(Module(lambda m, x: m.inner(m.linear(x)), inner=inner))
    dit_graph.enable(pair.graphed.inner, device=machine.device, **PLAIN)
    for i in range(6):
        pair(rows(i).to(machine.on))
    assert pair.replays >= 3


def test_disable_gives_everything_back(machine: Machine) -> None:
    pair = machine.pair(Module(lambda m, x: m.linear(x)))
    for i in range(4):
        pair(rows(i).to(machine.on))
    pool = pair.handle.pool_on(torch.device(machine.on))
    assert pool.bytes > 0
    dit_graph.disable(pair.graphed)
    assert pool.bytes == 0 and "forward" not in pair.graphed.__dict__
    pair(rows(0).to(machine.on))
    with pytest.raises(dit_graph.NotEnabled):
        dit_graph.disable(pair.graphed)


def test_state_that_another_recording_writes(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        if x.shape[0] == 3:
            m.flag = m.flag + 1.0
        return m.linear(x) + m.flag

    pair = machine.pair(Module(body, flag=0.0))
    for n in [2, 2, 2, 2, 3, 2, 2, 2, 2]:
        pair(rows(n, n).to(machine.on))
    assert pair.replays >= 3


def test_one_variant_at_a_time(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        return m.linear(x) * int(x.sum() > 0)

    assert run(machine, body, [rows(i) for i in range(16)], max_variants=1).replays >= 2


def test_python_and_numpy_generators_are_eager_by_name(machine: Machine) -> None:
    import random

    for draw in (
        random.random,
        lambda: float(np.random.rand()),
        lambda: float(torch.manual_seed(4).initial_seed()),
    ):
        module = Module(lambda m, x: m.linear(x) + m.draw() + torch.rand_like(x)).to(machine.on)
        module.draw = draw
        handle = dit_graph.enable(module, device=machine.device, **PLAIN)
        for i in range(4):
            module(rows(i).to(machine.on))
        assert "generator" in next(iter(handle.stats()["eager"])), draw


def test_a_generator_that_is_put_back_is_eager_by_name(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        with torch.random.fork_rng():
            return m.linear(x) + torch.randn_like(x)

    pair = run(machine, body, [rows(i) for i in range(4)])
    assert "puts its state back" in next(iter(pair.stats["eager"]))


def test_an_address_is_eager_by_name(machine: Machine) -> None:
    pair = run(machine, lambda m, x: m.linear(x) + x.data_ptr() * 0, [rows(i) for i in range(4)])
    assert "reads an address" in next(iter(pair.stats["eager"]))
