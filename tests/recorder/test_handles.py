"""Handles and slots: shared schedulers, repeated and crossed disabling, callbacks, compilation."""

import copy
import functools
import gc
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
from diffusers import (
    FirstBlockCacheConfig,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    UniPCMultistepScheduler,
    WanPipeline,
)
from peft import LoraConfig
from peft.tuners.lora import LoraLayer

import dit_graph
from dit_graph.handle import HANDLES
from dit_graph.slot import Slot
from tests.families import FAMILIES
from tests.recorder.test_denoise import OPTIONS, draw, flux_pipeline
from tests.toys import Module, rows


def plain(pipe: Any) -> bool:
    return "set_timesteps" not in vars(pipe.scheduler) and "forward" not in vars(pipe.transformer)


# ---- step callbacks


def with_adapter(pipe: Any) -> Any:
    torch.manual_seed(1)
    config = LoraConfig(r=2, target_modules=["to_q", "to_k"], init_lora_weights=False)
    pipe.transformer.add_adapter(config)
    return pipe


def disable_adapters(pipe: Any, step: int, _: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    if step == 2:
        pipe.transformer.disable_adapters()
    return kwargs


@pytest.mark.parametrize("who", ["enabled", "shares the scheduler"])
def test_a_step_callback_may_change_the_module(who: str) -> None:
    pipe, eager = with_adapter(flux_pipeline()), with_adapter(flux_pipeline())
    handle = dit_graph.enable(pipe, **OPTIONS)
    caller = pipe if who == "enabled" else FluxPipeline(**pipe.components)
    assert torch.equal(draw(caller), draw(eager))
    options = {"steps": 6, "callback_on_step_end": disable_adapters}
    assert torch.equal(draw(caller, **options), draw(eager, **options))
    assert torch.equal(draw(caller), draw(eager))
    stats = handle.stats()
    assert stats["replays"] >= 8 and stats["captures"] == 2 and stats["dropped"] == 1


def test_a_step_callback_of_a_scheduler_that_is_new() -> None:
    pipe, eager = with_adapter(flux_pipeline()), with_adapter(flux_pipeline())
    handle = dit_graph.enable(pipe, **OPTIONS)
    for _ in range(2):
        assert torch.equal(draw(pipe), draw(eager))
    for one in (pipe, eager):
        one.scheduler = type(one.scheduler).from_config(one.scheduler.config)
    options = {"steps": 6, "callback_on_step_end": disable_adapters}
    assert torch.equal(draw(pipe, **options), draw(eager, **options))
    assert torch.equal(draw(pipe), draw(eager))
    assert handle.stats()["captures"] == 2


def test_a_pipeline_with_a_scheduler_of_its_own_sees_a_change() -> None:
    pipe, eager = with_adapter(flux_pipeline()), with_adapter(flux_pipeline())
    handle = dit_graph.enable(pipe, **OPTIONS)
    others = []
    for one in (pipe, eager):
        others.append(other := FluxPipeline(**one.components))
        other.scheduler = type(one.scheduler).from_config(one.scheduler.config)
    for _ in range(3):
        assert torch.equal(draw(pipe), draw(eager))
    assert torch.equal(draw(others[0]), draw(others[1]))
    for one in (pipe, eager):
        one.set_adapters("default", 0.25)
    assert torch.equal(draw(others[0]), draw(others[1])), "no picture of a known pipeline began"
    assert torch.equal(draw(pipe), draw(eager))
    assert handle.stats()["captures"] == 2


def test_a_loop_of_the_users_own_may_change_the_module_in_mid_picture() -> None:
    pipe, eager = with_adapter(flux_pipeline()), with_adapter(flux_pipeline())
    handle, call = dit_graph.enable(pipe, **OPTIONS), FAMILIES["flux"].inputs(0, 6)
    pipe.scheduler.set_timesteps(4, mu=1.0)
    handle.new_picture()
    for scale in [*[1.0] * 20, 0.25, *[1.0] * 20, 0.25, 0.25]:
        for one in (pipe, eager):
            one.set_adapters("default", scale)
        assert torch.equal(pipe.transformer(**call)[0], eager.transformer(**call)[0]), scale
    stats = handle.stats()
    assert stats["captures"] == 2 and stats["dropped"] >= 1 and stats["eager"] == {}


def test_hooks_of_the_module_itself_may_act_in_every_step() -> None:
    pipe, eager = with_adapter(flux_pipeline()), with_adapter(flux_pipeline())
    handle = dit_graph.enable(pipe, **OPTIONS)

    def weigh(module: Any, args: Any, kwargs: Any) -> None:
        for layer in module.modules():
            if isinstance(layer, LoraLayer):
                layer.scaling["default"] = 1.0 if kwargs["timestep"].max() > 0.4 else 0.25

    for one in (pipe, eager):
        one.transformer.register_forward_pre_hook(weigh, with_kwargs=True)
    for _ in range(4):
        assert torch.equal(draw(pipe, steps=6), draw(eager, steps=6))
    assert handle.stats()["replays"] > 4


# ---- what says that a picture begins


@pytest.mark.parametrize("scheduler", [None, "later"])
def test_a_pipeline_without_a_scheduler_sees_a_change(scheduler: Any) -> None:
    pipe = WanPipeline(
        tokenizer=None, text_encoder=None, vae=None, transformer=FAMILIES["wan"].build(),
        scheduler=None if scheduler is None else FlowMatchEulerDiscreteScheduler(),
    )  # fmt: skip
    handle = dit_graph.enable(pipe, **OPTIONS)
    pipe.scheduler = None
    call = FAMILIES["wan"].inputs(0, 5)
    for _ in range(4):
        pipe.transformer(**call)
    weight = pipe.transformer.proj_out.weight
    weight.data = weight.data * 2
    expected = copy.deepcopy(pipe.transformer)(**call)[0]
    assert torch.equal(pipe.transformer(**call)[0], expected)
    assert handle.stats()["replays"] == 2


def test_a_modules_own_scheduler_is_its_own_affair() -> None:
    own = FlowMatchEulerDiscreteScheduler()
    for scheduler in (3, own):
        module = Module(lambda m, x: m.linear(x) * m.factor, scheduler=scheduler, factor=1.0)
        handle = dit_graph.enable(module, **OPTIONS)
        for factor in (1.0, 2.0):
            module.factor = factor
            for i in range(4):
                assert torch.equal(module(rows(i)), module.linear(rows(i)) * factor)
        assert handle.stats()["replays"] == 4
    assert "set_timesteps" not in vars(own)


def test_a_picture_of_one_pipeline_while_another_goes_away() -> None:
    pipe, eager = flux_pipeline(), flux_pipeline()
    other = FluxPipeline(**{**pipe.components, "scheduler": FlowMatchEulerDiscreteScheduler()})
    dit_graph.enable(pipe, **OPTIONS)
    dit_graph.enable(other, **OPTIONS)
    assert torch.equal(draw(pipe), draw(eager))
    for p in (pipe, eager):
        p.transformer.pos_embed.theta *= 2
    dit_graph.disable(other)
    assert torch.equal(draw(pipe), draw(eager))


# ---- shared schedulers


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_pipelines_that_share_a_scheduler_leave_nothing(order: tuple[int, ...]) -> None:
    pipe = flux_pipeline()
    pipes = [pipe, FluxPipeline.from_pipe(pipe), FluxPipeline(**pipe.components)]
    for p in pipes:
        p.set_progress_bar_config(disable=True)
    for _ in range(3):
        for p in pipes:
            dit_graph.enable(p, **OPTIONS)
        slot = vars(pipe.scheduler)["set_timesteps"]
        assert getattr(slot.original, "__func__", None) is type(pipe.scheduler).set_timesteps
        for i in order:
            draw(pipes[i])
            dit_graph.disable(pipes[i])
        assert plain(pipe)
    assert torch.equal(draw(pipe), draw(flux_pipeline()))


def test_every_pipeline_of_a_scheduler_hears_of_a_picture() -> None:
    pipe = flux_pipeline()
    other = FluxPipeline.from_pipe(pipe)
    handles = [dit_graph.enable(p, **OPTIONS) for p in (pipe, other)]
    heard: list[int] = []
    for i, handle in enumerate(handles):
        handle.pictures._begun = functools.partial(heard.append, i)
    pipe.scheduler.set_timesteps(2, mu=1.0)
    assert sorted(heard) == [0, 1]


def test_a_pipeline_that_is_gone_keeps_nothing_enabled() -> None:
    pipe = flux_pipeline()
    first = dit_graph.enable(pipe, **OPTIONS)
    for _ in range(5):
        dit_graph.enable(FluxPipeline(**pipe.components), **OPTIONS)
    gc.collect()
    assert len(first.installs["transformer"].handles) <= 2
    dit_graph.disable(pipe)
    assert plain(pipe)
    dit_graph.enable(FluxPipeline(**pipe.components), **OPTIONS)
    gc.collect()
    handle = dit_graph.enable(pipe, **OPTIONS | {"backend": "full"})  # nobody has another config
    handle.disable()
    assert plain(pipe)


def test_a_handle_that_nobody_keeps(caplog: Any) -> None:
    pipe, eager = flux_pipeline(), flux_pipeline()
    dit_graph.enable(pipe, **OPTIONS)
    assert torch.equal(draw(pipe), draw(eager))
    del pipe.transformer.forward  # as another library's hook may
    gc.collect()
    for _ in range(2):
        assert torch.equal(draw(pipe), draw(eager))
    assert "the slot of transformer was taken away" in caplog.text
    assert dit_graph.enable(pipe, **OPTIONS).stats()["replays"] > 0


@pytest.mark.parametrize("target", ["pipeline", "module"])
def test_a_kept_handle_keeps_nothing_else(target: str) -> None:
    pipe = flux_pipeline()
    handle = dit_graph.enable(pipe if target == "pipeline" else pipe.transformer, **OPTIONS)
    draw(pipe)
    counts, pool = handle.stats(), weakref.ref(handle.pool_on(torch.device("cpu")))
    left = weakref.ref(pipe), weakref.ref(pipe.transformer), pool
    del pipe
    gc.collect()
    assert [one() for one in left] == [None] * 3
    assert "is gone, and its recordings with it" in handle.report()
    if target == "pipeline":
        assert "transformer is gone: calls 4, cold 1, captures 1, replays 2" in handle.report()
    assert handle.stats() == counts
    for act in (handle.new_picture, handle.warmup):
        with pytest.raises(dit_graph.NotEnabled, match="is gone"):
            act()
    handle.disable()


def test_a_pipeline_that_goes_on_a_thread_that_a_recording_waits_for() -> None:
    """Which holds the lock."""
    pipe = flux_pipeline()
    handle = dit_graph.enable(pipe, **OPTIONS)
    draw(pipe)
    kept, pools = [pipe], [handle.pool_on(torch.device("cpu"))]
    del pipe
    with pools[0].lock:
        other = threading.Thread(target=kept.clear)
        other.start()
        other.join(timeout=60)
        assert not other.is_alive() and not kept
    assert "is gone" in handle.report()


@pytest.mark.parametrize("strict", [False, True])
def test_a_transformer_that_is_replaced_and_gone(strict: bool, caplog: Any) -> None:
    pipe = flux_pipeline()
    dit_graph.enable(pipe, **OPTIONS, strict=strict)  # by nobody kept
    draw(pipe)
    pipe.transformer = FAMILIES["flux"].build()
    gc.collect()
    said = "transformer was replaced by FluxTransformer2DModel after enable; enable again"
    if strict:
        with pytest.raises(dit_graph.NotReplayed, match=said):
            draw(pipe)
        return
    draw(pipe)
    assert said in caplog.text
    dit_graph.disable(pipe)
    assert plain(pipe)


def test_a_loop_keeps_no_predictions_alive() -> None:
    """What we look up in a pipeline's frame does not stay there, up to Python 3.12."""

    def alive(pipe: Any) -> list[int]:
        made: list[Any] = []
        found: list[int] = []
        own = pipe.scheduler.step

        def step(prediction: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            found.append(sum(one() is not None for one in made))
            made.append(weakref.ref(prediction))
            return own(prediction, *args, **kwargs)

        pipe.scheduler.step = step
        draw(pipe, steps=6)
        return found

    pipe, eager = flux_pipeline(), flux_pipeline()
    dit_graph.enable(pipe, **OPTIONS)
    gc.disable()
    try:
        assert alive(pipe) == alive(eager)
    finally:
        gc.enable()


def test_what_a_frame_shows_to_others_stays() -> None:
    """A loop of one's own that keeps its `locals()`: up to Python 3.12 we look at the same dict."""
    module = FAMILIES["flux"].build()
    dit_graph.enable(module, **OPTIONS)

    class Loop:
        def __call__(self, steps: int) -> dict[str, Any]:
            given = locals()
            for seed in range(steps):
                module(**FAMILIES["flux"].inputs(seed, 6))
            return given

    loop = Loop()
    assert loop(4)["self"] is loop and loop(4)["steps"] == 4


def test_saving_a_model_changes_nothing_that_it_was_recorded_with(tmp_path: Any) -> None:
    pipe, eager = flux_pipeline(), flux_pipeline()
    handle = dit_graph.enable(pipe, **OPTIONS)
    draw(pipe)
    for save in (
        pipe.save_pretrained,
        pipe.transformer.save_pretrained,
        pipe.transformer.save_config,
    ):
        save(tmp_path)
        copy.copy(pipe.transformer), copy.deepcopy(pipe.transformer)
        assert torch.equal(draw(pipe), draw(eager))
    stats = handle.stats()
    assert stats["captures"] == 1 and stats["cold"] == 1 and not stats["eager"]
    assert not handle.installs["transformer"].runner.target.state.moved()


def test_after_a_cache_is_disabled_nothing_is_eager(caplog: Any) -> None:
    pipe, eager = flux_pipeline(), flux_pipeline()
    handle = dit_graph.enable(pipe, **OPTIONS)
    for one in (pipe, eager):
        one.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.1))
        for _ in range(2):
            draw(one, steps=6)
        one.transformer.disable_cache()
    before, warned = handle.stats(), len(caplog.records)
    assert before["regions"]["replays"]
    for _ in range(2):
        assert torch.equal(draw(pipe), draw(eager))
    after = handle.stats()
    assert after["eager"] == before["eager"] and len(caplog.records) == warned
    assert after["regions"] == before["regions"]
    assert after["captures"] == before["captures"] + 1


def drawn_and_dropped(by: str) -> tuple[Any, Any]:
    """What is left of a pipeline, and of its transformer, that `by` refers to and nobody keeps."""
    pipe = flux_pipeline()
    pipe.style = "plain"
    options = {"extra_key": lambda module, arguments: pipe.style} if by == "extra_key" else {}
    dit_graph.enable(pipe, **OPTIONS, **options)
    if by == "the transformer":
        pipe.transformer.owner = pipe
    if by == "the scheduler":
        pipe.scheduler.owner = pipe
    if by == "a hook":
        pipe.transformer.register_forward_pre_hook(lambda module, args: vars(pipe) and None)
    draw(pipe)
    return weakref.ref(pipe), weakref.ref(pipe.transformer)


@pytest.mark.parametrize(
    "by", ["nothing", "extra_key", "the transformer", "the scheduler", "a hook"]
)
def test_a_pipeline_goes_with_all_that_is_its_own(by: str) -> None:
    gone = drawn_and_dropped(by)
    gc.collect()
    assert [one() for one in gone] == [None, None]


def test_a_copy_of_an_enabled_pipeline_has_no_handle() -> None:
    pipe = flux_pipeline()
    handle = dit_graph.enable(pipe, **OPTIONS)
    expected = draw(pipe)
    for twin in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        calls = handle.stats()["calls"]
        assert torch.equal(draw(twin), expected) and handle.stats()["calls"] == calls
        with pytest.raises(dit_graph.NotEnabled):
            dit_graph.disable(twin)
    handle.disable()
    assert plain(pipe) and not [name for name in vars(pipe) if "dit_graph" in name]


def test_a_pipeline_for_every_request_shares_the_recordings() -> None:
    components = flux_pipeline().components
    replays = []
    for _ in range(3):
        pipe = FluxPipeline(**components)
        handle = dit_graph.enable(pipe, **OPTIONS)
        before = handle.stats()["replays"]
        draw(pipe)
        replays.append(handle.stats()["replays"] - before)
        del pipe, handle
        gc.collect()
    assert replays[1] == replays[2] > replays[0]


def test_all_denoisers_of_a_pipeline_for_every_request_share_theirs() -> None:
    scheduler = UniPCMultistepScheduler(
        flow_shift=1.0, prediction_type="flow_prediction", use_flow_sigmas=True
    )
    parts = {name: FAMILIES["wan"].build() for name in ("transformer", "transformer_2")}
    embeds, captures = torch.randn(1, 5, 16), []
    for _ in range(3):
        pipe = WanPipeline(
            tokenizer=None, text_encoder=None, vae=None, scheduler=scheduler, boundary_ratio=0.5,
            **parts,
        )  # fmt: skip
        pipe.set_progress_bar_config(disable=True)
        handle = dit_graph.enable(pipe, **OPTIONS)
        pipe(
            prompt_embeds=embeds, negative_prompt_embeds=embeds, height=16, width=16, num_frames=1,
            num_inference_steps=8, output_type="latent", guidance_scale=1.0,
        )  # fmt: skip
        captures.append(handle.stats()["captures"])
        del pipe, handle
        gc.collect()
    assert captures == [2, 2, 2]


def test_set_timesteps_that_another_library_replaces() -> None:
    pipe, eager = with_adapter(flux_pipeline()), with_adapter(flux_pipeline())
    dit_graph.enable(pipe, **OPTIONS)
    for _ in range(2):
        assert torch.equal(draw(pipe), draw(eager))
    for one in (pipe, eager):
        own = type(one.scheduler).set_timesteps
        one.scheduler.set_timesteps = functools.partial(own, one.scheduler)
        one.set_adapters("default", 0.25)
    assert torch.equal(draw(pipe), draw(eager))
    for one in (pipe, eager):
        for layer in one.transformer.modules():
            if isinstance(layer, LoraLayer):
                layer.scaling["default"] = 0.5
    assert torch.equal(draw(pipe), draw(eager)), "nobody says when a picture begins"


def test_a_patch_that_comes_and_goes_with_every_picture() -> None:
    pipe, eager = flux_pipeline(), flux_pipeline()
    handle = dit_graph.enable(pipe, **OPTIONS)

    def depth() -> int:
        slot, found = pipe.transformer.__dict__.get("forward"), 0
        while isinstance(slot, Slot):
            slot, found = slot._before, found + 1
        return found

    for _ in range(6):
        inside = pipe.transformer.forward
        pipe.transformer.forward = lambda *args, inside=inside, **kwargs: inside(*args, **kwargs)
        assert torch.equal(draw(pipe), draw(eager))
        pipe.transformer.forward = inside
        assert torch.equal(draw(pipe), draw(eager))
    assert depth() == 1
    assert handle.report().count("was taken away") == 1
    handle.disable()
    assert plain(pipe)


def test_a_scheduler_that_outlives_its_pipeline() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler()
    dit_graph.enable(flux_pipeline(scheduler), **OPTIONS)
    gc.collect()
    pipe = flux_pipeline(scheduler)
    dit_graph.enable(pipe, **OPTIONS)
    draw(pipe)
    dit_graph.disable(pipe)
    assert plain(pipe)


# ---- handles


def test_disabling_twice_leaves_a_newer_handle_alone() -> None:
    pipe = flux_pipeline()
    first = dit_graph.enable(pipe, **OPTIONS)
    first.disable()
    second = dit_graph.enable(pipe, **OPTIONS)
    first.disable()
    assert dit_graph.enable(pipe, **OPTIONS) is second
    for _ in range(2):
        draw(pipe)
    assert second.stats()["replays"] == 6
    dit_graph.disable(pipe)
    assert plain(pipe)
    with pytest.raises(dit_graph.NotEnabled):
        dit_graph.disable(pipe)


def test_an_id_that_comes_again_finds_no_handle() -> None:
    pipe = flux_pipeline()
    first, other = dit_graph.enable(pipe, **OPTIONS), FluxPipeline.from_pipe(pipe)
    HANDLES[id(other)] = first
    with pytest.raises(dit_graph.NotEnabled):
        dit_graph.disable(other)
    assert dit_graph.enable(other, **OPTIONS) is not first


def test_a_module_outlives_the_pipeline_that_it_was_enabled_in() -> None:
    pipe, eager = flux_pipeline(), flux_pipeline()
    other = FluxPipeline.from_pipe(pipe)
    handle = dit_graph.enable(other, **OPTIONS)
    dit_graph.enable(pipe, **OPTIONS)
    del other
    gc.collect()
    assert torch.equal(draw(pipe), draw(eager))
    assert handle.stats()["replays"] == 2


# ---- compiled as a whole


@pytest.mark.parametrize("first", ["enable", "compile"])
def test_a_module_that_is_compiled_as_a_whole(first: str) -> None:
    torch.compiler.reset()
    module = Module(lambda m, x: m.linear(x) * 2)
    expected = copy.deepcopy(module)
    if first == "compile":
        module.compile(backend="eager", fullgraph=True)
    handle = dit_graph.enable(module, **OPTIONS)
    if first == "enable":
        assert "compiled as a whole" not in handle.report()
        module.compile(backend="eager", fullgraph=True)
    for i in range(4):
        assert torch.equal(module(rows(i)), expected(rows(i)))
    assert "  ! compiled as a whole: its compiled code runs, not the recordings" in handle.report()
    dit_graph.disable(module)
    assert torch.equal(module(rows(5)), expected(rows(5)))


def test_a_disabled_handle_keeps_its_report_and_no_weights() -> None:
    pipe = flux_pipeline()
    with dit_graph.enable(pipe, **OPTIONS) as handle:
        draw(pipe)
    stats, report, gone = handle.stats(), handle.report(), weakref.ref(pipe.transformer)
    del pipe
    gc.collect()
    assert gone() is None
    assert stats["replays"] and "! disabled" in report and "cold 1" in report
    assert (handle.stats(), handle.report()) == (stats, report)
    assert "\ntransformer (FluxTransformer2DModel) on cpu" in str(handle.explain())


def test_a_disabled_handle_says_so() -> None:
    """And puts nothing back in."""
    pipe = flux_pipeline()
    handle = dit_graph.enable(pipe, **OPTIONS)
    draw(pipe)
    handle.disable()
    for again in (handle.new_picture, lambda: handle.warmup(sizes=[(16, 16)])):
        with pytest.raises(dit_graph.NotEnabled, match="was disabled; call enable again"):
            again()
    assert plain(pipe)
