"""Reads facts from runners, their entries and their recordings.

It changes nothing, and it waits for the device only where it times, because a report may be asked
for at any moment.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from dit_graph.explain.facts import (
    Explanation,
    ExternalRead,
    GuardedValue,
    HandedValue,
    Module,
    Signature,
    Step,
    Variant,
)
from dit_graph.explain.timing import time_steps
from dit_graph.memory.pool import Pool
from dit_graph.runner.entry import Entry
from dit_graph.tape.guards import DeviceNumber
from dit_graph.tape.tape import Break, Reset, Tape, WholeCall

_SIGNS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}


def explain(
    installs: Iterable[Any],
    notes: Iterable[str],
    time: bool,
    syncs_removed: dict[str, int] | None = None,
) -> Explanation:
    """Tell what is recorded behind `installs`; `time` also runs the steps that can be run again."""
    modules = tuple(_module(install, time) for install in installs)
    return Explanation(modules, tuple(notes), syncs_removed)


def _notes_of(install: Any) -> Iterator[str]:
    """Name what stands between a module and its recordings, or stood there once."""
    if install.removed:
        yield "disabled"
    elif not install.installed:
        yield "not installed: another hook took the slot away"
    if install.compiled_over:
        yield install.compiled_over
    yield from install.notes
    if install.runner is not None:
        yield from sorted(install.runner.unmatched)


def _module(install: Any, time: bool) -> Module:
    runner = install.runner
    if runner is None:
        return _described(install, None, 0, install.tally.unreached, ())
    pool = runner.pool
    with pool.lock:  # No call may change the entries meanwhile.
        signatures = tuple(_signature(entry, pool, time) for entry in runner.entries.values())
        eager = install.tally.unreached + runner.refused
        return _described(install, str(pool.device.on), pool.bytes, eager, signatures)


def _described(
    install: Any,
    device: str | None,
    held: int,
    eager: Counter[str],
    signatures: tuple[Signature, ...],
) -> Module:
    return Module(
        name=install.name,
        class_name=type(install.module).__name__,
        device=device,
        backend=install.config.backend,
        graph_bytes=held,
        notes=tuple(_notes_of(install)),
        eager=dict(eager),
        signatures=signatures,
    )


def _signature(entry: Entry, pool: Pool, time: bool) -> Signature:
    return Signature(
        label=entry.label,
        state=entry.state,
        cold=entry.counts.cold,
        captures=entry.counts.captures,
        replays=entry.counts.replays,
        eager=dict(entry.counts.eager),
        capture_seconds=entry.capture_seconds,
        input_bytes=entry.static.bytes if entry.static else 0,
        verdict=entry.verdict,
        variants=tuple(_variant(tape, pool, time) for tape in entry.tapes),
        evictions=entry.evictions,
        differs=entry.differs,
    )


def _variant(tape: Tape, pool: Pool, time: bool) -> Variant:
    times, not_timed = time_steps(tape, pool) if time else ([], "")
    known: list[float | None] = [*times] or [None] * len(tape.steps)
    return Variant(
        steps=tuple(map(_step, tape.steps, known)),
        guards=tuple(GuardedValue(g.what, _plain(g.expected.tolist())) for g in tape.guards),
        external_reads=tuple(map(_external, tape.held.values())),
        written_inputs=tuple(tape.written_inputs),
        written_outside=len(tape.written_outside),
        undo_bytes=sum(t.nbytes for t in tape.saved),
        not_timed=not_timed,
        compared=tape.compared_values,
    )


def _step(step: Any, ms: float | None) -> Step:
    if isinstance(step, Break):
        hands = tuple(_handed(step))
        return Step("break", None, step.reason, step.where, step.module, step.marked, hands, ms)
    if isinstance(step, Reset):
        return Step("reset", ms=ms)
    if isinstance(step, WholeCall):
        return Step("whole call", ms=ms)
    return Step("segment", getattr(step, "ops", None), ms=ms)


def _handed(step: Break) -> Iterator[HandedValue]:
    """A result None is no value, and a tensor is one only by a shape that depends on data."""
    shaped = torch.Tag.dynamic_output_shape in getattr(step.fn, "tags", ())
    for home in step.homes:
        if isinstance(home, torch.Tensor):
            if shaped:
                yield HandedValue(list(home.shape), "shape")
        elif type(home) is DeviceNumber and not home.exact:  # Any other look pins it.
            yield HandedValue(_plain(home.value), _outcomes(home))
        elif home is not None:
            yield HandedValue(_plain(home.value if type(home) is DeviceNumber else home), "exact")


def _outcomes(number: DeviceNumber) -> str:
    """Name each comparison that a replay must repeat, once."""
    said = [f"{_SIGNS[op.__name__]} {other!r} is {is_so}" for op, other, is_so in number.outcomes]
    return ", ".join(dict.fromkeys(said))


def _external(t: torch.Tensor) -> ExternalRead:
    dtype = str(t.dtype).removeprefix("torch.")
    return ExternalRead(tuple(t.shape), dtype, t.untyped_storage().nbytes())


def _plain(value: Any) -> Any:
    """Make a value one that JSON holds; what JSON cannot hold is told by its repr."""
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if value is None or type(value) in (bool, int, str):
        return value
    return value if type(value) is float and math.isfinite(value) else repr(value)
