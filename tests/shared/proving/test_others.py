"""What others do meanwhile: their generators, and an end of the recording from outside."""

import copy
import random
from typing import Any

import pytest
import torch

import dit_graph
from tests.pair import PLAIN, Machine
from tests.toys import Module, Unseen, plain, rows


def test_verification_leaves_a_generator_alone_that_the_forward_does_not_use(
    machine: Machine,
) -> None:
    elsewhere = []

    def draw(h: torch.Tensor) -> torch.Tensor:
        elsewhere.append(torch.rand(1).item())  # stands for another thread
        return h

    pair = machine.pair(Module(plain), verify="always")
    pair(rows(0).to(machine.on))
    pair(rows(1).to(machine.on))
    runner = pair.handle.installs["Module"].runner
    original = runner.target.original
    runner.target.original = lambda *args, **kwargs: draw(original(*args, **kwargs))
    for i in range(20):
        pair.graphed(rows(i).to(machine.on))
    assert len(elsewhere) == 20 == len(set(elsewhere))


def test_another_threads_draws_do_not_block_a_key(machine: Machine) -> None:
    module = Module(lambda m, x: m.linear(x))
    aside = Unseen()

    def body(m: Any, x: Any) -> Any:
        aside.list.append(1)
        if len(aside.list) == 1:
            random.random()  # stands for another thread, once
        return m.linear(x)

    module.body = body
    module.to(machine.on).eval()
    handle = dit_graph.enable(module, device=machine.device, **PLAIN)
    for i in range(8):
        module(rows(i).to(machine.on))
    assert handle.stats()["replays"] == 5 and handle.stats()["eager"] == {}


def test_eager_stays_as_it_was_when_a_capture_is_interrupted(machine: Machine) -> None:
    """Control-C inside a recording: the error comes through, the next call records."""
    aside = Unseen()
    stop = aside.list

    def body(m: Any, x: Any) -> Any:
        h = m.linear(x)
        if aside.list and dit_graph.breaks.capturing():
            raise KeyboardInterrupt
        return h

    pair = machine.pair(Module(body))
    pair(rows(0).to(machine.on))
    stop.append(1)
    with pytest.raises(KeyboardInterrupt):
        pair.graphed(rows(1).to(machine.on))
    stop.clear()
    expected = copy.deepcopy(pair.eager)(rows(2).to(machine.on))
    assert torch.equal(pair.graphed(rows(2).to(machine.on)), expected)
    for i in range(3):
        pair.graphed(rows(i).to(machine.on))
    assert pair.replays == 3
