"""The nouns without any device: config, key, guards, entry, slot, Python state."""

import ast
import copy
import math
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dit_graph
from dit_graph.call.key import Signature
from dit_graph.call.varying import VaryingValues
from dit_graph.config import GraphConfig
from dit_graph.errors import CaptureError
from dit_graph.runner.entry import MAX_ATTEMPTS, PAUSE, Entry
from dit_graph.slot import Slot
from dit_graph.tape.guards import DeviceNumber, matches, same
from dit_graph.tape.tape import Tape
from tests.toys import watched


def forward(x: Any, y: Any = None, *rest: Any, scale: float = 1.0, **kw: Any) -> None: ...


BIND = Signature(forward).bind
X, Y = torch.zeros(2), torch.ones(2)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"backend": "fast"}, "backend must be one of breakable, full, debug, eager; got 'fast'"),
        ({"device": "tpu"}, "device must be one of"),
        ({"max_variants": 0}, "max_variants must be a whole number of at least 1, got 0"),
        ({"max_graphs": True}, "max_graphs must be"),
        ({"breaks": "*.attn"}, "breaks must be a sequence of patterns"),
        ({"breaks": 3}, "breaks must be a sequence of patterns, got 3"),
        ({"breaks": {"a": 1}}, "breaks must be a sequence of patterns, got {"),
        ({"sizes": []}, "unknown option sizes; known: mode, buckets"),
        ({"buckets": []}, 'buckets belong to mode="prefill"'),
        ({"backend": "full", "breaks": ("*.attn",)}, 'backend="full" is one graph'),
        ({"mode": "decode"}, "mode must be one of denoise, prefill"),
        ({"min_gain": 1}, "min_gain must be a share"),
        ({"strict": 1}, "strict must be True or False"),
        ({"memory_budget": "lots"}, "memory_budget must be bytes"),
        ({"memory_budget": "0%"}, "memory_budget must be bytes"),
        ({"memory_budget": 0}, "memory_budget must be bytes"),
        ({"extra_key": 3}, "extra_key must be a function"),
    ],
)
def test_config_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(dit_graph.ConfigError, match=message):
        GraphConfig.of(None, options)


def test_a_mark_is_for_a_function() -> None:
    with pytest.raises(TypeError, match="takes a function, or pure and reason; got 3"):
        dit_graph.eager_on_graph(3)  # type: ignore[call-overload]


def test_config_is_given_once() -> None:
    with pytest.raises(dit_graph.ConfigError, match="not both"):
        GraphConfig.of(GraphConfig(), {"backend": "full"})
    with pytest.raises(dit_graph.ConfigError, match="must be a GraphConfig"):
        GraphConfig.of({"backend": "full"}, {})  # type: ignore[arg-type]
    assert GraphConfig(breaks=["a"]).breaks == ("a",)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "a, b, equal",
    [
        (((1,), {}), ((True,), {}), False),
        (((1,), {}), ((1.0,), {}), False),
        (((0.0,), {}), ((-0.0,), {}), False),
        (((math.nan,), {}), ((math.nan,), {}), True),
        ((("a",), {}), ((b"a",), {}), False),
        (((None,), {}), ((), {}), False),
        (((1, 2), {}), ((), {"x": 1, "y": 2}), True),
        (((1,), {"y": 2, "scale": 3.0}), ((1,), {"scale": 3.0, "y": 2}), True),
        ((([1, [2, None]],), {}), (([1, [2, 3]],), {}), False),
        ((([1],), {}), (((1,),), {}), False),
        ((({"a": 1},), {}), (({"b": 1},), {}), False),
        (((np.float32(1),), {}), ((np.float64(1),), {}), False),
        (((np.array([1, 2]),), {}), ((np.array([1, 2]),), {}), True),
        (((np.array([1, 2]),), {}), ((np.array([2, 1]),), {}), False),
        (((torch.zeros(2, 3),), {}), ((torch.ones(2, 3),), {}), True),
        (((torch.zeros(2, 3),), {}), ((torch.zeros(3, 2).t(),), {}), False),
        (((torch.zeros(2),), {}), ((torch.zeros(2).half(),), {}), False),
        (((torch.zeros(2),), {}), ((torch.zeros(2, device="meta"),), {}), False),
        (((X, X), {}), ((Y, Y), {}), True),
        (((X, X), {}), ((X, Y), {}), False),
        (((X, [X, Y]), {}), ((X, [Y, Y]), {}), False),
    ],
)
def test_keys(a: Any, b: Any, equal: bool) -> None:
    first, second = BIND(*a).key, BIND(*b).key
    assert (first == second) is equal and (hash(first) == hash(second) or not equal)


def test_the_order_of_names_without_a_parameter_is_in_the_key() -> None:
    calls = [
        BIND((1,), dict(kw)) for kw in ({"a": 2, "scale": 3, "b": 4}, {"b": 4, "a": 2, "scale": 3})
    ]
    assert calls[0].key != calls[1].key
    assert [list(call.with_tensors([])[1]) for call in calls] == [
        ["scale", "a", "b"],
        ["scale", "b", "a"],
    ]


def test_key_holds_the_context(monkeypatch: Any) -> None:
    x = torch.zeros(2)
    keys = [BIND((x,), {}).key]
    for context in (
        torch.enable_grad(),
        torch.inference_mode(),
        torch.autocast("cpu", torch.bfloat16),
        torch.autocast("cpu", torch.float16),
    ):
        with context:
            keys.append(BIND((x,), {}).key)
    for device in ("cpu", "meta"):
        with torch.device(device):
            keys.append(BIND((x,), {}).key)
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    keys.append(BIND((x,), {}).key)
    torch.backends.cuda.matmul.allow_fp16_accumulation = False
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    keys.append(BIND((x,), {}).key)
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False)
    for function in (print, SimpleNamespace(unhashable=1)):
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", function)
        keys.append(BIND((x,), {}).key)
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA4")
    keys.append(BIND((x,), {}).key)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    keys.append(BIND((x,), {}).key)
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "call, message",
    [
        (((object(),), {}), "argument x is a object, which has no value to compare"),
        (((1,), {"scale": [{"a": print}]}), r"argument scale\[0\]\['a'\] is a builtin"),
        (((torch.zeros(2).to_sparse(),), {}), "argument x is a torch.sparse_coo tensor"),
        (((torch.nested.nested_tensor([X, Y]),), {}), "argument x is a nested tensor"),
        (((np.array([None]),), {}), "argument x is a ndarray, which has no value to compare"),
        (((1,), {"x": 1}), "given twice"),
    ],
)
def test_calls_without_a_key(call: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        BIND(*call)


def test_a_call_is_made_as_it_was_written() -> None:
    tensors = [torch.full((1,), float(i)) for i in range(4)]
    call = BIND(
        (tensors[0], 7, tensors[1]), {"scale": 2.0, "k": {"z": [tensors[2]], "a": tensors[3]}}
    )
    new = [t + 10 for t in call.tensors]
    args, kwargs = call.with_tensors(new)
    assert [float(args[0]), args[1], float(args[2])] == [10.0, 7, 11.0]
    assert kwargs["scale"] == 2.0 and float(kwargs["k"]["z"][0]) == 12.0
    assert float(kwargs["k"]["a"]) == 13.0 and list(kwargs["k"]) == ["z", "a"]


def test_varying_numbers() -> None:
    varying = VaryingValues()
    said = [varying.varying(BIND((1,), {"scale": i / 10})) for i in range(6)]
    assert said[:3] == [""] * 3 and all("argument scale is another value" in s for s in said[3:])
    assert varying.varying(BIND((1,), {"scale": 0.5})) == "", "it settled"
    varying = VaryingValues()
    alternating = [varying.varying(BIND((2,), {"scale": i % 2 / 1})) for i in range(20)]
    assert alternating == [""] * 20


def test_stand_in_comparisons() -> None:
    number = DeviceNumber(0.25)
    assert number < 0.5 and not number >= 0.5 and isinstance(number, float)
    assert number.matches(0.4) and not number.matches(0.6) and not number.exact
    assert matches(number, 0.1)


@pytest.mark.parametrize(
    "use",
    [
        math.sqrt, float, int, bool, str, repr, hash, abs, round, math.floor,
        lambda n: n + 1, lambda n: 1 - n, lambda n: n**2, lambda n: -n, lambda n: f"{n:.2f}",
        lambda n: n < np.float64(1), lambda n: [10, 20][int(n)], lambda n: n.is_integer(),
        lambda n: torch.full((2,), n), lambda n: torch.ones(2) * n, lambda n: n * torch.ones(2),
        lambda n: max(n, n), lambda n: n == "a",
    ],
)  # fmt: skip
def test_any_other_use_of_a_stand_in_pins_it(use: Any) -> None:
    number, real = DeviceNumber(0.25), use(0.25)
    result = use(number)
    assert result == real if isinstance(real, str) else bool(torch.as_tensor(result == real).all())
    assert number.exact or number.outcomes


def test_a_copy_of_a_stand_in_is_a_number() -> None:
    number = DeviceNumber(0.25)
    for copied in (copy.copy(number), copy.deepcopy([number])[0]):
        assert type(copied) is float and copied == 0.25
    assert number.exact


@pytest.mark.parametrize(
    "a, b, equal",
    [
        (1, 1, True), (1, True, False), (1, 1.0, False), (math.nan, math.nan, True),
        ([1, math.nan], [1, math.nan], True), ([1], (1,), False), ([1, 2], [1], False),
        (np.array([math.nan]), np.array([math.nan]), True), (np.zeros(2), np.zeros(3), False),
        (torch.tensor(1.0), torch.tensor(1.0), True), (torch.tensor(1.0), torch.tensor(1), False),
        ("a", "a", True), (None, None, True), (None, 0, False), (0.0, -0.0, False),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False), (0j, -0j, False),
    ],
)  # fmt: skip
def test_same(a: Any, b: Any, equal: bool) -> None:
    assert same(a, b) is equal


def test_an_entrys_life() -> None:
    entry = Entry("2x8")
    assert entry.decide().action == "cold"
    entry.warm = True
    assert entry.decide().action == "capture"
    first, second = Tape(), Tape()
    entry.tapes += [first, second]
    assert entry.decide().action == "replay"
    entry.prefer(second)
    assert entry.tapes[0] is second and entry.tapes[1] is first
    entry.retire()
    assert entry.decide().action == "cold" and not entry.blocked
    for _ in range(MAX_ATTEMPTS):
        assert not entry.blocked
        entry.unsettled("why")
    assert entry.decide().reason == "why"
    entry.block("another")
    assert entry.blocked == "why", "the first cause stays"


def test_a_pause_is_as_long_as_it_says_however_often_it_is_asked_for() -> None:
    entry = Entry("2x8", warm=True)
    entry.pause("no room")
    for _ in range(PAUSE):
        decisions = [entry.decide() for _ in range(3)]
        assert {decision.reason for decision in decisions} == {"no room"}
        entry.goes_by(decisions[0])
    assert entry.decide().action == "capture"


class Thing:
    def method(self, a: int, b: int = 2) -> int:
        return a + b


def test_slot() -> None:
    thing = Thing()
    slot = Slot(thing, "method", lambda a, b=2: 100)
    slot.install()
    assert thing.method(1) == 100 and slot.leads_here()
    assert list(slot.__signature__.parameters) == ["a", "b"]
    assert copy.deepcopy(thing).method(1) == 3
    slot.remove()
    assert thing.method(1) == 3 and "method" not in thing.__dict__
    slot.remove()  # idempotent


def test_a_buried_slot_passes_through() -> None:
    thing = Thing()
    slot = Slot(thing, "method", lambda a, b=2: 100)
    slot.install()
    under = thing.method
    thing.method = lambda a, b=2: under(a, b) + 1  # type: ignore[method-assign]
    slot.remove()
    assert thing.method(1) == 4


def test_a_change_of_state_is_named_by_place() -> None:
    class Helper:
        def __init__(self) -> None:
            self.scale = [1.0]

    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module.helper, module.flag, module.memo = Helper(), True, {"a": (1, 2)}

    def change_of(change: Any) -> str:
        state = watched(module)
        change()
        return state.compare()

    assert change_of(lambda: None) == ""
    assert change_of(lambda: module[0].weight.data.mul_(2)) == "", "in place: same storage"
    assert change_of(lambda: module.helper.scale.__setitem__(0, 2.0)) == "helper.scale[0]"
    assert change_of(lambda: setattr(module, "flag", False)) == "flag"
    assert change_of(lambda: setattr(module, "flag", 0)) == "flag", "0 is not False"
    assert change_of(lambda: module.memo.update(b=1)) == "memo.b"
    assert change_of(lambda: module.memo.pop("b")) == "memo.b"
    assert change_of(lambda: setattr(module[1], "training", False)) == "1.training"
    assert change_of(lambda: module.__setitem__(1, nn.Linear(2, 2))) == "1"
    assert change_of(lambda: module.half()) == "storage of a parameter, buffer or tensor attribute"
    module[0].weight = nn.Parameter(torch.zeros(2, 2))
    assert (
        change_of(lambda: setattr(module[0], "weight", nn.Parameter(torch.ones(2, 2))))
        == "0.weight"
    )


def test_a_snapshot_puts_back() -> None:
    module = nn.Linear(2, 2)
    module.items, module.table, module.count = [1], {"a": 1}, 0
    state = watched(module)
    before = state.snapshot()
    module.items.append(2)
    module.table["b"] = 2
    module.count = 5
    module.new = 3
    before.restore()
    assert (module.items, module.table, module.count) == ([1], {"a": 1}, 0)
    assert not hasattr(module, "new") and state.compare() == ""


def test_public_names() -> None:
    assert sorted(dit_graph.__all__) == dit_graph.__all__
    assert all(hasattr(dit_graph, name) for name in dit_graph.__all__)
    public = {n for n, v in vars(dit_graph).items() if not n.startswith("_")}
    modules = {n for n, v in vars(dit_graph).items() if isinstance(v, types.ModuleType)}
    assert public - modules == set(dit_graph.__all__)


DOWNWARDS = (
    "generate", "prefill", "bench", "cli", "embedded", "enable", "handle", "warmup", "install",
    "regions", "modes", "explain", "runner", "backends", "memory", "capture", "config", "state",
    "call", "devices", "tape", "slot", "links", "breaks", "errors",
)  # fmt: skip
"""The folders and files of the package; each imports what stands after it."""


def imports(file: Path) -> Iterator[str]:
    """What a file imports of the package, by folder; not what only a type checker reads."""
    tree = ast.parse(file.read_text())
    for block in ast.walk(tree):
        if isinstance(block, ast.If) and getattr(block.test, "id", "") == "TYPE_CHECKING":
            block.body = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "dit_graph":
            names = [f"dit_graph.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            first, _, rest = name.partition(".")
            if first == "dit_graph" and rest.partition(".")[0] in DOWNWARDS:
                yield rest.partition(".")[0]


def test_imports_go_down_only() -> None:
    package = Path(dit_graph.__file__).parent
    found = set()
    for file in package.rglob("*.py"):
        place = file.relative_to(package).parts[0].removesuffix(".py")
        if place == "__init__" or file.name == "__main__.py":  # the public face; a command
            continue
        found.add(place)
        for target in imports(file):
            up = DOWNWARDS.index(target) < DOWNWARDS.index(place)
            assert not up, f"{file.relative_to(package)} imports {target}"
    assert found == set(DOWNWARDS)


def test_only_one_file_names_the_graph() -> None:
    package = Path(dit_graph.__file__).parent
    naming = [f.name for f in package.rglob("*.py") if "CUDAGraph" in f.read_text()]
    assert naming == ["cuda.py"]


LOOKS_AT_CUDA = {"devices", "bench", "cli", "embedded", "explain"}  # what commands run on, and sync
NAMES_OF_SEEDING = {"capture/compiled.py"}  # where torch's seeding functions lie


def test_devices_own_what_is_cudas() -> None:
    package = Path(dit_graph.__file__).parent
    found = set()
    for file in package.rglob("*.py"):
        place = file.relative_to(package)
        names = {ast.unparse(n) for n in ast.walk(ast.parse(file.read_text()))
                 if isinstance(n, ast.Attribute)}  # fmt: skip
        if "torch.cuda" in names and place.parts[0] not in LOOKS_AT_CUDA:
            found.add(place.as_posix())
    assert found == NAMES_OF_SEEDING
