"""Reads facts from runners, their entries and their recordings.

It changes nothing, and it waits for the device only where it times, because a report may be asked
for at any moment.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import fields, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch

from dit_graph.explain import facts
from dit_graph.explain.timing import time_steps
from dit_graph.memory.pool import Pool
from dit_graph.runner.entry import Entry
from dit_graph.runner.tally import Counts
from dit_graph.tape.guards import DeviceNumber
from dit_graph.tape.tape import Break, Reset, Tape, WholeCall

_SIGNS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}


def explain(
    installs: Iterable[Any],
    notes: Iterable[str],
    time: bool,
    syncs_removed: dict[str, int] | None = None,
) -> facts.Explanation:
    """Tell what is recorded behind `installs`; `time` also runs the steps that can be run again."""
    modules = tuple(_module(install, time) for install in installs)
    return facts.Explanation(modules, tuple(notes), syncs_removed)


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


def _module(install: Any, time: bool) -> facts.Module:
    runner = install.runner
    pool = None if runner is None else runner.pool
    with nullcontext() if pool is None else pool.lock:  # No call may change the entries meanwhile.
        eager = install.tally.unreached + (Counter() if runner is None else runner.refused)
        found = {} if runner is None else _by_key(runner)
        now = [] if runner is None else list(runner.entries.values())
        return facts.Module(
            name=install.name,
            class_name=type(install.module).__name__,
            device=None if pool is None else str(pool.device.on),
            backend=install.config.backend,
            graph_bytes=0 if pool is None else pool.bytes,
            notes=tuple(_notes_of(install)),
            eager=dict(eager),
            signatures=tuple(_signature(those, runner.pool, time, now) for those in found.values()),
            regions=() if install.regions is None else tuple(_regions(install.regions.now, time)),
        )


def _by_key(runner: Any) -> dict[Any, list[Entry]]:
    """One signature's entries, of all states."""
    found: dict[Any, list[Entry]] = {}
    for key, entry in runner.target.every_entry():
        found.setdefault(key, []).append(entry)
    return found


def _regions(regions: list[Any], time: bool) -> Iterator[facts.Module]:
    """Tell regions of one class that follow each other as one."""
    for kind, group in groupby(regions, key=lambda region: type(region.module)):
        those = list(group)
        eager: Counter[str] = sum((region.runner.refused for region in those), Counter())
        each = [(region.runner, _by_key(region.runner)) for region in those]
        signatures = []
        for key in dict.fromkeys(key for _, found in each for key in found):
            having = [(runner, found[key]) for runner, found in each if key in found]
            recorded = (one for one in having if any(entry.tapes for entry in one[1]))
            runner, entries = next(recorded, having[0])
            first = _signature(entries, runner.pool, time, list(runner.entries.values()))
            counts = Counts()
            for _, found in having:
                counts.add(found[0].counts)
            told = {f.name: getattr(counts, f.name) for f in fields(Counts)}
            signatures.append(replace(first, **{**told, "eager": dict(counts.eager)}))
        name = " to ".join(dict.fromkeys((those[0].path, those[-1].path)))
        yield facts.Module(
            name, kind.__name__, None, "", 0, (), dict(eager), tuple(signatures), count=len(those)
        )


def _signature(entries: list[Entry], pool: Pool, time: bool, now: list[Entry]) -> facts.Signature:
    """Sum up what is known of a signature in several states of its module."""
    last, counts = entries[0], entries[0].counts
    divided = None if any(entry.tapes for entry in entries) else last.divided
    variants = []
    for entry in entries:
        timed = time and any(entry is other for other in now)
        other = "recorded in another state of the module" if time and not timed else ""
        variants += [_variant(tape, pool, timed, other) for tape in entry.tapes]
    return facts.Signature(
        label=last.label,
        state=next((entry.state for entry in entries if entry.tapes), last.state),
        cold=counts.cold,
        captures=counts.captures,
        replays=counts.replays,
        eager=dict(counts.eager),
        capture_seconds=sum(entry.capture_seconds for entry in entries),
        input_bytes=sum(entry.static.bytes for entry in entries if entry.static),
        verdict=next((entry.verdict for entry in entries if entry.verdict), ""),
        variants=tuple(variants),
        evictions=sum(entry.evictions for entry in entries),
        differs=next((entry.differs for entry in entries if entry.differs), ""),
        dropped=counts.dropped,
        states=sum(bool(entry.tapes) for entry in entries),
        regions=divided.most if divided else 0,
        share=divided.share if divided else None,
    )


def _variant(tape: Tape, pool: Pool, time: bool, not_timed: str) -> facts.Variant:
    times, not_timed = time_steps(tape, pool) if time else ([], not_timed)
    known: list[float | None] = [*times] or [None] * len(tape.steps)
    return facts.Variant(
        steps=tuple(map(_step, tape.steps, known)),
        guards=tuple(facts.GuardedValue(g.what, _plain(g.expected.tolist())) for g in tape.guards),
        external_reads=tuple(map(_external, tape.held.values())),
        written_inputs=tuple(tape.written_inputs),
        written_outside=len(tape.written_outside),
        undo_bytes=sum(t.nbytes for t in tape.saved),
        not_timed=not_timed,
        compared=tape.compared_values,
    )


def _step(step: Any, ms: float | None) -> facts.Step:
    if isinstance(step, Break):
        why = step.reason, step.where, step.module, step.marked
        return facts.Step("break", None, *why, tuple(_handed(step)), ms)
    if isinstance(step, Reset):
        return facts.Step("reset", ms=ms)
    if isinstance(step, WholeCall):
        return facts.Step("whole call", ms=ms)
    return facts.Step("segment", getattr(step, "ops", None), ms=ms)


def _handed(step: Break) -> Iterator[facts.HandedValue]:
    """A result None is no value, and a tensor is one only by a shape that depends on data."""
    shaped = torch.Tag.dynamic_output_shape in getattr(step.fn, "tags", ())
    for home in step.homes:
        if isinstance(home, torch.Tensor):
            if shaped:
                yield facts.HandedValue(list(home.shape), "shape")
        elif type(home) is DeviceNumber and not home.exact:  # Any other look pins it.
            yield facts.HandedValue(_plain(home.value), _outcomes(home))
        elif home is not None:
            value = home.value if type(home) is DeviceNumber else home
            yield facts.HandedValue(_plain(value), "exact")


def _outcomes(number: DeviceNumber) -> str:
    """Name each comparison that a replay must repeat, once."""
    said = [f"{_SIGNS[op.__name__]} {other!r} is {is_so}" for op, other, is_so in number.outcomes]
    return ", ".join(dict.fromkeys(said))


def _external(t: torch.Tensor) -> facts.ExternalRead:
    dtype = str(t.dtype).removeprefix("torch.")
    return facts.ExternalRead(tuple(t.shape), dtype, t.untyped_storage().nbytes())


def _plain(value: Any) -> Any:
    """Make a value one that JSON holds; what JSON cannot hold is told by its repr."""
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if value is None or type(value) in (bool, int, str):
        return value
    return value if type(value) is float and math.isfinite(value) else repr(value)
