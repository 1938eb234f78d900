"""What only a real device shows: streams, allocator, failed captures, memory, pictures."""

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import dit_graph
from dit_graph.call import key
from dit_graph.tape import buffers
from tests.families import FAMILIES, moved
from tests.pair import PLAIN, Machine
from tests.toys import Module, rows, shifted

CUDA = "cuda:0"


class Part(nn.Module):
    """Not a `Sequential`: dynamo compiles nothing in torch's own forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.nn.functional.gelu(self.linear(x)))


def block(width: int = 256, layers: int = 8) -> nn.Module:
    torch.manual_seed(0)
    parts = [Part(width) for _ in range(layers)]
    return nn.Sequential(*parts).to(CUDA).requires_grad_(False)


def test_nobody_else_has_the_capture_stream(machine: Machine) -> None:
    """torch hands 32 streams out in turn."""
    seen = []
    pair = machine.pair(
        Module(lambda m, x: seen.append(torch.cuda.current_stream()) or m.linear(x))
    )
    pair.graphed(rows(0).to(CUDA))
    (ours,) = seen
    others = {torch.cuda.Stream(priority=p).cuda_stream for p in (0, -1) for _ in range(64)}
    assert len(others) >= 64 and ours.cuda_stream not in others | {0}
    assert ours.priority == 0


@pytest.mark.parametrize("where", ["segment 0", "after a break"])
def test_an_illegal_call_in_a_capture_is_unwound(machine: Machine, where: str) -> None:
    def body(m: Any, x: Any) -> Any:
        m.count.add_(1)
        h = m.linear(x) + torch.randn_like(x)
        if where == "after a break":
            h = h + bool(h.sum() > -1e9)
        if x.shape[0] == 2:
            torch.cuda.synchronize()  # forbidden while a stream captures
        return h + m.count

    pair = machine.pair(Module(body))
    for i in range(5):
        pair(rows(i).to(CUDA), seed=i)
    (reason,) = pair.stats["eager"]
    assert reason.startswith("capture failed") and pair.replays == 0
    for i in range(5):
        pair(rows(i, 3).to(CUDA), seed=i)
    assert pair.replays == 3, "the next key is recorded"
    assert torch.randn(4, device=CUDA).isfinite().all()


def test_out_of_memory_in_a_capture_is_answered_eagerly(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        h = m.linear(x)
        if torch.cuda.is_current_stream_capturing() and x.shape[0] == 2:
            torch.empty(1 << 50, dtype=torch.uint8, device=x.device)
        return h * 2

    pair = machine.pair(Module(body))
    for i in range(4):
        pair(rows(i).to(CUDA))
    (reason,) = pair.stats["eager"]
    assert "OutOfMemoryError" in reason
    for i in range(4):
        pair(rows(i, 3).to(CUDA))
    assert pair.replays == 2


def test_old_graphs_that_become_garbage_leave_a_capture_alone() -> None:
    import gc

    threshold = gc.get_threshold()
    try:
        for i in range(6):
            module = block(64, 2)
            handle = dit_graph.enable(module, **PLAIN)
            gc.set_threshold(1, 1, 1)
            for n in (2, 3, 4):
                for _ in range(4):
                    module(torch.randn(n, 64, device=CUDA))
            gc.set_threshold(*threshold)
            stats = handle.stats()
            assert stats["eager"] == {} and stats["replays"] == 6, (i, stats)
            del module, handle  # a cycle with its graphs, never disabled
    finally:
        gc.set_threshold(*threshold)
    assert torch.rand(4, device=CUDA).isfinite().all()


def test_calls_on_the_callers_own_stream() -> None:
    module = block()
    twin = copy.deepcopy(module)
    handle = dit_graph.enable(module, **PLAIN)
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    for i in range(30):
        with torch.cuda.stream(streams[i % 3]):
            x = torch.full((64, 256), float(i), device=CUDA).sin_()
            results.append((x.clone(), module(x)))
            x.zero_()  # after the call, on the same stream
    torch.cuda.synchronize()
    assert all(torch.equal(out, twin(x)) for x, out in results)
    assert handle.stats()["replays"] == 28


def test_results_survive_later_captures_and_frees() -> None:
    module = block()
    twin = copy.deepcopy(module)
    dit_graph.enable(module, **PLAIN)
    held = []
    for i, n in enumerate([8, 4, 2, 8, 8, 4, 4, 2, 2, 8, 4, 2] * 3):
        x = torch.randn(n, 256, device=CUDA)
        held.append((x, module(x)))
        for size in torch.randint(1, 1 << 20, (20,)).tolist():
            torch.full((size,), float("nan"), device=CUDA)
        if i % 7 == 0:
            torch.cuda.empty_cache()
    assert all(torch.equal(out, twin(x)) for x, out in held)


LONG = 10**9  # cycles: half a second, in which the host goes on


def test_a_cold_result_is_copied_before_its_memory_is_used_again() -> None:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # so that the second call gets what the first one let go
    streams, made = [torch.cuda.Stream() for _ in range(2)], []

    def body(m: Any, x: Any) -> Any:
        out = x * 2
        made.append(out.data_ptr())
        if len(made) == 1:
            with torch.cuda.stream(streams[0]):  # what copies the result
                torch.cuda._sleep(LONG)
        return out

    x = torch.randn(1 << 20, device=CUDA)
    torch.cuda.synchronize()
    results = []
    for stream, given in zip(streams, (x, torch.full_like(x, float("nan")))):
        module = Module(body).to(CUDA)
        dit_graph.enable(module, **PLAIN)
        with torch.cuda.stream(stream):
            results.append(module(given))
    torch.cuda.synchronize()
    assert made[0] == made[1]
    assert torch.equal(results[0], x * 2)


@pytest.mark.parametrize("taker", ["caller", "another recording"])
def test_staged_inputs_are_there_until_a_replay_has_read_them(taker: str) -> None:
    @dit_graph.eager_on_graph(pure=True)
    def wait(h: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(LONG)
        return h

    module = Module(lambda m, x: wait(x.sin()) + x).to(CUDA)
    twin = copy.deepcopy(module)
    handle = dit_graph.enable(module, **PLAIN)
    x = torch.randn(1 << 20, device=CUDA)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        for _ in range(2):
            module(x[:8])  # whose recording keeps the generation
            module(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(second):
        result = module(x)
    assert handle.stats()["replays"] == 1
    entries = handle.installs["Module"].runner.entries.values()
    max(entries, key=lambda entry: entry.static.bytes).block("for example by the gate")
    nan = Module(lambda m, x: [x * float("nan") for _ in range(4)])  # in the memory let go
    if taker == "another recording":
        dit_graph.enable(nan.to(CUDA), **PLAIN)
    with torch.cuda.stream(first):
        junk = nan(x)
    torch.cuda.synchronize()
    assert len(junk) == 4 and torch.equal(result, twin(x))


def test_constants_are_kept() -> None:
    def body(m: Any, x: Any) -> Any:
        c = torch.tensor([2.0] * 4096, device=x.device)
        return m.linear(x) * c[:8] + c.sum()

    module = Module(body).to(CUDA)
    twin = copy.deepcopy(module)
    handle = dit_graph.enable(module, **PLAIN)
    for i in range(6):
        junk = [torch.full((4096,), float("nan"), device=CUDA) for _ in range(200)]
        x = rows(i).to(CUDA)
        assert torch.equal(module(x), twin(x))
        del junk
    assert handle.stats()["replays"] == 4


def test_marked_attention_needs_no_more_memory_than_one_graph() -> None:
    held = {}
    for label, options in {"full": {"backend": "full"}, "marked": {"breaks": ("*.1",)}}.items():
        module = block(1024, 16)
        handle = dit_graph.enable(module, **PLAIN, **options)
        x = torch.randn(4096, 1024, device=CUDA)
        expected = copy.deepcopy(module)(x)
        for _ in range(4):
            assert torch.equal(module(x), expected)
        assert handle.stats()["replays"] == 2
        held[label] = handle.pool_on(torch.device(CUDA)).bytes
        handle.disable()
    assert held["marked"] <= held["full"] * 1.02, held


def test_disable_gives_the_memory_back() -> None:
    module = block(1024, 16)
    x = torch.randn(4096, 1024, device=CUDA)
    free = []
    for _ in range(4):  # the first time the capture stream gets its library workspaces, which stay
        handle = dit_graph.enable(module, **PLAIN)
        for n in (4096, 2048, 1024):
            for _ in range(4):
                module(x[:n])
        assert handle.pool_on(torch.device(CUDA)).bytes > 32 << 20
        handle.disable()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info()[0])
    assert free[0] - free[-1] <= 1 << 20, free


def test_recordings_over_the_limit_retire_and_stay_right() -> None:
    module = block()
    twin = copy.deepcopy(module)
    handle = dit_graph.enable(module, max_graphs=2, **PLAIN)
    for i in range(60):
        x = torch.randn(1 + i // 3 % 4, 256, device=CUDA)
        assert torch.equal(module(x), twin(x))
    assert handle.stats()["replays"] >= 20 and handle.stats()["eager"] == {}


def test_host_arguments_and_tables(machine: Machine) -> None:
    def body(m: Any, x: Any, lengths: Any) -> Any:
        table = torch.arange(8).float()  # built on the host, moved in the forward
        rows = (lengths * 2).clamp(max=8)  # host work on a host argument
        longest = int(rows.max())
        return m.linear(x)[:, :longest] * table.to(x.device)[:longest] + rows.to(x.device).sum()

    pair = machine.pair(Module(body))
    for i in range(9):
        pair(rows(i).to(CUDA), torch.tensor([1, 2 + i % 2]))
    assert pair.replays >= 6, pair.handle.report()


def test_a_module_that_moves_to_the_host_and_back(machine: Machine) -> None:
    family = FAMILIES["flux"]
    pair = machine.pair(family.build())
    call = family.inputs(0, 5)
    for _ in range(3):
        pair(**moved(call, CUDA))
    for module in (pair.graphed, pair.eager):
        module.cpu()
    pair(**call)
    assert "parameters are on cpu" in next(iter(pair.stats["eager"]))
    for module in (pair.graphed, pair.eager):
        module.to(CUDA)
    for _ in range(4):
        pair(**moved(call, CUDA))
    assert pair.replays >= 3


def test_enable_before_the_pipeline_moves_to_the_gpu() -> None:
    module = FAMILIES["flux"].build()
    twin = copy.deepcopy(module).to(CUDA)
    handle = dit_graph.enable(module, **PLAIN)
    module.to(CUDA)
    for i in range(4):
        call = moved(FAMILIES["flux"].inputs(i, 5), CUDA)
        assert torch.equal(module(**call)[0], twin(**call)[0])
    assert handle.stats()["replays"] == 2


def test_an_inductor_block(machine: Machine) -> None:
    torch.compiler.reset()
    module = block(64, 2)
    for part in module:
        part.compile(fullgraph=True)
    x = torch.randn(8, 64, device=CUDA)
    expected = module(x)
    handle = dit_graph.enable(module, **PLAIN)
    for i in range(5):
        y = torch.randn(8, 64, device=CUDA)
        got = module(y)
        dit_graph.disable(handle) if i == 4 else None
        assert torch.allclose(got, copy.deepcopy(module)(y), atol=1e-5)
    assert handle.stats()["replays"] == 3
    assert torch.equal(module(x), expected)


def test_inductor_blocks_that_time_their_kernels(machine: Machine) -> None:
    """As a reduction's are at the first launch; none may be timed again in a capture."""
    torch.compiler.reset()
    module = block(1152, 3)
    inputs = [torch.randn(512, 1152, device=CUDA) for _ in range(6)]
    plain = module(inputs[0])
    for part in module:
        part.compile(fullgraph=True)
    expected = [module(x) for x in inputs]
    assert not torch.equal(plain, expected[0]), "compiled code has other numbers"
    with dit_graph.enable(module, **PLAIN) as handle:
        for x, y in zip(inputs, expected):
            assert torch.equal(module(x), y)
        assert handle.stats()["replays"] == 4 and handle.stats()["eager"] == {}


def test_cuda_malloc_async_is_refused_in_one_line() -> None:
    code = (
        "import torch, dit_graph\n"
        "try: dit_graph.enable(torch.nn.Linear(2, 2).cuda())\n"
        "except dit_graph.Unsupported as error: print('refused:', error)\n"
    )
    import os

    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert run.stdout.startswith("refused: the cudaMallocAsync allocator"), run.stderr
    assert run.stdout.count("\n") == 1


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_the_embedded_model_draws_the_same_pixels(batch: int) -> None:
    from dit_graph.embedded import load

    pipe, eager = load(torch.bfloat16).to(CUDA), load(torch.bfloat16).to(CUDA)
    handle = dit_graph.enable(pipe, **PLAIN)
    for p in (pipe, eager):
        p.set_progress_bar_config(disable=True)
    for size in ((64, 64), (64, 96), (96, 64)):
        pictures = [
            p("fox", *size, num_inference_steps=8, guidance_scale=2.0, num_images_per_prompt=batch,
              generator=torch.Generator().manual_seed(3), output_type="pt").images
            for p in (pipe, eager)
        ]  # fmt: skip
        assert torch.equal(*pictures)
    stats = handle.stats()
    # 64x96 and 96x64 have the same packed shapes; their positions are tensors
    assert stats == {
        "calls": 24,
        "cold": 2,
        "captures": 2,
        "replays": 20,
        "dropped": 0,
        "eager": {},
    }


def test_steps_are_timed_on_the_device(machine: Machine) -> None:
    """A launch returns at once, so a host's clock would not see how long the last segment takes."""

    def body(m: Any, x: Any) -> Any:
        h = x @ x.t()
        h = h * int((h.sum() > -1e30).item())
        wide = torch.ones(4096, 4096, device=x.device)
        for _ in range(8):
            wide = wide @ wide * 1e-4
        return h + wide[0, 0]

    pair = machine.pair(Module(body))
    for i in range(4):
        pair(rows(i).to(CUDA))
    (signature,) = pair.handle.explain(time=True).modules[0].signatures
    (variant,) = signature.variants
    assert [step.kind for step in variant.steps] == ["segment", "break", "segment"]
    first, read, last = (step.ms or 0.0 for step in variant.steps)
    assert first > 0 and read > 0 and last > max(1.0, first), variant
    pair(rows(9).to(CUDA))
    assert pair.replays == 3


@pytest.mark.parametrize("rule", [True, False])
def test_where_an_argument_begins_decides_bits(
    machine: Machine, rule: bool, monkeypatch: Any
) -> None:
    """Kernels add up in another order where they cannot load 16 bytes at once."""
    if not rule:
        for module in (buffers, key):
            monkeypatch.setattr(module, "misaligned", lambda t: 0)

    def body(m: Any, x: Any) -> Any:
        return x.sum(-1), torch.nn.functional.layer_norm(x, x.shape[-1:]), x.norm(dim=-1)

    pair = machine.pair(Module(body))
    x = torch.randn(256, 256, device="cuda")
    equal = [pair.compare(shifted(x, i % 2))[0] for i in range(8)]
    assert pair.replays >= 4 and all(equal) is rule
