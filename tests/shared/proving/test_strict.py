"""`strict`: an error at the first eager call."""

from typing import Any

import pytest
import torch

import dit_graph
from tests.pair import Machine
from tests.toys import Module, fail_while_recording, plain, rows


def test_strict_lets_cold_captured_and_replayed_calls_through(machine: Machine) -> None:
    pair = machine.pair(Module(plain), strict=True)
    for i in range(8):
        pair(rows(i, 2 + i % 2).to(machine.on))
    assert pair.replays == 4


@pytest.mark.parametrize("why", ["gradients", "generator", "capture", "backend"])
def test_strict_raises_at_the_first_eager_call(machine: Machine, why: str) -> None:
    def body(m: Any, x: Any, generator: Any = None) -> Any:
        if why == "capture":
            fail_while_recording()
        return m.linear(x)

    options = {"backend": "eager"} if why == "backend" else {}
    pair = machine.pair(Module(body), strict=True, **options)
    x, kwargs = rows(0).to(machine.on), {}
    if why == "generator":
        kwargs["generator"] = torch.Generator()
    if why == "gradients":
        x.requires_grad_()
    expected = {
        "gradients": "gradients are needed",
        "generator": "generator is a Generator",
        "capture": "only while recording",
        "backend": "backend eager",
    }
    with torch.set_grad_enabled(why == "gradients"):
        if why == "capture":
            pair.graphed(x)
        with pytest.raises(dit_graph.NotReplayed, match=expected[why]):
            pair.graphed(x, **kwargs)


def test_strict_names_where_a_size_that_was_not_warmed_up_differs(machine: Machine) -> None:
    pair = machine.pair(Module(plain), on_new_shape="eager", strict=True)
    pair.handle.warmup(inputs=[{"x": rows(0).to(machine.on)}])
    pair(x=rows(1).to(machine.on))
    with pytest.raises(dit_graph.NotReplayed, match="x dim 0: 5 vs 2"):
        pair.graphed(x=rows(1, 5).to(machine.on))
