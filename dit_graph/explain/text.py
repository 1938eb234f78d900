"""Tells an explanation as indented text, in full or as brief as a report."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dit_graph.explain import facts

_MOST = 4
"""A line spells out so many values or tensors and counts the rest, so that it stays readable."""


def lines(explanation: "facts.Explanation", brief: bool = False) -> Iterator[str]:
    """Tell all of it; `brief` tells of each recording its breaks alone, by source line."""
    yield from (f"! {note}" for note in explanation.notes)
    if explanation.syncs_removed is not None:
        removed = (f"{what} ({count}x)" for what, count in explanation.syncs_removed.items())
        yield f"remove_syncs: {', '.join(removed) or 'nothing so far'}"
    if explanation.syncs is not None:
        total = sum(sync.count for sync in explanation.syncs)
        yield f"host syncs of a picture: {total or 'none'}"
        yield from (f"  {sync.count}x at {sync.where}" for sync in explanation.syncs)
    for module in explanation.modules:
        yield from _module(module, brief)


def _module(module: "facts.Module", brief: bool) -> Iterator[str]:
    on = f"on {module.device}" if module.device else "not recorded"
    memory = f"graph memory {_size(module.graph_bytes)}"
    shown = module.backend if brief else f"{module.backend}, {memory}"
    yield f"{module.name} ({module.class_name}) {on}, {shown}"
    yield from (f"  ! {note}" for note in module.notes)
    yield from (f"  eager {count}: {reason}" for reason, count in module.eager.items())
    if brief and module.device:
        yield f"  {memory}"
    for signature in module.signatures:
        yield from _signature(signature, brief)
    for region in module.regions:
        many = f"{region.count} regions" if region.count > 1 else "region"
        yield f"  {many} {region.name} ({region.class_name})"
        yield from (f"    eager {count}: {reason}" for reason, count in region.eager.items())
        for signature in region.signatures:
            yield from (f"  {line}" for line in _signature(signature, brief))


def _signature(signature: "facts.Signature", brief: bool) -> Iterator[str]:
    yield f"  signature {signature.label}: {signature.state}"
    variants = f" variants {len(signature.variants)}," if brief else ""
    took = f"{signature.capture_seconds:.2f} s"
    yield (
        f"    cold {signature.cold}, captures {signature.captures} in {took},"
        f" replays {signature.replays},{variants} inputs {_size(signature.input_bytes)}"
    )
    if signature.states > 1:
        yield f"    recorded in {signature.states} states of the module"
    if signature.dropped:
        yield f"    dropped {signature.dropped} replays: the module had changed; done anew"
    if signature.regions:
        share = "" if signature.share is None else f", {signature.share:.0%} of its operations"
        yield f"    {signature.regions} regions of a computing call{share} in replays"
    if brief and signature.evictions:
        yield f"    made room for other recordings {signature.evictions} times"
    if brief and signature.differs:
        yield f"    differs from the nearest recorded: {signature.differs}"
    if signature.verdict:
        yield f"    {'shown: ' if brief else ''}{signature.verdict}"
    yield from (f"    eager {count}: {reason}" for reason, count in signature.eager.items())
    for number, variant in enumerate(signature.variants):
        yield from (_report if brief else _variant)(number, variant)


def _report(number: int, variant: "facts.Variant") -> Iterator[str]:
    breaks = [f"{step.reason} at {step.where}" for step in variant.steps if step.kind == "break"]
    yield (
        f"    variant {number}: segments {variant.count('segment')},"
        f" breaks {len(breaks)}, guards {variant.compared}"
    )
    for told, count in Counter(breaks).items():
        yield f"      break{f' x{count}' if count > 1 else ''}: {told}"
    yield from (f"      guard: {guard.what} is {guard.expected}" for guard in variant.guards)


def _variant(number: int, variant: "facts.Variant") -> Iterator[str]:
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
            f" undo {_size(variant.undo_bytes)} a replay"
        )
    for same, steps in groupby(variant.steps, key=lambda step: replace(step, ms=None)):
        group = list(steps)
        if same.kind != "break":
            yield from (f"      {_step(step)}" for step in group)
        else:
            yield f"      {_break(group)}"


def _step(step: "facts.Step") -> str:
    what = "" if step.ops is None else f"  {step.ops} operations"
    return f"{step.kind}{what}{_ms([step])}"


def _break(group: list["facts.Step"]) -> str:
    """Tell breaks that follow each other and differ in nothing but their times as one."""
    step = group[0]
    times = f" x{len(group)}" if len(group) > 1 else ""
    told = step.module is None or (step.module and step.reason.startswith(step.module))
    inside = "" if told else f" in {step.module or 'the module itself'}"
    hands = f", hands over {_values(step.hands)}" if step.hands else ""
    marked = ", marked" if step.marked else ""
    return f"break{times}  {step.reason}{inside} at {step.where}{marked}{hands}{_ms(group)}"


def _ms(group: list["facts.Step"]) -> str:
    times = [step.ms for step in group if step.ms is not None]
    return f"  {sum(times):.3f} ms" if times else ""


def _values(hands: "tuple[facts.HandedValue, ...]") -> str:
    said = [
        f"shape {hand.value}" if hand.guard == "shape"
        else f"{hand.value!r}" if hand.guard == "exact"
        else f"{hand.value!r} ({hand.guard or 'not used'})"
        for hand in hands[:_MOST]
    ]  # fmt: skip
    return ", ".join(said) + _rest(len(hands))


def _reads(reads: "tuple[facts.ExternalRead, ...]") -> str:
    said = [f"{read.dtype}{list(read.shape)}" for read in reads[:_MOST]]
    total = _size(sum(read.bytes for read in reads))
    return f"{len(reads)} tensors, {total}: {', '.join(said)}{_rest(len(reads))}"


def _rest(count: int) -> str:
    return f" and {count - _MOST} more" if count > _MOST else ""


def _size(count: int) -> str:
    """Give bytes in the unit that suits them."""
    if count < 2**20:
        return f"{count} bytes" if count < 2**10 else f"{count / 2**10:.1f} KiB"
    return f"{count / 2**20:.1f} MiB"
