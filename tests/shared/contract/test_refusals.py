"""Operations that refuse to be captured, which nothing says beforehand."""

from typing import Any

import pytest
import torch

import dit_graph
from dit_graph.devices.base import is_about_capturing
from tests.pair import Machine
from tests.toys import Module, reads_host, rows, run

DOWN: list[bool] = []


@torch.library.custom_op("dit_graph_tests::breaks_down", mutates_args=())
def breaks_down(x: torch.Tensor) -> torch.Tensor:
    if DOWN:
        raise RuntimeError("the camera captured no data")
    return x * 2


def reading(m: Any, x: Any) -> Any:
    return reads_host(m.linear(x)).relu() + 1


def test_an_operation_that_no_graph_takes_is_a_break_from_then_on(machine: Machine) -> None:
    pair = run(machine, reading, [rows(i, n) for n in (2, 3) for i in range(6)])
    (reason,) = pair.stats["eager"]
    assert (
        "reads_host.default at contract/test_refusals.py" in reason
        and "break from now on" in reason
    )
    assert pair.stats["eager"][reason] == 1 and pair.replays == 3 + 4
    assert "reads_host could not be captured" in str(pair.handle.explain())


def test_one_graph_stays_eager_where_an_operation_refuses(machine: Machine) -> None:
    pair = run(machine, reading, [rows(i) for i in range(6)], backend="full")
    (reason,) = pair.stats["eager"]
    assert "reads_host.default at contract/test_refusals.py" in reason and pair.replays == 0


def test_a_forward_that_catches_the_refusal_is_not_recorded_so(machine: Machine) -> None:
    """It would take its other path in the recording alone."""

    def body(m: Any, x: Any) -> Any:
        try:
            return reads_host(m.linear(x))
        except RuntimeError:
            return x * 0

    pair = run(machine, body, [rows(i) for i in range(6)])
    (reason,) = pair.stats["eager"]
    caught = "catches that an operation cannot be captured" in reason
    assert caught or "reads_host.default at" in reason  # CUDA has given the capture up by then
    assert pair.replays == 3


def test_strict_raises_once_for_an_operation_that_no_graph_takes(machine: Machine) -> None:
    pair = machine.pair(Module(reading), strict=True)
    pair(rows(0).to(machine.on))
    with pytest.raises(dit_graph.NotReplayed, match="a break from now on"):
        pair.graphed(rows(1).to(machine.on))
    for i in range(4):
        pair(rows(i).to(machine.on))
    assert pair.handle.stats()["replays"] == 3


def test_an_error_about_another_operation_teaches_nothing() -> None:
    said = "CUDA error: operation failed due to a previous error during capture"
    assert not is_about_capturing(RuntimeError(said))
    assert is_about_capturing(RuntimeError("operation not permitted when stream is capturing"))


def test_an_operation_that_fails_in_eager_too_is_no_break(machine: Machine) -> None:
    """An error that sounds like a capture's but is the model's own."""
    pair = machine.pair(Module(lambda m, x: breaks_down(m.linear(x)) + 1))
    pair(rows(0).to(machine.on))
    for _ in range(2):
        DOWN.append(True)
        with pytest.raises(RuntimeError, match="captured no data"):
            pair.graphed(rows(0).to(machine.on))
        DOWN.clear()
    for i in range(4):
        pair(rows(i).to(machine.on))
    assert pair.replays >= 2 and "could not be captured" not in str(pair.handle.explain())
