"""Where in 16 bytes an argument begins."""

import pytest
import torch

from dit_graph import eager_on_graph
from tests.pair import Machine
from tests.toys import Module, rows, shifted


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_view_that_begins_off_16_bytes_is_staged_so(machine: Machine, dtype: torch.dtype) -> None:
    seen: list[int] = []

    @eager_on_graph(pure=True)
    def look(h: torch.Tensor) -> torch.Tensor:
        seen.append(h.data_ptr() % 16)
        return h.sum(-1)

    pair = machine.pair(Module(lambda m, x: look(x) + m.linear(x.float()).sum(-1)))
    for i in range(12):
        x = rows(i, 8).to(machine.on, dtype)
        given = shifted(x, int(i > 3 and i % 2))
        del seen[:]
        result = pair.graphed(given)
        assert set(seen) == {given.data_ptr() % 16} and len(seen) == 1
        assert torch.equal(result, pair.eager(given))
    assert pair.stats["cold"] == 2 and pair.replays == 8
    off = f"x misses a multiple of 16 bytes by {dtype.itemsize} vs 0"
    assert f"differs from the nearest recorded: {off}" in pair.handle.report()


def test_a_loops_timesteps_are_one_signature(machine: Machine) -> None:
    """Views of one table, each at another place in it, of one value each."""
    pair = machine.pair(Module(lambda m, x, t: m.linear(x) * t[:, None]))
    table = torch.arange(8, device=machine.on, dtype=torch.float32)
    for i, t in enumerate(table):
        x = rows(i).to(machine.on)
        assert torch.equal(pair.graphed(x, t.expand(2)), pair.eager(x, t.expand(2)))
        assert torch.equal(pair.graphed(x, t[None]), pair.eager(x, t[None]))
    assert pair.stats["captures"] == 2 and pair.replays == 12


def test_a_misaligned_argument_that_is_written_and_returned(machine: Machine) -> None:
    pair = machine.pair(Module(lambda m, x: (x.mul_(2), m.linear(x), x, x[1:])[1:]))
    for i in range(5):
        mine, its = (shifted(rows(i).to(machine.on), 1) for _ in range(2))
        a, b = pair.graphed(mine), pair.eager(its)
        assert all(map(torch.equal, (mine, *a), (its, *b))) and a[1] is mine
    assert pair.replays == 3
