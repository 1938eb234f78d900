"""`handle.explain`: the map is the tape's, and looking at it changes nothing."""

import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image
from torch import nn

import dit_graph
from dit_graph import embedded, explain
from dit_graph.capture.frames import module_path
from dit_graph.cli.explain import main
from dit_graph.explain import Explanation, HostSync, Variant, host_syncs, plot
from tests.families import FAMILIES
from tests.pair import PLAIN, Machine, Pair
from tests.recorder.test_generate import tiny_sd3
from tests.toys import Module, rows
from tests.unit.test_embedded import tiny_pipeline


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


# ---- times


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


def test_names_of_the_package_are_there() -> None:
    assert sorted(explain.__all__) == explain.__all__
    assert all(hasattr(explain, name) for name in explain.__all__)


# ---- the command line


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory, where a tiny model is the embedded one."""
    tiny_pipeline().save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(embedded, "WEIGHTS", tmp_path / "model")


@pytest.mark.usefixtures("folder")
def test_the_command_tells_it_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["embedded", "--device", "recorder", "--breaks", "*.attn"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("transformer (FluxTransformer2DModel) on cpu, breakable, graph")
    assert lines[2].startswith("    cold 1, captures 1 in ") and "replays 2," in lines[2]
    assert "segments 3," in lines[4] and "breaks 2," in lines[4]
    assert sum("single_transformer_blocks.1.attn ('*.attn') at" in line for line in lines) == 1


@pytest.mark.usefixtures("folder")
def test_the_command_tells_it_as_json_and_as_a_picture(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["model", "--device", "recorder", "--report", "json", "--time", "--plot", "tape.png"]
    argv += ["--size", "64x64", "--size", "96x64", "--steps", "3", "--prompt", "wolf"]
    argv += ["--breaks", "scaled_dot_product_attention", "--pipeline-kwargs", '{"style": "flat"}']
    assert main(argv) == 0
    out, err = capsys.readouterr()
    (module,) = json.loads(out.splitlines()[-1])["modules"]
    assert [signature["replays"] for signature in module["signatures"]] == [1, 1]
    for signature in module["signatures"]:
        (variant,) = signature["variants"]
        assert all(step["ms"] > 0 for step in variant["steps"]) and len(variant["steps"]) == 5
    assert "tape.png" in err and "tape.png" not in out
    with Image.open("tape.png") as image:
        assert image.format == "PNG"


@pytest.mark.usefixtures("folder")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to record on")
def test_the_command_says_where_it_records(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["embedded"]) == 0
    out, err = capsys.readouterr()
    assert "so --device recorder" in err and "replays 2" in out


@pytest.mark.usefixtures("folder")
def test_what_goes_wrong_after_loading_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed = ["embedded", "--device", "recorder"]
    assert main([*fixed, "--pipeline-kwargs", '{"style": "oil"}']) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("explain: error: running the pipeline: ValueError: style 'oil' has no")

    def full(self: Explanation, path: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Explanation, "plot", full)
    assert main([*fixed, "--plot", "tape.png"]) == 2
    out, err = capsys.readouterr()
    assert "segment" in out, "the text is there all the same"
    assert err.splitlines()[-1] == "explain: error: cannot write tape.png: No space left on device"


@pytest.mark.usefixtures("folder")
def test_on_the_cpu_the_reason_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["embedded", "--device", "cpu"]) == 0
    assert "eager 4: the module is on cpu" in capsys.readouterr().out


@pytest.mark.usefixtures("folder")
def test_any_diffusers_pipeline_is_explained(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_sd3().save_pretrained("sd3")
    monkeypatch.delattr(AutoencoderKL, "decode")  # nothing is drawn
    argv = ["sd3", "--device", "recorder", "--size", "16x16", "--report", "json"]
    assert main([*argv, "--pipeline-kwargs", '{"guidance_scale": 1.0}']) == 0
    alone = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert main(argv) == 0
    guided = json.loads(capsys.readouterr().out.splitlines()[-1])
    labels = [facts["modules"][0]["signatures"][0]["label"] for facts in (alone, guided)]
    assert labels[0] != labels[1], "an argument that has an option in generate is free here"
    assert all("2x" not in label for label in labels[:1]) and "2x" in labels[1]


def test_it_runs_as_a_module(tmp_path: Path) -> None:
    root = Path(dit_graph.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-m", "dit_graph.explain", "./none"],
        capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(root)},
    )  # fmt: skip
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("explain: error: MODEL ./none: no such folder")


def test_syncs_need_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("torch sees a CUDA device")
    assert main(["embedded", "--syncs", "--device", "recorder"]) == 2
    assert "--syncs needs a CUDA device" in capsys.readouterr().err
    with pytest.raises(dit_graph.ConfigError, match="on a CUDA device"), host_syncs():
        pass


def test_syncs_that_were_found_are_in_text_and_dict() -> None:
    found = Explanation((), syncs=(HostSync("a.py:3 in f", 6),), syncs_removed={"x": 2})
    assert str(found).splitlines() == [
        "remove_syncs: x (2x)", "host syncs of a picture: 6", "  6x at a.py:3 in f",
    ]  # fmt: skip
    assert found.to_dict()["syncs"] == [{"where": "a.py:3 in f", "count": 6}]
    assert "host syncs of a picture: none" in str(Explanation((), syncs=()))
