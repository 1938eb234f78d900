"""What every backend must do, and what each of them makes of the same bodies."""

from typing import Any

import pytest
import torch
from torch import nn

import dit_graph
from tests.pair import PLAIN, Machine
from tests.toys import Module, rows, run


@pytest.mark.parametrize("backend", ["breakable", "full", "debug", "eager"])
def test_every_backend_gives_eagers_bits(machine: Machine, backend: str) -> None:
    def body(m: Any, x: Any) -> Any:
        return m.linear(x).relu() + torch.randn_like(x)

    batches = [1, 2, 4, 1, 2, 4, 1, 2, 4, 4, 2, 1]
    pair = run(machine, body, [rows(i, n) for i, n in enumerate(batches)], backend=backend)
    stats = pair.stats
    if backend == "eager":
        assert stats["eager"] == {"backend eager": 12}
    else:
        expected = {"calls": 12, "cold": 3, "captures": 3, "replays": 6, "dropped": 0, "eager": {}}
        assert stats == expected


def test_full_names_what_one_graph_cannot_hold(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        return x[x > 0]

    pair = run(machine, body, [rows(i) for i in range(5)], backend="full")
    assert pair.replays == 0
    (reason,) = pair.stats["eager"]
    assert "one graph cannot hold this" in reason and "test_backends.py" in reason


def test_a_full_capture_that_fails_moves_state_once(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        m.count.add_(1)
        x.mul_(2)
        return (x + torch.rand_like(x))[: int(m.count)]

    pair = run(machine, body, [rows(i) for i in range(5)], backend="full")
    assert pair.replays == 0


def counting(m: Any, x: Any) -> Any:
    m.count.add_(1)
    return m.linear(x) * m.count


def drawing_in_place(m: Any, x: Any) -> Any:
    x.mul_(2)
    return x + torch.randn_like(x)


def branching(m: Any, x: Any) -> Any:
    m.count.add_(1)
    h = m.linear(x) + torch.rand_like(x)
    return h + 1 if bool(h.sum() > 0) else h[:1]


def selecting(m: Any, x: Any) -> Any:
    m.count.add_(1)
    return {"kept": x[x > 0], "all": (x, m.linear(x)), "n": int((x > 0).sum())}


def views(m: Any, x: Any) -> Any:
    h = m.linear(x)
    h[:, 0] = 1.0
    a, b = h.chunk(2, dim=1)
    a.add_(b)
    return h, x.t(), h.flatten()


def complex_numbers(m: Any, x: Any) -> Any:
    z = torch.view_as_complex(m.linear(x).view(-1, 4, 2))
    return (x * 2).to(torch.complex64).conj(), torch.view_as_real(z * z.conj()), z.imag


def composite(m: Any, x: Any) -> Any:
    """Operations that torch makes of others; each asks for values."""
    if (x > 2).any():
        x = x * 2
    chosen = (x > 0).sum(1)
    h = m.linear(x).repeat_interleave(chosen, 0)
    first = torch.where(x[:, 0] > 0)[0]
    parts = torch.tensor_split(x, chosen[:1].cpu(), dim=1)
    return h.sum(0), x[first].sum(), torch.narrow(x, 0, chosen[0].clamp(max=1), 1), parts


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("backend", ["breakable", "full", "debug"])
@pytest.mark.parametrize(
    "body", [counting, drawing_in_place, branching, selecting, views, complex_numbers, composite]
)
def test_every_backend_answers_as_eager(
    machine: Machine, backend: str, body: Any, mode: Any
) -> None:
    with mode():
        pair = run(machine, body, [rows(i % 5, 2 + i % 2) for i in range(24)], backend=backend)
    stats = pair.stats
    if backend == "full" and body in (branching, selecting, composite):
        assert stats["eager"] and stats["replays"] == 0
        assert all("one graph cannot hold this" in reason for reason in stats["eager"])
    else:
        assert stats["replays"] >= 10 and stats["eager"] == {}, pair.handle.report()


def test_split_where_a_tensor_says(machine: Machine) -> None:
    """torch reads the indices from memory, where no mode sees it."""

    def body(m: Any, x: Any, at: Any, end: Any) -> Any:
        first, *_ = torch.tensor_split(m.linear(x), at, dim=1)
        second = torch.tensor_split(input=x, tensor_indices_or_sections=end)[0]
        parts = torch.tensor_split(input=x, sections=2), torch.tensor_split(x, indices=(1,), dim=1)
        return first.sum(1), second, x.tensor_split(at, 1)[0].sum(), parts

    calls = [
        {"x": rows(i), "at": torch.tensor([1 + i % 3]), "end": torch.tensor(1 + i % 2)}
        for i in range(24)
    ]
    for i in range(6):  # the names that a call may use
        calls[18 + i]["at"] = [calls[i]["at"], 2, (1, 2), calls[i]["end"]][i % 4]
    pair = machine.pair(Module(body))
    for call in calls:  # the indices stay on the host
        pair(call["x"].to(machine.on), call["at"], call["end"])
    assert pair.replays >= 8 and pair.stats["eager"] == {}, pair.handle.report()


def test_a_composite_operation_of_somebody_elses_stays_whole(machine: Machine) -> None:
    """Its Python may read values where no mode looks."""
    library = torch.library.Library("dit_graph_tests", "FRAGMENT")
    library.define("scaled(Tensor x) -> Tensor")
    library.impl("scaled", lambda x: x * x.tolist()[0][0], "CompositeImplicitAutograd")
    with torch.inference_mode():
        pair = machine.pair(Module(lambda m, x: torch.ops.dit_graph_tests.scaled(m.linear(x))))
        for i in (0, 0, 0, 1, 2):
            pair(rows(i).to(machine.on))
    assert pair.replays >= 1


class Halves(torch.Tensor):
    """A weight that answers `linear` as a whole, as quantized ones do, and none of its parts."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, half: torch.Tensor) -> Any:
        make: Any = torch.Tensor._make_wrapper_subclass
        return make(cls, half.shape, dtype=torch.float32, device=half.device)

    def __init__(self, half: torch.Tensor) -> None:
        self.half_ = half

    def __tensor_flatten__(self) -> Any:
        return ["half_"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].half_)
        if func is not torch.ops.aten.linear.default:
            raise NotImplementedError(str(func))
        x, weight, bias = args
        return x @ weight.half_.float().T * 2 + bias


def test_a_weight_that_answers_for_a_composite_operation(machine: Machine) -> None:
    with torch.inference_mode():
        modules = [Module(lambda m, x: m.linear(x).sin()).to(machine.on) for _ in range(2)]
        half = (modules[0].linear.weight / 2).half()
        for m in modules:
            m.linear.weight = nn.Parameter(Halves(half), requires_grad=False)
            m.linear.bias = modules[0].linear.bias
        handle = dit_graph.enable(modules[0], device=machine.device, **PLAIN)
        for i in range(5):
            x = rows(i).to(machine.on)
            assert torch.equal(modules[0](x), modules[1](x))
    assert handle.stats()["replays"] == 3, handle.report()


def test_an_operation_left_out_of_autocast_stays_out(machine: Machine) -> None:
    """In a segment, and as a break on the host; both had been cast, or not, when recorded."""
    kind = torch.device(machine.on).type

    def body(m: Any, x: Any) -> Any:
        host = x.cpu()
        with torch.autocast(kind, enabled=False), torch.autocast("cpu", enabled=False):
            h = m.linear(x) @ m.linear(x).T
            host = host @ host.T
        return h @ h, host.to(x.device) + 1, h @ x

    with torch.autocast(kind, torch.bfloat16), torch.autocast("cpu", torch.bfloat16):
        pair = run(machine, body, [rows(i, 4) for i in range(6)])
    assert pair.replays == 4 and pair.stats["eager"] == {}, pair.handle.report()
