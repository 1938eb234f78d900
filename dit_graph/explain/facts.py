"""Frozen facts, which an explanation holds because it outlives the recordings that it is of."""

import json
import os
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dit_graph.explain.plot import figure
from dit_graph.explain.syncs import HostSync
from dit_graph.explain.text import lines

StepKind = Literal["segment", "break", "reset", "whole call"]
_OF_THE_REPORT = ("compared", "evictions", "differs")
"""These facts are shown by the report alone; `to_dict` has what the text of an explanation has."""


@dataclass(frozen=True)
class HandedValue:
    """A break hands this value to Python, and `guard` is what a replay compares of it.

    `guard` is `"exact"`, `"shape"`, or the outcomes of the comparisons that the forward made with a
    float, such as `"< 0.5 is True"`; it is empty where nothing was done with the float.
    """

    value: Any
    guard: str


@dataclass(frozen=True)
class Step:
    """This is one step of a recording.

    Args:
        ops: operations of a segment; None for the other kinds.
        reason, where: why a break is one, and the source line (`file:line in function`).
        module: path of the innermost submodule whose call made the break, `""` for the module
            itself, None when no call of either was found.
        marked: somebody asked for this break, by decorator or by pattern.
        hands: what the break hands to Python.
        ms: milliseconds on the device's clock; None where they were not measured.
    """

    kind: StepKind
    ops: int | None = None
    reason: str = ""
    where: str = ""
    module: str | None = None
    marked: bool = False
    hands: tuple[HandedValue, ...] = ()
    ms: float | None = None


@dataclass(frozen=True)
class GuardedValue:
    """This value is compared before the first step, because the steps hold for it alone."""

    what: str
    expected: Any


@dataclass(frozen=True)
class ExternalRead:
    """Segments read this tensor, which is neither an argument nor a weight.

    It comes from an attribute, a closure or a memo table, or was made from Python data alone.
    `bytes` is the storage that the recording keeps alive for it.
    """

    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True)
class Variant:
    """This is one recording of a signature; the one that was used last comes first.

    Args:
        written_inputs: indices of the tensor arguments that the forward writes in place.
        written_outside: how many tensors from outside the call it writes.
        undo_bytes: taken aside at every replay, in case a guard fails later.
        not_timed: why `ms` is None everywhere although times were asked for.
        compared: how many values a replay compares, those that breaks hand over included.
    """

    steps: tuple[Step, ...]
    guards: tuple[GuardedValue, ...]
    external_reads: tuple[ExternalRead, ...]
    written_inputs: tuple[int, ...]
    written_outside: int
    undo_bytes: int
    not_timed: str = ""
    compared: int = 0

    def count(self, kind: StepKind) -> int:
        return sum(step.kind == kind for step in self.steps)

    @property
    def ops(self) -> int:
        return sum(step.ops or 0 for step in self.steps)

    @property
    def ms(self) -> float | None:
        """Sum up its steps; None where they were not measured."""
        times = [step.ms for step in self.steps if step.ms is not None]
        return sum(times) if times else None


@dataclass(frozen=True)
class Signature:
    """This is one signature of calls; its label tells their tensors and shapes.

    Args:
        eager: calls without a replay, by reason.
        verdict: what comparisons with eager have shown.
        evictions: how often its recordings made room for others.
        differs: from the nearest signature that was recorded when this one first came.
        dropped: replays that were launched in another state than their own, and done anew.
        states: of the module, in which it is recorded.
        regions: that ran in one call, at most, where they answer in the module's place.
        share: of such a call's operations, what ran in replays; None where it is not known.
    """

    label: str
    state: str
    cold: int
    captures: int
    replays: int
    eager: dict[str, int]
    capture_seconds: float
    input_bytes: int
    verdict: str
    variants: tuple[Variant, ...]
    evictions: int = 0
    differs: str = ""
    dropped: int = 0
    states: int = 0
    regions: int = 0
    share: float | None = None


@dataclass(frozen=True)
class Module:
    """This is one graphed module, or `count` regions of one that follow each other.

    The modules of one pipeline share their `graph_bytes`. Of regions counts are summed up, and the
    recordings of the first are shown.
    """

    name: str
    class_name: str
    device: str | None
    backend: str
    graph_bytes: int
    notes: tuple[str, ...]
    eager: dict[str, int]
    signatures: tuple[Signature, ...]
    regions: "tuple[Module, ...]" = ()
    count: int = 1


@dataclass(frozen=True)
class Explanation:
    """This is what is recorded of one pipeline or module; `str()` makes it text.

    `syncs_removed` says what `remove_syncs` took out of the loop and how often; it is None without
    that option. `syncs` has the host syncs of a picture; it is None where nobody looked for them.
    """

    modules: tuple[Module, ...]
    notes: tuple[str, ...] = ()
    syncs_removed: dict[str, int] | None = None
    syncs: tuple[HostSync, ...] | None = None

    def __str__(self) -> str:
        return "\n".join(lines(self))

    def to_dict(self) -> dict[str, Any]:
        """Give what the text shows as plain values, which JSON gives back equal."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self, dict_factory=_explained)))
        return plain

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Write a PNG that has one row for each variant.

        Raises:
            ConfigError: matplotlib is not installed, or nothing is recorded.
        """
        figure(self).savefig(path, format="png")


def _explained(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in fields if name not in _OF_THE_REPORT}
