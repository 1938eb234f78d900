"""FLUX.1: a picture from text, guidance inside the model."""

import sys
from collections.abc import Sequence
from typing import Any

import common
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

MODEL = "black-forest-labs/FLUX.1-dev"
CALL = {"height": 1024, "width": 1024, "num_inference_steps": 28}


def tiny() -> tuple[FluxPipeline, dict[str, Any]]:
    transformer = common.random(
        FluxTransformer2DModel,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=common.tiny_vae(4),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=transformer,
    )
    return pipe, {
        "prompt_embeds": common.normal(1, 1, 6, 32),
        "pooled_prompt_embeds": common.normal(2, 1, 32),
        **common.SMALL,
    }


def main(argv: Sequence[str] | None = None) -> int:
    return common.run(__doc__, MODEL, CALL, tiny, argv)


if __name__ == "__main__":
    sys.exit(main())
