"""Sequences one call: key, decision, copy in, capture or replay, result."""

import functools
import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dit_graph import breaks
from dit_graph.backends import backend_named
from dit_graph.buffers import StaticBuffers
from dit_graph.config import GraphConfig
from dit_graph.devices.base import is_out_of_memory
from dit_graph.entry import Decision, Entries, Entry
from dit_graph.errors import (
    BreakResultChanged,
    CaptureError,
    Conflict,
    DeviceFailed,
    GuardMismatch,
    NewShape,
    NotReplayed,
    Unkeyable,
)
from dit_graph.guards import host_generators
from dit_graph.key import Call, GraphKey, Signature, tensors_of
from dit_graph.modulewatch import ModuleWatcher
from dit_graph.pool import Pool
from dit_graph.proof import Gate, Proof, difference
from dit_graph.recent import RecentCalls
from dit_graph.state import Fingerprint
from dit_graph.tape import Tape, Undo, own
from dit_graph.varying import VaryingValues

log = logging.getLogger("dit_graph")
TIMED = "the gate times an eager call in a replay's place"


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
        self._recent = RecentCalls()
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
                self._say_eager(self.refused, "called inside another call")
                return self._original(*args, **kwargs)
            try:
                call = self._signature.bind(args, kwargs, self._extra_key)
                entry, decision = self._decide(call)
                self._recent.note(entry, decision.action == "replay")
                if entry is not None and decision.action != "eager":
                    act = getattr(self, f"_{decision.action}")
                    with self.pool.using(), breaks.live(call.arguments):
                        return act(entry, call, args, kwargs)
                reason = decision.reason
            except Unkeyable as error:
                reason = str(error)
        return self._eager(entry, reason, args, kwargs)

    @property
    def _extra_key(self) -> Callable[[dict[str, Any]], Any] | None:
        extra = self.config.extra_key
        return None if extra is None else functools.partial(extra, self._module)

    def _decide(self, call: Call) -> tuple[Entry | None, Decision]:
        self.pool.tick()
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
            decision = entry.decide()
            if decision.action == "eager":
                self.pool.sweep()
            return entry, decision
        if varies := self._varying.varying(call):
            return entry, Decision("eager", varies)
        if entry is None:
            if self.config.on_new_shape != "capture" and not self.warming:
                return None, self._new_shape(call.key)
            entry = self.entries.new(call.key, self._new_proof())
            if entry.differs:
                log.info("dit_graph: %s: new signature: %s", self.name, entry.differs)
        if entry.decide().action != "eager" and (change := self._state.changed_since()):
            self._invalidate(change)
        decision = entry.decide()
        if decision.action == "eager" or not self.pool.crowded:
            return entry, decision
        reason = self._recent.thrashing(entry, self.pool.idle)
        return entry, Decision("eager", reason) if reason else decision

    def _new_proof(self) -> Proof:
        times = self.config.gate == "measure" and self.pool.device.time_counts
        return Proof(self.config.verify, Gate(self.config.min_gain) if times else None)

    def _new_shape(self, key: GraphKey) -> Decision:
        differs = self.entries.miss(key)
        reason = f"not warmed up: {key.describe()}{differs and f' ({differs})'}"
        if self.config.on_new_shape == "error":
            self.refused[reason] += 1
            known = ", ".join(e.label for e in self.entries.values()) or "none"
            raise NewShape(f"{self.name}: {reason}; warmed up: {known}")
        return Decision("eager", reason)

    def _invalidate(self, change: str) -> None:
        if any(entry.tapes for entry in self.entries.values()):
            log.warning("dit_graph: %s: %s changed; recording again", self.name, change)
        self.entries.retire(unblock=not self._state.wrote(change))
        self.pool.sweep()

    # ---- the four actions

    def _eager(self, entry: Entry | None, reason: str, args: Any, kwargs: Any) -> Any:
        self._say_eager(self.refused if entry is None else entry.eager, reason)
        with breaks.live(self._signature.arguments(args, kwargs)):
            run = functools.partial(self._original, *args, **kwargs)
            return self._with_room(run, (args, kwargs))

    def _say_eager(self, counter: Counter[str], reason: str) -> None:
        """Count an eager call and log the first of each reason; under `strict` an error."""
        counter[reason] += 1
        if reason not in self._said:
            self._said.add(reason)
            log.warning("dit_graph: %s runs eagerly: %s", self.name, reason)
        if self.config.strict:
            raise NotReplayed(f"{self.name}: {reason}")

    def _with_room(self, run: Callable[[], Any], arguments: Any) -> Any:
        """Run an eager forward; where memory runs out, again without the recordings."""
        given = [*tensors_of(arguments), *self._module.buffers()]
        versions = [None if t.is_inference() else t._version for t in given]
        seeds = self._seeds()
        try:
            return run()
        except torch.OutOfMemoryError:
            moved = versions != [None if t.is_inference() else t._version for t in given]
            if moved or self._state.moved() or not self._free():
                raise
        self._reseed(seeds)
        return run()

    def _seeds(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _reseed(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states):
            generator.set_state(state)

    def _free(self) -> bool:
        """Give the memory of all recordings back, when memory has run out."""
        held = self.pool.release()
        if held:
            log.warning("dit_graph: %s: out of memory; all recordings let go", self.name)
            self.pool.device.trim()
        return held

    def _cold(self, entry: Entry, call: Call, args: Any, kwargs: Any) -> Any:
        entry.cold += 1
        before, drawn = self._state.known, host_generators(self._generators)

        def run() -> Any:
            with self.pool.device.stream():
                return self._original(*args, **kwargs)

        out = self._with_room(run, call.tensors)
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

    def _capture(
        self, entry: Entry, call: Call, args: Any, kwargs: Any, last_try: bool = False
    ) -> Any:
        started = time.perf_counter()
        before = self._state.known
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
            self._raise_if_failed(error, f"recording {entry.label}")
            capture.undo.roll_back()
            before.restore()
            traceback.clear_frames(error.__traceback__)  # their locals would look like survivors
            self._let_go(generation, capture.known.survivors(None))
            if is_out_of_memory(error) and not last_try and self._free():
                return self._capture(entry, call, args, kwargs, last_try=True)
            return self._failed(entry, error, args, kwargs)
        except BaseException:
            self.pool.close(generation)
            raise
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
            if (too_large := self.pool.fit(generation)) not in ("", "again"):
                entry.block(too_large)
            return
        self._let_go(generation, survivors)

    def _let_go(self, generation: Any, survivors: int) -> None:
        """Record no more into it; replays into it would write over what outlives a capture."""
        if survivors:
            self.pool.retire(generation)
        else:
            self.pool.close(generation)

    def _failed(self, entry: Entry, error: Exception, args: Any, kwargs: Any) -> Any:
        reason = str(error) if isinstance(error, CaptureError) else f"capture failed: {error!r}"
        if isinstance(error, Conflict):  # these arguments; others may do
            entry.unsettled(reason)
        else:
            entry.block(reason)
        if self.config.on_failure == "raise":
            raise error
        return self._eager(entry, reason, args, kwargs)

    def _raise_if_failed(self, error: Exception, doing: str) -> None:
        """After a device has failed for good nothing answers, an eager call neither."""
        if not isinstance(error, (CaptureError, BreakResultChanged)) and self.pool.device.failed():
            raise DeviceFailed(
                f"{self.name}: the device failed while {doing}: {error}; restart the process"
            ) from error

    def _replay(self, entry: Entry, call: Call, args: Any, kwargs: Any) -> Any:
        turn = entry.proof.turn(entry.tapes[0])
        if turn == "eager":
            entry.eager[TIMED] += 1
            run_eagerly = functools.partial(self._original, *args, **kwargs)
            in_place = functools.partial(self._with_room, run_eagerly, call.tensors)
            return self._timed("eager", entry, in_place)
        undo, live, mismatch = Undo(self._generators), call.tensors, ""
        seeds = self._seeds() if any(map(entry.proof.compares, entry.tapes)) else []
        for tape in tuple(entry.tapes):
            if conflict := tape.conflict(live):
                return self._eager(entry, conflict, args, kwargs)

            def run(tape: Tape = tape) -> Any:
                entry.static.copy_in(live)
                tape.run(undo)
                return tape.result(live)

            try:
                result = self._timed("replay", entry, run)
            except GuardMismatch as error:
                undo.roll_back()
                mismatch = error.place
                continue
            except Exception as error:
                self._raise_if_failed(error, f"replaying {entry.label}")
                undo.roll_back()
                return self._broken(entry, error, args, kwargs)
            entry.replays += 1
            entry.missed = 0
            entry.prefer(tape)
            self.pool.touch(tape.generation)
            entry.static.copy_back(live, tape.written_inputs)
            if entry.proof.compares(tape):
                self._reseed(seeds)
                return self._compared(entry, tape, result, args, kwargs)
            return result
        if not entry.may_record_another(self.config.max_variants):
            reason = f"another value at every call: {mismatch}"
            return self._eager(entry, reason, args, kwargs)
        return self._capture(entry, call, args, kwargs)

    def _timed(self, what: str, entry: Entry, run: Callable[[], Any]) -> Any:
        """Run it, with the device's clock while the gate is open."""
        gate = entry.proof.gate
        if gate is None or gate.decided:
            return run()
        timer = self.pool.device.timer()
        timer.start()
        out = run()
        timer.stop()
        (gate.replay if what == "replay" else gate.eager).append(timer)
        return out

    def _compared(self, entry: Entry, tape: Tape, result: Any, args: Any, kwargs: Any) -> Any:
        """Answer with eager's result, and keep the recording only if it gave the same bits."""
        tape.compared = True
        try:
            expected = self._original(*args, **kwargs)
        except torch.OutOfMemoryError:  # eager's memory and the recording's do not fit together
            entry.proof.left_out = "not compared: out of memory"
            return result
        if differs := difference(result, expected):
            entry.block(f"verify: the replay differs from eager: {differs}")
            log.warning("dit_graph: %s: %s: %s", self.name, entry.label, entry.blocked)
            self.pool.sweep()
        else:
            entry.proof.compared += 1
        return expected

    def _broken(self, entry: Entry, error: Exception, args: Any, kwargs: Any) -> Any:
        """A replay raised: the call is eager's, and a recording that is broken goes."""
        if self.config.on_failure == "raise":
            raise error
        if isinstance(error, BreakResultChanged):
            reason = f"a marked break's result changed: {error.place}"
        else:
            reason = f"replay failed: {error!r}"
            entry.retire()
            self.pool.sweep()
        return self._eager(entry, reason, args, kwargs)

    def _say_unmatched(self, matched: set[str]) -> None:
        for pattern in set(self.config.breaks) - matched - self._said:
            self._said.add(pattern)
            log.warning("dit_graph: %s: breaks pattern %r matches nothing", self.name, pattern)
