"""Compiled code in a recorded forward: it stays compiled, or it is eager by name."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import dit_graph
from tests.families import FAMILIES
from tests.pair import PLAIN, Machine
from tests.shared.compiled.blocks import Block, compiled_block, compiled_pair
from tests.toys import Module, rows


@pytest.mark.parametrize("order", ["compile first", "enable first"])
def test_n2_compiled_blocks_stay_compiled(machine: Machine, order: str) -> None:
    assert compiled_block(machine, order) == (True, 3, 2)


def test_n2_is_wrong_without_its_rule(machine: Machine, monkeypatch: Any) -> None:
    monkeypatch.setattr("dit_graph.backends.breakable.opaque", lambda fn: fn)
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
    assert (
        "capturing') in compiled code at compiled/test_captured.py" in reason and "\n" not in reason
    )
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
