"""Deterministic algorithms, under which torch fills the memory that a forward leaves empty."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dit_graph import eager_on_graph
from tests.families import FAMILIES
from tests.pair import Machine
from tests.toys import rows, run


@pytest.fixture
def deterministic(monkeypatch: Any) -> Iterator[None]:
    """As `diffusers.utils.torch_utils.enable_full_determinism` has it."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", FAMILIES)
def test_family_under_deterministic_algorithms(
    machine: Machine, name: str, deterministic: None
) -> None:
    """torch fills what `empty` gives then; what a break leaves for a segment must not be."""
    family = FAMILIES[name]
    pair = machine.pair(family.build())
    for i in range(5):
        pair(**machine.to(family.inputs(10 * i, 5)))
    assert pair.replays == 3, pair.handle.report()


@pytest.mark.parametrize("make", ["empty", "empty_strided", "empty_like", "new_empty"])
def test_memory_that_the_forward_leaves_empty_is_filled(
    machine: Machine, make: str, deterministic: None, monkeypatch: Any
) -> None:
    def body(m: Any, x: Any) -> Any:
        like = torch.zeros(2, 8, dtype=torch.int64, device=x.device)
        made = {
            "empty": lambda: torch.empty(2, 8, dtype=torch.int64, device=x.device),
            "empty_strided": lambda: torch.empty_strided((2, 8), (8, 1), dtype=torch.int64,
                                                         device=x.device),
            "empty_like": lambda: torch.empty_like(like),
            "new_empty": lambda: like.new_empty(2, 8),
        }[make]()  # fmt: skip
        seen = (made == torch.iinfo(torch.int64).max).float()
        made.copy_(x.round())  # so that another fill is needed at every replay
        return m.linear(x) + seen + made

    pair = run(machine, body, [rows(i) for i in range(6)])
    assert pair.replays == 4 and pair.stats["eager"] == {}
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    pair.graphed(rows(0).to(machine.on))
    assert pair.stats["cold"] == 2, "a switch that is part of the key"


def test_what_a_break_leaves_for_a_segment_is_not_filled(
    machine: Machine, deterministic: None
) -> None:
    double = eager_on_graph(pure=True)(lambda h: h * 2)

    def body(m: Any, x: Any) -> Any:
        return m.linear(double(m.linear(x))) + x[x > -10].reshape(x.shape)

    pair = run(machine, body, [rows(i) for i in range(6)])
    assert pair.replays == 4 and pair.stats["eager"] == {}
