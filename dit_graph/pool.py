"""Graph memory in generations. A generation frees as a whole, so its entries retire together."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dit_graph.devices.base import Device
from dit_graph.entry import Entry
from dit_graph.tape import Tape


class Generation:
    """One memory that several recordings share, and who holds them."""

    def __init__(self, device: Device) -> None:
        self.memory = device.memory()
        self.held: list[tuple[Entry, Tape]] = []
        self.recordings = 0
        self.last_used = 0


class Pool:
    """What the runners of one pipeline share: the lock, the generations, the order of streams.

    Args:
        max_graphs: recordings that may be alive; half of them go to one generation, and when both
            are full the least recently used one retires.
    """

    def __init__(self, device: Device, max_graphs: int) -> None:
        self.device = device
        self.lock = threading.RLock()
        self._per_generation = max(1, max_graphs // 2)
        self._kept = min(2, max_graphs)
        self._generations: list[Generation] = []
        self._open: Generation | None = None
        self._clock = 0
        self._mark: Any = None
        self.busy = False

    @contextmanager
    def using(self) -> Iterator[None]:
        """Hold the lock, after everything that was launched here before."""
        with self.lock:
            if self._mark is not None:
                self.device.wait(self._mark)
            self.busy = True
            try:
                yield
            finally:
                self.busy = False
                self._mark = self.device.mark()

    def generation(self) -> Generation:
        """Where the next recording goes; retires the least recently used one when all are full."""
        if self._open is None or self._open.recordings >= self._per_generation:
            if len(self._generations) >= self._kept:
                self.retire(min(self._generations, key=lambda g: g.last_used))
            self._open = Generation(self.device)
            self._generations.append(self._open)
        self._open.recordings += 1
        self.touch(self._open)
        return self._open

    def touch(self, generation: Generation) -> None:
        self._clock += 1
        generation.last_used = self._clock

    def close(self, generation: Generation) -> None:
        """Take no new recording into it, for example after a failed capture."""
        if self._open is generation:
            self._open = None
        if generation in self._generations and not generation.held:
            self.retire(generation)

    def retire(self, generation: Generation) -> None:
        for entry, tape in generation.held:
            entry.forget(tape)
        generation.held.clear()
        generation.memory.release()
        self._generations.remove(generation)
        if self._open is generation:
            self._open = None

    def release(self) -> None:
        """Retire everything."""
        with self.lock:
            for generation in list(self._generations):
                self.retire(generation)
            self._mark = None

    @property
    def bytes(self) -> int:
        with self.lock:
            return sum(generation.memory.bytes for generation in self._generations)
