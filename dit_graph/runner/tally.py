"""How calls were answered, as numbers. Keeps nothing alive that they are about."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Counts:
    """Of one signature."""

    cold: int = 0
    captures: int = 0
    replays: int = 0
    eager: Counter[str] = field(default_factory=Counter)

    @property
    def calls(self) -> int:
        return self.cold + self.captures + self.replays + self.eager.total()

    def add(self, other: "Counts") -> None:
        """Take over another one's numbers."""
        self.cold += other.cold
        self.captures += other.captures
        self.replays += other.replays
        self.eager += other.eager


@dataclass(eq=False)
class Tally:
    """Of one module."""

    calls: int = 0  # that came to a runner
    refused: Counter[str] = field(default_factory=Counter)  # of those, eager without a signature
    unreached: Counter[str] = field(default_factory=Counter)  # that came to none
    signatures: list[Counts] = field(default_factory=list)
    forgotten: Counts = field(default_factory=Counts)  # of signatures that made room

    def new(self) -> Counts:
        self.signatures.append(Counts())
        return self.signatures[-1]

    def forget(self, counts: Counts) -> None:
        self.forgotten.add(counts)
        self.signatures = [kept for kept in self.signatures if kept is not counts]


def totals(tallies: Iterable[Tally]) -> dict[str, Any]:
    """`calls`, `cold`, `captures` and `replays` over all modules, `eager` as reason → count."""
    calls, found = 0, Counts()
    for tally in tallies:
        calls += tally.calls + sum(tally.unreached.values())
        # copies: another thread may count meanwhile
        found.eager += Counter(dict(tally.unreached)) + Counter(dict(tally.refused))
        for counts in [*tally.signatures, tally.forgotten]:
            eager = Counter(dict(counts.eager))
            found.add(Counts(counts.cold, counts.captures, counts.replays, eager))
    return {
        "calls": calls,
        "cold": found.cold,
        "captures": found.captures,
        "replays": found.replays,
        "eager": dict(found.eager),
    }
