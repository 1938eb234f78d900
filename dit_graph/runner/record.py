"""A signature's first two calls: warmed up, then recorded; and when a recording may be kept."""

import functools
import logging
import threading
import time
import traceback
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dit_graph import breaks
from dit_graph.backends import backend_named
from dit_graph.call.context import context
from dit_graph.call.key import Call
from dit_graph.capture.capture import Capture
from dit_graph.devices.base import is_about_capturing, is_out_of_memory
from dit_graph.errors import CaptureError, Collective, Conflict, NotReplayed
from dit_graph.memory.pool import Generation
from dit_graph.runner.entry import Entry
from dit_graph.runner.failures import brief, clear_frames, raised_by_the_forward
from dit_graph.runner.fallback import Fallback
from dit_graph.runner.target import Target
from dit_graph.runner.verify import compared
from dit_graph.state.snapshot import Snapshot
from dit_graph.tape.buffers import StaticBuffers
from dit_graph.tape.guards import host_generators
from dit_graph.tape.tape import Tape, own
from dit_graph.tape.trees import is_size, tensors_of

MAX_THREADS = 8  # that warm up for one key before it is said that they never stay
NEW_THREADS = "every call comes from a new thread; record from one that stays, or use warmup()"
log = logging.getLogger("dit_graph")


class CaptureAction:
    """Warms up and records the calls of one module."""

    def __init__(self, target: Target, fallback: Fallback) -> None:
        self._target = target
        self._fallback = fallback
        self._backend = backend_named(target.config.backend)
        self._thread = threading.local()
        self.unmatched: set[str] = set()  # patterns of the config that were no break

    def cold(self, entry: Entry, call: Call, args: Any, kwargs: Any) -> Any:
        entry.counts.note("cold")
        before, drawn = self._target.state.snapshot(), host_generators(self._target.generators)

        def run() -> Any:
            with self._target.pool.device.stream(), breaks.warming():
                return self._target.original(*args, **kwargs)

        out = self._fallback.with_room(run, call.tensors)
        try:
            return self._warmed(entry, call, before, drawn, out)
        except Exception as error:  # the answer is there all the same
            entry.block(self._fallback.own_error(error), divides=False)
            return out

    def _warmed(self, entry: Entry, call: Call, before: Snapshot, drawn: Any, out: Any) -> Any:
        """What a cold call shows of its signature; returns the caller's own result."""
        entry.warm = self._thread.warm = True
        now = context(call.key.context.extra_key)
        if now != call.key.context and not entry.tapes:
            self._target.entries.settle(call.key, now)
        if call.changed_containers():
            entry.block("the forward changes a list, dict or array that it is given")
        if host_generators(self._target.generators) != drawn:
            entry.unsettled("the forward draws from Python's or numpy's generator, or seeds one")
        before.settle()
        if repeated := self._target.state.accept()[1]:
            entry.block(f"the forward writes Python state: {repeated[0]}")
        theirs = {
            t.untyped_storage()._cdata for t in [*call.tensors, *self._target.state.weights()]
        }
        made = [t for t in tensors_of(out) if t.untyped_storage()._cdata not in theirs]
        if any(t.is_inference() for t in made) and not torch.is_inference_mode_enabled():
            entry.block("the forward turns inference mode on by itself; turn it on around the call")
        return self._owned(out, made)

    def _owned(self, out: Any, made: list[torch.Tensor]) -> Any:
        """The caller's own copies of what was `made`; what aliases an argument or the module stays
        what it is."""
        if not made:
            return out
        new = set(map(id, made))
        copied = pytree.tree_map_only(
            torch.Tensor, lambda t: own(t) if id(t) in new else t, out, is_leaf=is_size
        )
        with self._target.pool.device.stream():
            pass  # whoever gets the memory of `made` there next waits until it has been copied
        return copied

    def capture(self, entry: Entry, call: Call, args: Any, kwargs: Any) -> Any:
        if not getattr(self._thread, "warm", False):
            return self._on_new_thread(entry, call, args, kwargs)
        entry.threads = 0
        started = time.perf_counter()
        try:
            before, seeds = self._target.state.snapshot(), self._target.seeds()
            generation = self._target.new_generation()
        except Exception as error:
            return self._fallback(entry, self._fallback.own_error(error), args, kwargs)
        capture: Capture | None = None
        try:
            static = self._staged(entry, call)
            capture = self._new_capture(generation, static)
            out, result = self._run(capture, static, call)
        except Exception as error:
            raised = capture is not None and raised_by_the_forward(error, capture.tape)
            self._put_back(entry, error, capture, generation, before)
            if raised:
                entry.raised(error)
                raise
            if is_out_of_memory(error) and self._fallback.free():
                return self.capture(entry, call, args, kwargs)
            return self._failed(entry, error, capture, args, kwargs)
        except BaseException:
            entry.counts.eager["interrupted while it was recorded"] += 1
            self._target.pool.close(generation)
            raise
        entry.counts.note("captures")
        entry.capture_seconds += time.perf_counter() - started
        tape = capture.tape
        static.copy_back(call.tensors, tape.written_inputs)
        try:
            self._say_unmatched(capture)
            self._keep(entry, generation, tape, before, capture.known.survivors(out))
            self._target.pool.sweep()
            if tape not in entry.tapes or not entry.proof.compares(tape):
                return result
        except Exception as error:  # The answer is there all the same.
            entry.block(self._fallback.own_error(error), divides=False)
            self._target.pool.retire(generation)
            return result
        given = self._target, self._fallback
        return compared(*given, "recording", entry, tape, result, seeds, (args, kwargs))

    def _on_new_thread(self, entry: Entry, call: Call, args: Any, kwargs: Any) -> Any:
        """Warm up again: libraries keep handles a thread, and none can be made inside a capture."""
        entry.threads += 1
        if entry.threads > MAX_THREADS:
            self._thread.warm = True  # The eager call warms it up as well.
            return self._fallback(entry, NEW_THREADS, args, kwargs)
        return self.cold(entry, call, args, kwargs)

    def _staged(self, entry: Entry, call: Call) -> StaticBuffers:
        """The call's arguments in the buffers of its entry, made for its first capture."""
        if entry.static is None:
            # Inference mode counts no writes. Memory of the capture stream is never handed to a
            # stream of the caller's, which might write it while a replay elsewhere still reads it.
            with torch.inference_mode(False), self._target.pool.device.stream():
                entry.static = self._target.staged(call)
        static: StaticBuffers = entry.static
        static.copy_in(call.tensors)
        return static

    def _new_capture(self, generation: Generation, static: StaticBuffers) -> Capture:
        target, breakable = self._target, self._backend.breakable
        capture = Capture(
            target.pool.device, generation.memory, static.tensors, target.module, breakable,
            target.config.breaks, target.path,
        )  # fmt: skip
        capture.stays_out = target.stays_out
        return capture

    def _run(self, capture: Capture, static: StaticBuffers, call: Call) -> tuple[Any, Any]:
        """Write the forward on the staged arguments down on the capture's tape.

        Returns what the forward gave, and the caller's own result.

        Raises:
            CaptureError: it cannot be recorded, or the tape does not fit this call's arguments.
        """
        with self._target.pool.device.stream():
            args, kwargs = call.with_tensors(static.tensors)
            forward = functools.partial(self._target.original, *args, **kwargs)
            out = capture.finish(self._backend.record(capture, forward))
        static.check_unmoved()
        static.check_writable(capture.tape.written_inputs)
        if conflict := capture.tape.conflict(call.tensors):
            raise Conflict(conflict)
        return out, capture.tape.result(call.tensors)

    def _put_back(
        self, entry: Entry, error: Exception, capture: Capture | None, generation: Generation,
        before: Snapshot,
    ) -> None:  # fmt: skip
        """Leave everything as it was before a capture that failed."""
        self._fallback.raise_if_failed(error, f"recording {entry.label}")
        if capture is not None:
            capture.effects.undo.roll_back()
        before.restore()
        clear_frames(error)  # What their locals hold would look as if it outlived the call.
        self._let_go(generation, 0 if capture is None else capture.known.survivors(None))

    def _keep(
        self, entry: Entry, generation: Generation, tape: Tape, before: Snapshot, survivors: int
    ) -> None:
        """File the recording, unless what it stands on is not fixed."""
        before.settle()
        changes, repeated = self._target.state.accept()
        if repeated:
            entry.block(f"the forward writes Python state: {repeated[0]}")
        elif changes or survivors:
            what = changes[0] if changes else f"{survivors} tensors"
            entry.unsettled(f"what the forward makes outlives the call: {what}")
        elif tape.unrestartable:
            entry.block(tape.unrestartable)
        else:
            entry.keep(tape)
            for surplus in entry.tapes[self._target.config.max_variants :]:
                entry.forget(surplus)
            tape.generation = generation
            generation.held.append((entry, tape))
            fits, reason = self._target.pool.fit(generation)
            if fits == "later":
                entry.pause(reason)
            elif fits == "never":
                entry.block(reason, divides=False)
            return
        self._let_go(generation, survivors)

    def _let_go(self, generation: Generation, survivors: int) -> None:
        """Record no more into this memory, and free it where a tensor in it outlives the capture:
        replays of other recordings there would write over that tensor."""
        if survivors:
            self._target.pool.retire(generation)
        else:
            self._target.pool.close(generation)

    def _failed(
        self, entry: Entry, error: Exception, capture: Capture | None, args: Any, kwargs: Any
    ) -> Any:
        """The eager answer, once a capture is undone. An operation that works there and that no
        segment takes is a break in the next capture."""
        if log.isEnabledFor(logging.DEBUG):  # As text: a handler must not keep the frames' locals.
            text = "".join(traceback.format_exception(error))
            log.debug("dit_graph: %s: capture failed\n%s", self._target.name, text)
        ours = isinstance(error, CaptureError)
        reason = str(error) if ours else f"capture failed: {brief(error)}"
        stays_out, line = (capture and capture.no_segment_takes) or (None, "")
        if stays_out is not None:
            reason += f" in {stays_out} at {line}"
        learns = capture is not None and callable(stays_out) and capture.breakable
        self._target.has_collectives |= isinstance(error, Collective)
        # The eager answer compiles what was missing, and other arguments may be without a conflict.
        if isinstance(stays_out, str) or isinstance(error, Conflict):
            entry.unsettled(reason)
        elif learns and self._target.config.on_failure == "eager":
            self._target.pool.sweep()
            self._target.stays_out.add(stays_out)
            try:
                return self._fallback(entry, f"{reason}; a break from now on", args, kwargs)
            except NotReplayed:  # This is raised under `strict`; the next call records it.
                raise
            except Exception:  # The operation does not work in eager either.
                self._target.stays_out.discard(stays_out)
                raise
        elif is_out_of_memory(error):  # Whatever needs the memory now may be gone later.
            entry.retire()
            entry.pause(reason)
        elif ours or is_about_capturing(error):
            entry.block(reason, divides=not isinstance(error, Collective))
        else:  # It is the forward's own, such as two shapes that do not go together.
            entry.unsettled(reason)
        return self._fallback.instead(entry, error, reason, args, kwargs)

    def _say_unmatched(self, capture: Capture) -> None:
        for pattern in set(self._target.config.breaks) - capture.matched - self._fallback.said:
            self._fallback.said.add(pattern)
            what = "nothing"
            if pattern in capture.placed:
                what = "no module that this recording runs outside of compiled code"
            self.unmatched.add(f"breaks pattern {pattern!r} matches {what}")
            log.warning(
                "dit_graph: %s: breaks pattern %r matches %s", self._target.name, pattern, what
            )
