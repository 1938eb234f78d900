"""Segments with eager breaks between them: the default."""

import fnmatch
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dit_graph.backends.base import Backend
from dit_graph.breaks import eager_on_graph
from dit_graph.capture import Capture
from dit_graph.config import GraphConfig
from dit_graph.watch import compiled


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


@contextmanager
def prepared(
    module: torch.nn.Module, capture: Capture, patterns: tuple[str, ...]
) -> Iterator[None]:
    """For one capture: submodules that match a pattern are breaks, compiled ones are opaque."""
    changed: list[tuple[dict[str, Any], str, Any]] = []

    def put(owner: torch.nn.Module, name: str, value: Any) -> None:
        changed.append((owner.__dict__, name, owner.__dict__.get(name)))
        owner.__dict__[name] = value

    for path, child in module.named_modules():
        pattern = next((p for p in patterns if path and fnmatch.fnmatchcase(path, p)), None)
        if pattern is not None:
            put(child, "forward", eager_on_graph(reason=f"{path} ({pattern!r})")(child.forward))
        elif path and child.__dict__.get("_compiled_call_impl") is not None:
            put(child, "_compiled_call_impl", _opaque(capture, child._compiled_call_impl))
        elif hasattr(child, "_orig_mod"):
            put(child, "forward", _opaque(capture, child.forward))
        for name, value in list(child.__dict__.items()):
            if name != "forward" and callable(value) and compiled(value):
                put(child, name, _opaque(capture, value))
    try:
        yield
    finally:
        for owner, name, before in reversed(changed):
            if before is None:
                owner.pop(name, None)
            else:
                owner[name] = before


def _opaque(capture: Capture, fn: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs) if capture.in_break else capture.opaque(fn, args, kwargs)

    return call
