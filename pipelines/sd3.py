"""Stable Diffusion 3: a picture from text, guidance as a batch of two rows."""

import sys
from collections.abc import Sequence
from typing import Any

import common
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)

MODEL = "stabilityai/stable-diffusion-3.5-medium"
CALL = {"height": 1024, "width": 1024, "num_inference_steps": 28}


def tiny() -> tuple[StableDiffusion3Pipeline, dict[str, Any]]:
    transformer = common.random(
        SD3Transformer2DModel,
        sample_size=16,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        pos_embed_max_size=16,
        qk_norm="rms_norm",
        dual_attention_layers=(0,),
    )
    encoders = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    pipe = StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=common.tiny_vae(4),
        text_encoder_3=None,
        tokenizer_3=None,
        **dict.fromkeys(encoders),
    )
    return pipe, {
        "prompt_embeds": common.normal(1, 1, 6, 32),
        "pooled_prompt_embeds": common.normal(2, 1, 64),
        "negative_prompt_embeds": common.normal(3, 1, 6, 32),
        "negative_pooled_prompt_embeds": common.normal(4, 1, 64),
        **common.SMALL,
    }


def main(argv: Sequence[str] | None = None) -> int:
    return common.run(__doc__, MODEL, CALL, tiny, argv)


if __name__ == "__main__":
    sys.exit(main())
