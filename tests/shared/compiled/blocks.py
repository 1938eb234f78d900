"""Blocks to be compiled, and a compiler that cannot work inside a capture."""

import copy
from typing import Any

import torch
from torch import nn

import dit_graph
from tests.pair import PLAIN, Machine
from tests.toys import Module, rows


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
