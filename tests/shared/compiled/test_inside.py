"""What lies inside or around compiled code: marks, patterns, other compiled code, casts."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dit_graph
from tests.pair import Machine
from tests.shared.compiled.blocks import Block, compiled_pair, refuses
from tests.toys import Module, reads_host, rows


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
            if capture is not None and capture.no_segment_takes:  # what CUDA says from then on
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
    assert "reads_host.default at compiled/test_inside.py" in reason and pair.replays == 3


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
