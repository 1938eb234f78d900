"""What runs eagerly between two segments: marked, read by the host, or of no fixed shape."""

from typing import Any

import numpy as np
import pytest
import torch

import dit_graph
from dit_graph import break_graph, current_call, eager_on_graph
from tests.pair import PLAIN, Machine
from tests.toys import Module, rows, run


def test_marked_breaks(machine: Machine) -> None:
    calls = []

    @eager_on_graph
    def attention(q: torch.Tensor, *, scale: float) -> torch.Tensor:
        """Doc."""
        calls.append(inner(q))
        return q.softmax(-1) * scale

    @eager_on_graph(pure=True, reason="the inner one")
    def inner(q: torch.Tensor) -> int:
        return q.shape[0]

    def body(m: Any, x: Any) -> Any:
        break_graph()
        return m.linear(attention(m.linear(x), scale=2.0)) + 1

    assert attention.__name__ == "attention" and attention.__doc__ == "Doc."
    pair = run(machine, body, [rows(i) for i in range(5)])
    assert pair.replays == 3 and len(calls) == 10
    report = pair.handle.report()
    assert "segments 2, breaks 1" in report and "attention" in report and "test_breaks.py" in report


def test_a_break_reads_the_live_call(machine: Machine) -> None:
    @eager_on_graph(pure=True)
    def shift(h: torch.Tensor) -> torch.Tensor:
        return h + current_call().arguments["offsets"].sum()

    module = Module(lambda m, x, **kw: shift(m.linear(x)) * 2).to(machine.on)
    handle = dit_graph.enable(module, device=machine.device, **PLAIN)
    for i in range(5):
        x, offsets = rows(i).to(machine.on), rows(i + 5).to(machine.on)
        assert torch.equal(module(x=x, offsets=offsets), (module.linear(x) + offsets.sum()) * 2)
    assert handle.stats()["replays"] == 3
    with pytest.raises(LookupError):
        current_call()


@pytest.mark.parametrize("what", ["shape", "dtype", "structure", "value"])
def test_a_changed_break_result_is_named_and_eager(machine: Machine, what: str) -> None:
    state = {"n": 0}

    @eager_on_graph(pure=True)
    def unsteady(h: torch.Tensor) -> Any:
        state["n"] += 1
        if state["n"] <= 6:
            return h, 1
        return {"shape": (h[:1], 1), "dtype": (h.double(), 1), "structure": (h,), "value": (h, 2)}[
            what
        ]

    def body(m: Any, x: Any) -> Any:
        h, *n = unsteady(m.linear(x))
        m.count.add_(1)
        return h.float().sum() * sum(n)

    pair = machine.pair(Module(body))
    for i in range(3):
        pair(rows(i).to(machine.on))
    for i in range(3):
        expected = pair.eager(rows(i).to(machine.on))
        assert torch.equal(pair.graphed(rows(i).to(machine.on)), expected)
    assert torch.equal(pair.graphed.count, pair.eager.count)
    assert pair.replays == 1
    reasons = list(pair.stats["eager"])
    assert len(reasons) == 1 and "a marked break's result changed" in reasons[0]


def test_a_changed_break_result_raises_when_asked(machine: Machine) -> None:
    sizes = iter([2, 2, 2, 1])
    unsteady = eager_on_graph(pure=True)(lambda h: h[: next(sizes)])
    module = Module(lambda m, x: unsteady(m.linear(x)) * 2).to(machine.on)
    dit_graph.enable(module, device=machine.device, on_failure="raise", **PLAIN)
    for i in range(3):
        module(rows(i).to(machine.on))
    with pytest.raises(dit_graph.BreakResultChanged, match="tensor was"):
        module(rows(3).to(machine.on))


def test_an_impure_break_before_a_guard_is_eager_by_name(machine: Machine) -> None:
    impure = eager_on_graph(lambda h: h * 2)

    def body(m: Any, x: Any) -> Any:
        h = impure(m.linear(x))
        return h[: 1 + int(h.sum() > 0)]

    pair = run(machine, body, [rows(i) for i in range(5)])
    (reason,) = pair.stats["eager"]
    assert reason.startswith("state may be written before a guard") and "pure=True" in reason


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.item(), lambda t: int(t), lambda t: float(t), lambda t: bool(t > 0.5),
        lambda t: t.reshape(1).tolist()[0], lambda t: next(float(v) for v in t.reshape(1)),
        lambda t: float(t.cpu().numpy()), lambda t: float(np.asarray(t.cpu())),
        lambda t: float(f"{t.item():.3f}"), lambda t: float(t.to("cpu") * 2),
        lambda t: [10, 20, 30][t.long()], lambda t: float(repr(t.item())),
        lambda t: round(t.item(), 1), lambda t: len(range(int(t))), lambda t: t.item() ** 2,
        lambda t: 2 - t.item(), lambda t: torch.full((1,), t.item())[0].item(),
    ],
)  # fmt: skip
def test_host_reads_are_guarded(machine: Machine, read: Any) -> None:
    def body(m: Any, x: Any, t: Any) -> Any:
        return m.linear(x) + read((t + 1).sum() - 1)

    pair = machine.pair(Module(body))
    for i, value in enumerate([1.25, 1.25, 1.25, 2.5, 2.5, 1.25, 2.5, 0.25, 2.5]):
        pair(rows(i).to(machine.on), torch.tensor([value]).to(machine.on))
    assert pair.replays >= 5, pair.handle.report()


def test_a_threshold_guards_its_outcome_only(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        h = m.linear(x)
        return h.sin() if h.abs().mean().item() > 0.5 else h.cos()

    pair = run(machine, body, [rows(i) for i in range(40)])
    assert pair.stats["captures"] == 2 and pair.replays == 37


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.tensor([1.0, 2.0], device=x.device),
        lambda x: torch.as_tensor([1, 2], device=x.device),
        lambda x: x.new_tensor([3.0, 4.0]),
        lambda x: torch.arange(2).to(x.device),
        lambda x: torch.from_numpy(np.arange(2.0)).to(x.device),
        lambda x: torch.stack([x.sum(), torch.tensor(2.0, device=x.device)]),
        lambda x: torch.tensor([x.sum().item(), 1.0], device=x.device),
        lambda x: torch.ones(2).cumsum(0).to(x.device),
        lambda x: torch.arange(3, device=x.device)[torch.tensor([0, 2], device=x.device)],
    ],
)
def test_python_data_on_the_device(machine: Machine, make: Any) -> None:
    def body(m: Any, x: Any) -> Any:
        c = make(x)
        c[0] += 1  # written after it was made: every call starts from the made value
        return m.linear(x) + c.sum()

    pair = machine.pair(Module(body))
    for i in range(7):
        pair(rows(i % 2).to(machine.on))
    assert pair.replays >= 4, pair.handle.report()


@pytest.mark.parametrize(
    "select",
    [
        lambda h: h[h > 0], lambda h: h.masked_select(h > 0), lambda h: (h > 0).nonzero().float(),
        lambda h: torch.unique(h.round()), lambda h: h.index_put((h > 0,), h.new_zeros(())),
        lambda h: torch.where(h > 0)[0].float(),
        lambda h: h.repeat_interleave((h[:, 0] > 0).long() + 1, dim=0),
    ],
)  # fmt: skip
def test_results_whose_shape_depends_on_data(machine: Machine, select: Any) -> None:
    def body(m: Any, x: Any) -> Any:
        h = m.linear(x) * 1.5
        return select(h) * 2

    pair = machine.pair(Module(body))
    for i in range(12):
        pair(rows(i % 3).to(machine.on))
    assert pair.replays >= 7, pair.handle.report()


def test_a_mask_assignment(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        h = m.linear(x)
        h[h > 0] = 0.0
        h[0] = 1.0
        return h * 2

    assert run(machine, body, [rows(i) for i in range(6)]).replays == 4


@eager_on_graph(pure=True)
def taken_out(tensors: list[torch.Tensor], factors: dict[str, float]) -> torch.Tensor:
    return tensors.pop() * factors.pop("last") + len(tensors) + len(factors)


def test_a_break_may_change_the_containers_that_it_is_given(machine: Machine) -> None:
    """Its arguments are kept ready for replays, but not these."""

    def body(m: Any, x: Any) -> Any:
        h = m.linear(x)
        return taken_out([h, h + 1], {"first": 1.0, "last": 2.0})

    pair = run(machine, body, [rows(i) for i in range(6)])
    assert pair.replays == 4 and pair.stats["eager"] == {}


def test_a_pattern_that_matches_nothing_is_said(machine: Machine, caplog: Any) -> None:
    run(machine, lambda m, x: m.linear(x), [rows(0)] * 3, breaks=("linear", "*.atn"))
    assert "breaks pattern '*.atn' matches nothing" in caplog.text
    assert "'linear'" not in caplog.text
