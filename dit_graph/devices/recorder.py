"""The CPU recorder: records operations and replays them into the same memory, bit for bit.

It models what makes graphs go wrong: results live in an arena whose blocks are re-used at once
and filled with NaN bytes when they are freed; a host value is frozen where a graph would freeze it.
All CPU tensors count as device tensors, except copies to the host (`.cpu()`) and 0-dim tensors
from outside the call, which stand for CPU scalars.
"""

import ctypes
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils import _pytree as pytree

from dit_graph.devices.base import Device, Memory, Segment, Timer, with_bits_of
from dit_graph.errors import Unsupported
from dit_graph.tape.tape import below_autocast

_ALIGN = 64  # bytes, as torch's CPU allocator
_CHUNK = 64 << 20
_NO_COPY = "Cannot copy between CPU and CUDA tensors during CUDA graph capture"  # as torch says it
_UNWRITTEN = {
    "empty", "empty_strided", "empty_like", "empty_permuted", "new_empty", "new_empty_strided",
}  # fmt: skip


class Arena(Memory):
    """Blocks of bytes from large chunks; first fit, so that freed memory is re-used at once."""

    alive: ClassVar["weakref.WeakSet[Arena]"] = weakref.WeakSet()

    def __init__(self) -> None:
        self.alive.add(self)
        self._chunks: list[Any] = []
        self._free: list[tuple[int, int, int]] = []  # (chunk, offset, size)

    @property
    def bytes(self) -> int:
        return sum(chunk.nbytes for chunk in self._chunks)

    def release(self) -> None:
        self._chunks.clear()
        self._free.clear()

    def allocate(self, size: int) -> torch.Tensor:
        """A uint8 tensor of `size` bytes; the block is free again when its storage is gone."""
        need = max(_ALIGN, -(-size // _ALIGN) * _ALIGN)
        for i, (chunk, offset, room) in enumerate(self._free):
            if room >= need:
                rest = [(chunk, offset + need, room - need)] if room > need else []
                self._free[i : i + 1] = rest
                break
        else:
            taken, capacity = sum(arena.bytes for arena in self.alive), Recorder.capacity
            if capacity is not None and taken + max(need, _CHUNK) > capacity:
                raise torch.OutOfMemoryError(
                    f"the recorder has {capacity} bytes, {taken} of them taken; {need} were wanted"
                )
            raw = np.empty(max(need, _CHUNK) + _ALIGN, np.uint8)
            skip = -raw.ctypes.data % _ALIGN
            self._chunks.append(raw[skip : skip + max(need, _CHUNK)])
            chunk, offset = len(self._chunks) - 1, 0
            if need < _CHUNK:
                self._free.append((chunk, need, _CHUNK - need))
        array = self._chunks[chunk]
        block = array[offset : offset + size]
        finalizer = weakref.finalize(block, self._give_back, array, chunk, offset, need)
        finalizer.atexit = False
        return torch.from_numpy(block)

    def _give_back(self, array: Any, chunk: int, offset: int, size: int) -> None:
        array[offset : offset + size] = 0xFF  # NaN in every floating dtype
        free = sorted([*self._free, (chunk, offset, size)])
        merged: list[tuple[int, int, int]] = []
        for c, o, s in free:
            if merged and merged[-1][0] == c and merged[-1][1] + merged[-1][2] == o:
                merged[-1] = (c, merged[-1][1], merged[-1][2] + s)
            else:
                merged.append((c, o, s))
        self._free = merged


class RecorderSegment(Segment):
    """Runs each operation once while recording and again, into the same memory, at replay."""

    def __init__(self, arena: Arena, hold: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._arena = arena
        self._hold = hold
        self._program: list[tuple[Callable[..., Any], Any, Any, list[Any]]] = []

    def begin(self) -> None:
        pass

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.ops += 1
        inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        given = {t.untyped_storage()._cdata for t in inputs}
        held_args, held_kwargs = pytree.tree_map_only(torch.Tensor, self._hold, (args, kwargs))
        if func in Recorder.uploads_scalars and any(map(self._is_frozen, inputs)):
            raise RuntimeError(_NO_COPY)
        moved: dict[int, torch.Tensor] = {}
        out = pytree.tree_map_only(
            torch.Tensor, lambda t: self._move(t, given, moved), func(*args, **kwargs)
        )
        homes = [
            weak(t) if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in given
            else None
            for t in pytree.tree_leaves(out)
        ]  # fmt: skip
        schema = getattr(func, "_schema", None)
        views = not any(h is not None for h in homes) and schema and not schema.is_mutable
        unwritten = getattr(func, "__name__", "").split(".")[0] in _UNWRITTEN
        if not views and (not unwritten or _fills_what_is_empty()):
            self._program.append((below_autocast(func), held_args, held_kwargs, homes))
        return out

    def _is_frozen(self, t: torch.Tensor) -> bool:
        """Whether a launch takes the value of this operand from the host and keeps it."""
        return not t.dim() and self._hold(t).data_ptr() != t.data_ptr()

    def _move(self, t: torch.Tensor, given: set[int], moved: dict[int, Any]) -> torch.Tensor:
        """A result in new storage goes to the arena, storage by storage, so that aliases stay."""
        storage = t.untyped_storage()
        if storage._cdata in given:
            return t
        if storage._cdata not in moved:
            block = self._arena.allocate(storage.nbytes())
            if block.numel():
                block.untyped_storage().copy_(storage)
            moved[storage._cdata] = block
        home = moved[storage._cdata].untyped_storage()
        twin = torch.empty(0, dtype=t.dtype)
        return twin.set_(home, t.storage_offset(), t.shape, t.stride())

    def storage(self, size: int, on: torch.device) -> torch.UntypedStorage:
        return self._arena.allocate(size).untyped_storage()

    def before_launch(self, action: Callable[[], object]) -> None:
        action()  # Operations run while they are recorded, so "before" is now.

    def end(self) -> None:
        pass

    def abort(self) -> None:
        self._program.clear()

    def __call__(self) -> None:
        for func, args, kwargs, homes in self._program:
            for home, leaf in zip(homes, pytree.tree_leaves(func(*args, **kwargs))):
                if home is None:
                    continue
                if leaf.shape != home.shape:
                    raise RuntimeError(f"a result is {leaf.shape}, recorded {home.shape}")
                home.copy_(leaf)


_INDEXES = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}


def _is_python_data(index: Any) -> bool:
    """What torch makes a tensor of on the host, and copies to the device."""
    if isinstance(index, np.ndarray):
        return index.ndim > 0
    return isinstance(index, (list, tuple, range))


def _fills_what_is_empty() -> bool:
    """Whether torch fills the memory that `empty` and its like give, so that a graph does too."""
    fills = torch._C._get_deterministic_fill_uninitialized_memory()
    return torch.are_deterministic_algorithms_enabled() and bool(fills)


def weak(t: torch.Tensor) -> torch.Tensor:
    """The same CPU memory, not kept alive."""
    storage = t.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
    raw = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    data = torch.frombuffer(raw, dtype=torch.uint8)
    twin = torch.empty(0, dtype=t.dtype)
    twin.set_(data.untyped_storage(), t.storage_offset(), t.shape, t.stride())
    return with_bits_of(t, twin)


def _wall_clock() -> float:
    return 1000 * time.perf_counter()


class ClockTimer(Timer):
    """Readings of a clock in milliseconds: here a launch is over when its call returns."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    def start(self) -> None:
        self._started = self._clock()

    def stop(self) -> None:
        self._took = self._clock() - self._started

    def ms(self) -> float | None:
        return self._took


class Recorder(Device):
    """What stands for a device's limits can be set from outside: the tests do.

    `capacity` is the memory that all arenas may take together in bytes; `clock` gives the device's
    time in milliseconds, and `time_counts` says whether the gate may go by it (on a CPU a replay
    takes longer than an eager call); `broken` stands for a device that answers nothing any more.
    """

    name = "recorder"
    type = "cpu"
    host_type = None
    time_counts = False
    capacity: int | None = None
    clock: Callable[[], float] | None = None
    broken = False

    def __init__(self, on: torch.device) -> None:
        self.on = on

    def check(self) -> None:
        if self.on.type != "cpu":
            raise Unsupported(
                f"device='recorder' records on the CPU, but the module is on {self.on}"
            )

    def memory(self) -> Arena:
        return Arena()

    def segment(self, memory: Any, hold: Callable[[torch.Tensor], torch.Tensor]) -> RecorderSegment:
        return RecorderSegment(memory, hold)

    def weak(self, t: torch.Tensor) -> torch.Tensor:
        return weak(t)

    def scalar_is_host(self, t: torch.Tensor) -> bool:
        return True

    def pass_on(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        data = args if func is torch.Tensor.new else ()
        if func in _INDEXES:
            data = args[1] if isinstance(args[1], tuple) else (args[1],)
        if any(map(_is_python_data, data)):
            raise RuntimeError(_NO_COPY)
        return func(*args, **kwargs)

    def copies_to_host(self, func: Callable[..., Any], args: Any) -> bool:
        return func is torch.Tensor.cpu or (func is torch.Tensor.to and "cpu" in args[1:])

    @contextmanager
    def stream(self) -> Iterator[None]:
        yield

    def generators(self) -> list[torch.Generator]:
        return [torch.default_generator]

    def trim(self) -> None:
        pass

    def total_bytes(self) -> int:
        return self.capacity or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def free_bytes(self) -> int:
        return self.total_bytes() - sum(arena.bytes for arena in Arena.alive)

    def timer(self) -> ClockTimer:
        return ClockTimer(self.clock or _wall_clock)

    def failed(self) -> bool:
        return self.broken

    def mark(self) -> Any:
        if self.broken:
            raise RuntimeError("the device has failed: no event can be recorded")
        return None

    def wait(self, mark: Any) -> None:
        pass
