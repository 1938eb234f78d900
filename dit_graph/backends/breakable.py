"""Segments with eager breaks between them: the default."""

import fnmatch
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch

from dit_graph.backends.base import Backend
from dit_graph.breaks import eager_on_graph, local
from dit_graph.capture import Capture
from dit_graph.config import GraphConfig
from dit_graph.opaque import (
    call_opaque,
    compiled_places,
    no_hidden_compiled_code,
    no_seeding,
    put_in_place,
)


class Breakable(Backend):
    name = "breakable"

    def record(
        self,
        capture: Capture,
        module: torch.nn.Module,
        forward: Callable[..., Any],
        args: list[Any],
        kwargs: dict[str, Any],
        config: GraphConfig,
    ) -> Any:
        with prepared(module, capture, config.breaks), capture.recording():
            return forward(*args, **kwargs)


_CAPTURING = threading.Lock()  # what is put in place for a capture is seen by every thread


@contextmanager
def prepared(
    module: torch.nn.Module, capture: Capture, patterns: tuple[str, ...]
) -> Iterator[None]:
    """For one capture: submodules that match a pattern are breaks, compiled code is opaque."""
    with _CAPTURING:
        yield from _prepared(module, capture, patterns)


def _prepared(
    module: torch.nn.Module, capture: Capture, patterns: tuple[str, ...]
) -> Iterator[None]:
    changes: list[tuple[MutableMapping[str, Any], str, Any]] = [
        (space, name, _opaque(capture, space[name])) for space, name in compiled_places(module)
    ]
    for path, child in module.named_modules():
        pattern = next((p for p in patterns if path and fnmatch.fnmatchcase(path, p)), None)
        if pattern is not None:
            capture.matched.add(pattern)
            # pure: cold calls and the gate run this forward whole, side effects included
            stays_eager = eager_on_graph(pure=True, reason=f"{path} ({pattern!r})")(child.forward)
            changes.append((child.__dict__, "forward", stays_eager))
    with put_in_place(changes), no_hidden_compiled_code(), no_seeding():
        yield


def _opaque(capture: Capture, fn: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if local.capture is not capture:  # another thread
            return fn(*args, **kwargs)
        return call_opaque(capture, fn, args, kwargs)

    return call
