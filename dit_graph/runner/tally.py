"""How calls were answered, as numbers. Keeps nothing alive that they are about."""

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Answer = Literal["cold", "captures", "replays"]


@dataclass(eq=False)
class Counts:
    """Of one signature."""

    cold: int = 0
    captures: int = 0
    replays: int = 0
    dropped: int = 0  # replays whose state turned out to be another one; decided again
    eager: Counter[str] = field(default_factory=Counter)

    def note(self, what: Answer, times: int = 1) -> None:
        """Count a call, here and where somebody on this thread listens."""
        setattr(self, what, getattr(self, what) + times)
        if listening.to is not None:
            setattr(listening.to, what, getattr(listening.to, what) + times)

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
class Heard(Counts):
    """How the regions that ran in one call were answered."""

    ran: int = 0
    compared: int = 0  # of them, with an eager call beside
    operations: int = 0  # in the segments that were replayed
    breaks: int = 0  # between these segments


class _Listening(threading.local):
    to: Heard | None = None


listening = _Listening()


@dataclass(eq=False)
class Tally:
    """Of one module.

    Args:
        regions: the tallies of its regions, where it has any.
    """

    calls: int = 0  # that came to a runner
    refused: Counter[str] = field(default_factory=Counter)  # of those, eager without a signature
    unreached: Counter[str] = field(default_factory=Counter)  # that came to none
    signatures: dict[Any, Counts] = field(default_factory=dict)  # by key, of all states together
    forgotten: Counts = field(default_factory=Counts)  # of signatures that made room
    regions: "list[Tally]" = field(default_factory=list)

    def of(self, key: Any) -> Counts:
        return self.signatures.setdefault(key, Counts())

    def forget(self, key: Any) -> None:
        self.forgotten.add(self.signatures.pop(key, Counts()))


def totals(tallies: Iterable[Tally]) -> dict[str, Any]:
    """`calls`, `cold`, `captures`, `replays`, `dropped` over all modules, `eager` by reason; and
    where regions ran the same of them, as `regions`."""
    all_of_them = list(tallies)
    found = _totals(all_of_them)
    if regions := [region for tally in all_of_them for region in tuple(tally.regions)]:
        found["regions"] = _totals(regions)
    return found


def _totals(tallies: Iterable[Tally]) -> dict[str, Any]:
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
