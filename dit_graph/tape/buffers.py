"""The tensors that the segments read in place of the caller's arguments."""

from typing import Any

import torch

from dit_graph.errors import CaptureError

ALONE = 2**16  # elements from which a tensor is copied in a launch of its own: several at once
# get a thread block for each 65,536 elements, too few to keep a GPU busy
ALIGNMENT = 16  # In bytes; `misaligned` says why.


class StaticBuffers:
    """One tensor per tensor argument, with its shape, strides, dtype and device.

    Decides nothing. A broadcast dimension (stride 0) is stored once, as in the caller's tensor.
    """

    def __init__(self, given: list[torch.Tensor]) -> None:
        self._index = [_stored(t) for t in given]
        parts = [t if index is None else t[index] for t, index in zip(given, self._index)]
        self._stores = list(map(_memory_like, parts))
        self.tensors = [
            store if index is None else store.expand(t.shape)
            for t, store, index in zip(given, self._stores, self._index)
        ]
        self._made = [_place(t) for t in self.tensors]
        groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for i, store in enumerate(self._stores):
            if store.numel() < ALONE:
                groups.setdefault((store.dtype, store.device), []).append(i)
        self._groups = [(g, [self._stores[i] for i in g]) for g in groups.values()]
        self._alone = [i for i, store in enumerate(self._stores) if store.numel() >= ALONE]

    def copy_in(self, given: list[torch.Tensor]) -> None:
        """Stage a call's tensors; asynchronous, on the current stream, small ones of a dtype in one
        launch."""
        parts = [t if index is None else t[index] for t, index in zip(given, self._index)]
        for i in self._alone:
            self._stores[i].copy_(parts[i], non_blocking=True)
        for group, stores in self._groups:
            torch._foreach_copy_(stores, [parts[i] for i in group], non_blocking=True)

    def copy_back(self, given: list[torch.Tensor], written: list[int]) -> None:
        """Give the caller what the forward wrote into its arguments."""
        for i in written:
            given[i].copy_(self._stores[i])

    def check_writable(self, written: list[int]) -> None:
        """Raises CaptureError where a write cannot be given back."""
        if any(self._index[i] is not None for i in written):
            raise CaptureError("a broadcast argument is written in place")

    def check_unmoved(self) -> None:
        """Raises CaptureError where a forward gave an argument another shape or other memory."""
        if self._made != [_place(t) for t in self.tensors]:
            raise CaptureError(
                "the forward changes the shape or the memory of an argument in place"
            )

    @property
    def bytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in self._stores)


def misaligned(t: torch.Tensor) -> int:
    """By how many bytes its memory misses a multiple of 16, as that of a view may; 0 for one value.

    Kernels load 16 bytes at once where they can, and add up in another order where they cannot:
    below that, norms, sums, matrix products and cuDNN's attention gave other bits on an H200, and
    from 16 to 256 bytes nothing did (27 calls, torch 2.11). One value has no order,
    and a loop's timesteps are such views.
    """
    past = t.data_ptr() % ALIGNMENT
    if not past or not any(n > 1 and step for n, step in zip(t.shape, t.stride())):
        return 0
    return past


def _memory_like(part: torch.Tensor) -> torch.Tensor:
    """New memory with its shape and strides, as far from a multiple of 16 bytes as its own is."""
    past = misaligned(part) // part.itemsize
    size = past + sum((n - 1) * step for n, step in zip(part.shape, part.stride())) + 1
    if not past:
        return torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device=part.device)
    whole = torch.empty(size, dtype=part.dtype, device=part.device)
    return whole.as_strided(part.shape, part.stride(), past)


def _place(t: torch.Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.data_ptr()


def _stored(t: torch.Tensor) -> tuple[slice, ...] | None:
    once = [stride == 0 and size > 1 for size, stride in zip(t.shape, t.stride())]
    return tuple(slice(0, 1) if o else slice(None) for o in once) if any(once) else None


def shares_storage(tensors: list[torch.Tensor]) -> bool:
    """Whether two of them lie in one storage: in-place writes would then meet in eager."""
    pointers = [t.untyped_storage().data_ptr() for t in tensors if t.numel()]
    return len(set(pointers)) < len(pointers)
