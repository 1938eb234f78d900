"""Python state that changes, between calls or by the forward itself: seen, accepted, put back."""

import functools
import io
import itertools
import logging
import random
import threading
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import dit_graph
from dit_graph.call.key import Signature
from dit_graph.runner.proof import Proof
from dit_graph.tape.tape import Tape
from tests.pair import Machine, Pair
from tests.toys import Module, rows, watched


class Scale:
    factor = 1.0

    def times(self, x: Any) -> Any:
        return x * self.factor


class Slotted:
    __slots__ = ("__hidden", "factor", "unset")

    def __init__(self) -> None:
        self.factor, self.__hidden = 1.0, 1.0

    def hide(self, value: float) -> None:
        self.__hidden = value

    def hidden(self) -> float:
        return self.__hidden


class Tripled(Scale):
    def times(self, x: Any) -> Any:
        return super().times(x) * 3


class OwnParameter(nn.Parameter):
    pass


class Listed(list[Any]):
    factor = 1.0


class Named(dict[Any, Any]):
    factor = 1.0


def times(scale: Any, x: Any) -> Any:
    return x * scale.factor


def bound(module: Any) -> None:
    module.apply_scale = Scale().times


def through_partial(module: Any) -> None:
    module.apply_scale = functools.partial(times, Scale())


def set_factor(m: Any) -> None:
    m.scale.factor = 3.0


SEEN: dict[str, Any] = {
    "slots": (
        lambda m: setattr(m, "scale", Slotted()),
        lambda m, x: x * m.scale.factor,
        set_factor,
    ),
    "private slots": (
        lambda m: setattr(m, "scale", Slotted()),
        lambda m, x: x * m.scale.hidden(),
        lambda m: m.scale.hide(3.0),
    ),
    "array": (
        lambda m: setattr(m, "scale", np.ones(2)),
        lambda m, x: x * float(m.scale[1]),
        lambda m: m.scale.__setitem__(1, 3.0),
    ),
    "deque": (
        lambda m: setattr(m, "scale", deque([1.0], maxlen=1)),
        lambda m, x: x * m.scale[0],
        lambda m: m.scale.append(3.0),
    ),
    "bound method": (
        bound,
        lambda m, x: m.apply_scale(x),
        lambda m: setattr(m.apply_scale.__self__, "factor", 3.0),
    ),
    "partial": (
        through_partial,
        lambda m, x: m.apply_scale(x),
        lambda m: setattr(m.apply_scale.args[0], "factor", 3.0),
    ),
    "negative zero": (
        lambda m: setattr(m, "scale", 0.0),
        lambda m, x: torch.copysign(x, torch.tensor(m.scale)),
        lambda m: setattr(m, "scale", -0.0),
    ),
    "another key of the same value": (
        lambda m: setattr(m, "scale", {"one": True}),
        lambda m, x: x * len(next(iter(m.scale))),
        lambda m: (m.scale.clear(), m.scale.update(three=True)),
    ),
    "a transposed weight": (
        lambda m: None,
        lambda m, x: m.linear(x),
        lambda m: setattr(m.linear.weight, "data", m.linear.weight.data.t()),
    ),
    "another class": (
        lambda m: setattr(m, "scale", Scale()),
        lambda m, x: m.scale.times(x),
        lambda m: setattr(m.scale, "__class__", Tripled),
    ),
    "a class that holds settings": (
        lambda m: setattr(m, "scale", type("Settings", (), {"factor": 1.0})),
        lambda m, x: x * m.scale.factor,
        set_factor,
    ),
    "an attribute of a list": (
        lambda m: setattr(m, "scale", Listed([1])),
        lambda m, x: x * m.scale.factor,
        set_factor,
    ),
    "an attribute of a dict": (
        lambda m: setattr(m, "scale", Named()),
        lambda m, x: x * m.scale.factor,
        set_factor,
    ),
    "an object in an array": (
        lambda m: setattr(m, "scale", np.array([None, Scale()])),
        lambda m, x: m.scale[1].times(x),
        lambda m: setattr(m.scale[1], "factor", 3.0),
    ),
    "the order of submodules": (
        lambda m: setattr(m, "chain", nn.Sequential(nn.ReLU(), nn.Softplus())),
        lambda m, x: m.chain(x),
        lambda m: m.chain._modules.update({"0": m.chain._modules.pop("0")}),
    ),
    "a parameter of a class of its own": (
        lambda m: setattr(m, "scale", OwnParameter(torch.ones(8), requires_grad=False)),
        lambda m, x: x * m.scale,
        lambda m: setattr(m.scale, "data", torch.full((8,), 3.0)),
    ),
    "a method of a library's class": (
        lambda m: setattr(m, "scale", type("Loaded", (Scale,), {"__module__": "diffusers.own"})()),
        lambda m, x: m.scale.times(x),
        lambda m: setattr(type(m.scale), "times", lambda self, x: x * 3),
    ),
    "a set that shrinks": (
        lambda m: setattr(m, "scale", {1, 2}),
        lambda m, x: x * len(m.scale),
        lambda m: m.scale.discard(1),
    ),
}


@pytest.mark.parametrize("name", SEEN)
def test_a_change_between_calls_is_seen(machine: Machine, name: str) -> None:
    prepare, body, change = SEEN[name]
    pair = machine.pair(Module(lambda m, x: body(m, m.linear(x))))
    for module in (pair.graphed, pair.eager):
        prepare(module)
    for i in range(4):
        pair(rows(i))
    for module in (pair.graphed, pair.eager):
        change(module)
    for i in range(4):
        pair(rows(i))
    assert pair.replays == 4, pair.handle.report()


def test_a_class_attribute_is_seen(machine: Machine) -> None:
    class Net(nn.Module):
        factor = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8).requires_grad_(False)
            self.helper = type("Helper", (Scale,), {"factors": [1.0]})()

        def forward(self, x: Any) -> Any:
            return self.helper.times(self.linear(x)) * self.factor * self.helper.factors[0]

    pair = machine.pair(Net())

    def check(change: Any) -> None:
        before = pair.replays
        change()
        for i in range(4):
            pair(rows(i))
        assert pair.replays >= before + 2, pair.handle.report()

    check(lambda: None)
    check(lambda: setattr(Net, "factor", 2.0))
    check(lambda: setattr(type(pair.graphed.helper), "factor", 3.0))
    check(lambda: pair.graphed.helper.factors.__setitem__(0, 5.0))
    check(lambda: setattr(type(pair.graphed.helper), "times", lambda self, x: x - self.factor))


def test_a_class_attribute_that_the_forward_writes(machine: Machine) -> None:
    class Net(nn.Module):
        count = 0

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8).requires_grad_(False)

        def forward(self, x: Any) -> Any:
            type(self).count += 1
            return self.linear(x) * type(self).count

    class Twin(Net):
        pass

    pair = machine.pair(Net())
    pair.eager.__class__ = Twin
    Twin.count = 0
    for i in range(6):
        pair(rows(i))
    assert list(pair.stats["eager"]) == ["the forward writes Python state: Net.count"]


def test_a_deque_that_the_forward_writes(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        m.past.append(1.0)
        return m.linear(x) * len(m.past)

    pair = machine.pair(Module(body, past=deque()))
    for i in range(8):
        pair(rows(i))
    assert pair.replays == 0


@pytest.mark.parametrize(
    "make", [itertools.count, lambda: iter(range(99)), lambda: (i for i in [])]
)
def test_an_iterator_is_eager_by_name(machine: Machine, make: Any) -> None:
    module = Module(lambda m, x: m.linear(x) * next(m.it, 0))
    pair = machine.pair(module)
    pair.graphed.it, pair.eager.it = make(), make()
    for i in range(5):
        pair(rows(i))
    assert pair.stats["eager"] == {"attribute it is an iterator": 5}
    pair.graphed.it = pair.eager.it = None
    pair.graphed.body = pair.eager.body = lambda m, x: m.linear(x)
    for i in range(4):
        pair(rows(i))
    assert pair.replays == 2, pair.handle.report()


def test_an_iterator_that_the_first_call_makes(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        if not hasattr(m, "it"):
            m.it = itertools.count()
        return m.linear(x) * next(m.it)

    pair = machine.pair(Module(body))
    for i in range(5):
        pair(rows(i))
    assert pair.replays == 0 and "attribute it is an iterator" in pair.stats["eager"]


def test_requires_grad_is_seen(machine: Machine) -> None:
    pair = machine.pair(Module(lambda m, x: m.linear(x) * 2))
    with torch.enable_grad():
        for i in range(4):
            pair(rows(i))
        pair.graphed.linear.weight.requires_grad_(True)
        assert pair.graphed(rows(9)).requires_grad
    assert (
        pair.stats["eager"] == {"gradients are needed; call it under torch.no_grad()": 1}
        and pair.replays == 2
    )


def with_batch_norm(machine: Machine) -> Pair:
    norm = nn.BatchNorm1d(8).requires_grad_(False)
    return machine.pair(Module(lambda m, x: m.norm(m.linear(x)), norm=norm))


def test_batch_norm_in_training_mode(machine: Machine) -> None:
    pair = with_batch_norm(machine)
    for module in (pair.graphed, pair.eager):
        module.train()
    for i in range(5):
        pair(rows(i, 4))
    assert pair.stats["eager"] == {"batch norm in training mode: norm": 5}
    for module in (pair.graphed, pair.eager):
        module.eval()
    for i in range(4):
        pair(rows(i, 4))
    assert pair.replays == 2


@pytest.mark.parametrize("when", ["forward_hook", "forward_pre_hook"])
def test_a_global_hook(machine: Machine, when: str) -> None:
    pair = machine.pair(Module(lambda m, x: m.linear(x)))
    for i in range(3):
        pair(rows(i))
    seen: list[nn.Module] = []
    register = getattr(nn.modules.module, f"register_module_{when}")
    hook = register(lambda module, *rest: seen.append(module) and None)
    try:
        for i in range(3):
            pair.graphed(rows(i))
    finally:
        hook.remove()
    assert seen.count(pair.graphed.linear) == 3
    assert pair.stats["eager"] == {"a global forward hook would not run": 3}
    pair(rows(3))
    assert pair.replays == 2


# ---- the watcher alone


def module_with(**attributes: Any) -> Any:
    return Module(None, **attributes)


def test_only_a_memo_table_may_grow() -> None:
    module = module_with(memo={"a": 1}, items=[1], helper=Scale(), part=functools.partial(times))

    def grew(change: Any) -> bool:
        """Whether recordings made before the forward wrote this stay."""
        state = watched(module)
        entry = state.now.owned.new(call.key, Proof())
        entry.tapes.append(Tape())
        change()
        state.accept()
        return bool(state.now.owned.recorded)

    call = Signature(module.forward).bind((), {})
    assert grew(lambda: None)
    assert grew(lambda: module.memo.update(b=2))
    assert grew(lambda: module.memo.setdefault("deep", {}))
    assert grew(lambda: module.memo["deep"].update(c=3))
    assert not grew(lambda: module.memo.update(b=3))
    assert not grew(lambda: module.memo.pop("b"))
    assert not grew(lambda: module.items.append(2))
    assert not grew(lambda: setattr(module, "new", 1))
    assert not grew(lambda: setattr(module.helper, "new", 1))
    assert not grew(lambda: module.part.keywords.update(scale=1))
    assert not grew(lambda: module.register_buffer("late", torch.zeros(1)))
    assert not grew(lambda: module.linear.register_forward_hook(print))
    assert not grew(lambda: (module.memo.update(e=2), setattr(module, "other", 1)))


def test_everything_is_put_back() -> None:
    class Own(Scale):
        table = 1

    module = module_with(
        slotted=Slotted(), past=deque([1, 2], maxlen=3), array=np.ones(2), own=Own(), names={"a"}
    )
    state = watched(module)
    before = state.snapshot()
    module.slotted.factor, module.slotted.unset = 2.0, 1
    module.past += [3, 4]
    module.array[:] = 7
    Own.table, Own.added = 2, 1  # type: ignore[attr-defined]
    module.names.add("b")
    module.own.__class__ = Tripled
    before.restore()
    assert state.compare() == ""
    assert module.slotted.factor == 1.0 and not hasattr(module.slotted, "unset")
    assert list(module.past) == [1, 2] and module.past.maxlen == 3
    assert module.array.tolist() == [1.0, 1.0] and module.names == {"a"}
    assert Own.table == 1 and not hasattr(Own, "added") and type(module.own) is Own


def test_other_objects_of_the_same_value_are_no_change() -> None:
    module = module_with(factor=float("1.5"), name="".join(["a", "b"]), scalar=np.float32(2))
    state = watched(module)
    for _ in range(2):
        module.factor, module.name, module.scalar = float("1.5"), "".join("ab"), np.float32(2)
        assert state.compare() == ""
    module.__dict__.update(name=module.__dict__.pop("name"))  # another order of attributes
    assert state.compare() == "" and not state.moved()
    module.scalar = np.float32(3)
    assert state.compare() == "scalar"


def test_what_is_not_looked_into() -> None:
    class Elsewhere(logging.LoggerAdapter):  # type: ignore[type-arg]
        pass

    module = module_with(
        log=Elsewhere(logging.getLogger("a"), {}), lock=threading.Lock(), file=io.StringIO("text")
    )
    state = watched(module)
    assert state.blocker is None
    module.log.extra = {"a": 1}
    assert state.compare() == ""


def test_methods_that_are_descriptors_stay_the_same(machine: Machine) -> None:
    class Helper:
        @classmethod
        def __call__(cls, x: Any, factor: float = 2.0) -> Any:
            return x * factor

        forward = functools.partialmethod(__call__, factor=3.0)

    pair = machine.pair(Module(lambda m, x: m.helper(m.linear(x)), helper=Helper()))
    for i in range(5):
        pair(rows(i))
    assert pair.replays == 3, pair.stats


def test_a_memo_in_the_order_of_its_last_use(machine: Machine) -> None:
    def body(m: Any, x: Any, key: int) -> Any:
        m.memo[key] = m.memo.pop(key, key)
        return m.linear(x) * m.memo[key]

    pair = machine.pair(Module(body, memo={}))
    for i in range(12):
        pair(rows(i), 1 + i % 2)
    assert pair.replays >= 6, pair.stats


def test_the_memory_of_a_wrapped_weight_is_compared() -> None:
    def wrapped(value: float) -> nn.Parameter:
        return nn.Parameter(TwoTensor(torch.full((8,), value), torch.ones(8)), requires_grad=False)

    module = module_with(scale=wrapped(1.0))
    state = watched(module)
    assert state.compare() == ""
    torch.utils.swap_tensors(module.scale, wrapped(2.0))  # as `to` does it; the object stays
    assert not state.may_wait
    assert state.compare() == "storage of a parameter, buffer or tensor attribute"


@pytest.mark.parametrize(
    "make", [lambda: random.Random(0), lambda: np.random.RandomState(0), np.random.default_rng]
)
def test_a_generator_of_the_modules_own_is_eager_by_name(machine: Machine, make: Any) -> None:
    pair = machine.pair(Module(lambda m, x: m.linear(x) * m.draws.random(), draws=make()))
    for i in range(4):
        pair(rows(i))
    (reason,) = pair.stats["eager"]
    assert reason == "attribute draws is a random generator, which no replay moves"


def test_a_class_that_is_only_looked_at_stays_the_same() -> None:
    class Bare:
        pass

    module = module_with(helper=Bare())
    state = watched(module)
    assert Bare.__annotations__ == {}  # makes the dict
    assert state.compare() == ""


def test_a_forward_replaced_on_the_class_is_seen(machine: Machine) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * 2

    net = Net()
    handle = dit_graph.enable(net, device=machine.device)
    x = torch.randn(2, 4)
    for _ in range(4):
        assert torch.equal(net(x), net.linear(x) * 2)
    Net.forward = lambda self, x: self.linear(x) * 5  # type: ignore[method-assign]
    for _ in range(4):
        assert torch.equal(net(x), net.linear(x) * 5)
    assert handle.stats()["replays"] == 4


def test_a_forward_replaced_on_a_library_class_is_seen(machine: Machine, monkeypatch: Any) -> None:
    pair = machine.pair(nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.ReLU()))
    for i in range(4):
        pair(rows(i))
    monkeypatch.setattr(nn.ReLU, "forward", lambda self, x: x * 3)
    for i in range(4):
        pair(rows(i))
    assert pair.replays == 4, pair.handle.report()
    state = watched(pair.graphed)
    monkeypatch.undo()
    assert state.compare() == "ReLU.forward"
