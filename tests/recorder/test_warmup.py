"""`handle.warmup`: it records each signature that comes, and names what it does not record."""

import itertools
import logging
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    WanPipeline,
)

import dit_graph
from dit_graph.modes.warm_calls import unchanged
from dit_graph.warmup import MOST, record_all
from tests.families import FAMILIES
from tests.pair import Machine
from tests.recorder.test_denoise import OPTIONS, flux_pipeline
from tests.shared.prefill.models import two
from tests.toys import Unseen

UNSAID = "not recorded by warmup"


def quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def wan_pipeline(boundary: float = 0.875) -> WanPipeline:
    """Two experts; without guidance each is called once in two steps."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    return quiet(
        WanPipeline(
            tokenizer=None, text_encoder=None, vae=None, scheduler=scheduler,
            transformer=FAMILIES["wan"].build(), transformer_2=FAMILIES["wan"].build(),
            boundary_ratio=boundary,
        )
    )  # fmt: skip


def wan_arguments(**more: Any) -> dict[str, Any]:
    embeds = torch.randn(1, 6, 16, generator=torch.Generator().manual_seed(0))
    return {"prompt_embeds": embeds, "guidance_scale": 1.0, "num_frames": 5, **more}


def img2img_pipeline() -> FluxImg2ImgPipeline:
    parts = flux_pipeline().components
    parts["vae"].register_to_config(shift_factor=0.1)
    return quiet(FluxImg2ImgPipeline(**parts))


def img2img_arguments(strength: float) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    embeds = torch.randn(1, 6, 32, generator=generator)
    image = torch.rand(1, 3, 16, 16, generator=generator)
    pooled = {"pooled_prompt_embeds": embeds[:, 0]}
    return {"prompt_embeds": embeds, **pooled, "image": image, "strength": strength}


def warnings(caplog: Any) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def drawn(pipe: Any, size: tuple[int, int], steps: int, **arguments: Any) -> torch.Tensor:
    out = pipe(
        height=size[0], width=size[1], num_inference_steps=steps, output_type="latent",
        generator=torch.Generator().manual_seed(1), return_dict=False, **arguments,
    )  # fmt: skip
    return out[0]


def replayed_wholly(handle: Any, before: dict[str, Any]) -> bool:
    now = handle.stats()
    counted = ("cold", "captures", "eager")
    return now["replays"] > 0 and all(now[name] == before[name] for name in counted)


@pytest.mark.parametrize("sizes", [[(64, 64)], [(64, 32), (64, 64)]])
def test_an_expert_that_is_called_once_in_two_steps(sizes: Any, caplog: Any) -> None:
    pipe, eager = wan_pipeline(), wan_pipeline()
    handle = dit_graph.enable(pipe, **OPTIONS)
    generator, scheduler = torch.Generator().manual_seed(5), pipe.scheduler
    state, ours = generator.get_state(), torch.random.get_rng_state()
    with caplog.at_level(logging.WARNING):
        handle.warmup(sizes=sizes, generator=generator, **wan_arguments())
    assert not warnings(caplog)
    assert torch.equal(generator.get_state(), state)
    assert torch.equal(torch.random.get_rng_state(), ours)
    assert pipe.scheduler is scheduler and pipe._progress_bar_config == {"disable": True}
    stats = handle.stats()
    each = 2 * len(sizes)  # of two experts
    assert stats == {
        "calls": 2 * each,
        "cold": each,
        "captures": each,
        "replays": 0,
        "dropped": 0,
        "eager": {},
    }
    for size in sizes:
        picture = drawn(pipe, size, 5, **wan_arguments())
        assert torch.equal(picture, drawn(eager, size, 5, **wan_arguments()))
        assert replayed_wholly(handle, stats), handle.report()
    for install in handle.installs.values():
        assert all(entry.counts.replays for entry in install.runner.entries.values()), (
            "both were used"
        )


@pytest.mark.parametrize("strength", [0.5, 0.3, 0.05])
def test_image_to_image_at_a_low_strength(strength: float, caplog: Any) -> None:
    pipe, eager = img2img_pipeline(), img2img_pipeline()
    handle = dit_graph.enable(pipe, **OPTIONS)
    with caplog.at_level(logging.WARNING):
        handle.warmup(sizes=[(16, 16)], **img2img_arguments(strength))
    assert not warnings(caplog)
    stats = handle.stats()
    assert stats == {"calls": 2, "cold": 1, "captures": 1, "replays": 0, "dropped": 0, "eager": {}}
    picture = drawn(pipe, (16, 16), 20, **img2img_arguments(strength))
    assert torch.equal(picture, drawn(eager, (16, 16), 20, **img2img_arguments(strength)))
    assert replayed_wholly(handle, stats), handle.report()


def test_a_strength_at_which_two_steps_are_none() -> None:
    vae = AutoencoderKL(block_out_channels=(4,), latent_channels=4, norm_num_groups=1).eval()
    pipe = quiet(
        StableDiffusionInpaintPipeline(
            vae=vae, text_encoder=None, tokenizer=None, unet=FAMILIES["unet"].build(),
            scheduler=DDIMScheduler(), safety_checker=None, feature_extractor=None,
        )
    )  # fmt: skip
    handle = dit_graph.enable(pipe, **OPTIONS)
    image, embeds = torch.rand(1, 3, 16, 16), torch.randn(2, 5, 8)
    arguments = {
        "prompt_embeds": embeds[:1], "negative_prompt_embeds": embeds[1:], "image": image,
        "mask_image": image[:, :1].round(), "strength": 0.3,
    }  # fmt: skip
    handle.warmup(sizes=[(16, 16)], **arguments)
    stats = handle.stats()
    assert stats["captures"] == 1
    drawn(pipe, (16, 16), 10, **arguments)
    assert replayed_wholly(handle, stats), handle.report()


def test_what_is_recorded_costs_no_more_than_two_steps() -> None:
    pipe = wan_pipeline()
    handle = dit_graph.enable(pipe, **OPTIONS)
    for calls, replays in ((4, 0), (6, 2)):
        handle.warmup(sizes=[(64, 64)], **wan_arguments())
        assert (handle.stats()["calls"], handle.stats()["replays"]) == (calls, replays)


def test_a_component_that_no_call_reaches_is_named(caplog: Any) -> None:
    pipe = wan_pipeline(boundary=0.0001)  # every step is above it
    handle = dit_graph.enable(pipe, **OPTIONS)
    with caplog.at_level(logging.WARNING):
        handle.warmup(sizes=[(64, 64)], **wan_arguments())
    (said,) = warnings(caplog)
    assert said.endswith(f"{UNSAID}: transformer_2: the calls that were made did not reach it")
    assert handle.stats()["captures"] == 1


def test_one_signature_of_a_pipeline_that_cannot_be_recorded(caplog: Any) -> None:
    """By what it reads on the host, under a backend that takes no breaks; the other size can."""
    pipe = wan_pipeline()
    reading = pipe.transformer.forward

    def forward(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        if hidden_states.shape[-1] == 4:
            hidden_states.sum().item()
        return reading(hidden_states, *args, **kwargs)

    pipe.transformer.forward = forward
    handle = dit_graph.enable(pipe, backend="full", **OPTIONS)
    with caplog.at_level(logging.WARNING):
        handle.warmup(sizes=[(64, 64), (64, 32)], **wan_arguments())
    said = [line for line in warnings(caplog) if UNSAID in line]
    assert len(said) == 1 and f"{UNSAID}: transformer: " in said[0]
    assert "hidden_states 1x4x2x8x4" in said[0] and "1x4x2x8x8" not in said[0]
    entries = handle.installs["transformer"].runner.entries.values()
    (blocked,) = {entry.blocked for entry in entries if not entry.tapes}
    assert blocked and blocked in said[0]
    assert handle.stats()["captures"] == 3


class Keeps(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.sum()
        return x * 2


def test_a_bare_module_that_cannot_be_recorded_is_named(caplog: Any) -> None:
    handle = dit_graph.enable(Keeps(), **OPTIONS)
    with caplog.at_level(logging.WARNING):
        handle.warmup(inputs=[(torch.ones(3),), (torch.ones(4),)])
    (said,) = (line for line in warnings(caplog) if UNSAID in line)
    assert said.endswith(
        "Keeps: the forward writes Python state: seen (signature x 4; signature x 3)"
    )


def test_a_bare_module_that_settles_late_is_recorded(caplog: Any) -> None:
    class Late(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(made.list) < 3:  # a cache of its own, outside of the module
                made.list.append(x * 2)
            return x * 2

    made = Unseen()
    module = Late()
    handle = dit_graph.enable(module, **OPTIONS)
    with caplog.at_level(logging.WARNING):
        handle.warmup(inputs=[(torch.ones(3),)])
    stats = handle.stats()
    assert handle.installs["Late"].runner.entries and UNSAID not in caplog.text
    module(torch.ones(3))
    assert replayed_wholly(handle, stats), handle.report()


def test_a_call_that_stays_eager_is_named(caplog: Any) -> None:
    module = torch.nn.Linear(4, 4)
    handle = dit_graph.enable(module, extra_key=lambda module, arguments: torch.ones(1), **OPTIONS)
    with caplog.at_level(logging.WARNING):
        handle.warmup(inputs=[(torch.ones(1, 4),)])
    said = [line for line in warnings(caplog) if UNSAID in line]
    reason = "extra_key returned a tensor; return a plain value"
    assert said == [f"dit_graph: {UNSAID}: Linear: {reason} (2x)"]


def test_signatures_that_never_come_again_are_named_and_bounded(caplog: Any) -> None:
    module, rows = torch.nn.Linear(4, 4), itertools.count(1)
    handle = dit_graph.enable(module, **OPTIONS)
    with caplog.at_level(logging.WARNING):
        record_all(handle.installs.values(), [lambda: module(torch.ones(next(rows), 4))])
    assert handle.stats()["calls"] == MOST
    (said,) = (line for line in warnings(caplog) if UNSAID in line)
    assert "Linear: it came once" in said and "signature input 1x4; signature input 2x4; " in said


def test_a_value_that_is_another_at_every_call_is_named(caplog: Any) -> None:
    numbers = itertools.count()
    key = lambda module, arguments: (next(numbers),)
    handle = dit_graph.enable(torch.nn.Linear(4, 4), extra_key=key, **OPTIONS)
    with caplog.at_level(logging.WARNING):
        handle.warmup(inputs=[(torch.ones(1, 4),)])
    said = [line for line in warnings(caplog) if UNSAID in line]
    assert any("Linear: it came once" in line for line in said), said
    assert any("Linear: extra_key is another value at every call" in line for line in said), said


def test_a_module_whose_state_changes_at_every_call_is_named(caplog: Any) -> None:
    module = torch.nn.Linear(4, 4)
    handle = dit_graph.enable(module, **OPTIONS)

    def another_module() -> None:
        module.weight = torch.nn.Parameter(module.weight.clone(), False)
        module(torch.ones(2, 4))

    with caplog.at_level(logging.WARNING):
        record_all(handle.installs.values(), [another_module])
    said = [line for line in warnings(caplog) if UNSAID in line]
    assert (
        f"dit_graph: {UNSAID}: Linear: Python state changes at every call: weight (1x)" in said
    ), said


def test_what_made_room_is_named_and_not_tried_again(caplog: Any) -> None:
    handle = dit_graph.enable(torch.nn.Linear(4, 4), max_graphs=1, **OPTIONS)
    with caplog.at_level(logging.WARNING):
        handle.warmup(inputs=[(torch.ones(n, 4),) for n in (1, 2)])
    assert handle.stats()["calls"] == 4
    (said,) = (line for line in warnings(caplog) if UNSAID in line)
    assert said.endswith("memory_budget or max_graphs is full (signature input 2x4)")


def test_without_a_gpu_a_warmup_says_that_nothing_is_recorded(caplog: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    handle = dit_graph.enable(torch.nn.Linear(4, 4))
    with caplog.at_level(logging.WARNING):
        handle.warmup(inputs=[(torch.ones(1, 4),)])
    (said,) = (line for line in warnings(caplog) if UNSAID in line)
    assert "Linear: the module is on cpu" in said and "(2x)" in said


def test_a_module_that_comes_to_its_device_after_enable() -> None:
    handle = dit_graph.enable(torch.nn.Linear(4, 4), on_new_shape="error", **OPTIONS)
    handle.installs["Linear"].runner = None  # as on a CPU with device="auto"
    handle.warmup(inputs=[(torch.ones(1, 4),)])
    assert handle.stats()["captures"] == 1


def test_buckets_that_nothing_is_recorded_of_are_named(machine: Machine, caplog: Any) -> None:
    model, _, handle = two("Llama", machine, buckets=(4, 8))
    model.train()
    with caplog.at_level(logging.WARNING):
        handle.warmup()
    (said,) = (line for line in warnings(caplog) if UNSAID in line)
    assert said == f"dit_graph: {UNSAID}: model: the model is in training mode (4x)"


def test_buckets_are_warmed_up_where_new_shapes_are_errors(machine: Machine, caplog: Any) -> None:
    model, _, handle = two("Llama", machine, buckets=(4, 8), on_new_shape="error")
    with caplog.at_level(logging.WARNING):
        handle.warmup()
    assert not warnings(caplog)
    stats = handle.stats()
    assert (stats["calls"], stats["captures"]) == (4, 2)
    model(torch.ones(1, 7, dtype=torch.long))
    assert replayed_wholly(handle, stats), handle.report()


def test_a_picture_that_fails_leaves_everything_as_it_was() -> None:
    pipe = wan_pipeline()
    handle = dit_graph.enable(pipe, on_new_shape="error", **OPTIONS)
    scheduler = pipe.scheduler
    with pytest.raises(ValueError, match="divisible by 16"):
        handle.warmup(sizes=[(64, 63)], **wan_arguments())
    assert pipe.scheduler is scheduler
    with pytest.raises(dit_graph.NewShape):
        drawn(pipe, (64, 64), 2, **wan_arguments())
    with unchanged(pipe, {}):
        assert pipe.scheduler is not scheduler
