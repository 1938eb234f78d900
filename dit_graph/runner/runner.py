"""Sequences one call: key, decision, and the action that it names."""

import functools
import importlib
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from dit_graph import breaks
from dit_graph.backends import backend_named
from dit_graph.call.key import Call, GraphKey
from dit_graph.call.varying import VaryingValues
from dit_graph.errors import DitGraphError, NewShape, StateChanged, Unkeyable
from dit_graph.memory.pool import Pool
from dit_graph.memory.recent import RecentCalls
from dit_graph.runner.entry import Decision, Entry
from dit_graph.runner.fallback import Fallback
from dit_graph.runner.proof import Gate, Proof
from dit_graph.runner.record import CaptureAction
from dit_graph.runner.replay import ReplayAction
from dit_graph.runner.target import Target
from dit_graph.state.blockers import mode_around

log = logging.getLogger("dit_graph")
INSIDE = "part of a recording around it"


class Regions(Protocol):
    """What a runner asks of the regions of its module, while they answer in the whole's place."""

    @property
    def cache(self) -> str: ...
    def look(self) -> bool: ...
    def refresh(self) -> None: ...
    def unrested(self) -> str: ...
    def holds(self, place: str) -> bool: ...
    def answer(
        self, entry: Entry | None, new: Callable[[], Entry], key: GraphKey | None, reason: str,
        args: Any, kwargs: Any,
    ) -> Any: ...  # fmt: skip
    def close(self) -> None: ...


class Runner:
    """Answers the calls of one module: key, decision, and one of three actions or the fallback.

    Args:
        regions: what answers where the module as a whole cannot be recorded; None where nothing
            does.
    """

    def __init__(self, target: Target, regions: Regions | None = None) -> None:
        self.target = target
        self.regions = regions
        self.warming = False
        self.closed = False
        self._backend = backend_named(target.config.backend)
        # torch imports it for the first dispatch mode, which would be inside of a capture
        importlib.import_module("torch._dynamo")
        self._varying = VaryingValues()
        self._recent = RecentCalls()
        self._fallback = Fallback(target)
        self._recording = recording = CaptureAction(target, self._fallback)
        self._actions: dict[str, Callable[..., Any]] = {
            "cold": recording.cold,
            "capture": recording.capture,
            "replay": ReplayAction(target, self._fallback, recording, self._same_state),
        }
        extra = target.config.extra_key
        self._extra_key = None if extra is None else functools.partial(extra, target.module)
        # what stands for calls that no key stands for
        self._keyless = Entry("arguments that vary", counts=target.tally.of(None))

    @property
    def pool(self) -> Pool:
        return self.target.pool

    @property
    def entries(self) -> dict[GraphKey, Entry]:
        """Of the state that the module is in."""
        return self.target.entries if self.target.state.states else {}

    @property
    def unmatched(self) -> set[str]:
        return self._recording.unmatched

    @property
    def refused(self) -> Counter[str]:
        """Eager calls that no entry stands for, by reason."""
        return self._fallback.refused

    @property
    def said(self) -> set[str]:
        """What was logged: the reasons of eager calls that are not meant to be eager, and more."""
        return self._fallback.said

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if reason := self.passes_by():
            plain = functools.partial(self._plain, args, kwargs)
            return self.refuse(reason, plain, expected=reason == INSIDE)
        entry: Entry | None = None
        call: Call | None = None
        with self.pool.lock:
            self.target.tally.calls += 1
            if self.pool.busy:  # the lock lets its own thread in; two replays must not interleave
                self._fallback.say(self.refused, "called inside another call")
                return self._plain(args, kwargs)
            if self.closed:  # disabled while this call waited
                self.refused["disabled"] += 1
                return self._plain(args, kwargs)
            looks = self.regions is None or self.regions.look()
            if looks:
                self.target.state.begin()
            while True:
                call = None
                try:
                    call = self.target.signature.bind(args, kwargs, self._extra_key)
                    entry, decision = self._decide(call) if looks else self._divided(call)
                except Unkeyable as error:
                    decision = Decision("eager", str(error), divides=True)
                except DitGraphError:  # meant for the caller
                    raise
                except Exception as error:
                    decision = Decision("eager", self.own_error(error))
                if call is None or entry is None or decision.action == "eager":
                    break
                try:
                    with self.pool.using(), self._known(call.arguments):
                        return self._actions[decision.action](entry, call, args, kwargs)
                except StateChanged:  # once at most: the state is compared now
                    entry.counts.dropped += 1
        if decision.divides and self.regions is not None and not self.target.has_collectives:
            new = functools.partial(self._new_entry, call)
            key = None if call is None else call.key
            return self.regions.answer(entry, new, key, decision.reason, args, kwargs)
        return self._fallback(entry, decision.reason, args, kwargs)

    def _known(self, arguments: Any) -> AbstractContextManager[None]:
        """Have `current_call()` give a call's arguments; in a region those of the whole call."""
        return breaks.answering(arguments) if self.target.shared is None else nullcontext()

    def _divided(self, call: Call) -> tuple[Entry | None, Decision]:
        """The decision that was made when the whole module was looked at last."""
        entry = self._entry_of(call)
        if entry is not None and entry.divided is not None:
            return entry, Decision("eager", entry.divided.reason, divides=True)
        self.target.state.begin()
        return self._decide(call)

    def passes_by(self) -> str:
        """Why a call is not to be looked at at all, or an empty string."""
        if breaks.capturing() or breaks.local.cold or self.pool.device.capturing():
            return INSIDE
        return mode_around()

    def own_error(self, error: Exception) -> str:
        """The reason of a call at which our own bookkeeping failed."""
        return self._fallback.own_error(error)

    def refuse(self, reason: str, run: Callable[[], Any], expected: bool = False) -> Any:
        """Count a call that stays eager before it has a key, and run it.

        `expected`: it is meant to be eager, so that it is neither logged nor an error.
        """
        with self.pool.lock:
            self.target.tally.calls += 1
            if expected:
                self.refused[reason] += 1
            else:
                self._fallback.say(self.refused, reason)
        return run()

    def _plain(self, args: Any, kwargs: Any) -> Any:
        with self._known(self.target.signature.arguments(args, kwargs)):
            return self.target.original(*args, **kwargs)

    def close(self) -> None:
        """No recording is made or used after this."""
        with self.pool.lock:
            self.closed = True
            for _, entry in self.target.every_entry():
                entry.retire()
            if self.regions is not None:
                self.regions.close()

    def _decide(self, call: Call) -> tuple[Entry | None, Decision]:
        if self.target.shared is None:
            self.pool.tick()
        if not self._backend.records:
            return None, Decision("eager", f"backend {self._backend.name}")
        state = self.target.state
        if self._cached() and state.states:
            return self._entry_of(call), Decision("eager", self._cached(), divides=True)
        entry = self._entry_of(call) if state.may_wait else None
        if entry is None or not entry.may_wait:
            self._same_state()
            entry = self._entry_of(call)
            if self._cached():
                return entry, Decision("eager", self._cached(), divides=True)
        if blocked := state.blocker:
            return None, Decision("eager", blocked, divides=blocked == state.now.blocker)
        if torch.is_grad_enabled() and state.needs_grad(call.tensors):
            return None, Decision("eager", "gradients are needed; call it under torch.no_grad()")
        if entry is not None and entry.tapes:
            self._recent.note(entry, replayed=True)
            decision = entry.decide()
            if decision.action == "eager":
                self.pool.sweep()
            return entry, decision
        self._recent.note(entry, replayed=False)
        if self.target.config.regions == "blocks" and self.regions is not None:
            return entry, Decision("eager", 'regions="blocks"', divides=True)
        if reason := self._varying.varying(call):
            return entry, Decision("eager", reason, divides=True)
        if place := state.unsteady:
            reason = f"Python state changes at every call: {place}"
            divides = self.regions is not None and not self.regions.holds(place)
            return entry, Decision("eager", reason, divides)
        if self.regions is not None and (reason := self.regions.unrested()):
            return entry, Decision("eager", reason, divides=True)
        if entry is None:
            if self.target.config.on_new_shape != "capture" and not self.warming:
                return None, self._new_shape(call.key)
            entry = self._new_entry(call)
            if entry.differs:
                log.info("dit_graph: %s: new signature: %s", self.target.name, entry.differs)
        decision = entry.decide()
        entry.goes_by(decision)
        if decision.action == "eager" or not self.pool.crowded:
            return entry, decision
        reason = self._recent.thrashing(entry, self.pool.idle)
        return entry, Decision("eager", reason) if reason else decision

    def _cached(self) -> str:
        return "" if self.regions is None else self.regions.cache

    def _entry_of(self, call: Call) -> Entry | None:
        return self.target.entries.get(call.key)

    def _new_entry(self, call: Call | None) -> Entry:
        if call is None:
            return self._keyless
        return self.target.entries.new(call.key, self._new_proof())

    def _new_proof(self) -> Proof:
        times = self.target.config.gate == "measure" and self.target.config.verify != "always"
        times = times and self.pool.device.time_counts
        return Proof(
            self.target.config.verify, Gate(self.target.config.min_gain) if times else None
        )

    def _new_shape(self, key: GraphKey) -> Decision:
        differs = self.target.entries.miss(key)
        reason = f"not warmed up: {key.describe()}{differs and f' ({differs})'}"
        if self.target.config.on_new_shape == "error":
            self.refused[reason] += 1
            known = ", ".join(e.label for e in self.target.entries.values()) or "none"
            raise NewShape(f"{self.target.name}: {reason}; warmed up: {known}")
        return Decision("eager", reason)

    def _same_state(self) -> bool:
        """Compare the module with the state that it was in; it may be in another one from now on.

        Looks once in a call: whether nothing had changed, or had changed before.
        """
        state = self.target.state
        if state.compared:
            return True
        first = not state.states
        recorded = not first and self.target.entries.recorded
        change = state.compare()
        if (first or (change and not self.target.entries)) and self.regions is not None:
            self.regions.refresh()
        if change and not self.target.entries:
            level = logging.WARNING if recorded else logging.DEBUG
            log.log(level, "dit_graph: %s: %s changed; recording again", self.target.name, change)
            self._recent.clear()
        if change:
            self.pool.sweep()
        return not change
