"""Odd objects in every argument of every entry point: nothing of ours reaches the caller.

The plain module beside it says what is right: its result, or the error that it raises itself.
"""

import collections
import copy
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import dit_graph
from dit_graph.memory.pool import Pool
from dit_graph.runner.entry import Entry
from dit_graph.runner.proof import Proof
from dit_graph.runner.record import CaptureAction
from tests.families import FAMILIES
from tests.pair import PLAIN, Machine, same_tree
from tests.shared.test_copies import Pipe


class Odd(RuntimeError):
    """Raised by an object that nobody should have looked into."""


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise Odd("looked into")


def refusing(base: type = object, **names: Any) -> type:
    return type("Refusing", (base,), dict.fromkeys(names, refuse))


class OfNoClass:
    __class__ = property(refuse)  # type: ignore[assignment]


class OfAnyAttribute:
    def __getattr__(self, name: str) -> Any:
        raise Odd(name)


class Subclass(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("stride", "data_ptr", "untyped_storage"):
            raise Odd(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


@dataclasses.dataclass
class Record:
    value: int


def of_missing_fields() -> Record:
    record = Record(1)
    del record.value
    return record


def itself() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


ODD: dict[str, Callable[[], Any]] = {
    "no repr": refusing(__repr__=1, __str__=1),
    "no equality": refusing(__eq__=1, __hash__=1),
    "no truth": refusing(__bool__=1, __len__=1),
    "a number without a hash": lambda: refusing(int, __hash__=1, __eq__=1)(3),
    "a text without a hash": lambda: refusing(str, __hash__=1, __eq__=1)("a"),
    "no class": OfNoClass,
    "no attribute": OfAnyAttribute,
    "a list that is not read": lambda: refusing(list, __iter__=1, __len__=1)([1]),
    "a dict that is not read": lambda: refusing(dict, items=1, __iter__=1, keys=1)(a=1),
    "missing fields": of_missing_fields,
    "itself": itself,
    "a function": lambda: refuse,
    "a module": lambda: nn.Linear(1, 1),
    "objects in an array": lambda: np.array([None, {}], dtype=object),
    "a dict of lists": lambda: {"a": {1: [2]}},
    "a set": lambda: {1, (2,)},
    "a deque": lambda: collections.deque([1]),
    "a slice": lambda: slice(1),
    "a large number": lambda: 10**400,
    "half a letter": lambda: "\ud800",
    "a subclass": lambda: torch.zeros(2).as_subclass(Subclass),
    "a sparse tensor": lambda: torch.zeros(2).to_sparse(),
    "a nested tensor": lambda: torch.nested.nested_tensor([torch.zeros(1)]),
    "a meta tensor": lambda: torch.zeros(2, device="meta"),
    "an empty tensor": lambda: torch.empty(0),
    "a generator": torch.Generator,
    "bytes": lambda: bytearray(b"x"),
}


def outcome(call: Callable[[], Any]) -> Any:
    """The result, or the class of what was raised."""
    try:
        return call()
    except Exception as error:
        return type(error)


def alike(mine: Any, its: Any) -> bool:
    return mine is its if isinstance(its, type) else same_tree(mine, its)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Any, y: Any = None, *rest: Any, **more: Any) -> Any:
        return self.linear(x)


class Giving(Net):
    def forward(self, x: Any, y: Any = None, *rest: Any, **more: Any) -> Any:
        return {"hidden": self.linear(x), "odd": y}


CALLS: dict[str, Callable[[Any, torch.Tensor, Any], Any]] = {
    "the first": lambda m, x, odd: m(odd),
    "by position": lambda m, x, odd: m(x, odd),
    "by name": lambda m, x, odd: m(x, y=odd),
    "the rest": lambda m, x, odd: m(x, None, odd),
    "a name without a parameter": lambda m, x, odd: m(x, more=odd),
    "inside of a list": lambda m, x, odd: m(x, y=[{"odd": odd}]),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_arguments_of_a_module(machine: Machine, name: str) -> None:
    odd, x = ODD[name](), torch.randn(2, 8, device=machine.on)
    for call in CALLS.values():
        module = Net().to(machine.on)
        twin = copy.deepcopy(module)
        handle = dit_graph.enable(module, device=machine.device, **PLAIN)
        for _ in range(4):
            mine, its = (outcome(lambda m=m: call(m, x, odd)) for m in (module, twin))
            assert alike(mine, its), mine
        assert handle.stats()["calls"] == 4 and handle.report() and str(handle.explain())


@pytest.mark.parametrize("name", ODD)
def test_odd_state_and_results_of_a_module(machine: Machine, name: str) -> None:
    x = torch.randn(2, 8, device=machine.on)
    module = Net().to(machine.on)
    expected = module(x)
    handle = dit_graph.enable(module, device=machine.device, **PLAIN)
    for i in range(8):
        if i in (2, 5):  # others of the kind, which may have to be compared with what was there
            module.__dict__["odd"] = ODD[name]()
        assert torch.equal(module(x), expected)
    assert handle.stats()["calls"] == 8 and handle.report()
    handle.disable()
    giving, odd = Giving().to(machine.on), ODD[name]()
    for verify in ("first", "off"):
        handle = dit_graph.enable(giving, device=machine.device, gate="always", verify=verify)
        for _ in range(4):
            assert torch.equal(giving(x, odd)["hidden"], giving.linear(x))
        handle.disable()


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False)


_ARGUMENTS = (
    "input_ids", "inputs_embeds", "attention_mask", "position_ids", "past_key_values", "use_cache",
    "output_attentions", "output_hidden_states", "return_dict", "cache_position", "unknown",
)  # fmt: skip


@pytest.mark.parametrize("name", [*ODD, "another shape"])
@pytest.mark.parametrize("tokens", [7, 1])  # 1: a decode step
def test_odd_arguments_of_a_prefill(machine: Machine, name: str, tokens: int) -> None:
    model, twin = llama().to(machine.on), llama().to(machine.on)
    ids = torch.randint(3, 64, (1, 7), device=machine.on)
    handle = dit_graph.enable(model, mode="prefill", device=machine.device, buckets=(8,), **PLAIN)
    for _ in range(3):
        model(ids)
    odd = torch.zeros(7, device=machine.on).long() if name == "another shape" else ODD[name]()
    for argument in _ARGUMENTS:
        call = {"input_ids": ids[:, :tokens], argument: odd}
        if argument == "inputs_embeds":
            del call["input_ids"]
        mine, its = (outcome(lambda m=m: m.model(**call)) for m in (model, twin))
        if isinstance(its, type):
            assert mine is its, f"{argument}: {mine} in place of {its}"
        else:
            torch.testing.assert_close(mine[0], its[0])
    torch.testing.assert_close(model(ids).logits, twin(ids).logits)
    assert handle.report() and handle.stats()["replays"] >= 1


@pytest.mark.parametrize("name", ODD)
def test_odd_objects_of_a_pipeline_and_its_scheduler(machine: Machine, name: str) -> None:
    odd = ODD[name]()
    transformer = FAMILIES["flux"].build().to(machine.on)
    pipes = [Pipe(transformer, FlowMatchEulerDiscreteScheduler()) for _ in range(2)]
    handle = dit_graph.enable(pipes[0], device=machine.device, remove_syncs=True, **PLAIN)
    sample = torch.zeros(1, 4, device=machine.on)

    def set_timesteps(pipe: Any) -> Any:
        pipe.scheduler.set_timesteps(odd)

    def step(pipe: Any) -> Any:
        pipe.scheduler.set_timesteps(4)
        return pipe.scheduler.step(sample, odd, sample)[0]

    def attribute(pipe: Any) -> Any:
        pipe.scheduler.__dict__["odd"] = pipe.__dict__["guider"] = odd
        pipe.scheduler.set_timesteps(4)
        return pipe.scheduler.step(sample, pipe.scheduler.timesteps[0], sample)[0]

    def replaced(pipe: Any) -> Any:
        pipe.__dict__["transformer"] = odd
        pipe.scheduler.set_timesteps(4)
        pipe.__dict__["transformer"] = transformer
        return len(pipe.scheduler.timesteps)

    for act in (set_timesteps, step, attribute, replaced):
        mine, its = (outcome(lambda p=p: act(p)) for p in pipes)
        assert alike(mine, its), f"{act.__name__}: {mine} in place of {its}"
    assert handle.report()


def test_an_odd_object_on_the_stack(machine: Machine) -> None:
    class Proxy:
        __class__ = property(refuse)  # type: ignore[assignment]

        def __call__(self, pipe: Any) -> int:
            pipe.scheduler.set_timesteps(3)
            return len(pipe.scheduler.timesteps)

    class Guided(Pipe):
        guider = property(refuse)

        def __call__(self) -> int:
            self.scheduler.set_timesteps(4)
            return len(self.scheduler.timesteps)

    transformer = FAMILIES["flux"].build().to(machine.on)
    pipe = Guided(transformer, FlowMatchEulerDiscreteScheduler())
    dit_graph.enable(pipe, device=machine.device, remove_syncs=True, **PLAIN)
    assert Proxy()(pipe) == 3 and pipe() == 4


@pytest.mark.parametrize("when", ["a replay", "after a replay", "a recording", "after one"])
def test_bookkeeping_that_fails_around_an_answer(
    machine: Machine, when: str, monkeypatch: Any
) -> None:
    module = Net().to(machine.on)
    module.register_buffer("count", torch.zeros((), device=machine.on))
    hook = lambda module, args: module.count.add_(1) and None
    module.register_forward_pre_hook(hook)
    x = torch.randn(2, 8, device=machine.on)
    handle = dit_graph.enable(module, device=machine.device, **PLAIN)
    calls = 1 if "one" in when or "recording" in when else 3
    for _ in range(calls):
        module(x)
    broken = {
        "a replay": (Proof, "turn"), "after a replay": (Entry, "prefer"),
        "a recording": (Pool, "generation"), "after one": (CaptureAction, "_keep"),
    }[when]  # fmt: skip
    monkeypatch.setattr(*broken, refuse)
    assert torch.equal(module(x), module.linear(x))
    monkeypatch.undo()
    for _ in range(3):
        assert torch.equal(module(x), module.linear(x))
    assert int(module.count) == calls + 4
    assert "Odd at" in handle.report()


def test_an_error_of_ours_is_named_once_and_raised_under_strict(
    machine: Machine, caplog: Any
) -> None:
    caplog.set_level(logging.DEBUG, "dit_graph")
    odd, x = refusing(int, __hash__=1)(3), torch.randn(2, 8, device=machine.on)
    module = Net().to(machine.on)
    handle = dit_graph.enable(module, device=machine.device, **PLAIN)
    for _ in range(5):
        module(x, odd)
    ((reason, count),) = handle.stats()["eager"].items()
    assert count == 5 and reason.startswith("dit_graph itself failed on this call: Odd at ")
    told = [r for r in caplog.records if "Traceback" in r.getMessage()]
    assert len(told) == 1 and told[0].levelno == logging.DEBUG
    handle.disable()
    dit_graph.enable(module, device=machine.device, strict=True, **PLAIN)
    with pytest.raises(dit_graph.NotReplayed, match="itself failed on this call"):
        module(x, odd)
