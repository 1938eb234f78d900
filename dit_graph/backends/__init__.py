"""Finds a backend by its name."""

from dit_graph.backends.base import Backend
from dit_graph.backends.breakable import Breakable
from dit_graph.backends.debug import Debug
from dit_graph.backends.eager import Eager
from dit_graph.backends.full import Full
from dit_graph.errors import ConfigError

_BACKENDS: dict[str, type[Backend]] = {b.name: b for b in (Breakable, Full, Debug, Eager)}


def backend_named(name: str) -> Backend:
    if name not in _BACKENDS:
        raise ConfigError(f"unknown backend {name!r}; known: {', '.join(_BACKENDS)}")
    return _BACKENDS[name]()
