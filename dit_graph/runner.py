"""Sequences one call: key, decision, copy in, capture or replay, result."""

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dit_graph import breaks
from dit_graph.backends import backend_named
from dit_graph.buffers import StaticBuffers
from dit_graph.config import GraphConfig
from dit_graph.entry import Decision, Entries, Entry
from dit_graph.errors import (
    BreakResultChanged,
    CaptureError,
    Conflict,
    GuardMismatch,
    NewShape,
    Unkeyable,
)
from dit_graph.guards import host_generators
from dit_graph.key import Call, GraphKey, Signature
from dit_graph.modulewatch import ModuleWatcher
from dit_graph.pool import Pool
from dit_graph.state import Fingerprint
from dit_graph.tape import Tape, Undo, own
from dit_graph.varying import VaryingValues

log = logging.getLogger("dit_graph")


class Runner:
    """Answers the calls of one module.

    Args:
        module: whose forward it is.
        original: the forward that was there before.
        pictures: counts the pictures that were begun; None where nothing says so.
    """

    def __init__(
        self,
        name: str,
        module: torch.nn.Module,
        original: Callable[..., Any],
        signature: Signature,
        config: GraphConfig,
        pool: Pool,
        pictures: Callable[[], int | None],
    ) -> None:
        self.name = name
        self.config = config
        self.pool = pool
        self.entries = Entries()
        self.calls = 0
        self.refused: Counter[str] = Counter()  # eager calls that no entry stands for
        self.warming = False
        self._module = module
        self._original = original
        self._backend = backend_named(config.backend)
        self._signature = signature
        self._varying = VaryingValues()
        self._state = ModuleWatcher(module, pool.device.on, pictures)
        self._generators = pool.device.generators()
        self._said: set[str] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if breaks.capturing() or self.pool.device.capturing():
            self.calls += 1
            self.refused["part of a recording around it"] += 1
            return self._original(*args, **kwargs)
        entry: Entry | None = None
        with self.pool.lock:
            self.calls += 1
            if self.pool.busy:  # the lock lets its own thread in; two replays must not interleave
                return self._eager(None, "called inside another call", args, kwargs)
            try:
                call = self._signature.bind(args, kwargs)
                entry, decision = self._decide(call)
                if entry is not None and decision.action != "eager":
                    act = getattr(self, f"_{decision.action}")
                    with self.pool.using(), breaks.live(call.arguments):
                        return act(entry, call, args, kwargs)
                reason = decision.reason
            except Unkeyable as error:
                reason = str(error)
        return self._eager(entry, reason, args, kwargs)

    def _decide(self, call: Call) -> tuple[Entry | None, Decision]:
        if not self._backend.records:
            return None, Decision("eager", f"backend {self._backend.name}")
        if change := self._state.changed():
            self._invalidate(change)
        if self._state.blocker:
            return None, Decision("eager", self._state.blocker)
        if torch.is_grad_enabled() and self._state.needs_grad(call.tensors):
            return None, Decision("eager", "gradients are needed; call it under torch.no_grad()")
        entry = self.entries.get(call.key)
        if entry is not None and entry.tapes:
            return entry, Decision("replay")
        if varies := self._varying.varying(call):
            return entry, Decision("eager", varies)
        if entry is None:
            if self.config.on_new_shape != "capture" and not self.warming:
                return None, self._new_shape(call.key)
            entry = self.entries.new(call.key)
        return entry, entry.decide()

    def _new_shape(self, key: GraphKey) -> Decision:
        reason = f"not warmed up: {key.describe()}"
        if self.config.on_new_shape == "error":
            self.refused[reason] += 1
            known = ", ".join(e.label for e in self.entries.values()) or "none"
            raise NewShape(f"{self.name}: {reason}; warmed up: {known}")
        return Decision("eager", reason)

    def _invalidate(self, change: str) -> None:
        if any(entry.tapes for entry in self.entries.values()):
            log.warning("dit_graph: %s: %s changed; recording again", self.name, change)
        self.entries.retire(unblock=not self._state.wrote(change))

    # ---- the four actions

    def _eager(self, entry: Entry | None, reason: str, args: Any, kwargs: Any) -> Any:
        (self.refused if entry is None else entry.eager)[reason] += 1
        if reason not in self._said:
            self._said.add(reason)
            log.warning("dit_graph: %s runs eagerly: %s", self.name, reason)
        arguments = {self._signature.name(i): value for i, value in enumerate(args)} | kwargs
        with breaks.live(arguments):
            return self._original(*args, **kwargs)

    def _cold(self, entry: Entry, call: Call, args: Any, kwargs: Any) -> Any:
        entry.cold += 1
        before, drawn = Fingerprint(self._module), host_generators(self._generators)
        with self.pool.device.stream():
            out = self._original(*args, **kwargs)
        entry.warm = True
        if call.changed_containers():
            entry.block("the forward changes a list or dict that it is given")
        if host_generators(self._generators) != drawn:
            entry.block("the forward draws from Python's or numpy's generator, or seeds one")
        if repeated := self._accept(before):
            entry.block(f"the forward writes Python state: {repeated[0]}")
        return self._owned(out, call)

    def _accept(self, before: Fingerprint) -> list[str]:
        """Take over what a forward wrote into Python state; returns what it wrote before, too.

        Other recordings stand on the state before it, unless a memo table only grew.
        """
        changes, grew = before.changes(), before.only_grew()
        if changes and not grew:
            self.entries.forget_recordings()
        return self._state.accept(changes)

    def _owned(self, out: Any, call: Call) -> Any:
        """The caller's own copy; what aliases an argument or the module stays what it is."""
        known = {t.untyped_storage()._cdata for t in [*call.tensors, *self._state.tensors()]}
        return pytree.tree_map_only(
            torch.Tensor, lambda t: t if t.untyped_storage()._cdata in known else own(t), out
        )

    def _capture(self, entry: Entry, call: Call, args: Any, kwargs: Any) -> Any:
        started = time.perf_counter()
        before = Fingerprint(self._module)
        generation = self.pool.generation()
        if entry.static is None:
            with torch.inference_mode(False):  # so that writes into them are counted
                entry.static = StaticBuffers(call.tensors)
        static = entry.static.tensors
        entry.static.copy_in(call.tensors)
        capture = self._backend.capture(
            self.pool.device, generation.memory, static, self._module, self.config
        )
        try:
            with self.pool.device.stream():
                live = call.with_tensors(static)
                out = self._backend.record(
                    capture, self._module, self._original, *live, self.config
                )
                out = capture.finish(out)
            tape = capture.tape
            entry.static.check_writable(tape.written_inputs)
            conflict = tape.conflict(call.tensors)
            if conflict:
                raise Conflict(conflict)
        except Exception as error:
            capture.undo.roll_back()
            before.restore()
            return self._failed(entry, generation, error, args, kwargs)
        entry.captures += 1
        self._say_unmatched(capture.matched)
        result = tape.result(call.tensors)
        entry.static.copy_back(call.tensors, tape.written_inputs)
        entry.capture_seconds += time.perf_counter() - started
        survivors = capture.known.survivors(out)
        self._keep(entry, generation, tape, before, survivors)
        return result

    def _keep(
        self, entry: Entry, generation: Any, tape: Tape, before: Fingerprint, survivors: int
    ) -> None:
        """File the recording, unless what it stands on is not fixed."""
        changes = before.changes()
        repeated = self._accept(before)
        if repeated:
            entry.block(f"the forward writes Python state: {repeated[0]}")
        elif changes or survivors:
            what = changes[0] if changes else f"{survivors} tensors"
            entry.unsettled(f"what the forward makes outlives the call: {what}")
        elif tape.unrestartable:
            entry.block(tape.unrestartable)
        else:
            entry.tapes.insert(0, tape)
            for surplus in entry.tapes[self.config.max_variants :]:
                entry.forget(surplus)
            tape.generation = generation
            generation.held.append((entry, tape))
            return
        self.pool.close(generation)

    def _failed(
        self, entry: Entry, generation: Any, error: Exception, args: Any, kwargs: Any
    ) -> Any:
        reason = str(error) if isinstance(error, CaptureError) else f"capture failed: {error!r}"
        if isinstance(error, Conflict):  # these arguments; others may do
            entry.unsettled(reason)
        else:
            entry.block(reason)
        self.pool.close(generation)
        if self.config.on_failure == "raise":
            raise error
        return self._eager(entry, reason, args, kwargs)

    def _replay(self, entry: Entry, call: Call, args: Any, kwargs: Any) -> Any:
        undo, live, mismatch = Undo(self._generators), call.tensors, ""
        for tape in tuple(entry.tapes):
            if conflict := tape.conflict(live):
                return self._eager(entry, conflict, args, kwargs)
            entry.static.copy_in(live)
            try:
                tape.run(undo)
            except GuardMismatch as error:
                undo.roll_back()
                mismatch = error.place
                continue
            except Exception as error:
                undo.roll_back()
                return self._broken(entry, error, args, kwargs)
            entry.replays += 1
            entry.missed = 0
            entry.prefer(tape)
            self.pool.touch(tape.generation)
            result = tape.result(live)
            entry.static.copy_back(live, tape.written_inputs)
            return result
        if not entry.may_record_another(self.config.max_variants):
            reason = f"another value at every call: {mismatch}"
            return self._eager(entry, reason, args, kwargs)
        return self._capture(entry, call, args, kwargs)

    def _broken(self, entry: Entry, error: Exception, args: Any, kwargs: Any) -> Any:
        """A replay raised: the call is eager's, and a recording that is broken goes."""
        if self.config.on_failure == "raise":
            raise error
        if isinstance(error, BreakResultChanged):
            reason = f"a marked break's result changed: {error.place}"
        else:
            reason = f"replay failed: {error!r}"
            entry.retire()
        return self._eager(entry, reason, args, kwargs)

    def _say_unmatched(self, matched: set[str]) -> None:
        for pattern in set(self.config.breaks) - matched - self._said:
            self._said.add(pattern)
            log.warning("dit_graph: %s: breaks pattern %r matches nothing", self.name, pattern)
