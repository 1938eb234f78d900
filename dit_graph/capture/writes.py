"""Notes in-place writes of one capture, which must be put back before a call starts again."""

from collections.abc import Callable
from typing import Any

import torch

from dit_graph.capture.kinds import Kind, Known, storage_of
from dit_graph.tape.tape import Reset, Tape, Undo
from dit_graph.tape.trees import tensors_of

When = Callable[[Callable[[], object]], object]
"""Does an action at the moment just before a write happens."""


def writes(func: Any) -> bool:
    """Tell whether an operation writes into one of its operands."""
    schema = getattr(func, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


class Writes:
    """Keeps copies of tensors from outside before their first write, and of written constants."""

    def __init__(self, known: Known, tape: Tape, undo: Undo) -> None:
        self._known, self._tape, self._undo = known, tape, undo
        self.outside: list[torch.Tensor] = []  # These whole storages are kept in `undo`.
        self.arguments: set[int] = set()  # Staged arguments lie in these storages.

    def note(self, func: Any, args: Any, kwargs: Any, before: When) -> None:
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
            self.arguments.add(storage_of(t))
        if self._known.is_constant(t):
            whole = whole_of(t)
            before(lambda: self._tape.steps.insert(0, Reset(whole, whole.clone())))
            self._known.mark(t, Kind.LIVE)
        taken = any(storage_of(s) == storage_of(t) for s in self.outside)
        if self._known.is_outside(t) and not taken:
            self.outside.append(whole_of(t))
            self._undo.promise(self.outside[-1], before)
            if self._known.is_host(t):
                self._known.mark(t, Kind.LIVE)


def whole_of(t: torch.Tensor) -> torch.Tensor:
    """Give all elements of the storage that `t` lies in."""
    size = t.untyped_storage().nbytes() // t.itemsize
    return t.detach().as_strided((size,), (1,), 0)
