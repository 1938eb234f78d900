"""A key's first two calls: warmed up, then recorded; and when a recording may be kept."""

import logging
import threading
import time
import traceback
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from dit_graph import breaks
from dit_graph.backends import backend_named
from dit_graph.call.context import context
from dit_graph.call.key import Call
from dit_graph.capture.capture import Capture
from dit_graph.capture.frames import raised_in
from dit_graph.devices.base import is_about_capturing, is_out_of_memory
from dit_graph.errors import CaptureError, Collective, Conflict, DitGraphError, NotReplayed
from dit_graph.runner.entry import Entry
from dit_graph.runner.fallback import Fallback
from dit_graph.runner.proof import difference
from dit_graph.runner.target import Graphed
from dit_graph.state.fingerprint import Fingerprint
from dit_graph.tape.buffers import StaticBuffers
from dit_graph.tape.guards import DeviceNumber, host_generators
from dit_graph.tape.tape import Tape, own
from dit_graph.tape.trees import is_size, tensors_of

MAX_THREADS = 8  # that warm up for one key before it is said that they never stay
NEW_THREADS = "every call comes from a new thread; record from one that stays, or use warmup()"
log = logging.getLogger("dit_graph")


class Recording:
    """Warms up and records the calls of one module."""

    def __init__(self, on: Graphed, fallback: Fallback) -> None:
        self._on = on
        self._fallback = fallback
        self._backend = backend_named(on.config.backend)
        self._thread = threading.local()
        self.unmatched: set[str] = set()  # patterns of the config that were no break

    def cold(self, entry: Entry, call: Call, args: Any, kwargs: Any) -> Any:
        entry.counts.cold += 1
        before, drawn = self._on.state.known, host_generators(self._on.generators)

        def run() -> Any:
            with self._on.pool.device.stream(), breaks.warming():
                return self._on.original(*args, **kwargs)

        out = self._fallback.with_room(run, call.tensors)
        try:
            return self._warmed(entry, call, before, drawn, out)
        except Exception as error:  # the answer is there all the same
            entry.block(self._fallback.own_error(error))
            return out

    def _warmed(self, entry: Entry, call: Call, before: Fingerprint, drawn: Any, out: Any) -> Any:
        """What a cold call shows of its signature; returns the caller's own result."""
        entry.warm = self._thread.warm = True
        now = context(call.key.context.extra_key)
        if now != call.key.context and not entry.tapes:
            self._on.entries.settle(call.key, now)
        if call.changed_containers():
            entry.block("the forward changes a list, dict or array that it is given")
        if host_generators(self._on.generators) != drawn:
            entry.unsettled("the forward draws from Python's or numpy's generator, or seeds one")
        if repeated := self._accept(before):
            entry.block(f"the forward writes Python state: {repeated[0]}")
        theirs = {t.untyped_storage()._cdata for t in [*call.tensors, *self._on.state.tensors()]}
        made = [t for t in tensors_of(out) if t.untyped_storage()._cdata not in theirs]
        if any(t.is_inference() for t in made) and not torch.is_inference_mode_enabled():
            entry.block("the forward turns inference mode on by itself; turn it on around the call")
        return self._owned(out, made)

    def _accept(self, before: Fingerprint) -> list[str]:
        """Take over what a forward wrote into Python state; returns what it wrote before, too.

        Other recordings stand on the state before it, unless a memo table only grew.
        """
        changes, grew = before.changes(), before.only_grew()
        if changes and not grew:
            self._on.entries.forget_recordings()
        return self._on.state.accept(changes)

    def _owned(self, out: Any, made: list[torch.Tensor]) -> Any:
        """The caller's own copies of what was `made`; what aliases an argument or the module stays
        what it is."""
        if not made:
            return out
        new = set(map(id, made))
        copied = pytree.tree_map_only(
            torch.Tensor, lambda t: own(t) if id(t) in new else t, out, is_leaf=is_size
        )
        with self._on.pool.device.stream():
            pass  # whoever gets the memory of `made` there next waits until it has been copied
        return copied

    def capture(
        self, entry: Entry, call: Call, args: Any, kwargs: Any, last_try: bool = False
    ) -> Any:
        if not getattr(self._thread, "warm", False):
            # libraries keep handles per thread, and none can be made inside a capture
            entry.threads += 1
            if entry.threads > MAX_THREADS:
                self._thread.warm = True  # by the eager call
                return self._fallback(entry, NEW_THREADS, args, kwargs)
            return self.cold(entry, call, args, kwargs)
        entry.threads = 0
        started = time.perf_counter()
        try:
            before, seeds = self._on.state.known, self._on.seeds()
            generation = self._on.pool.generation()
        except Exception as error:
            return self._fallback(entry, self._fallback.own_error(error), args, kwargs)
        capture: Capture | None = None
        try:
            static = self._staged(entry, call)
            capture = self._backend.capture(
                self._on.pool.device, generation.memory, static.tensors, self._on.module,
                self._on.config,
            )  # fmt: skip
            capture.stays_out = self._on.stays_out
            out = self._run(capture, static, call)
            result = capture.tape.result(call.tensors)
        except Exception as error:
            raised = capture is not None and raised_by_the_forward(error, capture.tape)
            self._fallback.raise_if_failed(error, f"recording {entry.label}")
            if capture is not None:
                capture.effects.undo.roll_back()
            before.restore()
            clear_frames(error)  # their locals would look like survivors
            self._let_go(generation, 0 if capture is None else capture.known.survivors(None))
            if raised:
                entry.raised(error)
                raise
            if is_out_of_memory(error) and not last_try and self._fallback.free():
                return self.capture(entry, call, args, kwargs, last_try=True)
            return self._failed(entry, error, capture, args, kwargs)
        except BaseException:
            entry.counts.eager["interrupted while it was recorded"] += 1
            self._on.pool.close(generation)
            raise
        entry.counts.captures += 1
        tape = capture.tape
        static.copy_back(call.tensors, tape.written_inputs)
        try:
            self._say_unmatched(capture)
            entry.capture_seconds += time.perf_counter() - started
            survivors = capture.known.survivors(out)
            self._keep(entry, generation, tape, before, survivors)
            self._on.pool.sweep()
            if tape not in entry.tapes or not entry.proof.compares(tape):
                return result
        except Exception as error:  # the answer is there all the same
            entry.block(self._fallback.own_error(error))
            self._on.pool.retire(generation)
            return result
        return self.compared("recording", entry, tape, result, seeds, args, kwargs)

    def _staged(self, entry: Entry, call: Call) -> StaticBuffers:
        """The call's arguments in the buffers of its entry, made for its first capture."""
        if entry.static is None:
            # Inference mode counts no writes. Memory from aside is never handed to a stream of the
            # caller's, which may run ahead of a replay on another one that still reads it.
            with torch.inference_mode(False), self._on.pool.device.stream():
                entry.static = StaticBuffers(call.tensors)
        static: StaticBuffers = entry.static
        static.copy_in(call.tensors)
        return static

    def compared(
        self, what: Literal["recording", "replay"], entry: Entry, tape: Tape, result: Any,
        seeds: Any, args: Any, kwargs: Any,
    ) -> Any:  # fmt: skip
        """Answer with eager's result, and keep the recording only if `result` has the same bits.

        `seeds`: where the generators stood before the call, if it draws.
        """
        after = self._on.seeds() if tape.draws else []
        self._on.reseed(seeds if tape.draws else [])
        try:
            expected = self._on.original(*args, **kwargs)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # eager's memory and the recording's do not fit together
            entry.proof.left_out = "not compared: out of memory"
            self._on.reseed(after)
            return result
        try:
            differs = difference(result, expected)
        except Exception as error:
            differs = self._fallback.own_error(error)
        if differs:
            reason = f"verify: the {what} differs from eager: {differs}"
            entry.block(reason)
            if what == "replay":
                entry.counts.replays -= 1
            else:
                entry.counts.captures -= 1
            self._on.pool.sweep()
            self._fallback.say(entry.counts.eager, reason)
        else:
            entry.proof.compared += 1
            entry.proof.has_run_eagerly()
        return expected

    def _run(self, capture: Capture, static: StaticBuffers, call: Call) -> Any:
        """The forward on the staged arguments, written down on the capture's tape.

        Raises:
            CaptureError: it cannot be recorded, or the tape does not fit this call's arguments.
        """
        on = self._on
        with on.pool.device.stream():
            live = call.with_tensors(static.tensors)
            out = self._backend.record(capture, on.module, on.original, *live, on.config)
            out = capture.finish(out)
        static.check_unmoved()
        static.check_writable(capture.tape.written_inputs)
        if conflict := capture.tape.conflict(call.tensors):
            raise Conflict(conflict)
        return out

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
            entry.keep(tape)
            for surplus in entry.tapes[self._on.config.max_variants :]:
                entry.forget(surplus)
            tape.generation = generation
            generation.held.append((entry, tape))
            fits, reason = self._on.pool.fit(generation)
            if fits == "later":
                entry.pause(reason)
            elif fits == "never":
                entry.block(reason)
            return
        self._let_go(generation, survivors)

    def _let_go(self, generation: Any, survivors: int) -> None:
        """Record no more into it; replays into it would write over what outlives a capture."""
        if survivors:
            self._on.pool.retire(generation)
        else:
            self._on.pool.close(generation)

    def _failed(
        self, entry: Entry, error: Exception, capture: Capture | None, args: Any, kwargs: Any
    ) -> Any:
        """The eager answer, once a capture is undone. An operation that works there and that no
        segment takes is a break in the next capture."""
        if log.isEnabledFor(logging.DEBUG):  # as text: a handler must not keep what the frames hold
            text = "".join(traceback.format_exception(error))
            log.debug("dit_graph: %s: capture failed\n%s", self._on.name, text)
        ours = isinstance(error, CaptureError)
        reason = str(error) if ours else f"capture failed: {brief(error)}"
        refused, where = (capture and capture.refused) or (None, "")
        if refused is not None:
            reason += f" in {refused} at {where}"
        learns = capture is not None and callable(refused) and capture.breakable
        self._on.talks |= isinstance(error, Collective)
        of_compiled = isinstance(refused, str)  # what it lacked is compiled in the eager answer
        if of_compiled or isinstance(error, Conflict):  # these arguments; others may do
            entry.unsettled(reason)
        elif learns and self._on.config.on_failure == "eager":
            self._on.pool.sweep()
            self._on.stays_out.add(refused)
            try:
                return self._fallback(entry, f"{reason}; a break from now on", args, kwargs)
            except NotReplayed:  # under strict; the next call records it
                raise
            except Exception:  # the operation's own error
                self._on.stays_out.discard(refused)
                raise
        elif is_out_of_memory(error):  # what else needs it now may be gone later
            entry.retire()
            entry.pause(reason)
        elif ours or is_about_capturing(error):
            entry.block(reason)
        else:  # the forward's own, such as two shapes that do not go together
            entry.unsettled(reason)
        self._on.pool.sweep()
        if self._on.config.on_failure == "raise":
            entry.counts.eager[reason] += 1
            raise error
        return self._fallback(entry, reason, args, kwargs)

    def _say_unmatched(self, capture: Capture) -> None:
        for pattern in set(self._on.config.breaks) - capture.matched - self._fallback.said:
            self._fallback.said.add(pattern)
            what = "nothing"
            if pattern in capture.placed:
                what = "no module that this recording runs outside of compiled code"
            self.unmatched.add(f"breaks pattern {pattern!r} matches {what}")
            log.warning("dit_graph: %s: breaks pattern %r matches %s", self._on.name, pattern, what)


def raised_by_the_forward(error: BaseException, tape: Tape) -> bool:
    """Whether it is the forward's own error, which eager would raise as well.

    Not where it may come of the recording: from our code or torch's, from an error about capturing
    or about memory, or from a number that a stand-in took the place of.
    """
    if not raised_in(error) or is_out_of_memory(error):
        return False
    if any(type(home) is DeviceNumber for step in tape.breaks() for home in step.homes):
        return False
    led: BaseException | None = error
    while led is not None:
        if isinstance(led, DitGraphError) or "captur" in str(led).lower():
            return False
        led = led.__cause__ or led.__context__
    return True


def clear_frames(error: BaseException) -> None:
    """Of an error and of all that led to it, those that a compiler has wrapped too."""
    todo: list[BaseException | None] = [error]
    seen: set[int] = set()
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            todo += [one.__cause__, one.__context__, getattr(one, "inner_exception", None)]


def brief(error: Exception) -> str:
    """The first line of an error, or of the one that a compiler has wrapped."""
    inner = getattr(error, "inner_exception", None) or error
    lines = str(inner).strip().splitlines()
    return f"{type(inner).__name__}({(lines or [''])[0]!r})"
