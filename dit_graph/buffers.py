"""The tensors that the segments read in place of the caller's arguments."""

import torch

from dit_graph.errors import CaptureError


class StaticBuffers:
    """One tensor per tensor argument, with its shape, strides, dtype and device.

    Decides nothing. A broadcast dimension (stride 0) is stored once, as in the caller's tensor.
    """

    def __init__(self, live: list[torch.Tensor]) -> None:
        self._index = [_stored(t) for t in live]
        self._stores = [
            torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device=part.device)
            for part in (t if index is None else t[index] for t, index in zip(live, self._index))
        ]
        self.tensors = [
            store if index is None else store.expand(t.shape)
            for t, store, index in zip(live, self._stores, self._index)
        ]

    def copy_in(self, live: list[torch.Tensor]) -> None:
        """Stage a call's tensors; asynchronous, on the current stream."""
        for store, index, t in zip(self._stores, self._index, live):
            store.copy_(t if index is None else t[index], non_blocking=True)

    def copy_back(self, live: list[torch.Tensor], written: list[int]) -> None:
        """Give the caller what the forward wrote into its arguments."""
        for i in written:
            if self._index[i] is not None:
                raise CaptureError("a broadcast argument is written in place")
            live[i].copy_(self._stores[i])

    @property
    def bytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in self._stores)


def _stored(t: torch.Tensor) -> tuple[slice, ...] | None:
    if 0 not in t.stride():
        return None
    return tuple(slice(0, 1) if stride == 0 else slice(None) for stride in t.stride())


def shares_storage(tensors: list[torch.Tensor]) -> bool:
    """Whether two of them lie in one storage: in-place writes would then meet in eager."""
    pointers = [t.untyped_storage().data_ptr() for t in tensors if t.numel()]
    return len(set(pointers)) < len(pointers)
