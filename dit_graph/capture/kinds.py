"""What one capture knows of every tensor it meets: where the memory comes from."""

import gc
from collections.abc import Iterable
from enum import Enum
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dit_graph.devices.base import Device
from dit_graph.tape.trees import tensors_of


class Kind(Enum):
    """Where a tensor's memory comes from.

    A tensor without a kind is from outside the call and the module: an attribute, a memo table.
    """

    STATIC = "a staged argument"
    MODULE = "a parameter or buffer"
    POOL = "born in a segment"
    LIVE = "made anew by a break at every replay"
    CONSTANT = "made from Python data; held"
    BREAK = "born in a marked break; only its results may be read outside"


def storage_of(t: torch.Tensor) -> int:
    """Identify a tensor's storage, for as long as somebody refers to it."""
    return int(t.untyped_storage()._cdata)


class Known:
    """Keeps the kind of each storage, with a weak reference so that its identity is not re-used."""

    def __init__(
        self, device: Device, static: Iterable[torch.Tensor], module: Iterable[torch.Tensor]
    ) -> None:
        self._device = device
        self._kinds: dict[int, tuple[Kind, StorageWeakRef]] = {}
        self._host: set[int] = set()
        for t in module:
            self.mark(t, Kind.MODULE)
        for t in static:
            self.mark(t, Kind.STATIC)

    def kind(self, t: torch.Tensor) -> Kind | None:
        """Give its kind, or None for a tensor from outside (attribute, closure, memo table)."""
        entry = self._kinds.get(storage_of(t))
        return entry[0] if entry else None

    def mark(self, t: torch.Tensor, kind: Kind, host: bool = False) -> None:
        storage = t.untyped_storage()
        self._kinds[storage._cdata] = (kind, StorageWeakRef(storage))
        if host:
            self._host.add(storage._cdata)

    def is_constant(self, t: torch.Tensor) -> bool:
        return self.kind(t) is Kind.CONSTANT

    def is_outside(self, t: torch.Tensor) -> bool:
        """Tell whether what is written into it outlives the call."""
        return self.kind(t) in (None, Kind.MODULE)

    def is_host(self, t: torch.Tensor) -> bool:
        """Tell whether a graph cannot hold work on this tensor because it lies on the host."""
        if t.device.type == self._device.host_type or storage_of(t) in self._host:
            return True
        return not t.dim() and self.kind(t) is None and self._device.scalar_is_host(t)

    def hold(self, value: Any) -> Any:
        """Give what a later step may read: a weak alias of graph memory, else the value itself."""
        in_pool = isinstance(value, torch.Tensor) and self.kind(value) is Kind.POOL
        return self._device.weak(value) if in_pool else value

    def hold_weakly(self, value: Any) -> Any:
        """Give the same, and of a weight an alias: recordings keep no weights alive, and nothing is
        replayed where one lies elsewhere by now."""
        plain = type(value) in (torch.Tensor, torch.nn.Parameter) and not self.is_host(value)
        if plain and self.kind(value) is Kind.MODULE:
            return self._device.weak(value)
        return self.hold(value)

    def hold_operand(self, t: torch.Tensor) -> Any:
        """Give what a replayed launch may read in place of an operand.

        A launch freezes what it reads from the host, so the recorder keeps a copy of that.
        """
        return t.clone() if self.is_host(t) else self.hold_weakly(t)

    def survivors(self, out: Any) -> int:
        """Count the storages born in a segment that something outside the call still holds."""
        returned = {storage_of(t) for t in tensors_of(out)}
        alive = [
            reference
            for kind, reference in self._kinds.values()
            if kind is Kind.POOL and reference.cdata not in returned and not reference.expired()
        ]
        if alive:
            gc.collect()  # What only a cycle of garbage holds does not survive.
        return sum(not reference.expired() for reference in alive)
