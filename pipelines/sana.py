"""Sana: a picture from text; linear attention, guidance as a batch of two rows."""

import sys
from collections.abc import Sequence
from typing import Any

import common
from diffusers import (
    AutoencoderDC,
    DPMSolverMultistepScheduler,
    SanaPipeline,
    SanaTransformer2DModel,
)

MODEL = "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers"
CALL = {"height": 1024, "width": 1024, "num_inference_steps": 20}


def tiny() -> tuple[SanaPipeline, dict[str, Any]]:
    transformer = common.random(
        SanaTransformer2DModel,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=8,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=16,
        sample_size=16,
    )
    vae = common.random(
        AutoencoderDC,
        latent_channels=4,
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        encoder_qkv_multiscales=((), ()),
        decoder_qkv_multiscales=((), ()),
    )
    scheduler = DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    pipe = SanaPipeline(None, None, vae, transformer, scheduler)
    return pipe, common.masked_prompts()


def main(argv: Sequence[str] | None = None) -> int:
    return common.run(__doc__, MODEL, CALL, tiny, argv)


if __name__ == "__main__":
    sys.exit(main())
