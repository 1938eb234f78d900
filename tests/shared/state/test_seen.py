"""What a forward may read beside its arguments is seen where it changes, wherever it lies."""

import contextvars
import decimal
import fractions
import functools
import threading
import types
import weakref
from typing import Any

import pytest
import torch

import dit_graph
from tests.pair import Machine
from tests.shared.state import nested, settings
from tests.toys import Module, rows

NUMBER = 1.0
HELD = {"scale": 1.0}
CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)
LOCAL = threading.local()
LOCAL.scale = 1.0


class Rate(float):
    """A number of a class of its own."""


class Label(str):
    scale = 1.0


class Holder:
    scale = 1.0

    @property
    def through_property(self) -> float:
        return NUMBER * self.scale

    @staticmethod
    def through_static() -> float:
        return NUMBER

    @functools.cached_property
    def kept(self) -> float:
        return 1.0


HOLDER = Holder()
ONE, THREE = decimal.Decimal(1), decimal.Decimal(3)


def by_default(scale: float = 1.0, *, more: float = 1.0) -> float:
    return scale * more


def helper() -> float:
    return inner_helper()


def inner_helper() -> float:
    return NUMBER


def set_number(value: float) -> None:
    global NUMBER
    NUMBER = value


def read_by_import() -> float:
    from tests.shared.state.settings import SCALE

    return SCALE


@torch.no_grad()
def decorated() -> float:
    return HELD["scale"]


def in_a_closure() -> tuple[Any, Any]:
    cell = [1.0]
    return (lambda m, x: m.linear(x) * cell[0]), (lambda v: cell.__setitem__(0, v))


def in_a_cell() -> tuple[Any, Any]:
    scale = 1.0

    def body(m: Any, x: Any) -> Any:
        return m.linear(x) * scale

    def change(value: float) -> None:
        nonlocal scale
        scale = value

    return body, change


def in_a_closure_of_a_closure() -> tuple[Any, Any]:
    table = {"scale": 1.0}

    def scaled(x: Any) -> Any:
        return x * table["scale"]

    return (lambda m, x: scaled(m.linear(x))), (lambda v: table.update(scale=v))


def attribute(value: Any, read: Any, change: Any) -> Any:
    """A case in which `m.held` is what is read, and changed."""

    def case() -> tuple[Any, Any, Any]:
        return (lambda m, x: m.linear(x) * read(m.held)), change, value

    return case


def reading(read: Any, change: Any) -> Any:
    return lambda: ((lambda m, x: m.linear(x) * read()), change)


CASES: dict[str, Any] = {
    "a list in a closure": in_a_closure,
    "a rebound cell": in_a_cell,
    "a dict in a closure of a function in a closure": in_a_closure_of_a_closure,
    "a global": reading(lambda: NUMBER, set_number),
    "a global that a helper of a helper reads": reading(lambda: helper(), set_number),
    "a dict that is a global": reading(lambda: HELD["scale"], lambda v: HELD.update(scale=v)),
    "an object that is a global": reading(
        lambda: HOLDER.scale, lambda v: setattr(HOLDER, "scale", v)),
    "a global that a property reads": reading(lambda: HOLDER.through_property, set_number),
    "a global that a static method reads": reading(lambda: Holder.through_static(), set_number),
    "a default argument": reading(
        lambda: by_default(), lambda v: setattr(by_default, "__defaults__", (v,))),
    "a default of a keyword": reading(
        lambda: by_default(), lambda v: setattr(by_default, "__kwdefaults__", {"more": v})),
    "a context variable": reading(lambda: CONTEXT.get(), CONTEXT.set),
    "a thread's own": reading(lambda: LOCAL.scale, lambda v: setattr(LOCAL, "scale", v)),
    "an attribute of a Python module": reading(
        lambda: settings.SCALE, lambda v: setattr(settings, "SCALE", v)),
    "a dict in a Python module": reading(
        lambda: settings.TABLE["scale"], lambda v: settings.TABLE.update(scale=v)),
    "a module in a module": reading(
        lambda: nested.deeper.SCALE, lambda v: setattr(settings, "SCALE", v)),
    "an import inside": reading(read_by_import, lambda v: setattr(settings, "SCALE", v)),
    "under torch's decorator": reading(lambda: decorated(), lambda v: HELD.update(scale=v)),
    "another code": reading(
        lambda: inner_helper(),
        lambda v: setattr(inner_helper, "__code__",
                          (lambda: 3.0).__code__ if v == 3.0 else (lambda: NUMBER).__code__)),
    "a decimal": attribute(
        ONE, float, lambda m, v: setattr(m, "held", THREE if v == 3.0 else ONE)),
    "a fraction": attribute(
        fractions.Fraction(1), float, lambda m, v: setattr(m, "held", fractions.Fraction(v))),
    "a number of its own class": attribute(
        Rate(1), float, lambda m, v: setattr(m, "held", Rate(v))),
    "an attribute of a text": attribute(
        Label("a"), lambda held: held.scale, lambda m, v: setattr(m.held, "scale", v)),
    "behind a weak reference": attribute(
        weakref.ref(HOLDER), lambda held: held().scale, lambda m, v: setattr(m.held(), "scale", v)),
    "a namespace in a tuple": attribute(
        ((types.SimpleNamespace(scale=1.0),),), lambda held: held[0][0].scale,
        lambda m, v: setattr(m.held[0][0], "scale", v)),
    "a key of a dict": attribute(
        {1.0: "x"}, lambda held: next(iter(held)),
        lambda m, v: (m.held.clear(), m.held.update({v: "x"}))),
    "a list of equal numbers of another type": attribute(
        [2.0], lambda held: 1.0 if type(held[0]) is float else float(held[0]) * 3,
        lambda m, v: setattr(m, "held", [2] if v == 3.0 else [2.0])),
    "what was replaced by its equal before": attribute(
        [1.0], lambda held: held[0],
        lambda m, v: (setattr(m, "held", [*m.held]), m(rows(0).to(m.linear.weight.device)),
                      m.held.__setitem__(0, v))),
    "a partial's keyword": attribute(
        functools.partial(by_default, scale=1.0), lambda held: held(),
        lambda m, v: m.held.keywords.update(scale=v)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_seen_and_known_when_it_comes_back(machine: Machine, name: str) -> None:
    body, change, *held = CASES[name]()
    pair = machine.pair(Module(body, **({"held": held[0]} if held else {})))
    if held and name == "behind a weak reference":
        pair.eager.held = pair.graphed.held

    def both(value: float) -> None:
        if held:
            for module in (pair.graphed, pair.eager):
                change(module, value)
        else:
            change(value)
        for i in range(4):
            pair(rows(i).to(machine.on))

    try:
        for i in range(4):
            pair(rows(i).to(machine.on))
        both(3.0)
        both(1.0)
        both(3.0)
        assert pair.stats["eager"] == {} and pair.stats["captures"] <= 3, pair.handle.report()
        assert pair.replays >= 9, pair.handle.report()
    finally:
        both(1.0)


def test_what_cannot_be_seen_is_eager_by_name(machine: Machine) -> None:
    pair = machine.pair(Module(lambda m, x: m.linear(x) * globals()["NUMBER"]))
    for value in (1.0, 1.0, 1.0, 3.0, 1.0):
        set_number(value)
        pair(rows(0).to(machine.on))
    (reason,) = pair.stats["eager"]
    assert "calls globals: what it reads cannot be seen" in reason
    buffer = machine.pair(Module(lambda m, x: m.linear(x) * m.held[0], held=bytearray(b"\x01")))
    for _ in range(3):
        buffer(rows(0).to(machine.on))
    assert list(buffer.stats["eager"]) == ["attribute held is a bytearray: use a numpy array"]


def filling(kept: Any) -> Any:
    def body(m: Any, x: Any) -> Any:
        out = m.linear(x)
        kept.append(1)
        return out * len(kept)

    return body


def test_a_forward_that_fills_a_list_in_its_closure_is_eager_by_name(machine: Machine) -> None:
    kept: list[int] = []
    module = Module(filling(kept)).to(machine.on)
    handle = dit_graph.enable(module, device=machine.device)
    for i in range(6):
        x = rows(i).to(machine.on)
        assert torch.equal(module(x), module.linear(x) * (i + 1))
    assert len(kept) == 6, "once a call, verified or not"
    (reason,) = handle.stats()["eager"]
    assert reason == "the forward writes Python state: body.kept"
