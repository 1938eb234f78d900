"""The gate, as numbers."""

from typing import Any

import pytest
import torch

from dit_graph.runner.proof import Gate
from tests.pair import Machine
from tests.toys import Module


class Took:
    """A timer that took so many milliseconds, once it is `done`."""

    def __init__(self, ms: float, done: bool = True) -> None:
        self.took, self.done = ms, done

    def ms(self) -> float | None:
        return self.took if self.done else None


def decide(replay: list[float], eager: list[float], min_gain: float = 0.01) -> tuple[Gate, int]:
    """Run a gate on timings; returns it and the calls that it took."""
    gate, replays, eagers = Gate(min_gain), iter(replay), iter(eager)
    for call in range(1, 20):
        if gate.slower() or gate.decided:
            return gate, call
        if gate.wants_eager():
            gate.eager.append(Took(next(eagers)))
        else:
            gate.replay.append(Took(next(replays)))
    raise AssertionError("undecided")


def test_a_clear_gain_is_decided_in_five_calls() -> None:
    gate, calls = decide([3.7] * 9, [26.0] * 9)
    assert calls == 5 and gate.text == "replay 3.7 ms vs eager 26 ms"


def test_a_close_call_is_measured_twice_and_decided_in_five() -> None:
    gate, calls = decide([173.9, 173.4, 173.4], [173.9, 174.2])
    assert calls == 5 and gate.text == "replay 173.4 ms vs eager 173.9 ms"


def test_a_call_that_ran_eagerly_before_decides_a_round_earlier() -> None:
    gate = Gate(0.01)
    gate.first_eager = False
    gate.replay, gate.eager = [Took(3.7), Took(3.8)], [Took(26.0)]
    assert gate.slower() == "" and gate.decided


def test_variants_do_different_work_and_are_not_timed(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        return m.linear(x) if x.sum() > 0 else x

    pair = machine.pair(Module(body), gate="measure")
    for i in range(20):
        pair(torch.full((2, 8), (-1.0) ** i, device=machine.on))
    assert all("vs eager" not in reason for reason in pair.stats["eager"])
    assert pair.replays >= 15


@pytest.mark.parametrize(
    ("replay", "eager", "min_gain", "wins"),
    [
        (100, 102, 0.01, True), (100, 100.5, 0.01, False), (100, 100.5, 0.0, True),
        (100, 130, 0.3, False), (100, 90, 0.0, False), (100, 150, 0.3, True),
    ],
)  # fmt: skip
def test_min_gain_is_what_a_replay_must_save(
    replay: float, eager: float, min_gain: float, wins: bool
) -> None:
    gate = Gate(min_gain)
    while not gate.decided:
        verdict = gate.slower()
        if gate.wants_eager():
            gate.eager.append(Took(eager))
        elif not gate.decided:
            gate.replay.append(Took(replay))
    assert (verdict == "") == wins


def test_nothing_waits_for_a_timing() -> None:
    gate = Gate(0.01)
    late = [Took(100, done=False), Took(5), Took(5)]
    gate.replay, gate.eager = late[:2], [late[2]]
    assert gate.slower() == "" and not gate.decided
    late[0].done = True
    assert gate.slower() == "" and not gate.decided  # close: once more
    gate.eager.append(Took(4))
    assert "replay 5 ms vs eager 4 ms" in gate.slower()
