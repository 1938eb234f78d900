"""What an explanation holds: frozen facts that outlive the recordings they were read from."""

import os
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dit_graph.explain import plot, text
from dit_graph.explain.syncs import HostSync

StepKind = Literal["segment", "break", "reset", "whole call"]


@dataclass(frozen=True)
class HandedValue:
    """A value that a break hands to Python, and what a replay compares of it.

    `guard` is `"exact"`, `"shape"`, or the outcomes of the comparisons that the forward made with a
    float, such as `"< 0.5 is True"`; it is empty where nothing was done with the float.
    """

    value: Any
    guard: str


@dataclass(frozen=True)
class Step:
    """One step of a tape.

    Args:
        ops: operations of a segment; None for the other kinds.
        reason, where: why a break is one, and the source line (`file:line in function`).
        module: path of the innermost submodule whose call made the break, `""` for the module
            itself, None when no call of either was found.
        marked: somebody asked for this break, by decorator or by pattern.
        hands: what the break hands to Python.
        ms: milliseconds on the device's clock; None where it was not measured.
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
    """A value that is compared before the first step."""

    what: str
    expected: Any


@dataclass(frozen=True)
class ExternalRead:
    """A tensor that segments read and that is neither argument nor weight.

    It comes from an attribute, a closure or a memo table, or was made from Python data alone.
    `bytes` is the storage that the tape keeps alive for it.
    """

    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True)
class Variant:
    """One recording of a bucket; the last used one comes first.

    Args:
        written_inputs: indices of the tensor arguments that the forward writes in place.
        written_outside: how many tensors from outside the call it writes.
        undo_bytes: taken aside at every replay, in case a guard fails later.
        not_timed: why `ms` is None everywhere although times were asked for.
    """

    steps: tuple[Step, ...]
    guards: tuple[GuardedValue, ...]
    external_reads: tuple[ExternalRead, ...]
    written_inputs: tuple[int, ...]
    written_outside: int
    undo_bytes: int
    not_timed: str = ""

    def count(self, kind: StepKind) -> int:
        return sum(step.kind == kind for step in self.steps)

    @property
    def ops(self) -> int:
        return sum(step.ops or 0 for step in self.steps)

    @property
    def ms(self) -> float | None:
        """The sum over its steps; None where they were not measured."""
        times = [step.ms for step in self.steps if step.ms is not None]
        return sum(times) if times else None


@dataclass(frozen=True)
class Bucket:
    """One signature of calls. `eager` counts by reason; `verdict` is what checks of it gave."""

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


@dataclass(frozen=True)
class Module:
    """One graphed module. `graph_bytes` is shared by the modules of one pipeline."""

    name: str
    class_name: str
    device: str | None
    backend: str
    graph_bytes: int
    notes: tuple[str, ...]
    eager: dict[str, int]
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True)
class Explanation:
    """What is recorded of one pipeline or module. `str()` of it is the text.

    `syncs_removed` has what `remove_syncs` took out of the loop and how often; None without it.
    `syncs` has the host syncs of a picture where they were looked for (`host_syncs`), else None.
    """

    modules: tuple[Module, ...]
    notes: tuple[str, ...] = ()
    syncs_removed: dict[str, int] | None = None
    syncs: tuple[HostSync, ...] | None = None

    def __str__(self) -> str:
        return "\n".join(text.lines(self))

    def to_dict(self) -> dict[str, Any]:
        """Everything as dicts, lists and plain values, in a form that JSON gives back equal."""
        plain: dict[str, Any] = _lists(asdict(self))
        return plain

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Write a PNG with one row a variant.

        Raises:
            ConfigError: matplotlib is not installed, or nothing is recorded.
        """
        plot.figure(self).savefig(path, format="png")


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _lists(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_lists(part) for part in value]
    return value
