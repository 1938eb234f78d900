"""The embedded model: a small picture from one of the names it knows, without a download."""

import sys
from collections.abc import Sequence
from typing import Any

import common
from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel

from dit_graph import embedded
from dit_graph.embedded import ConceptEncoder, EmojiPipeline
from dit_graph.embedded.patches import IN_CHANNELS, OUT_CHANNELS

MODEL = "embedded"


def tiny() -> tuple[EmojiPipeline, dict[str, Any]]:
    encoder = common.random(
        ConceptEncoder,
        concepts=["fox", "wolf"],
        styles=["flat"],
        drawings=[[0], [0]],
        num_tokens=4,
        token_dim=8,
        pooled_dim=16,
    )
    transformer = common.random(
        FluxTransformer2DModel,
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
    pipe = EmojiPipeline(transformer, FlowMatchEulerDiscreteScheduler(), encoder)
    return pipe, {"prompt": "a fox", "num_inference_steps": 4}


def load(model: str) -> EmojiPipeline:
    """The packaged weights, or a folder; in float32, because it is small."""
    return embedded.load() if model == MODEL else EmojiPipeline.from_pretrained(model)


def main(argv: Sequence[str] | None = None) -> int:
    return common.run(__doc__, MODEL, {}, tiny, argv, load=load)


if __name__ == "__main__":
    sys.exit(main())
