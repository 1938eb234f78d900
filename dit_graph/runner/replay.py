"""A call that is replayed: by the variant whose values hold, timed and compared where due."""

import functools
import logging
from collections.abc import Callable
from typing import Any

from dit_graph.call.key import Call
from dit_graph.devices.base import is_out_of_memory
from dit_graph.errors import BreakResultChanged, GuardMismatch, StateChanged
from dit_graph.runner.entry import MAX_ATTEMPTS, Entry
from dit_graph.runner.failures import raised_by_the_forward
from dit_graph.runner.fallback import Fallback
from dit_graph.runner.record import CaptureAction
from dit_graph.runner.tally import listening
from dit_graph.runner.target import Target
from dit_graph.runner.verify import compared
from dit_graph.tape.tape import Tape, Undo

log = logging.getLogger("dit_graph")
TIMED = "the gate times an eager call in a replay's place"


class ReplayAction:
    """Replays the calls of one module."""

    def __init__(
        self, target: Target, fallback: Fallback, recording: CaptureAction,
        same_state: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._target = target
        self._fallback = fallback
        self._recording = recording
        self._same_state = same_state

    def __call__(self, entry: Entry, call: Call, args: Any, kwargs: Any) -> Any:
        """Answer a call.

        Raises:
            StateChanged: the module was not in the entry's state; the call is to be decided again.
        """
        try:
            turn = entry.proof.turn(entry.tapes[0])
            undo, live, mismatch = Undo(self._target.generators), call.tensors, ""
            compares = any(tape.draws and entry.proof.compares(tape) for tape in entry.tapes)
            seeds = self._target.seeds() if compares and turn == "replay" else []
        except Exception as error:
            return self._fallback(entry, self._fallback.own_error(error), args, kwargs)
        if turn == "eager":
            entry.counts.eager[TIMED] += 1
            run_eagerly = functools.partial(self._target.eager, *args, **kwargs)
            timed = functools.partial(self._timed, "eager", entry, run_eagerly)
            return self._fallback.answer(timed, call.tensors)
        for tape in tuple(entry.tapes):
            if conflict := tape.conflict(live):
                return self._fallback(entry, conflict, args, kwargs)

            def run(tape: Tape = tape) -> Any:
                entry.static.copy_in(live)
                tape.run(undo, self._check)
                return tape.result(live)

            try:
                result = self._checked(functools.partial(self._timed, "replay", entry, run))
            except StateChanged:
                undo.roll_back()
                raise
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
                    what = type(error).__name__
                    entry.counts.eager[f"the forward raised {what} in a replay"] += 1
                    raise
                return self._broken(entry, error, args, kwargs)
            if not self._took(entry, tape, live):
                return result
            given = self._target, self._fallback
            return compared(*given, "replay", entry, tape, result, seeds, (args, kwargs))
        if not entry.may_record_another(self._target.config.max_variants):
            reason = entry.gave_up or f"another value at every call: {mismatch}"
            return self._fallback(entry, reason, args, kwargs)
        return self._recording.capture(entry, call, args, kwargs)

    def _check(self) -> None:
        """Compare the state, where this call has not done so yet. Raises StateChanged."""
        try:
            same = self._same_state()
        except Exception as error:  # the next comparison tells it
            self._fallback.own_error(error)
            same = False
        if not same:
            raise StateChanged

    def _checked(self, run: Callable[[], Any]) -> Any:
        """Run; an error may come of the state having changed, so that is looked at first."""
        try:
            return run()
        except StateChanged:
            raise
        except Exception:
            self._check()
            raise

    def _took(self, entry: Entry, tape: Tape, live: Any) -> bool:
        """A replay has answered; returns whether it is to be compared with eager."""
        entry.counts.note("replays")
        if listening.to is not None:
            listening.to.operations += tape.operations
            listening.to.breaks += sum(1 for _ in tape.breaks())
        entry.missed = entry.broken = 0
        entry.static.copy_back(live, tape.written_inputs)
        try:
            entry.prefer(tape)
            self._target.pool.touch(tape.generation)
            compares = entry.proof.compares(tape)
        except Exception as error:  # the answer is there all the same
            entry.block(self._fallback.own_error(error), divides=False)
            return False
        tape.compared = tape.compared or compares
        return compares

    def _timed(self, what: str, entry: Entry, run: Callable[[], Any]) -> Any:
        """Run it, with the device's clock while the gate is open."""
        gate = entry.proof.gate
        if gate is None or gate.decided:
            return run()
        timer = self._target.pool.device.timer()
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
        return self._fallback.instead(entry, error, reason, args, kwargs)
