"""Graph memory in generations. A generation frees as a whole, so its entries retire together."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal, Protocol

from dit_graph.devices.base import Device
from dit_graph.tape.tape import Tape

log = logging.getLogger("dit_graph")

Fit = Literal["stays", "again", "later", "never"]


class Holder(Protocol):
    """Whose recordings lie in graph memory: an entry of a runner."""

    tapes: list[Tape]
    static: Any
    evictions: int

    def forget(self, tape: Tape) -> None: ...


class Generation:
    """One memory that several recordings share, and who holds them."""

    def __init__(self, device: Device) -> None:
        self.memory = device.memory()
        self.held: list[tuple[Holder, Tape]] = []
        self.groups: set[object] = set()  # of the recordings that went into it
        self.last_used = 0
        self.bytes = 0  # at the last measurement, staged inputs included

    @property
    def alive(self) -> bool:
        return any(tape in entry.tapes for entry, tape in self.held)

    def measure(self) -> int:
        staged = [entry.static for entry, tape in self.held if tape in entry.tapes]
        static = {id(s): s for s in staged if s is not None}  # regions share theirs
        self.bytes = self.memory.bytes + sum(s.bytes for s in static.values())
        return self.bytes


class Pool:
    """What the runners of one pipeline share: the lock, the generations, the order of streams.

    Args:
        max_graphs: recordings that may be alive; half of them go to one generation, and when there
            are more the least recently used generation retires.
        budget: bytes that all generations may hold, measured on the device after each recording;
            None for no limit. A generation takes no more recordings past a quarter of it, so that
            what retires is a part. A twentieth of the device stays free beside it, for what else a
            pipeline runs (the VAE).
    """

    def __init__(self, device: Device, max_graphs: int, budget: int | None = None) -> None:
        self.device = device
        self.lock = threading.RLock()
        self.crowded = False  # the last recording pushed another out
        self._most = max_graphs
        self._budget = budget
        self._generations: list[Generation] = []
        self._open: Generation | None = None
        self._clock = 0
        self._mark: Any = None
        self.busy = False
        self._said = False

    @contextmanager
    def using(self) -> Iterator[None]:
        """Hold the lock, after everything that was launched here before."""
        with self.lock:
            if self._mark is not None:
                self.device.wait(self._mark)
            self.busy = True
            try:
                yield
            except BaseException:
                with suppress(Exception):  # a device that failed has no marks: the cause goes on
                    self._mark = self.device.mark()
                raise
            else:
                self._mark = self.device.mark()
            finally:
                self.busy = False

    def generation(self, group: object = None, alone: bool = False) -> Generation:
        """Where the next recording goes; the least recently used one makes room.

        Args:
            group: of several recordings that count as one and lie together, those of a signature's
                regions; None for one that counts for itself.
            alone: nothing else lies there, as a tensor in it may outlive the recording.
        """
        self.sweep()
        self.crowded = False
        group = object() if group is None else group
        if alone:
            made = Generation(self.device)
            made.groups.add(group)
            self._generations.append(made)
            self.touch(made)
            return made
        if self._open is None or self._is_full(self._open, group):
            for old in self._least_used_first():
                if sum(len(generation.groups) for generation in self._generations) >= self._most:
                    self._evict(old)
            self._open = Generation(self.device)
            self._generations.append(self._open)
        self._open.groups.add(group)
        self.touch(self._open)
        return self._open

    def _is_full(self, generation: Generation, group: object) -> bool:
        if group in generation.groups:
            return False
        past = self._budget is not None and generation.bytes > self._budget / 4
        return past or len(generation.groups) >= max(1, self._most // 2)

    def _least_used_first(self) -> list[Generation]:
        return sorted(self._generations, key=lambda generation: generation.last_used)

    def _evict(self, generation: Generation) -> None:
        pushed = {id(entry): entry for entry, tape in generation.held if tape in entry.tapes}
        for entry in pushed.values():
            entry.evictions += 1
        if pushed and not self._said:
            self._said = True
            log.warning(
                "dit_graph: recordings make room for others: memory_budget or max_graphs is full"
            )
        self.retire(generation)
        self.crowded = True

    def fit(self, generation: Generation) -> tuple[Fit, str]:
        """After a recording: retire others until the budget holds.

        Returns what becomes of the recording, and why it cannot stay. `"again"`: it shared its
        memory with others that went, so the next call records it. `"later"`: the device is short of
        room. `"never"`: it is larger than the budget.
        """
        if self._budget is None:
            return "stays", ""
        generation.measure()
        for old in self._least_used_first():
            if old is not generation and self._taken() > self._limit():
                self._evict(old)
        if self._taken() <= self._limit():
            return "stays", ""
        size, alone = generation.bytes, len(generation.groups) == 1
        self.retire(generation)
        if not alone:
            return "again", ""
        if size <= self._budget:
            return "later", f"for now the device has no room for a recording of {_mib(size)}"
        larger = f"this recording takes {_mib(size)}, and memory_budget is {_mib(self._budget)}"
        return "never", larger

    def _limit(self) -> int:
        assert self._budget is not None
        free, total = self.device.free_bytes(), self.device.total_bytes()
        return max(0, min(self._budget, self._taken() + free - total // 20))

    def _taken(self) -> int:
        return sum(generation.bytes for generation in self._generations)

    @property
    def idle(self) -> int:
        """For how many calls the recordings that would make room have not been used."""
        return self._clock - min((g.last_used for g in self._generations), default=self._clock)

    def tick(self) -> None:
        """A call came."""
        self._clock += 1

    def touch(self, generation: Generation) -> None:
        generation.last_used = self._clock

    def close(self, generation: Generation) -> None:
        """Take no new recording into it, for example after a failed capture."""
        if self._open is generation:
            self._open = None
        if generation in self._generations and not generation.held:
            self.retire(generation)

    def retire(self, generation: Generation) -> None:
        if generation not in self._generations:
            return
        for entry, tape in generation.held:
            entry.forget(tape)
        generation.held.clear()
        generation.memory.release()
        self._generations.remove(generation)
        if self._open is generation:
            self._open = None
        if not self._generations:
            self.crowded = False

    def sweep(self) -> None:
        """Give back the memory of generations that no recording needs any more."""
        for generation in list(self._generations):
            if generation.held and not generation.alive:
                self.retire(generation)

    def make_room(self) -> bool:
        """Retire the least recently used generation; returns whether there was any."""
        with self.lock:
            if oldest := self._least_used_first()[:1]:
                self.retire(oldest[0])
        return bool(oldest)

    def release(self) -> bool:
        """Retire everything; returns whether there was anything."""
        with self.lock:
            held = bool(self._generations)
            for generation in list(self._generations):
                self.retire(generation)
            self._mark = None
        return held

    @property
    def bytes(self) -> int:
        """Bytes of graph memory on the device, without the staged inputs."""
        with self.lock:
            return sum(generation.memory.bytes for generation in self._generations)


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
