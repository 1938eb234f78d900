"""The text encoder of the embedded model: a table, because its prompts are names.

Owns the learnt vectors of concepts, styles and single drawings. It does not read prompts.
"""

from collections.abc import Sequence

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import nn


class ConceptEncoder(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """Turns (concept, style) numbers into caption tokens and a pooled vector.

    Each is the sum of three learnt parts: of the concept, of the style, and of the one drawing
    that both together name, so that drawings of a concept do not blend. Every table has one
    more row, the unconditional one.

    Args:
        concepts: concept names; the number of a concept is its place here.
        styles: style names, numbered likewise.
        drawings: for each concept the numbers of the styles in which it was drawn.
        num_tokens: caption tokens, laid out on a square grid over the picture.
        token_dim: width of a caption token.
        pooled_dim: width of the pooled vector.
    """

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        *,  # diffusers takes a value passed by place for a default and would not keep it
        concepts: Sequence[str],
        styles: Sequence[str],
        drawings: Sequence[Sequence[int]],
        num_tokens: int = 16,
        token_dim: int = 48,
        pooled_dim: int = 128,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        width = num_tokens * token_dim + pooled_dim
        self.null_concept = len(concepts)
        self.null_style = len(styles)
        self.concept = nn.Embedding(len(concepts) + 1, width)
        self.style = nn.Embedding(len(styles) + 1, width)
        self.drawing = nn.Embedding(len(concepts) * len(styles) + 1, width)

    def forward(
        self, concept_ids: torch.Tensor, style_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Look the conditions up.

        Args:
            concept_ids: (B,) int64, `null_concept` for none.
            style_ids: (B,) int64, `null_style` for none.

        Returns:
            Caption tokens (B, num_tokens, token_dim) and pooled vectors (B, pooled_dim), in the
            dtype of the weights.
        """
        no_drawing = (concept_ids == self.null_concept) | (style_ids == self.null_style)
        drawing_ids = concept_ids * self.null_style + style_ids
        drawing_ids = drawing_ids.masked_fill(no_drawing, self.drawing.num_embeddings - 1)
        both = self.concept(concept_ids) + self.style(style_ids) + self.drawing(drawing_ids)
        count, dim = self.config["num_tokens"], self.config["token_dim"]
        tokens = both[:, : count * dim].reshape(-1, count, dim)
        return tokens, both[:, count * dim :]
