"""Aliases, and memory that outlives the call."""

from typing import Any

import torch

from dit_graph import eager_on_graph
from tests.pair import Machine
from tests.toys import Module, rows, run


def test_a_break_that_returned_its_input_never_overwrites_it(machine: Machine) -> None:
    @eager_on_graph(pure=True)
    def gate(w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return w if float(t) > 0 else w * 2

    pair = machine.pair(Module(lambda m, x, t: x @ gate(m.linear.weight, t)))
    weight = pair.graphed.linear.weight.clone()
    for i, t in enumerate([1.0, 1.0, 1.0, -1.0, 1.0, -1.0]):
        pair(rows(i).to(machine.on), torch.tensor([t]).to(machine.on))
    assert torch.equal(pair.graphed.linear.weight, weight)
    assert pair.replays == 2 and "memory was its input's" not in str(pair.stats["eager"])


def test_results_of_a_break_that_share_storage(machine: Machine) -> None:
    @eager_on_graph(pure=True)
    def both(h: torch.Tensor) -> Any:
        a = h * 2
        return a, a[:1]

    def body(m: Any, x: Any) -> Any:
        a, b = both(m.linear(x))
        a.add_(1)
        return b * 1

    assert run(machine, body, [rows(i) for i in range(5)]).replays == 3


def test_a_break_that_returns_a_buffer(machine: Machine) -> None:
    buffer = eager_on_graph(pure=True)(lambda m: m.count)

    def body(m: Any, x: Any) -> Any:
        buffer(m).add_(1)
        return m.linear(x) + m.count

    assert run(machine, body, [rows(i) for i in range(5)]).replays == 3


def test_a_break_that_writes_a_constant_and_a_buffer(machine: Machine) -> None:
    @eager_on_graph
    def write(m: Any, c: torch.Tensor) -> None:
        c.add_(1)
        m.count.add_(1)

    def body(m: Any, x: Any) -> Any:
        c = torch.tensor([1.0] * 8, device=x.device)
        write(m, c)
        return m.linear(x) + c + m.count

    assert run(machine, body, [rows(i) for i in range(5)]).replays == 3


def test_a_tensor_that_leaves_a_break_by_another_way(machine: Machine) -> None:
    kept: dict[str, torch.Tensor] = {}

    @eager_on_graph(pure=True)
    def keep(h: torch.Tensor) -> None:
        kept["mask"] = (h > 0).float()

    def body(m: Any, x: Any) -> Any:
        h = m.linear(x)
        keep(h)
        return h * kept["mask"]

    pair = run(machine, body, [rows(i) for i in range(5)])
    assert "a tensor made in a marked break" in next(iter(pair.stats["eager"]))


def test_a_break_that_returns_an_object(machine: Machine) -> None:
    unknown = eager_on_graph(pure=True)(lambda h: object())

    def body(m: Any, x: Any) -> Any:
        unknown(x)
        return m.linear(x)

    pair = run(machine, body, [rows(i) for i in range(4)])
    assert "returns a object" in next(iter(pair.stats["eager"]))


def test_an_argument_that_is_a_buffer_the_forward_writes(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        m.state.mul_(0.5).add_(x)
        return m.state

    module = Module(body)
    module.register_buffer("state", torch.ones(2, 8))
    pair = machine.pair(module)
    for i in range(3):
        pair(rows(i).to(machine.on))
    a, b = (m(rows(5).to(machine.on)) for m in (pair.graphed, pair.eager))
    for _ in range(4):
        a, b = pair.graphed(a), pair.eager(b)
        assert torch.equal(a, b)
    assert "an argument lies in memory that the forward writes" in pair.stats["eager"]


def test_writes_through_data_and_into_broadcast_slices(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        x.data.mul_(2)
        return m.linear(x)

    assert run(machine, body, [rows(i) for i in range(5)]).replays == 3
    pair = machine.pair(Module(lambda m, x: x.add_(1) * 2))
    for i in range(5):
        pair(torch.tensor([[float(i)]]).to(machine.on).expand(2, 8)[:1, :1])
    assert pair.replays == 3


def test_a_call_inside_a_replay_of_the_same_module(machine: Machine) -> None:
    @eager_on_graph(pure=True)
    def again(m: Any, h: torch.Tensor) -> torch.Tensor:
        return m(h[:1], deep=True).expand(2, 8) * 1.0

    def body(m: Any, x: Any, deep: bool = False) -> Any:
        h = m.linear(x)
        return h if deep else again(m, h) + h

    assert run(machine, body, [rows(i) for i in range(6)]).replays >= 4
