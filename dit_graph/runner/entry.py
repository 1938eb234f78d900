"""One signature's life, as data: recordings, counters and reasons. Touches no device."""

import logging
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dit_graph.call.context import Context
from dit_graph.call.key import GraphKey
from dit_graph.call.misses import miss
from dit_graph.runner.proof import Proof
from dit_graph.runner.tally import Counts, Tally
from dit_graph.tape.tape import Tape

Action = Literal["cold", "capture", "replay", "eager"]
MAX_KEYS = 1024  # signatures that a runner remembers
PAUSE = 64  # calls until a signature is tried again that the device had no room for
MAX_ATTEMPTS = 3  # captures of one signature that may fail in a row before it is given up
log = logging.getLogger("dit_graph")


@dataclass(frozen=True)
class Decision:
    """What happens to a call, and why."""

    action: Action
    reason: str = ""
    divides: bool = False  # eager as a whole; its regions may be recorded all the same


@dataclass(eq=False)
class Entry:
    """Cold at the first call, captured at the second, replayed from then on, unless blocked."""

    label: str
    tapes: list[Tape] = field(default_factory=list)  # one a variant, the last used one first
    static: Any = None  # StaticBuffers
    blocked: str = ""
    divides: bool = True  # what blocks the whole does not block its regions
    warm: bool = False
    attempts: int = 0  # captures in a row that led to no recording
    gave_up: str = ""  # why no further variant is recorded
    evictions: int = 0  # times that its recordings had to make room for others
    threads: int = 0  # calls in a row from threads that had not warmed up, so none could record
    paused: int = 0  # how many more calls stay eager, for `pause_reason`
    pause_reason: str = ""
    missed: int = 0  # calls in a row whose values fitted no variant
    broken: int = 0  # replays in a row that raised an error
    counts: Counts = field(default_factory=Counts)
    capture_seconds: float = 0.0
    proof: Proof = field(default_factory=Proof)
    differs: str = ""  # from the nearest recorded key, when it first came
    divided: Any = None  # how its regions do, while they answer

    def decide(self) -> Decision:
        gate = self.proof.gate if self.tapes else None
        if gate is not None and (slower := gate.slower()):
            self.block(slower, divides=False)
        if self.blocked:
            return Decision("eager", self.blocked, self.divides)
        if self.tapes:
            return Decision("replay")
        if self.paused:
            return Decision("eager", self.pause_reason)
        return Decision("capture" if self.warm else "cold")

    def goes_by(self, decision: Decision) -> None:
        """A call follows a decision: of a pause one call less is left."""
        if decision.action == "eager" and self.paused:
            self.paused -= 1

    def unsettled(self, reason: str) -> None:
        """A capture whose state had not settled: warm up again, a few times, then give up.

        Recordings that are there stay; no variant is added to them then.
        """
        log.debug("dit_graph: signature %s warms up again: %s", self.label, reason)
        self.attempts += 1
        self.warm = False
        if not self.tapes:
            self.static = None
        if self.attempts >= MAX_ATTEMPTS:
            self.gave_up = reason
            if not self.tapes:
                self.block(reason)

    def raised(self, error: Exception) -> None:
        """The forward raised, and so does the call; it is recorded at another, a few times."""
        reason = f"the forward raised {type(error).__name__} while it was recorded"
        self.counts.eager[reason] += 1
        self.unsettled(reason)

    def keep(self, tape: Tape) -> None:
        """A recording came about."""
        self.attempts, self.gave_up = 0, ""
        self.tapes.insert(0, tape)

    def pause(self, reason: str) -> None:
        """Eager for the next calls, then another try."""
        self.paused, self.pause_reason = PAUSE, reason

    def block(self, reason: str, divides: bool = True) -> None:
        """Eager from now on, with this reason; the first one stays.

        `divides`: the regions of the module may be recorded for all that.
        """
        self.retire()
        if not self.blocked:
            self.blocked, self.divides = reason, divides

    def prefer(self, tape: Tape) -> None:
        if self.tapes[0] is not tape:
            self.tapes.remove(tape)
            self.tapes.insert(0, tape)

    def retire(self) -> None:
        """Let go of the recordings; the next call of this key is cold again."""
        for tape in list(self.tapes):
            self.forget(tape)
        self.static = None
        self.warm = False

    def forget(self, tape: Tape) -> None:
        """Let go of one recording."""
        if tape in self.tapes:
            self.tapes.remove(tape)
        tape.steps.clear()  # a step may refer back to the tape
        if not self.tapes:
            self.static = None
            self.warm = False

    def may_record_another(self, most: int) -> bool:
        """After a miss: whether a new variant is worth it, or no variant ever holds twice.

        After `most` misses in a row the calls stay eager; every 64th tries again.
        """
        self.missed += 1
        return not self.gave_up and (self.missed <= most or self.missed % 64 == 0)

    @property
    def may_wait(self) -> bool:
        """Whether its replay may be launched before the state is known to be still its own."""
        if not self.tapes or any(tape.moves_early for tape in self.tapes):
            return False
        return self.proof.turn(self.tapes[0]) == "replay"

    @property
    def verdict(self) -> str:
        """What comparisons with eager have shown, or an empty string."""
        return self.proof.text

    @property
    def state(self) -> str:
        if self.divided is not None:
            return f"in regions: {self.divided.reason}"
        if self.blocked:
            return f"eager: {self.blocked}"
        return "captured" if self.tapes else "warm" if self.warm else "cold"


class Entries(dict[GraphKey, Entry]):
    """The keys that came in one state of the module.

    Those without a recording make room when there are many.
    """

    def __init__(self, tally: Tally) -> None:
        super().__init__()
        self._tally = tally

    def new(self, key: GraphKey, proof: Proof) -> Entry:
        idle = [key for key, entry in self.items() if not entry.tapes]
        for old in idle[: max(0, len(self) + 1 - MAX_KEYS)]:
            del self[old]
            self._tally.forget(old)
        self[key] = entry = Entry(key.describe(), proof=proof, counts=self._tally.of(key))
        entry.differs = self.miss(key)
        return entry

    def settle(self, key: GraphKey, now: Context) -> None:
        """Have the entry of `key` stand for the context `now`, which its forward has left behind.

        The first attention of a process on CUDA settles the order in which torch tries its
        kernels. Without this the next call would be of a key that nobody has met.
        """
        settled = replace(key, context=now)
        if settled not in self:
            self[settled] = self.pop(key)
            self._tally.signatures[settled] = self._tally.signatures.pop(key)

    def miss(self, key: GraphKey) -> str:
        """Where a key differs from the nearest one that is recorded."""
        return miss(key, [other for other, entry in self.items() if entry.tapes])

    @property
    def recorded(self) -> bool:
        """Whether there is any recording."""
        return any(entry.tapes for entry in self.values())

    def forget_recordings(self) -> None:
        """Let go of every recording and nothing else."""
        for entry in self.values():
            for tape in tuple(entry.tapes):
                entry.forget(tape)
