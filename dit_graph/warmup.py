"""Warm-up: makes calls until each signature that came in them is recorded, and names the others.

Reads runners and their counters; which calls are made is the mode's affair.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from dit_graph.install import Install
from dit_graph.runner.entry import MAX_ATTEMPTS, Entry
from dit_graph.runner.runner import Runner

MOST = 2 * MAX_ATTEMPTS  # times that a call is made: cold and recorded, until an entry gives up
Run = Callable[[], None]
log = logging.getLogger("dit_graph")


def record_all(installs: Iterable[Install], runs: Sequence[Run]) -> None:
    """Make each of `runs`, and those again in which a signature came that can still be recorded.

    A signature that comes once in a run (an expert for high noise, image-to-image at a low
    strength) is cold in the first and recorded in the second. All are cold before any is recorded
    then, so that what a model only writes at first is written.
    """
    warmup = _WarmUp(installs)
    came: dict[Run, list[Entry]] = {}
    todo = list(runs)
    with warmup.new_shapes_allowed():
        for _ in range(MOST):
            for run in todo:
                came[run] = warmup.came_in(run)
            todo = [run for run in runs if any(map(warmup.is_open, came[run]))]
    for name, reason, what in warmup.missing():
        log.warning("dit_graph: not recorded by warmup: %s: %s%s", name, reason, what)


class _WarmUp:
    """Where entries and counters stood before the first call, against where they stand now."""

    def __init__(self, installs: Iterable[Install]) -> None:
        self._runners = {install: install.ready() for install in installs}
        self._calls = self._calls_now()
        self._made_room = {entry: entry.evictions for entry in self._calls}
        self._eager = {install: self._eager_of(install) for install in self._runners}

    @contextmanager
    def new_shapes_allowed(self) -> Iterator[None]:
        """Whatever `on_new_shape` says of calls outside of the warm-up."""
        runners = [runner for runner in self._runners.values() if runner is not None]
        for runner in runners:
            runner.warming = True
        try:
            yield
        finally:
            for runner in runners:
                runner.warming = False

    def came_in(self, run: Run) -> list[Entry]:
        """Make a call; the entries that it met."""
        before = self._calls_now()
        run()
        return [entry for entry, n in self._calls_now().items() if n > before.get(entry, 0)]

    def is_open(self, entry: Entry) -> bool:
        """Whether it is not recorded, and may be when it comes again."""
        if entry.divided is not None:
            return not entry.divided.settled
        return not (entry.tapes or entry.blocked or entry.paused or self._evicted(entry))

    def missing(self) -> Iterator[tuple[str, str, str]]:
        """A component's name, why something of it is not recorded, and what."""
        for install, runner in self._runners.items():
            eager = self._eager_of(install) - self._eager[install]
            came = [e for e in _entries(runner) if e.counts.calls > self._calls.get(e, 0)]
            if not came and not eager:
                yield install.name, "the calls that were made did not reach it", ""
            for reason, count in eager.items():
                if runner is None or reason in runner.said:  # else it is meant to be eager
                    yield install.name, reason, f" ({count}x)"
            labels: dict[str, list[str]] = {}
            for entry in came:
                if not entry.tapes and entry.divided is None:
                    labels.setdefault(self._why_not(entry), []).append(entry.label)
            for reason, those in labels.items():
                yield install.name, reason, f" (signature {'; signature '.join(those)})"

    def _why_not(self, entry: Entry) -> str:
        if entry.blocked or entry.paused:
            return entry.blocked or entry.pause_reason
        if self._evicted(entry):
            return "it made room for others: memory_budget or max_graphs is full"
        calls = entry.counts.calls - self._calls.get(entry, 0)
        if calls == 1:
            return "it came once, however often the same call was made"
        last = next(reversed(entry.counts.eager), "")
        return f"{entry.state} after {calls} calls{last and f': {last}'}"

    def _evicted(self, entry: Entry) -> bool:
        return not entry.tapes and entry.evictions > self._made_room.get(entry, 0)

    def _calls_now(self) -> dict[Entry, int]:
        found = [entry for runner in self._runners.values() for entry in _entries(runner)]
        return {entry: entry.counts.calls for entry in found}

    def _eager_of(self, install: Install) -> Counter[str]:
        """Calls that no entry stands for, by reason."""
        runner = self._runners[install]
        return install.tally.unreached + (runner.refused if runner else Counter())


def _entries(runner: Runner | None) -> list[Entry]:
    with runner.pool.lock if runner else nullcontext():
        return list(runner.entries.values()) if runner else []
