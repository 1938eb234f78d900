"""Where two descriptions of one thing differ."""

from collections.abc import Iterator
from typing import Any

from dit_graph.state.places import step_name

TABLES = ("_parameters", "_buffers", "_modules")
"""Attributes of a module that are left out in the names of what lies in them."""


def differences(old: Any, new: Any, path: str) -> Iterator[tuple[str, bool]]:
    """Where two descriptions of one thing differ, by the names that its parts have, and whether
    there a dict that may be a memo table got a new key."""
    if old == new:
        return
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            name = key[1] if isinstance(key, tuple) else str(key).removeprefix("slot ")
            at = path if key in TABLES else f"{path}{step_name(name)}"
            if key in old and key in new:
                yield from differences(old[key], new[key], at)
            else:
                yield at, False
    elif type(old) not in (tuple, list) or type(old) is not type(new) or len(old) != len(new):
        yield path, False
    elif old[:2] == new[:2] and old[0] == "dict" and new[3] is None:
        grown = new[2].keys() - old[2].keys()
        yield from ((f"{path}{step_name(key[1])}", True) for key in grown)
        rest = {key: value for key, value in new[2].items() if key not in grown}
        yield from differences(old[2], rest, path)
    else:
        for i, (a, b) in enumerate(zip(old, new)):
            step = f"[{i}]" if isinstance(old, list) else ""
            if isinstance(a, (dict, tuple, list)):
                yield from differences(a, b, f"{path}{step}")
            elif a != b:
                yield f"{path}{step}", False
