"""Sees what a forward that is being recorded does without any operation.

A dispatch mode misses `tolist` and `numpy` of a tensor, tensors that are made from Python data, and
indices that torch reads itself. A function mode sees the calls that do so.
"""

import fnmatch
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from dit_graph.capture.frames import calls_from, source_line
from dit_graph.capture.steps import Steps
from dit_graph.devices.base import is_about_capturing
from dit_graph.errors import CaptureError
from dit_graph.tape.guards import DeviceNumber, plain
from dit_graph.tape.trees import tensors_of

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
    """Sees what Python calls of torch, and makes a break or a constant of what needs to be one.

    Args:
        steps: where those go.
        patterns: names of torch functions that the config wants to be breaks.
        matched: the patterns that matched one are added to it.
    """

    def __init__(self, steps: Steps, patterns: tuple[str, ...], matched: set[str]) -> None:
        super().__init__()
        self._steps = steps
        self._patterns, self._matched = patterns, matched

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        steps, kwargs = self._steps, kwargs or {}
        if steps.in_break:
            return func(*args, **kwargs)
        if func is torch.Tensor.data_ptr and not calls_from("triton"):
            raise CaptureError(f"the forward reads an address at {source_line()}")
        if self._patterns and (pattern := self._pattern(func)):
            steps.modes.refuse_others(reason := f"{func.__name__} ({pattern!r})")
            return steps.eager(func, args, kwargs, reason=reason)
        if func in _READS:
            return _read(steps, func, args, kwargs)
        if func in _MAKES:
            return _make(steps, func, args, kwargs)
        if func in _SPLITS:
            return _split(steps, func, args, kwargs)
        if func in _INDEXES and not steps.known.is_host(args[0]):
            return _index(steps, func, args)
        if func in steps.stays_out and not isinstance(func, torch._ops.OpOverload):
            reason = f"{func.__name__} could not be captured"
            return steps.eager(func, args, kwargs, reason=reason, observed=True)
        if steps.device.copies_to_host(func, args) and not steps.known.is_host(args[0]):
            reason = "copy to the host"
            copy = steps.eager(torch.clone, args[:1], {}, reason=reason, to_host=True)
            return func(copy, *args[1:], **kwargs)
        return _pass_on(steps, func, args, kwargs)

    def _pattern(self, func: Any) -> str:
        """Find the pattern that a torch function matches, or give an empty string."""
        name = getattr(func, "__name__", "")
        pattern = next((p for p in self._patterns if fnmatch.fnmatchcase(name, p)), "")
        self._matched |= {pattern} - {""}
        return pattern


def _pass_on(steps: Steps, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a call that becomes operations, and note it if it cannot be captured.

    The next capture makes a break of it then.
    """
    try:
        return steps.device.pass_on(func, args, kwargs)
    except RuntimeError as error:
        if steps.no_segment_takes is None and is_about_capturing(error):
            steps.no_segment_takes = func, source_line()
        raise


def _index(steps: Steps, func: Any, args: Any) -> Any:
    """Run `tensor[index]` with constants in place of the lists in its index.

    torch makes tensors of them and copies those to the device, and no mode sees it. A nested list
    as the whole index may stand for a tuple, by rules that torch is about to change, so that call
    is a break.
    """
    t, index, *value = args
    if isinstance(index, tuple):
        index = tuple(_index_on_device(steps, t, part) for part in index)
    elif _is_sequence(index) and any(map(_is_nested, index)):
        if value:
            raise CaptureError(f"a nested list is assigned through, at {source_line()}")
        return steps.eager(func, args, {}, reason="indexing by a nested list")
    else:
        index = _index_on_device(steps, t, index)
    return _pass_on(steps, func, (t, index, *value), {})


def _is_sequence(part: Any) -> bool:
    return isinstance(part, _SEQUENCES) and getattr(part, "ndim", 1) > 0


def _is_nested(part: Any) -> bool:
    return isinstance(part, (torch.Tensor, slice, type(None), type(...), *_SEQUENCES))


def _index_on_device(steps: Steps, t: torch.Tensor, part: Any) -> Any:
    """Give one index of `t`, with Python data as the tensor that torch would make of it."""
    if not _is_sequence(part):
        return part
    kind = torch.long
    if not tensors_of([*part]):
        try:
            with steps.alone():
                kind = torch.tensor(part, device="cpu").dtype
        except Exception:
            return part  # torch raises its own error for it.
    mask = kind in (torch.bool, torch.uint8)
    kwargs = {"dtype": kind if mask else torch.long, "device": t.device}
    return _make(steps, torch.tensor, (part,), kwargs)


def _read(steps: Steps, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func.__name__
    host = steps.known.is_host(args[0])
    if steps.known.is_constant(args[0]):
        with steps.alone():
            return func(*args, **kwargs)
    if not host and name in ("numpy", "__array__") and steps.device.type != "cpu":
        return func(*args, **kwargs)  # torch raises its own error.
    value = steps.eager(func, args, kwargs, reason=f"Tensor.{name} is read by Python", host=host)
    if name == "item" and type(value) is float:
        return steps.stand_in(DeviceNumber(value))
    if name in ("numpy", "__array__"):
        steps.arrays.append((value, value.copy()))
        steps.stand_in(value.copy())  # Python may write into its array.
    return value


def _split(steps: Steps, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run `torch.tensor_split`, which reads a tensor of indices itself, with numbers for it."""
    where = kwargs.get("tensor_indices_or_sections", args[1] if len(args) > 1 else None)
    if isinstance(where, torch.Tensor):
        at = _read(steps, torch.Tensor.tolist, (where,), {})
        if len(args) > 1:
            args = (args[0], at, *args[2:])
        else:
            kwargs = {name: value for name, value in kwargs.items() if value is not where}
            kwargs["sections" if isinstance(at, int) else "indices"] = at
    return func(*args, **kwargs)


def _make(steps: Steps, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    args, kwargs = pytree.tree_map(plain, (args, kwargs))
    if func is not torch.Tensor.new_tensor and args and isinstance(args[0], torch.Tensor):
        return func(*args, **kwargs)  # It casts or moves; the dispatch mode sees that.
    data = args[1:] if func is torch.Tensor.new_tensor else args
    if tensors_of((data, kwargs)):
        return steps.eager(func, args, kwargs, reason=f"{func.__name__} of tensors")
    device = args[0].device if func is torch.Tensor.new_tensor else torch.get_default_device()
    return steps.make_constant(func, args, kwargs, kwargs.get("device") or device)
