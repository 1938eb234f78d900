"""Qwen-Image: a picture from text, guidance as two calls a step."""

import sys
from collections.abc import Sequence
from typing import Any

import common
import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)

MODEL = "Qwen/Qwen-Image"
CALL = {"negative_prompt": " ", "true_cfg_scale": 4.0, "height": 1024, "width": 1024}


def tiny() -> tuple[QwenImagePipeline, dict[str, Any]]:
    transformer = common.random(
        QwenImageTransformer2DModel,
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )
    vae = common.tiny_video_vae(AutoencoderKLQwenImage, [1, 2], [False])
    pipe = QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=None,
        tokenizer=None,
        transformer=transformer,
    )
    return pipe, {
        "prompt_embeds": common.normal(1, 1, 6, 16),
        "prompt_embeds_mask": torch.ones(1, 6, dtype=torch.long),
        "negative_prompt_embeds": common.normal(2, 1, 3, 16),
        "negative_prompt_embeds_mask": torch.ones(1, 3, dtype=torch.long),
        "true_cfg_scale": 4.0,
        **common.SMALL,
    }


def main(argv: Sequence[str] | None = None) -> int:
    return common.run(__doc__, MODEL, CALL, tiny, argv)


if __name__ == "__main__":
    sys.exit(main())
