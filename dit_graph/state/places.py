"""The containers that Python state lies in: what they held, what differs, how to put it back."""

import types
from collections import deque
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy as np

from dit_graph.slot import Copying

_UNSET = object()
_ADDED = {"_class_name", "_diffusers_version", "__slotnames__"}  # by saving a config, by copying


@dataclass(eq=False, slots=True)
class Place:
    """One container, and what it held when it was `noted`.

    `plain` for a dict that may be a memo table, `ordered` for one whose order is state: submodules.
    """

    path: str
    container: Any
    plain: bool = False
    ordered: bool = False
    before: Any = None

    def noted(self) -> "Place":
        """The same place with a copy of what it holds now."""
        now = read_container(self.container)
        before = dict(now) if isinstance(now, (dict, types.MappingProxyType)) else now.copy()
        return Place(self.path, self.container, self.plain, self.ordered, before)

    def stayed(self) -> bool:
        """Whether it holds the very objects that it held."""
        now, before = read_container(self.container), self.before
        if isinstance(now, np.ndarray):
            return same_array(now, before)
        if len(now) != len(before):
            return False
        if isinstance(now, (dict, types.MappingProxyType)):
            return all(map(is_, now, before)) and all(map(is_, now.values(), before.values()))
        return all(map(is_, now, before))

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
            if now.get(name, _UNSET) is not value:
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


def same_array(now: Any, before: Any) -> bool:
    alike = now.dtype == before.dtype and now.shape == before.shape
    return bool(alike and now.tobytes() == before.tobytes())


def is_idle(key: Any, value: Any) -> bool:
    """Whether a new member changes nothing that a forward does.

    Libraries add some when they only look for them or save a model: an empty hook registry, a
    class's annotations, the names that a config is saved with. So do slots, of ours.
    """
    if key == "_diffusers_hook":
        return not getattr(value, "hooks", True)
    if type(value) is Copying:
        return True
    return isinstance(key, str) and (key.startswith("__annot") or key in _ADDED)
