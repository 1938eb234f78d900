"""Z-Image: a picture from text; the transformer takes lists, one entry a row."""

import sys
from collections.abc import Sequence
from typing import Any

import common
from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel

MODEL = "Tongyi-MAI/Z-Image-Turbo"
# the Turbo weights were distilled for few steps without guidance
CALL = {"height": 1024, "width": 1024, "num_inference_steps": 9, "guidance_scale": 0.0}


def tiny() -> tuple[ZImagePipeline, dict[str, Any]]:
    transformer = common.random(
        ZImageTransformer2DModel,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[8, 4, 4],
        axes_lens=[256, 32, 32],
    )
    pipe = ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=common.tiny_vae(16),
        text_encoder=None,
        tokenizer=None,
        transformer=transformer,
    )
    return pipe, {
        "prompt_embeds": [common.normal(1, 6, 16)],
        "negative_prompt_embeds": [common.normal(2, 3, 16)],
        **common.SMALL,
    }


def main(argv: Sequence[str] | None = None) -> int:
    return common.run(__doc__, MODEL, CALL, tiny, argv)


if __name__ == "__main__":
    sys.exit(main())
