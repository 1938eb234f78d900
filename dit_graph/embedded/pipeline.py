"""The embedded model: a small pixel-space DiT behind an ordinary diffusers pipeline.

Owns the denoising loop; the layout of pixels and positions is in `patches.py`. It knows nothing of
graphs; the transformer and the scheduler are diffusers' own classes.

Shapes: B pictures, R rows of the transformer's batch (2B with guidance), H and W pixels,
N = H/4 * W/4 patches.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.pipelines.pipeline_utils import DiffusionPipeline, ImagePipelineOutput
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)
from diffusers.utils.torch_utils import randn_tensor

from dit_graph.embedded.concepts import ConceptIndex
from dit_graph.embedded.encoder import ConceptEncoder
from dit_graph.embedded.patches import (
    CHANNELS,
    caption_ids,
    check_size,
    pack,
    patch_ids,
    position_channels,
    unpack,
)

Generators = torch.Generator | list[torch.Generator] | None
StepCallback = Callable[["EmojiPipeline", int, torch.Tensor, dict[str, Any]], dict[str, Any]]


class EmojiPipeline(DiffusionPipeline):
    """Draws one of about a hundred known things in the style of an emoji.

    Args:
        transformer: predicts the clean patches (R, N, 48) from noisy patches and their position
            channels (R, N, 64).
        scheduler: a flow-matching scheduler; it gets the velocity that follows from the prediction.
        concept_encoder: the table of concepts and styles.
    """

    model_cpu_offload_seq = "concept_encoder->transformer"  # type: ignore[assignment]
    _callback_tensor_inputs: ClassVar[list[str]] = ["latents"]

    def __init__(
        self,
        transformer: FluxTransformer2DModel,
        scheduler: FlowMatchEulerDiscreteScheduler,
        concept_encoder: ConceptEncoder,
    ) -> None:
        super().__init__()
        self.register_modules(  # type: ignore[no-untyped-call]
            transformer=transformer, scheduler=scheduler, concept_encoder=concept_encoder
        )
        self.image_processor = VaeImageProcessor(vae_scale_factor=1)
        self._index = ConceptIndex(concept_encoder.config["concepts"])

    @property
    def concepts(self) -> tuple[str, ...]:
        """What can be drawn, in the naming of the data set."""
        return self._index.names

    @property
    def styles(self) -> tuple[str, ...]:
        """The styles that `style` takes; not every concept was drawn in every style."""
        return tuple(self.concept_encoder.config["styles"])

    def encode_prompt(
        self, prompt: Sequence[str], styles: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Condition on prompts; "" is the unconditional row.

        Args:
            prompt: B prompts.
            styles: B style numbers; `concept_encoder.null_style` leaves the style open.

        Returns:
            Caption tokens (B, T, token_dim) and pooled vectors (B, pooled_dim), in the dtype of
            the encoder and on the execution device.

        Raises:
            UnknownConcept: a prompt names nothing that is known.
        """
        null = self.concept_encoder.null_concept
        numbers = [self.concepts.index(self._index.find(p)) if p else null for p in prompt]
        rows = torch.tensor([numbers, list(styles)], device=self._execution_device)
        tokens, pooled = self.concept_encoder(rows[0], rows[1])
        return tokens, pooled

    def choose_styles(
        self, prompt: Sequence[str], style: str | None, generator: Generators
    ) -> list[int]:
        """A style number for each of B prompts: `style`, or any that the concept was drawn in.

        Raises:
            UnknownConcept: a prompt names nothing that is known.
            ValueError: a concept was not drawn in `style`.
        """
        drawn = [
            self.concept_encoder.config["drawings"][self.concepts.index(self._index.find(p))]
            for p in prompt
        ]
        if style is None:
            one_each = generator if isinstance(generator, list) else [generator] * len(prompt)
            return [_pick(d, g) for d, g in zip(drawn, one_each, strict=True)]
        for text, numbers in zip(prompt, drawn, strict=True):
            known = [self.styles[number] for number in numbers]
            if style not in known:
                raise ValueError(f"style {style!r} has no {text!r}; known: {', '.join(known)}")
        return [self.styles.index(style)] * len(prompt)

    def prepare_latents(
        self, batch: int, height: int, width: int, generator: Generators, latents: Any
    ) -> torch.Tensor:
        """(batch, 3, height, width) float32 noise, or the caller's `latents`.

        Raises:
            ValueError: `latents` or a list of generators has another size than the batch.
        """
        if isinstance(generator, list) and len(generator) != batch:
            raise ValueError(f"got {len(generator)} generators for {batch} pictures")
        shape, device = (batch, CHANNELS, height, width), self._execution_device
        if latents is None:
            noise: torch.Tensor = randn_tensor(
                shape, generator=generator, device=device, dtype=torch.float32
            )
            return noise
        if tuple(latents.shape) != shape:
            raise ValueError(f"latents must be {shape}, got {tuple(latents.shape)}")
        return latents.to(device=device, dtype=torch.float32)  # type: ignore[no-any-return]

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str],
        height: int = 64,
        width: int = 64,
        num_inference_steps: int = 30,
        guidance_scale: float = 1.5,
        negative_prompt: str | list[str] | None = None,
        num_images_per_prompt: int = 1,
        generator: Generators = None,
        latents: torch.Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
        style: str | None = None,
    ) -> ImagePipelineOutput | tuple[Any]:
        """Draw.

        Args:
            prompt: what to draw, for example `"a fox"`; P prompts give B = P *
                `num_images_per_prompt` pictures.
            height: pixels, a multiple of 4 from 32 to 128. Trained on (width x height) 64x64,
                96x64, 64x96 and 128x128; under 64 the drawing is cut off.
            width: pixels, likewise.
            num_inference_steps: denoising steps.
            guidance_scale: 1 or less is without guidance, one row a picture; more doubles the rows.
            negative_prompt: what to steer away from, one for all or one a prompt.
            num_images_per_prompt: pictures of each prompt.
            generator: one, or a list of B; decides the noise and, without `style`, the style.
            latents: (B, 3, height, width) noise to start from instead.
            output_type: `"pil"`, `"np"` (B, H, W, 3) in 0..1, `"pt"` (B, 3, H, W) in 0..1, or
                `"latent"` (B, 3, H, W) float32 in -1..1.
            return_dict: False returns a plain tuple.
            callback_on_step_end: called as `(pipeline, step, timestep, tensors)` after each step;
                may return a dict with replaced `latents`.
            callback_on_step_end_tensor_inputs: names of the tensors it gets: `latents`.
            style: one of `styles`; None lets `generator` choose.

        Returns:
            `ImagePipelineOutput` with `images`, or a tuple of them.

        Raises:
            UnknownConcept: a prompt names nothing that is known.
            ValueError: another argument cannot work; the message says which and why.
        """
        check_size(height, width)
        if unknown := set(callback_on_step_end_tensor_inputs) - set(self._callback_tensor_inputs):
            raise ValueError(f"a callback can get latents, not {', '.join(sorted(unknown))}")
        if num_inference_steps < 1:
            raise ValueError(f"num_inference_steps must be at least 1, got {num_inference_steps}")
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        negatives = _negatives(negative_prompt, len(prompts))
        prompts = [p for p in prompts for _ in range(num_images_per_prompt)]
        negatives = [n for n in negatives for _ in range(num_images_per_prompt)]
        latents = self.prepare_latents(len(prompts), height, width, generator, latents)
        styles = self.choose_styles(prompts, style, generator)
        rows = (prompts, negatives if guidance_scale > 1 else [])
        condition = self._conditions(*rows, styles, height, width)
        self.scheduler.set_timesteps(
            sigmas=np.linspace(1.0, 1 / num_inference_steps, num_inference_steps),
            device=self._execution_device,
        )
        names = callback_on_step_end_tensor_inputs
        latents = self._denoise(latents, condition, guidance_scale, callback_on_step_end, names)
        images: Any = latents
        if output_type != "latent":
            images = self.image_processor.postprocess(latents, output_type=output_type)
        self.maybe_free_model_hooks()  # type: ignore[no-untyped-call]
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def _conditions(
        self,
        prompts: list[str],
        negatives: list[str],
        styles: list[int],
        height: int,
        width: int,
    ) -> dict[str, torch.Tensor]:
        """What the transformer gets at every step beside the picture, for R rows."""
        unstyled = [self.concept_encoder.null_style] * len(negatives)
        tokens, pooled = self.encode_prompt([*prompts, *negatives], [*styles, *unstyled])
        dtype, device = self.transformer.dtype, self._execution_device
        places = patch_ids(height, width)
        return {
            "encoder_hidden_states": tokens.to(dtype),
            "pooled_projections": pooled.to(dtype),
            "img_ids": places.to(device),
            "txt_ids": caption_ids(tokens.shape[1]).to(device),
            "positions": position_channels(places).to(device, dtype).expand(len(tokens), -1, -1),
        }

    def _denoise(
        self,
        latents: torch.Tensor,
        condition: dict[str, torch.Tensor],
        guidance_scale: float,
        callback: StepCallback | None,
        names: Sequence[str],
    ) -> torch.Tensor:
        """The loop over the scheduler's steps; it never waits for the device."""
        # Told where it starts, the scheduler need not look the first timestep up on the device.
        self.scheduler.set_begin_index(0)
        with self.progress_bar(total=len(self.scheduler.timesteps)) as bar:
            for step, timestep in enumerate(self.scheduler.timesteps):
                clean = self._predict(latents, timestep, condition, guidance_scale)
                velocity = (latents - clean) / self.scheduler.sigmas[step]
                latents = self.scheduler.step(velocity, timestep, latents, return_dict=False)[0]
                if callback is not None:
                    tensors = dict.fromkeys(names, latents)
                    answer = callback(self, step, timestep, tensors) or {}
                    latents = answer.pop("latents", latents)
                bar.update()
        return latents

    def _predict(
        self,
        latents: torch.Tensor,
        timestep: torch.Tensor,
        condition: dict[str, torch.Tensor],
        guidance_scale: float,
    ) -> torch.Tensor:
        """The clean picture (B, 3, H, W), float32, seen in `latents` at a 0-dim `timestep`."""
        given = dict(condition)
        positions = given.pop("positions")
        patches = pack(latents).to(positions.dtype).repeat(len(positions) // len(latents), 1, 1)
        time = timestep.expand(len(positions)) / self.scheduler.config.num_train_timesteps
        with self.transformer.cache_context("both"):  # with guidance or without, in one call
            (predicted,) = self.transformer(
                hidden_states=torch.cat([patches, positions], dim=2),
                timestep=time,
                return_dict=False,
                **given,
            )
        if len(positions) > len(latents):
            wanted, unwanted = predicted.float().chunk(2)
            predicted = unwanted + guidance_scale * (wanted - unwanted)
        # Guidance overshoots; a picture cannot be whiter than white.
        return unpack(predicted.float().clamp(-1, 1), *latents.shape[2:])


def _pick(numbers: Sequence[int], generator: torch.Generator | None) -> int:
    """One of `numbers`, by `generator`."""
    device = generator.device if generator is not None else None
    draw = torch.randint(len(numbers), (1,), generator=generator, device=device)
    return numbers[int(draw.item())]


def _negatives(negative_prompt: str | list[str] | None, count: int) -> list[str]:
    if negative_prompt is None or isinstance(negative_prompt, str):
        return [negative_prompt or ""] * count
    if len(negative_prompt) != count:
        raise ValueError(f"got {len(negative_prompt)} negative prompts for {count} prompts")
    return list(negative_prompt)
