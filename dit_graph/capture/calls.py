"""Sees what a forward that is being recorded does without any operation.

`tolist` and `numpy` of a tensor, tensors made from Python data, indices that torch reads itself.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from dit_graph.capture.frames import calls_from, source_line
from dit_graph.devices.base import is_about_capturing
from dit_graph.errors import CaptureError
from dit_graph.tape.guards import DeviceNumber, plain
from dit_graph.tape.trees import tensors_of

if TYPE_CHECKING:
    from dit_graph.capture.capture import Capture

_READS = {
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.__repr__,
    torch.Tensor.__format__,
    torch.Tensor.item,
}
_MAKES = {torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor}
_INDEXES = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
_SEQUENCES = (list, tuple, range, np.ndarray)
_SPLITS = {torch.tensor_split, torch.Tensor.tensor_split}


class CallWatch(TorchFunctionMode):
    def __init__(self, capture: "Capture") -> None:
        super().__init__()
        self._capture = capture

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        c, kwargs = self._capture, kwargs or {}
        if c.in_break:
            return func(*args, **kwargs)
        if func is torch.Tensor.data_ptr and not calls_from("triton"):
            raise CaptureError(f"the forward reads an address at {source_line()}")
        if pattern := c.stays_eager(func):
            c.refuse_modes(reason := f"{func.__name__} ({pattern!r})")
            return c.eager(func, args, kwargs, reason=reason)
        if func in _READS:
            return _read(c, func, args, kwargs)
        if func in _MAKES:
            return _make(c, func, args, kwargs)
        if func in _SPLITS:
            return _split(c, func, args, kwargs)
        if func in _INDEXES and not c.known.is_host(args[0]):
            return _index(c, func, args)
        if func in c.stays_out and not isinstance(func, torch._ops.OpOverload):
            return c.learned(func, args, kwargs)
        if c.device.copies_to_host(func, args) and not c.known.is_host(args[0]):
            copy = c.eager(torch.clone, args[:1], {}, reason="copy to the host", to_host=True)
            return func(copy, *args[1:], **kwargs)
        return _pass_on(c, func, args, kwargs)


def _pass_on(c: "Capture", func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run what becomes operations; one that cannot be captured is a break in the next capture."""
    try:
        return c.device.pass_on(func, args, kwargs)
    except RuntimeError as error:
        if c.refused is None and is_about_capturing(error):
            c.refused = func, source_line()
        raise


def _index(c: "Capture", func: Any, args: Any) -> Any:
    """`tensor[index]`, which makes tensors of lists in the index unseen and copies them to the
    device: here they are constants.

    A list in place of a whole index may stand for a tuple, by rules that torch is about to change.
    """
    t, index, *value = args
    if isinstance(index, tuple):
        index = tuple(_index_on_device(c, t, part) for part in index)
    elif _is_sequence(index) and any(map(_is_nested, index)):
        if value:
            raise CaptureError(f"a nested list is assigned through, at {source_line()}")
        return c.eager(func, args, {}, reason="indexing by a nested list")
    else:
        index = _index_on_device(c, t, index)
    return _pass_on(c, func, (t, index, *value), {})


def _is_sequence(part: Any) -> bool:
    return isinstance(part, _SEQUENCES) and getattr(part, "ndim", 1) > 0


def _is_nested(part: Any) -> bool:
    return isinstance(part, (torch.Tensor, slice, type(None), type(...), *_SEQUENCES))


def _index_on_device(c: "Capture", t: torch.Tensor, part: Any) -> Any:
    """One index of `t`: Python data as the tensor that torch would make of it."""
    if not _is_sequence(part):
        return part
    kind = torch.long
    if not tensors_of([*part]):
        try:
            kind = c.alone(torch.tensor, (part,), {"device": "cpu"}).dtype
        except Exception:
            return part  # torch's own error
    mask = kind in (torch.bool, torch.uint8)
    kwargs = {"dtype": kind if mask else torch.long, "device": t.device}
    return _make(c, torch.tensor, (part,), kwargs)


def _read(c: "Capture", func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func.__name__
    host = c.known.is_host(args[0])
    if c.known.is_constant(args[0]):
        return c.alone(func, args, kwargs)
    if not host and name in ("numpy", "__array__") and c.device.type != "cpu":
        return func(*args, **kwargs)  # torch's own error
    value = c.eager(func, args, kwargs, reason=f"Tensor.{name} is read by Python", host=host)
    if name == "item" and type(value) is float:
        return c.stand_in(DeviceNumber(value))
    if name in ("numpy", "__array__"):
        c.arrays.append((value, value.copy()))
        c.stand_in(value.copy())  # the guard keeps its own copy
    return value


def _split(c: "Capture", func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """`torch.tensor_split`, which reads a tensor's memory itself, where no mode sees it."""
    where = kwargs.get("tensor_indices_or_sections", args[1] if len(args) > 1 else None)
    if isinstance(where, torch.Tensor):
        at = _read(c, torch.Tensor.tolist, (where,), {})
        if len(args) > 1:
            args = (args[0], at, *args[2:])
        else:
            kwargs = {name: value for name, value in kwargs.items() if value is not where}
            kwargs["sections" if isinstance(at, int) else "indices"] = at
    return func(*args, **kwargs)


def _make(c: "Capture", func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    args, kwargs = pytree.tree_map(plain, (args, kwargs))
    if func is not torch.Tensor.new_tensor and args and isinstance(args[0], torch.Tensor):
        return func(*args, **kwargs)  # a cast or a move; the dispatch mode sees it
    data = args[1:] if func is torch.Tensor.new_tensor else args
    if tensors_of((data, kwargs)):
        return c.eager(func, args, kwargs, reason=f"{func.__name__} of tensors")
    device = args[0].device if func is torch.Tensor.new_tensor else torch.get_default_device()
    return c.make_constant(func, args, kwargs, kwargs.get("device") or device)
