"""Pictures of a pipeline whose loop waits for the device."""

from typing import Any

import diffusers
import torch
from diffusers import DDIMScheduler, DiTPipeline

from tests.pair import Machine

BOTH = ("timesteps", "step")
STEPS = 6


def dit(machine: Machine) -> Any:
    """Its scheduler has the timesteps on the CPU."""
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(block_out_channels=(4,), latent_channels=4, norm_num_groups=1)
    transformer = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2,
        sample_size=8, num_embeds_ada_norm=1000,
    )  # fmt: skip
    pipe = DiTPipeline(transformer.eval(), vae.eval(), DDIMScheduler())
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(machine.on)


def dit_picture(pipe: Any, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    labels = [seed % 4]
    out = pipe(labels, num_inference_steps=STEPS, generator=generator, output_type="pt")
    image: torch.Tensor = out.images
    return image
