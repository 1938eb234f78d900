"""What a recorded call does beside giving its result, and what a restart of it must put back.

Its writes in place are noted before they happen: an operation's schema says what it writes into.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dit_graph.capture.frames import source_line
from dit_graph.capture.kinds import Kind, Known, storage_of
from dit_graph.devices.base import Device
from dit_graph.tape.tape import Reset, Tape, Undo, WholeCall
from dit_graph.tape.trees import tensors_of

When = Callable[[Callable[[], object]], object]
"""Does an action at the moment just before a write happens."""


def writes(func: Any) -> bool:
    """Tell whether an operation writes into one of its operands."""
    schema = getattr(func, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def whole_of(t: torch.Tensor) -> torch.Tensor:
    """Give all elements of the storage that `t` lies in."""
    size = t.untyped_storage().nbytes() // t.itemsize
    return t.detach().as_strided((size,), (1,), 0)


def at_once(action: Callable[[], object]) -> None:
    """Do it now: the `When` of a write that happens right away."""
    action()


class Effects:
    """Collects what one capture does that outlives the call: writes, draws, side effects of breaks.

    `undo` puts back what the capture itself has done. `draws` says whether an operation was seen
    that draws random numbers, and `may_draw` whether compiled code ran, whose draws nobody sees.
    """

    def __init__(
        self, device: Device, static: Sequence[torch.Tensor], module: Sequence[torch.Tensor],
        known: Known, tape: Tape,
    ) -> None:  # fmt: skip
        self.undo = Undo(device.generators())
        self.undo.take([t for t in module if not isinstance(t, torch.nn.Parameter)], random=True)
        self.draws = self.may_draw = False
        self._early: bool | None = None  # whether something moved before the user's code ran
        self.impure = ""  # The reason of the first break that may have side effects.
        self._static, self._known, self._tape = static, known, tape
        self._versions: list[int] = []
        self._module = [(t, t._version) for t in module if not t.is_inference()]
        self._outside: list[torch.Tensor] = []  # These whole storages are written, and in `undo`.
        self._arguments: set[int] = set()  # In these storages lie staged arguments it writes.
        self.expect_writes()

    def note(self, func: Any, args: Any, kwargs: Any, before: When = at_once) -> None:
        """Note the writes of an operation that is about to be recorded, or run."""
        if not writes(func):
            return
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            for t in tensors_of(value):
                self._note(t, before)

    def _note(self, t: torch.Tensor, before: When) -> None:
        if self._known.kind(t) is Kind.STATIC:
            self._arguments.add(storage_of(t))
        if self._known.is_constant(t):
            whole = whole_of(t)
            before(lambda: self._tape.steps.insert(0, Reset(whole, whole.clone())))
            self._known.mark(t, Kind.LIVE)
        taken = any(storage_of(s) == storage_of(t) for s in self._outside)
        if self._known.is_outside(t) and not taken:
            self._outside.append(whole_of(t))
            self.undo.promise(self._outside[-1], before)
            if self._known.is_host(t):
                self._known.mark(t, Kind.LIVE)

    def before_users_code(self) -> None:
        """Note what a replay moves that goes no further than here, the first time."""
        if self._early is None:
            self._early = bool(self.draws or self.may_draw or self._written_outside())

    def expect_writes(self) -> None:
        """Count writes into staged arguments from now on: the forward makes them."""
        self._versions = [t._version for t in self._static]

    def restart_point(self) -> None:
        """Note what must be put back when a replay starts again from here."""
        self._tape.saved = self._written_outside()
        self._tape.random_before_guard = self.draws or self.may_draw

    def guarded(self, reason: str) -> None:
        """Note that a replay may have to start again from here."""
        self.restart_point()
        if self.impure:
            self._tape.unrestartable = (
                f"state may be written before a guard: {self.impure}, then {reason} at"
                f" {source_line()}; declare the break pure=True if it has no side effect"
            )

    def finish(self) -> None:
        """Write down on the tape what the whole call did."""
        tape = self._tape
        tape.written_inputs = [
            i
            for i, t in enumerate(self._static)
            if t._version != self._versions[i] or storage_of(t) in self._arguments
        ]
        # torch tags attention as random for its dropout; where that is off no generator moves.
        self.draws = (self.draws or self.may_draw) and self.undo.generators_moved()
        tape.draws, self.may_draw = self.draws, False
        self.restart_point()  # A replay may fail at its last step.
        tape.written_outside = {t.data_ptr() for t in map(whole_of, self._written_outside())}
        self.before_users_code()
        tape.moves_early = bool(self._early)
        tape.effects = self._summary()

    def _summary(self) -> str:
        """Say why the forward cannot run twice for one call, or give an empty string."""
        if any(isinstance(step, WholeCall) for step in self._tape.steps):
            return "a replay is an eager call itself"
        if self.impure:
            return f"{self.impure} may have side effects"
        if self._tape.written_inputs:
            return "it writes into an argument"
        return "it writes into what outlives the call" if self._tape.written_outside else ""

    def _written_outside(self) -> list[torch.Tensor]:
        """List tensors from outside that operations wrote, or compiled code, by their versions."""
        seen = set(map(storage_of, self._outside))
        moved = [t for t, version in self._module if t._version != version]
        return self._outside + [t for t in moved if storage_of(t) not in seen]
