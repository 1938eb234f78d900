"""Decides where results lie: a break's for the steps after it, the call's for its caller."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from dit_graph.capture.effects import whole_of
from dit_graph.capture.kinds import Kind, Known, storage_of
from dit_graph.devices.base import Device, Segment
from dit_graph.errors import CaptureError
from dit_graph.tape.tape import External, InputView

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size)


def is_fresh(
    out: Any, operands: list[torch.Tensor], known: Known, reason: str, marked: bool
) -> bool:
    """Tell whether a break's result is a new tensor, and not one that was there before."""
    if not isinstance(out, torch.Tensor):
        if marked and not isinstance(out, _PLAIN):
            raise CaptureError(f"{reason} returns a {type(out).__name__}")
        return False
    if marked:  # The watcher has seen what it made.
        return known.kind(out) is Kind.BREAK
    return all(storage_of(out) != storage_of(t) for t in operands)


def place(
    outs: list[Any], fresh: list[bool], hosts: list[bool], known: Known, device: Device,
    segment: Callable[[], Segment],
) -> list[Any]:  # fmt: skip
    """Give results of a break with the fresh ones where later steps read them.

    That is memory of the next segment, or the tensor itself if it lies on the host. Results that
    share a storage go on sharing one.
    """
    shared = Counter(storage_of(out) for out, new in zip(outs, fresh) if new)
    bases: dict[int, torch.Tensor] = {}
    homes = []
    for out, new, host in zip(outs, fresh, hosts):
        if host:
            known.mark(out, Kind.LIVE, host=True)
        if host or not new:
            homes.append(out)
            continue
        whole = out if shared[storage_of(out)] == 1 else whole_of(out)
        if storage_of(out) not in bases:
            bases[storage_of(out)] = _home(whole, known, device, segment())
        base = bases[storage_of(out)]
        view = (out.shape, out.stride(), out.storage_offset())
        homes.append(base if whole is out else base.view(out.dtype).as_strided(*view))
    return homes


def _home(out: torch.Tensor, known: Known, device: Device, segment: Segment) -> torch.Tensor:
    home = segment.home(out)
    known.mark(home, Kind.POOL)
    target = device.weak(home)
    segment.before_launch(lambda: target.copy_(out))
    return home


def result_leaf(leaf: Any, known: Known, static: list[torch.Tensor]) -> Any:
    """Give what the tape keeps of one leaf of the call's result; an object is a CaptureError."""
    if not isinstance(leaf, torch.Tensor):
        if isinstance(leaf, _PLAIN):
            return leaf
        raise CaptureError(f"the forward returns a {type(leaf).__name__}")
    if known.is_outside(leaf):
        return External(leaf)
    if known.kind(leaf) is not Kind.STATIC:
        return known.hold(leaf)
    index = next(i for i, t in enumerate(static) if storage_of(t) == storage_of(leaf))
    base = static[index]
    if (leaf.dtype, leaf.is_conj(), leaf.is_neg()) != (base.dtype, base.is_conj(), base.is_neg()):
        return leaf
    offset = int(leaf.storage_offset()) - int(base.storage_offset())
    return InputView(index, leaf.shape, leaf.stride(), offset)
