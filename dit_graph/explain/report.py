"""Counters and recordings as text and as plain dicts. Reads runners; changes nothing."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

from dit_graph.runner.entry import Entry
from dit_graph.runner.runner import Runner


def summed(stats: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The counters of several processes as those of one; zeros of none."""
    sums = Counter({"calls": 0, "cold": 0, "captures": 0, "replays": 0})
    eager: Counter[str] = Counter()
    for one in stats:
        sums.update({name: one[name] for name in sums})
        eager.update(one["eager"])
    return {**sums, "eager": dict(eager)}


def syncs(removed: dict[str, int]) -> str:
    """The line on what was done to host syncs of a loop: what → how often."""
    said = ", ".join(f"{what} ({count}x)" for what, count in removed.items())
    return f"remove_syncs: {said or 'nothing so far'}"


def render(installs: Iterable[Any], notes: list[str], removed: dict[str, int] | None = None) -> str:
    """`removed` is None where no host syncs are to be removed."""
    lines = [f"! {note}" for note in notes]
    lines += [] if removed is None else [syncs(removed)]
    for install in installs:
        with install.runner.pool.lock if install.runner else nullcontext():
            lines += _install(install)
    return "\n".join(lines)


def notes_of(install: Any) -> Iterator[str]:
    """What stands between a module and its recordings, or stood there once."""
    if install.removed:
        yield "disabled"
    elif not install.installed:
        yield "not installed: another hook took the slot away"
    if install.compiled_over:
        yield install.compiled_over
    yield from install.notes
    if install.runner is not None:
        yield from sorted(install.runner.unmatched)


def _install(install: Any) -> Iterator[str]:
    runner: Runner | None = install.runner
    where = f"on {runner.pool.device.on}" if runner else "not recorded"
    yield f"{install.name} ({type(install.module).__name__}) {where}, {install.config.backend}"
    for note in notes_of(install):
        yield f"  ! {note}"
    eager = install.tally.unreached + (runner.refused if runner else Counter())
    for reason, count in eager.items():
        yield f"  eager {count}: {reason}"
    if runner is None:
        return
    yield f"  graph memory {size(runner.pool.bytes)}"
    for entry in runner.entries.values():
        yield from _entry(entry)


def _entry(entry: Entry) -> Iterator[str]:
    yield f"  bucket {entry.label}: {entry.state}"
    counts = entry.counts
    yield (
        f"    cold {counts.cold}, captures {counts.captures} in {entry.capture_seconds:.2f} s,"
        f" replays {counts.replays}, variants {len(entry.tapes)},"
        f" inputs {size(entry.static.bytes if entry.static else 0)}"
    )
    if entry.evictions:
        yield f"    made room for other recordings {entry.evictions} times"
    if entry.differs:
        yield f"    differs from the nearest recorded: {entry.differs}"
    if entry.verdict:
        yield f"    shown: {entry.verdict}"
    for reason, count in entry.counts.eager.items():
        yield f"    eager {count}: {reason}"
    for i, tape in enumerate(entry.tapes):
        found: Counter[str] = Counter()
        for step in tape.breaks():
            found[f"{step.reason} at {step.where}"] += 1
        breaks, guards = sum(found.values()), tape.compared_values
        yield f"    variant {i}: segments {tape.segments}, breaks {breaks}, guards {guards}"
        for text, count in found.items():
            yield f"      break{f' x{count}' if count > 1 else ''}: {text}"
        for guard in tape.guards:
            yield f"      guard: {guard.what} is {guard.expected.tolist()}"


def size(count: int) -> str:
    """Bytes in the unit that suits them."""
    if count < 2**20:
        return f"{count} bytes" if count < 2**10 else f"{count / 2**10:.1f} KiB"
    return f"{count / 2**20:.1f} MiB"
