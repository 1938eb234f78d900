"""What is eager in a recorded prefill: attention, the KV cache, expert routing. They see the live
tokens of the call that runs now and never a padded one.

Goes through transformers' public interfaces: an attention function and a mask function are
registered under one name, and a stand-in takes the cache's place. Model code is not touched.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dit_graph.breaks import eager_on_graph

NAME = "dit_graph_prefill"


@dataclass(eq=False)
class LiveCall:
    """One prefill call as its caller made it.

    `tokens` are the live ones, `length` the padded count. `masks` are the attention masks for them
    as the model makes them, `None` where the attention function needs none. `kept` holds what the
    cache gave back for each layer, so that a call that starts again does not write a layer twice.
    """

    tokens: int
    length: int
    cache: Any
    attention: str
    masks: list[Any]
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    in_graph: bool = False
    """Attention belongs to the recording; `kept` holds each layer's padded keys and values."""
    plain: Callable[[], Any] | None = None
    """The model's own call, which answers where nothing is recorded; `answer` is what it gave."""
    answer: Any = None


class _Local(threading.local):
    call: LiveCall | None = None


_local = _Local()


@contextmanager
def answering(call: LiveCall | None) -> Iterator[None]:
    """Make `call` what breaks see on this thread; None where nothing is padded."""
    before, _local.call = _local.call, call
    try:
        yield
    finally:
        _local.call = before


def current() -> LiveCall:
    """The call that runs now on this thread."""
    assert _local.call is not None
    return _local.call


@dataclass(frozen=True)
class CacheStandIn(Cache):
    """Takes the place of the caller's cache in a recording; the live one is written in a break."""

    layers = ()  # type: ignore[assignment]

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int = 0,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hand the padded keys and values on to attention, which knows the live call."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        raise RuntimeError("the forward asks for the cache's length while it is recorded")

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        raise RuntimeError("the forward asks for the cache's length while it is recorded")


def mask_of(kind: int, like: torch.Tensor) -> torch.Tensor:
    """What stands for the `kind`th mask in a recording: its shape says which one it is."""
    return torch.zeros(1, 1, 1, kind + 1, dtype=torch.bool, device=like.device)


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: `query` (batch, heads, tokens, head) and so on, padded."""
    call = _local.call
    if call is None:  # Another thread calls, while a recording has changed the config it shares.
        real = attention_named(name_of(module.config), module)
        plain: tuple[torch.Tensor, None] = real(module, query, key, value, attention_mask, **kwargs)
        return plain
    if call.in_graph:
        if call.cache is not None:
            call.kept[module.layer_idx] = key, value
        real = attention_named(call.attention, module)
        # A mask of one row is the stand-in for None.
        mask = None if attention_mask.shape[2] == 1 else attention_mask
        return real(module, query, key, value, mask, **kwargs)[0], None
    batch, heads, length, _ = query.shape
    # It is made here, outside of the break, so that it lies in the segment's own memory.
    out = query.new_empty(batch, length, heads, value.shape[3])
    _live_attention(module, query, key, value, attention_mask, out, **kwargs)
    return out, None


@eager_on_graph(pure=True, reason="attention and KV cache on live tokens")
def _live_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    out: torch.Tensor,
    **kwargs: Any,
) -> None:
    """Writes attention on live tokens into `out` (batch, padded tokens, heads, head), zero after
    them: one copy, where a result would be padded first and copied to its place then."""
    call = current()
    if call.tokens < call.length:
        query, key, value = (t[:, :, : call.tokens] for t in (query, key, value))
        # Some attention functions tell packed prompts apart by the positions.
        if isinstance(kwargs.get("position_ids"), torch.Tensor):
            kwargs["position_ids"] = kwargs["position_ids"][..., : call.tokens]
    if call.cache is not None:
        layer = module.layer_idx
        if layer not in call.kept:
            call.kept[layer] = call.cache.update(key, value, layer)
        key, value = call.kept[layer]
    mask = None if attention_mask is None else call.masks[attention_mask.shape[-1] - 1]
    found = attention_named(call.attention, module)(module, query, key, value, mask, **kwargs)[0]
    if call.tokens < call.length:
        out[:, call.tokens :] = 0
        out = out[:, : call.tokens]
    out.copy_(found)


def attention_named(name: str, module: torch.nn.Module) -> Callable[..., Any]:
    """The attention function that the model would call; `eager` is each model file's own."""
    default: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    found: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(name, default)
    return found


def padded(t: torch.Tensor, axis: int, length: int, value: Any = 0) -> torch.Tensor:
    """`t` grown to `length` along `axis`, the tail filled with `value`."""
    shape = list(t.shape)
    shape[axis] = length
    whole = torch.full(shape, value, dtype=t.dtype, device=t.device)
    whole.narrow(axis, 0, t.shape[axis]).copy_(t)
    return whole


def padded_mask(mask: torch.Tensor | None, tokens: int, length: int, like: torch.Tensor) -> Any:
    """A mask (batch or 1, 1, tokens, keys) grown to (.., length, length) for attention in a graph.

    `None`, which is plainly causal, keeps a stand-in where nothing is padded. A padded row sees
    itself, so that it is a number; a live row sees no padded key.
    """
    if mask is None:
        if tokens == length:
            return mask_of(0, like)
        return torch.ones(1, 1, length, length, dtype=torch.bool, device=like.device).tril()
    sees, hides = (True, False) if mask.dtype is torch.bool else (0.0, torch.finfo(mask.dtype).min)
    whole = mask.new_full((*mask.shape[:2], length, length), hides)
    whole.diagonal(dim1=2, dim2=3).fill_(sees)
    whole[:, :, :tokens] = hides
    whole[:, :, :tokens, :tokens] = mask[..., :tokens]
    return whole


def on_live_tokens(forward: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A block's forward (batch, tokens, width) as a break that sees the live tokens only."""

    @eager_on_graph(pure=True, reason=f"{name} routes live tokens")
    def call(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        now = _local.call
        if now is None or hidden.shape[1] != now.length:
            return forward(hidden, *args, **kwargs)
        out = forward(hidden[:, : now.tokens].contiguous(), *args, **kwargs)
        return padded(out, 1, now.length)

    return call


def _mask(*args: Any, config: Any, **kwargs: Any) -> Any:
    """transformers' mask interface under our name: what the config's own attention would get."""
    return ALL_MASK_ATTENTION_FUNCTIONS[name_of(config)](*args, config=config, **kwargs)


# By the id of a config: the attention that ours stands in for, and in how many recordings now.
_standing_in: dict[int, list[Any]] = {}
_lock = threading.Lock()


def name_of(config: Any) -> str:
    """The attention that a config names, whether or not a recording has it now."""
    with _lock:
        found = _standing_in.get(id(config))
        return str(found[0] if found else config._attn_implementation)


@contextmanager
def standing_in(config: Any) -> Iterator[None]:
    """Have a model go through `attention`; calls of other threads find what they would."""
    with _lock:  # Models may share a config, and be recorded in two threads.
        found = _standing_in.setdefault(id(config), [config._attn_implementation, 0])
        found[1] += 1
        config._attn_implementation = NAME
    try:
        yield
    finally:
        with _lock:
            found[1] -= 1
            if not found[1]:
                del _standing_in[id(config)]
                config._attn_implementation = found[0]


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, _mask)
