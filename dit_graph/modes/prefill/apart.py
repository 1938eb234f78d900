"""How far a padded prefill call is from the plain one: its hidden states and what it caches."""

from typing import Any

import torch


def cache_of(out: Any) -> Any:
    return out.get("cache") if out.get("cache") is not None else out.get("past_key_values")


def tokens_in(cache: Any) -> int:
    """How many a cache has."""
    return 0 if cache is None else int(cache.get_seq_length())


def counting_mask(given: dict[str, Any], tokens: int | None = None) -> torch.Tensor | None:
    """The mask that says of each token whether it counts, where one is given; it may go on past
    the `tokens` up to now."""
    mask = given.get("attention_mask")
    return mask[:, :tokens] if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None


def _counting(mask: torch.Tensor, batch: int, tokens: int) -> torch.Tensor:
    """Which of `tokens` in a row count, of those of a mask (batch or 1, all tokens up to now).

    A cache may keep fewer of them, the last ones, or have room for more, which is compared too.
    """
    mask = mask.bool().expand(batch, -1)[:, -tokens:]
    return torch.nn.functional.pad(mask, (0, tokens - mask.shape[1]), value=True)


def apart(
    found: torch.Tensor, wanted: torch.Tensor, mask: torch.Tensor | None, mine: Any, its: Any
) -> str:
    """How far a padded call is from the plain one, where that is too far; its cache included.

    `mask` (batch or 1, all tokens up to now) leaves tokens out whose values nobody reads.
    """
    pairs = [("hidden states", found, wanted)]
    if mine is not None and its is not None:
        layers = enumerate(zip(mine.layers, its.layers))
        filled = [(i, a, b) for i, (a, b) in layers if a.is_initialized]
        pairs += [(f"keys of layer {i}", a.keys, b.keys) for i, a, b in filled]
        pairs += [(f"values of layer {i}", a.values, b.values) for i, a, b in filled]
    for what, a, b in pairs:
        if mask is not None and a.shape == b.shape:
            # Hidden states have their tokens second, keys and values behind the heads.
            a, b = (t if t.dim() == 3 else t.transpose(1, 2) for t in (a, b))
            rows = _counting(mask, *a.shape[:2])
            a, b = a[rows], b[rows]
            if not a.numel():  # A short cache may hold no token that counts.
                continue
        # The bound is a share of the largest value.
        bound = 1e-3 if a.dtype in (torch.float32, torch.float64) else 0.1
        if a.shape != b.shape or not bool((a - b).abs().max() <= bound * b.abs().max() + 1e-12):
            return f"its {what} are not those of the plain forward"
    return ""
