"""Marked breaks: places in model code that stay eager inside a recording.

Outside a capture everything here is a plain call. What a break needs to know of the current call it
reads from `current_call()`, which the runner sets for every call, cold, captured or replayed.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeVar, overload

import torch

P = ParamSpec("P")
R = TypeVar("R")


class ActiveCapture(Protocol):
    """What a capture offers to marked breaks; the capture itself is never imported here."""

    in_break: bool
    watch: Any

    def marked(
        self, fn: Callable[..., Any], args: Any, kwargs: Any, *, pure: bool, reason: str
    ) -> Any: ...

    def split(self) -> None: ...


@dataclass(frozen=True)
class CurrentCall:
    """The call that runs now: its arguments by parameter name, as the caller passed them."""

    arguments: Mapping[str, Any]


class _Local(threading.local):
    capture: ActiveCapture | None = None
    call: CurrentCall | None = None
    cold = False


local = _Local()


def capturing() -> bool:
    """Whether a forward is being recorded on this thread."""
    return local.capture is not None


@contextmanager
def warming() -> Iterator[None]:
    """Around a call that is about to be recorded: a graphed module inside stays out of the way."""
    before, local.cold = local.cold, True
    try:
        yield
    finally:
        local.cold = before


def current_call() -> CurrentCall:
    """The call that runs now on this thread. Raises LookupError outside a graphed forward."""
    if local.call is None:
        raise LookupError("current_call() is only known inside the forward of a graphed module")
    return local.call


@contextmanager
def answering(arguments: Mapping[str, Any]) -> Iterator[None]:
    """Make `arguments` what `current_call()` gives; used by the runner."""
    before, local.call = local.call, CurrentCall(arguments)
    try:
        yield
    finally:
        local.call = before


@overload
def eager_on_graph(fn: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def eager_on_graph(
    *, pure: bool = False, reason: str | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def eager_on_graph(fn: Any = None, /, *, pure: bool = False, reason: str | None = None) -> Any:
    """Keep a function eager when the forward around it is recorded.

    Its results are tensors and plain values in any nesting. They must keep structure, shapes,
    strides, dtypes and values from call to call; a change is `BreakResultChanged`, and then a
    function with side effects runs twice in that call. Non-tensor arguments are handed over as they
    were at capture: state that changes between calls is read from `current_call()`. The memory of
    tensor arguments is the recording's, which writes it anew and frees it: clone what is kept. A
    replay runs the function under the caller's modes (autocast and the like); a forward that sets
    others around it is eager. Inside compiled code it is a plain function and compiled with
    the rest. Usable bare or with options.

    Args:
        pure: the function has no side effect, so a replay may run it a second time.
        reason: what `report()` says of this break; the function's name by default.
    """

    def decorate(inner: Callable[P, R]) -> Callable[P, R]:
        why = reason or f"marked break {getattr(inner, '__qualname__', type(inner).__name__)}"

        @functools.wraps(inner)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch.compiler.is_dynamo_compiling():  # It must not guard on whether one captures.
                return inner(*args, **kwargs)
            capture = local.capture
            if capture is None or capture.in_break:
                return inner(*args, **kwargs)
            result: R = capture.marked(inner, args, kwargs, pure=pure, reason=why)
            return result

        return call

    if fn is not None and not callable(fn):
        raise TypeError(f"eager_on_graph takes a function, or pure and reason; got {fn!r}")
    return decorate if fn is None else decorate(fn)


def break_graph() -> None:
    """End the current segment and begin another.

    Does nothing outside a capture, inside a break or compiled code, and with a backend that records
    one graph.
    """
    if torch.compiler.is_dynamo_compiling():
        return
    if local.capture is not None and not local.capture.in_break:
        local.capture.split()
