"""The embedded default model: a picture without a download.

from dit_graph.embedded import load
load()("a fox").images[0].save("fox.png")
"""

from pathlib import Path

import torch

from dit_graph.embedded.concepts import UnknownConcept
from dit_graph.embedded.encoder import ConceptEncoder
from dit_graph.embedded.pipeline import EmojiPipeline

__all__ = ["ConceptEncoder", "EmojiPipeline", "UnknownConcept", "load"]

WEIGHTS = Path(__file__).parent / "weights"


def load(dtype: torch.dtype = torch.float32) -> EmojiPipeline:
    """The packaged pipeline, on the CPU.

    Args:
        dtype: of the weights, which are stored in float16.

    Raises:
        FileNotFoundError: this installation carries no weights.
    """
    if not (WEIGHTS / "model_index.json").is_file():
        raise FileNotFoundError(
            f"no embedded weights in {WEIGHTS}: train them, see samples/README.md"
        )
    pipeline: EmojiPipeline = EmojiPipeline.from_pretrained(
        WEIGHTS, dtype=dtype, local_files_only=True
    )
    return pipeline
