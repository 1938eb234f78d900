"""Which transformer bodies prefill can pad: read off the config and the forward, nothing is run."""

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from dit_graph.errors import ConfigError

_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
_MASK_MAKERS = ("create_causal_mask", "create_sliding_window_causal_mask")


def bodies(target: Any) -> dict[str, torch.nn.Module]:
    """The transformer body of a causal LM by its attribute's name, or a body itself.

    Raises:
        ConfigError: the target is no causal LM, or its body is none that prefill can pad.
    """
    if not isinstance(target, PreTrainedModel) or not hasattr(target, "get_decoder"):
        base = "; give its get_base_model()" if hasattr(target, "get_base_model") else ""
        raise ConfigError(
            f'mode="prefill" takes a transformers causal LM, got {type(target).__name__}{base}'
        )
    body: Any = target.get_decoder()
    body = target if body is None else body
    if not isinstance(body, PreTrainedModel):
        raise ConfigError(f"{type(target).__name__} has no transformer body that stands alone")
    if reason := unsupported(body):
        raise ConfigError(f"{type(body).__name__} cannot be padded: {reason}")
    name = next((n for n, m in target.named_modules() if m is body), type(body).__name__)
    return {name: body}


def unsupported(body: Any) -> str:
    """Why padded tokens could be seen by others in this body, or an empty string."""
    config = body.config
    layers = set(getattr(config, "layer_types", None) or ())
    if others := layers - _LAYERS:
        return f"it has {', '.join(sorted(others))} layers, whose state padded tokens would move"
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    if len(layers) > 1 and not takes_masks_by_layer(body):
        return "its layers differ, and its forward takes one mask for all"
    if any(getattr(module, "is_causal", True) is False for module in body.modules()):
        return "its attention is not causal"
    makers = inspect.unwrap(type(body).forward).__globals__
    if not any(name in makers for name in _MASK_MAKERS):
        return "it makes its attention mask in a way of its own"
    maker = _windowed_maker(config, layers)
    if maker and not takes_masks_by_layer(body) and maker not in names_in(body):
        return f"its config names a window ({maker}) that its forward makes no mask for"
    return ""


def _windowed_maker(config: Any, layers: set[str]) -> str:
    """The function of transformers that must make the mask where every layer has a window."""
    windows = {
        "sliding_attention": ("sliding_window", "create_sliding_window_causal_mask"),
        "chunked_attention": ("attention_chunk_size", "create_chunked_causal_mask"),
    }
    for layer, (size, maker) in windows.items():
        if layer in layers or (not layers and getattr(config, size, None) is not None):
            return maker
    return ""


def takes_masks_by_layer(body: Any) -> bool:
    """Whether the forward looks for a dict of masks, as `generate` hands to some models."""
    return "dict" in names_in(body)


def names_in(body: Any) -> tuple[str, ...]:
    names: tuple[str, ...] = inspect.unwrap(type(body).forward).__code__.co_names
    return names
