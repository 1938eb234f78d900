"""Hard cases that only a real device shows: re-used memory, workspaces, other threads, failures."""

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn

import dit_graph
from dit_graph import break_graph, eager_on_graph
from dit_graph.devices import cuda
from tests.gpu.test_cuda import CUDA, block
from tests.pair import PLAIN, Machine
from tests.toys import Module, Unseen, rows


def poison() -> list[torch.Tensor]:
    """Take what the allocator has free, in many sizes, and fill it with NaN."""
    sizes = [1 << n for n in range(9, 25)]
    return [torch.full((size,), float("nan"), device=CUDA) for size in sizes for _ in range(3)]


def used() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


# weak inputs of a break, several recordings in one memory
def test_break_inputs_survive_later_recordings(machine: Machine) -> None:
    scale = eager_on_graph(pure=True)(lambda h: h * 2)
    pair = machine.pair(Module(lambda m, x: m.linear(scale(m.linear(x)))))
    for n in (8, 4, 2):
        for i in range(2):
            pair(rows(i, n).to(CUDA))
    junk = poison()
    for i, n in enumerate((8, 4, 2, 8, 2, 4)):
        pair(rows(10 + i, n).to(CUDA))
    assert pair.replays == 6 and len(junk) > 0


# what the next segment reads was freed
def test_break_results_are_kept(machine: Machine) -> None:
    make = eager_on_graph(pure=True)(lambda h: (h.relu(), h.exp()))
    pair = machine.pair(Module(lambda m, x: sum(make(m.linear(x))) @ m.linear.weight))
    for i in range(3):
        pair(rows(i).to(CUDA))
    sizes = torch.Generator().manual_seed(0)
    for i in range(200):
        n = int(torch.randint(1, 1 << 18, (), generator=sizes))
        torch.full((n,), float("nan"), device=CUDA)
        if i % 20 == 0:
            pair(rows(i).to(CUDA))
    assert pair.replays == 11


# the library workspace of a graph that is gone
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_survivors_of_an_eviction(dtype: torch.dtype) -> None:
    module = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6))).to(CUDA, dtype)
    twin = copy.deepcopy(module.requires_grad_(False))
    handle = dit_graph.enable(module, max_graphs=2, **PLAIN)
    x = torch.randn(96, 512, device=CUDA, dtype=dtype)
    for n in (96, 64, 32):
        for _ in range(3):
            module(x[:n])
    junk = poison()
    for n in (32, 64, 96, 64, 32, 96) * 3:
        assert torch.equal(module(x[:n]), twin(x[:n]))
    assert handle.stats()["replays"] > 0 and all(t.isnan().all() for t in junk)


# of two graphed modules one goes
def test_one_of_two_is_closed() -> None:
    modules = [block(512, 6).bfloat16() for _ in range(2)]
    twins = copy.deepcopy(modules)
    handles = [dit_graph.enable(m, **PLAIN) for m in modules]
    x = torch.randn(64, 512, device=CUDA, dtype=torch.bfloat16)
    for _ in range(3):
        for m in modules:
            m(x)
    handles[0].disable()
    torch.cuda.empty_cache()
    junk = poison()
    for i in range(5):
        assert torch.equal(modules[1](x + i), twins[1](x + i))
    assert handles[1].stats()["replays"] == 6 and all(t.isnan().all() for t in junk)


def with_workspaces_cleared(clear_before_capture: Any, patch: Any) -> bool:
    """Whether other people's memory stays whole when torch clears workspaces under our graphs."""
    if clear_before_capture is not None:
        patch.setattr(cuda, "forget_workspaces", clear_before_capture)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    # few outputs and a long sum: split over blocks, whose parts meet in the workspace
    module = nn.Linear(65536, 64, bias=False, device=CUDA, dtype=torch.bfloat16)
    module.requires_grad_(False)
    x = torch.randn(16, 65536, device=CUDA, dtype=torch.bfloat16)
    handle = dit_graph.enable(module, **PLAIN)
    for _ in range(3):
        module(x)
    torch._C._cuda_clearCublasWorkspaces()  # as torch.compile(mode="reduce-overhead") does
    victims = [torch.full((1 << 18,), 7.0, device=CUDA) for _ in range(400)]
    for _ in range(3):
        module(x)
    torch.cuda.synchronize()
    whole = all(bool((v == 7).all()) for v in victims)
    assert handle.stats()["replays"] == 4
    handle.disable()
    return whole


def test_graphs_keep_their_own_workspace(monkeypatch: Any) -> None:
    assert with_workspaces_cleared(None, monkeypatch)


# results of one stream among the calls of another
def test_one_entry_on_two_streams() -> None:
    module = block(512, 12)
    twin = copy.deepcopy(module)
    dit_graph.enable(module, **PLAIN)
    streams = [torch.cuda.Stream() for _ in range(2)]
    x = torch.randn(256, 512, device=CUDA)
    torch.cuda.synchronize()
    got = []
    for i in range(60):
        with torch.cuda.stream(streams[i % 2]):
            got.append(module(x * (i % 7)))
    torch.cuda.synchronize()
    for i, result in enumerate(got):
        assert torch.equal(result, twin(x * (i % 7))), i


# a kernel whose launch depends on what it was given
def test_verification_finds_what_a_launch_has_frozen(machine: Machine) -> None:
    aside = Unseen()
    aside.dict["live"] = iter(float(i) for i in range(100))

    def kernel(x: torch.Tensor) -> torch.Tensor:  # stands for a kernel's own host-side choice
        frozen, live = aside.list, aside.dict["live"]
        if torch.cuda.is_current_stream_capturing() or not frozen:
            frozen[:] = [float(sum(map(ord, "host")))]
        return x * (frozen[0] if torch.cuda.is_current_stream_capturing() else next(live))

    module = Module(lambda m, x: kernel(m.linear(x))).to(CUDA)
    handle = dit_graph.enable(module, gate="always")
    for i in range(5):
        module(rows(i).to(CUDA))
    (reason,) = handle.stats()["eager"]
    assert reason.startswith("verify: the recording differs from eager")


# two hundred sizes
def test_two_hundred_sizes_under_a_budget() -> None:
    module = block(1024, 8)
    twin = copy.deepcopy(module)
    x = torch.randn(8192, 1024, device=CUDA)
    sizes, budget = torch.Generator().manual_seed(0), 192 << 20

    def serve(count: int) -> list[int]:
        """The bytes in use after each size, and after `disable`."""
        handle = dit_graph.enable(module, memory_budget=budget, **PLAIN)
        held = []
        for _ in range(count):
            n = int(torch.randint(1, 8192, (), generator=sizes))
            for _ in range(5):
                result = module(x[:n])
            assert torch.equal(result, twin(x[:n]))
            held.append(used())
        assert handle.stats()["replays"] >= 2.5 * count and handle.stats()["eager"] == {}
        del result
        handle.disable()
        return [*held, used()]

    # what stays of a first time: what eager itself keeps, and what the driver loads for each kernel
    before = serve(20)[-1]
    *held, after = serve(200)
    assert max(held) - before <= budget + (64 << 20), [(h - before) >> 20 for h in held]
    assert max(held[100:]) <= max(held[:100]) + (32 << 20)
    assert after - before <= 1 << 20


# old and new memory never coexist
def test_a_change_gives_the_old_memory_back_first() -> None:
    module = block(1024, 8)
    x = torch.randn(8192, 1024, device=CUDA)
    handle = dit_graph.enable(module, **PLAIN)
    held = []
    for _ in range(4):
        for _ in range(3):
            module(x)
        held.append(handle.pool_on(torch.device(CUDA)).bytes)
        linear = next(m for m in module.modules() if isinstance(m, torch.nn.Linear))
        linear.weight = torch.nn.Parameter(linear.weight.clone(), requires_grad=False)
        module(x)
        assert handle.pool_on(torch.device(CUDA)).bytes == 0
    assert max(held) <= min(held) + (4 << 20)


# another thread allocates, pins and asks while a capture is open
def test_another_thread_is_busy_during_captures() -> None:
    stop, errors = threading.Event(), []

    def busy() -> None:
        try:
            while not stop.is_set():
                host = torch.empty(1 << 16, pin_memory=True)
                device = host.to(CUDA, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
                event.query()
                torch.cuda.current_stream().synchronize()
                del device
                torch.cuda.empty_cache()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        module = block(256, 4)
        twin = copy.deepcopy(module)
        handle = dit_graph.enable(module, **PLAIN)
        for n in range(1, 41):
            x = torch.randn(n, 256, device=CUDA)
            for _ in range(5):
                assert torch.equal(module(x), twin(x))
    finally:
        stop.set()
        thread.join(60)
    assert errors == [] and handle.stats()["eager"] == {} and handle.stats()["captures"] == 40


# a forced capture error in each segment, and a forced end of memory, then another key
@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("what", ["synchronize", "memory"])
def test_a_forced_error_in_any_segment(machine: Machine, what: str, where: int) -> None:
    def body(m: Any, x: Any) -> Any:
        m.count.add_(1)
        h = x + torch.rand_like(x)
        for segment in range(3):
            h = m.linear(h) * m.count
            if segment == where and x.shape[0] == 2 and dit_graph.breaks.capturing():
                if what == "synchronize":
                    torch.cuda.synchronize()
                else:
                    torch.empty(1 << 50, dtype=torch.uint8, device=x.device)
            break_graph()
        return h

    pair = machine.pair(Module(body))
    for i in range(5):
        pair(rows(i).to(CUDA), seed=i)
    (reason,) = pair.stats["eager"]
    assert ("OutOfMemoryError" if what == "memory" else "capture failed") in reason
    for i in range(5):
        pair(rows(i, 3).to(CUDA), seed=i)
    assert pair.replays == 3, "the next key is recorded"


# a module on a device that is not the current one needs two devices
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_another_device_is_current() -> None:
    module = block(256, 4).to("cuda:1")
    twin = copy.deepcopy(module)
    handle = dit_graph.enable(module, **PLAIN)
    with torch.cuda.device(0):
        for i in range(6):
            x = torch.randn(4, 256, device="cuda:1")
            assert torch.equal(module(x), twin(x)), i
    assert handle.stats()["replays"] == 4


# side work that is forked in a segment and joined in a break
def test_side_work_that_is_joined_in_a_break(machine: Machine) -> None:
    side = torch.cuda.Stream()

    def body(m: Any, x: Any) -> Any:
        h = m.linear(x)
        if x.shape[0] == 3:
            return h
        event = torch.cuda.Event()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            other = h * 3
            event.record(side)
        join(event)
        return h + other

    join = eager_on_graph(pure=True)(lambda event: torch.cuda.current_stream().wait_event(event))
    pair = machine.pair(Module(body))
    for i in range(4):
        pair(rows(i).to(CUDA))
    (reason,) = pair.stats["eager"]
    assert reason.startswith("capture failed"), reason
    for i in range(4):
        pair(rows(i, 3).to(CUDA))
    assert pair.replays == 2 and torch.randn(4, device=CUDA).isfinite().all()


# the gate, with the device's own clock


def test_the_gate_keeps_what_the_device_runs_faster() -> None:
    module = block(64, 40)  # a hundred and twenty launches of next to nothing
    twin = copy.deepcopy(module)
    handle = dit_graph.enable(module)
    x = torch.randn(2, 64, device=CUDA)
    for i in range(12):
        assert torch.equal(module(x + i), twin(x + i))
        torch.cuda.synchronize()
    stats = handle.stats()
    assert stats["replays"] >= 8 and sum(stats["eager"].values()) <= 2
    assert "vs eager" in handle.report() and "bit-equal when compared" in handle.report()


def test_the_gate_lets_go_of_what_gains_nothing() -> None:
    module = nn.Linear(8192, 8192, bias=False, device=CUDA).requires_grad_(False)
    twin = copy.deepcopy(module)
    handle = dit_graph.enable(module, min_gain=0.05)  # one long kernel
    x = torch.randn(8192, 8192, device=CUDA)
    for i in range(12):
        assert torch.equal(module(x), twin(x)), i
        torch.cuda.synchronize()
    assert any("vs eager" in reason for reason in handle.stats()["eager"])
    assert handle.pool_on(torch.device(CUDA)).bytes == 0
