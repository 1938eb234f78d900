"""`enable` on pipelines and modules: slots, other libraries' hooks, warm-up, pictures."""

import copy
import inspect
import io
import logging
from typing import Any

import accelerate.hooks
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DiTPipeline,
    EulerDiscreteScheduler,
    FirstBlockCacheConfig,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    HeunDiscreteScheduler,
    StableDiffusionPipeline,
)
from diffusers.hooks import HookRegistry, ModelHook
from peft import LoraConfig

import dit_graph
from dit_graph.enable import Install
from tests.families import FAMILIES, seeded

OPTIONS = {"device": "recorder"}


def flux_pipeline(scheduler: Any = None) -> FluxPipeline:
    torch.manual_seed(0)
    vae = AutoencoderKL(block_out_channels=(4,), latent_channels=1, norm_num_groups=1)
    pipe = FluxPipeline(
        scheduler=scheduler or FlowMatchEulerDiscreteScheduler(),
        vae=vae.eval(),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=FAMILIES["flux"].build(),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(
    pipe: Any, seed: int = 0, steps: int = 4, size: tuple[int, int] = (16, 16), tokens: int = 6,
    **kw: Any,
) -> Any:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    embeds = torch.randn(1, tokens, 32, generator=generator).to(pipe.device)
    return pipe(
        prompt_embeds=embeds,
        pooled_prompt_embeds=embeds[:, 0],
        height=size[0],
        width=size[1],
        num_inference_steps=steps,
        generator=generator,
        output_type="latent",
        **kw,
    ).images


def test_a_pipeline_draws_the_same_pictures() -> None:
    pipe, eager = flux_pipeline(), flux_pipeline()
    handle = dit_graph.enable(pipe, **OPTIONS)
    for seed, size in enumerate([(16, 16), (16, 24), (24, 16), (16, 16)]):
        assert torch.equal(draw(pipe, seed, size=size), draw(eager, seed, size=size))
    stats = handle.stats()
    assert stats == {
        "calls": 16,
        "cold": 2,
        "captures": 2,
        "replays": 12,
        "dropped": 0,
        "eager": {},
    }


def test_sizes_of_equal_packed_shape_stay_apart() -> None:
    pipe, eager = flux_pipeline(), flux_pipeline()
    handle = dit_graph.enable(pipe, **OPTIONS)
    for seed, size in enumerate([(16, 32), (32, 16), (16, 32), (32, 16)]):
        assert torch.equal(draw(pipe, seed, size=size), draw(eager, seed, size=size))
    assert handle.stats()["replays"] == 14  # the positions are tensors, so one recording serves


def test_unets_and_heun_and_cfg() -> None:
    def build() -> Any:
        torch.manual_seed(0)
        pipe = StableDiffusionPipeline(
            vae=AutoencoderKL(block_out_channels=(4,), latent_channels=4, norm_num_groups=1),
            text_encoder=None, tokenizer=None, unet=FAMILIES["unet"].build(),
            scheduler=HeunDiscreteScheduler(), safety_checker=None, feature_extractor=None,
        )  # fmt: skip
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def picture(pipe: Any) -> Any:
        generator = torch.Generator().manual_seed(3)
        embeds = torch.randn(2, 5, 8, generator=generator)
        return pipe(
            prompt_embeds=embeds[:1],
            negative_prompt_embeds=embeds[1:],
            height=16,
            width=16,
            num_inference_steps=4,
            generator=generator,
            output_type="latent",
        ).images

    pipe, eager = build(), build()
    handle = dit_graph.enable(pipe, **OPTIONS)
    assert list(handle.installs) == ["unet"]
    for _ in range(2):
        assert torch.equal(picture(pipe), picture(eager))
    assert handle.stats()["replays"] == 12


def test_what_users_look_at_stays() -> None:
    pipe = flux_pipeline()
    module = pipe.transformer
    signature, config, dtype = inspect.signature(module.forward), module.config, module.dtype
    with dit_graph.enable(pipe, **OPTIONS) as handle:
        assert type(module).__name__ == "FluxTransformer2DModel"
        assert inspect.signature(module.forward) == signature
        by_class = list(inspect.signature(type(module).forward).parameters)[1:]
        assert list(inspect.signature(module.forward).parameters) == by_class
        assert module.config is config and module.dtype is dtype
        assert handle is dit_graph.enable(pipe, **OPTIONS)
        with module.cache_context("cond"):
            pass
        module.to(torch.float64).to(torch.float32)
    assert "forward" not in module.__dict__
    assert "set_timesteps" not in pipe.scheduler.__dict__


def test_save_copy_and_pickle_are_plain(tmp_path: Any) -> None:
    pipe = flux_pipeline()
    dit_graph.enable(pipe, **OPTIONS)
    draw(pipe)
    pipe.transformer.save_pretrained(tmp_path)
    loaded = type(pipe.transformer).from_pretrained(tmp_path)
    assert torch.equal(loaded.proj_out.weight, pipe.transformer.proj_out.weight)
    file = io.BytesIO()
    torch.save(pipe.transformer, file)
    file.seek(0)
    call = FAMILIES["flux"].inputs(0, 6)
    for twin in (copy.deepcopy(pipe.transformer), torch.load(file, weights_only=False)):
        before = pipe.transformer(**call)[0]
        twin.proj_out.weight.zero_()
        twin.proj_out.bias.fill_(2.0)
        assert torch.equal(twin(**call)[0], torch.full_like(before, 2.0))
        assert twin.forward.__self__ is twin
    scheduler = copy.deepcopy(pipe.scheduler)
    scheduler.set_timesteps(7, mu=1.0)
    assert len(scheduler.timesteps) == 7 and len(pipe.scheduler.timesteps) == 4


def test_another_config_raises() -> None:
    pipe = flux_pipeline()
    handle = dit_graph.enable(pipe, **OPTIONS)
    with pytest.raises(dit_graph.AlreadyEnabled, match=r"breakable.*disable it first"):
        dit_graph.enable(pipe, backend="full", **OPTIONS)
    assert dit_graph.enable(pipe, dit_graph.GraphConfig(device="recorder")) is handle


def test_pipelines_that_share_a_module_are_counted() -> None:
    pipe = flux_pipeline()
    other = FluxPipeline.from_pipe(pipe)
    first = dit_graph.enable(pipe, **OPTIONS)
    second = dit_graph.enable(other, **OPTIONS)
    assert first is not second
    draw(pipe)
    dit_graph.disable(pipe)
    before = second.stats()["replays"]
    draw(other)
    assert second.stats()["replays"] == before + 4
    dit_graph.disable(other)
    assert "forward" not in pipe.transformer.__dict__


def test_two_experts() -> None:
    experts = torch.nn.ModuleDict({n: FAMILIES["wan"].build() for n in ("a", "b")})
    from diffusers import WanPipeline

    pipe = WanPipeline(
        tokenizer=None, text_encoder=None, vae=None, scheduler=EulerDiscreteScheduler(),
        transformer=experts["a"], transformer_2=experts["b"], boundary_ratio=0.5,
    )  # fmt: skip
    handle = dit_graph.enable(pipe, **OPTIONS)
    assert sorted(handle.installs) == ["transformer", "transformer_2"]
    call = FAMILIES["wan"].inputs(0, 5)
    for _ in range(3):
        for expert in experts.values():
            expert(**call)
    assert handle.stats()["replays"] == 2


@pytest.mark.parametrize("target", [3, "pipe", object()])
def test_a_wrong_target(target: Any) -> None:
    with pytest.raises(dit_graph.ConfigError, match="takes a diffusers pipeline"):
        dit_graph.enable(target)


def test_without_a_gpu_it_runs_eagerly_and_says_so(caplog: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    pipe = flux_pipeline()
    with caplog.at_level(logging.WARNING):
        handle = dit_graph.enable(pipe)
    assert "runs eagerly" in caplog.text and 'device="recorder"' in caplog.text
    draw(pipe)
    assert handle.stats()["calls"] == 4 and sum(handle.stats()["eager"].values()) == 4
    assert "eager 4: the module is on cpu" in handle.report()


def test_cuda_asked_for_where_there_is_none() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    pipe = flux_pipeline()
    with pytest.raises(dit_graph.Unsupported, match="no CUDA device"):
        dit_graph.enable(pipe, device="cuda")
    assert "forward" not in pipe.transformer.__dict__
    assert "set_timesteps" not in pipe.scheduler.__dict__


def test_a_module_spread_over_devices_is_refused() -> None:
    module = FAMILIES["flux"].build()
    module.proj_out.to("meta")
    with pytest.raises(dit_graph.Unsupported, match=r"spread over cpu, meta"):
        dit_graph.enable(module, **OPTIONS)


# ---- other libraries' hooks


class Doubling(ModelHook):
    def post_forward(self, module: Any, output: Any) -> Any:
        return (output[0] * 2,) if isinstance(output, tuple) else output


class Tripling(accelerate.hooks.ModelHook):
    def post_forward(self, module: Any, output: Any) -> Any:
        return (output[0] * 3,) if isinstance(output, tuple) else output


def add(kind: str, module: Any) -> None:
    if kind == "diffusers":
        HookRegistry.check_if_exists_or_initialize(module).register_hook(Doubling(), "test")
    else:
        accelerate.hooks.add_hook_to_module(module, Tripling())


def remove(kind: str, module: Any) -> None:
    if kind == "diffusers":
        HookRegistry.check_if_exists_or_initialize(module).remove_hook("test")
    else:
        accelerate.hooks.remove_hook_from_module(module)


@pytest.mark.parametrize("kind", ["diffusers", "accelerate"])
@pytest.mark.parametrize("hook_first", [True, False])
def test_n3_hooks_in_both_orders(kind: str, hook_first: bool) -> None:
    pipe, eager = flux_pipeline(), flux_pipeline()
    if hook_first:
        add(kind, pipe.transformer)
    handle = dit_graph.enable(pipe, **OPTIONS)
    if not hook_first:
        add(kind, pipe.transformer)
    add(kind, eager.transformer)
    for seed in range(2):
        assert torch.equal(draw(pipe, seed), draw(eager, seed))
    if kind == "diffusers" or not hook_first:
        assert handle.stats()["replays"] == 6
    else:
        assert "in regions: an accelerate hook: Tripling" in handle.report()
    remove(kind, pipe.transformer)
    remove(kind, eager.transformer)
    before = handle.stats()["replays"]
    for seed in range(2):
        assert torch.equal(draw(pipe, seed), draw(eager, seed))
    assert handle.stats()["replays"] >= before + 4, handle.report()
    assert ("taken away by another hook" in handle.report()) == hook_first
    dit_graph.disable(pipe)
    assert torch.equal(draw(pipe, 5), draw(eager, 5))


def test_n3_is_wrong_without_its_rule(monkeypatch: Any) -> None:
    monkeypatch.setattr(Install, "check", lambda self: None)
    with pytest.raises(AssertionError):
        test_n3_hooks_in_both_orders("diffusers", True)


def test_n3_disable_restores_only_its_own() -> None:
    pipe, eager = flux_pipeline(), flux_pipeline()
    dit_graph.enable(pipe, **OPTIONS)
    add("accelerate", pipe.transformer)
    add("accelerate", eager.transformer)
    dit_graph.disable(pipe)
    assert torch.equal(draw(pipe, 1), draw(eager, 1)), "the hook stays"
    remove("accelerate", pipe.transformer)
    remove("accelerate", eager.transformer)
    assert torch.equal(draw(pipe, 1), draw(eager, 1)), "the left slot passes through"


def test_offload_hooks_are_eager_by_name() -> None:
    module, call = FAMILIES["flux"].build(), FAMILIES["flux"].inputs(0, 6)
    handle = dit_graph.enable(module, **OPTIONS)
    expected = [module(**call)[0] for _ in range(3)][-1]
    accelerate.cpu_offload(module, execution_device=torch.device("cpu"))
    assert torch.equal(module(**call)[0], expected)
    (reason,) = handle.stats()["eager"]
    assert reason.startswith("offload hooks present: AlignDevicesHook")


def test_a_step_cache_is_never_silent() -> None:
    pipe, eager = flux_pipeline(), flux_pipeline()
    handle = dit_graph.enable(pipe, **OPTIONS)
    for p in (pipe, eager):
        p.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.2))
    for seed in range(3):
        assert torch.equal(draw(pipe, seed, steps=8), draw(eager, seed, steps=8))
    stats = handle.stats()
    assert stats["replays"] > 0 or "Python state" in next(iter(stats["eager"]))


# ---- state between pictures


def test_adapters_are_seen_at_the_next_picture() -> None:
    pipe, eager = flux_pipeline(), flux_pipeline()
    handle = dit_graph.enable(pipe, **OPTIONS)
    config = LoraConfig(r=2, target_modules=["to_q", "to_k"], init_lora_weights=False)

    def both(change: Any) -> None:
        for p in (pipe, eager):
            torch.manual_seed(7)
            change(p.transformer)
        before = handle.stats()["replays"]
        for seed in range(2):
            assert torch.equal(draw(pipe, seed), draw(eager, seed))
        assert handle.stats()["replays"] >= before + 6, handle.report()

    both(lambda t: None)
    both(lambda t: t.add_adapter(config, "one"))
    both(lambda t: t.set_adapters("one", 0.5))
    both(lambda t: t.disable_adapters())
    both(lambda t: t.enable_adapters())
    both(lambda t: t.set_adapters("one", 2.0))
    both(lambda t: t.fuse_qkv_projections() if hasattr(t, "fuse_qkv_projections") else None)


def test_a_replaced_component_and_scheduler() -> None:
    pipe, eager = flux_pipeline(), flux_pipeline()
    handle = dit_graph.enable(pipe, **OPTIONS)
    for p in (pipe, eager):
        p.scheduler = FlowMatchEulerDiscreteScheduler(shift=2.0)
    assert torch.equal(draw(pipe), draw(eager))
    assert "set_timesteps" in pipe.scheduler.__dict__
    pipe.transformer = copy.deepcopy(pipe.transformer)
    assert torch.equal(draw(pipe), draw(eager))
    assert "not installed: transformer was replaced" in handle.report()


def test_new_picture_on_a_bare_module() -> None:
    module = FAMILIES["flux"].build()
    handle = dit_graph.enable(module, **OPTIONS)
    call = FAMILIES["flux"].inputs(0, 6)
    handle.new_picture()
    for _ in range(4):
        module(**call)
    module.proj_out.weight = torch.nn.Parameter(module.proj_out.weight * 2, False)
    handle.new_picture()
    expected = copy.deepcopy(module)(**call)[0]
    assert torch.equal(module(**call)[0], expected)


# ---- warm-up and new shapes


def test_warmup_leaves_everything_as_it_was(caplog: Any) -> None:
    pipe, eager = flux_pipeline(), flux_pipeline()
    handle = dit_graph.enable(pipe, **OPTIONS)
    scheduler = pipe.scheduler
    generator = torch.Generator().manual_seed(5)
    embeds = torch.randn(1, 6, 32)
    torch.manual_seed(11)
    state = generator.get_state()
    handle.warmup(
        sizes=[(16, 16), (24, 24), (16, 24)],
        prompt_embeds=embeds, pooled_prompt_embeds=embeds[:, 0], generator=generator,
    )  # fmt: skip
    assert torch.equal(generator.get_state(), state)
    assert torch.equal(torch.randn(3), torch.randn(3, generator=torch.Generator().manual_seed(11)))
    assert pipe.scheduler is scheduler and "set_timesteps" in scheduler.__dict__
    assert pipe._progress_bar_config == {"disable": True}
    assert handle.stats() == {
        "calls": 6,
        "cold": 3,
        "captures": 3,
        "replays": 0,
        "dropped": 0,
        "eager": {},
    }
    runner = handle.installs["transformer"].runner
    named = [dict(part.split() for part in e.label.split(", ")) for e in runner.entries.values()]
    assert [one["hidden_states"].split("x")[1] for one in named] == ["144", "96", "64"]
    assert torch.equal(draw(pipe, 0, size=(16, 24)), draw(eager, 0, size=(16, 24)))
    assert handle.stats()["replays"] == 4


@pytest.mark.parametrize("policy", ["eager", "error"])
def test_new_shapes_after_warmup(policy: str) -> None:
    pipe = flux_pipeline()
    handle = dit_graph.enable(pipe, on_new_shape=policy, **OPTIONS)
    embeds = torch.randn(1, 6, 32)
    handle.warmup(sizes=[(16, 16)], prompt_embeds=embeds, pooled_prompt_embeds=embeds[:, 0])
    draw(pipe)
    assert handle.stats()["replays"] == 4
    if policy == "error":
        with pytest.raises(dit_graph.NewShape, match="not warmed up"):
            draw(pipe, size=(24, 24))
    else:
        draw(pipe, size=(24, 24))
        assert next(iter(handle.stats()["eager"])).startswith("not warmed up")


def test_warmup_of_a_bare_module() -> None:
    module = FAMILIES["flux"].build()
    handle = dit_graph.enable(module, **OPTIONS)
    handle.warmup(inputs=[FAMILIES["flux"].inputs(0, 6), FAMILIES["flux"].inputs(0, 9)])
    module(**FAMILIES["flux"].inputs(1, 9))
    assert handle.stats()["replays"] == 1 and handle.stats()["captures"] == 2


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"sizes": [(8, 8)], "inputs": []}, {"inputs": []}, {"sizes": [(16, 16)], "height": 3}],
)
def test_wrong_warmups(kwargs: Any) -> None:
    pipe = flux_pipeline()
    handle = dit_graph.enable(pipe, **OPTIONS)
    with pytest.raises(dit_graph.ConfigError):
        handle.warmup(**kwargs)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"inputs": []},
        {"inputs": {"input": torch.ones(1, 4)}},
        {"inputs": torch.ones(2, 1, 4)},
        {"inputs": [torch.ones(1, 4)]},
        {"inputs": [(torch.ones(1, 4),)], "prompt": "a fox"},
    ],
)
def test_wrong_warmups_of_a_bare_module(kwargs: Any) -> None:
    handle = dit_graph.enable(torch.nn.Linear(4, 4), **OPTIONS)
    with pytest.raises(dit_graph.ConfigError, match=r"warmup .*inputs"):
        handle.warmup(**kwargs)
    assert handle.stats()["calls"] == 0


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: torch.jit.script(torch.nn.Linear(2, 2)), "a ScriptModule has no Python forward"),
        (lambda: torch.nn.ModuleList([torch.nn.Linear(2, 2)]), "ModuleList has no forward"),
        (torch.nn.Module, "Module has no forward"),
    ],
)
def test_modules_that_cannot_be_called(made: Any, says: str) -> None:
    with pytest.raises(dit_graph.ConfigError, match=says):
        dit_graph.enable(made(), **OPTIONS)


def test_warmup_of_a_pipeline_without_sizes() -> None:
    torch.manual_seed(0)
    vae = AutoencoderKL(block_out_channels=(4,), latent_channels=4, norm_num_groups=1)
    transformer = seeded(
        "DiTTransformer2DModel", num_attention_heads=2, attention_head_dim=8, in_channels=4,
        out_channels=8, num_layers=1, sample_size=8,
    )()  # fmt: skip
    pipe = DiTPipeline(transformer=transformer, vae=vae, scheduler=DDIMScheduler())
    handle = dit_graph.enable(pipe, **OPTIONS)
    with pytest.raises(dit_graph.ConfigError, match="takes no height and width"):
        handle.warmup(sizes=[(16, 16)])
    pipe.set_progress_bar_config(disable=True)
    pipe(class_labels=[1], num_inference_steps=4, output_type="pt")
    assert handle.stats()["replays"] == 2


def test_disable_and_the_handle_and_garbage() -> None:
    import gc
    import weakref

    pipe = flux_pipeline()
    dit_graph.enable(pipe, **OPTIONS)
    draw(pipe)
    module = weakref.ref(pipe.transformer)
    del pipe
    gc.collect()
    assert module() is None, "enable keeps no pipeline alive"
