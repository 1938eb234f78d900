"""Which calls of a body prefill can pad, and why the others stay the caller's own."""

from collections.abc import Callable
from typing import Any

import torch

from dit_graph.call.buckets import Buckets
from dit_graph.modes.prefill import live
from dit_graph.modes.prefill.apart import counting_mask
from dit_graph.modes.prefill.bodies import names_in

ALL_LAYERS = "output_hidden_states"
DECODE = "a decode step: one token"
_UNDERSTOOD = {
    "input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache", "past_key_values",
    "use_cache", ALL_LAYERS,
}  # fmt: skip
_PLAIN = {"output_attentions": False, "output_router_logits": False, "return_dict": True}


class Eligible:
    """Decides by a call's arguments; nothing is run, and the device is waited for only where a
    cache has its length there.

    Args:
        body: the transformer body.
        buckets: the token counts that are recorded.
        in_graph: attention is inside the graph (`backend="full"`).
    """

    def __init__(self, body: Any, buckets: Buckets, in_graph: bool) -> None:
        self._body = body
        self._buckets = buckets
        self._in_graph = in_graph
        self._positions_from_mask = "cumsum" in names_in(body)

    def length(
        self, given: dict[str, Any], tokens: Any, cache: Any, past: Callable[[], int]
    ) -> tuple[int, str]:
        """The bucket of a call, or why it stays eager."""
        if not isinstance(tokens, torch.Tensor) or {"input_ids", "inputs_embeds"} <= given.keys():
            # The model raises its own error for it.
            return 0, "neither input_ids nor inputs_embeds, or both"
        if self._body.training:
            return 0, "the model is in training mode"
        for name, value in given.items():
            if name not in _UNDERSTOOD and value is not _PLAIN.get(name):
                return 0, f"argument {name} is given"
            # Some models take a list of layers in place of a bool.
            if name in (ALL_LAYERS, "use_cache") and type(value) is not bool:
                return 0, f"argument {name} is a {type(value).__name__}"
        config = self._body.config
        for name in ("output_attentions", "output_router_logits", ALL_LAYERS):
            if getattr(config, name, False) and given.get(name) is not False:
                return 0, f"the config has {name}=True"
        if getattr(config, "return_dict", True) is False:
            return 0, "the config has return_dict=False"
        if "position_ids" not in given and self._positions_from_mask:
            return 0, "it takes positions from the mask; give position_ids"
        if torch.is_grad_enabled() and any(p.requires_grad for p in self._body.parameters()):
            return 0, "gradients are needed; call it under torch.no_grad()"
        if tokens.shape[1] == 1:
            return 0, DECODE
        positions, mask = given.get("position_ids"), counting_mask(given)
        if positions is not None and positions.shape[-1] != tokens.shape[1]:
            return 0, "position_ids are not as many as the tokens"
        if mask is not None and mask.shape[1] < past() + tokens.shape[1]:
            return 0, "attention_mask is shorter than the tokens and those in the cache"
        if self._in_graph and past():
            return 0, 'tokens are in the cache already; backend "full" records a first chunk'
        attention = live.name_of(self._body.config)
        if self._in_graph and attention not in ("sdpa", "eager"):
            return 0, f"backend full cannot pad {attention} attention"
        if cache is not None and not self.uses_cache(given):
            return 0, "a cache is given and use_cache is False"
        return self._buckets.find(tokens.shape[1])

    def uses_cache(self, given: dict[str, Any]) -> bool:
        return bool(given.get("use_cache", getattr(self._body.config, "use_cache", True)))
