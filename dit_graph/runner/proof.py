"""What is still to be shown of an entry's recordings: eager's bits, and less time than eager.

Decides from comparisons and timings; runs nothing itself.
"""

from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from dit_graph.devices.base import Timer
from dit_graph.tape.guards import same
from dit_graph.tape.tape import Tape

Turn = Literal["replay", "eager"]
CLOSE = 0.03  # a gain smaller than this is measured a second time


class Gate:
    """Replays against eager calls that took a replay's place, in milliseconds of device time.

    Replay, eager, replay, and where they are close eager and replay again. The smallest of each
    counts: what disturbs a call makes it longer. Nothing waits for a timing.
    """

    def __init__(self, min_gain: float) -> None:
        self.min_gain = min_gain
        self.first_eager = True  # the next eager call may be the first on the caller's stream,
        # where the allocator has yet to get memory for it, so its time alone decides nothing
        self.replay: list[Timer] = []
        self.eager: list[Timer] = []
        self.decided = False
        self.text = ""

    def wants_eager(self) -> bool:
        return not self.decided and len(self.eager) < min(2, len(self.replay))

    def stop(self, why: str) -> None:
        """No verdict, for this reason: recordings stay."""
        if not self.decided:
            self.decided, self.text = True, why
            self.replay, self.eager = [], []

    def slower(self) -> str:
        """Why replays do not pay, once that is known; empty before, and when they do."""
        if self.decided or not self.eager or len(self.replay) < 2:
            return ""
        times = [[timer.ms() for timer in timers] for timers in (self.replay, self.eager)]
        known = [[t for t in row if t is not None] for row in times]
        if known != times:
            return ""
        replay, eager = map(min, known)
        if len(self.eager) < 2 and (self.first_eager or abs(eager - replay) < CLOSE * eager):
            return ""
        self.decided = True
        self.text = f"replay {replay:.4g} ms vs eager {eager:.4g} ms"
        self.replay, self.eager = [], []
        return "" if replay <= eager * (1 - self.min_gain) else self.text


class Proof:
    """Of one entry: whose turn the next call is, and what has been shown."""

    def __init__(self, verify: str = "off", gate: Gate | None = None) -> None:
        self._verify = verify
        self.gate = gate
        self.compared = 0
        self.left_out = ""

    def has_run_eagerly(self) -> None:
        if self.gate is not None:
            self.gate.first_eager = False

    def stop_timing(self, why: str) -> None:
        """Variants of one entry do different work: their times say nothing of each other."""
        if self.gate is not None:
            self.gate.stop(why)

    def turn(self, tape: Tape) -> Turn:
        """Whether the next call is replayed, or eager answers in its place to be timed."""
        if self.compares(tape) or self.gate is None or not self.gate.wants_eager():
            return "replay"
        return "eager"

    def compares(self, tape: Tape) -> bool:
        """Whether this recording's replay is compared with an eager call on the same inputs."""
        if self._verify == "off" or (self._verify == "first" and tape.compared):
            return False
        if tape.effects:
            self.left_out = f"not compared: {tape.effects}"
        return not tape.effects

    @property
    def text(self) -> str:
        """What has been shown so far, for the report."""
        bits = f"bit-equal when compared ({self.compared}x)" if self.compared else self.left_out
        return "; ".join(part for part in (bits, self.gate.text if self.gate else "") if part)


def difference(result: Any, expected: Any) -> str:
    """How a replay's result differs from the eager one, or an empty string. Waits for both."""
    leaves, spec = pytree.tree_flatten(result)
    wanted, wanted_spec = pytree.tree_flatten(expected)
    if spec != wanted_spec:
        return f"its structure is {spec}, eager's {wanted_spec}"
    pairs = enumerate(zip(leaves, wanted))
    return next((f"result {i} {d}" for i, (a, b) in pairs if (d := _leaf_difference(a, b))), "")


def _leaf_difference(a: Any, b: Any) -> str:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return "" if same(a, b) else f"is {a!r}, eager's {b!r}"
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return f"is {tuple(a.shape)} {a.dtype}, eager's {tuple(b.shape)} {b.dtype}"
    if a is b or torch.equal(_bits(a), _bits(b)):
        return ""
    most = (a.double() - b.double()).abs().max().item() if a.dtype.is_floating_point else "?"
    return f"differs by up to {most:.3g}" if type(most) is float else "differs"


def _bits(t: torch.Tensor) -> torch.Tensor:
    """So that nan equals itself and -0.0 is not 0.0."""
    return t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
