"""How calls were answered, as numbers. Keeps nothing alive that they are about."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(eq=False)
class Counts:
    """Of one signature."""

    cold: int = 0
    captures: int = 0
    replays: int = 0
    dropped: int = 0  # replays whose state turned out to be another one; decided again
    eager: Counter[str] = field(default_factory=Counter)

    @property
    def calls(self) -> int:
        return self.cold + self.captures + self.replays + self.eager.total()

    def add(self, other: "Counts") -> None:
        """Take over another one's numbers."""
        self.cold += other.cold
        self.captures += other.captures
        self.replays += other.replays
        self.dropped += other.dropped
        self.eager += other.eager


@dataclass(eq=False)
class Tally:
    """Of one module."""

    calls: int = 0  # that came to a runner
    refused: Counter[str] = field(default_factory=Counter)  # of those, eager without a signature
    unreached: Counter[str] = field(default_factory=Counter)  # that came to none
    signatures: dict[Any, Counts] = field(default_factory=dict)  # by key, of all states together
    forgotten: Counts = field(default_factory=Counts)  # of signatures that made room

    def of(self, key: Any) -> Counts:
        return self.signatures.setdefault(key, Counts())

    def forget(self, key: Any) -> None:
        self.forgotten.add(self.signatures.pop(key, Counts()))


def totals(tallies: Iterable[Tally]) -> dict[str, Any]:
    """`calls`, `cold`, `captures`, `replays`, `dropped` over all modules, `eager` by reason."""
    calls, found = 0, Counts()
    for tally in tallies:
        calls += tally.calls + sum(tally.unreached.values())
        # copies: another thread may count meanwhile
        found.eager += Counter(dict(tally.unreached)) + Counter(dict(tally.refused))
        for counts in [*dict(tally.signatures).values(), tally.forgotten]:
            found.add(replace(counts, eager=Counter(dict(counts.eager))))
    return {
        "calls": calls,
        "cold": found.cold,
        "captures": found.captures,
        "replays": found.replays,
        "dropped": found.dropped,
        "eager": dict(found.eager),
    }
