"""The embedded pipeline with random weights: what diffusers users expect of a pipeline."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel

from dit_graph.embedded import ConceptEncoder, EmojiPipeline, UnknownConcept
from dit_graph.embedded.patches import (
    IN_CHANNELS,
    OUT_CHANNELS,
    pack,
    patch_ids,
    position_channels,
    unpack,
)

CONCEPTS = [
    "fox",
    "cat-face",
    "birthday-cake",
    "cherries",
    "wolf",
    "evergreen-tree",
    "deciduous-tree",
    "octopus",
    "ice",
]
STYLES = ["flat", "round"]


def tiny_pipeline() -> EmojiPipeline:
    """Two layers, 32 wide, random; `octopus` is known in one style only."""
    torch.manual_seed(0)
    drawings = [[1] if name == "octopus" else [0, 1] for name in CONCEPTS]
    encoder = ConceptEncoder(
        concepts=CONCEPTS,
        styles=STYLES,
        drawings=drawings,
        num_tokens=4,
        token_dim=8,
        pooled_dim=16,
    )
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=IN_CHANNELS,
        out_channels=OUT_CHANNELS,
        num_layers=0,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=8,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 6, 6),
    )
    pipeline = EmojiPipeline(transformer.eval(), FlowMatchEulerDiscreteScheduler(), encoder.eval())
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture
def pipeline() -> EmojiPipeline:
    return tiny_pipeline()


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(pipeline: EmojiPipeline, prompt: str | list[str] = "fox", **options: Any) -> torch.Tensor:
    options = {"num_inference_steps": 3, "output_type": "pt", "generator": seeded(1)} | options
    images: torch.Tensor = pipeline(prompt, **options).images
    return images


class Rows:
    """Counts the rows of each transformer call and keeps its timestep."""

    def __init__(self, pipeline: EmojiPipeline) -> None:
        self.counts: list[int] = []
        self.timesteps: list[Any] = []
        pipeline.transformer.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, module: torch.nn.Module, args: tuple[()], kwargs: dict[str, Any]) -> None:
        self.counts.append(len(kwargs["hidden_states"]))
        self.timesteps.append(kwargs["timestep"])


@pytest.mark.parametrize(
    ("prompt", "concept"),
    [
        ("fox", "fox"),
        ("a fox", "fox"),
        ("Fox, please!", "fox"),
        ("foxes", "fox"),
        ("a FOX in the snow", "fox"),
        ("cat", "cat-face"),
        ("the cats", "cat-face"),
        ("cat-face", "cat-face"),
        ("cat face", "cat-face"),
        ("birthday cake", "birthday-cake"),
        ("a cake", "birthday-cake"),
        ("two birthday cakes", "birthday-cake"),
        ("cherry", "cherries"),
        ("wolves", "wolf"),
        ("octopuses", "octopus"),
        ("tree", "deciduous-tree"),
        ("pine", "evergreen-tree"),
        ("ice birthday cake", "birthday-cake"),
    ],
)
def test_a_prompt_finds_its_concept(pipeline: EmojiPipeline, prompt: str, concept: str) -> None:
    wanted = draw(pipeline, concept, style="round")
    assert torch.equal(draw(pipeline, prompt, style="round"), wanted)


def test_concepts_give_different_pictures(pipeline: EmojiPipeline) -> None:
    assert not torch.equal(draw(pipeline, "fox"), draw(pipeline, "wolf"))


@pytest.mark.parametrize("prompt", ["foks", "", "!!", "a zebra"])
def test_an_unknown_concept_names_the_nearest(pipeline: EmojiPipeline, prompt: str) -> None:
    with pytest.raises(UnknownConcept) as caught:
        draw(pipeline, prompt)
    message = str(caught.value)
    assert repr(prompt) in message and "\n" not in message
    assert isinstance(caught.value, ValueError)
    if prompt == "foks":
        assert "nearest: fox," in message


def test_concepts_are_listed_as_given(pipeline: EmojiPipeline) -> None:
    assert pipeline.concepts == tuple(CONCEPTS)
    assert pipeline.styles == tuple(STYLES)


@pytest.mark.parametrize(("height", "width"), [(30, 64), (64, 66), (28, 64), (64, 132), (0, 64)])
def test_a_bad_size_is_refused(pipeline: EmojiPipeline, height: int, width: int) -> None:
    with pytest.raises(ValueError, match="must be a multiple of 4 from 32 to 128, got"):
        draw(pipeline, height=height, width=width)


@pytest.mark.parametrize(("height", "width"), [(64, 64), (64, 96), (96, 64), (32, 128)])
def test_a_size_is_the_size(pipeline: EmojiPipeline, height: int, width: int) -> None:
    assert draw(pipeline, height=height, width=width).shape == (1, 3, height, width)


def test_no_steps_are_refused(pipeline: EmojiPipeline) -> None:
    with pytest.raises(ValueError, match="num_inference_steps must be at least 1, got 0"):
        draw(pipeline, num_inference_steps=0)


def test_patches_lie_row_by_row_and_come_back() -> None:
    pixels = torch.arange(2 * 3 * 8 * 12).reshape(2, 3, 8, 12).float()
    patches = pack(pixels)
    assert patches.shape == (2, 6, 48)
    assert torch.equal(patches[1, 4].reshape(3, 4, 4), pixels[1, :, 4:8, 4:8])
    assert torch.equal(unpack(patches, 8, 12), pixels)


def test_a_larger_canvas_has_the_smaller_one_in_its_centre() -> None:
    small, large = patch_ids(64, 64), patch_ids(64, 96)
    inner = large.reshape(16, 24, 3)[:, 4:20].reshape(-1, 3)
    assert torch.equal(inner, small)
    assert position_channels(large).unique(dim=0).shape == (16 * 24, 16)


def test_saved_and_loaded_it_draws_the_same(pipeline: EmojiPipeline, tmp_path: Path) -> None:
    pipeline.save_pretrained(tmp_path)
    loaded = EmojiPipeline.from_pretrained(tmp_path, local_files_only=True)
    assert loaded.concepts == pipeline.concepts
    assert torch.equal(draw(loaded, "wolf"), draw(pipeline, "wolf"))


def test_it_loads_in_the_dtype_asked_for(pipeline: EmojiPipeline, tmp_path: Path) -> None:
    pipeline.save_pretrained(tmp_path)
    loaded = EmojiPipeline.from_pretrained(tmp_path, dtype=torch.bfloat16, local_files_only=True)
    assert loaded.transformer.dtype == loaded.concept_encoder.dtype == torch.bfloat16
    near, exact = draw(loaded), draw(pipeline)
    assert near.dtype == torch.float32
    assert 0 < (near - exact).abs().max() < 0.1


def test_guidance_is_one_call_of_twice_the_rows(pipeline: EmojiPipeline) -> None:
    rows = Rows(pipeline)
    draw(pipeline, ["fox", "wolf"], guidance_scale=2.0, num_images_per_prompt=2)
    draw(pipeline, ["fox", "wolf"], guidance_scale=1.0)
    assert rows.counts == [8, 8, 8, 2, 2, 2]


def test_guidance_moves_from_unwanted_to_wanted(pipeline: EmojiPipeline) -> None:
    plain = draw(pipeline, guidance_scale=1.0)
    assert not torch.equal(draw(pipeline, guidance_scale=2.0), plain)
    steered = draw(pipeline, guidance_scale=2.0, negative_prompt="wolf")
    assert not torch.equal(steered, draw(pipeline, guidance_scale=2.0))
    assert torch.equal(
        draw(pipeline, guidance_scale=2.0, negative_prompt=""), draw(pipeline, guidance_scale=2.0)
    )


def test_negative_prompts_must_match_the_prompts(pipeline: EmojiPipeline) -> None:
    with pytest.raises(ValueError, match="got 1 negative prompts for 2 prompts"):
        draw(pipeline, ["fox", "wolf"], negative_prompt=["fox"])


def test_the_timestep_is_a_tensor_of_the_rows(pipeline: EmojiPipeline) -> None:
    rows = Rows(pipeline)
    draw(pipeline, guidance_scale=2.0)
    assert all(isinstance(t, torch.Tensor) and t.shape == (2,) for t in rows.timesteps)
    assert [round(float(t[0]), 4) for t in rows.timesteps] == [1.0, 0.6667, 0.3333]


def test_a_batch_equals_its_pictures_drawn_alone(pipeline: EmojiPipeline) -> None:
    prompts, seeds = ["fox", "wolf", "cat"], [3, 4, 5]
    together = draw(pipeline, prompts, generator=[seeded(s) for s in seeds])
    alone = [draw(pipeline, p, generator=seeded(s)) for p, s in zip(prompts, seeds, strict=True)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-5)


def test_generators_must_match_the_batch(pipeline: EmojiPipeline) -> None:
    with pytest.raises(ValueError, match="got 1 generators for 2 pictures"):
        draw(pipeline, ["fox", "wolf"], generator=[seeded(0)])


def test_the_seed_decides(pipeline: EmojiPipeline) -> None:
    first = draw(pipeline, generator=seeded(7))
    torch.rand(3)  # another generator's draws change nothing
    assert torch.equal(first, draw(pipeline, generator=seeded(7)))
    assert not torch.equal(first, draw(pipeline, generator=seeded(8)))


def test_a_style_is_chosen_among_those_drawn(pipeline: EmojiPipeline) -> None:
    chosen = [pipeline.choose_styles(["fox", "octopus"], None, seeded(s)) for s in range(20)]
    assert {fox for fox, _ in chosen} == {0, 1}
    assert {octopus for _, octopus in chosen} == {1}
    with pytest.raises(ValueError, match="style 'flat' has no 'octopus'; known: round"):
        draw(pipeline, "octopus", style="flat")


def test_given_latents_are_the_start(pipeline: EmojiPipeline) -> None:
    latents = torch.randn(1, 3, 64, 64, generator=seeded(1))
    kept = latents.clone()
    assert torch.equal(draw(pipeline, latents=latents, style="flat"), draw(pipeline, style="flat"))
    assert torch.equal(latents, kept)
    with pytest.raises(ValueError, match=r"latents must be \(2, 3, 64, 64\), got \(1, 3, 64, 64\)"):
        draw(pipeline, ["fox", "wolf"], latents=latents)


def test_the_callback_sees_each_step_and_may_replace(pipeline: EmojiPipeline) -> None:
    seen: list[tuple[int, float]] = []

    def whiten(
        caller: EmojiPipeline, step: int, timestep: torch.Tensor, tensors: dict[str, Any]
    ) -> dict[str, Any]:
        assert caller is pipeline and list(tensors) == ["latents"]
        seen.append((step, float(timestep)))
        return {"latents": torch.ones_like(tensors["latents"])} if step == 2 else {}

    picture = draw(pipeline, callback_on_step_end=whiten)
    assert [step for step, _ in seen] == [0, 1, 2]
    assert seen[0][1] == 1000.0 > seen[1][1] > seen[2][1] > 0
    assert torch.equal(picture, torch.ones_like(picture))


def test_the_callback_gets_only_what_there_is(pipeline: EmojiPipeline) -> None:
    with pytest.raises(ValueError, match="a callback can get latents, not prompt_embeds"):
        draw(pipeline, callback_on_step_end_tensor_inputs=["prompt_embeds"])


def test_the_output_types(pipeline: EmojiPipeline) -> None:
    (picture,) = draw(pipeline, output_type="pil", height=64, width=96)
    assert picture.size == (96, 64) and picture.mode == "RGB"  # type: ignore[attr-defined]
    array, tensor = draw(pipeline, output_type="np"), draw(pipeline)
    assert isinstance(array, np.ndarray) and array.shape == (1, 64, 64, 3)
    latent = draw(pipeline, output_type="latent")
    torch.testing.assert_close((latent / 2 + 0.5).clamp(0, 1), tensor)
    (images,) = pipeline(
        "fox", num_inference_steps=3, generator=seeded(1), output_type="pt", return_dict=False
    )
    assert torch.equal(images, tensor)


def by_hand(
    pipeline: EmojiPipeline, latents: torch.Tensor, steps: int, scale: float
) -> torch.Tensor:
    """The picture of `fox` in `round` at 64x64, by plain Euler steps and two calls a step."""
    encoder, ids = pipeline.concept_encoder, patch_ids(64, 64)
    channels = position_channels(ids)[None]

    def predict(concept: int, style: int, sigma: float) -> torch.Tensor:
        tokens, pooled = encoder(torch.tensor([concept]), torch.tensor([style]))
        (patches,) = pipeline.transformer(
            hidden_states=torch.cat([pack(latents), channels], dim=2),
            encoder_hidden_states=tokens,
            pooled_projections=pooled,
            timestep=torch.tensor([sigma]),
            img_ids=ids,
            txt_ids=torch.tensor([[0.0, y, x] for y in (-4, 4) for x in (-4, 4)]),
            return_dict=False,
        )
        return patches

    sigmas = [1 - step / steps for step in range(steps + 1)]
    for sigma, following in pairwise(sigmas):
        wanted = predict(0, 1, sigma)
        unwanted = predict(encoder.null_concept, encoder.null_style, sigma)
        clean = unpack((wanted * scale - unwanted * (scale - 1)).clamp(-1, 1), 64, 64)
        noise = (latents - (1 - sigma) * clean) / sigma
        latents = (1 - following) * clean + following * noise
    return latents


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("scale", [1.0, 2.5])
@torch.no_grad()
def test_the_loop_equals_one_by_hand(pipeline: EmojiPipeline, steps: int, scale: float) -> None:
    latents = torch.randn(1, 3, 64, 64, generator=seeded(2))
    drawn = draw(
        pipeline,
        latents=latents,
        style="round",
        num_inference_steps=steps,
        guidance_scale=scale,
        output_type="latent",
    )
    expected = by_hand(pipeline, latents, steps, scale)
    torch.testing.assert_close(drawn, expected, rtol=0, atol=1e-4)


def test_the_pictures_of_a_prompt_lie_together(pipeline: EmojiPipeline) -> None:
    seeds = [1, 2, 3, 4]
    drawn = draw(
        pipeline,
        ["fox", "wolf"],
        num_images_per_prompt=2,
        generator=[seeded(s) for s in seeds],
    )
    assert len(drawn) == 4
    for picture, prompt, seed in zip(drawn, ["fox", "fox", "wolf", "wolf"], seeds, strict=True):
        alone = draw(pipeline, prompt, generator=seeded(seed))[0]
        torch.testing.assert_close(picture, alone, rtol=0, atol=1e-5)


def test_concept_style_and_drawing_each_count(pipeline: EmojiPipeline) -> None:
    encoder = pipeline.concept_encoder
    grid = torch.cartesian_prod(torch.arange(len(CONCEPTS) + 1), torch.arange(len(STYLES) + 1))
    tokens, pooled = encoder(grid[:, 0], grid[:, 1])
    assert tokens.shape == (len(grid), 4, 8) and pooled.shape == (len(grid), 16)
    assert len(pooled.unique(dim=0)) == len(grid)
    for table in (encoder.concept, encoder.style):
        torch.nn.init.zeros_(table.weight)
    _, pooled = encoder(grid[:, 0], grid[:, 1])
    drawings = len(CONCEPTS) * len(STYLES)
    assert len(pooled.unique(dim=0)) == drawings + 1, "and one row for none"
