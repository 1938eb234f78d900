"""Compiled code in a recorded forward (N2), on the recorder and on CUDA: it stays compiled, nothing
is compiled in a capture, and what cannot be recorded is said."""

import copy
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dit_graph
from tests.contract import Module, reads_host, rows
from tests.families import FAMILIES
from tests.pair import PLAIN, Machine


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Any) -> Any:
        return self.linear(x).sin()


def compiled_block(machine: Machine, order: str) -> tuple[bool, int, int]:
    runs = []

    def backend(graph: Any, example: Any) -> Any:
        def compiled(*args: Any) -> Any:
            runs.append(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
            return [out * 1.5 for out in graph.forward(*args)]  # other numbers than eager's

        return compiled

    torch.compiler.reset()
    module = Module(lambda m, x: m.blocks[1](m.blocks[0](x)) + 1)
    module.blocks = nn.ModuleList([Block(), Block()])
    twin = copy.deepcopy(module).to(machine.on)
    module.to(machine.on)
    if order == "enable first":
        handle = dit_graph.enable(module, device=machine.device, **PLAIN)
    for m in (module, twin):
        for block in m.blocks:
            block.compile(fullgraph=True, backend=backend)
    if order == "compile first":
        handle = dit_graph.enable(module, device=machine.device, **PLAIN)
    inputs = [rows(i).to(machine.on) for i in range(5)]
    equal = all([torch.equal(module(x), twin(x)) for x in inputs])
    replays = handle.stats()["replays"]
    dit_graph.disable(module)
    before = len(runs)
    module(inputs[0])
    return equal, replays, len(runs) - before


@pytest.fixture(autouse=True)
def nothing_is_compiled_before_or_after() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("order", ["compile first", "enable first"])
def test_n2_compiled_blocks_stay_compiled(machine: Machine, order: str) -> None:
    assert compiled_block(machine, order) == (True, 3, 2)


def test_n2_is_wrong_without_its_rule(machine: Machine, monkeypatch: Any) -> None:
    monkeypatch.setattr("dit_graph.backends.breakable._opaque", lambda fn: fn)
    try:
        assert compiled_block(machine, "compile first") != (True, 3, 2)
    except RuntimeError as error:  # dynamo met the block under a dispatch mode and gave it up
        assert "fullgraph=True" in str(error)


@pytest.mark.parametrize("mode", ["no_grad", "autocast", "autocast without a cache"])
@pytest.mark.parametrize("name", ["flux", "dit"])
def test_nothing_is_compiled_in_a_recording(machine: Machine, name: str, mode: str) -> None:
    """Dynamo's guards hold there; a compiler that times kernels cannot do so in a capture."""
    built = []

    def backend(graph: Any, example: Any) -> Any:
        built.append(dit_graph.breaks.capturing())
        return graph.forward

    def context() -> Any:
        cache = mode != "autocast without a cache"
        kind = torch.device(machine.on).type
        return torch.autocast(kind, torch.bfloat16, enabled=mode != "no_grad", cache_enabled=cache)

    pair = machine.pair(FAMILIES[name].build().requires_grad_(True), verify="first", gate="always")
    for block in pair.graphed.transformer_blocks:
        block.compile(fullgraph=True, backend=backend)
    with torch.no_grad(), context():
        for i in range(5):
            pair(**machine.to(FAMILIES[name].inputs(i, 8)))
    assert built and not any(built)
    assert pair.replays == 3 and pair.stats["eager"] == {}, pair.handle.report()


def test_a_compiled_layer_with_a_fused_path_is_compiled_once(machine: Machine) -> None:
    """What a capture changes in torch itself is put back for compiled code: dynamo compares it."""
    built = []

    def backend(graph: Any, example: Any) -> Any:
        built.append(dit_graph.breaks.capturing())
        return graph.forward

    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).requires_grad_(False)
    block = Module(lambda m, x: m.layer(x).sin(), layer=layer)
    module = Module(lambda m, x: m.blocks[0](x) + 1, blocks=nn.ModuleList([block]))
    pair = compiled_pair(machine, module, backend)
    for i in range(5):
        with torch.no_grad():
            pair(torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(i)).to(machine.on))
    assert pair.replays == 3 and not any(built) and built, (pair.stats, built)


def test_casts_of_compiled_code_do_not_outlive_a_recording(machine: Machine) -> None:
    """The next cast in the caller's own autocast finds none that a replay writes over."""
    kind = torch.device(machine.on).type
    module = Module(lambda m, x: m.block(x).float() + 1)
    module.block = Block()
    weight = module.to(machine.on).block.linear.weight.requires_grad_(True)  # or no cast is kept
    module.block.compile(backend="eager", fullgraph=True)
    x = rows(0).to(machine.on)
    with torch.no_grad(), torch.autocast(kind, torch.bfloat16):
        handle = dit_graph.enable(module, device=machine.device, **PLAIN)
        for _ in range(2):
            module(x)
        weight.add_(1)
        got, expected = torch.nn.functional.linear(x, weight), x @ weight.T  # a view is not kept
        assert torch.allclose(got, expected, rtol=0.05, atol=0.05), "cast anew"
        module(x)
    assert handle.stats()["replays"] == 1


def test_compiled_code_that_cannot_be_captured_is_eager_by_name(machine: Machine) -> None:
    """After three tries: the eager answer to the first may have compiled what was missing."""
    tries = []

    def backend(graph: Any, example: Any) -> Any:
        def compiled(*args: Any) -> Any:
            if dit_graph.breaks.capturing():
                tries.append(1)
                raise RuntimeError("not permitted when stream is capturing\nand more to read")
            return graph.forward(*args)

        return compiled

    module = Module(lambda m, x: m.block(x) + 1)
    module.block = Block()
    pair = machine.pair(module)
    pair.graphed.block.compile(fullgraph=True, backend=backend)
    for i in range(9):
        pair(rows(i).to(machine.on))
    ((reason, count),) = pair.stats["eager"].items()
    assert len(tries) == 3 == pair.stats["cold"] and count == 6
    assert "capturing') in compiled code at tests/compiled.py" in reason and "\n" not in reason
    with torch.inference_mode():
        for i in range(3):
            pair(rows(i).to(machine.on))
    assert any("try torch.no_grad()" in reason for reason in pair.stats["eager"])


def test_compiled_code_and_a_constant_under_inference_mode(machine: Machine) -> None:
    scale = [2.0, 3.0]
    module = Module(lambda m, x: m.block(m.linear(x) * torch.tensor(scale, device=x.device)[0]))
    module.block = Block()
    pair = machine.pair(module)
    pair.graphed.block.compile(backend="eager", fullgraph=True)
    with torch.inference_mode():
        for i in range(5):
            pair(rows(i).to(machine.on))
    assert pair.replays == 3
    given = Module(lambda m, x: m.fast(m.linear(x), torch.tensor(scale, device=x.device)))
    pair = machine.pair(given)
    pair.graphed.fast = torch.compile(lambda x, scale: x * scale[0], backend="eager")
    pair.eager.fast = lambda x, scale: x * scale[0]
    with torch.no_grad():
        for i in range(5):
            pair(rows(i).to(machine.on))
    assert pair.replays == 3
    with torch.inference_mode():
        for i in range(5):
            pair(rows(i).to(machine.on))
    (reason,) = pair.stats["eager"]
    assert "a constant under torch.inference_mode" in reason and "use torch.no_grad()" in reason


def compiled_function(machine: Machine, hidden: bool) -> tuple[bool, int, list[str]]:

    def backend(graph: Any, example: Any) -> Any:
        return lambda *args: [out * 1.5 for out in graph.forward(*args)]  # other numbers

    fast = torch.compile(lambda h: h.sin() + 1, backend=backend)
    found = (lambda h: hiding[0](h)) if hidden else fast
    hiding = [fast]
    pair = machine.pair(Module(lambda m, x: found(m.linear(x)) * 2))
    equal = all([pair.compare(rows(i).to(machine.on))[0] for i in range(6)])
    return equal, pair.replays, list(pair.stats["eager"])


def test_a_compiled_function_in_a_closure(machine: Machine) -> None:
    assert compiled_function(machine, hidden=False) == (True, 4, [])


def test_a_compiled_function_that_cannot_be_found(machine: Machine) -> None:
    equal, replays, reasons = compiled_function(machine, hidden=True)
    assert equal and replays == 0
    assert reasons == ["a compiled function is called that could not be found beforehand"]


def test_compiled_state_before_a_guard(machine: Machine) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("n", torch.zeros(()))

        def forward(self, x: Any) -> Any:
            self.n.add_(1)
            return x + self.n

    module = Module(lambda m, x: (lambda h: h + 1 if bool(h.mean() > 3) else h - 1)(m.block(x)))
    module.block = Counting()
    twin = copy.deepcopy(module).to(machine.on)
    module.to(machine.on).block.compile(backend="eager")
    handle = dit_graph.enable(module, device=machine.device, **PLAIN)
    for i in range(12):
        x = rows(i).to(machine.on)
        assert torch.equal(module(x), twin(x)), i
        assert torch.equal(module.block.n, twin.block.n)
    assert handle.stats()["replays"] >= 6


def refuses(graph: Any, example: Any) -> Any:
    """A compiler that cannot work inside a capture, as one that times kernels on CUDA."""
    if dit_graph.breaks.capturing():
        raise RuntimeError("operation not permitted when stream is capturing")
    return graph.forward


def compiled_pair(machine: Machine, module: nn.Module, backend: Any, **options: Any) -> Any:
    """A pair of which the graphed one has its `blocks` compiled."""
    pair = machine.pair(module, **options)
    for block in pair.graphed.blocks:
        block.compile(fullgraph=True, backend=backend)
    return pair


class Branching(Block):
    def forward(self, x: Any, large: bool) -> Any:
        return self.linear(x) * (2 if large else 3)


def test_a_new_variant_is_compiled_in_the_eager_answer(machine: Machine) -> None:
    """No cold call comes before it; the recordings that are there stay."""
    module = Module(lambda m, x: m.blocks[0](x, bool(x[0, 0] > 0)) + 1)
    module.blocks = nn.ModuleList([Branching()])
    pair = compiled_pair(machine, module, refuses)
    for sign in (1, 1, 1, 1, -1, -1, -1, 1, 1, 1, -1, 1):
        pair((rows(0).abs() * sign).to(machine.on))
    ((reason, count),) = pair.stats["eager"].items()
    assert count == 1 and pair.replays == 8 and pair.stats["captures"] == 2
    # dynamo's wrapper is looked through
    assert reason.startswith("capture failed: RuntimeError('operation not permitted")


class BranchingTwice(Branching):
    def forward(self, x: Any, large: bool, even: bool) -> Any:
        return super().forward(x, large) + (1 if even else 2)


def test_many_variants_are_compiled_in_eager_answers(machine: Machine) -> None:
    """Each comes to a recording, so that none of them is one failure too many."""
    module = Module(lambda m, x: m.blocks[0](x, bool(x[0, 0] > 0), bool(x[0, 1] > 0)))
    module.blocks = nn.ModuleList([BranchingTwice()])
    pair = compiled_pair(machine, module, refuses)
    signs = [torch.tensor([[a, b] + [1.0] * 6]) for a in (1.0, -1.0) for b in (1.0, -1.0)]
    for sign in [signs[0], signs[0], *(s for s in signs for _ in range(3)), *signs]:
        pair((rows(0).abs() * sign).to(machine.on))
    assert pair.stats["captures"] == 4 and sum(pair.stats["eager"].values()) == 3
    assert pair.replays == 3 + 3 * 1 + 4


def strict_pair(machine: Machine) -> tuple[Any, torch.Tensor]:
    """Recorded for the rows that come with it; no eager answer compiles the others' variant."""
    module = Module(lambda m, x: m.blocks[0](x, bool(x[0, 0] > 0)) + 1)
    module.blocks = nn.ModuleList([Branching()])
    pair = compiled_pair(machine, module, refuses, strict=True)
    x = rows(0).abs().to(machine.on)
    for _ in range(3):
        pair(x)
    return pair, x


def test_under_strict_a_variant_that_cannot_be_had_leaves_the_others(machine: Machine) -> None:
    pair, x = strict_pair(machine)
    for _ in range(5):
        with pytest.raises(dit_graph.NotReplayed, match="not permitted when stream is capturing"):
            pair.graphed(-x)
    for _ in range(2):
        pair(x)
    assert pair.replays == 3 and len(pair.stats["eager"]) == 1


def test_a_new_recording_takes_variants_again(machine: Machine) -> None:
    """It gave up on a variant; then the recordings made room for others."""
    pair, x = strict_pair(machine)
    for _ in range(4):
        with pytest.raises(dit_graph.NotReplayed):
            pair.graphed(-x)
    (entry,) = pair.handle.installs["Module"].runner.entries.values()
    assert entry.gave_up
    entry.retire()
    pair.graphed.blocks[0](-x, False)  # compiles what was missing
    for sign in (1, 1, 1, -1, -1):
        pair(x * sign)
    assert pair.stats["captures"] == 3 and len(entry.tapes) == 2


class Marking(Block):
    def forward(self, x: Any) -> Any:
        h = halved(self.linear(x))
        dit_graph.break_graph()
        return h + 1


@dit_graph.eager_on_graph(pure=True)
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


def test_marks_inside_compiled_code_are_compiled_with_the_rest(machine: Machine) -> None:
    """Dynamo would compare whether somebody captures."""
    module = Module(lambda m, x: m.blocks[0](x) + 1)
    module.blocks = nn.ModuleList([Marking()])
    pair = compiled_pair(machine, module, refuses)
    for n in (2, 3):
        for i in range(5):
            pair(rows(i, n).to(machine.on))
    assert pair.replays == 6 and pair.stats["eager"] == {} and "breaks 0," in pair.handle.report()


def test_a_failed_compilation_takes_no_recording_with_it(machine: Machine) -> None:
    """What its traceback holds would look like memory of the recording that outlives the call."""
    fails, failed = [], []

    def lowering(args: Any) -> None:  # what its frame holds is in the cause's traceback alone
        raise ValueError(f"the cause, {args[0].shape}")

    def backend(graph: Any, example: Any) -> Any:
        def compiled(*args: Any) -> Any:
            if not fails or not dit_graph.breaks.capturing():
                return graph.forward(*args)
            error: Any = RuntimeError("not permitted when stream is capturing")
            try:
                lowering(args)
            except ValueError as cause:
                error.inner_exception = cause
            failed.append(1)
            raise error

        return compiled

    module = Module(lambda m, x: m.blocks[0](m.linear(x)) + 1)
    module.blocks = nn.ModuleList([Block()])
    pair = compiled_pair(machine, module, backend)
    for i in range(3):
        pair(rows(i).to(machine.on))
    fails.append(True)
    for i in range(3):
        pair(rows(i, 3).to(machine.on))
    fails.clear()
    for i in range(3):
        pair(rows(i).to(machine.on))
    assert pair.replays == 1 + 3 and len(failed) == 1
    assert "the cause" in str(pair.stats["eager"])


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Block()

    def forward(self, x: Any) -> Any:
        return self.attn(x).cos()


@pytest.mark.parametrize(
    ("pattern", "breaks", "says"),
    [
        ("*.attn", 0, "breaks pattern '*.attn' matches no module that this recording runs outside"),
        ("blocks.*", 2, ""),
        ("blocks.1", 1, ""),
        ("nothing", 0, "breaks pattern 'nothing' matches nothing"),
    ],
)
def test_breaks_and_compiled_blocks(
    machine: Machine, pattern: str, breaks: int, says: str, caplog: Any
) -> None:
    """A pattern does not change what dynamo compares; what it cannot do is said."""
    module = Module(lambda m, x: m.blocks[1](m.blocks[0](x)) + 1)
    module.blocks = nn.ModuleList([Inner(), Inner()])
    pair = compiled_pair(machine, module, refuses, breaks=(pattern,))
    for i in range(5):
        pair(rows(i).to(machine.on))
    assert pair.replays == 3 and pair.stats["eager"] == {}
    assert f"breaks {breaks}," in pair.handle.report()
    assert says in caplog.text and (says in pair.handle.report())
    assert "breaks pattern" not in caplog.text or says


def test_compiled_code_inside_compiled_code(machine: Machine) -> None:
    """It finds the others as they were compiled, not as the recording calls them."""
    fast = torch.compile(lambda h: h.sin() + 1, backend=refuses)

    class Outer(Block):
        def forward(self, x: Any) -> Any:
            return fast(self.linear(x))

    module = Module(lambda m, x: m.blocks[1](m.blocks[0](x)) + 1)
    module.blocks = nn.ModuleList([Outer(), Outer()])
    pair = compiled_pair(machine, module, refuses)
    for i in range(5):
        pair(rows(i).to(machine.on))
    assert pair.replays == 3 and pair.stats["eager"] == {}


def test_a_refusal_that_the_forward_catches_is_not_the_compiled_blocks(machine: Machine) -> None:
    def after(graph: Any, example: Any) -> Any:
        def compiled(*args: Any) -> Any:
            capture: Any = dit_graph.breaks.local.capture
            if capture is not None and capture.refused:  # what CUDA says from then on
                raise RuntimeError("operation failed due to a previous error during capture")
            return graph.forward(*args)

        return compiled

    def body(m: Any, x: Any) -> Any:
        try:
            h = reads_host(m.linear(x))
        except RuntimeError:
            h = m.linear(x)
        return m.blocks[0](h) + 1

    module = Module(body)
    module.blocks = nn.ModuleList([Block()])
    pair = compiled_pair(machine, module, after)
    for i in range(6):
        pair(rows(i).to(machine.on))
    (reason,) = pair.stats["eager"]
    assert "reads_host.default at tests/compiled.py" in reason and pair.replays == 3


def test_a_cast_from_before_the_recording_is_made_anew(machine: Machine) -> None:
    """Its memory is the caller's, and may be gone at a replay."""
    kind, casts = torch.device(machine.on).type, []

    class Counts(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            casts.append(func is torch.ops.aten._to_copy.default and args[0].shape == (8, 8))
            return func(*args, **kwargs or {})

    def backend(graph: Any, example: Any) -> Any:
        def compiled(*args: Any) -> Any:
            if not dit_graph.breaks.capturing():
                return graph.forward(*args)
            with Counts():
                return graph.forward(*args)

        return compiled

    module = Module(lambda m, x: m.blocks[0](x).float() + 1)
    module.blocks = nn.ModuleList([Block()])
    pair = compiled_pair(machine, module, backend)
    pair.graphed.blocks[0].linear.weight.requires_grad_(True)
    with torch.no_grad(), torch.autocast(kind, torch.bfloat16):
        for i in range(2):
            pair.graphed(rows(i).to(machine.on))
    assert sum(casts) == 1


def test_calls_of_a_thread_count_while_another_compiles(machine: Machine) -> None:
    """Their way leads through the recordings, too."""
    started, done = threading.Event(), threading.Event()

    def slow(graph: Any, example: Any) -> Any:
        started.set()
        assert done.wait(60)
        return graph.forward

    pair = machine.pair(Module(lambda m, x: m.linear(x).sin()))
    other = Block().to(machine.on)
    other.compile(fullgraph=True, backend=slow)
    thread = threading.Thread(target=lambda: other(rows(0).to(machine.on)))
    thread.start()
    try:
        assert started.wait(60)
        for i in range(5):
            pair(rows(i).to(machine.on))
    finally:
        done.set()
        thread.join()
    assert pair.stats["calls"] == 5 and pair.replays == 3
