"""PixArt-Σ: a picture from text, guidance as a batch of two rows, DPM-Solver steps."""

import sys
from collections.abc import Sequence
from typing import Any

import common
from diffusers import DPMSolverMultistepScheduler, PixArtSigmaPipeline, PixArtTransformer2DModel

MODEL = "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS"
CALL = {"height": 1024, "width": 1024, "num_inference_steps": 20}


def tiny() -> tuple[PixArtSigmaPipeline, dict[str, Any]]:
    transformer = common.random(
        PixArtTransformer2DModel,
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        cross_attention_dim=16,
        sample_size=16,
        patch_size=2,
        caption_channels=16,
        use_additional_conditions=False,
    )
    pipe = PixArtSigmaPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=common.tiny_vae(4),
        transformer=transformer,
        scheduler=DPMSolverMultistepScheduler(),
    )
    return pipe, common.masked_prompts()


def main(argv: Sequence[str] | None = None) -> int:
    return common.run(__doc__, MODEL, CALL, tiny, argv)


if __name__ == "__main__":
    sys.exit(main())
