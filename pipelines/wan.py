"""Wan: a short video from text, saved as an animated PNG; guidance as two calls a step."""

import sys
from collections.abc import Sequence
from typing import Any

import common
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)

MODEL = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
CALL = {"height": 480, "width": 832, "num_frames": 33, "output_type": "pil"}


def tiny() -> tuple[WanPipeline, dict[str, Any]]:
    transformer = common.random(
        WanTransformer3DModel,
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    )
    vae = common.tiny_video_vae(AutoencoderKLWan, [1, 1, 1, 1], [False, True, True])
    pipe = WanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=vae,
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        transformer=transformer,
    )
    return pipe, {
        "prompt_embeds": common.normal(1, 1, 6, 16),
        "negative_prompt_embeds": common.normal(2, 1, 6, 16),
        "num_frames": 5,
        "output_type": "pil",
        **common.SMALL,
    }


def main(argv: Sequence[str] | None = None) -> int:
    return common.run(__doc__, MODEL, CALL, tiny, argv)


if __name__ == "__main__":
    sys.exit(main())
