"""The Python state and the weights that a recording stands on: read, compared, put back.

A `Fingerprint` is a flat list of containers with what they held, and of tensors with their
addresses. It is compared by identity, then by value, and never hashed.
"""

import types
from collections.abc import Iterable, Iterator, KeysView
from itertools import chain
from operator import is_
from typing import Any, cast

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dit_graph.state.places import REMOVED, ClassAttributes, Place, SlotAttributes
from dit_graph.state.walk import Walk
from dit_graph.tape.guards import DeviceNumber

_STORAGE = "storage of a parameter, buffer or tensor attribute"
_GRAD = "requires_grad of a parameter, buffer or tensor attribute"


class Fingerprint:
    """What a module holds now: every plain attribute, list, dict and helper object, by place.

    Reads through submodules, attention processors, hook registries and their states, partials and
    bound methods, and through the classes of these that are no library's; of a library's classes it
    knows `forward` and `__call__`. Functions and globals are taken by identity and not looked into.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        walk = Walk(module)
        self.outgrown = False  # members have come that are no state; reading anew would know them
        self.blocker = walk.blocker  # what is held but can be neither compared nor put back
        self._places = walk.places
        self._tensors = walk.tensors
        self._plain_tensors = [t for t in walk.tensors if _has_address(t)]
        self._wrappers = [t for t in walk.tensors if is_traceable_wrapper_subclass(t)]
        self._other_tensors = [t for t in walk.tensors if not _has_address(t)]
        self._addresses = self._now()
        self._paths = [path for path, _ in walk.objects]
        self._objects = [value for _, value in walk.objects]
        self._classes = list(map(type, self._objects))
        self._methods = walk.methods
        self._functions = list(self._methods_now())
        self._flatten()

    def _flatten(self) -> None:
        """All that is compared by identity in one list: a thousand submodules have many dicts."""
        self._empty: list[Any] = []
        self._listed: list[Any] = []  # lists and the like, whose length is compared by itself
        self._dicts: list[KeysView[Any]] = []
        self._values: list[Iterable[Any]] = []  # views, so they show what is there when read
        self._rest: list[Place] = []
        for place in self._places:
            held = (
                place.container.read()
                if type(place.container) is ClassAttributes
                else place.container
            )
            if isinstance(held, (SlotAttributes, np.ndarray)) or (isinstance(held, set) and held):
                self._rest.append(place)
            elif not held:
                self._empty.append(held)
            elif isinstance(held, dict):  # an OrderedDict's own views are slow
                self._dicts.append(dict.keys(held))
                self._values.append(dict.values(held))
            elif isinstance(held, types.MappingProxyType):
                self._dicts.append(held.keys())
                self._values.append(held.values())
            else:
                self._listed.append(held)
                self._values.append(held)
        self._sizes = list(map(len, self._listed))
        self._keys = list(chain.from_iterable(self._dicts))
        self._held = list(chain.from_iterable(self._values))

    def _methods_now(self) -> Iterator[Any]:
        return (_found(cls, name) for cls, name in self._methods)

    def _classes_stayed(self) -> bool:
        return all(map(is_, map(type, self._objects), self._classes)) and all(
            map(is_, self._methods_now(), self._functions)
        )

    def _class_changes(self) -> Iterator[str]:
        """Objects of another class now, and classes with another `forward` or `__call__`."""
        for path, value, cls in zip(self._paths, self._objects, self._classes):
            if type(value) is not cls:
                yield f"{path}.__class__".lstrip(".")
        for (cls, name), now, before in zip(self._methods, self._methods_now(), self._functions):
            if now is not before:
                yield f"{cls.__name__}.{name}"

    def _grew(self) -> bool:
        """Whether a dict has more keys than before."""
        return any(self._empty) or sum(map(len, self._dicts)) > len(self._keys)

    def _sizes_stayed(self) -> bool:
        """Whether every container has as many members as before, and every dict its keys."""
        return (
            not any(self._empty)
            and list(map(len, self._listed)) == self._sizes
            and list(chain.from_iterable(self._dicts)) == self._keys
        )

    def _identical(self) -> bool:
        return (
            self._sizes_stayed()
            and all(map(is_, chain.from_iterable(self._values), self._held))
            and self._classes_stayed()
            and not any(next(place.differences(), None) for place in self._rest)
            and self._now() == self._addresses
        )

    def _now(self) -> list[tuple[Any, ...]]:
        with torch._C.DisableTorchFunctionSubclass():
            plain = [*self._plain_tensors, *chain.from_iterable(map(_wrapped, self._wrappers))]
            return self._facts(plain)

    def _facts(self, plain: list[torch.Tensor]) -> list[tuple[Any, ...]]:
        return [
            tuple(map(torch.Tensor.data_ptr, plain)),
            tuple(map(torch.Tensor.size, plain)),
            tuple(map(torch.Tensor.stride, plain)),
            tuple(t.dtype for t in plain),
            tuple(map(id, self._other_tensors)),
            tuple(t.requires_grad for t in self._tensors),
        ]

    def _tensor_change(self) -> str | None:
        now = self._now()
        if now == self._addresses:
            return None
        return _GRAD if now[:-1] == self._addresses[:-1] else _STORAGE

    def first_change(self) -> str | None:
        """Where the state differs now, or None."""
        if self._identical():
            return None
        for place in self._places:
            if change := next(place.differences(), None):
                return f"{place.path}{change[0]}".lstrip(".") or "a parameter"
        if of_class := next(self._class_changes(), None):
            return of_class
        change_of_tensor = self._tensor_change()
        if change_of_tensor is None:
            self.outgrown = self._grew()
            if not self.outgrown:
                self._flatten()  # other objects of the same value, another order: known from now on
        return change_of_tensor

    def _differences(self) -> list[tuple[Place, str, Any, Any]]:
        """Each member of a container that differs now: where, its name, its key, its value."""
        if self._identical():
            return []
        return [(place, *change) for place in self._places for change in place.differences()]

    def changes(self) -> list[str]:
        """All places that differ; a stand-in left in the state becomes its number."""
        found = []
        for place, name, key, value in self._differences():
            found.append(f"{place.path}{name}".lstrip("."))
            if type(value) is DeviceNumber:
                place.container[key] = value.value
        found += self._class_changes()
        if change := self._tensor_change():
            found.append(change)
        return found

    def only_grew(self) -> bool:
        """Whether all that differs is a new key in a plain dict: a memo table, as a rule."""
        grew = all(
            place.plain and key is not REMOVED and key not in place.before
            for place, _, key, _ in self._differences()
        )
        return grew and self._classes_stayed() and self._tensor_change() is None

    def restore(self) -> None:
        """Put every container back as it was."""
        for place in dict.fromkeys(place for place, *_ in self._differences()):
            place.restore()
        for value, cls in zip(self._objects, self._classes):
            if type(value) is not cls:
                value.__class__ = cls


def _found(cls: type, name: str) -> Any:
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)


def _has_address(t: torch.Tensor) -> bool:
    """A wrapper has none of its own; sparse and the like are compared by identity."""
    return t.layout is torch.strided and not is_traceable_wrapper_subclass(t)


def _wrapped(t: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that a quantized or other wrapper keeps its data in, which kernels read."""
    for name in cast(Any, t).__tensor_flatten__()[0]:
        inner: Any = getattr(t, name)
        if is_traceable_wrapper_subclass(inner):
            yield from _wrapped(cast(torch.Tensor, inner))
        elif isinstance(inner, torch.Tensor) and inner.layout is torch.strided:  # or a device mesh
            yield inner
