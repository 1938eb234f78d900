"""An explanation as indented text."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from dit_graph.explain.report import size, syncs

if TYPE_CHECKING:
    from dit_graph.explain.facts import (
        Bucket,
        Explanation,
        ExternalRead,
        HandedValue,
        Module,
        Step,
        Variant,
    )

_MOST = 4
"""Values or tensors that are spelt out in one line; the rest is counted."""


def lines(explanation: "Explanation") -> Iterator[str]:
    yield from (f"! {note}" for note in explanation.notes)
    if explanation.syncs_removed is not None:
        yield syncs(explanation.syncs_removed)
    if explanation.syncs is not None:
        total = sum(sync.count for sync in explanation.syncs)
        yield f"host syncs of a picture: {total or 'none'}"
        yield from (f"  {sync.count}x at {sync.where}" for sync in explanation.syncs)
    for module in explanation.modules:
        yield from _module(module)


def _module(module: "Module") -> Iterator[str]:
    on = f"on {module.device}" if module.device else "not recorded"
    memory = size(module.graph_bytes)
    yield f"{module.name} ({module.class_name}) {on}, {module.backend}, graph memory {memory}"
    yield from (f"  ! {note}" for note in module.notes)
    yield from (f"  eager {count}: {reason}" for reason, count in module.eager.items())
    for bucket in module.buckets:
        yield from _bucket(bucket)


def _bucket(bucket: "Bucket") -> Iterator[str]:
    yield f"  bucket {bucket.label}: {bucket.state}"
    yield (
        f"    cold {bucket.cold}, captures {bucket.captures} in {bucket.capture_seconds:.2f} s,"
        f" replays {bucket.replays}, inputs {size(bucket.input_bytes)}"
    )
    if bucket.verdict:
        yield f"    {bucket.verdict}"
    yield from (f"    eager {count}: {reason}" for reason, count in bucket.eager.items())
    for number, variant in enumerate(bucket.variants):
        yield from _variant(number, variant)


def _variant(number: int, variant: "Variant") -> Iterator[str]:
    time = "" if variant.ms is None else f", {variant.ms:.3f} ms"
    yield (
        f"    variant {number}: segments {variant.count('segment')},"
        f" operations {variant.ops}, breaks {variant.count('break')},"
        f" guards {len(variant.guards)}{time}"
    )
    if variant.not_timed:
        yield f"      not timed: {variant.not_timed}"
    yield from (f"      guard: {g.what} is {g.expected!r}" for g in variant.guards)
    if reads := variant.external_reads:
        yield f"      reads from outside {_reads(reads)}"
    if variant.written_inputs:
        yield f"      writes into inputs {', '.join(map(str, variant.written_inputs))}"
    if variant.written_outside or variant.undo_bytes:
        yield (
            f"      writes outside {variant.written_outside} tensors,"
            f" undo {size(variant.undo_bytes)} a replay"
        )
    for same, steps in groupby(variant.steps, key=lambda step: replace(step, ms=None)):
        group = list(steps)
        if same.kind != "break":
            yield from (f"      {_step(step)}" for step in group)
        else:
            yield f"      {_break(group)}"


def _step(step: "Step") -> str:
    what = "" if step.ops is None else f"  {step.ops} operations"
    return f"{step.kind}{what}{_ms([step])}"


def _break(group: list["Step"]) -> str:
    """One or more breaks, one after the other, that differ in nothing but their times."""
    step = group[0]
    times = f" x{len(group)}" if len(group) > 1 else ""
    told = step.module is None or (step.module and step.reason.startswith(step.module))
    inside = "" if told else f" in {step.module or 'the module itself'}"
    hands = f", hands over {_values(step.hands)}" if step.hands else ""
    marked = ", marked" if step.marked else ""
    return f"break{times}  {step.reason}{inside} at {step.where}{marked}{hands}{_ms(group)}"


def _ms(group: list["Step"]) -> str:
    times = [step.ms for step in group if step.ms is not None]
    return f"  {sum(times):.3f} ms" if times else ""


def _values(hands: "tuple[HandedValue, ...]") -> str:
    said = [
        f"shape {hand.value}" if hand.guard == "shape"
        else f"{hand.value!r}" if hand.guard == "exact"
        else f"{hand.value!r} ({hand.guard or 'not used'})"
        for hand in hands[:_MOST]
    ]  # fmt: skip
    return ", ".join(said) + _rest(len(hands))


def _reads(reads: "tuple[ExternalRead, ...]") -> str:
    said = [f"{read.dtype}{list(read.shape)}" for read in reads[:_MOST]]
    total = size(sum(read.bytes for read in reads))
    return f"{len(reads)} tensors, {total}: {', '.join(said)}{_rest(len(reads))}"


def _rest(count: int) -> str:
    return f" and {count - _MOST} more" if count > _MOST else ""
