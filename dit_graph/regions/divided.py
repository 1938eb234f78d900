"""How the regions do in one signature of the whole: what calls count, and whether they pay."""

from dataclasses import dataclass

from dit_graph.devices.base import Timer
from dit_graph.regions.operations import Operations
from dit_graph.regions.region import CallOfAll
from dit_graph.runner.entry import PAUSE, Entry
from dit_graph.runner.proof import Gate
from dit_graph.runner.replay import TIMED

NONE_RAN = "no region ran: what stands around them answered, such as a step cache"
MANY_IN_VAIN = 3  # calls in a row in which every region was eager
PLAIN_IN_VAIN = 8  # eager calls to be timed, in which other regions ran than in replayed ones
COUNTED = 3  # calls; a cache may fill up in one of them
COUNTED_IN_VAIN = 64  # calls whose operations are counted, in which fewer regions ran


@dataclass(eq=False)
class Divided:
    """What is known of the regions' answers to one signature of the whole.

    Args:
        gate: times computing calls, those in which most regions run, with regions and without.
        reason: why the whole does not answer.
        most: regions that ran in one call.
        share: of a computing call's operations, what ran in replays; None until it is known.
        settled: the last call met no region that is still to be recorded.
    """

    gate: Gate | None
    reason: str = ""
    most: int = 0
    share: float | None = None
    settled: bool = False
    _counted: int = 0  # calls that the share was taken in; the least that ran around regions counts
    _counted_in_vain: int = 0
    _plain_in_vain: int = 0
    _in_vain: int = 0
    _slower: str = ""  # than eager, as the gate has shown
    _paused: int = 0  # how many more calls are eager as a whole
    _neither: str = ""

    def why_not(self) -> str:
        """Why this call is eager as a whole after all, or an empty string."""
        if self.gate is not None and (slower := self.gate.slower()):
            self._slower = f"its regions: {slower}"
        self._paused = max(0, self._paused - 1)
        return self._slower or (self._neither if self._paused else "")

    @property
    def timing(self) -> Gate | None:
        """The gate while it is open."""
        return None if self.gate is None or self.gate.decided else self.gate

    def counter(self) -> Operations | None:
        """What counts operations in the next call, if it should."""
        rare = self._counted_in_vain > COUNTED_IN_VAIN
        wanted = self.most > 0 and self._counted < COUNTED and not rare
        return Operations() if wanted and self.timing is None else None

    def count(self, entry: Entry, call: CallOfAll) -> None:
        """Count the call as its regions were answered."""
        heard, counts = call.heard, entry.counts
        if call.plain:
            counts.eager[TIMED] += 1
        elif not heard.ran:
            counts.eager[NONE_RAN] += 1
        elif heard.eager:
            counts.eager[f"{self.reason}; in a region: {next(iter(heard.eager))}"] += 1
        else:
            counts.note("captures" if heard.captures else "cold" if heard.cold else "replays")

    def learn(self, call: CallOfAll, timer: Timer | None) -> None:
        """What a call shows of time and of operations; one in which fewer regions ran does not."""
        heard = call.heard
        self.settled = not heard.cold
        self._in_vain = self._in_vain + 1 if heard.eager.total() == heard.ran > 0 else 0
        if self._in_vain >= MANY_IN_VAIN:
            self._in_vain, self._paused = 0, PAUSE
            self._neither = f"{self.reason}; its regions neither: {next(iter(heard.eager))}"
        replayed = heard.ran > 0 and heard.replays == heard.ran and not heard.compared
        if not (replayed or call.plain):
            return
        if replayed and heard.ran > self.most:
            self.most, self.share, self._counted = heard.ran, None, 0
            if self.timing is not None:
                self.timing.replay, self.timing.eager = [], []
        if heard.ran < self.most:
            self._learns_nothing(call)
        elif self.timing is not None and timer is not None:
            (self.timing.eager if call.plain else self.timing.replay).append(timer)
        elif call.outside is not None and replayed:
            self._counted += 1
            all_of_them = heard.operations + heard.breaks + call.outside.count
            self.share = max(self.share or 0.0, heard.operations / max(1, all_of_them))

    def _learns_nothing(self, call: CallOfAll) -> None:
        self._plain_in_vain += call.plain
        self._counted_in_vain += call.outside is not None
        if self._plain_in_vain > PLAIN_IN_VAIN and self.gate is not None:
            self.gate.stop("not timed: other regions run at every call")
