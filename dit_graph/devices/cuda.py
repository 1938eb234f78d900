"""CUDA graphs. The only file that names `torch.cuda.CUDAGraph`."""

import ctypes
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from dit_graph.devices.base import Device, Memory, Segment, Timer, with_bits_of
from dit_graph.errors import Unsupported


class CudaMemory(Memory):
    """A private pool of the caching allocator; it frees when its last graph is gone."""

    def __init__(self, on: torch.device) -> None:
        self._on = on
        self.id = torch.cuda.graph_pool_handle()
        self.graphs: list[Any] = []

    @property
    def bytes(self) -> int:
        return sum(
            segment["total_size"]
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) == tuple(self.id)
        )

    def release(self) -> None:
        # what still runs must not find its memory with somebody else
        torch.cuda.synchronize(self._on)
        for graph in self.graphs:
            graph.reset()
        self.graphs.clear()


class CudaSegment(Segment):
    """One CUDA graph, launched as soon as it is closed, so that what follows sees real data."""

    def __init__(self, memory: CudaMemory) -> None:
        self._memory = memory
        self._graph = torch.cuda.CUDAGraph()
        self._before: list[Callable[[], object]] = []

    def begin(self) -> None:
        forget_workspaces()  # so that the graph's own lies in its memory
        self._graph.capture_begin(pool=self._memory.id, capture_error_mode="thread_local")

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.ops += 1
        return func(*args, **kwargs)

    def storage(self, size: int, on: torch.device) -> torch.UntypedStorage:
        return torch.UntypedStorage(size, device=on)

    def before_launch(self, action: Callable[[], object]) -> None:
        self._before.append(action)

    def end(self) -> None:
        self._close()
        forget_workspaces()
        for action in self._before:
            action()
        self._before.clear()
        if self.ops:
            self._graph.replay()

    def abort(self) -> None:
        self._before.clear()
        with suppress(Exception):  # the first cause is on its way out
            self._close()

    def _close(self) -> None:
        self._memory.graphs.append(self._graph)  # an empty one too: the pool lives by its graphs
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
                self._graph.capture_end()
        except Exception:  # the capture was invalidated
            with suppress(Exception):  # the first cause goes on
                _forget_capture(self._memory.id)
            raise

    def __call__(self) -> None:
        self._graph.replay()


def _forget_capture(pool: Any) -> None:
    """Undo what `capture_begin` did where `capture_end` could not.

    The allocator would go on reserving for the pool, and the default generator would go on
    believing that it is captured and refuse to draw; a capture that ends well resets it.
    """
    device = torch.cuda.current_device()
    for end in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
        with suppress(RuntimeError):  # already done
            end(device, pool)
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    torch.zeros(1, device="cuda")
    graph.capture_end()


def forget_workspaces() -> None:
    """Let go of the scratch memory that cuBLAS keeps for every thread and stream.

    A graph writes into the one that it was captured with for as long as it is replayed. One from
    outside of its memory may be freed beneath it (torch's own graphs do this very call), or be used
    by an eager call on the capture stream at the same time. cuBLAS takes a new one when it needs
    one.
    """
    torch._C._cuda_clearCublasWorkspaces()


class _Bytes:
    """Memory at an address, for `torch.as_tensor`, which takes no ownership of it."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }


_ALONE = threading.RLock()
_STREAMS: dict[int, Any] = {}
_MARKS: dict[tuple[int, int], torch.cuda.Event] = {}  # by device and stream: the last use of a pool
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: work on the default stream may go on


def _own_stream() -> Any:
    """The stream of cold calls and captures, one a device, so that its workspaces exist once.

    It is made with the driver's `cuStreamCreate` and belongs to nobody else: `torch.cuda.Stream()`
    hands 32 streams out in turn, and the work of whoever gets the same one would be captured too.

    Raises:
        Unsupported: the driver makes no stream.
    """
    index = torch.cuda.current_device()
    if index not in _STREAMS:
        torch.cuda.synchronize()  # makes the device's context current on this thread
        made = ctypes.c_void_p()
        try:
            driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
            error = driver.cuStreamCreate(ctypes.byref(made), _NON_BLOCKING)
        except (OSError, AttributeError) as cause:
            raise Unsupported(f"the CUDA driver's library cannot be used: {cause}") from cause
        if error:
            raise Unsupported(f"the CUDA driver makes no stream (error {error})")
        _STREAMS[index] = torch.cuda.ExternalStream(made.value, device=index)  # for the process
    return _STREAMS[index]


class CudaTimer(Timer):
    """Two events on the stream that is current on `on`; neither makes the host wait."""

    def __init__(self, on: torch.device) -> None:
        self._on = on
        self._started = torch.cuda.Event(enable_timing=True)
        self._stopped = torch.cuda.Event(enable_timing=True)

    def start(self) -> None:
        self._started.record(torch.cuda.current_stream(self._on))

    def stop(self) -> None:
        self._stopped.record(torch.cuda.current_stream(self._on))

    def ms(self) -> float | None:
        done = self._stopped.query()
        return float(self._started.elapsed_time(self._stopped)) if done else None


class Cuda(Device):
    name = "cuda"
    type = "cuda"
    host_type = "cpu"

    def __init__(self, on: torch.device) -> None:
        self.on = on

    def check(self) -> None:
        if not torch.cuda.is_available():
            raise Unsupported("device='cuda' was asked for, but torch sees no CUDA device")
        if self.on.type != "cuda":
            raise Unsupported(f"device='cuda' was asked for, but the module is on {self.on}")
        if (allocator := torch.cuda.get_allocator_backend()) != "native":
            raise Unsupported(
                f"the {allocator} allocator has no private graph pools;"
                " unset backend:cudaMallocAsync in PYTORCH_CUDA_ALLOC_CONF"
            )
        with torch.cuda.device(self.on):
            _own_stream()

    def memory(self) -> CudaMemory:
        return CudaMemory(self.on)

    def segment(self, memory: Any, hold: Callable[[torch.Tensor], torch.Tensor]) -> CudaSegment:
        return CudaSegment(memory)

    def weak(self, t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if not storage.nbytes():
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
        data = torch.as_tensor(_Bytes(storage.data_ptr(), storage.nbytes()), device=t.device)
        typed = data.view(torch.uint8).narrow(0, 0, data.numel() // t.itemsize * t.itemsize)
        twin = typed.view(t.dtype).as_strided(t.shape, t.stride(), t.storage_offset())
        return with_bits_of(t, twin)

    @contextmanager
    def stream(self) -> Iterator[None]:
        with _ALONE, torch.cuda.device(self.on):
            caller = torch.cuda.current_stream()
            aside = _own_stream()
            aside.wait_stream(caller)
            for (index, _), used in list(_MARKS.items()):  # what was staged may lie in its memory
                if index == aside.device_index:
                    aside.wait_event(used)
            try:
                with torch.cuda.stream(aside):
                    yield
            except BaseException:
                with suppress(Exception):  # a device that failed: the cause goes on
                    caller.wait_stream(aside)
                raise
            caller.wait_stream(aside)

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def generators(self) -> list[torch.Generator]:
        index = self.on.index if self.on.index is not None else torch.cuda.current_device()
        return [torch.default_generator, torch.cuda.default_generators[index]]

    def trim(self) -> None:
        torch.cuda.empty_cache()

    def total_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.on)[1])

    def free_bytes(self) -> int:
        unused = torch.cuda.memory_reserved(self.on) - torch.cuda.memory_allocated(self.on)
        return int(torch.cuda.mem_get_info(self.on)[0]) + unused

    def timer(self) -> CudaTimer:
        return CudaTimer(self.on)

    def failed(self) -> bool:
        try:
            torch.cuda.synchronize(self.on)
        except Exception:
            return True
        return False

    def mark(self) -> Any:
        stream = torch.cuda.current_stream(self.on)
        place = stream.device_index, stream.stream_id
        event = _MARKS.get(place) or _MARKS.setdefault(place, torch.cuda.Event())
        event.record(stream)
        return stream, event

    def wait(self, mark: Any) -> None:
        stream, event = mark
        current = torch.cuda.current_stream(self.on)
        if current != stream:
            current.wait_event(event)
