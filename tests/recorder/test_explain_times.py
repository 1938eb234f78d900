"""`handle.explain(time=True)` and its picture: taking times changes nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

import dit_graph
from dit_graph.explain import plot
from tests.families import FAMILIES
from tests.pair import PLAIN, Machine
from tests.recorder.test_explain import family, only, small, variants_of
from tests.toys import Module, rows


def test_times_leave_results_as_they_are(machine: Machine) -> None:
    pair = family(machine, "flux", [5] * 4, breaks=("scaled_dot_product_attention",))
    before = pair.stats
    variant = only(pair, time=True)
    assert all(step.ms is not None and step.ms > 0 for step in variant.steps)
    assert variant.ms == pytest.approx(sum(step.ms or 0 for step in variant.steps))
    assert pair.stats == before and variant.not_timed == ""
    assert " ms\n" in str(pair.handle.explain(time=True))
    pair(**FAMILIES["flux"].inputs(77, 5))
    assert pair.replays == 3
    assert only(pair).ms is None, "times are taken when they are asked for"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_times_are_taken_in_any_grad_mode(machine: Machine, mode: Any) -> None:
    module = FAMILIES["lumina2"].build().requires_grad_(True)
    pair = machine.pair(module, breaks=("scaled_dot_product_attention",))
    with mode():
        for i in range(4):
            pair(**FAMILIES["lumina2"].inputs(i, 5))
    with torch.enable_grad():
        variant = only(pair, time=True)
    assert variant.not_timed == "" and variant.ms
    with mode():
        pair(**FAMILIES["lumina2"].inputs(9, 5))
    assert pair.replays == 3


def test_a_step_that_fails_is_told(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        return nn.functional.linear(x.bfloat16(), m.linear.weight)

    pair = machine.pair(Module(body), breaks=("linear",))
    with torch.autocast("cpu", torch.bfloat16):
        for i in range(3):
            pair(rows(i))
    assert only(pair, time=True).not_timed.startswith(
        "a step fails outside of a call: RuntimeError"
    )
    with torch.autocast("cpu", torch.bfloat16):
        pair(rows(9))
    assert pair.replays == 2


def test_only_the_last_calls_variant_is_timed(machine: Machine) -> None:
    pair = family(machine, "lumina2", [5, 5, 5, 8, 8])
    newest, oldest = variants_of(pair.handle.explain(time=True))
    assert newest.ms and oldest.ms is None
    assert oldest.not_timed.startswith("recorded for other values than the last call's: Tensor.tol")
    for caption in (5, 8, 5):
        pair(**FAMILIES["lumina2"].inputs(3, caption))
    assert pair.replays == 5


def writes_input(m: Any, x: Any) -> Any:
    return x.mul_(2) + 1


def writes_buffer(m: Any, x: Any) -> Any:
    m.count.add_(1)
    return x + m.count


def draws(m: Any, x: Any) -> Any:
    return m.linear(x) + torch.randn_like(x)


def is_marked(m: Any, x: Any) -> Any:
    return dit_graph.eager_on_graph(pure=True)(torch.relu)(m.linear(x)) + 1


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (writes_input, "it writes into its arguments"),
        (writes_buffer, "it writes tensors from outside the call"),
        (draws, "it draws random numbers"),
        (is_marked, "a marked break may have side effects"),
    ],
)
def test_what_has_an_effect_is_not_timed(machine: Machine, body: Any, why: str) -> None:
    pair = small(machine, body)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    count = pair.graphed.count.clone()
    variant = only(pair, time=True)
    assert variant.not_timed.startswith(why) and all(step.ms is None for step in variant.steps)
    assert f"not timed: {why}" in str(pair.handle.explain(time=True))
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(pair.graphed.count, count)
    pair(rows(9), seed=9)
    assert pair.replays == 3
    assert only(pair).not_timed == "", "nobody asked"


def test_an_eager_function_that_writes_is_not_timed(machine: Machine) -> None:
    outside = torch.zeros(8)

    def body(m: Any, x: Any) -> Any:
        return m.linear(x) + outside.add_(1)

    module = machine.pair(Module(body), breaks=("add_",)).graphed
    for i in range(3):
        module(rows(i))
    (variant,) = variants_of(
        dit_graph.enable(module, device="recorder", breaks=("add_",), **PLAIN).explain(time=True)
    )
    assert "writes" in variant.not_timed and torch.equal(outside, torch.full((8,), 3.0))


def test_times_are_not_taken_inside_a_call(machine: Machine) -> None:
    said: list[str] = []

    def look(x: Any) -> Any:
        said.extend(
            v.not_timed
            for b in pair.handle.explain(time=True).modules[0].signatures
            for v in b.variants
        )
        return x + 0

    def body(m: Any, x: Any) -> Any:
        return dit_graph.eager_on_graph(reason="look")(look)(m.linear(x)) + 1

    module = Module(body)
    pair = machine.pair(module)
    for i in range(3):
        pair.graphed(rows(i))
    assert set(said) == {"a call is running"}
    assert pair.replays == 1


# ---- the picture


def test_the_picture_has_one_row_a_variant(machine: Machine, tmp_path: Path) -> None:
    pair = family(machine, "lumina2", [5, 5, 5, 8, 8])
    explanation = pair.handle.explain()
    (axes,) = plot.figure(explanation).axes
    variants = variants_of(explanation)
    assert [label.get_text()[-9:] for label in axes.get_yticklabels()] == ["variant 0", "variant 1"]
    labels = [" ".join(label.get_text().split()) for label in axes.get_yticklabels()]
    shown = [signature.label for signature in explanation.modules[0].signatures]
    assert all(label in text for label, text in zip(shown, labels)), "all of it, over some lines"
    assert len(axes.patches) == sum(len(variant.steps) for variant in variants)
    assert axes.get_xlabel() == "operations (breaks are not to scale)"
    widths = [bar.get_width() for bar in axes.patches]
    ops = [step.ops for variant in variants for step in variant.steps]
    assert [w for w, n in zip(widths, ops) if n] == [n for n in ops if n]
    assert all(0 < w < 10 for w, n in zip(widths, ops) if not n), "a break is thin, and seen"
    explanation.plot(tmp_path / "tape.png")
    with Image.open(tmp_path / "tape.png") as image:
        assert image.format == "PNG" and min(image.size) > 100


def test_the_picture_has_times_where_they_are_known(machine: Machine) -> None:
    pair = family(machine, "lumina2", [5, 5, 5, 8, 8])
    explanation = pair.handle.explain(time=True)
    timed, counted = plot.figure(explanation).axes
    assert timed.get_xlabel().startswith("ms") and counted.get_xlabel().startswith("operations")
    newest = variants_of(explanation)[0]
    assert [bar.get_width() for bar in timed.patches] == [step.ms for step in newest.steps]
    assert len(timed.get_yticks()) == len(counted.get_yticks()) == 1
