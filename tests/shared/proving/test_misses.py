"""Which field made a call new, and one more that `extra_key` adds."""

import dataclasses
import logging
from typing import Any

import numpy as np
import pytest
import torch

from tests.pair import Machine
from tests.toys import Module, plain, rows


def test_a_miss_names_the_field_that_differs(machine: Machine, caplog: Any) -> None:
    caplog.set_level(logging.INFO)

    def body(m: Any, x: Any, t: Any, scale: Any = 1, extra: Any = None) -> Any:
        return m.linear(x) * scale + t.sum()

    pair = machine.pair(Module(body))
    t = torch.ones(2, 1, device=machine.on)

    def call(x: Any, t: Any, **kwargs: Any) -> str:
        caplog.clear()
        pair(**machine.to({"x": x, "t": t, **kwargs}))
        return caplog.text

    for i in range(3):
        call(rows(i), t)
    assert "t has 1 dimensions vs 2" in call(rows(0), t[:, 0])
    assert "x dim 0: 5 vs 2" in call(rows(0, 5), t)
    assert "t dtype: float64 vs float32" in call(rows(0), t.double())
    assert "x strides" in call(rows(0, 8).t()[:2], t)
    assert "scale: 2 vs not given" in call(rows(0), t, scale=2)
    extra = {"a": [t.clone()]}
    assert "extra['a'][0]: a tensor (2, 1) vs not given" in call(rows(0), t, extra=extra)
    for _ in range(3):
        call(rows(0), t, extra=extra)
    again = {"a": [t]}
    assert "extra['a'][0]: a tensor that is another argument too" in call(rows(0), t, extra=again)
    with torch.autocast(machine.on.partition(":")[0], torch.bfloat16):
        assert "autocast" in call(rows(0), t)
    assert "new signature" not in call(rows(0), t)
    assert "differs from the nearest recorded: x dim 0: 5 vs 2" in pair.handle.report()


@dataclasses.dataclass
class Grid:
    height: int
    width: int


def test_a_miss_names_what_lies_inside_a_value(machine: Machine, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    pair = machine.pair(
        Module(lambda m, x, grid, table: m.linear(x) * grid.width + float(table[0]))
    )

    def call(grid: Grid, table: Any) -> str:
        caplog.clear()
        pair.graphed(x=rows(0).to(machine.on), grid=grid, table=np.array(table))
        return caplog.text

    for _ in range(3):
        call(Grid(2, 4), [1, 2])
    assert "grid.width: 5 vs 4" in call(Grid(2, 5), [1, 2])
    assert "table: ndarray [1, 3] vs ndarray [1, 2]" in call(Grid(2, 4), [1, 3])


def test_a_miss_names_the_extra_key(machine: Machine, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    level = [1]
    pair = machine.pair(Module(plain), extra_key=lambda module, arguments: ("level", level[0]))
    for i in range(3):
        pair(rows(i).to(machine.on))
    level[0] = 7
    pair(rows(0).to(machine.on))
    assert "extra_key: 'level', 7 vs 'level', 1" in caplog.text


def test_an_extra_key_that_never_repeats_is_named(machine: Machine) -> None:
    counter = iter(range(1000))
    pair = machine.pair(Module(plain), extra_key=lambda module, arguments: next(counter))
    for i in range(12):
        pair(rows(i).to(machine.on))
    assert pair.stats["eager"]["extra_key is another value at every call"] >= 6


def test_an_extra_key_that_raises_is_eager_by_name(machine: Machine) -> None:
    pair = machine.pair(Module(plain), extra_key=lambda module, arguments: 1 // 0)
    for i in range(3):
        pair(rows(i).to(machine.on))
    (reason,) = pair.stats["eager"]
    assert reason.startswith("extra_key raised ZeroDivisionError")


def test_extra_key_keeps_calls_apart(machine: Machine) -> None:
    outside = {"scale": 1.0}
    pair = machine.pair(
        Module(lambda m, x: m.linear(x) * outside["scale"]),
        extra_key=lambda module, arguments: [outside["scale"], arguments["x"].shape[0]],
    )
    for scale in (1.0, 2.0, 1.0, 2.0, 1.0, 2.0):
        outside["scale"] = scale
        for i in range(2):
            pair(rows(i).to(machine.on))
    assert pair.replays == 8 and pair.stats["captures"] == 2


def test_a_global_is_seen_without_extra_key(machine: Machine) -> None:
    outside = {"scale": 1.0}
    pair = machine.pair(Module(lambda m, x: m.linear(x) * outside["scale"]))
    for i in range(3):
        pair(rows(i).to(machine.on))
    outside["scale"] = 2.0
    assert pair.compare(rows(1).to(machine.on))[0]


@pytest.mark.parametrize("value", [torch.ones(1), object()])
def test_an_extra_key_without_a_value_is_eager_by_name(machine: Machine, value: Any) -> None:
    pair = machine.pair(Module(plain), extra_key=lambda module, arguments: value)
    for i in range(3):
        pair(rows(i).to(machine.on))
    (reason,) = pair.stats["eager"]
    assert reason.startswith("extra_key returned")
