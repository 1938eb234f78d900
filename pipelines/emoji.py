"""The embedded model: a small picture from one of the names it knows, without a download."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import common
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel

import dit_graph
from dit_graph import embedded
from dit_graph.embedded import ConceptEncoder, EmojiPipeline
from dit_graph.embedded.pipeline import IN_CHANNELS, OUT_CHANNELS


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


def load(args: argparse.Namespace) -> EmojiPipeline:
    """The packaged weights, or a folder; in float32, because it is small."""
    packaged = args.model == "embedded"
    pipe = embedded.load() if packaged else EmojiPipeline.from_pretrained(args.model)
    return pipe.to("cuda" if torch.cuda.is_available() else "cpu")


def main(argv: Sequence[str] | None = None) -> int:
    args = common.arguments(__doc__, "embedded", argv)
    pipe, call = tiny() if args.tiny else (load(args), {"prompt": args.prompt})
    with dit_graph.enable(pipe, **common.graphs(args)) as handle:
        common.draw(pipe, call, args)
        print(handle.report())
    return 0


if __name__ == "__main__":
    sys.exit(main())
