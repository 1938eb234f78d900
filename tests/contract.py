"""What every backend and device must do. `tests/recorder` and `tests/gpu` run all of it."""

import copy
import dataclasses
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import dit_graph
from dit_graph import break_graph, current_call, eager_on_graph
from dit_graph.devices.base import is_about_capturing
from tests.families import FAMILIES
from tests.pair import PLAIN, Machine, torchs


class Module(nn.Module):
    """A small module whose forward is the given function."""

    def __init__(self, body: Any, **attributes: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("count", torch.zeros(()))
        self.body = body
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, x, *args, **kwargs)


def rows(seed: int, n: int = 2) -> torch.Tensor:
    return torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))


def run(machine: Machine, body: Any, calls: list[Any], **options: Any) -> Any:
    """Call a pair once for each element (a tensor or a dict of keywords) and return it."""
    pair = machine.pair(Module(body), **options)
    for i, call in enumerate(calls):
        pair(**machine.to(call if isinstance(call, dict) else {"x": call}), seed=i)
    return pair


# ---- backends


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
        expected = {"calls": 12, "cold": 3, "captures": 3, "replays": 6, "eager": {}}
        assert stats == expected


def test_full_names_what_one_graph_cannot_hold(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        return x[x > 0]

    pair = run(machine, body, [rows(i) for i in range(5)], backend="full")
    assert pair.replays == 0
    (reason,) = pair.stats["eager"]
    assert "one graph cannot hold this" in reason and "contract.py" in reason


def test_a_full_capture_that_fails_moves_state_once(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        m.count.add_(1)
        x.mul_(2)
        return (x + torch.rand_like(x))[: int(m.count)]

    pair = run(machine, body, [rows(i) for i in range(5)], backend="full")
    assert pair.replays == 0


# ---- real transformers, nothing annotated


@pytest.mark.parametrize("name", FAMILIES)
def test_family_replays_with_new_inputs_and_caption_lengths(machine: Machine, name: str) -> None:
    family = FAMILIES[name]
    pair = machine.pair(family.build())
    captions = [5, 5, 5, 5, 8, 8, 8, 5, 8, 6, 6, 6, 5]
    for i, caption in enumerate(captions):
        pair(**machine.to(family.inputs(10 * i, caption)))
    stats = pair.stats
    assert stats["eager"] == {}
    assert stats["replays"] >= 7, pair.handle.report()


@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_family_with_marked_attention(machine: Machine, name: str) -> None:
    family = FAMILIES[name]
    pair = machine.pair(family.build(), breaks=("*.attn",))
    for i in range(5):
        pair(**machine.to(family.inputs(10 * i, 5)))
    assert pair.replays == 3
    assert ".attn ('*.attn')" in pair.handle.report()


@pytest.mark.parametrize("name", ["zimage", "lumina2", "mochi"])  # mochi turns autocast off inside
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "autocast"])
def test_family_in_every_mode(machine: Machine, mode: str, name: str) -> None:
    contexts = {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "autocast": lambda: torch.autocast(torch.device(machine.on).type, torch.bfloat16),
    }
    family = FAMILIES[name]
    pair = machine.pair(family.build())
    with contexts[mode]():
        for i in range(5):
            pair(**machine.to(family.inputs(10 * i, 5)))
    assert pair.replays == 3, pair.handle.report()


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


# ---- indices and scalars on the host, which CUDA copies to the device unseen

_HOST_OPERANDS: dict[str, Any] = {
    "list": lambda m, h: h[[0, -1]],
    "list of a dimension": lambda m, h: h[:, [0, 3]],
    "tuples": lambda m, h: h[(0, 1), (1, 0)],
    "array": lambda m, h: h[:, np.array([[0, 1], [1, 0]])],
    "range": lambda m, h: h[range(2)],
    "number of numpy's": lambda m, h: h[np.int64(1)],
    "empty list": lambda m, h: h[[]],
    "list of truths": lambda m, h: h[[True, False]],
    "list that holds a tensor": lambda m, h: h[:, [torch.tensor(0), 1]],
    "assigned by a list": lambda m, h: (h.__setitem__([0], 3.0), h)[1],
    "assigned by a tensor": lambda m, h: (
        h.__setitem__((slice(None), torch.tensor([0, 1], device=h.device)), 3.0), h)[1],
    "assigned a tensor": lambda m, h: (
        h.__setitem__((slice(None), torch.tensor([0], device=h.device)), torch.tensor(2.0)), h)[1],
    "where": lambda m, h: torch.where(h > 0, torch.tensor(1.0), h),
    "where both": lambda m, h: torch.where(h > 0, torch.tensor(1.0), torch.tensor(-1.0)),
    "where of another type": lambda m, h: torch.where(h > 0, torch.tensor(2, dtype=torch.int64), h),
    "where numbers": lambda m, h: torch.where(h > 0, 1.0, h),
}  # fmt: skip


@pytest.mark.parametrize("name", _HOST_OPERANDS)
def test_python_data_in_an_index_or_a_choice(machine: Machine, name: str) -> None:
    take = _HOST_OPERANDS[name]
    pair = run(machine, lambda m, x: take(m, m.linear(x)) + 1, [rows(i) for i in range(6)])
    assert pair.stats["eager"] == {} and pair.replays == 4, pair.handle.report()


def test_a_scalar_of_the_models_own_that_changes_in_a_choice(machine: Machine) -> None:
    body = lambda m, x: torch.where(x > 0, m.t, m.linear(x))
    pair = machine.pair(Module(body))
    for i in range(9):
        for m in (pair.graphed, pair.eager):
            m.t = torch.tensor(1.0) if i == 0 else m.t.fill_(float(i > 4))
        pair(rows(i).to(machine.on))
    assert pair.replays >= 4


def test_a_function_that_cannot_be_captured_is_a_break_from_then_on(machine: Machine) -> None:
    """`Tensor.new` copies Python data to the device, and is no operation."""
    body = lambda m, x: m.linear(x) + x.new([[1.0] * 8])
    pair = run(machine, body, [rows(i, n) for n in (2, 3) for i in range(6)])
    (reason,) = pair.stats["eager"]
    assert "Cannot copy between CPU and CUDA tensors" in reason and "a break from now on" in reason
    assert pair.stats["eager"][reason] == 1 and pair.replays == 3 + 4
    assert "new could not be captured" in str(pair.handle.explain())


# ---- where in 16 bytes an argument begins


def shifted(t: torch.Tensor, by: int) -> torch.Tensor:
    """A copy that begins `by` elements past where memory is allocated."""
    whole = torch.empty(t.numel() + by, dtype=t.dtype, device=t.device)
    return whole[by:].view(t.shape).copy_(t)


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


# ---- the hard cases N1 to N6 (N2: `compiled.py`): right with the rule, wrong without it


def scalar_argument(machine: Machine) -> tuple[bool, int]:
    pair = machine.pair(Module(lambda m, x, t: m.linear(x) * t))
    results = [
        pair.compare(rows(i).to(machine.on), torch.tensor(float(i)))[0] for i in range(6)
    ]  # fmt: skip
    return all(results), pair.replays


def scalar_attribute(machine: Machine) -> tuple[bool, int]:
    pair = machine.pair(Module(lambda m, x: m.linear(x) * m.t))
    for m in (pair.graphed, pair.eager):
        m.t = torch.tensor(1.0)
    results = []
    for i in range(9):
        for m in (pair.graphed, pair.eager):
            m.t.fill_([1.0, 1.0, 1.0, 2.0, 2.0, 1.0, 2.0, 1.0, 2.0][i])
        results.append(pair.compare(rows(i).to(machine.on))[0])
    return all(results), pair.replays


def test_n1_cpu_scalar_argument(machine: Machine) -> None:
    assert scalar_argument(machine) == (True, 4)


def test_n1_cpu_scalar_attribute(machine: Machine) -> None:
    assert scalar_attribute(machine) == (True, 6)


def test_n1_is_wrong_without_its_rule(machine: Machine, monkeypatch: Any) -> None:
    monkeypatch.setattr("dit_graph.capture.capture.Capture.freeze_scalar", lambda self, t: True)
    assert not scalar_attribute(machine)[0]


def counts_draws_branches(machine: Machine) -> tuple[bool, int, int]:
    def body(m: Any, x: Any) -> Any:
        m.count.add_(1)
        noise = torch.randn_like(x)
        h = m.linear(x) + noise
        return h + 1 if bool(h.mean() > 0) else h - m.count

    pair = machine.pair(Module(body))
    equal = all([pair.compare(rows(i).to(machine.on), seed=i)[0] for i in range(50)])
    return equal, pair.replays, pair.stats["captures"]


def test_n4_state_moves_once_when_a_guard_fails(machine: Machine) -> None:
    assert counts_draws_branches(machine) == (True, 47, 2)


@pytest.mark.parametrize("rule", ["roll_back", "guard"])
def test_n4_is_wrong_without_its_rule(machine: Machine, monkeypatch: Any, rule: str) -> None:
    if rule == "roll_back":
        monkeypatch.setattr("dit_graph.tape.tape.Undo.roll_back", lambda self: None)
    else:
        monkeypatch.setattr("dit_graph.tape.tape.matches", lambda expected, value: True)
    assert not counts_draws_branches(machine)[0]


def prompt(name: str, seed: int, length: int) -> dict[str, Any]:
    """A call whose caption has `length` tokens: its shape for Qwen, its mask's sum for Lumina2."""
    call = FAMILIES[name].inputs(seed, 5)
    total = length if name == "qwen" else 40
    call["encoder_hidden_states"] = torch.randn(2, total, 16)
    mask = torch.arange(total)[None] < torch.tensor([[length], [total]])
    call["encoder_hidden_states_mask" if name == "qwen" else "encoder_attention_mask"] = mask
    return call


@pytest.mark.parametrize("name", ["qwen", "lumina2"])
def test_n5_every_prompt_length_is_bounded(machine: Machine, name: str) -> None:
    pair = machine.pair(FAMILIES[name].build(), max_graphs=8)
    (install,) = pair.handle.installs.values()
    alive = []
    for i in range(30):
        call = prompt(name, i, 3 + i * 7 % 30)
        for _ in range(4):
            call["hidden_states"] = torch.randn_like(call["hidden_states"])
            pair(**machine.to(call))
        alive.append(sum(g.recordings for g in install.runner.pool._generations))
    stats = pair.stats
    assert max(alive) <= 8
    assert stats["eager"] == {}
    assert stats["replays"] >= 60, "half of the steps are replayed though no length is kept"


def test_a_value_that_never_comes_back_is_eager_by_name(machine: Machine) -> None:
    pair = run(machine, lambda m, x: m.linear(x) * float(x.sum()), [rows(i) for i in range(80)])
    stats = pair.stats
    (reason,) = stats["eager"]
    assert reason.startswith("another value at every call: aten._local_scalar_dense")
    assert stats["captures"] <= 11
    for _ in range(80):
        pair(rows(3).to(machine.on))
    assert pair.replays >= 15, "it is recorded again once the value comes back"


def test_n5_grows_without_its_rule(machine: Machine, monkeypatch: Any) -> None:
    monkeypatch.setattr("dit_graph.memory.pool.Pool.retire", lambda self, generation: None)
    with pytest.raises(AssertionError):
        test_n5_every_prompt_length_is_bounded(machine, "lumina2")


def break_feeds_break(machine: Machine) -> tuple[bool, int]:
    def body(m: Any, x: Any, mask: Any) -> Any:
        n = mask.sum(1).cpu()
        first, second = n.tolist()
        return m.linear(x[:first]).sum() + m.linear(x[:second]) * (n + 1).float().to(x.device).sum()

    pair = machine.pair(Module(body))
    masks = [torch.arange(6)[None] < torch.tensor([[2], [i % 2 + 3]]) for i in range(8)]
    results = [
        pair.compare(rows(i, 6).to(machine.on), mask.to(machine.on))[0]
        for i, mask in enumerate(masks)
    ]
    return all(results), pair.replays


def test_n6_one_break_feeds_the_next(machine: Machine) -> None:
    assert break_feeds_break(machine) == (True, 5)


def test_n6_is_wrong_without_its_rule(machine: Machine, monkeypatch: Any) -> None:
    monkeypatch.setattr("dit_graph.tape.tape.Break._store", lambda *args: None)
    assert not break_feeds_break(machine)[0]


def test_n6_a_break_that_returns_its_input_which_is_then_written(machine: Machine) -> None:
    same = eager_on_graph(lambda t: t)

    def body(m: Any, x: Any) -> Any:
        h = m.linear(x)
        h2 = same(h)
        h2.add_(1)
        return h * 2 + same(h2)

    assert run(machine, body, [rows(i) for i in range(5)]).replays == 3


# ---- arguments


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
    assert "bucket x<0> 3x4: captured" in pair.handle.report()
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


# ---- what the caller has around a call


class Doubled(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        return out * 2 if func is torch.nn.functional.linear else out


def test_modes_around_a_call_are_eager_by_name(machine: Machine) -> None:
    pair = run(machine, lambda m, x: m.linear(x), [rows(i) for i in range(4)])
    x, counted = rows(5).to(machine.on), []
    with Doubled():
        pair(x)
    for module in (pair.graphed, pair.eager):
        with FlopCounterMode(display=False) as counter:
            module(x)
        counted.append(counter.get_total_flops())
    assert counted[0] == counted[1] > 0
    several = torch.stack([x, x + 1])
    assert torch.equal(torch.vmap(pair.graphed)(several), torch.vmap(pair.eager)(several))
    with torch.device(machine.on):  # is in the key
        for _ in range(3):
            pair(x)
    assert sorted(pair.stats["eager"]) == [
        "Doubled, a torch function mode, would see no operation",
        "_FlopCounterMode, a torch dispatch mode, would see no operation",
        "inside a functorch transform, such as vmap",
    ]
    assert pair.replays == 3


class DoubledBelow(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        return out * 2 if func is torch.ops.aten.addmm.default else out


@pytest.mark.parametrize(
    "around", ["autocast", "sdpa", "function mode", "dispatch mode", "gradients"]
)
@pytest.mark.parametrize("how", ["marked", "pattern", "function"])
def test_a_marked_break_under_the_forwards_own_modes(
    machine: Machine, around: str, how: str
) -> None:
    @eager_on_graph()
    def marked(m: Any, h: Any) -> Any:
        return m.inner(h)

    kind = torch.device(machine.on).type
    modes = {
        "autocast": lambda: torch.autocast(kind, torch.bfloat16),
        "sdpa": lambda: sdpa_kernel(SDPBackend.MATH),
        "function mode": Doubled,
        "dispatch mode": DoubledBelow,
        "gradients": torch.enable_grad,
    }

    def body(m: Any, x: Any) -> Any:
        with modes[around]():
            h = marked(m, x) if how == "marked" else m.inner(x)
        return m.linear(h.float())

    module = Module(body)
    module.inner = nn.Linear(8, 8).requires_grad_(False)
    patterns = {"marked": (), "pattern": ("inner",), "function": ("linear",)}[how]
    pair = machine.pair(module, breaks=patterns)
    with torch.no_grad():
        for i in range(5):
            pair(rows(i).to(machine.on))
    if (how, around) == ("function", "function mode"):  # which calls the function itself
        assert pair.replays == 3
        return
    (reason,) = pair.stats["eager"]
    assert "which a replay of this break would not have" in reason, reason
    assert pair.replays == 0


def test_no_grad_around_a_marked_break(machine: Machine) -> None:
    @eager_on_graph()
    def marked(m: Any, h: Any) -> Any:
        return m.linear(h)

    def body(m: Any, x: Any) -> Any:
        with torch.no_grad():
            return marked(m, x) + 1

    pair = machine.pair(Module(body))
    with torch.enable_grad():
        for i in range(5):
            pair(rows(i).to(machine.on))
    assert pair.replays == 3, pair.stats


# ---- what a capture has around a forward


@pytest.mark.parametrize("kind", ["layer", "encoder", "attention"])
def test_layers_with_a_fused_path_keep_it(machine: Machine, kind: str) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    module = {
        "layer": layer,
        "encoder": nn.TransformerEncoder(layer, 2),
        "attention": Module(lambda m, x: m.inner(x, x, x, need_weights=False)[0]),
    }[kind]
    module.inner = nn.MultiheadAttention(32, 4, batch_first=True)
    pair = machine.pair(module.requires_grad_(False))
    for i in range(5):
        pair(torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(i)).to(machine.on))
    assert pair.replays == 3, pair.stats


def test_autocast_as_a_decorator_caches_nothing(machine: Machine) -> None:
    kind = torch.device(machine.on).type

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)  # a weight that wants gradients is what autocast caches

        @torch.autocast(kind, dtype=torch.bfloat16)
        def forward(self, x: Any) -> Any:
            return self.linear(x) + self.linear(x + 1)

    pair = machine.pair(Net())
    with torch.no_grad(), torch.autocast(kind, dtype=torch.bfloat16):
        for i in range(6):
            if i == 4:
                torch.clear_autocast_cache()
                for module in (pair.graphed, pair.eager):
                    module.linear.weight.mul_(2)
            pair(rows(i).to(machine.on))
    assert pair.replays == 4, pair.stats


# ---- results


def test_results_belong_to_the_caller(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        h = m.linear(x)
        return Transformer2DModelOutput(sample=h)

    pair = machine.pair(Module(body))
    held = [pair(rows(i).to(machine.on)) for i in range(6)]
    for i, result in enumerate(held):
        assert isinstance(result, Transformer2DModelOutput)
        assert torch.equal(result.sample, pair.eager(rows(i).to(machine.on)).sample)
    assert pair.replays == 4


def test_a_result_fed_back_as_input(machine: Machine) -> None:
    pair = machine.pair(Module(lambda m, x: m.linear(x).tanh()))
    x = rows(0).to(machine.on)
    for _ in range(8):
        x = pair(x)
    assert pair.replays == 6


def test_structures_views_and_passed_through_inputs(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        h = m.linear(x)
        return {"a": (h, h.t()), "input": x, "row": x[1], "none": None, "n": 3, "buffer": m.count}

    pair = run(machine, body, [rows(i) for i in range(5)])
    x = rows(9).to(machine.on)
    result = pair.graphed(x)
    assert pair.replays == 4
    assert result["input"] is x and result["row"].data_ptr() == x[1].data_ptr()
    assert result["buffer"] is pair.graphed.count


def test_an_unknown_result_is_eager_by_name(machine: Machine) -> None:
    class Result:
        def __init__(self, sample: Any) -> None:
            self.sample = sample

    pair = machine.pair(Module(lambda m, x: Result(m.linear(x))))
    x = rows(0).to(machine.on)
    for _ in range(4):
        assert torch.equal(pair.graphed(x).sample, pair.eager(x).sample)
    assert list(pair.stats["eager"]) == ["the forward returns a Result"]


# ---- breaks


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
    assert "segments 2, breaks 1" in report and "attention" in report and "contract.py" in report


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


# ---- random numbers, state, failure


def test_a_break_that_draws_between_two_segments(machine: Machine) -> None:
    draw = eager_on_graph(lambda h: h + torch.randn_like(h))

    def body(m: Any, x: Any) -> Any:
        h = m.linear(x) + torch.rand_like(x)
        return draw(h) * torch.rand_like(h)

    assert run(machine, body, [rows(i) for i in range(6)]).replays == 4


def test_a_callers_generator_is_eager_by_name(machine: Machine) -> None:
    module = Module(lambda m, x: x + torch.randn(x.shape, generator=m.generator, device=x.device))
    module.to(machine.on).generator = torch.Generator(machine.on).manual_seed(3)
    handle = dit_graph.enable(module, device=machine.device, **PLAIN)
    results = [module(rows(0).to(machine.on)) for _ in range(4)]
    again = torch.Generator(machine.on).manual_seed(3)
    for result in results:
        noise = torch.randn(2, 8, generator=again, device=machine.on)
        assert torch.equal(result, rows(0).to(machine.on) + noise)
    assert "a generator of the caller's" in next(iter(handle.stats()["eager"]))


def test_a_counter_in_python_is_eager_by_name(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        m.steps += 1
        return m.linear(x) * m.steps

    pair = machine.pair(Module(body, steps=0))
    for i in range(6):
        pair(rows(i).to(machine.on))
    assert list(pair.stats["eager"]) == ["the forward writes Python state: steps"]


def test_a_tensor_kept_in_python_is_eager_by_name(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        h = m.linear(x) + (0 if m.last is None else m.last)
        m.last = h
        return h

    pair = machine.pair(Module(body, last=None))
    for i in range(6):
        pair(rows(i).to(machine.on))
    assert list(pair.stats["eager"]) == ["the forward writes Python state: last"]


def test_a_memo_table_settles(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        if x.shape[0] not in m.memo:
            m.memo[x.shape[0]] = torch.arange(x.shape[0], device=x.device).float()[:, None] * 2
        return m.linear(x) + m.memo[x.shape[0]]

    pair = machine.pair(Module(body, memo={}))
    for i in range(12):
        pair(rows(i, 1 + i % 2).to(machine.on))
    assert pair.replays >= 6 and pair.stats["eager"] == {}


def test_a_memo_first_made_under_capture_stays_right(machine: Machine) -> None:
    memo: dict[str, torch.Tensor] = {}
    calls = [0]

    def body(m: Any, x: Any) -> Any:
        calls[0] += 1
        if calls[0] >= 2 and "table" not in memo:
            memo["table"] = torch.full((8,), 3.0, device=x.device)
        return m.linear(x) + memo.get("table", 3.0)

    module = Module(body).to(machine.on)
    expected = copy.deepcopy(module.linear)
    handle = dit_graph.enable(module, device=machine.device, **PLAIN)
    for i in range(8):
        x = rows(i).to(machine.on)
        assert torch.equal(module(x), expected(x) + 3.0)
    assert torch.equal(memo["table"], torch.full((8,), 3.0, device=machine.on))
    assert handle.stats()["replays"] >= 3


@pytest.mark.parametrize("where", ["first", "middle", "last", "break"])
def test_what_a_forward_raises_while_it_is_recorded_it_raises(machine: Machine, where: str) -> None:
    """Nothing has moved then, and the signature is given up after three such recordings."""

    @eager_on_graph(pure=True)
    def marked(h: torch.Tensor) -> torch.Tensor:
        check("break")
        return h * 2

    def check(place: str) -> None:
        if place == where and dit_graph.breaks.capturing():
            raise LookupError(f"only while recording, {place}")

    def body(m: Any, x: Any) -> Any:
        m.count.add_(1)
        x = x + torch.rand_like(x)
        check("first")
        x = marked(m.linear(x))
        m.count.mul_(2)
        check("middle")
        if bool(x.sum() > -1e9):
            x = x + m.count
        check("last")
        return x

    pair = machine.pair(Module(body))
    for i in range(3):
        pair(rows(i).to(machine.on))
        count, drawn = (
            pair.graphed.count.clone(),
            pair.handle.installs["Module"].runner.target.seeds(),
        )
        with pytest.raises(LookupError, match=f"only while recording, {where}"):
            pair.graphed(rows(i).to(machine.on))
        assert torch.equal(pair.graphed.count, count)
        assert all(map(torch.equal, drawn, pair.handle.installs["Module"].runner.target.seeds()))
    for i in range(2):
        pair(rows(i).to(machine.on))
    reason = "the forward raised LookupError while it was recorded"
    assert pair.stats["eager"] == {reason: 5} and pair.replays == 0
    where = "nowhere"
    for i in range(5):
        pair(rows(i, 3).to(machine.on))
    assert pair.replays == 3, "the next key is recorded"


@pytest.mark.parametrize("stage", ["begin", "call", "end"])
def test_a_segment_that_fails_is_unwound(machine: Machine, stage: str, monkeypatch: Any) -> None:
    def body(m: Any, x: Any) -> Any:
        m.count.add_(1)
        h = m.linear(x) + torch.rand_like(x)
        return h + bool(h.sum() > -1e9) + m.count

    pair = machine.pair(Module(body))
    pair(rows(0).to(machine.on))
    segment = type(pair.handle.pool_on(torch.device(machine.on)).device.segment(None, lambda t: t))
    real = getattr(segment, stage)

    @torchs
    def failing(self: Any, *args: Any) -> Any:
        if stage == "end":
            real(self, *args)
        raise RuntimeError(f"at {stage}")

    with monkeypatch.context() as patch:
        patch.setattr(segment, stage, failing)
        pair(rows(1).to(machine.on), seed=1)
    for i in range(4):
        pair(rows(i, 3).to(machine.on), seed=i)
    assert list(pair.stats["eager"]) == [f"capture failed: RuntimeError('at {stage}')"]
    assert pair.replays == 2 and gc.isenabled()


@torch.library.custom_op("dit_graph_tests::reads_host", mutates_args=())
def reads_host(x: torch.Tensor) -> torch.Tensor:
    """A kernel that waits for the device, which none of its tags says."""
    capture = dit_graph.breaks.local.capture
    if not x.is_cuda and capture is not None and capture._segment is not None:
        raise RuntimeError("stands for the error of a CUDA stream that is capturing")
    return x * float(x[0, 0].item())


DOWN: list[bool] = []


@torch.library.custom_op("dit_graph_tests::breaks_down", mutates_args=())
def breaks_down(x: torch.Tensor) -> torch.Tensor:
    if DOWN:
        raise RuntimeError("the camera captured no data")
    return x * 2


def reading(m: Any, x: Any) -> Any:
    return reads_host(m.linear(x)).relu() + 1


def test_an_operation_that_no_graph_takes_is_a_break_from_then_on(machine: Machine) -> None:
    pair = run(machine, reading, [rows(i, n) for n in (2, 3) for i in range(6)])
    (reason,) = pair.stats["eager"]
    assert "reads_host.default at tests/contract.py" in reason and "break from now on" in reason
    assert pair.stats["eager"][reason] == 1 and pair.replays == 3 + 4
    assert "reads_host could not be captured" in str(pair.handle.explain())


def test_one_graph_stays_eager_where_an_operation_refuses(machine: Machine) -> None:
    pair = run(machine, reading, [rows(i) for i in range(6)], backend="full")
    (reason,) = pair.stats["eager"]
    assert "reads_host.default at tests/contract.py" in reason and pair.replays == 0


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


def test_a_forward_that_catches_the_refusal_is_not_recorded_so(machine: Machine) -> None:
    """It would take its other path in the recording alone."""

    def body(m: Any, x: Any) -> Any:
        try:
            return reads_host(m.linear(x))
        except RuntimeError:
            return x * 0

    pair = run(machine, body, [rows(i) for i in range(6)])
    (reason,) = pair.stats["eager"]
    caught = "catches that an operation cannot be captured" in reason
    assert caught or "reads_host.default at" in reason  # CUDA has given the capture up by then
    assert pair.replays == 3


def test_strict_raises_once_for_an_operation_that_no_graph_takes(machine: Machine) -> None:
    pair = machine.pair(Module(reading), strict=True)
    pair(rows(0).to(machine.on))
    with pytest.raises(dit_graph.NotReplayed, match="a break from now on"):
        pair.graphed(rows(1).to(machine.on))
    for i in range(4):
        pair(rows(i).to(machine.on))
    assert pair.handle.stats()["replays"] == 3


def test_an_error_about_another_operation_teaches_nothing() -> None:
    said = "CUDA error: operation failed due to a previous error during capture"
    assert not is_about_capturing(RuntimeError(said))
    assert is_about_capturing(RuntimeError("operation not permitted when stream is capturing"))


def test_an_operation_that_fails_in_eager_too_is_no_break(machine: Machine) -> None:
    """An error that sounds like a capture's but is the model's own."""
    pair = machine.pair(Module(lambda m, x: breaks_down(m.linear(x)) + 1))
    pair(rows(0).to(machine.on))
    for _ in range(2):
        DOWN.append(True)
        with pytest.raises(RuntimeError, match="captured no data"):
            pair.graphed(rows(0).to(machine.on))
        DOWN.clear()
    for i in range(4):
        pair(rows(i).to(machine.on))
    assert pair.replays >= 2 and "could not be captured" not in str(pair.handle.explain())


def test_nothing_is_collected_while_a_segment_is_open(machine: Machine) -> None:
    """A collection may destroy old graphs, which the device forbids inside a capture."""

    class Garbage:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            seen.append(dit_graph.breaks.capturing() and open_segments() > 0)

    seen: list[bool] = []

    def open_segments() -> int:
        capture: Any = dit_graph.breaks.local.capture
        return int(capture is not None and capture._segment is not None)

    half = eager_on_graph(pure=True)(lambda h: h * 2)

    def body(m: Any, x: Any) -> Any:
        h = m.linear(x)
        for _ in range(50):
            Garbage()
            h = h + 1
        return half(h) + 1

    threshold = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        assert run(machine, body, [rows(i) for i in range(4)]).replays == 2
    finally:
        gc.set_threshold(*threshold)
    assert seen and not any(seen)


def test_collection_stays_off_until_the_last_segment_is_closed(
    machine: Machine, monkeypatch: Any
) -> None:
    pair = machine.pair(Module(lambda m, x: m.linear(x)))
    pair(rows(0).to(machine.on))
    segment = type(pair.handle.pool_on(torch.device(machine.on)).device.segment(None, lambda t: t))
    real, states = segment.end, []
    monkeypatch.setattr(segment, "end", lambda self: (states.append(gc.isenabled()), real(self)))
    pair(rows(1).to(machine.on))
    assert states == [False] and gc.isenabled()


def test_a_users_own_error_comes_through(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        raise ValueError("of the user's")

    module = Module(body).to(machine.on)
    dit_graph.enable(module, device=machine.device, **PLAIN)
    for _ in range(3):
        with pytest.raises(ValueError, match="of the user's"):
            module(rows(0).to(machine.on))


def test_changed_weights_and_attributes_are_seen(machine: Machine) -> None:
    pair = machine.pair(Module(lambda m, x: m.linear(x) * m.scale, scale=1.0))

    def both(change: Any) -> None:
        for m in (pair.graphed, pair.eager):
            change(m)
        for i in range(4):
            pair(rows(i).to(machine.on))

    both(lambda m: None)
    both(lambda m: m.linear.weight.mul_(2))  # in place: no new recording
    assert pair.stats["captures"] == 1
    both(lambda m: setattr(m, "scale", 3.0))
    both(lambda m: m.double().float())
    both(lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}, assign=True))
    both(lambda m: setattr(m.linear, "weight", nn.Parameter(m.linear.weight * 2, False)))
    assert pair.stats["captures"] == 5 and pair.replays == 14, pair.handle.report()


def test_gradients_are_eager_by_name(machine: Machine) -> None:
    pair = machine.pair(Module(lambda m, x: m.linear(x)))
    with torch.enable_grad():
        for _ in range(3):
            x = rows(0).to(machine.on).requires_grad_()
            pair.graphed(x).sum().backward()
            assert x.grad is not None
    assert pair.stats["eager"] == {"gradients are needed; call it under torch.no_grad()": 3}


def test_a_forward_hook_on_a_block_is_eager_by_name(machine: Machine) -> None:
    pair = machine.pair(Module(lambda m, x: m.linear(x)))
    for i in range(4):
        pair(rows(i).to(machine.on))
    seen: list[int] = []
    hook = pair.graphed.linear.register_forward_hook(lambda *a: seen.append(1))
    for i in range(3):
        pair(rows(i).to(machine.on))
    assert len(seen) == 3 and list(pair.stats["eager"]) == [
        "a forward hook on linear would not run"
    ]
    hook.remove()
    for i in range(4):
        pair(rows(i).to(machine.on))
    assert pair.replays == 4


def test_a_constant_that_is_read_and_then_written(machine: Machine) -> None:
    def body(m: Any, x: Any, n: Any) -> Any:
        host = torch.arange(3)
        n = n.cpu()
        before = n + host
        host += 1
        on_device = torch.tensor([1.0, 2.0, 3.0], device=x.device)
        h = m.linear(x)[:, :3] * on_device
        on_device.copy_(host)
        return h + on_device + (before * (n + host)).to(x.device)

    calls = [{"x": rows(i), "n": torch.tensor([i])} for i in range(6)]
    assert run(machine, body, calls).replays == 4


def test_one_graphed_module_inside_another(machine: Machine) -> None:
    inner = Module(lambda m, x: m.linear(x).tanh())
    pair = machine.pair(Module(lambda m, x: m.inner(m.linear(x)), inner=inner))
    dit_graph.enable(pair.graphed.inner, device=machine.device, **PLAIN)
    for i in range(6):
        pair(rows(i).to(machine.on))
    assert pair.replays >= 3


def test_disable_gives_everything_back(machine: Machine) -> None:
    pair = machine.pair(Module(lambda m, x: m.linear(x)))
    for i in range(4):
        pair(rows(i).to(machine.on))
    pool = pair.handle.pool_on(torch.device(machine.on))
    assert pool.bytes > 0
    dit_graph.disable(pair.graphed)
    assert pool.bytes == 0 and "forward" not in pair.graphed.__dict__
    pair(rows(0).to(machine.on))
    with pytest.raises(dit_graph.NotEnabled):
        dit_graph.disable(pair.graphed)


# ---- every backend on the same bodies


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


# ---- aliases, and memory that outlives the call


def test_a_break_that_returned_its_input_never_overwrites_it(machine: Machine) -> None:
    @eager_on_graph(pure=True)
    def gate(w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return w if float(t) > 0 else w * 2

    pair = machine.pair(Module(lambda m, x, t: x @ gate(m.linear.weight, t)))
    weight = pair.graphed.linear.weight.clone()
    for i, t in enumerate([1.0, 1.0, 1.0, -1.0, 1.0, -1.0]):
        pair(rows(i).to(machine.on), torch.tensor([t]).to(machine.on))
    assert torch.equal(pair.graphed.linear.weight, weight)
    assert pair.replays == 2 and "memory was its input's" not in str(pair.stats["eager"])


def test_results_of_a_break_that_share_storage(machine: Machine) -> None:
    @eager_on_graph(pure=True)
    def both(h: torch.Tensor) -> Any:
        a = h * 2
        return a, a[:1]

    def body(m: Any, x: Any) -> Any:
        a, b = both(m.linear(x))
        a.add_(1)
        return b * 1

    assert run(machine, body, [rows(i) for i in range(5)]).replays == 3


def test_a_break_that_returns_a_buffer(machine: Machine) -> None:
    buffer = eager_on_graph(pure=True)(lambda m: m.count)

    def body(m: Any, x: Any) -> Any:
        buffer(m).add_(1)
        return m.linear(x) + m.count

    assert run(machine, body, [rows(i) for i in range(5)]).replays == 3


def test_a_break_that_writes_a_constant_and_a_buffer(machine: Machine) -> None:
    @eager_on_graph
    def write(m: Any, c: torch.Tensor) -> None:
        c.add_(1)
        m.count.add_(1)

    def body(m: Any, x: Any) -> Any:
        c = torch.tensor([1.0] * 8, device=x.device)
        write(m, c)
        return m.linear(x) + c + m.count

    assert run(machine, body, [rows(i) for i in range(5)]).replays == 3


def test_a_tensor_that_leaves_a_break_by_another_way(machine: Machine) -> None:
    kept: dict[str, torch.Tensor] = {}

    @eager_on_graph(pure=True)
    def keep(h: torch.Tensor) -> None:
        kept["mask"] = (h > 0).float()

    def body(m: Any, x: Any) -> Any:
        h = m.linear(x)
        keep(h)
        return h * kept["mask"]

    pair = run(machine, body, [rows(i) for i in range(5)])
    assert "a tensor made in a marked break" in next(iter(pair.stats["eager"]))


def test_a_break_that_returns_an_object(machine: Machine) -> None:
    unknown = eager_on_graph(pure=True)(lambda h: object())

    def body(m: Any, x: Any) -> Any:
        unknown(x)
        return m.linear(x)

    pair = run(machine, body, [rows(i) for i in range(4)])
    assert "returns a object" in next(iter(pair.stats["eager"]))


def test_an_argument_that_is_a_buffer_the_forward_writes(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        m.state.mul_(0.5).add_(x)
        return m.state

    module = Module(body)
    module.register_buffer("state", torch.ones(2, 8))
    pair = machine.pair(module)
    for i in range(3):
        pair(rows(i).to(machine.on))
    a, b = (m(rows(5).to(machine.on)) for m in (pair.graphed, pair.eager))
    for _ in range(4):
        a, b = pair.graphed(a), pair.eager(b)
        assert torch.equal(a, b)
    assert "an argument lies in memory that the forward writes" in pair.stats["eager"]


def test_writes_through_data_and_into_broadcast_slices(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        x.data.mul_(2)
        return m.linear(x)

    assert run(machine, body, [rows(i) for i in range(5)]).replays == 3
    pair = machine.pair(Module(lambda m, x: x.add_(1) * 2))
    for i in range(5):
        pair(torch.tensor([[float(i)]]).to(machine.on).expand(2, 8)[:1, :1])
    assert pair.replays == 3


def test_state_that_another_recording_writes(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        if x.shape[0] == 3:
            m.flag = m.flag + 1.0
        return m.linear(x) + m.flag

    pair = machine.pair(Module(body, flag=0.0))
    for n in [2, 2, 2, 2, 3, 2, 2, 2, 2]:
        pair(rows(n, n).to(machine.on))
    assert pair.replays >= 3


def test_one_variant_at_a_time(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        return m.linear(x) * int(x.sum() > 0)

    assert run(machine, body, [rows(i) for i in range(16)], max_variants=1).replays >= 2


def test_a_call_inside_a_replay_of_the_same_module(machine: Machine) -> None:
    @eager_on_graph(pure=True)
    def again(m: Any, h: torch.Tensor) -> torch.Tensor:
        return m(h[:1], deep=True).expand(2, 8) * 1.0

    def body(m: Any, x: Any, deep: bool = False) -> Any:
        h = m.linear(x)
        return h if deep else again(m, h) + h

    assert run(machine, body, [rows(i) for i in range(6)]).replays >= 4


def test_python_and_numpy_generators_are_eager_by_name(machine: Machine) -> None:
    import random

    for draw in (
        random.random,
        lambda: float(np.random.rand()),
        lambda: float(torch.manual_seed(4).initial_seed()),
    ):
        module = Module(lambda m, x: m.linear(x) + m.draw() + torch.rand_like(x)).to(machine.on)
        module.draw = draw
        handle = dit_graph.enable(module, device=machine.device, **PLAIN)
        for i in range(4):
            module(rows(i).to(machine.on))
        assert "generator" in next(iter(handle.stats()["eager"])), draw


def test_a_generator_that_is_put_back_is_eager_by_name(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        with torch.random.fork_rng():
            return m.linear(x) + torch.randn_like(x)

    pair = run(machine, body, [rows(i) for i in range(4)])
    assert "puts its state back" in next(iter(pair.stats["eager"]))


def test_an_address_is_eager_by_name(machine: Machine) -> None:
    pair = run(machine, lambda m, x: m.linear(x) + x.data_ptr() * 0, [rows(i) for i in range(4)])
    assert "reads an address" in next(iter(pair.stats["eager"]))


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


def test_a_replay_that_fails_is_answered_eagerly(machine: Machine) -> None:
    pair = run(machine, lambda m, x: m.linear(x), [rows(i) for i in range(4)])
    (install,) = pair.handle.installs.values()
    (entry,) = install.runner.entries.values()

    @torchs
    def broken() -> None:
        raise RuntimeError("launch failed")

    entry.tapes[0].steps = [broken]
    for i in range(5):
        pair(rows(i).to(machine.on))
    assert pair.stats["eager"] == {"replay failed: RuntimeError('launch failed')": 1}
    assert pair.replays == 4 and pair.stats["captures"] == 2


def test_a_replay_that_always_fails_is_given_up(machine: Machine) -> None:
    pair = machine.pair(Module(lambda m, x: m.linear(x)))

    @torchs
    def broken() -> None:
        raise RuntimeError(f"launch {pair.handle.stats()['calls']} failed")

    for i in range(20):
        pair(rows(i).to(machine.on))
        for install in pair.handle.installs.values():
            for entry in install.runner.entries.values():
                for tape in entry.tapes:
                    tape.steps = [broken]
    assert pair.stats["captures"] == 3 and len(pair.stats["eager"]) == 3
    assert "replay failed" in pair.handle.report()


def test_an_error_of_the_forwards_own_while_it_is_recorded(machine: Machine) -> None:
    cancelled = [False]

    def body(m: Any, x: Any) -> Any:
        if cancelled[0]:
            raise InterruptedError("cancelled")
        return m.linear(x)

    pair = machine.pair(Module(body))
    pair(rows(0).to(machine.on))
    for _ in range(2):
        cancelled[0] = True
        with pytest.raises(InterruptedError, match="cancelled"):
            pair.graphed(rows(1).to(machine.on))
        cancelled[0] = False
        pair(rows(0).to(machine.on))  # cold again
    assert sum(pair.stats["eager"].values()) == 2
    for i in range(4):
        pair(rows(i).to(machine.on))
    assert pair.replays == 3, pair.stats


@pytest.mark.parametrize("options", [{}, {"on_failure": "raise"}])
def test_an_error_of_torchs_while_it_is_recorded(machine: Machine, options: Any) -> None:
    """Two shapes that do not go together, once: it says nothing of the recording."""
    wrong = [False]
    body = lambda m, x: m.linear(x) @ torch.ones(3 if wrong[0] else 8, 3, device=x.device)
    pair = machine.pair(Module(body), **options)
    for i in range(6):
        wrong[0] = i == 1
        if not wrong[0]:
            pair(rows(i).to(machine.on))
            continue
        with pytest.raises(RuntimeError, match="shape"):
            pair.graphed(rows(i).to(machine.on))
    assert pair.replays == 2 and sum(pair.stats["eager"].values()) == 1


def test_what_a_marked_break_raises_at_replay_it_raises(machine: Machine) -> None:
    cancelled = [False]

    @eager_on_graph
    def check(h: torch.Tensor) -> None:
        if cancelled[0]:
            raise InterruptedError("cancelled")

    def body(m: Any, x: Any) -> Any:
        m.count.add_(1)
        h = m.linear(x) + torch.rand_like(x)
        check(h)
        return h + m.count

    pair = run(machine, body, [rows(i) for i in range(4)])
    cancelled[0] = True
    count = pair.graphed.count.clone()
    for _ in range(5):
        with pytest.raises(InterruptedError, match="cancelled"):
            pair.graphed(rows(5).to(machine.on))
    assert torch.equal(pair.graphed.count, count)
    cancelled[0] = False
    pair(rows(6).to(machine.on), seed=6)
    assert pair.replays == 3 and pair.stats["captures"] == 1
    assert pair.stats["eager"] == {"the forward raised InterruptedError in a replay": 5}


def test_an_error_that_only_a_recording_has_is_no_error_of_the_forwards(machine: Machine) -> None:
    """A stand-in for a number, torch's refusal to be captured: eager decides, and has neither."""

    def of_a_stand_in(m: Any, x: Any) -> Any:
        number = m.linear(x).sum().item()
        if type(number) is not float:
            raise TypeError(f"a float is needed, got {type(number).__name__}")
        return x * number

    def of_a_capture(m: Any, x: Any) -> Any:
        try:
            return reads_host(m.linear(x))
        except RuntimeError as error:
            raise ValueError("no result") from error

    for body, why in ((of_a_stand_in, "a float is needed"), (of_a_capture, "capt")):
        pair = run(machine, body, [rows(i) for i in range(5)])
        assert any(why in reason for reason in pair.stats["eager"])
        assert "the forward raised" not in str(pair.stats["eager"])


def test_the_attention_backend_is_in_the_key(machine: Machine) -> None:
    from diffusers.models.attention_dispatch import attention_backend

    family = FAMILIES["flux"]
    pair = machine.pair(family.build())
    for _ in range(3):
        pair(**machine.to(family.inputs(0, 5)))
    with attention_backend("_native_math"):
        for _ in range(3):
            pair(**machine.to(family.inputs(0, 5)))
    assert pair.stats["captures"] == 2


def test_a_pattern_that_matches_nothing_is_said(machine: Machine, caplog: Any) -> None:
    run(machine, lambda m, x: m.linear(x), [rows(0)] * 3, breaks=("linear", "*.atn"))
    assert "breaks pattern '*.atn' matches nothing" in caplog.text
    assert "'linear'" not in caplog.text
