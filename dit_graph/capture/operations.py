"""Sees every operation of a forward that is being recorded and says what a graph cannot hold.

A dispatch mode sees operations; a function mode sees what never becomes one (`calls.py`). Both are
on in captures only. They decide *what* is a break; the capture knows how to make one.
"""

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from dit_graph.capture.calls import CallWatch
from dit_graph.capture.frames import source_line
from dit_graph.devices.base import UPLOADS_SCALARS
from dit_graph.errors import CaptureError, Collective
from dit_graph.tape.trees import tensors_of

if TYPE_CHECKING:
    from dit_graph.capture.capture import Capture

_aten = torch.ops.aten
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_LIFTS = {_aten.lift.default, _aten.lift_fresh.default}
_COPIES = {_aten.copy_.default, _aten._to_copy.default}
_MASK_INDEXED = {
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
    _aten._unsafe_index.Tensor,
}
_READ_SCALARS = {  # the value of a 0-dim CPU operand goes into the launch
    _aten.fill.Tensor,
    _aten.fill_.Tensor,
    _aten.masked_fill.Tensor,
    _aten.masked_fill_.Tensor,
}
_DEPENDS_ON_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_COLLECTIVES = {
    "c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "_dtensor",
    "symm_mem",
}  # fmt: skip


class OpWatch(TorchDispatchMode):
    supports_higher_order_operators = True  # flex_attention and the like: one operation

    def __init__(self, capture: "Capture") -> None:
        cast(Any, super()).__init__()
        self._capture = capture

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        capture, kwargs = self._capture, kwargs or {}
        _refuse_collective(func, types)
        if not types and _is_composite(func, capture.device.type):
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        if capture.in_break:
            return capture.observe(func, args, kwargs)
        return classify(capture, func, args, kwargs)


@functools.cache
def _is_composite(func: Any, device: str) -> bool:
    """Whether it is one of torch's that run as others, which are what is to be seen.

    A mode sees those right away where tensors carry autograd's keys, and not in inference mode.
    What somebody else has registered may read values in Python, unseen; it stays whole.
    """
    if getattr(func, "namespace", "") != "aten":
        return False
    has_kernel, name = torch._C._dispatch_has_kernel_for_dispatch_key, func.name()
    return has_kernel(name, _COMPOSITE.name) and not has_kernel(name, device.upper())


def _refuse_collective(func: Any, types: Any) -> None:
    """Raise before it runs, in a break too: the eager answer is then the only run of it, so that
    processes stay in step whatever each of them decides about its recordings."""
    if getattr(func, "namespace", "") in _COLLECTIVES:
        what = str(func).removesuffix(".default")
        raise Collective(f"a collective, {what}, is not recorded, at {source_line()}")
    if any(t.__name__ == "DTensor" for t in types):  # which runs its own where no mode sees them
        raise Collective(f"the collectives of a DTensor are not recorded, at {source_line()}")


def classify(c: "Capture", func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Put one operation where it belongs: into the segment, on the host, or into a break."""
    operands = tensors_of((args, kwargs))
    if func in _LIFTS:
        c.constant(operands)
        return func(*args, **kwargs)
    c.refuse_hidden(operands)
    tags = getattr(func, "tags", ())
    random = torch.Tag.nondeterministic_seeded in tags
    if random:
        c.draws(pytree.tree_leaves((args, kwargs)))
    on_host = [t for t in operands if c.known.is_host(t)]
    target = kwargs.get("device")
    to_host = target is not None and target.type == c.device.host_type
    to_device = target is not None and target.type == c.device.type
    if to_host if not operands else len(on_host) == len(operands) and not to_device:
        return c.on_host(func, args, kwargs, random)
    reason = _breaks_because(c, func, args, tags, on_host, operands, to_host, to_device)
    if reason is None:
        if on_host and func in UPLOADS_SCALARS:
            upload = functools.partial(_upload, c)
            args, kwargs = pytree.tree_map_only(torch.Tensor, upload, (args, kwargs))
        return c.in_segment(func, args, kwargs)
    if operands and not random and c.follows_from_constants(func, args, kwargs):
        return c.make_constant(func, args, kwargs, target or c.device.on)
    return c.eager(func, args, kwargs, reason=reason)


def _upload(c: "Capture", t: torch.Tensor) -> torch.Tensor:
    """A frozen 0-dim operand on the host as a constant on the device."""
    if not c.known.is_host(t):
        return t
    on: torch.device = c.device.on
    constant: torch.Tensor = c.make_constant(torch.Tensor.to, (t, on), {"copy": True}, on)
    return constant


def _breaks_because(
    c: "Capture", func: Any, args: Any, tags: Any, on_host: Any, operands: Any, to_host: bool,
    to_device: bool,
) -> str | None:  # fmt: skip
    name = str(func).removesuffix(".default")
    if func in c.stays_out:
        return f"{name} could not be captured"
    if func in _MASK_INDEXED:  # tagged as dynamic, but only a mask's result depends on its values
        if any(t.dtype in (torch.bool, torch.uint8) for t in args[1] if t is not None):
            return f"{name} with a boolean mask"
    elif any(tag in _DEPENDS_ON_DATA for tag in tags):
        return f"{name} depends on data"
    if to_host or (on_host and (to_device or func in _COPIES)):
        return f"{name} between host and device"
    reads_scalars = torch.Tag.pointwise in tags or func in _READ_SCALARS | UPLOADS_SCALARS
    for t in on_host:
        if t.dim() or not reads_scalars or not c.freeze_scalar(t):
            return f"{name} reads a CPU tensor"
    return None


class Watch:
    """Both modes, entered together, and a way to step aside for code that must not see them."""

    def __init__(self, capture: "Capture", autocast_cache: bool) -> None:
        self.off = False
        self._autocast_cache = autocast_cache  # as the caller has it
        self._calls = CallWatch(capture)
        self._ops = OpWatch(capture)

    def __enter__(self) -> None:
        cast(Any, self._calls).__enter__()
        cast(Any, self._ops).__enter__()

    def __exit__(self, *error: Any) -> None:
        cast(Any, self._ops).__exit__(*error)
        cast(Any, self._calls).__exit__(*error)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Take both modes off: dynamo gives up a function that it first meets under one.

        The autocast cache is on where the caller has it on: dynamo compares that, and would compile
        the function again in the midst of a capture. The casts that it keeps go at the end. torch
        keeps those of all threads in one place, so another thread under autocast may meet them if
        the compiled code casts at run time; inductor's does not.
        """
        if _get_current_dispatch_mode() is not self._ops:
            raise CaptureError("a torch dispatch mode of the model's own is active around a break")
        self.__exit__(None, None, None)
        self.off = True
        cache = torch.is_autocast_cache_enabled()
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(cache or self._autocast_cache)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(cache)
            torch.clear_autocast_cache()
            self.off = False
            self.__enter__()


@contextmanager
def undisturbed() -> Iterator[bool]:
    """Hold garbage collection and the autocast cache off, and leave both as they were.

    A collection could free device memory inside a capture, a cached cast would outlive it. Gives
    whether the cache was on.
    """
    gc.collect(1)
    collecting, cache = gc.isenabled(), torch.is_autocast_cache_enabled()
    gc.disable()
    torch.set_autocast_cache_enabled(False)
    try:
        yield cache
    finally:
        torch.set_autocast_cache_enabled(cache)
        if collecting:
            gc.enable()
