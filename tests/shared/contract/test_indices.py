"""Indices and scalars on the host, which CUDA copies to the device unseen."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.pair import Machine
from tests.toys import Module, rows, run

_HOST_OPERANDS: dict[str, Any] = {
    "list": lambda m, h: h[[0, -1]],
    "list of a dimension": lambda m, h: h[:, [0, 3]],
    "tuples": lambda m, h: h[(0, 1), (1, 0)],
    "array": lambda m, h: h[:, np.array([[0, 1], [1, 0]])],
    "range": lambda m, h: h[range(2)],
    "number of numpy's": lambda m, h: h[np.int64(1)],
    "empty list": lambda m, h: h[[]],
    "list of truths": lambda m, h: h[[True, False]],
    "list that holds a tensor": lambda m, h: h[:, [torch.tensor(0), 1]],
    "assigned by a list": lambda m, h: (h.__setitem__([0], 3.0), h)[1],
    "assigned by a tensor": lambda m, h: (
        h.__setitem__((slice(None), torch.tensor([0, 1], device=h.device)), 3.0), h)[1],
    "assigned a tensor": lambda m, h: (
        h.__setitem__((slice(None), torch.tensor([0], device=h.device)), torch.tensor(2.0)), h)[1],
    "where": lambda m, h: torch.where(h > 0, torch.tensor(1.0), h),
    "where both": lambda m, h: torch.where(h > 0, torch.tensor(1.0), torch.tensor(-1.0)),
    "where of another type": lambda m, h: torch.where(h > 0, torch.tensor(2, dtype=torch.int64), h),
    "where numbers": lambda m, h: torch.where(h > 0, 1.0, h),
}  # fmt: skip


@pytest.mark.parametrize("name", _HOST_OPERANDS)
def test_python_data_in_an_index_or_a_choice(machine: Machine, name: str) -> None:
    take = _HOST_OPERANDS[name]
    pair = run(machine, lambda m, x: take(m, m.linear(x)) + 1, [rows(i) for i in range(6)])
    assert pair.stats["eager"] == {} and pair.replays == 4, pair.handle.report()


def test_a_scalar_of_the_models_own_that_changes_in_a_choice(machine: Machine) -> None:
    body = lambda m, x: torch.where(x > 0, m.t, m.linear(x))
    pair = machine.pair(Module(body))
    for i in range(9):
        for m in (pair.graphed, pair.eager):
            m.t = torch.tensor(1.0) if i == 0 else m.t.fill_(float(i > 4))
        pair(rows(i).to(machine.on))
    assert pair.replays >= 4 and pair.stats["eager"] == {}


def test_a_function_that_cannot_be_captured_is_a_break_from_then_on(machine: Machine) -> None:
    """`Tensor.new` copies Python data to the device, and is no operation."""
    body = lambda m, x: m.linear(x) + x.new([[1.0] * 8])
    pair = run(machine, body, [rows(i, n) for n in (2, 3) for i in range(6)])
    (reason,) = pair.stats["eager"]
    assert "Cannot copy between CPU and CUDA tensors" in reason and "a break from now on" in reason
    assert pair.stats["eager"][reason] == 1 and pair.replays == 3 + 4
    assert "new could not be captured" in str(pair.handle.explain())
