"""What a device does for a recording: make segments, alias memory weakly, keep streams in order."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch

_aten = torch.ops.aten


def with_bits_of(t: torch.Tensor, twin: torch.Tensor) -> torch.Tensor:
    """`twin` with the lazy conjugation and negation of `t`, which no pointer carries."""
    twin = twin.conj() if t.is_conj() else twin
    return torch._neg_view(twin) if t.is_neg() else twin


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether it, or what it was raised from or while handling, says that memory has run out.

    The driver, Triton, cuBLAS and cuDNN say so in other errors than the allocator's, for example
    where a graph is instantiated.
    """
    while error is not None and not _says_out_of_memory(error):
        error = error.__cause__ or error.__context__
    return error is not None


def _says_out_of_memory(error: BaseException) -> bool:
    said = any(text in str(error) for text in ("out of memory", "STATUS_ALLOC_FAILED"))
    return isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and said)


def is_about_capturing(error: BaseException) -> bool:
    """Whether an operation says that it cannot run while a graph is captured.

    CUDA's own error is "operation not permitted when stream is capturing", torch's name the capture
    too. What else goes wrong in a capture says nothing about the operation, and "due to a previous
    error during capture" is about another one.
    """
    text = str(error).lower()
    return isinstance(error, RuntimeError) and "captur" in text and "previous error" not in text


class Segment(ABC):
    """A run of device operations that replays as one launch.

    Life: `begin`, then `call` for each operation, then `end` (closes it and launches it once) or
    `abort`. Calling the segment replays it on the current stream.
    """

    ops = 0

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run or record one operation; new results lie in the generation's memory."""

    def home(self, t: torch.Tensor) -> torch.Tensor:
        """Memory of the generation with the shape and strides of `t`, for `before_launch` to fill.

        Made without `torch.empty`: where deterministic algorithms are on torch fills what that
        gives, and the fill would be part of the segment, so it would run after `before_launch`.
        """
        extent = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
        storage = self.storage(extent.untyped_storage().nbytes(), t.device)
        return torch.empty(0, dtype=t.dtype, device=t.device).set_(storage, 0, t.shape, t.stride())

    @abstractmethod
    def storage(self, size: int, on: torch.device) -> torch.UntypedStorage:
        """`size` bytes of the generation's memory, which no operation of the segment writes."""

    @abstractmethod
    def before_launch(self, action: Callable[[], object]) -> None:
        """Have `action` done after what was launched so far and before this segment runs."""

    @abstractmethod
    def end(self) -> None: ...

    @abstractmethod
    def abort(self) -> None: ...

    @abstractmethod
    def __call__(self) -> None: ...


class Memory(ABC):
    """The memory that the segments of one generation share."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Bytes held on the device."""

    @abstractmethod
    def release(self) -> None:
        """Give everything back; no segment of it is replayed after this."""


class Timer(ABC):
    """Takes the time of what is launched between `start` and `stop`, on the device's own clock."""

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def stop(self) -> None: ...

    @abstractmethod
    def ms(self) -> float | None:
        """Milliseconds, or None while the device has not come to `stop` yet."""


class Device(ABC):
    """One kind of device. Stateless but for its streams."""

    name: str
    type: str
    on: torch.device
    time_counts = True  # Whether a replay's time says something about the device.
    host_type: str | None  # A graph cannot hold tensors of this device type.
    uploads_scalars: ClassVar[set[Any]] = {
        _aten.where.self, _aten.index_put.default, _aten.index_put_.default,
        _aten._index_put_impl_.default,
    }  # fmt: skip
    """Operations that copy a 0-dim operand on the host to the device first, where others hand its
    value to their kernel: of torch's pointwise ones `where` alone (all were tried, on torch 2.11).
    """

    @abstractmethod
    def memory(self) -> Memory: ...

    @abstractmethod
    def segment(self, memory: Any, hold: Callable[[torch.Tensor], torch.Tensor]) -> Segment:
        """A new segment; `hold` gives what a replayed operation may read in place of an operand."""

    @abstractmethod
    def weak(self, t: torch.Tensor) -> torch.Tensor:
        """The same address, shape and strides, without keeping the memory."""

    def scalar_is_host(self, t: torch.Tensor) -> bool:
        """Whether this 0-dim tensor from outside the call and the module counts as a host value."""
        return False

    def pass_on(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a Python-level call of the forward, whose operations a dispatch mode sees.

        The recorder raises where torch would copy Python data to the device unseen, which no
        capture on CUDA allows.
        """
        return func(*args, **kwargs)

    def copies_to_host(self, func: Callable[..., Any], args: Any) -> bool:
        """Whether a Python-level call moves a tensor to the host, unseen by a dispatch mode."""
        return False

    @abstractmethod
    def stream(self) -> AbstractContextManager[None]:
        """Run cold calls and captures aside; both streams wait for each other."""

    def capturing(self) -> bool:
        """Whether somebody else captures on the current stream."""
        return False

    @abstractmethod
    def generators(self) -> list[torch.Generator]:
        """The default generators that a forward may draw from."""

    @abstractmethod
    def trim(self) -> None:
        """Give unused cached memory back to the device."""

    @abstractmethod
    def total_bytes(self) -> int:
        """The memory of the device."""

    @abstractmethod
    def free_bytes(self) -> int:
        """What is free on the device or kept unused by its allocator."""

    @abstractmethod
    def timer(self) -> Timer: ...

    @abstractmethod
    def failed(self) -> bool:
        """Whether the device answers nothing any more, as after an illegal address. Waits."""

    @abstractmethod
    def mark(self) -> Any:
        """The current stream and a point on it, for `wait`."""

    @abstractmethod
    def wait(self, mark: Any) -> None:
        """Have the current stream wait for a mark that another stream made."""

    @abstractmethod
    def check(self) -> None:
        """Raises Unsupported when this process cannot capture on the device."""
