"""Prefill: in front of a causal LM's transformer body, tokens are padded to a bucket.

The caller's call, its mask and its cache stay whole: they are what the breaks in the recording see
(`live.py`). The LM head, logits processing and sampling are outside.
"""

import copy
import functools
import inspect
import logging
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from transformers import masking_utils
from transformers.cache_utils import DynamicCache

from dit_graph.call.buckets import Buckets
from dit_graph.capture.compiled import Changes, put_in_place
from dit_graph.devices.base import is_out_of_memory
from dit_graph.errors import CaptureError, DeviceFailed, NewShape, NotReplayed
from dit_graph.modes.prefill import live
from dit_graph.modes.prefill.apart import apart, cache_of, counting_mask, tokens_in
from dit_graph.modes.prefill.bodies import takes_masks_by_layer
from dit_graph.modes.prefill.eligible import ALL_LAYERS, DECODE, Eligible
from dit_graph.modes.prefill.live import CacheStandIn, LiveCall, mask_of, padded, padded_mask
from dit_graph.runner.runner import INSIDE

log = logging.getLogger("dit_graph")
_MAKE_MASKS: Any = masking_utils.create_masks_for_generate
_MASKS_CACHE = (
    "cache" if "cache" in inspect.signature(_MAKE_MASKS).parameters else "past_key_values"
)


def _of_text(positions: torch.Tensor) -> torch.Tensor | None:
    """What a mask is made with: of several rows of positions the text's, where there is one."""
    if positions.dim() == 2:
        return positions
    return positions[0] if positions.shape[0] == 4 else None


class Prefill:
    """Answers a body's calls through `runner`, which records `padded_forward`.

    Args:
        body: the transformer body.
        original: its forward as it was before.
        buckets: the token counts that are recorded.
        backend: under `"full"` attention is inside the graph, and the cache is written after it.
    """

    def __init__(
        self, body: Any, original: Callable[..., Any], buckets: Buckets, backend: str
    ) -> None:
        self._body = body
        self._original = original
        self._in_graph = backend == "full"
        self._eligible = Eligible(body, buckets, self._in_graph)
        self._signature = inspect.signature(types.MethodType(type(body).forward, body))
        self._cache_name = "cache" if "cache" in self._signature.parameters else "past_key_values"
        self._out: Any = None  # The type of the body's output, once it is known.
        self._proven: set[Any] = set()  # Calls of these kinds came near the plain forward.
        self._wrong = ""  # This is why the body is not padded after all.
        self._masks_by_layer = takes_masks_by_layer(body)
        self.runner: Any = None  # It records and replays `padded_forward`.

    # ---- the call as the caller makes it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plain = functools.partial(self._original, *args, **kwargs)
        reason = self.runner.passes_by()
        try:
            answer = reason or self._plan(args, kwargs, plain)
        except Exception as error:  # An argument is of a kind that nobody has thought of.
            answer = self.runner.own_error(error)
        if callable(answer):
            return answer()
        return self.runner.refuse(answer, plain, expected=answer in (DECODE, INSIDE))

    def _plan(self, args: Any, kwargs: Any, plain: Callable[[], Any]) -> Callable[[], Any] | str:
        """How a call is answered by way of the runner, or why it stays eager."""
        given = self._signature.bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        given = {name: value for name, value in given.items() if value is not None}
        tokens: Any = given.get("input_ids", given.get("inputs_embeds"))
        cache = given.get(self._cache_name, given.get("past_key_values"))
        # To ask a static cache for its length waits for the device, so it is asked once, if at all.
        past = functools.cache(functools.partial(tokens_in, cache))
        length, reason = self._eligible.length(given, tokens, cache, past)
        if reason := reason or self._wrong:
            return reason
        if self._eligible.uses_cache(given) and cache is None:
            cache = DynamicCache(config=self._body.config)
        positions = given.get("position_ids")
        if positions is None:
            before = 0 if cache is None else cache.get_seq_length()
            positions = (torch.arange(tokens.shape[1], device=tokens.device) + before).unsqueeze(0)
        masks = self._masks(given, tokens, cache, positions)
        kind = (
            length, tokens.shape[0], tokens.dim(), positions.dim(), cache is None,
            "attention_mask" in given, ALL_LAYERS in given,
            tuple((name, mask is None) for name, mask in masks.items()),
            self._sees_all(tokens.shape[1], past), self._is_packed(given, past),
        )  # fmt: skip
        padded_call = functools.partial(self._padded, given, tokens, positions, masks, length)
        if kind not in self._proven:
            mask = counting_mask(given, past() + tokens.shape[1])
            if mask is not None and not mask[:, past() :].any():
                return "attention_mask leaves every token out"
            scratch = copy.deepcopy(cache)
            prove = functools.partial(self._prove, kind, plain, padded_call, given, scratch, mask)
            return prove
        return functools.partial(padded_call, cache, plain)

    def _padded(
        self,
        given: dict[str, Any],
        tokens: torch.Tensor,
        positions: torch.Tensor,
        masks: dict[str, Any],
        length: int,
        cache: Any,
        plain: Callable[[], Any] | None = None,
    ) -> Any:
        """The body's output for the live tokens, from a padded call; `cache` is written.

        Where nothing is recorded `plain` may answer instead.
        """
        attention, live_masks = live.name_of(self._body.config), list(masks.values())
        call = LiveCall(tokens.shape[1], length, cache, attention, live_masks)
        call.in_graph, call.plain = self._in_graph, plain
        stand_ins: list[Any] = [mask_of(i, tokens) for i in range(len(masks))]
        if self._in_graph:
            stand_ins = [padded_mask(m, call.tokens, length, tokens) for m in live_masks]
        name = "input_ids" if "input_ids" in given else "inputs_embeds"
        every_layer = {ALL_LAYERS: True} if given.get(ALL_LAYERS) else {}
        with live.answering(call):
            out = self.runner(
                **{name: padded(tokens, 1, length)},
                position_ids=padded(positions, positions.dim() - 1, length),
                attention_mask=stand_ins,
                kinds=tuple(masks),
                cache=None if cache is None else CacheStandIn(),
                **every_layer,
            )
        if call.answer is not None:
            return call.answer
        for layer, states in out.pop("states").items():
            cache.update(*(t[:, :, : call.tokens] for t in states), layer)
        found = pytree.tree_map_only(torch.Tensor, lambda t: t[:, : call.tokens].contiguous(), out)
        return self._out(**found, **({} if cache is None else {self._cache_name: cache}))

    def _sees_all(self, tokens: int, past: Callable[[], int]) -> tuple[bool, ...]:
        """Whether all tokens up to now lie in the windows that the config names. A body that makes
        its masks by other rules than the config's can differ past them only."""
        names = ("sliding_window", "attention_chunk_size")
        windows = [getattr(self._body.config, name, None) for name in names]
        return tuple(past() + tokens <= window for window in windows if window)

    def _is_packed(self, given: dict[str, Any], past: Callable[[], int]) -> bool:
        """Whether several prompts may lie in one row, told apart by positions that start again,
        which some bodies look at and some do not. Waits for the device."""
        positions = given.get("position_ids")
        if positions is None or "attention_mask" in given or past():
            return False
        return bool((positions.diff(dim=-1) != 1).any())

    def _prove(
        self,
        kind: Any,
        plain: Callable[[], Any],
        padded_call: Callable[[Any], Any],
        given: dict[str, Any],
        scratch: Any,
        mask: torch.Tensor | None,
    ) -> Any:
        """The first call of a kind: the plain forward answers, and the padded one must come near
        it, on `scratch`, a copy of the cache. Where it does not, or fails, this body is never
        padded again."""
        its = given.get(self._cache_name, given.get("past_key_values"))
        out = plain()
        try:
            found = padded_call(scratch).last_hidden_state
            written = cache_of(out) if its is None else its
            wrong = apart(found, out.last_hidden_state, mask, scratch, written)
        except (DeviceFailed, NewShape, NotReplayed):
            raise
        except Exception as error:
            if is_out_of_memory(error):  # That says nothing of the body; the next call tries again.
                return out
            wrong = f"it cannot be padded: {error!r}"
        if wrong:
            self._wrong = wrong
            log.warning("dit_graph: %s is not padded: %s", type(self._body).__name__, wrong)
        self._proven.add(kind)
        return out

    def _masks(
        self, given: dict[str, Any], tokens: torch.Tensor, cache: Any, positions: torch.Tensor
    ) -> dict[str, Any]:
        """The masks of the live call by layer type, made as the model makes them.

        One under the name "" where the model has one for all layers.
        """
        mask = given.get("attention_mask")
        if not isinstance(mask, dict):
            weight = self._body.get_input_embeddings().weight
            like = weight.new_empty(1).expand(*tokens.shape[:2], 1)
            mask = _MAKE_MASKS(
                config=self._body.config,
                inputs_embeds=like,
                attention_mask=mask,
                position_ids=_of_text(positions),
                **{_MASKS_CACHE: cache},
            )
        if isinstance(mask, dict) and not self._masks_by_layer:
            (mask,) = mask.values()
        return mask if isinstance(mask, dict) else {"": mask}

    # ---- what is recorded

    def padded_forward(
        self,
        *,
        attention_mask: list[torch.Tensor],
        kinds: tuple[str, ...],
        cache: Any,
        **tokens: Any,
    ) -> dict[str, Any]:
        """The body on padded tokens (batch, bucket): its hidden states, and under `states` each
        layer's keys and values where attention is in the graph, all padded."""
        mask: Any = attention_mask[0] if kinds == ("",) else dict(zip(kinds, attention_mask))
        with self._prepared():
            given = {self._cache_name: cache, "use_cache": cache is not None}
            out = self._original(attention_mask=mask, **tokens, **given)
        self._out = type(out)
        found = {n: v for n, v in out.items() if v is not None and not isinstance(v, CacheStandIn)}
        if extra := set(found) - {"last_hidden_state", "hidden_states"}:
            raise CaptureError(f"the body gives more than hidden states: {', '.join(extra)}")
        call = live.current()
        states = dict(call.kept) if call.in_graph else {}
        if call.in_graph:
            call.kept.clear()
        return {**found, "states": states}

    def plain_forward(self, **padded: Any) -> dict[str, Any]:
        """What is eager answers with the caller's own call, which pads nothing.

        Not after a recording that failed: the cache has some of its layers already.
        """
        call = live.current()
        if call.plain is None or call.kept:
            return self.padded_forward(**padded)
        with live.answering(None):  # Its attention sees the caller's tensors, which are not padded.
            call.answer = call.plain()
        return {"states": {}}

    @contextmanager
    def _prepared(self) -> Iterator[None]:
        """For one padded forward: attention is ours, and expert routing sees live tokens."""
        changes: Changes = [
            (block.__dict__, "forward", live.on_live_tokens(block.forward, name))
            for name, block in self._body.named_modules()
            if isinstance(getattr(block, "experts", None), torch.nn.Module) and not self._in_graph
        ]
        with put_in_place(changes), live.standing_in(self._body.config):
            yield
