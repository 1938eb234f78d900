"""The containers that Python state lies in: what they held, what differs, how to put it back."""

import types
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dit_graph.state.libraries import HOOKS, imported

REMOVED = object()
_ADDED = {"_class_name", "_diffusers_version", "__slotnames__"}  # by saving a config, by copying


@dataclass(eq=False, slots=True)
class Place:
    """One container with what it held.

    `plain` for a dict that may be a memo table, `ordered` for one whose order is state: submodules.
    """

    path: str
    container: Any
    before: Any
    plain: bool = False
    ordered: bool = False

    def differences(self) -> Iterator[tuple[str, Any, Any]]:
        """(name, key, value now) for each; the key `REMOVED` where there is none to name."""
        now, before = read_container(self.container), self.before
        if isinstance(now, (dict, types.MappingProxyType)):
            return _dict_differences(now, before, self.ordered)
        if isinstance(now, (list, deque)):
            return _list_differences(now, before)
        same = _same_array(now, before) if isinstance(now, np.ndarray) else now == before
        return iter(() if same else (("", REMOVED, None),))

    def restore(self) -> None:
        container, before = self.container, self.before
        if isinstance(container, (list, deque)):
            container.clear()
            container.extend(before)
        elif isinstance(container, (dict, set)):
            container.clear()
            container.update(before)
        elif isinstance(container, np.ndarray):
            if container.shape == before.shape:
                np.copyto(container, before)
        else:
            container.restore(before)


class Attributes:
    """Attributes that no writable dict holds."""

    def read(self) -> Any:
        raise NotImplementedError

    def __setitem__(self, name: str, value: Any) -> None:
        raise NotImplementedError

    def __delitem__(self, name: str) -> None:
        raise NotImplementedError

    def restore(self, before: dict[str, Any]) -> None:
        now = dict(self.read())
        for name in now.keys() - before.keys():
            if not name.startswith("__"):
                del self[name]
        for name, value in before.items():
            if now.get(name, REMOVED) is not value:
                self[name] = value


class ClassAttributes(Attributes):
    def __init__(self, cls: type) -> None:
        self._cls = cls

    def read(self) -> Any:
        return vars(self._cls)

    def __setitem__(self, name: str, value: Any) -> None:
        type.__setattr__(self._cls, name, value)

    def __delitem__(self, name: str) -> None:
        type.__delattr__(self._cls, name)


class SlotAttributes(Attributes):
    """The `__slots__` of one object, those that are set."""

    def __init__(self, owner: Any, members: dict[str, Any]) -> None:
        self._owner, self._members = owner, members

    def read(self) -> dict[str, Any]:
        found = {}
        for name, member in self._members.items():
            try:
                found[name] = member.__get__(self._owner)
            except AttributeError:
                continue
        return found

    def __setitem__(self, name: str, value: Any) -> None:
        self._members[name].__set__(self._owner, value)

    def __delitem__(self, name: str) -> None:
        self._members[name].__delete__(self._owner)


def read_container(container: Any) -> Any:
    return container.read() if isinstance(container, Attributes) else container


def step_name(key: Any) -> str:
    return f".{key}" if isinstance(key, str) else f"[{key!r}]"


def _dict_differences(
    now: Any, before: dict[Any, Any], ordered: bool
) -> Iterator[tuple[str, Any, Any]]:
    for key, value in now.items():
        if not (_unchanged(value, before[key]) if key in before else _idle(key, value)):
            yield step_name(key), key, value
    if any(key not in now for key in before):
        yield " (something was removed)", REMOVED, None
    elif ordered and [key for key in now if key in before] != list(before):
        yield " (its order)", REMOVED, None


def _list_differences(now: Any, before: Any) -> Iterator[tuple[str, Any, Any]]:
    for i, value in enumerate(now):
        if i >= len(before) or not _unchanged(value, before[i]):
            yield f"[{i}]", i, value
    if len(now) < len(before):
        yield " (something was removed)", REMOVED, None


def _same_array(now: Any, before: Any) -> bool:
    alike = now.dtype == before.dtype and now.shape == before.shape
    return bool(alike and now.tobytes() == before.tobytes())


def _idle(key: Any, value: Any) -> bool:
    """Whether a new member changes nothing that a forward does.

    Libraries add some when they only look for them or save a model: an empty hook registry, a
    class's annotations, the names that a config is saved with.
    """
    if isinstance(value, imported(HOOKS)):
        return not value.hooks
    return isinstance(key, str) and (key.startswith("__annot") or key in _ADDED)


def _unchanged(now: Any, before: Any) -> bool:
    if now is before:
        return True
    if type(now) is not type(before):
        return False
    if isinstance(now, tuple):
        return len(now) == len(before) and all(map(_unchanged, now, before))
    if isinstance(now, types.MethodType):
        return now.__self__ is before.__self__ and now.__func__ is before.__func__
    if isinstance(now, np.generic):
        return _same_array(now, before)
    if isinstance(now, (float, complex)):
        return repr(now) == repr(before)  # -0.0 is not 0.0, nan is nan
    plain = (bool, int, str, bytes, torch.dtype, torch.device, torch.Size)
    return isinstance(now, plain) and now == before
