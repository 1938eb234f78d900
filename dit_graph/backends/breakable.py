"""The default backend records segments with eager breaks between them."""

import fnmatch
import threading
from collections.abc import Callable
from typing import Any

from dit_graph.backends.base import Backend
from dit_graph.breaks import eager_on_graph, local
from dit_graph.capture.capture import Capture
from dit_graph.capture.compiled import (
    Changes,
    compiled_places,
    no_hidden_compiled_code,
    no_seeding,
    opaque,
    originals,
    put_in_place,
    unwatched,
)


class Breakable(Backend):
    name = "breakable"

    def record(self, capture: Capture, forward: Callable[[], Any]) -> Any:
        with _CAPTURING:
            changes = [*_changes(capture), *unwatched(), *no_hidden_compiled_code(), *no_seeding()]
            capture.originals = originals(changes)
            with put_in_place(changes), capture.watching():
                return forward()


_CAPTURING = threading.Lock()  # Every thread sees what a capture puts in place.


def _changes(capture: Capture) -> Changes:
    """List what makes compiled code opaque, and breaks of submodules that match a pattern."""
    changes = {(id(s), n): (s, n, opaque(s[n])) for s, n in compiled_places(capture.module)}
    for path, child in capture.submodules.items():
        patterns = capture.patterns if child is not capture.module else ()
        pattern = next((p for p in patterns if fnmatch.fnmatchcase(path, p)), None)
        if pattern is not None:
            own = child.__dict__
            keys = [(id(own), name) for name in ("_compiled_call_impl", "forward")]
            whole = (own, "forward", child.forward)
            space, name, call = next((changes[key] for key in keys if key in changes), whole)
            changes[id(space), name] = space, name, _break(capture, path, pattern, call)
    return list(changes.values())


def _break(capture: Capture, path: str, pattern: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    # It is pure: cold calls and the gate run this forward whole, side effects included.
    stays_eager = eager_on_graph(pure=True, reason=f"{path} ({pattern!r})")(fn)
    capture.placed.add(pattern)

    def call(*args: Any, **kwargs: Any) -> Any:
        if local.capture is capture:
            capture.matched.add(pattern)
        return stays_eager(*args, **kwargs)

    return call
