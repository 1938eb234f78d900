"""Sequences one call: key, decision, and the action that it names."""

import functools
import importlib
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

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


class Runner:
    """Answers the calls of one module: key, decision, and one of three actions or the fallback."""

    def __init__(self, target: Target) -> None:
        self.target = target
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
        with self.pool.lock:
            self.target.tally.calls += 1
            if self.pool.busy:  # the lock lets its own thread in; two replays must not interleave
                self._fallback.say(self.refused, "called inside another call")
                return self._plain(args, kwargs)
            if self.closed:  # disabled while this call waited
                self.refused["disabled"] += 1
                return self._plain(args, kwargs)
            self.target.state.begin()
            while True:
                try:
                    call = self.target.signature.bind(args, kwargs, self._extra_key)
                    entry, decision = self._decide(call)
                except Unkeyable as error:
                    decision = Decision("eager", str(error))
                except DitGraphError:  # meant for the caller
                    raise
                except Exception as error:
                    decision = Decision("eager", self.own_error(error))
                if entry is None or decision.action == "eager":
                    break
                try:
                    with self.pool.using(), breaks.answering(call.arguments):
                        return self._actions[decision.action](entry, call, args, kwargs)
                except StateChanged:  # once at most: the state is compared now
                    entry.counts.dropped += 1
        return self._fallback(entry, decision.reason, args, kwargs)

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
        with breaks.answering(self.target.signature.arguments(args, kwargs)):
            return self.target.original(*args, **kwargs)

    def close(self) -> None:
        """No recording is made or used after this."""
        with self.pool.lock:
            self.closed = True
            for _, entry in self.target.every_entry():
                entry.retire()

    def _decide(self, call: Call) -> tuple[Entry | None, Decision]:
        self.pool.tick()
        if not self._backend.records:
            return None, Decision("eager", f"backend {self._backend.name}")
        state = self.target.state
        entry = self._entry_of(call) if state.may_wait else None
        if entry is None or not entry.may_wait:
            self._same_state()
            entry = self._entry_of(call)
        if blocked := state.blocker:
            return None, Decision("eager", blocked)
        if torch.is_grad_enabled() and state.needs_grad(call.tensors):
            return None, Decision("eager", "gradients are needed; call it under torch.no_grad()")
        if entry is not None and entry.tapes:
            self._recent.note(entry, replayed=True)
            decision = entry.decide()
            if decision.action == "eager":
                self.pool.sweep()
            return entry, decision
        self._recent.note(entry, replayed=False)
        if reason := self._varying.varying(call) or state.unsteady:
            return entry, Decision("eager", reason)
        if entry is None:
            if self.target.config.on_new_shape != "capture" and not self.warming:
                return None, self._new_shape(call.key)
            entry = self.target.entries.new(call.key, self._new_proof())
            if entry.differs:
                log.info("dit_graph: %s: new signature: %s", self.target.name, entry.differs)
        decision = entry.decide()
        entry.goes_by(decision)
        if decision.action == "eager" or not self.pool.crowded:
            return entry, decision
        reason = self._recent.thrashing(entry, self.pool.idle)
        return entry, Decision("eager", reason) if reason else decision

    def _entry_of(self, call: Call) -> Entry | None:
        return self.target.entries.get(call.key)

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
        recorded = bool(state.states) and self.target.entries.recorded
        change = state.compare()
        if change and not self.target.entries:
            level = logging.WARNING if recorded else logging.DEBUG
            log.log(level, "dit_graph: %s: %s changed; recording again", self.target.name, change)
            self._recent.clear()
        if change:
            self.pool.sweep()
        return not change
