"""DiT: a picture from an ImageNet label, guidance as a batch of two rows, DDIM steps."""

import sys
from collections.abc import Sequence
from typing import Any

import common
from diffusers import DDIMScheduler, DiTPipeline, DiTTransformer2DModel

MODEL = "facebook/DiT-XL-2-256"
CALL = {"num_inference_steps": 50}


def tiny() -> tuple[DiTPipeline, dict[str, Any]]:
    transformer = common.random(
        DiTTransformer2DModel,
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=16,
        patch_size=2,
        num_embeds_ada_norm=1000,  # the pipeline's "no label" is 1000
    )
    labels = {277: "red fox, Vulpes vulpes", 278: "kit fox, Vulpes macrotis"}
    pipe = DiTPipeline(transformer, common.tiny_vae(4), DDIMScheduler(), id2label=labels)
    return pipe, {**ask(pipe, "red fox"), "num_inference_steps": 4}


def ask(pipe: DiTPipeline, label: str) -> dict[str, Any]:
    """The class of a label: a number as it is, a word by the pipeline's table."""
    classes = pipe.transformer.config.num_embeds_ada_norm
    if label.isdecimal() and int(label) < classes:
        return {"class_labels": [int(label)]}
    if label in pipe.labels:
        return {"class_labels": pipe.get_label_ids([label])}
    known = f" or one of {len(pipe.labels)} words, such as 'red fox'" if pipe.labels else ""
    raise SystemExit(f"no label {label!r}; give a number from 0 to {classes - 1}{known}")


def main(argv: Sequence[str] | None = None) -> int:
    return common.run(__doc__, MODEL, CALL, tiny, argv, prompt="red fox", ask=ask)


if __name__ == "__main__":
    sys.exit(main())
