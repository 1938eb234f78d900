"""What the processes of `test_ranks.py` and `test_bench.py` run: `python -m tests.ranks WAY`."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from diffusers import ContextParallelConfig
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import dit_graph
from dit_graph.bench import run as bench_run
from dit_graph.bench.options import main as bench
from dit_graph.cli import generate
from dit_graph.cli import pictures as pictures_of
from tests.families import FAMILIES

FAILS_AT = "a rabbit"


def failing(argv: list[str]) -> int:
    """`dit_graph.generate` where one prompt cannot be drawn, by whoever it falls to."""
    draw = pictures_of.Run._pictures

    def pictures(run: Any, call: Any) -> Any:
        if call.prompt == FAILS_AT:
            raise RuntimeError("no rabbit today")
        return draw(run, call)

    pictures_of.Run._pictures = pictures  # type: ignore[method-assign]
    return generate.main(argv)


def half_a_bench(argv: list[str]) -> int:
    """`dit_graph.bench` where one process cannot look at its device."""
    real = bench_run.activity

    def activity(*args: Any) -> Any:
        if dist.get_rank() == 1:
            raise RuntimeError("no profiler today")
        return real(*args)

    bench_run.activity = activity
    return bench(argv)


class Talking(nn.Module):
    """Sums over the processes twice in a forward, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.linear = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self.add_up(self.linear(x).tanh())
        return x

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "functional":
            return functional.all_reduce(x, "sum", dist.group.WORLD) + 0
        if self.way == "in a break":
            return in_a_break(x)
        dist.all_reduce(x)
        return x


@dit_graph.eager_on_graph(pure=True)
def in_a_break(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


def talking(argv: list[str]) -> int:
    """Models with collectives under dit_graph; what each said goes to a file of this process."""
    dist.init_process_group("gloo")
    torch.accelerator.device_count = lambda: 1  # diffusers divides by it
    torch._C._get_accelerator = lambda *_: torch.device("cpu")
    said = {way: called(way) for way in ("plain", "functional", "in a break")}
    with torch.no_grad():
        said |= {"sharded": sharded(), "context parallel": context_parallel()}
    Path(argv[0], f"{dist.get_rank()}.json").write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()
    sys.stderr.flush()
    os._exit(0)  # torch 2.11 aborts now and then when the interpreter takes gloo's threads down


def called(way: str) -> Any:
    torch.manual_seed(1)
    module = Talking(way)
    inputs = [torch.randn(4, 8) + dist.get_rank() for _ in range(5)]
    with torch.no_grad():
        expected = [module(x) for x in inputs]
        with dit_graph.enable(module, device="recorder") as handle:
            before = collectives()
            for x, y in zip(inputs, expected):
                assert torch.equal(module(x), y)
            ran = collectives() - before
            return handle.stats() | {"collectives": ran}


def collectives() -> int:
    """How many this process has taken part in."""
    return dist.distributed_c10d._get_default_group()._get_sequence_number_for_group()


def sharded() -> Any:
    """torch's tensor parallelism, which transformers and diffusers use too."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).requires_grad_(False)
    x = torch.randn(2, 8)
    expected = module(x)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(module, init_device_mesh("cpu", (2,)), plan)
    with dit_graph.enable(module, device="recorder") as handle:
        for _ in range(3):
            assert torch.allclose(module(x), expected, atol=1e-6)
        return handle.stats()


def context_parallel() -> Any:
    """Recorded first, then split over the processes while dit_graph is on."""
    flux = FAMILIES["flux"]
    module: Any = flux.build()
    inputs = flux.inputs(0, 8)
    (expected,) = module(**inputs)
    with dit_graph.enable(module, device="recorder") as handle:
        for _ in range(3):
            assert torch.equal(module(**inputs)[0], expected)
        module.set_attention_backend("native")
        module.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))
        for _ in range(3):
            assert torch.allclose(module(**inputs)[0], expected, atol=1e-5)
        return handle.stats()


if __name__ == "__main__":
    ways = {"failing": failing, "talking": talking, "bench": half_a_bench}
    sys.exit(ways[sys.argv[1]](sys.argv[2:]))
