"""`handle.explain`: the map is the tape's, and looking at it changes nothing."""

import gc
import json
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import dit_graph
from dit_graph import explain
from dit_graph.capture.frames import module_path
from dit_graph.explain import Explanation, Variant, plot
from tests.families import FAMILIES
from tests.pair import Machine, Pair
from tests.toys import Module, rows


def family(machine: Machine, name: str, captions: list[int], **options: Any) -> Pair:
    pair = machine.pair(FAMILIES[name].build(), **options)
    for i, caption in enumerate(captions):
        pair(**FAMILIES[name].inputs(10 * i, caption))
    return pair


def small(machine: Machine, body: Any, calls: int = 4, **options: Any) -> Pair:
    pair = machine.pair(Module(body), **options)
    for i in range(calls):
        pair(rows(i), seed=i)
    return pair


def variants_of(explanation: Explanation) -> tuple[Variant, ...]:
    (module,) = explanation.modules
    (signature,) = module.signatures
    return signature.variants


def only(pair: Pair, **options: Any) -> Variant:
    (variant,) = variants_of(pair.handle.explain(**options))
    return variant


def tapes(pair: Pair) -> list[Any]:
    (install,) = pair.handle.installs.values()
    assert install.runner is not None
    return [tape for entry in install.runner.entries.values() for tape in entry.tapes]


# ---- what the steps are


def test_steps_are_the_tapes(machine: Machine) -> None:
    pair = family(machine, "flux", [5] * 4, breaks=("*.attn",))
    (tape,) = tapes(pair)
    variant = only(pair)
    assert [s.kind for s in variant.steps] == ["segment", "break"] * 2 + ["segment"]
    assert [s.ops for s in variant.steps] == [getattr(s, "ops", None) for s in tape.steps]
    assert variant.ops == sum(s.ops for s in tape.steps[::2]) > 100
    marked = [s for s in variant.steps if s.kind == "break"]
    assert [s.module for s in marked] == [
        "transformer_blocks.0.attn",
        "single_transformer_blocks.0.attn",
    ]
    assert all(s.marked and s.hands == () for s in marked)
    assert all("transformer_flux.py:" in s.where and " in forward" in s.where for s in marked)


def test_a_function_called_with_the_module_belongs_to_it(machine: Machine) -> None:
    """The attention processor and the dispatcher are no modules; the attention around them is."""
    pattern = "scaled_dot_product_attention"
    variant = only(family(machine, "flux", [5] * 4, breaks=(pattern,)))
    found = [s.module for s in variant.steps if s.kind == "break"]
    assert found == ["transformer_blocks.0.attn", "single_transformer_blocks.0.attn"]


def test_a_found_break_has_its_source_line_and_values(machine: Machine) -> None:
    pair = family(machine, "lumina2", [5, 5, 5, 8, 8])
    newest, oldest = variants_of(pair.handle.explain())
    for variant, caption in [(newest, 8), (oldest, 5)]:
        (read,) = (s for s in variant.steps if s.kind == "break")
        assert read.reason == "Tensor.tolist is read by Python" and not read.marked
        assert read.module == "rope_embedder"
        assert read.where.startswith("transformers/transformer_lumina2.py:")
        assert [(h.value, h.guard) for h in read.hands] == [(caption, "exact"), (9, "exact")]
    assert newest.external_reads and "hands over 8, 9" in str(pair.handle.explain())


def test_what_is_handed_to_python(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        x = m.linear(x)
        if x.abs().mean().item() < 100.0:
            x = x + 1
        return x * x[x > -100].numel()

    pair = small(machine, body)
    mean, masked = (s for s in only(pair).steps if s.kind == "break")
    assert [h.guard for h in mean.hands] == ["< 100.0 is True"]
    assert 0 < mean.hands[0].value < 100
    assert [(h.value, h.guard) for h in masked.hands] == [([16], "shape")]
    assert mean.module == masked.module == "" and "in the module itself" in str(
        pair.handle.explain()
    )
    assert "toys.py" not in mean.where and "test_explain.py" in mean.where
    replays = pair.replays
    pair(rows(9))
    assert pair.replays == replays + 1, "looking at the number did not pin it"


def test_a_break_without_a_result_hands_nothing_over(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        dit_graph.eager_on_graph(pure=True)(lambda t: None)(m.linear(x))
        return m.linear(x)

    (step,) = (s for s in only(small(machine, body)).steps if s.kind == "break")
    assert step.marked and step.hands == ()


def test_guards_reads_and_writes(machine: Machine) -> None:
    scale, memo = torch.tensor(2.0), torch.ones(8)

    def body(m: Any, x: Any) -> Any:
        m.count.add_(1)
        x.mul_(scale)
        return x[: int(x.sum() > 1e9) + 1] + memo

    variant = only(small(machine, body))
    (guard,) = variant.guards
    assert guard.expected == 2.0 and "CPU scalar" in guard.what and "test_explain.py" in guard.what
    assert [(r.shape, r.dtype, r.bytes) for r in variant.external_reads if r.shape] == [
        ((8,), "float32", 32)
    ]
    assert variant.written_inputs == (0,) and variant.written_outside == 1
    assert variant.undo_bytes >= 4, "the counter is written before the last guard"


def test_a_written_constant_is_a_reset(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        return torch.tensor([1.0, 2.0]).add_(1).sum() + x

    kinds = [step.kind for step in only(small(machine, body)).steps]
    assert kinds[0] == "reset" and kinds[-1] == "segment"


def test_the_debug_backend_is_one_step(machine: Machine) -> None:
    variant = only(family(machine, "dit", [5] * 3, backend="debug"), time=True)
    assert [s.kind for s in variant.steps] == ["whole call"] and variant.ops == 0
    assert "Python code" in variant.not_timed and variant.ms is None


# ---- what is said of the whole


def test_counts_of_a_bucket(machine: Machine) -> None:
    pair = family(machine, "flux", [5] * 4)
    (module,) = pair.handle.explain().modules
    (signature,) = module.signatures
    assert (signature.cold, signature.captures, signature.replays, signature.eager) == (1, 1, 2, {})
    assert (
        signature.capture_seconds > 0
        and signature.input_bytes > 1000
        and signature.state == "captured"
    )
    assert (module.class_name, module.device, module.backend) == (
        "FluxTransformer2DModel",
        "cpu",
        "breakable",
    )
    assert module.graph_bytes == 64 << 20 and module.notes == () and signature.verdict == ""


def test_a_verdict_is_shown(machine: Machine) -> None:
    pair = family(machine, "dit", [5] * 3)
    (install,) = pair.handle.installs.values()
    assert install.runner is not None
    for entry in install.runner.entries.values():
        entry.proof.compared = 2
    assert pair.handle.explain().modules[0].signatures[0].verdict == "bit-equal when compared (2x)"
    assert "    bit-equal when compared (2x)\n" in str(pair.handle.explain())


def test_a_blocked_bucket_says_why(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        m.calls = getattr(m, "calls", 0) + 1
        return m.linear(x)

    explanation = small(machine, body).handle.explain()
    (signature,) = explanation.modules[0].signatures
    assert signature.variants == () and signature.state.startswith("eager: ")
    (reason,) = signature.eager
    assert reason == "the forward writes Python state: calls" and signature.eager[reason] >= 1
    assert f"eager {signature.eager[reason]}: {reason}" in str(explanation)
    with pytest.raises(dit_graph.ConfigError, match="nothing is recorded"):
        plot.figure(explanation)


def test_a_module_without_a_device_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with dit_graph.enable(nn.Linear(2, 2)) as handle:
        (module,) = handle.explain().modules
        assert module.device is None and module.signatures == ()
        assert str(handle.explain()).startswith("Linear (Linear) not recorded, breakable")


@pytest.mark.parametrize("time", [False, True])
def test_json_gives_it_back(machine: Machine, time: bool) -> None:
    pair = family(machine, "lumina2", [5, 5, 5, 8, 8], breaks=("*.attn",))
    facts = pair.handle.explain(time=time).to_dict()
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    steps = facts["modules"][0]["signatures"][0]["variants"][1]["steps"]
    assert len(steps) == len(tapes(pair)[1].steps)
    assert steps[1]["hands"][0] == {"value": 5, "guard": "exact"}


def test_a_value_that_is_no_number_survives_json(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        return x + len(str((x.sum() * float("nan")).item()))

    facts = small(machine, body).handle.explain().to_dict()
    assert '"value": "nan"' in json.dumps(facts, allow_nan=False)


def test_only_the_text_folds_equal_breaks(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        sizes = [x.gt(9e9).sum() for _ in range(3)]
        return x + sum(int(size.item()) for size in sizes)

    explanation = small(machine, body).handle.explain()
    (variant,) = variants_of(explanation)
    assert (
        variant.count("break") == 3 and len(explanation.to_dict()["modules"][0]["signatures"]) == 1
    )
    assert str(explanation).count("break x3  Tensor.item") == 1
    assert "breaks 3" in str(explanation)


def test_an_explanation_keeps_nothing_alive(machine: Machine) -> None:
    module = FAMILIES["dit"].build()
    handle = dit_graph.enable(module, device="recorder")
    for _ in range(3):
        module(**FAMILIES["dit"].inputs(0, 5))
    explanation = handle.explain(time=True)
    gone = weakref.ref(module)
    dit_graph.disable(module)
    del module, handle
    gc.collect()
    assert gone() is None and variants_of(explanation)


# ---- module paths


def test_paths_keep_no_activation_alive() -> None:
    """A forward that lets go of a tensor lets go of it, also where its frames were walked."""
    seen: list[Any] = []

    class Inner(nn.Module):
        def forward(self, x: Any) -> Any:
            held = x + 1
            seen.append(module_path(names))
            gone = weakref.ref(held)
            del held
            seen.append(gone() is None)
            return x

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(Inner())

        def forward(self, x: Any) -> Any:
            held = x + 1
            gone = weakref.ref(held)
            self.inner(x)
            del held
            seen.append(gone() is None)
            seen.append(module_path(names))
            return x

    module = Outer()
    names = {id(child): path for path, child in module.named_modules()}
    module(torch.zeros(1))
    assert seen == ["inner.0", True, True, ""]
    assert module_path(names) is None


def test_names_of_the_package_are_there() -> None:
    assert sorted(explain.__all__) == explain.__all__
    assert all(hasattr(explain, name) for name in explain.__all__)
