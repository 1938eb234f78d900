"""Switches of torch's that select kernels: a part of the key."""

import threading
from typing import Any

import pytest
import torch

from tests.pair import Machine
from tests.toys import Module, plain, rows


@pytest.mark.parametrize("what", ["grad", "autocast cache", "tf32", "deterministic", "math sdp"])
def test_a_switch_that_selects_kernels_is_in_the_key(machine: Machine, what: str) -> None:
    switches = {
        "grad": (torch.is_grad_enabled, torch.set_grad_enabled),
        "autocast cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        "tf32": (
            lambda: torch.backends.cuda.matmul.fp32_precision,
            lambda to: setattr(torch.backends.cuda.matmul, "fp32_precision", to or "tf32"),
        ),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled,
            lambda on: torch.use_deterministic_algorithms(on, warn_only=on),
        ),
        "math sdp": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    }
    read, write = switches[what]
    pair, before = machine.pair(Module(plain)), read()
    for i in range(3):
        pair(rows(i).to(machine.on))
    try:
        write("tf32" if what == "tf32" else not before)
        pair(rows(3).to(machine.on))
    finally:
        write(before)
    pair(rows(4).to(machine.on))
    assert pair.stats["cold"] == 2 and pair.replays == 2


def test_a_switch_that_the_forward_leaves_behind_costs_no_second_cold_call(
    machine: Machine,
) -> None:
    """As the first attention on CUDA, which settles the order of torch's kernels for good."""

    def body(m: Any, x: Any) -> Any:
        torch.backends.cudnn.benchmark = True
        return m.linear(x) + 1

    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        pair = machine.pair(Module(body))
        for i in range(5):
            pair.graphed(rows(i).to(machine.on))
        assert pair.stats["cold"] == 1 and pair.replays == 3
        torch.backends.cudnn.benchmark = False
        pair(rows(5).to(machine.on))  # another key, as for every such switch
        pair(rows(6).to(machine.on))
        assert pair.stats["cold"] == 2 and pair.replays == 4
        assert len(pair.handle.explain().modules[0].signatures) == 2
    finally:
        torch.backends.cudnn.benchmark = before


def test_recordings_do_not_move_to_the_switch_that_a_cold_call_leaves_behind(
    machine: Machine,
) -> None:
    """A thread that has warmed nothing up makes a cold call of a bucket that is recorded."""

    def body(m: Any, x: Any) -> Any:
        h = m.linear(x)
        if bool(x[0, 0] > 0):
            return h * torch.full((8,), 1 / 3, device=x.device).to(torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        return h

    pair, x = machine.pair(Module(body)), rows(0).abs().to(machine.on)
    try:
        for _ in range(4):
            pair(x)
        thread = threading.Thread(target=torch.no_grad()(pair.graphed), args=(-x,))
        thread.start()
        thread.join()
        assert torch.get_default_dtype() == torch.float64
        assert pair.graphed(x).dtype == pair.eager(x).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
