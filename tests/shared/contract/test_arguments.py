"""What a call is given: staged, written back, kept apart, or eager by name."""

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import nn

import dit_graph
from dit_graph import eager_on_graph
from tests.pair import PLAIN, Machine
from tests.toys import Module, rows, run


@dataclasses.dataclass
class Conditioning:
    tokens: torch.Tensor
    scale: float = 1.0


def test_nested_tensors_are_staged(machine: Machine) -> None:
    def body(m: Any, x: Any, residuals: Any, extra: Any, cond: Any) -> Any:
        return (
            m.linear(x) + residuals[0] + extra["a"]["b"] * cond.scale + cond.tokens + extra["o"][0]
        )

    calls = [
        {
            "x": rows(i),
            "residuals": [rows(i + 1)],
            "extra": {
                "a": {"b": rows(i + 2)},
                "n": None,
                "o": Transformer2DModelOutput(rows(i + 4)),
            },
            "cond": Conditioning(rows(i + 3).to(machine.on), 0.5),
        }
        for i in range(0, 50, 10)
    ]
    assert run(machine, body, calls).replays == 3


def test_new_shapes_in_a_container_without_names_are_told(machine: Machine) -> None:
    calls = [{"x": Transformer2DModelOutput(torch.ones(size, 4))} for size in (2, 2, 3, 3)]
    pair = run(machine, lambda m, x: x.sample * 2 + x.sample.mean(), calls)
    assert "signature x<0> 3x4: captured" in pair.handle.report()
    assert "x<0> dim 0: 3 vs 2" in pair.handle.report()


def test_positional_and_keyword_calls_share_a_recording(machine: Machine) -> None:
    class Two(nn.Module):
        def forward(self, x: Any, y: Any, scale: Any = 1.0) -> Any:
            return x * scale - y

    pair = machine.pair(Two())
    for i in range(3):
        x, y = rows(i).to(machine.on), rows(i + 9).to(machine.on)
        pair(x, y, 2.0)
        pair(x, scale=2.0, y=y)
        pair(y=y, x=x, scale=2.0)
    assert pair.stats["captures"] == 1 and pair.replays == 7


@pytest.mark.parametrize("values", [(1, True, 1.0), (0.0, -0.0), (None, False, 0), ("a", b"a")])
def test_values_that_compare_equal_stay_apart(machine: Machine, values: Any) -> None:
    def body(m: Any, x: Any, v: Any) -> Any:
        return (
            x
            + {"int": 1, "bool": 2, "float": 3, "NoneType": 4}.get(type(v).__name__, 5)
            + (torch.copysign(torch.ones_like(x), torch.tensor(v)) if isinstance(v, float) else 0)
        )

    pair = machine.pair(Module(body))
    for _ in range(4):
        for v in values:
            pair(rows(1).to(machine.on), v)
    assert pair.stats["captures"] == len(values) and pair.replays == 2 * len(values)


def test_a_float_that_changes_every_step_is_named_once(machine: Machine, caplog: Any) -> None:
    pair = machine.pair(Module(lambda m, x, kw: x * kw["sigma"]))
    for _ in range(3):
        for step in range(10):
            pair(rows(step).to(machine.on), {"sigma": step / 10})
    assert pair.stats["captures"] == 0
    (reason,) = pair.stats["eager"]
    assert "argument *1['sigma'] is another value at every call" in reason
    assert sum("sigma" in record.message for record in caplog.records) == 1


def test_a_setting_that_changes_seldom_is_recorded(machine: Machine) -> None:
    pair = machine.pair(Module(lambda m, x, kw: x * kw["scale"]))
    for scale in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6):
        for step in range(6):
            pair(rows(step).to(machine.on), {"scale": scale})
    assert pair.replays >= 6 * 3


def test_broadcast_and_strided_arguments(machine: Machine) -> None:
    pair = machine.pair(Module(lambda m, x, t: m.linear(x) * t))
    for i in range(5):
        wide = torch.randn(2, 16).to(machine.on)
        t = torch.tensor([[float(i)]]).to(machine.on).expand(2, 8)
        pair(wide[:, ::2], t)
    assert pair.replays == 3


def test_an_input_written_in_place_is_written_back(machine: Machine) -> None:
    assert run(machine, lambda m, x: x.mul_(2).sum(), [rows(i) for i in range(5)]).replays == 3


def test_arguments_that_share_storage_and_are_written(machine: Machine) -> None:
    def body(m: Any, x: Any, y: Any) -> Any:
        x.add_(1)
        return y * 2

    pair = machine.pair(Module(body))
    for i in range(5):
        x = rows(i).to(machine.on)
        pair(x, x[:1])
    assert pair.replays == 0 and "share storage" in next(iter(pair.stats["eager"]))
    for i in range(5):
        pair(rows(i).to(machine.on), rows(i)[:1].to(machine.on))


def test_a_foreign_object_is_eager_by_name(machine: Machine) -> None:
    class Cache:
        pass

    pair = machine.pair(Module(lambda m, x, cache: x + 1))
    for i in range(3):
        pair(rows(i).to(machine.on), cache=Cache())
    assert pair.stats["eager"] == {"argument cache is a Cache, which has no value to compare": 3}


def shape_in_place(m: Any, x: Any) -> Any:
    return x.transpose_(0, 1) + 1


def one_dimension_more(m: Any, x: Any) -> Any:
    return x.unsqueeze_(0) + 1


def other_memory(m: Any, x: Any) -> Any:
    x.data = x.data * 2
    return x + 1


@pytest.mark.parametrize("body", [shape_in_place, one_dimension_more, other_memory])
def test_an_argument_that_gets_another_shape_or_memory(machine: Machine, body: Any) -> None:
    pair = run(machine, body, [rows(i, 8) for i in range(4)])
    reason = "the forward changes the shape or the memory of an argument in place"
    assert pair.stats["eager"] == {reason: 3}


def test_an_array_that_the_forward_writes(machine: Machine) -> None:
    def body(m: Any, x: Any, n: Any) -> Any:
        n += 1
        return m.linear(x) + torch.from_numpy(n).to(x.device)

    wrapped = Module(lambda m, x, c: body(m, x, c.tokens))
    for module, wrap in ((Module(body), lambda n: n), (wrapped, Conditioning)):
        module = module.to(machine.on)
        handle = dit_graph.enable(module, device=machine.device, **PLAIN)
        for i in range(4):
            n = np.zeros(8, np.float32)
            module(rows(i).to(machine.on), wrap(n))
            assert (n == 1).all()
        (reason,) = handle.stats()["eager"]
        assert reason == "the forward changes a list, dict or array that it is given"


def test_inference_mode_of_the_forwards_own(machine: Machine) -> None:
    """What it makes cannot be written by a replay outside of it."""
    pair = run(machine, torch.inference_mode()(lambda m, x: m.linear(x) * 2), [rows(0)] * 4)
    reason = "the forward turns inference mode on by itself; turn it on around the call"
    assert pair.stats["eager"] == {reason: 3}


def test_an_inference_tensor_of_the_callers_is_no_sign_of_that(machine: Machine) -> None:
    with torch.inference_mode():
        x = rows(0).to(machine.on)
    module = Module(lambda m, x, e: (m.linear(x), e, e[None])).to(machine.on)
    twin = copy.deepcopy(module)
    handle = dit_graph.enable(module, device=machine.device, **PLAIN)
    for i in range(4):
        out, expected = module(rows(i).to(machine.on), x), twin(rows(i).to(machine.on), x)
        assert all(map(torch.equal, out, expected)) and out[1] is x
    assert handle.stats()["replays"] == 2


def test_a_size_stays_one(machine: Machine) -> None:
    """pytree would make a tuple of it."""

    @eager_on_graph(pure=True)
    def rows_of(h: torch.Tensor, size: torch.Size) -> tuple[torch.Tensor, torch.Size]:
        return h * size.numel(), h.shape

    def body(m: Any, x: Any, size: Any) -> Any:
        h, shape = rows_of(m.linear(x), size)
        return {"h": h * shape.numel(), "size": shape, "is": isinstance(size, torch.Size)}

    pair = machine.pair(Module(body))
    for i in range(5):
        found = pair(rows(i).to(machine.on), torch.Size([3, i // 3]))
        assert type(found["size"]) is torch.Size and found["is"] is True
    assert pair.replays == 1 and pair.stats["eager"] == {}


def test_a_list_that_the_forward_changes_is_eager_by_name(machine: Machine) -> None:
    def body(m: Any, x: Any, out: Any) -> Any:
        out.append(x * 2)
        return x + 1

    pair = machine.pair(Module(body))
    for i in range(4):
        pair(rows(i).to(machine.on), out=[])
    assert list(pair.stats["eager"]) == [
        "the forward changes a list, dict or array that it is given"
    ]


def test_keywords_without_a_parameter_keep_their_order(machine: Machine) -> None:
    pair = machine.pair(Module(lambda m, x, **more: m.linear(torch.cat([x, *more.values()]))))
    for i in range(4):
        pair(**machine.to({"x": rows(0), "b": rows(i), "a": rows(i + 1)}))
    for i in range(4):
        pair(**machine.to({"x": rows(0), "a": rows(i), "b": rows(i + 1)}))
    assert pair.replays == 4


def test_one_tensor_given_twice_stays_one(machine: Machine) -> None:
    def body(m: Any, x: Any, y: Any, more: Any = ()) -> Any:
        y.add_(1)
        return m.linear(x) if x is y else m.linear(x) + y, *more

    pair = machine.pair(Module(body))
    for i in range(4):
        x, y = rows(i).to(machine.on), rows(i + 1).to(machine.on)
        pair(x, y)
        pair(x, x)
        pair(x, y, more=[y, x, y])
    assert pair.replays == 6


def test_an_array_of_objects_is_eager_by_name(machine: Machine) -> None:
    pair = machine.pair(Module(lambda m, x, v: m.linear(x) * v[0]))
    for i in range(4):
        x, v = rows(i).to(machine.on), np.array([i, None])
        assert torch.equal(pair.graphed(x, v), pair.eager(x, v))
    (reason,) = pair.stats["eager"]
    assert reason == "argument *1 is a ndarray, which has no value to compare"


def test_plain_values_that_vary_are_named(machine: Machine) -> None:
    for make in (
        np.float64,
        complex,
        str,
        lambda v: Conditioning(rows(0).to(machine.on), float(v)),
    ):
        pair = machine.pair(Module(lambda m, x, v: m.linear(x)))
        for i in range(12):
            pair(rows(i).to(machine.on), make(i))
        assert pair.stats["captures"] == 0
        assert "is another value at every call" in next(iter(pair.stats["eager"]))


def test_a_dataclass_that_the_forward_changes(machine: Machine) -> None:
    def body(m: Any, x: Any, c: Any) -> Any:
        c.tokens = c.tokens * 2
        return m.linear(x) + c.tokens

    pair = machine.pair(Module(body))
    for i in range(4):
        pair(rows(i).to(machine.on), Conditioning(rows(i).to(machine.on)))
    assert "changes a list, dict or array" in next(iter(pair.stats["eager"]))
