"""Recordings and replays that are compared with eager before they are trusted."""

from typing import Any

import pytest
import torch

import dit_graph
from dit_graph import eager_on_graph
from dit_graph.tape.tape import Tape
from tests.pair import Machine
from tests.toys import Module, plain, rows


def corrupt(patch: Any) -> None:
    """From now on every replay gives a result that is a little off."""
    real = Tape.result
    patch.setattr(Tape, "result", lambda tape, live: real(tape, live) * 1.01)


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
