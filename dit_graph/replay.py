"""A call that is replayed: by the variant whose values hold, timed and compared where due."""

import functools
import logging
from collections.abc import Callable
from typing import Any

from dit_graph.devices.base import is_out_of_memory
from dit_graph.entry import MAX_ATTEMPTS, Entry
from dit_graph.errors import BreakResultChanged, GuardMismatch
from dit_graph.fallback import Fallback
from dit_graph.graphed import Graphed
from dit_graph.key import Call
from dit_graph.record import Recording, raised_by_the_forward
from dit_graph.tape import Tape, Undo

log = logging.getLogger("dit_graph")
TIMED = "the gate times an eager call in a replay's place"


class Replay:
    """Replays the calls of one module."""

    def __init__(self, on: Graphed, fallback: Fallback, recording: Recording) -> None:
        self._on = on
        self._fallback = fallback
        self._recording = recording

    def __call__(self, entry: Entry, call: Call, args: Any, kwargs: Any) -> Any:
        turn = entry.proof.turn(entry.tapes[0])
        if turn == "eager":
            entry.eager[TIMED] += 1
            run_eagerly = functools.partial(self._on.eager, *args, **kwargs)
            timed = functools.partial(self._timed, "eager", entry, run_eagerly)
            return self._fallback.answer(timed, call.tensors)
        undo, live, mismatch = Undo(self._on.generators), call.tensors, ""
        compares = any(tape.draws and entry.proof.compares(tape) for tape in entry.tapes)
        seeds = self._on.seeds() if compares else []
        for tape in tuple(entry.tapes):
            if conflict := tape.conflict(live):
                return self._fallback(entry, conflict, args, kwargs)

            def run(tape: Tape = tape) -> Any:
                entry.static.copy_in(live)
                tape.run(undo)
                return tape.result(live)

            try:
                result = self._timed("replay", entry, run)
            except GuardMismatch as error:
                undo.roll_back()
                mismatch = error.place
                entry.proof.stop_timing("not timed: it depends on values")
                continue
            except Exception as error:
                raised = raised_by_the_forward(error, tape)
                self._fallback.raise_if_failed(error, f"replaying {entry.label}")
                undo.roll_back()
                if raised:
                    entry.eager[f"the forward raised {type(error).__name__} in a replay"] += 1
                    raise
                return self._broken(entry, error, args, kwargs)
            entry.replays += 1
            entry.missed = entry.broken = 0
            entry.prefer(tape)
            self._on.pool.touch(tape.generation)
            entry.static.copy_back(live, tape.written_inputs)
            if not entry.proof.compares(tape):
                return result
            tape.compared = True
            return self._recording.compared("replay", entry, tape, result, seeds, args, kwargs)
        if not entry.may_record_another(self._on.config.max_variants):
            reason = entry.gave_up or f"another value at every call: {mismatch}"
            return self._fallback(entry, reason, args, kwargs)
        return self._recording.capture(entry, call, args, kwargs)

    def _timed(self, what: str, entry: Entry, run: Callable[[], Any]) -> Any:
        """Run it, with the device's clock while the gate is open."""
        gate = entry.proof.gate
        if gate is None or gate.decided:
            return run()
        timer = self._on.pool.device.timer()
        timer.start()
        out = run()
        timer.stop()
        (gate.replay if what == "replay" else gate.eager).append(timer)
        return out

    def _broken(self, entry: Entry, error: Exception, args: Any, kwargs: Any) -> Any:
        """A replay raised: the call is eager's, and a recording that is broken goes."""
        if isinstance(error, BreakResultChanged):
            reason = f"a marked break's result changed: {error.place}"
        else:
            reason = f"replay failed: {error!r}"
            entry.retire()
            if is_out_of_memory(error):
                entry.pause(reason)
            else:
                entry.broken += 1
            if entry.broken >= MAX_ATTEMPTS:
                entry.block(reason)
            self._on.pool.sweep()
        if self._on.config.on_failure == "raise":
            entry.eager[reason] += 1
            raise error
        return self._fallback(entry, reason, args, kwargs)
