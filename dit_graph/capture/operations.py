"""Sees every operation of a forward that is being recorded, and acts on the verdict on it.

A dispatch mode sees operations, and a function mode what never becomes one (`calls.py`). Both are
on in captures only. `verdicts.py` says what is a break; `steps.py` knows how to make one.
"""

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from dit_graph.capture.calls import CallWatch
from dit_graph.capture.frames import source_line
from dit_graph.capture.steps import Steps
from dit_graph.capture.verdicts import Verdict, where
from dit_graph.errors import CaptureError, Collective

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_COLLECTIVES = {
    "c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "_dtensor",
    "symm_mem",
}  # fmt: skip


class OpWatch(TorchDispatchMode):
    """Sees every operation and puts it where its verdict says."""

    supports_higher_order_operators = True  # flex_attention and the like are one operation.

    def __init__(self, steps: Steps) -> None:
        cast(Any, super()).__init__()
        self._steps = steps

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        steps, kwargs = self._steps, kwargs or {}
        _refuse_collective(func, types)
        if not types and _is_composite(func, steps.device.type):
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        if steps.in_break:
            return steps.observe(func, args, kwargs)
        verdict = where(steps.known, steps.device, func, args, kwargs, steps.stays_out)
        return _act(steps, verdict, func, args, kwargs)


@functools.cache
def _is_composite(func: Any, device: str) -> bool:
    """Tell whether it is an operation of torch's own that runs as others, which must be seen.

    A mode sees those others by itself where tensors carry autograd's keys, but not in inference
    mode. What somebody else has registered may read values in Python, unseen, so it stays whole.
    """
    if getattr(func, "namespace", "") != "aten":
        return False
    has_kernel, name = torch._C._dispatch_has_kernel_for_dispatch_key, func.name()
    return has_kernel(name, _COMPOSITE.name) and not has_kernel(name, device.upper())


def _refuse_collective(func: Any, types: Any) -> None:
    """Raise Collective before one runs, in a break too.

    The eager answer is then the only run of it, so that processes stay in step whatever each of
    them decides about its recordings.
    """
    if getattr(func, "namespace", "") in _COLLECTIVES:
        what = str(func).removesuffix(".default")
        raise Collective(f"a collective, {what}, is not recorded, at {source_line()}")
    if any(t.__name__ == "DTensor" for t in types):  # No mode sees those that it runs.
        raise Collective(f"the collectives of a DTensor are not recorded, at {source_line()}")


def _act(steps: Steps, verdict: Verdict, func: Any, args: Any, kwargs: Any) -> Any:
    """Put one operation where it belongs: into the segment, on the host, or into a break."""
    if verdict.random:
        steps.draws(pytree.tree_leaves((args, kwargs)))
    if verdict.kind == "constant":
        return steps.make_constant(func, args, kwargs, verdict.on)
    if verdict.kind != "segment":
        host = verdict.kind == "host"
        return steps.eager(func, args, kwargs, reason=verdict.reason, host=host)
    for t in verdict.frozen:
        steps.freeze_scalar(t)
    if verdict.frozen and func in steps.device.uploads_scalars:
        upload = functools.partial(_upload, steps)
        args, kwargs = pytree.tree_map_only(torch.Tensor, upload, (args, kwargs))
    return steps.in_segment(func, args, kwargs)


def _upload(steps: Steps, t: torch.Tensor) -> Any:
    """Make a constant on the device of a 0-dim operand that lies on the host."""
    if not steps.known.is_host(t):
        return t
    on = steps.device.on
    return steps.make_constant(torch.Tensor.to, (t, on), {"copy": True}, on)


class Watch:
    """Enters both modes together, and steps aside for code that must not see them."""

    def __init__(
        self, steps: Steps, patterns: tuple[str, ...], matched: set[str], autocast_cache: bool
    ) -> None:
        self.off = False
        self._autocast_cache = autocast_cache  # The caller has it this way.
        self._calls = CallWatch(steps, patterns, matched)
        self._ops = OpWatch(steps)

    def __enter__(self) -> None:
        cast(Any, self._calls).__enter__()
        cast(Any, self._ops).__enter__()

    def __exit__(self, *error: Any) -> None:
        cast(Any, self._ops).__exit__(*error)
        cast(Any, self._calls).__exit__(*error)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Take both modes off, because dynamo gives up a function that it first meets under one.

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

    A collection could free device memory inside a capture, and a cached cast would outlive it.
    Yields whether the cache was on.
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
