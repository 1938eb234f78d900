"""Many threads on one transformer: every result is eager's, on every device."""

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

import dit_graph
from tests.families import FAMILIES
from tests.pair import PLAIN, Machine
from tests.recorder.test_denoise import draw, flux_pipeline
from tests.toys import Module, rows

THREADS = 8
SIZES = [(16, 16), (16, 24), (24, 16)]


def together(work: Callable[[int], Any]) -> list[Any]:
    """Run `work(i)` in eight threads that start at the same time; the first error comes out."""
    start = Barrier(THREADS)

    def one(i: int) -> Any:
        start.wait(60)
        with torch.no_grad():  # a mode of each thread's own
            return work(i)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(one, range(THREADS)))


def pictures(pipe: Any, on: str, i: int) -> list[torch.Tensor]:
    """Nine pictures of seven steps: 504 steps with all eight threads."""
    stream = torch.cuda.stream(torch.cuda.Stream()) if on != "cpu" else contextlib.nullcontext()
    with stream:
        return [
            draw(pipe, 100 * i + n, 7, SIZES[(i + n) % 3], tokens=5 + (i * n) % 3).cpu()
            for n in range(9)
        ]


@pytest.mark.parametrize("options", [PLAIN, {}, {"verify": "always"}], ids=str)
def test_pipelines_that_share_a_transformer(machine: Machine, options: Any) -> None:
    eager = flux_pipeline().to(machine.on)
    first = flux_pipeline().to(machine.on)
    pipes = [first]
    while len(pipes) < THREADS:
        other = FluxPipeline.from_pipe(first)
        other.scheduler = FlowMatchEulerDiscreteScheduler()
        other.set_progress_bar_config(disable=True)
        pipes.append(other)
    handles = [dit_graph.enable(pipe, device=machine.device, **options) for pipe in pipes]
    results = together(lambda i: pictures(pipes[i], machine.on, i))
    for i, drawn in enumerate(results):
        for n, (picture, expected) in enumerate(zip(drawn, pictures(eager, machine.on, i))):
            assert torch.equal(picture, expected), f"thread {i}, picture {n}"
    stats = handles[0].stats()
    assert stats["calls"] == 504 and 2 < stats["captures"] <= 6
    eager = sum(stats["eager"].values())
    assert stats["replays"] == 504 - stats["cold"] - stats["captures"] - eager
    assert options == {} or eager == 0
    for handle in handles:
        handle.disable()
    assert "forward" not in first.transformer.__dict__


def test_a_bare_transformer_on_many_streams(machine: Machine) -> None:
    family = FAMILIES["flux"]
    module, eager = (family.build().to(machine.on) for _ in range(2))
    handle = dit_graph.enable(module, device=machine.device, **PLAIN)
    on_gpu = machine.on != "cpu"

    def work(i: int) -> None:
        # torch has 32 streams: all of them are somebody's here
        streams = [torch.cuda.Stream() for _ in range(5)] if on_gpu else [None]
        for n in range(30):
            stream = torch.cuda.stream(streams[n % 5]) if on_gpu else contextlib.nullcontext()
            with stream:
                call = machine.to(family.inputs(1000 * i + n, 4 + n % 2))
                result, expected = (
                    module(**call),
                    eager(**call),
                )
                assert torch.equal(result[0], expected[0]), f"thread {i}, call {n}"

    together(work)
    assert handle.stats()["replays"] >= 200


def test_threads_on_modules_of_their_own(machine: Machine) -> None:
    """Captures of one thread among the replays and eager calls of others."""
    modules = [Module(lambda m, x: m.linear(x).relu()).to(machine.on) for _ in range(THREADS)]
    handles = [dit_graph.enable(m, device=machine.device, **PLAIN) for m in modules]

    def work(i: int) -> None:
        for n in range(60):
            x = rows(n, 1 + n // 6).to(machine.on)
            expected = torch.nn.functional.linear(x, *modules[i].linear.parameters()).relu()
            assert torch.equal(modules[i](x), expected), f"thread {i}, call {n}"

    together(work)
    assert all(handle.stats()["replays"] == 40 for handle in handles)


def test_another_thread_than_the_one_that_warmed_up_records(machine: Machine) -> None:
    """A library's handle is a thread's own, and none can be made while a graph is captured."""
    module = Module(lambda m, x: m.linear(x).relu()).to(machine.on)
    handle = dit_graph.enable(module, device=machine.device, **PLAIN)

    def call(n: int) -> None:
        with torch.no_grad():
            x = rows(n).to(machine.on)
            expected = torch.nn.functional.linear(x, *module.linear.parameters()).relu()
            assert torch.equal(module(x), expected)

    for n in range(4):  # each in a thread that is new to the libraries
        with ThreadPoolExecutor(1) as pool:
            pool.submit(call, n).result()
    stats = handle.stats()
    assert stats["eager"] == {} and stats["cold"] == 4
    for n in range(3):
        call(n)
    assert handle.stats()["captures"] == 1 and handle.stats()["eager"] == {}
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call, 9).result()
    assert handle.stats()["replays"] == 2


def test_a_new_thread_at_every_call_is_named(machine: Machine) -> None:
    module = Module(lambda m, x: m.linear(x)).to(machine.on)
    handle = dit_graph.enable(module, device=machine.device, **PLAIN)

    def call() -> None:
        with torch.no_grad():
            module(rows(0).to(machine.on))

    for _ in range(14):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(call).result()
    (reason,) = handle.stats()["eager"]
    assert reason.startswith("every call comes from a new thread")
    for _ in range(3):
        call()
    assert handle.stats()["captures"] == 1
