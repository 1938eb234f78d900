"""Finds compiled code inside a forward beforehand, and calls it with the watchers aside.

Dynamo gives a function up for good when it first meets it under a dispatch mode, so a compiled
callable must never be entered with the watchers on. The ones that can be found (submodules,
attributes, globals and closures of the model's code) become one operation each. One that could not
be found ends the capture before dynamo sees it, and the call is eager by name.
"""

import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dit_graph import breaks
from dit_graph.capture.frames import source_line
from dit_graph.capture.kinds import Kind
from dit_graph.errors import CaptureError
from dit_graph.tape.guards import plain
from dit_graph.tape.trees import tensors_of

Places = list[tuple[MutableMapping[str, Any], str]]
Changes = list[tuple[MutableMapping[str, Any], str, Any]]
COMPILED = "compiled code"  # `no_segment_takes` says this of it.
_ABSENT = object()


def compiled(fn: Any) -> bool:
    """Tell whether a call of it enters what torch.compile made, or a higher-order operator."""
    if not callable(fn) or isinstance(fn, (type, torch.nn.Module)):
        return False
    if "_torchdynamo_orig_callable" in getattr(fn, "__dict__", ()):
        return (
            getattr(fn, "__code__", None) is not None and fn.__code__.co_name == "compile_wrapper"
        )
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    return flex is not None and fn is flex.flex_attention


def compiled_places(module: torch.nn.Module) -> Places:
    """List where the model's code finds compiled callables, as pairs (namespace, name)."""
    found: Places = []
    seen: set[int] = set()
    for path, child in module.named_modules():
        own = child.__dict__
        if path and own.get("_compiled_call_impl") is not None:
            found.append((own, "_compiled_call_impl"))
        elif "_orig_mod" in child._modules:  # The forward of an OptimizedModule is compiled.
            found.append((own, "forward"))
        spaces = [own, *_namespaces(type(child).forward)]
        for value in own.values():
            if isinstance(value, FunctionType):
                spaces += _namespaces(value)
            elif callable(value) and not isinstance(value, (type, torch.nn.Module)):
                spaces += _namespaces(type(value).__call__)
        for space in spaces:
            if id(space) not in seen:
                seen.add(id(space))
                found += [(space, n) for n, v in list(space.items()) if compiled(v)]
    return found


def _namespaces(fn: Any) -> Iterator[MutableMapping[str, Any]]:
    """Yield the globals and the closure of a function and of what it wraps."""
    while fn is not None:
        if isinstance(fn, FunctionType):
            yield fn.__globals__
            if fn.__closure__:
                yield _Closure(fn)
        fn = getattr(fn, "__wrapped__", None)


class _Closure(dict[str, Any]):
    """Presents the closure of a function as a namespace; to assign to it changes the cell."""

    def __init__(self, fn: FunctionType) -> None:
        self._cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or ()))
        filled = {}
        for name, cell in self._cells.items():
            try:
                filled[name] = cell.cell_contents
            except ValueError:  # The variable is not assigned yet.
                continue
        super().__init__(filled)

    def __setitem__(self, name: str, value: Any) -> None:
        self._cells[name].cell_contents = value
        super().__setitem__(name, value)


def opaque(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Make `fn` one operation where it is recorded."""

    def call(*args: Any, **kwargs: Any) -> Any:
        capture = breaks.local.capture
        if capture is None:  # It is another thread, or a replayed break.
            return fn(*args, **kwargs)
        return call_opaque(capture, fn, args, kwargs)

    return call


def call_opaque(capture: Any, fn: Any, args: Any, kwargs: Any) -> Any:
    """Call compiled code as one operation that nobody sees: in a segment, or inside a break."""
    args, kwargs = pytree.tree_map(plain, (args, kwargs))
    known = capture.known
    if capture.in_break:
        with _as_in_eager(capture):
            out = fn(*args, **kwargs)
        for t in tensors_of(out):
            if known.kind(t) is None:
                known.mark(t, Kind.BREAK)
        return out
    constants = [t for t in tensors_of((args, kwargs)) if known.is_constant(t)]
    if any(t.is_inference() for t in constants):
        raise CaptureError(
            f"compiled code is given a constant under torch.inference_mode at {source_line()},"
            " where a write into it cannot be seen; use torch.no_grad()"
        )
    versions = [t._version for t in constants]
    with _as_in_eager(capture):
        try:
            out = capture.in_segment(fn, args, kwargs)
        except Exception:
            if capture.no_segment_takes is not None and capture.no_segment_takes[0] is fn:
                capture.no_segment_takes = COMPILED + _hint(), capture.no_segment_takes[1]
            raise
    if [t._version for t in constants] != versions:
        raise CaptureError(f"compiled code writes into a constant at {source_line()}")
    capture.effects.may_draw = True
    return out


def _hint() -> str:
    if not torch.is_inference_mode_enabled():
        return ""
    return " (torch.inference_mode may have it compiled again; try torch.no_grad())"


@contextmanager
def _as_in_eager(capture: Any) -> Iterator[None]:
    """Put the model back as it was compiled; dynamo compares what a capture changes."""
    with capture.watch.aside(), put_in_place(capture.originals):
        yield


def originals(changes: Changes) -> Changes:
    """List what is there now in place of each change."""
    return [(space, name, space.get(name, _ABSENT)) for space, name, _ in changes]


@contextmanager
def put_in_place(changes: Changes) -> Iterator[None]:
    """Make the assignments (namespace, name, value) for a while, and put back what was there."""
    before = originals(changes)
    _assign(changes)
    try:
        yield
    finally:
        _assign(before[::-1])


def _assign(changes: Changes) -> None:
    for space, name, value in changes:
        if value is _ABSENT:
            space.pop(name, None)
        else:
            space[name] = value


def no_hidden_compiled_code() -> Changes:
    """List what raises CaptureError where a compiled function is met that was not found."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return []
    enter = dynamo.set_eval_frame

    def refuse(callback: Any) -> Any:
        caller = sys._getframe(1).f_code.co_name
        if caller == "compile_wrapper" and _watching():
            raise CaptureError("a compiled function is called that could not be found beforehand")
        return enter(callback)

    return [(vars(dynamo), "set_eval_frame", refuse)]


def no_seeding() -> Changes:
    """List what raises CaptureError where the forward sets a default generator.

    A replay would not set it.

    `host_generators` (`tape/guards.py`) cannot see all of this. It compares Python's and numpy's
    generators and torch's seeds before and after a cold call. torch's default generators move in
    any call that draws, so where they stand says nothing, and a forward that seeds with the same
    number each time, or puts a state back, leaves no trace. Python and numpy in turn draw by
    methods of built-in objects, which cannot be replaced as is done here.
    """
    spaces = (vars(torch), vars(torch.random), vars(torch.cuda), vars(torch.cuda.random))
    found = [(space, name) for space in spaces for name in ("manual_seed", "set_rng_state")]
    return [(space, name, _refusing(space[name])) for space, name in found if name in space]


def unwatched() -> Changes:
    """List what makes torch's modules and contexts do in a capture what they do without one.

    Some layers leave their fused path where a function mode is on, as a watcher is one. A context
    of autocast that was made before the call, such as a decorator, switches the cache on again.
    """
    asks, caches = torch.overrides.has_torch_function, torch.set_autocast_cache_enabled

    def has_torch_function(tensors: Any) -> bool:
        by_layer = sys._getframe(1).f_globals["__name__"].startswith("torch.nn.modules.")
        if not (by_layer and _watching()):
            return asks(tensors)
        with torch.overrides._pop_mode_temporarily():
            return asks(tensors)

    def set_autocast_cache_enabled(enabled: bool) -> None:
        if not _watching():
            caches(enabled)

    return [
        (vars(torch.overrides), "has_torch_function", has_torch_function),
        (vars(torch), "set_autocast_cache_enabled", set_autocast_cache_enabled),
    ]


def _watching() -> bool:
    """Tell whether this thread runs a forward that is being recorded."""
    capture = breaks.local.capture
    return capture is not None and not capture.watch.off


def _refusing(seed: Any) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if _watching():  # dynamo itself does so too, while it compiles.
            raise CaptureError("the forward seeds a generator or puts its state back")
        return seed(*args, **kwargs)

    return refuse
