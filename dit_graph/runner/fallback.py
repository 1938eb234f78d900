"""Eager calls: counted by reason, each reason said once, an error under `strict`."""

import functools
import logging
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dit_graph import breaks
from dit_graph.errors import BreakResultChanged, CaptureError, DeviceFailed, NotReplayed
from dit_graph.runner.entry import Entry
from dit_graph.runner.tally import listening
from dit_graph.runner.target import Target
from dit_graph.tape.trees import tensors_of

log = logging.getLogger("dit_graph")


class Fallback:
    """Answers calls of one module without graphs, and counts them by reason."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.refused = target.tally.refused  # calls that no entry stands for
        self.said = target.said

    def __call__(
        self, entry: Entry | None, reason: str, args: Any, kwargs: Any, ends: bool = True
    ) -> Any:
        """`ends`: the next call will be no better; else the regions take over."""
        self.say(self.refused if entry is None else entry.counts.eager, reason, ends)
        with breaks.answering(self._target.signature.arguments(args, kwargs)):
            run = functools.partial(self._target.eager, *args, **kwargs)
            return self.answer(run, (args, kwargs))

    def instead(self, entry: Entry, error: Exception, reason: str, args: Any, kwargs: Any) -> Any:
        """Answer where a capture or a replay failed; `on_failure="raise"` lets the error out."""
        self._target.pool.sweep()
        if self._target.config.on_failure == "raise":
            entry.counts.eager[reason] += 1
            raise error
        divides = self._target.divides and bool(entry.blocked) and entry.divides
        return self(entry, reason, args, kwargs, ends=not divides)

    def say(self, counter: Counter[str], reason: str, ends: bool = True) -> None:
        """Count an eager call and log each reason once. Raises NotReplayed under `strict`."""
        with self._target.pool.lock:
            counter[reason] += 1
        if listening.to is not None:
            listening.to.eager[reason] += 1
        if reason not in self.said:
            self.said.add(reason)
            log.warning("dit_graph: %s runs eagerly: %s", self._target.name, reason)
        if self._target.config.strict and ends:
            raise NotReplayed(f"{self._target.name}: {reason}")

    def own_error(self, error: Exception) -> str:
        """The reason that stands for an error of dit_graph's own; its traceback is logged once.

        It names the place and not the message, which may be another one at every call.
        """
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if "dit_graph" in Path(frame.filename).parts]
        at = (ours or frames)[-1]
        what = f"{type(error).__name__} at {Path(at.filename).name}:{at.lineno}"
        reason = f"dit_graph itself failed on this call: {what}; DEBUG logging shows the traceback"
        if reason not in self.said:
            text = "".join(traceback.format_exception(error))
            log.debug("dit_graph: %s: %s\n%s", self._target.name, what, text)
        return reason

    def answer(self, run: Callable[[], Any], arguments: Any) -> Any:
        """Run an eager answer; again without the recordings, unless it may run only once."""
        return run() if self._target.runs_once else self.with_room(run, arguments)

    def with_room(self, run: Callable[[], Any], arguments: Any) -> Any:
        """Run an eager forward; where memory runs out, again without the recordings."""
        try:
            given = [*tensors_of(arguments), *self._target.state.buffers]
            versions = list(map(_version, given))
        except Exception as error:  # what nobody can look at may have been written
            self.own_error(error)
            return run()
        seeds = self._target.seeds()
        while True:
            try:
                return run()
            except torch.OutOfMemoryError:
                moved = versions != list(map(_version, given))
                has_collectives = self._target.has_collectives or self._target.state.parallel
                if has_collectives or moved or self._target.state.moved() or not self.free():
                    raise
            self._target.reseed(seeds)

    def free(self) -> bool:
        """Give the memory of the least recently used recordings back, when memory has run out."""
        held = self._target.pool.make_room()
        if held:
            log.warning("dit_graph: %s: out of memory; recordings let go", self._target.name)
            self._target.pool.device.trim()
        return held

    def raise_if_failed(self, error: Exception, doing: str) -> None:
        """After a device has failed for good nothing answers, an eager call neither."""
        ours = isinstance(error, (CaptureError, BreakResultChanged))
        if not ours and self._target.pool.device.failed():
            self.refused["the device failed"] += 1
            raise DeviceFailed(
                f"{self._target.name}: the device failed while {doing}: {error};"
                " restart the process"
            ) from error


def _version(t: torch.Tensor) -> int | None:
    """How often a tensor was written; in inference mode nobody counts."""
    return None if t.is_inference() else t._version
