"""What a call gives back."""

from typing import Any

import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput

from tests.pair import Machine
from tests.toys import Module, rows, run


def test_results_belong_to_the_caller(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        h = m.linear(x)
        return Transformer2DModelOutput(sample=h)

    pair = machine.pair(Module(body))
    held = [pair(rows(i).to(machine.on)) for i in range(6)]
    for i, result in enumerate(held):
        assert isinstance(result, Transformer2DModelOutput)
        assert torch.equal(result.sample, pair.eager(rows(i).to(machine.on)).sample)
    assert pair.replays == 4


def test_a_result_fed_back_as_input(machine: Machine) -> None:
    pair = machine.pair(Module(lambda m, x: m.linear(x).tanh()))
    x = rows(0).to(machine.on)
    for _ in range(8):
        x = pair(x)
    assert pair.replays == 6


def test_structures_views_and_passed_through_inputs(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        h = m.linear(x)
        return {"a": (h, h.t()), "input": x, "row": x[1], "none": None, "n": 3, "buffer": m.count}

    pair = run(machine, body, [rows(i) for i in range(5)])
    x = rows(9).to(machine.on)
    result = pair.graphed(x)
    assert pair.replays == 4
    assert result["input"] is x and result["row"].data_ptr() == x[1].data_ptr()
    assert result["buffer"] is pair.graphed.count


def test_an_unknown_result_is_eager_by_name(machine: Machine) -> None:
    class Result:
        def __init__(self, sample: Any) -> None:
            self.sample = sample

    pair = machine.pair(Module(lambda m, x: Result(m.linear(x))))
    x = rows(0).to(machine.on)
    for _ in range(4):
        assert torch.equal(pair.graphed(x).sample, pair.eager(x).sample)
    assert list(pair.stats["eager"]) == ["the forward returns a Result"]
