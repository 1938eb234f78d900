"""Hard cases that are right with their rule, and seen to be wrong without it."""

from typing import Any

import pytest
import torch

from dit_graph import eager_on_graph
from tests.families import FAMILIES
from tests.pair import Machine
from tests.toys import Module, rows, run


def scalar_argument(machine: Machine) -> tuple[bool, int]:
    pair = machine.pair(Module(lambda m, x, t: m.linear(x) * t))
    results = [
        pair.compare(rows(i).to(machine.on), torch.tensor(float(i)))[0] for i in range(6)
    ]  # fmt: skip
    return all(results), pair.replays


def scalar_attribute(machine: Machine) -> tuple[bool, int]:
    pair = machine.pair(Module(lambda m, x: m.linear(x) * m.t))
    for m in (pair.graphed, pair.eager):
        m.t = torch.tensor(1.0)
    results = []
    for i in range(9):
        for m in (pair.graphed, pair.eager):
            m.t.fill_([1.0, 1.0, 1.0, 2.0, 2.0, 1.0, 2.0, 1.0, 2.0][i])
        results.append(pair.compare(rows(i).to(machine.on))[0])
    return all(results), pair.replays


def test_n1_cpu_scalar_argument(machine: Machine) -> None:
    assert scalar_argument(machine) == (True, 4)


def test_n1_cpu_scalar_attribute(machine: Machine) -> None:
    assert scalar_attribute(machine) == (True, 6)


def test_n1_is_wrong_without_its_rule(machine: Machine, monkeypatch: Any) -> None:
    monkeypatch.setattr("dit_graph.capture.capture.Capture.freeze_scalar", lambda self, t: True)
    assert not scalar_attribute(machine)[0]


def counts_draws_branches(machine: Machine) -> tuple[bool, int, int]:
    def body(m: Any, x: Any) -> Any:
        m.count.add_(1)
        noise = torch.randn_like(x)
        h = m.linear(x) + noise
        return h + 1 if bool(h.mean() > 0) else h - m.count

    pair = machine.pair(Module(body))
    equal = all([pair.compare(rows(i).to(machine.on), seed=i)[0] for i in range(50)])
    return equal, pair.replays, pair.stats["captures"]


def test_n4_state_moves_once_when_a_guard_fails(machine: Machine) -> None:
    assert counts_draws_branches(machine) == (True, 47, 2)


@pytest.mark.parametrize("rule", ["roll_back", "guard"])
def test_n4_is_wrong_without_its_rule(machine: Machine, monkeypatch: Any, rule: str) -> None:
    if rule == "roll_back":
        monkeypatch.setattr("dit_graph.tape.tape.Undo.roll_back", lambda self: None)
    else:
        monkeypatch.setattr("dit_graph.tape.tape.matches", lambda expected, value: True)
    assert not counts_draws_branches(machine)[0]


def prompt(name: str, seed: int, length: int) -> dict[str, Any]:
    """A call whose caption has `length` tokens: its shape for Qwen, its mask's sum for Lumina2."""
    call = FAMILIES[name].inputs(seed, 5)
    total = length if name == "qwen" else 40
    call["encoder_hidden_states"] = torch.randn(2, total, 16)
    mask = torch.arange(total)[None] < torch.tensor([[length], [total]])
    call["encoder_hidden_states_mask" if name == "qwen" else "encoder_attention_mask"] = mask
    return call


@pytest.mark.parametrize("name", ["qwen", "lumina2"])
def test_n5_every_prompt_length_is_bounded(machine: Machine, name: str) -> None:
    pair = machine.pair(FAMILIES[name].build(), max_graphs=8)
    (install,) = pair.handle.installs.values()
    alive = []
    for i in range(30):
        call = prompt(name, i, 3 + i * 7 % 30)
        for _ in range(4):
            call["hidden_states"] = torch.randn_like(call["hidden_states"])
            pair(**machine.to(call))
        alive.append(sum(len(g.groups) for g in install.runner.pool._generations))
    stats = pair.stats
    assert max(alive) <= 8
    assert stats["eager"] == {}
    assert stats["replays"] >= 60, "half of the steps are replayed though no length is kept"


def test_a_value_that_never_comes_back_is_eager_by_name(machine: Machine) -> None:
    pair = run(machine, lambda m, x: m.linear(x) * float(x.sum()), [rows(i) for i in range(80)])
    stats = pair.stats
    (reason,) = stats["eager"]
    assert reason.startswith("another value at every call: aten._local_scalar_dense")
    assert stats["captures"] <= 11
    for _ in range(80):
        pair(rows(3).to(machine.on))
    assert pair.replays >= 15, "it is recorded again once the value comes back"


def test_n5_grows_without_its_rule(machine: Machine, monkeypatch: Any) -> None:
    monkeypatch.setattr("dit_graph.memory.pool.Pool.retire", lambda self, generation: None)
    with pytest.raises(AssertionError):
        test_n5_every_prompt_length_is_bounded(machine, "lumina2")


def break_feeds_break(machine: Machine) -> tuple[bool, int]:
    def body(m: Any, x: Any, mask: Any) -> Any:
        n = mask.sum(1).cpu()
        first, second = n.tolist()
        return m.linear(x[:first]).sum() + m.linear(x[:second]) * (n + 1).float().to(x.device).sum()

    pair = machine.pair(Module(body))
    masks = [torch.arange(6)[None] < torch.tensor([[2], [i % 2 + 3]]) for i in range(8)]
    results = [
        pair.compare(rows(i, 6).to(machine.on), mask.to(machine.on))[0]
        for i, mask in enumerate(masks)
    ]
    return all(results), pair.replays


def test_n6_one_break_feeds_the_next(machine: Machine) -> None:
    assert break_feeds_break(machine) == (True, 5)


def test_n6_is_wrong_without_its_rule(machine: Machine, monkeypatch: Any) -> None:
    monkeypatch.setattr("dit_graph.tape.tape.Break._store", lambda *args: None)
    assert not break_feeds_break(machine)[0]


def test_n6_a_break_that_returns_its_input_which_is_then_written(machine: Machine) -> None:
    same = eager_on_graph(lambda t: t)

    def body(m: Any, x: Any) -> Any:
        h = m.linear(x)
        h2 = same(h)
        h2.add_(1)
        return h * 2 + same(h2)

    assert run(machine, body, [rows(i) for i in range(5)]).replays == 3
