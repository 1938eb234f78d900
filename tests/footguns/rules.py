"""Switches: each takes one rule out of dit_graph for the length of a test."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from dit_graph import breaks
from dit_graph.backends import breakable
from dit_graph.call import key, misses
from dit_graph.call.key import Call, GraphKey, Signature
from dit_graph.capture import calls, capture, homes
from dit_graph.capture.capture import Capture
from dit_graph.capture.kinds import Kind, Known
from dit_graph.devices.recorder import Arena, weak
from dit_graph.install import Install
from dit_graph.memory.pool import Pool
from dit_graph.runner import entry
from dit_graph.runner.entry import Decision, Entry
from dit_graph.runner.replay import ReplayAction
from dit_graph.state import blockers, view, watched, watcher
from dit_graph.state.contents import Contents
from dit_graph.state.view import View
from dit_graph.state.watcher import StateWatcher
from dit_graph.tape import tape
from dit_graph.tape.tape import Break, InputView, Undo
from dit_graph.tape.trees import tensors_of

Patch = pytest.MonkeyPatch
Switch = Callable[[Patch], None]


def replaced(owner: Any, name: str, value: Any) -> Switch:
    """The rule is one function or constant, and this stands in its place."""
    return lambda patch: patch.setattr(owner, name, value)


# ---- memory


_RECYCLED = Arena()


def recycled(t: Any) -> Any:
    """The address of memory that went back to its allocator, with what is written there then."""
    if not isinstance(t, torch.Tensor):
        return t
    block = _RECYCLED.allocate(t.untyped_storage().nbytes())
    twin = torch.empty(0, dtype=t.dtype)
    return weak(twin.set_(block.untyped_storage(), t.storage_offset(), t.shape, t.stride()))


def no_input_of_a_break_is_owned(patch: Patch) -> None:
    real = Capture.eager

    def eager(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = real(self, *args, **kwargs)
        step: Any = self.tape.steps[-1]
        self.tape.steps[-1] = replace(step, leaves=list(map(recycled, step.leaves)))
        return out

    patch.setattr(Capture, "eager", eager)


no_home_for_results_of_breaks = replaced(Break, "_store", lambda *args: None)
survivors_unseen = replaced(Known, "survivors", lambda self, out: 0)


def results_share_a_buffer(patch: Patch) -> None:
    """Every replay puts its result where the last one was."""
    real = tape.own
    buffers: dict[int, torch.Tensor] = {}

    def own(leaf: Any) -> Any:
        copy = real(leaf)
        if not isinstance(leaf, torch.Tensor):
            return copy
        return buffers.setdefault(id(leaf), copy).copy_(leaf)

    patch.setattr(tape, "own", own)


addresses_unseen = replaced(View, "_at_now", lambda self: [])
own_arguments_cloned = replaced(InputView, "__call__", lambda self, live: live[self.index].clone())


def any_result_accepted(patch: Patch) -> None:
    real = homes.result_leaf

    def result_leaf(leaf: Any, *args: Any) -> Any:
        return real(leaf, *args) if isinstance(leaf, torch.Tensor) else leaf

    patch.setattr(capture, "result_leaf", result_leaf)


def constants_recycled(patch: Patch) -> None:
    """A launch reads Python data where the upload's staging block was."""
    real = Known.hold_operand

    def hold_operand(self: Any, t: torch.Tensor) -> torch.Tensor:
        return recycled(t) if self.kind(t) is Kind.CONSTANT else real(self, t)

    patch.setattr(Known, "hold_operand", hold_operand)


def live_host_values_frozen(patch: Patch) -> None:
    """A break keeps the host tensor that an earlier break made at capture."""
    real = Known.hold

    def hold(self: Any, value: Any) -> Any:
        frozen = isinstance(value, torch.Tensor) and self.kind(value) is Kind.LIVE
        return value.clone() if frozen else real(self, value)

    patch.setattr(Known, "hold", hold)


# ---- the key


def key_without(leave_out: Callable[[Any, Any], bool]) -> Switch:
    """Values for which `leave_out(path, leaf)` holds are no part of the key."""

    def switch(patch: Patch) -> None:
        real = Call.__init__

        def init(self: Any, arguments: Any, positional: Any, extra: Any) -> None:
            real(self, arguments, positional, extra)
            paths = [path for path, _ in pytree.tree_flatten_with_path(arguments)[0]]
            leaves = (
                (leaf[0], ()) if leave_out(path, leaf) else leaf
                for path, leaf in zip(paths, self.key.leaves)
            )  # fmt: skip
            self.key = GraphKey(self.key.spec, tuple(leaves), self.key.context)

        patch.setattr(Call, "__init__", init)

    return switch


floats_unkeyed = key_without(lambda path, leaf: leaf[0] is float and len(path) == 1)
nested_floats_unkeyed = key_without(lambda path, leaf: leaf[0] is float and len(path) > 1)
ints_unkeyed = key_without(lambda path, leaf: leaf[0] is int)
shapes_unkeyed = key_without(lambda path, leaf: leaf[0] == "tensor")
misses_unnamed = replaced(entry, "miss", lambda key, recorded: "")
dims_unnamed = replaced(misses, "_leaf", lambda name, a, b: [f"{name} is another"])
shapes_look_like_values = replaced(key, "_without_value", lambda leaf: leaf[:1])


def staging_only(stages: Callable[[str, Any, list[str]], bool]) -> Switch:
    """An argument for which `stages(name, value, positional)` is False is read where it was."""

    def switch(patch: Patch) -> None:
        def with_tensors(self: Any, tensors: list[torch.Tensor]) -> Any:
            supply, named = iter(tensors), {}
            for name, value in self.arguments.items():
                staged = [next(supply) for _ in tensors_of(value)]
                if stages(name, value, self.positional):
                    leaves, spec = pytree.tree_flatten(value)
                    parts = iter(staged)
                    leaves = [next(parts) if isinstance(v, torch.Tensor) else v for v in leaves]
                    value = pytree.tree_unflatten(leaves, spec)
                named[name] = value
            return [named.pop(name) for name in self.positional], named

        patch.setattr(Call, "with_tensors", with_tensors)

    return switch


only_top_level_staged = staging_only(lambda name, value, args: isinstance(value, torch.Tensor))
only_positional_staged = staging_only(lambda name, value, args: name in args)
masks_not_staged = staging_only(lambda name, value, args: not name.endswith("_mask"))


def captions_padded(patch: Patch) -> None:
    """Captions grow to a multiple of eight tokens, as a bucket would have them."""
    real = Signature.bind

    def bind(self: Any, args: Any, kwargs: dict[str, Any], extra: Any) -> Call:
        text = kwargs.get("encoder_hidden_states")
        if text is not None:
            room = -text.shape[1] % 8
            padded = torch.nn.functional.pad(text, (0, 0, 0, room))
            kwargs = kwargs | {"encoder_hidden_states": padded}
        return real(self, args, kwargs, extra)

    patch.setattr(Signature, "bind", bind)


# ---- Python state


def undescribed(kinds: tuple[type, ...]) -> Switch:
    """Two values of one of these types are no change of the module's state."""

    def switch(patch: Patch) -> None:
        real = Contents._value

        def value(self: Any, path: str, value: Any, plain: bool = True) -> Any:
            return type(value) if type(value) in kinds else real(self, path, value, plain)

        patch.setattr(Contents, "_value", value)

    return switch


def tensors_unseen(kind: type) -> Switch:
    """Neither which tensor of this type it is, nor where it lies."""

    def switch(patch: Patch) -> None:
        undescribed((kind,))(patch)
        real = watched.kind_of
        for where in (watched, view):
            patch.setattr(
                where, "kind_of", lambda v: watched.MORTAL if type(v) is kind else real(v)
            )

    return switch


new_parameters_unseen = tensors_unseen(torch.nn.Parameter)
new_tensors_unseen = tensors_unseen(torch.Tensor)
flags_and_numbers_unseen = undescribed((float, bool))
lists_unseen = undescribed((list,))


def growth_unseen(patch: Patch) -> None:
    real = View.is_same

    def is_same(self: Any) -> bool:
        grew = any(self._empty) or list(map(len, self._sized)) != self._sizes
        return grew or real(self)

    patch.setattr(View, "is_same", is_same)


def states_share_their_recordings(patch: Patch) -> None:
    real = StateWatcher._add

    def add(self: Any, *read: Any) -> None:
        real(self, *read)
        self.states[0].owned = self.states[-1].owned

    patch.setattr(StateWatcher, "_add", add)


def nothing_is_compared(patch: Patch) -> None:
    real = StateWatcher.compare
    patch.setattr(StateWatcher, "compare", lambda self: "" if self.states else real(self))


nothing_is_compared_after_a_launch = replaced(ReplayAction, "_check", lambda self: None)
moved_weights_unseen = replaced(View, "weights_stayed", lambda self: True)
own_writes_unseen = replaced(StateWatcher, "accept", lambda self: ([], []))


def step_caches_unseen(patch: Patch) -> None:
    """What a region hands out is memory that the next replay writes, though a cache keeps it."""
    patch.setattr(tape, "own", lambda leaf: getattr(leaf, "tensor", leaf))


def not_blocked_by(prefix: str) -> Switch:
    """One kind of blocker is overlooked."""

    def switch(patch: Patch) -> None:
        def blocker(*args: Any) -> str | None:
            reason = blockers.blocker(*args)
            return None if reason and reason.startswith(prefix) else reason

        patch.setattr(watcher, "blocker", blocker)

    return switch


# ---- host values, breaks and guards


tolist_unseen = replaced(calls, "_READS", calls._READS - {torch.Tensor.tolist})


def integers_always_match(patch: Patch) -> None:
    real = tape.matches
    patch.setattr(tape, "matches", lambda a, b: type(a) is type(b) is int or real(a, b))


scalars_frozen = replaced(Capture, "freeze_scalar", lambda self, t: True)
compiled_code_is_watched = replaced(breakable, "opaque", lambda fn: fn)
nothing_is_rolled_back = replaced(Undo, "roll_back", lambda self: None)
any_generator_accepted = replaced(Capture, "draws", lambda self, leaves: None)
a_variant_is_enough = replaced(Entry, "may_record_another", lambda self, most: False)
slots_are_not_checked = replaced(Install, "check", lambda self: None)
gradients_unseen = replaced(StateWatcher, "needs_grad", lambda self, tensors: False)


def breaks_see_the_first_call(patch: Patch) -> None:
    real, first = breaks.answering, {}

    def answering(arguments: Any) -> Any:
        return real(first.setdefault(frozenset(arguments), arguments))

    patch.setattr(breaks, "answering", answering)


def generators_not_taken_aside(patch: Patch) -> None:
    real = Undo.take
    patch.setattr(Undo, "take", lambda self, tensors, random: real(self, tensors, False))


# ---- memory of recordings, failures


generations_never_retire = replaced(Pool, "retire", lambda self, generation: None)
failed_captures_keep_memory = replaced(Pool, "close", lambda self, generation: None)
collection_goes_on = replaced(capture, "undisturbed", lambda: nullcontext(True))


def the_first_call_is_captured(patch: Patch) -> None:
    real = Entry.decide

    def decide(self: Any) -> Decision:
        self.warm = True
        return real(self)

    patch.setattr(Entry, "decide", decide)


def replay_errors_come_out(patch: Patch) -> None:
    def broken(self: Any, entry: Any, error: Exception, args: Any, kwargs: Any) -> Any:
        raise error

    patch.setattr(ReplayAction, "_broken", broken)


def breaks_hide_what_they_make(patch: Patch) -> None:
    """A tensor that leaves a break by another way than its result passes for one from outside."""
    real = Known.mark

    def mark(self: Any, t: torch.Tensor, kind: Kind, host: bool = False) -> None:
        if kind is not Kind.BREAK:
            real(self, t, kind, host)

    patch.setattr(Known, "mark", mark)
